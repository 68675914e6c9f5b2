"""The model store against a stand-in index and hub: what is asked for arrives whole, or it says why not."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from server import model_store, wheel_download
from server.model_store import ModelStoreError
from server.packaged_models import PACKAGED_MODELS
from tests.server.local_index import FakeModel, LocalServer, build_model, running_server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def index() -> Iterator[LocalServer]:
    with running_server() as local:
        yield local


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = build_model()
    monkeypatch.setattr(model_store, "PACKAGED_MODELS", {"fake": fake.model})
    return fake


def files_under(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.parametrize("page", ["json", "html"])
def test_pull_over_http_joins_the_parts_and_keeps_the_notices(
    page: str, index: LocalServer, fake: FakeModel, tmp_path: Path
) -> None:
    fake.publish(index, page)
    progress: list[tuple[str, int, int | None]] = []
    path = model_store.pull("fake", tmp_path, lambda *event: progress.append(event), index_url=f"{index.url}/simple")
    assert path == tmp_path / "models" / "fake" / "f.gguf"
    assert path.read_bytes() == fake.content
    assert files_under(tmp_path) == {"models/fake/f.gguf", "models/fake/TERMS.html"}
    assert ("extracting f.gguf", len(fake.content), len(fake.content)) in progress
    assert {stage for stage, done, total in progress if done == total} == {
        *(f"downloading {wheel.project}" for wheel, _ in fake.wheels.values()),
        "extracting f.gguf",
    }
    num_requests = len(index.requests)
    assert model_store.resolve("fake", tmp_path) == path
    assert model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple") == path
    assert len(index.requests) == num_requests  # neither asks the index again


def test_pull_replaces_a_damaged_copy(index: LocalServer, fake: FakeModel, tmp_path: Path) -> None:
    fake.publish(index)
    path = model_store.packaged_model_path(fake.model, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF" + bytes(len(fake.content) - 4))
    assert model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple").read_bytes() == fake.content


def test_a_model_that_was_installed_with_the_server_is_not_downloaded(
    index: LocalServer, fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    installed = model_store.packaged_model_path(fake.model, model_store.installed_home())
    assert installed.is_relative_to(tmp_path / "prefix")
    installed.parent.mkdir(parents=True)
    installed.write_bytes(fake.content)
    assert model_store.resolve("fake", tmp_path / "home") == installed
    assert files_under(tmp_path / "home") == set()  # a read-only file system is no obstacle
    fake.publish(index)
    own = model_store.pull("fake", tmp_path / "home", index_url=f"{index.url}/simple")
    assert model_store.resolve("fake", tmp_path / "home") == own  # the cache folder goes first


def break_off_after(data: bytes, num_bytes: int) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:num_bytes])
        handler.close_connection = True

    return answer


def test_a_broken_connection_leaves_nothing_and_the_next_pull_succeeds(
    index: LocalServer, fake: FakeModel, tmp_path: Path
) -> None:
    fake.publish(index)
    file_name = list(fake.wheels)[1]
    whole = index.routes[f"/files/{file_name}"]
    index.routes[f"/files/{file_name}"] = break_off_after(fake.wheels[file_name][1], 100_000)
    with pytest.raises(ModelStoreError, match=r"fake-part2==1\.0 could not be downloaded .* try again\.$"):
        model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple")
    assert files_under(tmp_path) == set()
    index.routes[f"/files/{file_name}"] = whole
    assert model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple").read_bytes() == fake.content


@pytest.mark.parametrize("damage", ["flipped", "too long", "empty"])
def test_a_wheel_with_the_wrong_digest_is_thrown_away(
    damage: str, index: LocalServer, fake: FakeModel, tmp_path: Path
) -> None:
    fake.publish(index)
    file_name, (_, data) = next(iter(fake.wheels.items()))
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    index.add(f"/files/{file_name}", {"flipped": flipped, "too long": data + bytes(10**6), "empty": b""}[damage])
    progress: list[tuple[str, int, int | None]] = []
    with pytest.raises(ModelStoreError, match="is not the published file"):
        model_store.pull("fake", tmp_path, lambda *event: progress.append(event), index_url=f"{index.url}/simple")
    assert all(total is not None and done <= total for _, done, total in progress)  # it cannot fill the disk
    assert files_under(tmp_path) == set()


def test_a_model_with_the_wrong_digest_is_thrown_away(
    index: LocalServer, fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.publish(index)
    swapped = dataclasses.replace(fake.model, parts=fake.model.parts[::-1])
    monkeypatch.setattr(model_store, "PACKAGED_MODELS", {"fake": swapped})
    with pytest.raises(ModelStoreError, match=r"extracted f\.gguf is not the published file"):
        model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple")
    assert files_under(tmp_path) == set()


def test_index_errors_are_named(index: LocalServer, fake: FakeModel, tmp_path: Path) -> None:
    with pytest.raises(ModelStoreError, match=r"answered 404 Not Found for .*/simple/fake-part1/"):
        model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple")
    index.add("/simple/fake-part1/", b'{"files": [{"url": "a.whl"}]}', "application/vnd.pypi.simple.v1+json")
    with pytest.raises(ModelStoreError, match=r"has no file fake_part1-1\.0-py3-none-any\.whl"):
        model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple")
    index.add("/simple/fake-part1/", b"{", "application/json")
    with pytest.raises(ModelStoreError, match="not a PEP 691 page"):
        model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple")
    with pytest.raises(ModelStoreError, match=r"could not be downloaded from http://127\.0\.0\.1:1/simple"):
        model_store.pull("fake", tmp_path, index_url="http://127.0.0.1:1/simple")
    assert files_under(tmp_path) == set()


def test_without_pip_the_default_index_is_asked_over_http(
    index: LocalServer, fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.publish(index)
    monkeypatch.setattr(wheel_download.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(wheel_download, "DEFAULT_INDEX_URL", f"{index.url}/simple")
    assert model_store.resolve("fake", tmp_path).read_bytes() == fake.content


def test_pip_downloads_the_wheels_alone(fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for file_name, (_, data) in fake.wheels.items():
        (links / file_name).write_bytes(data)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    home = tmp_path / "home"
    # The wheels need a package that does not exist: fetching dependencies would fail.
    assert model_store.pull("fake", home).read_bytes() == fake.content
    assert files_under(home) == {"models/fake/f.gguf", "models/fake/TERMS.html"}


def test_a_failing_pip_is_reported(fake: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelStoreError, match=r"pip could not download fake-part1==1\.0 \(No matching distribution"):
        model_store.pull("fake", tmp_path / "home")
    assert files_under(tmp_path) == set()


def test_pulls_at_once_wait_for_each_other(index: LocalServer, fake: FakeModel, tmp_path: Path) -> None:
    fake.publish(index)
    results: list[bytes] = []

    def pull() -> None:
        results.append(model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple").read_bytes())

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [fake.content] * 4
    assert sorted(request for request in index.requests if "/files/" in request) == sorted(
        f"GET /files/{name}" for name in fake.wheels
    )


def test_a_killed_pull_leaves_no_model_and_the_next_one_cleans_up(
    index: LocalServer, fake: FakeModel, tmp_path: Path
) -> None:
    fake.publish(index)
    file_name = list(fake.wheels)[1]
    data = fake.wheels[file_name][1]
    whole = index.routes[f"/files/{file_name}"]
    stalled, release = threading.Event(), threading.Event()

    def stall(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:100_000])
        handler.wfile.flush()
        stalled.set()
        release.wait(60)
        handler.close_connection = True

    index.routes[f"/files/{file_name}"] = stall
    program = (
        "import sys; from pathlib import Path; from server import model_store; "
        "from tests.server.local_index import build_model; "
        "model_store.PACKAGED_MODELS = {'fake': build_model().model}; "
        "model_store.pull('fake', Path(sys.argv[1]), index_url=sys.argv[2])"
    )
    command = [sys.executable, "-c", program, str(tmp_path), f"{index.url}/simple"]
    process = subprocess.Popen(command, cwd=ROOT)
    assert stalled.wait(60)
    process.kill()
    process.wait()
    release.set()
    assert any(".partial-" in name for name in files_under(tmp_path))
    assert not model_store.packaged_model_path(fake.model, tmp_path).exists()
    index.routes[f"/files/{file_name}"] = whole
    assert model_store.pull("fake", tmp_path, index_url=f"{index.url}/simple").read_bytes() == fake.content
    assert files_under(tmp_path) == {"models/fake/f.gguf", "models/fake/TERMS.html"}


def test_a_cache_folder_that_cannot_be_written_is_named(fake: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(ModelStoreError, match=r"could not be written to .*OCTAVO_HOME"):
        model_store.pull("fake", tmp_path)


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(b"GGUF\x03")
    assert model_store.resolve(str(gguf)) == gguf
    assert model_store.resolve(str(tmp_path)) == gguf  # the only one in the folder
    (tmp_path / "config.json").write_text("{}")
    assert model_store.resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    nested = Path("org") / "name"
    nested.mkdir(parents=True)
    (nested / "config.json").write_text("{}")
    assert model_store.resolve("org/name") == nested  # a directory comes before the hub


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("smolm2", r"no model named smolm2; did you mean smollm2\? Known names are smollm2, gemma3-270m"),
        ("qqq", "no model named qqq; known names are smollm2"),
        ("", "is empty"),
        ("/no/such/dir", "no model at /no/such/dir; check the path"),
        ("org/name.gguf", r"no model at org/name\.gguf"),
        ("a/b/c", "no model at a/b/c"),
    ],
)
def test_an_unknown_model_is_explained(model: str, message: str) -> None:
    with pytest.raises(ModelStoreError, match=message):
        model_store.resolve(model)


def test_wrong_files_and_folders_are_explained(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelStoreError, match=r"a\.gguf is not a GGUF file"):
        model_store.resolve(str(tmp_path / "a.gguf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelStoreError, match=r"holds no config\.json and no \.gguf file"):
        model_store.resolve(str(tmp_path / "empty"))
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelStoreError, match=r"holds no config\.json and 2 \.gguf files"):
        model_store.resolve(str(tmp_path))


HUB_PROGRAM = """
import sys
from server import model_store
for model in sys.argv[1:]:
    try:
        print(model_store.resolve(model))
    except model_store.ModelStoreError as error:
        print("error:", error)
"""


def test_hub_ids_go_through_the_hub_library(index: LocalServer, tmp_path: Path) -> None:
    publish_hub_repository(index, "org/good", ["config.json", "model.safetensors", "evil.py", "onnx/config.json"])
    publish_hub_repository(index, "org/pickles", ["config.json", "pytorch_model.bin"])
    env = dict(os.environ, HF_ENDPOINT=index.url, HF_HOME=str(tmp_path), HF_HUB_DISABLE_PROGRESS_BARS="1")
    command = [sys.executable, "-c", HUB_PROGRAM, "org/good", "org/pickles", "org/absent"]
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    good, pickles, absent = output.stdout.splitlines()
    assert sorted(path.name for path in Path(good).rglob("*")) == ["config.json", "model.safetensors"]
    assert (Path(good) / "model.safetensors").read_bytes() == b"content of model.safetensors"
    assert pickles.startswith("error: The hub's org/pickles has no *.safetensors")
    assert absent.startswith("error: There is no model org/absent on the hub, or it is private")

    # With the hub out of reach the downloaded model still serves; another one gives one clear sentence.
    env["HF_ENDPOINT"] = "http://127.0.0.1:1"
    output = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    good_again, _, absent = output.stdout.splitlines()
    assert good_again == good
    assert "org/absent could not be downloaded from the hub (" in absent
    assert absent.endswith("check the network connection, or name a model that is on this machine.")


def publish_hub_repository(index: LocalServer, model: str, names: list[str]) -> None:
    """The three answers that the hub library asks for: the revision, the list of files, the files."""
    commit = hashlib.sha1(model.encode()).hexdigest()
    siblings = [{"rfilename": name} for name in names]
    info = json.dumps({"id": model, "sha": commit, "siblings": siblings}).encode()
    for path in (f"/api/models/{model}", f"/api/models/{model}/revision/main"):
        index.add(path, info, "application/json")
    tree = []
    for name in names:
        body = f"content of {name}".encode()
        oid = hashlib.sha1(body).hexdigest()
        tree.append({"type": "file", "oid": oid, "size": len(body), "path": name})
        for revision in (commit, "main"):
            index.add(f"/{model}/resolve/{revision}/{name}", body, ETag=f'"{oid}"', X_Repo_Commit=commit)
    index.add(f"/api/models/{model}/tree/{commit}", json.dumps(tree).encode(), "application/json")


def test_the_table_of_known_models_is_consistent() -> None:
    for name, model in PACKAGED_MODELS.items():
        assert name == model.name
        assert model.file_name.endswith(".gguf")
        digests = [model.sha256, *(member.wheel.sha256 for member in (*model.parts, *model.notices))]
        assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)
        assert model.notices


def test_sigterm_ends_a_download_and_cleans_up(tmp_path):
    code = (
        "import sys, tempfile, time; from server.model_store import _ending_on_sigterm\n"
        f"with _ending_on_sigterm(sys.exit), tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):\n"
        "    print('downloading', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "downloading\n"
    process.terminate()
    assert process.wait(10) == 143
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_no_file_system_takes_is_one_sentence(tmp_path):
    with pytest.raises(ModelStoreError, match="cannot be looked up"):
        model_store.resolve("a" * 5000, tmp_path)

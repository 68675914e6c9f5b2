"""The inspector's process on a tiny model, and its routes: what is answered, refused, survived, and ended in time."""

import asyncio
import json
import os
import signal
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from server.app import create_app
from server.config import Settings
from server.dashboard import inspection_process
from server.dashboard.inspection_messages import MAX_PROMPT_TOKENS, MAX_TOKENS, InspectorSetup
from server.dashboard.inspector import Inspector
from server.tokenizer import load_tokenizer
from tests.models.tiny_models import SIZES
from tests.server.doubles import FakeEngine, client_of

PATH = "/dashboard/data/inspector"
PROMPT = {"prompt": "Hello-there,attention!", "max_tokens": 5}
NUM_PROMPT_TOKENS = len(PROMPT["prompt"])  # a byte is a token


def read(picture: bytes) -> tuple[int, dict[str, np.ndarray]]:
    """As the page reads it: the number of tokens, and the tensors by name."""
    (size,) = struct.unpack_from("<I", picture)
    head = json.loads(picture[4 : 4 + size])
    start, tensors = 4 + size, {}
    assert start % 4 == 0
    for name, count in zip(head["names"], head["sizes"], strict=True):
        tensors[name] = np.frombuffer(picture, "<f2", count, start).astype(np.float32)
        start += 2 * count
    assert start == len(picture)
    return head["num_tokens"], tensors


def square(triangle: np.ndarray, size: int) -> np.ndarray:
    full = np.zeros((size, size), np.float32)
    full[np.tril_indices(size)] = triangle
    return full


def inspector_process_id(server_process_id: int) -> int | None:
    """Of the inspector that runs, which a thread of the server has started."""
    threads = Path(f"/proc/{server_process_id}/task").glob("*/children")
    for child in " ".join(thread.read_text() for thread in threads).split():
        if b"server.dashboard.inspection_process" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return None


def engine_of(path: Path) -> FakeEngine:
    engine = FakeEngine()
    sizes = {"vocab_size": SIZES["vocab_size"], "block_size": 4, "num_blocks": 32, "max_model_len": 270}
    # 32 blocks of 4 slots, 3 layers, 2 KV heads of 32 values, keys and values of 2 bytes
    engine.info = msgspec.structs.replace(engine.info, kv_cache_bytes=32 * 4 * 3 * 2 * 32 * 2 * 2, **sizes)
    return engine


def inspector_of(path: Path, **options: float) -> Inspector:
    config = Settings(model=str(path), block_size=4, home=path / "home").engine_config(path)
    return Inspector(config, **options)


class Inspected:
    """An application whose inspector looks at a tiny model."""

    def __init__(self, path: Path, *, settings: dict[str, object] | None = None, **options: float) -> None:
        self.engine = engine_of(path)
        self.inspector = inspector_of(path, **options)
        chosen = Settings(model="tiny", **(settings or {}))
        app = create_app(self.engine, load_tokenizer(path), chosen, inspector=self.inspector)
        self.client = client_of(app, timeout=60)

    async def __aenter__(self) -> "Inspected":
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.__aexit__()
        await self.inspector.stop()


async def until(condition, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def test_a_prompt_is_told_of_whole(model_path):
    async with Inspected(model_path) as app:
        limits = (await app.client.get(PATH)).json()
        assert app.inspector.process_id is None  # nobody has looked yet
        seen = (await app.client.post(PATH, json=PROMPT)).json()
        heads = [
            read((await app.client.get(f"{PATH}/{seen['id']}/head", params={"layer": 1, "head": head})).content)
            for head in (0, 1, 3)
        ]
        row = read((await app.client.get(f"{PATH}/{seen['id']}/input", params={"layer": 2, "position": 3})).content)
        nice = os.getpriority(os.PRIO_PROCESS, app.inspector.process_id)
        first_to_end = Path(f"/proc/{app.inspector.process_id}/oom_score_adj").read_text()
    assert limits == {"max_prompt_tokens": 256, "max_tokens": 32, "has_chat_template": False}
    assert (nice > os.getpriority(os.PRIO_PROCESS, 0), int(first_to_end)) == (True, 1000)

    count = NUM_PROMPT_TOKENS + 4  # the last of five tokens is not computed
    assert "".join(token["text"] for token in seen["tokens"][:NUM_PROMPT_TOKENS]) == PROMPT["prompt"]
    assert (seen["num_prompt_tokens"], len(seen["tokens"]), len(seen["layers"])) == (NUM_PROMPT_TOKENS, count + 1, 3)
    assert seen["layers"][0] == {
        "x": [count, 64],
        "w_q": [128, 64],
        "w_k": [64, 64],
        "w_v": [64, 64],
        "q": [count, 4, 32],
        "k": [count, 2, 32],
        "v": [count, 2, 32],
        "w_o": [64, 128],
        "sliding_window": None,
        "rope": 0,
    }
    assert seen["outline"]["has_norms"] and seen["outline"]["scale"] == pytest.approx(32**-0.5)
    assert len(seen["ropes"][0]["frequencies"]) == 16 and seen["ropes"][0]["frequencies"][0] == 1
    steps = seen["steps"]
    assert [step["num_tokens"] for step in steps] == [NUM_PROMPT_TOKENS, 1, 1, 1, 1]
    assert [step["candidates"][0]["id"] for step in steps] == [t["id"] for t in seen["tokens"][NUM_PROMPT_TOKENS:]]
    assert [step["num_blocks"] for step in steps] == [6, 6, 6, 7, 7]  # 22 tokens in blocks of 4, then one more each
    assert len(seen["block_ids"]) == len(set(seen["block_ids"])) == 7
    assert seen["block_ids"] != sorted(seen["block_ids"]) and max(seen["block_ids"]) < seen["num_pool_blocks"]
    assert [habit["name"] for habit in seen["habits"]] == ["first", "itself", "previous", "repeated"]
    assert all(0 < habit["share"] <= 1 and habit["layer"] < 3 and habit["head"] < 4 for habit in seen["habits"])
    assert seen["served"]["bytes_per_token_per_layer"] == 2 * 2 * 32 * 2

    for num_tokens, tensors in heads:
        weights = square(tensors["weights"], num_tokens)
        assert num_tokens == count
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=2e-3)
        query, key = (tensors[name].reshape(count, 32) for name in ("rotated_query", "rotated_key"))
        scores = np.where(np.tri(count, dtype=bool), query @ key.T * 32**-0.5, -np.inf)
        expected = np.exp(scores - scores.max(axis=1, keepdims=True))
        np.testing.assert_allclose(weights, expected / expected.sum(axis=1, keepdims=True), atol=0.02)
    for name in ("key", "rotated_key", "value"):  # heads 0 and 1 share a KV head, 3 has the other one
        assert np.array_equal(heads[0][1][name], heads[1][1][name])
        assert not np.array_equal(heads[0][1][name], heads[2][1][name])
    assert not np.array_equal(heads[0][1]["query"], heads[1][1]["query"])
    assert row[1]["input"].shape == (64,) and row[1]["input"].any()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "prompt is required"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "a" * (MAX_PROMPT_TOKENS + 1)}, 400, f"at most {MAX_PROMPT_TOKENS}"),
        ({"prompt": "a" * 250, "max_tokens": 21}, 400, "window is 270"),
        ({"prompt": "a", "max_tokens": MAX_TOKENS + 1}, 400, f"{MAX_TOKENS}"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "chat": True}, 400, "chat template"),
        ({"prompt": "a", "model": "other"}, 404, "not served"),
        ({"prompt": "a" * 70_000}, 413, "65536 bytes"),
    ],
)
async def test_what_is_too_much_is_refused_with_the_limit_and_starts_nothing(model_path, body, status, said):
    async with Inspected(model_path) as app:
        response = await app.client.post(PATH, json=body)
        assert (response.status_code, app.inspector.process_id) == (status, None)
    assert said in response.json()["error"]["message"]


async def test_layers_heads_and_positions_that_there_are_not(model_path):
    async with Inspected(model_path) as app:
        seen = (await app.client.post(PATH, json={"prompt": "abc", "max_tokens": 1})).json()
        for query, most in (
            ("head?layer=3&head=0", 2),
            ("head?layer=0&head=4", 3),
            ("input?layer=0&position=3", 2),
        ):
            response = await app.client.get(f"{PATH}/{seen['id']}/{query}")
            assert response.status_code == 400 and f"from 0 to {most}" in response.json()["error"]["message"], query
        for layer in ("x", "-1", "", 10**30, -(10**30), "1e3"):
            response = await app.client.get(f"{PATH}/{seen['id']}/head?layer={layer}&head=0")
            assert (response.status_code, response.json()["error"]["param"]) == (400, "layer"), layer
        gone = await app.client.get(f"{PATH}/{'0' * 32}/head?layer=0&head=0")
    assert (gone.status_code, "again" in gone.json()["error"]["message"]) == (404, True)


async def test_a_crash_is_told_and_the_next_question_starts_anew(model_path):
    async with Inspected(model_path) as app:
        first = (await app.client.post(PATH, json=PROMPT)).json()
        killed = app.inspector.process_id
        os.kill(killed, signal.SIGKILL)
        await until(lambda: not is_running(killed))
        lost = await app.client.get(f"{PATH}/{first['id']}/head?layer=0&head=0")
        again = await app.client.post(PATH, json=PROMPT)
        assert app.inspector.process_id not in (None, killed)
        assert (await app.client.get("/health/live")).status_code == 200
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "inspector_lost")
    assert again.status_code == 200 and again.json()["tokens"] == first["tokens"]


async def test_one_that_hangs_is_killed_when_its_time_is_over(model_path):
    async with Inspected(model_path, answer_seconds=20.0) as app:
        seen = (await app.client.post(PATH, json=PROMPT)).json()
        hung = app.inspector.process_id
        app.inspector._process._connection.settimeout(0.2)
        os.kill(hung, signal.SIGSTOP)
        response = await app.client.get(f"{PATH}/{seen['id']}/head?layer=0&head=0")
        assert not is_running(hung)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "inspector_timeout")


async def test_it_ends_after_idling_and_starts_again(model_path):
    async with Inspected(model_path, idle_seconds=0.1) as app:
        seen = (await app.client.post(PATH, json=PROMPT)).json()
        first = app.inspector.process_id
        await until(lambda: app.inspector.process_id is None)
        assert not is_running(first)
        gone = await app.client.get(f"{PATH}/{seen['id']}/head?layer=0&head=0")
        # Nothing is started to say so.
        assert (gone.status_code, app.inspector.process_id) == (404, None) and "again" in gone.json()["error"][
            "message"
        ]
        assert (await app.client.post(PATH, json=PROMPT)).status_code == 200


async def test_stopping_ends_it_at_once_whatever_it_is_at(model_path):
    async with Inspected(model_path) as app:
        asking = asyncio.create_task(app.client.post(PATH, json=PROMPT))
        await until(lambda: app.inspector.process_id is not None)
        process_id = app.inspector.process_id
        waiting = [asyncio.create_task(app.client.post(PATH, json=PROMPT)) for _ in range(2)]
        await until(lambda: app.inspector._num_open == 3)
        await app.inspector.stop()
        assert not is_running(process_id)
        assert [(await each).status_code for each in (asking, *waiting)] == [503] * 3
        after = await app.client.post(PATH, json=PROMPT)
    assert (after.status_code, "shutting down" in after.json()["error"]["message"]) == (503, True)


async def test_questions_of_many_take_turns_and_too_many_are_refused(model_path):
    async with Inspected(model_path) as app:
        responses = await asyncio.gather(*(app.client.post(PATH, json=PROMPT) for _ in range(9)))
    statuses = sorted(response.status_code for response in responses)
    assert statuses == [200] * 5 + [429] * 4
    assert len({response.json()["id"] for response in responses if response.status_code == 200}) == 5


async def test_a_viewer_who_leaves_does_not_get_the_next_one_his_answer(model_path):
    async with Inspected(model_path) as app:
        leaving = asyncio.create_task(app.client.post(PATH, json={"prompt": "x" * 200, "max_tokens": 32}))
        await until(lambda: app.inspector.process_id is not None)
        leaving.cancel()
        seen = (await app.client.post(PATH, json=PROMPT)).json()
    assert seen["num_prompt_tokens"] == NUM_PROMPT_TOKENS


async def test_without_memory_for_a_copy_it_says_so(model_path, monkeypatch):
    """In this process: the other one looks at the machine's own memory."""
    monkeypatch.setattr("models.float_decoder.available_host_bytes", lambda: 1 << 20)
    config = Settings(model=str(model_path)).engine_config(model_path)
    with pytest.raises(inspection_process.NotEnoughMemory, match="float32"):
        inspection_process.load(InspectorSetup(config, "cpu", "none", 1))


@pytest.mark.parametrize(("device", "is_rounded"), [("cuda", True), ("cpu", False)])
def test_weights_are_rounded_as_the_engine_of_that_device_rounds_them(model_path, device, is_rounded):
    """On a card the engine serves bfloat16; they are looked at in float32 all the same, and on the processor."""
    config = Settings(model=str(model_path)).engine_config(model_path)
    decoder = inspection_process.load(InspectorSetup(config, device, "none", 1))._decoder
    assert all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in decoder.parameters())
    weight = decoder.layers[0].attention.qkv.weight
    assert torch.equal(weight, weight.bfloat16().float()) == is_rounded


async def test_a_model_that_cannot_be_loaded_is_told_of_and_leaves_no_process(model_path, tmp_path):
    async with Inspected(model_path) as app:
        app.inspector._config = Settings(model=str(tmp_path)).engine_config(tmp_path)
        response = await app.client.post(PATH, json=PROMPT)
        assert app.inspector.process_id is None
    assert (response.status_code, response.json()["error"]["code"]) == (503, "inspector_unavailable")


async def test_while_the_engine_loads_or_drains_nothing_is_inspected(model_path):
    async with Inspected(model_path) as app:
        app.engine.draining = True
        draining = await app.client.post(PATH, json=PROMPT)
        app.engine.draining, app.engine.info = False, None
        loading = await app.client.get(f"{PATH}/{'0' * 32}/head?layer=0&head=0")
        assert app.inspector.process_id is None
    assert (draining.status_code, loading.status_code) == (503, 503)


async def test_only_the_newest_inspections_are_kept(model_path):
    async with Inspected(model_path) as app:
        ids = [(await app.client.post(PATH, json={"prompt": "abc"})).json()["id"] for _ in range(9)]
        statuses = [(await app.client.get(f"{PATH}/{each}/head?layer=0&head=0")).status_code for each in ids]
    assert statuses == [404] + [200] * 8


async def test_nobody_but_the_admin_looks_where_there_are_keys(model_path):
    keys = {"api_key": ("alice:a",), "admin_api_key": "root"}
    async with Inspected(model_path, settings=keys) as app:
        for key, status in (("", 401), ("a", 403), ("root", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await app.client.get(PATH, headers=headers)).status_code == status, key
            assert (await app.client.post(PATH, headers=headers, json={"prompt": "ab"})).status_code == status, key


async def test_without_the_dashboard_there_is_no_inspector(model_path):
    async with Inspected(model_path, settings={"enable_dashboard": False}) as app:
        assert (await app.client.get(PATH)).status_code == 404
        assert (await app.client.post(PATH, json=PROMPT)).status_code == 404

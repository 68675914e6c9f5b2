"""What operators do to a server, done to a real one: kill its engine, stop it, close clients, pass wrong settings."""

import json
import os
import random
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from tests.data_files import mt_bench_prompts
from tests.end_to_end.server_process import ServerProcess, wait_until

LONG = {"model": "smollm2", "prompt": "Count:", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


def post(server, body, timeout=120):
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=timeout)


def events(lines):
    """The data of each event of a stream, `[DONE]` as None."""
    for line in lines:
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield None if data == "[DONE]" else json.loads(data)


def is_idle(server):
    return server.metric("vllm:num_requests_running") == 0 and server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_killed_engine_ends_open_streams_with_an_error_and_is_replaced(smollm2):
    with httpx.stream("POST", f"{smollm2.url}/v1/completions", json=LONG, timeout=60) as response:
        stream = events(response.iter_lines())
        next(stream)
        os.kill(smollm2.engine_process_id(), signal.SIGKILL)
        killed = time.monotonic()
        rest = list(stream)
        assert time.monotonic() - killed < 5
    assert "error" in rest[-1]
    assert not smollm2.is_ready()
    assert post(smollm2, SHORT).status_code == 503
    assert httpx.get(f"{smollm2.url}/health/live").status_code == 200
    wait_until(smollm2.is_ready, seconds=60)
    assert post(smollm2, SHORT).json()["choices"][0]["text"].startswith(" Paris")


def test_a_client_that_goes_away_frees_its_blocks(smollm2):
    with httpx.stream("POST", f"{smollm2.url}/v1/completions", json=LONG, timeout=60) as response:
        stream = events(response.iter_lines())  # whose end would close the connection
        next(stream)
        assert smollm2.metric("vllm:num_requests_running") == 1
    wait_until(lambda: is_idle(smollm2), seconds=3)


def test_200_clients_that_leave_at_random_moments_leave_a_whole_pool(smollm2):
    prompts = mt_bench_prompts()

    def leave_early(number: int) -> None:
        random_moment = random.Random(number)
        body = {
            **LONG,
            "prompt": prompts[number % len(prompts)],
            "stream": random_moment.random() < 0.7,
            "n": random_moment.choice([1, 1, 2]),
        }
        leaves = time.monotonic() + random_moment.uniform(0.01, 1.5)
        with suppress(httpx.TimeoutException), httpx.Client(timeout=leaves - time.monotonic()) as client:
            with client.stream("POST", f"{smollm2.url}/v1/completions", json=body) as response:
                for _ in response.iter_raw():
                    if time.monotonic() > leaves:
                        return
            raise AssertionError(f"client {number} got its whole answer and did not leave")

    def wave(numbers) -> None:
        with ThreadPoolExecutor(max_workers=40) as pool:
            list(pool.map(leave_early, numbers))
        wait_until(lambda: is_idle(smollm2), seconds=20)

    def memory_stands_still() -> bool:
        before = smollm2.memory_bytes()
        time.sleep(0.3)
        return smollm2.memory_bytes() - before < 2**20

    wave(range(60))
    wait_until(memory_stands_still, seconds=60)  # an engine at rest has the pool's pages backed
    before = smollm2.memory_bytes()
    wave(range(60, 200))
    after = smollm2.memory_bytes()
    print(f"server and engine grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB over 140 clients")
    # What the clients left must be nothing beside the pool.
    assert after - before < 200 * 2**20
    time.sleep(2.5)  # an idle engine proves its pool within two heartbeats
    assert smollm2.metric("octavo_kv_cache_integrity_failures_total") == 0
    assert post(smollm2, SHORT).json()["choices"][0]["text"].startswith(" Paris")


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(smollm2_path):
    with ServerProcess(smollm2_path, "--served-model-name", "smollm2", "--shutdown-timeout", "60") as server:
        body = {**LONG, "max_tokens": 120}
        received = []
        started = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                for event in events(response.iter_lines()):
                    received.append(event)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(30)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.is_ready(), seconds=5)
        assert post(server, SHORT).status_code == 503
        reader.join(60)
        assert received[-1] is None
        assert [e["choices"][0]["finish_reason"] for e in received[:-1] if e["choices"]][-1] == "length"
        assert server.process.wait(20) == 0


def test_the_shutdown_timeout_bounds_the_drain(smollm2_path):
    with ServerProcess(smollm2_path, "--served-model-name", "smollm2", "--shutdown-timeout", "0.5") as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
            stream = events(response.iter_lines())
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            assert "error" in list(stream)[-1]
        assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [(["--max-model-len", "1000000"], "--max-model-len 1000000"), (["--kv-cache-memory", "1000"], "--kv-cache-memory")],
)
def test_settings_that_the_model_refuses_end_the_start_with_a_sentence(smollm2_path, flags, sentence):
    server = ServerProcess(smollm2_path, *flags)
    done = subprocess.run(server.arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr

"""A real server that schedules each step ahead of the last one's result, beside one that does not."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.end_to_end.server_process import ServerProcess, wait_until

MODEL = {"model": "smollm2"}
REQUESTS = [
    {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0, "logprobs": 2},
    {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.8, "seed": 7, "n": 2},
    {"prompt": "List three colours:", "max_tokens": 24, "temperature": 0, "stop": ["\n\n", "3."]},
    {"prompt": "Count: one, two,", "max_tokens": 1, "temperature": 0, "n": 2},
]


def complete(server, body):
    response = httpx.post(f"{server.url}/v1/completions", json=MODEL | body, timeout=60)
    assert response.status_code == 200, response.text
    answer = response.json()
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    return [(choice["text"], choice["finish_reason"]) for choice in choices], answer["usage"]


def leave(server):
    """Read the beginning of a long answer and close the connection."""
    body = MODEL | {"prompt": "Count:", "max_tokens": 1500, "n": 2, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number == 4:
                return


def is_idle(server):
    return server.metric("vllm:num_requests_running") == 0 and server.metric("vllm:kv_cache_usage_perc") == 0


def test_answers_are_those_of_a_server_that_steps_in_turn(smollm2, smollm2_path):
    expected = [complete(smollm2, body) for body in REQUESTS]
    flags = ("--served-model-name", "smollm2", "--quantization", "none", "--async-scheduling")
    with ServerProcess(smollm2_path, *flags) as server:
        assert [complete(server, body) for body in REQUESTS] == expected
        with ThreadPoolExecutor(len(REQUESTS) + 1) as pool:
            left = pool.submit(leave, server)
            together = list(pool.map(lambda body: complete(server, body), REQUESTS))
            left.result()
        assert together[0] == expected[0]
        wait_until(lambda: is_idle(server), seconds=10)
        time.sleep(1.5)  # an idle engine proves its pool within a heartbeat
        assert server.metric("octavo_kv_cache_integrity_failures_total") == 0
        assert complete(server, REQUESTS[0]) == expected[0]

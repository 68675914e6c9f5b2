"""The inspector of a whole server: it ends with the server, however that ends, and the engine never notices it."""

import signal
import threading

import httpx
import pytest

from tests.end_to_end.server_process import ServerProcess, wait_until
from tests.server.dashboard.test_inspector import PATH, inspector_process_id, is_running

BODY = {"prompt": "Hello-there", "max_tokens": 32}


def inspect_over_and_over(url: str) -> threading.Thread:
    """Until the server is gone."""

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            try:
                while client.post(url + PATH, json=BODY).status_code == 200:
                    pass
            except httpx.TransportError:
                return

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_server_in_the_middle_of_a_question(model_path, number):
    with ServerProcess(model_path, "--cpu-threads", "1", "--num-gpu-blocks-override", "32") as server:
        completion = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
        before = httpx.post(f"{server.url}/v1/completions", json=completion, timeout=60).json()["choices"]
        assert httpx.post(server.url + PATH, json=BODY, timeout=60).status_code == 200
        engine, inspector = server.engine_process_id(), inspector_process_id(server.process.pid)
        asking = inspect_over_and_over(server.url)
        assert httpx.post(f"{server.url}/v1/completions", json=completion, timeout=60).json()["choices"] == before
        server.process.send_signal(number)
        assert server.process.wait(timeout=30) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        asking.join(timeout=30)
        assert not asking.is_alive()
        wait_until(lambda: not is_running(inspector) and not is_running(engine))

"""The browser that the tests of the pages share, and a real server on the default model for them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server_process import ServerProcess
from tests.end_to_end.tiny_tokenizer import save_tokenizer
from tests.server.dashboard.browser import Browser, browsing


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """With nothing kept of the test before."""
    chromium.open("about:blank")
    chromium.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    chromium.driver.switch_to.new_window("tab")  # a session storage of its own
    for handle in chromium.driver.window_handles[:-1]:
        chromium.driver.switch_to.window(handle)
        chromium.driver.close()
    chromium.driver.switch_to.window(chromium.driver.window_handles[0])
    return chromium


@pytest.fixture(scope="package")
def served(chromium: Browser, smollm2_path: Path) -> Iterator[ServerProcess]:
    """Started only where there is a browser to look at it."""
    flags = ("--served-model-name", "smollm2", "--num-gpu-blocks-override", "300", "--cpu-threads", "1")
    with ServerProcess(smollm2_path, *flags) as server:
        yield server


@pytest.fixture(scope="package")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes."""
    from tests.models.tiny_models import SIZES, build, save  # imports transformers, which few tests here need

    path = tmp_path_factory.mktemp("qwen3")
    save(build("qwen3"), path)
    save_tokenizer(path, SIZES["vocab_size"])
    return path

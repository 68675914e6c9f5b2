"""Takes a picture of the dashboard of a real server under load, for the README: docs/images/dashboard.png.

Needs chromium and chromedriver on the path, and selenium (the extra `test`). Nothing of the picture is made up: the
requests are asked for while it waits, and the page is as anyone would see it.
"""

import argparse
import base64
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from selenium import webdriver

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.local_server import local_server

IMAGE = Path(__file__).resolve().parent.parent / "docs" / "images" / "dashboard.png"
WIDTH = 1280  # CSS pixels
MAX_BYTES = 300_000
NUM_CALLERS = 9
SERVER_FLAGS = ("--num-gpu-blocks-override", "420", "--max-num-seqs", "12")
BROWSER_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
SYSTEM = "You are a guide who knows every river of the country and answers in whole sentences, with examples. " * 4
QUESTIONS = (
    "Why is the paged cache like virtual memory?",
    "Tell me of a river that flows to the north.",
    "What should I take on a walk along the river?",
    "Write a letter to a friend about the river.",
)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Chats that begin alike and end differently, several at a time; some ask for several answers."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        while not is_over.is_set():
            question = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
            body = {
                "messages": [{"role": "system", "content": SYSTEM}, question],
                "max_tokens": 80 + 50 * (number % 5),
                "n": 1 + number % 2,
            }
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).raise_for_status()
            number += 1

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        asking = [pool.submit(ask, number) for number in range(NUM_CALLERS)]
        try:
            yield
        finally:
            is_over.set()
    for each in asking:
        each.result()


@contextmanager
def browser() -> Iterator[Any]:
    """A window of the picture's width."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in BROWSER_FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    metrics = {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield driver
    finally:
        driver.quit()


def picture(driver: Any, last: str) -> bytes:  # noqa: ANN401  # selenium has no type for it here
    """The page from its top to the end of the element that the selector `last` finds, as PNG."""
    height = driver.execute_script(
        "return Math.ceil(document.querySelector(arguments[0]).getBoundingClientRect().bottom + scrollY) + 14", last
    )
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(taken["data"])


def main() -> int:
    """Serve, load, look, and keep the picture; the exit code is 1 where it is too large to be kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="that the load runs before the picture is taken")
    parser.add_argument("--output", type=Path, default=IMAGE)
    arguments = parser.parse_args()
    missing = [program for program in ("chromium", "chromedriver") if shutil.which(program) is None]
    if missing:
        print(f"{' and '.join(missing)} must be on the path (Debian: apt-get install chromium chromium-driver).")
        return 2
    with local_server(SERVER_FLAGS) as url, load(url), browser() as driver:
        driver.get(f"{url}/dashboard")
        time.sleep(arguments.seconds)
        image = picture(driver, "section[aria-labelledby=pool-title]")
    if len(image) > MAX_BYTES:
        print(f"The picture has {len(image)} bytes, more than the {MAX_BYTES} that a README should load.")
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(image)
    print(f"Kept {arguments.output} ({len(image)} bytes).")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Takes a picture of the dashboard's inspector at work on a real model, for the docs: docs/images/inspector.png.

Needs what dashboard_screenshot.py needs. The head that is shown is one of the default model's that look for what came
after the same token before.
"""

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

from selenium.webdriver.support.wait import WebDriverWait

if not __package__:  # run as a script: Python has put this folder on the path, not the one above it
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.local_server import local_server
from deploy.dashboard_screenshot import MAX_BYTES, WIDTH, browser

IMAGE = Path(__file__).resolve().parent.parent / "docs" / "images" / "inspector.png"
LAYER, HEAD = 17, 5
WAIT_SECONDS = 180.0  # the model is loaded a second time
SECTION = "section[aria-labelledby=attention-title]"
_CHOOSE = """
const [layer, head] = arguments;
document.getElementById("layer").value = layer;
document.getElementById("layer").dispatchEvent(new Event("change"));
document.querySelector(`#heads button[aria-label="Query head ${head}"]`).click();
"""
_EDGE = "return document.querySelector(arguments[0]).getBoundingClientRect()[arguments[1]] + scrollY"


def wait_until(driver: Any, script: str, value: object) -> None:  # noqa: ANN401  # selenium has no type for it here
    """Until the script returns the value."""
    WebDriverWait(driver, WAIT_SECONDS, 0.1).until(lambda _: driver.execute_script(script) == value)


def picture(driver: Any) -> bytes:  # noqa: ANN401
    """From the tokens to the attention, as PNG."""
    shown = "return document.getElementById('found')?.dataset.shown"
    wait_until(driver, "return document.getElementById('bounds')?.textContent !== ''", True)
    driver.execute_script("document.getElementById('inspect').click()")
    wait_until(driver, shown, "0/0")
    driver.execute_script(_CHOOSE, LAYER, HEAD)
    wait_until(driver, shown, f"{LAYER}/{HEAD}")
    top = driver.execute_script(_EDGE, SECTION, "top") - 12
    bottom = driver.execute_script(_EDGE, SECTION, "bottom") + 12
    clip = {"x": 0, "y": top, "width": WIDTH, "height": bottom - top, "scale": 1}
    taken = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return base64.b64decode(taken["data"])


def main() -> int:
    """Serve, inspect, and keep the picture; the exit code is 1 where it is too large to be kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=IMAGE)
    arguments = parser.parse_args()
    with local_server(()) as url, browser() as driver:
        driver.get(f"{url}/dashboard/inspector")
        image = picture(driver)
    if len(image) > MAX_BYTES:
        print(f"The picture has {len(image)} bytes, more than the {MAX_BYTES} that a page should load.")
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(image)
    print(f"Kept {arguments.output} ({len(image)} bytes).")
    return 0


if __name__ == "__main__":
    sys.exit(main())

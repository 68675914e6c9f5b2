"""The page "Inspector" in a real browser, before a real server on a real model: it shows what was computed."""

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.server.dashboard.browser import DESK, PHONE
from tests.server.dashboard.test_inspector import PATH, inspector_process_id, read, square
from tests.server.test_serve import serving

PROMPT = "The cat sat on the mat because the cat was tired, and the dog"
SHOWN = "return document.getElementById('found')?.dataset.shown"


def open_page(browser, url: str) -> None:
    browser.open(f"{url}/dashboard/inspector")
    browser.until(lambda: browser.run("return document.getElementById('inspect') !== null"))


def inspect(browser, url: str, prompt: str = PROMPT, max_tokens: int = 8) -> None:
    open_page(browser, url)
    browser.until(lambda: "256" in browser.text("#bounds"))
    browser.run("document.getElementById('prompt').value = arguments[0]", prompt)
    browser.type("#max-tokens", str(max_tokens))
    browser.click("#inspect")
    browser.until(lambda: browser.run(SHOWN) == "0/0")


def read_head(url: str, inspection_id: str, layer: int, head: int) -> np.ndarray:
    params = {"layer": layer, "head": head}
    count, tensors = read(httpx.get(f"{url}{PATH}/{inspection_id}/head", params=params).content)
    return square(tensors["weights"], count)


def told_of_cell(browser) -> str:
    return browser.run("return document.getElementById('attention').getAttribute('aria-valuetext')")


def test_every_cell_strip_and_token_tells_what_was_computed(browser, served):
    from selenium.webdriver.common.keys import Keys

    browser.show_as(DESK)
    inspect(browser, served.url)
    seen = httpx.post(f"{served.url}{PATH}", json={"prompt": PROMPT, "max_tokens": 8}, timeout=120).json()
    picture = httpx.get(f"{served.url}{PATH}/{seen['id']}/head", params={"layer": 7, "head": 4}).content
    count, tensors = read(picture)
    weights = read_head(served.url, seen["id"], 7, 4)
    shown = browser.run(
        "return [...document.querySelectorAll('#tokens small')].map((element) => Number(element.textContent))"
    )
    assert shown == [token["id"] for token in seen["tokens"]]

    browser.run("const e = document.getElementById('layer'); e.value = 7; e.dispatchEvent(new Event('change'))")
    browser.click("#heads button[aria-label='Query head 4']")
    browser.until(lambda: browser.run(SHOWN) == "7/4")
    browser.run("document.getElementById('attention').focus()")
    column = int(np.argmax(read_head(served.url, seen["id"], 0, 0)[seen["num_prompt_tokens"] - 1]))
    assert f"to token {column}, " in told_of_cell(browser)  # where the last token of the prompt looked most in head 0
    browser.press(Keys.END)
    row = seen["num_prompt_tokens"] - 1
    for _ in range(6):
        cell = browser.run("return Number(document.getElementById('attention').getAttribute('aria-valuenow'))")
        row, column = divmod(cell, count)
        told = told_of_cell(browser)
        assert told.startswith(f"Token {row}, ") and f"to token {column}, " in told
        assert float(told.rpartition("makes that ")[2].rstrip(".")) == pytest.approx(weights[row, column], rel=2e-3)
        browser.press(Keys.ARROW_DOWN, Keys.ARROW_LEFT)
    browser.press(Keys.END, Keys.ARROW_RIGHT)
    assert "comes later" in told_of_cell(browser)
    assert browser.text("#attention-cell") == told_of_cell(browser)
    # The row of the map, the chosen token and the strips are of the same token.
    row = browser.run("return Number(document.querySelector('#tokens .chosen').dataset.position)")
    assert told_of_cell(browser).startswith(f"Token {row}, ")
    for name in ("query", "rotated_query", "key", "rotated_key", "value"):
        browser.run("document.getElementById(arguments[0]).focus()", f"strip-{name}")
        browser.press(Keys.END)
        told = browser.run("return document.activeElement.getAttribute('aria-valuetext')")
        assert told.startswith("number 63 of 64")
        assert float(told.rpartition(" ")[2]) == pytest.approx(tensors[name].reshape(count, 64)[row, 63], rel=2e-3)
    assert browser.errors() == []


def test_the_cache_grows_step_by_step(browser, served):
    from selenium.webdriver.common.keys import Keys

    inspect(browser, served.url, max_tokens=6)
    seen = httpx.post(f"{served.url}{PATH}", json={"prompt": PROMPT, "max_tokens": 6}, timeout=120).json()
    num_prompt = seen["num_prompt_tokens"]
    slots = "return ['new', 'read'].map((kind) => document.querySelectorAll(`#kv-blocks .kv-slot.${kind}`).length)"
    browser.run("document.getElementById('step').focus()")
    pictures = set()
    for index, step in enumerate(seen["steps"]):
        assert browser.text("#step-name") == f"Step {index + 1} of 6"
        assert browser.run(slots) == [num_prompt, 0] if index == 0 else [1, num_prompt + index - 1]
        assert browser.run("return document.querySelectorAll('#kv-blocks > li').length") == step["num_blocks"]
        best = browser.text("#candidates tr:first-child code")
        assert best.strip('"') == seen["tokens"][num_prompt + index]["text"].replace("\n", "\\n")
        facts = browser.text("#step-facts")
        assert "768 bytes (bfloat16)" in facts  # 3 KV heads of 64 numbers, keys and values, of 2 bytes
        assert f"{num_prompt + index}, and {sum(range(num_prompt, num_prompt + index + 1))} without" in facts
        rows = "return [...document.querySelectorAll('.cache-rows')].map((c) => [c.ariaLabel, c.toDataURL()])"
        pictures.update(image for _, image in browser.run(rows))
        new = num_prompt if index == 0 else 1
        assert [told for told, _ in browser.run(rows)] == [
            f"{kind} of {num_prompt + index} tokens, {new} of them new" for kind in ("Keys", "Values")
        ]
        browser.press(Keys.ARROW_RIGHT)
    assert len(pictures) == 2 * 6  # each step draws more rows
    told = browser.text("#step-told")
    assert f"position {num_prompt + 4}" in told and f"of {num_prompt + 4} tokens before it are read" in told
    browser.click("#step-back")
    assert browser.text("#step-name") == "Step 5 of 6"
    browser.run("document.querySelector('#tokens .chosen').focus()")
    browser.press(Keys.END)
    assert "not computed" in browser.text("#token-told")
    assert browser.errors() == []


def test_what_is_refused_or_lost_is_told_and_the_next_prompt_works(browser, served):
    inspect(browser, served.url)
    browser.run("document.getElementById('prompt').value = 'word '.repeat(300)")
    browser.click("#inspect")
    browser.until(lambda: "at most 256" in browser.text(".notice"))
    os.kill(inspector_process_id(served.process.pid), signal.SIGKILL)
    browser.run("document.getElementById('prompt').value = 'Hello'")
    browser.until(lambda: inspector_process_id(served.process.pid) is None or _is_zombie(served.process.pid))
    browser.click("#inspect")
    browser.until(lambda: "starts anew" in browser.text(".notice"))
    browser.click("#inspect")
    browser.until(lambda: browser.text("#inspect-status").startswith("Done: 1 of the prompt's"))
    assert browser.run("return document.querySelector('.notice').hidden")
    assert served.is_ready() and browser.errors("status of 400", "status of 503") == []


def _is_zombie(server_process_id: int) -> bool:
    child = inspector_process_id(server_process_id)
    return child is None or Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_and_used_on_a_phone_and_without_a_mouse(browser, served, dark):
    browser.show_as(PHONE, dark=dark)
    inspect(browser, served.url)
    browser.until(lambda: browser.text("#status") == "ready")
    assert browser.low_contrasts() == []
    assert browser.overflow() <= 0
    assert browser.unreached_by_tab() == []
    assert browser.errors() == []


def test_it_asks_for_the_admin_key(browser):
    with serving("--api-key", "alice:sesame", "--admin-api-key", "root") as server:
        open_page(browser, f"http://127.0.0.1:{server.port}")
        browser.until(lambda: "admin key" in browser.text(".notice"))
        browser.type("#key", "sesame")
        browser.click(".key button")
        browser.until(lambda: "only for the holder of the admin key" in browser.text(".notice"))
        browser.type("#key", "root")
        browser.click(".key button")
        browser.until(lambda: "256" in browser.text("#bounds"))
        assert browser.run("return document.querySelector('.notice').hidden")
        assert browser.errors("status of 401", "status of 403") == []


def test_half_precision_is_read_as_it_is_written(browser, served):
    open_page(browser, served.url)
    found = browser.call(
        f"{served.url}/dashboard/static/inspection.js",
        "return Array.from({ length: 65536 }, (_, bits) => String(module.fromHalf(bits)))",
    )
    expected = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64)
    read_back = np.array([float(text.replace("Infinity", "inf")) for text in found])
    np.testing.assert_array_equal(read_back, expected)

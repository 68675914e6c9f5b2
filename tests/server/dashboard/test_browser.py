"""The pages in a real browser, before a real server on a real model: they live, stream, and can be used by everyone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
import pytest

from server.dashboard.pool_image import Holder, PoolHead
from tests.server.dashboard.browser import DESK, PHONE
from tests.server.test_serve import serving

PAGES = ("", "/playground")
NONE = "\N{EN DASH}"  # a number that is not known
PROMPT = "Once upon a time there was a river that ran through a town, and everybody who lived there knew its name. " * 2


@pytest.fixture
def load(served):
    """Three requests at a time, which begin alike, for as long as a test runs."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            body = {"prompt": PROMPT, "max_tokens": 24, "n": 2, "ignore_eos": True}
            httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        yield
        is_over.set()
    for each in asking:
        each.result()


def test_live_numbers_charts_and_blocks_change_under_load(browser, served, load):
    browser.show_as(DESK)
    browser.open(f"{served.url}/dashboard")
    browser.until(lambda: browser.text("#tile-running") not in ("", NONE, "0"))
    browser.until(lambda: browser.text("#tile-generated") not in (NONE, "0"))
    browser.until(lambda: browser.text("#tile-interToken") != NONE)
    browser.until(lambda: browser.text("#tile-hits") not in (NONE, "0 %"))
    pixels = "const c = document.getElementById('pool'); return c.width ? c.toDataURL() : ''"
    before = browser.until(lambda: browser.run(pixels))
    browser.until(lambda: browser.run(pixels) != before)
    drawn = "return [...document.querySelectorAll('.chart canvas')].map((c) => c.toDataURL())"
    charts = browser.run(drawn)
    browser.until(lambda: sum(a != b for a, b in zip(charts, browser.run(drawn), strict=True)) >= 5)
    assert browser.errors() == []


def test_a_block_tells_whose_it_is_by_keyboard_and_opens_its_request(browser, served, load):
    from selenium.webdriver.common.keys import Keys

    browser.open(f"{served.url}/dashboard")
    browser.until(lambda: browser.run("return document.getElementById('pool')?.getAttribute('aria-valuemax')") == "299")
    browser.run("document.getElementById('pool').focus()")
    told = set()
    for key in (Keys.HOME, *[Keys.ARROW_RIGHT] * 8, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.END):
        browser.press(key)
        told.add(browser.run("return document.getElementById('pool').getAttribute('aria-valuetext')"))
    assert {text.split(":")[0] for text in told} >= {"Block 0", "Block 1", "Block 299"}
    assert browser.text("#pool-detail").startswith("Block 299")
    browser.press(Keys.HOME)

    def opened() -> bool:  # the block may have been freed between the look and the key
        for _ in range(40):
            browser.press(Keys.ENTER)
            if browser.run("return !document.getElementById('request').hidden"):
                return True
            browser.press(Keys.ARROW_RIGHT)
        browser.press(Keys.HOME)
        return False

    browser.until(opened)
    assert browser.run("return document.activeElement.id") == "request-title"
    browser.until(lambda: "prompt tokens were cached" in browser.text("#request"))
    browser.until(lambda: browser.run("return document.querySelectorAll('tr[data-id]').length") > 0)
    browser.click("#request button")
    assert browser.run("return document.activeElement.id") == "pool", "the focus goes back to where it came from"
    dimmed = """
        const c = document.getElementById("pool");
        const data = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        return data.some((value, i) => i % 4 === 3 && value > 0 && value < 255);
    """
    open_first = """
        const press = (key) => document.getElementById("pool").dispatchEvent(new KeyboardEvent("keydown", { key }));
        press("Home");
        const panel = document.getElementById("request");
        for (let i = 0; i < 300 && panel.hidden; i += 1) { press("Enter"); press("ArrowRight"); }
        if (panel.hidden) return false;
    """
    browser.until(lambda: browser.run(open_first + dimmed))  # at once: the request may end before a second script runs
    browser.until(lambda: "Took" in browser.text("#request"))
    browser.until(lambda: not browser.run(dimmed))  # it holds no blocks any more, so that none stand back for it
    assert browser.errors("willReadFrequently") == []  # advice about this test's own look at the pixels


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_the_playground_streams_tokens_and_shows_their_blocks(browser, served, kind):
    from selenium.webdriver.common.keys import Keys

    browser.show_as(DESK)
    browser.open(f"{served.url}/dashboard/playground")
    browser.until(lambda: browser.run("return document.getElementById('run') !== null"))
    browser.click(f"#{kind}")
    browser.type("#max_tokens", "80")
    browser.type("#temperature", "0")
    browser.run("document.getElementById('prompt').value = arguments[0]", PROMPT)
    browser.click("#run")
    browser.until(lambda: not browser.run("return document.getElementById('run').disabled"))
    total = browser.run("return document.querySelectorAll('#tokens .token').length")
    assert 1 < total <= 80 and browser.text("#run-status").startswith(f"{total} tokens")
    browser.run("document.querySelector('#tokens .token').focus()")
    browser.press(Keys.ARROW_RIGHT)
    assert browser.run("return document.activeElement.dataset.place") == "1"
    detail = browser.text("#token-detail")
    assert "Token 1" in detail and "Log-probability" in detail
    likeliest = browser.run("return document.querySelectorAll('#token-detail tbody tr').length")
    assert likeliest == 5, "greedy: the one that came is the likeliest"
    assert "In slot" in browser.text("#token-place") and "of block" in browser.text("#token-place")
    marked = browser.run("return Number(document.querySelector('.slot.chosen').dataset.position)")
    num_prompt = browser.run("return document.querySelectorAll('.slots .prompt, .slots .cached').length")
    assert marked == num_prompt + 1
    browser.press(Keys.END)
    assert "nothing was computed after it" in browser.text("#token-place")
    assert browser.errors() == []


def test_an_answer_can_be_stopped_and_errors_are_told(browser, served):
    browser.open(f"{served.url}/dashboard/playground")
    browser.until(lambda: browser.run("return document.getElementById('run') !== null"))
    browser.type("#max_tokens", "4000")
    browser.click("#run")
    browser.until(lambda: browser.run("return document.querySelectorAll('#tokens .token').length") > 2)
    browser.click("#stop")
    browser.until(lambda: not browser.run("return document.getElementById('run').disabled"))
    assert "stopped" in browser.text("#run-status")
    browser.until(lambda: served.metric("vllm:num_requests_running") == 0)
    assert browser.errors() == []
    browser.type("#max_tokens", "999999")
    browser.click("#run")
    browser.until(lambda: "max_tokens" in browser.text(".notice"))
    assert browser.errors("status of 400") == []


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_and_used_on_a_phone_and_without_a_mouse(browser, served, path, dark):
    httpx.post(f"{served.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, timeout=60)
    browser.show_as(PHONE, dark=dark)
    browser.open(f"{served.url}/dashboard{path}")
    if path == "":
        browser.until(lambda: browser.run("return document.querySelectorAll('tr[data-id] button').length"))
        browser.click("tr[data-id] button")
        browser.until(lambda: browser.run("return document.querySelectorAll('#request dl').length") > 1)
    else:
        browser.until(lambda: browser.run("return document.getElementById('run') !== null"))
        browser.type("#max_tokens", "12")
        browser.click("#run")
        browser.until(lambda: browser.text("#run-status").endswith(("the limit", "itself")))
        browser.run("document.querySelector('#tokens .token').focus()")
    browser.until(lambda: browser.text("#status") == "ready")
    assert browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") == dark
    assert browser.low_contrasts() == []
    assert browser.overflow() <= 0
    assert browser.unreached_by_tab() == []
    assert browser.errors() == []


def test_keys_open_it_to_the_admin_alone_and_stay_in_the_tab(browser):
    with serving("--api-key", "alice:sesame", "--admin-api-key", "root") as server:
        url = f"http://127.0.0.1:{server.port}"
        browser.open(f"{url}/dashboard")
        browser.until(lambda: "needs a key" in browser.text(".notice"))
        for key, told in (("sesame", "only for the holder of the admin key"), ("wrong", "not a key of this server")):
            browser.type("#key", key)
            browser.click(".key button")
            browser.until(lambda told=told: told in browser.text(".notice"))
        browser.type("#key", "root")
        browser.click(".key button")
        browser.until(lambda: browser.text("#tile-running") == "0")
        assert browser.run("return [sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert browser.errors("status of 401", "status of 403") == []
        browser.open(f"{url}/dashboard/playground")
        browser.until(lambda: browser.text("#status") == "ready")
        browser.click("#run")
        browser.until(lambda: "128 tokens" in browser.text("#run-status"))
        assert browser.errors() == []


def test_keys_without_an_admin_key_are_told_what_is_missing(browser):
    with serving("--api-key", "alice:sesame") as server:
        browser.open(f"http://127.0.0.1:{server.port}/dashboard")
        browser.until(lambda: "needs a key" in browser.text(".notice"))
        browser.type("#key", "sesame")
        browser.click(".key button")
        browser.until(lambda: "--admin-api-key" in browser.text(".notice"))
        assert browser.errors("status of 401", "status of 403") == []


def test_percentiles_are_those_that_prometheus_estimates(browser, served):
    browser.open(f"{served.url}/dashboard")
    bounds, fractions = [0.1, 0.5, 1.0, 5.0], [0.01, 0.5, 0.9, 0.999]
    chance = np.random.default_rng(1)
    for counts in (*chance.integers(0, 9, (20, 5)).tolist(), [0, 0, 0, 0, 3], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]):
        found = browser.call(
            f"{served.url}/dashboard/static/samples.js",
            "return module.percentilesOf(...args)",
            bounds,
            counts,
            fractions,
        )
        if not sum(counts):
            assert found == [None] * 4
            continue
        # The distribution function of evenly spread values, turned round; beyond the last bound nothing is known.
        shares = np.concatenate(([0.0], np.cumsum(counts[:-1]))) / sum(counts)
        edges = np.array([0.0, *bounds])
        rising = np.concatenate(([True], np.diff(shares) > 0))
        for fraction, value in zip(fractions, found, strict=True):
            place = int(np.searchsorted(shares, fraction))
            if place == len(shares):
                assert value == bounds[-1]
            else:
                expected = np.interp(fraction, shares[place - 1 : place + 1], edges[place - 1 : place + 1])
                assert value == pytest.approx(expected), (counts, fraction, rising)


def test_events_are_read_whole_however_the_stream_is_cut(browser, served):
    browser.open(f"{served.url}/dashboard")
    found = browser.call(
        f"{served.url}/dashboard/static/api.js",
        """
        const data = new TextEncoder().encode(args[0]);
        const real = window.fetch;
        const wrong = [];
        for (let cut = 0; cut <= data.length; cut += 1) {
          window.fetch = async () => new Response(new ReadableStream({ start(c) {
            c.enqueue(data.slice(0, cut)); c.enqueue(data.slice(cut)); c.close(); } }));
          const events = [];
          for await (const event of module.streamEvents("v1/completions", { body: {} })) events.push(event.a);
          if (JSON.stringify(events) !== '["é😀",2]') wrong.push([cut, events]);
        }
        window.fetch = async () => new Response('data: {"error":{"message":"It died.","code":"engine_died"}}\\n\\n');
        let told = null;
        try { for await (const event of module.streamEvents("v1/completions", { body: {} })) wrong.push(event); }
        catch (error) { told = [error.message, error.code]; }
        window.fetch = real;
        return [wrong, told];
        """,
        'data: {"a":"é😀"}\n\n: note\n\ndata: {"a":2}\n\ndata: [DONE]\n\ndata: {"a":3}\n\n',
    )
    assert found == [[], ["It died.", "engine_died"]]


def test_a_pool_of_a_million_blocks_is_drawn_block_by_block(browser, served):
    """By the page's own code, from a picture as the server makes them."""
    browser.show_as(DESK)
    browser.open(f"{served.url}/dashboard")
    browser.until(lambda: browser.run("return document.getElementById('pool') !== null"))
    found = browser.call(
        f"{served.url}/dashboard/static/pool_view.js",
        """
        const { PoolPicture } = await import(args[0]);
        const padded = new TextEncoder().encode(args[1].padEnd(Math.ceil(args[1].length / 4) * 4));
        const buffer = new ArrayBuffer(4 + padded.length + 1000000 + 8);
        new DataView(buffer).setUint32(0, padded.length, true);
        new Uint8Array(buffer).set(padded, 4);
        const flags = new Uint8Array(buffer, 4 + padded.length, 1000000);
        flags[0] = 1; flags[999999] = 1; flags[500] = 2;
        new Uint32Array(buffer, 4 + padded.length + 1000000).set([0, 999999]);
        const picture = new PoolPicture(buffer);
        const view = new module.PoolView(() => {});
        document.getElementById("main").replaceChildren(view.element);
        view.byRequest = false;
        view.show(picture);
        const context = view.canvas.getContext("2d");
        const place = (id) => [id % view.columns, Math.floor(id / view.columns)];
        const at = (id) => [...context.getImageData(...place(id), 1, 1).data].join();
        return [picture.totals, at(0) === at(999999), at(0) !== at(1), at(500) !== at(1), picture.describe(999999)];
        """,
        f"{served.url}/dashboard/static/pool_picture.js",
        msgspec.json.encode(PoolHead(1, 1_000_000, 16, 1.0, [Holder("cmpl-1", 0, 0, None, 9, 17, 17, 2)])).decode(),
    )
    assert found[0] == {"free": 999_997, "cached": 1, "used": 2, "shared": 0}
    assert found[1:4] == [True, True, True]
    assert found[4].startswith("Block 999999: used \N{EN DASH} cmpl-1, place 1 of its table")

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
    row = seen["num_prompt_tokens"] - 1
    assert f"to token {int(np.argmax(weights[row]))}, " in told_of_cell(
        browser
    )  # where the prompt's last token looks most
    browser.press(Keys.END)
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
    # The softmax in numbers, and the mixture of values that comes of it.
    query, keys, values = (tensors[name].reshape(count, 64) for name in ("rotated_query", "rotated_key", "value"))
    scores = keys[: row + 1] @ query[row] / 8
    powers = np.exp(scores - scores.max())
    cells = "return [...document.querySelectorAll('#softmax tr')].map((r) => [...r.cells].map((c) => c.textContent))"
    table = browser.run(cells)
    assert [int(line[0]) for line in table[:6]] == np.argsort(-weights[row])[:6].tolist()
    for to, _, product, score, power, share, _ in table[:6]:
        expected = [8 * scores[int(to)], scores[int(to)], powers[int(to)], 100 * weights[row, int(to)]]
        shown = [float(product), float(score), float(power), float(share.removesuffix(" %"))]
        assert shown == pytest.approx(expected, abs=0.06)
    (rest, total), others = table[6:], row + 1 - 6
    assert (rest[0], total[0], total[4]) == (f"{others} others", f"all {row + 1}", "100.0 %")
    assert float(total[3]) == pytest.approx(powers.sum(), abs=0.01)
    browser.run("document.getElementById('strip-output').focus()")
    browser.press(Keys.END)
    mixed = float(browser.run("return document.activeElement.getAttribute('aria-valuetext')").rpartition(" ")[2])
    assert mixed == pytest.approx((weights[row] @ values)[63], abs=2e-3)
    assert browser.errors() == []


def test_the_heads_that_stand_out_can_be_chosen(browser, served):
    inspect(browser, served.url, "Paris is the capital of France, and Rome is the capital of", max_tokens=2)
    names = browser.run("return [...document.querySelectorAll('#habits button')].map((b) => b.textContent)")
    assert [name.partition(":")[0] for name in names] == [
        "to the first token",
        "to the token itself",
        "to the token before",
        "to what came after the same token before",
    ]
    before = "#habits button[data-head='16/0']"  # so says docs/dashboard.md
    assert browser.text(before).startswith("to the token before: layer 16, head 0 (")
    browser.click(before)
    browser.until(lambda: browser.run(SHOWN) == "16/0")
    assert browser.run("return [document.getElementById('layer').value, document.getElementById('head').value]") == [
        "16",
        "0",
    ]


def test_a_pointer_that_asks_faster_than_the_server_answers_is_not_refused(browser, served):
    inspect(browser, served.url)
    browser.run("""
        const map = document.getElementById("attention");
        const { left, top, width, height } = map.getBoundingClientRect();
        for (let i = 1; i < 60; i += 1)
          map.dispatchEvent(
            new PointerEvent("pointermove", { clientX: left + 0.2 * width, clientY: top + (height * i) / 60 }));
        for (let i = 1; i < 25; i += 1) {
          document.getElementById("layer").value = i;
          document.getElementById("layer").dispatchEvent(new Event("change"));
        }
    """)
    browser.until(lambda: browser.run(SHOWN) == "24/0")
    assert browser.run("return document.querySelector('.notice').hidden")
    assert browser.errors() == []


def test_what_cannot_be_seen_is_written_out(browser, served):
    open_page(browser, served.url)
    texts = ["a b", "\n\t", "\x00\x7f", "\u202e\u00a0", "bytes:\\xf0\\x9f", "bytes:\\x80", "bytes: many", ""]
    found = browser.call(
        f"{served.url}/dashboard/static/inspection.js",
        "return args[0].map((text) => [module.visible(text), module.quoted(text)])",
        texts,
    )
    assert found == [
        ["a·b", '"a b"'],
        ["⏎⇥", '"\\n\\t"'],
        ["␀␡", '"\\u0000\\u{007F}"'],
        ["U+202EU+00A0", '"\\u{202E}\u00a0"'],
        ["f0 9f", "part of a character (bytes f0 9f)"],
        ["80", "part of a character (byte 80)"],
        ["bytes:·many", '"bytes: many"'],
        ["∅", '""'],
    ]


def test_a_window_is_heeded_in_what_is_told(browser, served):
    """Of a made-up model whose second layer looks back two tokens: that server's own model has no such layers."""
    open_page(browser, served.url)
    code = """
        const { Inspection } = await import(args[0]);
        const layer = { sliding_window: null };
        const candidates = [{ text: "d", probability: 1 }];
        const step = (first_position, num_tokens) => ({ first_position, num_tokens, num_blocks: 2, candidates });
        const inspection = new Inspection({
          id: "x", tokens: ["a", "b", "c", "d", "e"].map((text, id) => ({ id, text })), num_prompt_tokens: 3,
          block_size: 2, block_ids: [3, 0], num_pool_blocks: 4, other_block_ids: [1],
          layers: [layer, { sliding_window: 2 }], steps: [step(0, 3), step(3, 1)],
          outline: { num_layers: 2, num_q_heads: 1, num_kv_heads: 1, head_dim: 4, scale: 0.5, logit_softcap: 10 },
          served: { num_blocks: 10, max_model_len: 8, bytes_per_token_per_layer: 100, dtype: "float32" },
        });
        const view = new module.CacheView();
        document.body.append(view.element);
        view.show(inspection);
        const zeros = new Float32Array(16);
        const tensors = { numTokens: 4, headDim: 4, tensors: { rotated_key: zeros, value: zeros } };
        const told = [];
        for (const shown of [0, 1]) {
          view.showHead(shown, tensors, "a head");
          view.next.click();
          const slots = [...view.blocks.querySelectorAll(".kv-slot")].map((slot) => slot.className);
          const blocks = [...view.pool.children].map((block) => block.className + block.textContent);
          told.push([view.told, view.facts, view.serverTold].map((part) => part.textContent));
          told.at(-1).push(slots, blocks, view.windowKey.hidden);
        }
        return [told, inspection.score(8)];
    """
    static = f"{served.url}/dashboard/static"
    told, score = browser.call(f"{static}/cache_view.js", code, f"{static}/inspection.js")
    (all_seen, facts, server, slots, pool, is_hidden), (windowed, _, _, slots_of_window, _, is_hidden_there) = told
    assert "of 3 tokens before it are read" in all_seen and "times K transposed [4, 4] gives 4 scores" in all_seen
    assert "of 1 token before it are read" in windowed and "layer 1 looks back no further" in windowed
    assert "times K transposed [4, 2] gives 2 scores" in windowed
    assert slots == ["kv-slot read"] * 3 + ["kv-slot new"]
    assert slots_of_window == ["kv-slot kept"] * 2 + ["kv-slot read", "kv-slot new"]
    assert (is_hidden, is_hidden_there) == (True, False)
    assert "400 B in all layers" in facts  # three tokens in the first layer, one in the second
    assert "takes 2 of them, so 5 like this one fit" in server and "8 tokens here, and 2 would fit" in server
    assert pool == ["kv-block ours0→ 1", "kv-block others1", "kv-block 2", "kv-block ours3→ 0"]
    assert score == pytest.approx(10 * np.tanh(0.4))


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
    browser.click("#heads button[aria-label='Query head 1']")
    browser.until(lambda: "starts anew" in browser.text(".notice"))
    browser.click("#heads button[aria-label='Query head 2']")  # of the prompt of before, which is computed once more
    browser.until(lambda: browser.run(SHOWN) == "0/2")
    assert browser.run("return document.querySelector('.notice').hidden")
    browser.click("#inspect")
    browser.until(lambda: browser.text("#inspect-status").startswith("Done: 1 of the prompt's"))
    assert served.is_ready() and browser.errors("status of 400", "status of 404", "status of 503") == []


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

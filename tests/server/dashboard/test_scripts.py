"""The pages' own modules in a real browser, where servers, networks and clocks do what they seldom do."""

import pytest

from tests.server.dashboard.browser import DESK


@pytest.fixture
def call(browser, served):
    """The value of an async function's body that gets one of the page's modules, and more arguments as `args`."""
    browser.open(f"{served.url}/dashboard/playground")

    def ask(module: str, code: str, *arguments: object):
        return browser.call(f"{served.url}/dashboard/static/{module}", code, *arguments)

    return ask


def test_rates_and_percentiles_begin_anew_with_an_engine_that_said_nothing_between(call):
    """While it starts there are no statistics: what it counts afterwards is no difference to what was before."""
    found = call(
        "samples.js",
        """
        const samples = new module.Samples();
        const add = (time, steps, tokens) => samples.add({ time, uptime: time, open: [1, 2], latencies: {},
          stats: steps === null ? null : { num_steps: steps, num_tokens: tokens } });
        const found = [];
        for (const sample of args[0]) { add(...sample); found.push(samples.rate("num_tokens", 3)); }
        return [found, Object.keys(samples.newest).sort()];
        """,
        [(1, 10, 100), (2, 20, 300), (3, None, 0), (4, None, 0), (5, 1, 7), (6, 2, 9), (7, 3, 11)],
    )
    assert found[0] == [None, 200, None, None, None, 2, 2]
    assert found[1] == ["latencies", "stats", "time", "uptime"], "what is listed is not kept for minutes"


def test_an_answer_that_breaks_off_or_is_late_is_told_as_none(call):
    found = call(
        "api.js",
        """
        const real = window.fetch;
        const told = async (fetched, options) => {
          window.fetch = fetched;
          try { return [await module.requestJson("health/ready", options)]; }
          catch (error) { return [error.name, error.constructor === module.ApiError, error.status ?? null]; }
          finally { window.fetch = real; }
        };
        const broken = async () => new Response(new ReadableStream({ start(c) {
          c.enqueue(new TextEncoder().encode('{"a":')); c.error(new TypeError("network error")); } }));
        const hanging = (url, { signal }) => new Promise((_, refuse) =>
          signal.addEventListener("abort", () => refuse(signal.reason)));
        const leaving = new AbortController();
        const left = (url, options) => { setTimeout(() => leaving.abort(), 1); return hanging(url, options); };
        return [await told(broken), await told(async () => new Response("<p>of a proxy")),
          await told(hanging, { patience: 0.05 }), await told(left, { patience: 60, signal: leaving.signal }),
          await told(real, { patience: 60 })];
        """,
    )
    none = ["Error", True, 0]
    assert found == [none, none, none, ["AbortError", False, None], [{"status": "ready"}]]


@pytest.mark.parametrize("end", ["", "data: [DO", "\n\ndata: "])
def test_a_stream_that_ends_without_its_last_word_is_an_error(call, end):
    found = call(
        "api.js",
        """
        const real = window.fetch;
        window.fetch = async () => new Response('data: {"a":1}\\n\\n' + args[0]);
        const events = [];
        try { for await (const event of module.streamEvents("v1/completions", { body: {} })) events.push(event.a); }
        catch (error) { return [events, error.message]; }
        finally { window.fetch = real; }
        return [events, null];
        """,
        end,
    )
    assert found == [[1], "The connection ended before the answer was complete."]


def test_a_key_is_kept_by_the_page_where_the_browser_keeps_nothing(call):
    found = call(
        "api.js",
        """
        const forbidden = { configurable: true, get() { throw new DOMException("", "SecurityError"); } };
        Object.defineProperty(window, "sessionStorage", forbidden);
        const found = [module.getKey()];
        module.setKey("a");
        found.push(module.getKey());
        delete window.sessionStorage;
        return found;
        """,
    )
    assert found == ["", "a"]


def test_colours_are_those_that_the_browser_knows_by_hue(call):
    wrong = call(
        "theme.js",
        """
        const wrong = [];
        for (let hue = 0; hue < 360; hue += 7) for (const [s, l] of [[0.62, 0.66], [0.6, 0.46], [1, 0.5], [0, 0.2]]) {
          const [ours, its] = [module.hslToRgb(hue, s, l), module.rgb(`hsl(${hue} ${100 * s}% ${100 * l}%)`)];
          if (ours.some((part, i) => Math.abs(part - its[i]) > 1)) wrong.push([hue, s, l, ours, its]);
        }
        return wrong;
        """,
    )
    assert wrong == []


# Takes the place of `fetch` on a page that is open: `window.answer(path)` may return a response, or a promise of one.
STAND_IN = """
window.real = window.fetch;
window.asked = [];
window.fetch = (url, options) => {
  const path = new URL(url).pathname;
  window.asked.push(path);
  return window.answer(path, options) ?? window.real(url, options);
};
"""


@pytest.fixture
def live(browser, served):
    """The page "Live", whose answers a test may take the place of."""
    browser.show_as(DESK)
    browser.open(f"{served.url}/dashboard")
    browser.until(lambda: browser.text("#tile-running") == "0")
    browser.run("window.answer = () => undefined;" + STAND_IN)
    return browser


def num_asked(browser, path: str) -> int:
    return browser.run("return window.asked.filter((path) => path.endsWith(arguments[0])).length", path)


def test_the_page_goes_on_after_an_answer_that_breaks_off(live):
    live.run("""window.answer = (path) => path.includes("/data/") ? Promise.resolve(new Response(new ReadableStream({
        start(c) { c.error(new TypeError("network error")); } }))) : undefined;""")
    live.until(lambda: "does not answer" in live.text(".notice"))
    live.run("window.answer = () => undefined; window.asked = []")
    live.until(lambda: live.run("return document.querySelector('.notice').hidden"))
    live.until(lambda: num_asked(live, "/pool") > 1)
    assert live.errors() == []


def test_numbers_go_on_while_the_pool_is_waited_for(live):
    live.run("""window.answer = (path) => path.endsWith("/pool") ? new Promise(() => {}) : undefined;""")
    live.until(lambda: num_asked(live, "/pool") == 1)
    live.run("window.asked = []")
    live.until(lambda: num_asked(live, "/live") > 2)
    assert num_asked(live, "/pool") == 0, "one question at a time"


def test_an_engine_that_is_silent_is_told_of_long_before_it_counts_as_lost(live):
    live.run("""window.answer = (path) => path.endsWith("/pool") ? Promise.resolve(new Response(
        '{"error": {"message": "It is too busy.", "code": "engine_unavailable"}}', { status: 503 })) : undefined;""")
    live.until(lambda: live.text(".notice") == "It is too busy.")
    live.run("window.answer = () => undefined")
    live.until(lambda: live.run("return document.querySelector('.notice').hidden"))


def test_nothing_is_shown_of_an_engine_that_is_lost(live):
    live.run("""
        window.answer = (path) => path.endsWith("/live")
          ? window.real(path).then(async (response) => new Response(
              JSON.stringify({ ...await response.json(), ready: false, stats: null })))
          : path.endsWith("/pool") ? Promise.resolve(new Response("{}", { status: 503 })) : undefined;
    """)
    live.until(lambda: "does not answer" in live.text(".notice"))
    numbers = """return [...document.querySelectorAll(".tile dd span, [aria-labelledby=pool-title] .legend b")]
        .map((element) => element.textContent)"""
    assert set(live.run(numbers)) == {"\N{EN DASH}"}
    live.run("window.answer = () => undefined")
    live.until(lambda: "\N{EN DASH}" not in live.run(numbers)[-4:])
    assert live.errors("status of 503") == []


def test_a_page_that_nobody_sees_asks_nothing_and_one_that_is_seen_again_asks_at_once(live):
    live.until(lambda: num_asked(live, "/live") > 0)
    hide = """
        Object.defineProperty(document, "hidden", { configurable: true, value: arguments[0] });
        document.dispatchEvent(new Event("visibilitychange"));
        window.asked = [];
    """
    live.run(hide, True)
    kept = live.run("return new Promise((done) => setTimeout(() => done(window.asked.length), 2500))")
    assert kept == 0
    live.run(hide, False)
    live.until(lambda: num_asked(live, "/live") and num_asked(live, "/pool"))


# A completion whose events a test sends one by one.
STREAM = """
const event = (token) => JSON.stringify({ choices: [
  { text: token, logprobs: { tokens: [token], token_logprobs: [-0.1], top_logprobs: [{}] } }] });
window.say = (token) => controller.enqueue(new TextEncoder().encode(
  `data: ${token === null ? "[DONE]" : event(token)}\\n\\n`));
let controller;
window.answer = (path) => path.endsWith("/v1/completions")
  ? Promise.resolve(new Response(new ReadableStream({ start(c) { controller = c; } }))) : undefined;
"""


@pytest.fixture
def streaming(browser, served):
    browser.show_as(DESK)
    browser.open(f"{served.url}/dashboard/playground")
    browser.until(lambda: browser.run("return document.getElementById('run') !== null"))
    browser.run(STREAM + STAND_IN)
    browser.click("#run")
    browser.until(lambda: num_asked(browser, "/v1/completions") == 1)
    return browser


def test_each_token_is_shown_when_it_comes(streaming):
    num_shown = "return document.querySelectorAll('#tokens > .token').length"
    for place, token in enumerate(["a", "<b>bold</b>", "</script><script>window.struck = 1</script>", "\n", ""]):
        streaming.run("window.say(arguments[0])", token)
        streaming.until(lambda place=place: streaming.run(num_shown) == place + 1)
    assert streaming.run("return document.getElementById('run').disabled")
    assert streaming.text("[role=status].unseen") == "Waiting for the answer.", "it is not read out token by token"
    assert streaming.run(
        "return [document.querySelectorAll('#tokens b, #tokens script').length, window.struck ?? null]"
    ) == [0, None]
    streaming.run("window.say(null)")
    streaming.until(lambda: streaming.text("[role=status].unseen").startswith("5 tokens"))
    assert "<b>bold</b>" in streaming.text("[role=status].unseen")
    assert streaming.errors("status of 404") == []  # the server has never heard of this request


def test_the_newest_token_stays_in_view_unless_one_looks_back(streaming):
    at_end = "const t = document.getElementById('tokens'); return t.scrollHeight - t.scrollTop - t.clientHeight"
    streaming.run("for (let i = 0; i < 60; i += 1) window.say('word\\n')")
    streaming.until(lambda: streaming.run("return document.querySelectorAll('#tokens > .token').length") == 60)
    streaming.until(lambda: streaming.run(at_end) < 2)
    assert streaming.run("return document.getElementById('tokens').scrollTop") > 0
    streaming.run("document.getElementById('tokens').scrollTop = 0")
    streaming.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    streaming.run("window.say('more\\n')")
    streaming.until(lambda: streaming.run("return document.querySelectorAll('#tokens > .token').length") == 61)
    streaming.run("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert streaming.run("return document.getElementById('tokens').scrollTop") == 0

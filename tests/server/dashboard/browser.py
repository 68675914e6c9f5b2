"""A headless Chromium for tests of the dashboard's pages: how to start one, and what to measure in it.

Skips where there is no chromium with its chromedriver, or no selenium. Knows no page.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WAIT_SECONDS = 30.0
PHONE = (390, 844)
DESK = (1280, 900)

# Every text that can be seen, with its contrast against what it stands on (WCAG 2.2, success criterion 1.4.3: relative
# luminance of sRGB). Backgrounds that let others through are laid over them.
_CONTRASTS = """
const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
const luminance = (rgb) => {
  const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  const chain = [];
  for (let e = element; e; e = e.parentElement) chain.push(parse(getComputedStyle(e).backgroundColor));
  return chain.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
};
const found = [];
const measure = (element, text, style) => {
  const back = ground(element);
  const [light, dark] = [luminance(over(parse(style.color), back)), luminance(back)].sort((a, b) => b - a);
  found.push([(light + 0.05) / (dark + 0.05), text.trim().slice(0, 40), element.tagName]);
};
for (const element of document.querySelectorAll("body *")) {
  if (!element.checkVisibility({ visibilityProperty: true }) || element.closest(":disabled, noscript")) continue;
  const text = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data).join("");
  if (text.trim()) measure(element, text, getComputedStyle(element));
  if (element.placeholder) measure(element, element.placeholder, getComputedStyle(element, "::placeholder"));
  if (element.matches("input, textarea, select")) measure(element, "(value)", getComputedStyle(element));
}
return found;
"""

_TABBABLE = """
return [...document.querySelectorAll("a[href], button, input, textarea, select, [tabindex]")].filter((e) =>
  e.checkVisibility() && !e.disabled && e.tabIndex >= 0 && !(e.type === "radio" && !e.checked));
"""


@cache
def _missing() -> str | None:
    """What a test in a browser lacks on this machine."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"no {program} on this machine (Debian: apt-get install chromium chromium-driver)"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "no selenium (it is in the extra `test`)"
    return None


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def show_as(self, size: tuple[int, int], *, dark: bool = False) -> None:
        """Take the size of a screen and a colour scheme."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def open(self, url: str) -> None:
        """Load a page, and forget what the console said before."""
        self.driver.get_log("browser")
        self.driver.get(url)

    def run(self, script: str, *arguments: object) -> Any:
        """The value of a script's `return`."""
        return self.driver.execute_script(script, *arguments)

    def call(self, module: str, code: str, *arguments: object) -> Any:
        """What the body of an async function returns that gets a module of the page's server as `module`."""
        script = (
            "const [url, ...args] = [...arguments]; const done = args.pop();"
            f"import(url).then(async (module) => {{ {code} }})"
            ".then((value) => done([true, JSON.stringify(value ?? null)]), (error) => done([false, String(error)]));"
        )
        succeeded, value = self.driver.execute_async_script(script, module, *arguments)
        assert succeeded, value
        return json.loads(value)

    def text(self, selector: str) -> str:
        """What an element says; "" where there is none."""
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def click(self, selector: str) -> None:
        """On the middle of an element."""
        self.driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        """In place of what stands in a field."""
        field = self.driver.find_element("css selector", selector)
        field.clear()
        field.send_keys(text)

    def press(self, *keys: str) -> None:
        """On whatever has the focus."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition` is true, and return its value."""
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, WAIT_SECONDS, 0.1).until(lambda _: condition())

    def errors(self, *allowed: str) -> list[str]:
        """What the console complained of since the page was opened, without messages that hold one of `allowed`."""
        complaints = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        return [message for message in complaints if not any(part in message for part in allowed)]

    def low_contrasts(self, least: float = 4.5) -> list[Any]:
        """Texts below it."""
        measured = self.run(_CONTRASTS)
        assert measured, "the page shows no text"
        return [entry for entry in measured if entry[0] < least]

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than the screen; a phone's window grows with it, and tells nothing."""
        return self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def unreached_by_tab(self) -> list[str]:
        """Controls that the Tab key does not come to, or comes to without showing where it is."""
        from selenium.webdriver.common.keys import Keys

        wanted = self.run(_TABBABLE)
        self.run("document.activeElement?.blur(); window.getSelection().removeAllRanges(); window.scrollTo(0, 0);")
        reached = []
        for _ in range(len(wanted) + 5):
            self.press(Keys.TAB)
            if self.run("return getComputedStyle(document.activeElement).outlineStyle") != "none":
                reached.append(self.run("return document.activeElement"))
        return [self.run("return arguments[0].outerHTML", element) for element in wanted if element not in reached]


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser, or a skipped test."""
    if (reason := _missing()) is not None:
        pytest.skip(reason)
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(WAIT_SECONDS)
        yield Browser(driver)
    finally:
        driver.quit()

// The frame of every page: skip link, name, navigation, the key field and how the server is. Knows no page's content.

import { getKey, requestJson, setKey } from "./api.js";
import { el, setText } from "./dom.js";
import { poll } from "./polling.js";

const PAGES = [
  ["live", "Live", ""],
  ["playground", "Playground", "/playground"],
  ["inspector", "Inspector", "/inspector"],
];
const DASHBOARD = new URL("../../dashboard", import.meta.url).href;
const ICON = new URL("icon.svg", import.meta.url).href;
const READINESS_SECONDS = 5;

/** Fills the page's header; `current` is the page's name ("live", "playground", "inspector"). */
export function mountShell(current) {
  const status = el("span", { class: "status", role: "status", id: "status" }, "…");
  document.body.prepend(el("a", { class: "skip", href: "#main" }, "Skip to the content"));
  document.getElementById("shell").append(
    el("div", { class: "brand" }, el("img", { src: ICON, alt: "", width: 24, height: 24 }), "Octavo"),
    el("nav", { "aria-label": "Pages" }, el("ul", {}, ...PAGES.map((page) => link(page, current)))),
    status,
    keyForm(),
  );
  poll(async (signal) => {
    const [text, state] = await readiness(signal);
    setText(status, text);
    status.dataset.state = state;
    return READINESS_SECONDS;
  });
}

/** A notice for an error, which a screen reader reads out. What it says may change; "" hides it. */
export function noticeArea() {
  const notice = el("p", { class: "notice error", role: "alert", hidden: true });
  return {
    element: notice,
    show(text) {
      setText(notice, text);
      notice.hidden = text === "";
    },
  };
}

function link([name, title, path], current) {
  return el("li", {}, el("a", { href: DASHBOARD + path, "aria-current": name === current ? "page" : null }, title));
}

function keyForm() {
  const field = el("input", {
    type: "password", id: "key", autocomplete: "off", spellcheck: "false", value: getKey(), placeholder: "API key",
    "aria-label": "API key",
  });
  const save = (event) => {
    event.preventDefault();
    setKey(field.value.trim());
  };
  return el(
    "form", { class: "key", onsubmit: save },
    el("label", {}, field),
    el("button", { type: "submit", title: "Kept in this tab until it is closed" }, "Use key"),
  );
}

/** Needs no key. */
async function readiness(signal) {
  try {
    await requestJson("health/ready", { signal, patience: READINESS_SECONDS });
    return ["ready", "ready"];
  } catch (error) {
    if (signal.aborted) throw error;
    return [error.status === 503 ? "not ready" : "no answer", "bad"];
  }
}

// The frame of every page: skip link, name, navigation, the key field and how the server is. Knows no page's content.

import { getKey, request, setKey } from "./api.js";
import { el, setText } from "./dom.js";

const PAGES = [
  ["live", "Live", ""],
  ["playground", "Playground", "/playground"],
  ["inspector", "Inspector", "/inspector"],
];
const DASHBOARD = new URL("../../dashboard", import.meta.url).href;
const ICON = new URL("icon.svg", import.meta.url).href;
const READINESS_MS = 5000;

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
  watchReadiness(status);
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

async function watchReadiness(status) {
  const [text, state] = await readiness();
  setText(status, text);
  status.dataset.state = state;
  setTimeout(() => watchReadiness(status), READINESS_MS);
}

/** Needs no key. */
async function readiness() {
  try {
    await request("health/ready");
    return ["ready", "ready"];
  } catch (error) {
    return [error.status === 503 ? "not ready" : "no answer", "bad"];
  }
}

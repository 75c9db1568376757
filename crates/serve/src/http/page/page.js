// The frame of the page: the current view, the keyboard, and the state of the daemon.

import { ask, live } from "./api.js";
import { address, search, subject } from "./address.js";
import { block } from "./block.js";
import { h, hideTip, to } from "./dom.js";
import { events } from "./events.js";
import { count } from "./format.js";
import { overview } from "./overview.js";
import { orphaned, pool } from "./pool.js";
import { problems } from "./problems.js";

const VIEWS = {
  "": [overview, "pools"], pool: [pool, "pools"], orphaned: [orphaned, "pools"], block: [block, "pools"],
  address: [address, "pools"], container: [subject, ""], pod: [subject, ""], node: [subject, ""], search: [search, ""],
  events: [events, "events"], problems: [problems, "problems"],
};
/** Minimum time between two updates of a view, in milliseconds. */
const CALM = 2500;
/** Minimum time between two updates of a view that is expensive for the daemon, in milliseconds. */
const SLOW = 15000;
/** How long to wait before a failed request is repeated, in milliseconds. */
const RETRY = 4000;

const main = document.getElementById("main");
const query = document.getElementById("query");
const gone = document.getElementById("gone");
let current = { abort: () => {}, view: null, at: 0, busy: false };

/** Returns the view in the URL: `#/block/10.0.0.0/26` is `["block", "10.0.0.0/26"]`. */
function place() {
  const path = location.hash.replace(/^#\/?/, "");
  const cut = path.indexOf("/");
  const [route, rest] = cut < 0 ? [path, ""] : [path.slice(0, cut), path.slice(cut + 1)];
  try {
    return [route, decodeURIComponent(rest)];
  } catch {
    return [route, rest];
  }
}

function put(view) {
  main.replaceChildren(...view.nodes.flat().filter(Boolean));
  document.title = `${view.title} · Margay`;
  view.shown?.();
}

/** Replaces a view by its new version. The focused element keeps the focus if it still exists. */
function replace(view) {
  const held = main.contains(document.activeElement) ? document.activeElement : null;
  const mark = held && (held.getAttribute("href") ?? held.id);
  const open = [...main.querySelectorAll("details")].map((one) => one.open);
  const [x, y] = [scrollX, scrollY];
  put(view);
  [...main.querySelectorAll("details")].forEach((one, at) => (one.open = open[at] ?? one.open));
  if (mark) [...main.querySelectorAll("a, [id]")].find((one) => (one.getAttribute("href") ?? one.id) === mark)?.focus({ preventScroll: true });
  scrollTo(x, y);
}

/** Shows the view in the URL. `how` is "first", "moved" or "again". */
async function show(how) {
  const [route, rest] = place();
  current.abort();
  const aborter = new AbortController();
  const { signal } = aborter;
  const shown = (current = { abort: () => aborter.abort(), view: null, at: Date.now(), busy: true });
  const [make, part] = VIEWS[route] ?? [];
  for (const one of document.querySelectorAll("nav a")) {
    if (one.dataset.route === part) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  hideTip();
  if (route === "search") query.value = rest;
  if (!make) return put({ title: "Not here", nodes: [h("h1", { tabindex: "-1" }, "There is nothing here"), h("p", null, h("a", { href: "#/" }, "All pools"))] });
  if (how !== "again") main.replaceChildren(h("p", { class: "loading" }, "Reading the store"));
  try {
    const view = await make({ route, rest, signal });
    if (signal.aborted) return;
    shown.view = view;
    shown.at = Date.now();
    told(null);
    if (how === "again") replace(view);
    else {
      put(view);
      scrollTo(0, 0);
      if (how === "moved") main.querySelector("h1")?.focus({ preventScroll: true });
    }
    if (view.found !== undefined) badge(view.found);
  } catch (error) {
    if (signal.aborted) return;
    failed(error, how);
  } finally {
    shown.busy = false;
  }
}

function failed(error, how) {
  const isAbsent = error.status === 0;
  if (isAbsent) told(error.message);
  if (!(how === "again" && main.querySelector("h1"))) {
    main.replaceChildren(h("h1", { tabindex: "-1" }, "Margay"), h("section", { class: "error" },
      h("h2", null, isAbsent ? "The daemon is not there" : "This cannot be shown"), h("p", null, error.message),
      isAbsent ? h("p", null, "It is asked again every few seconds. To start it: ", h("code", null, "margay serve")) : null,
      h("button", { type: "button", onclick: () => show("moved") }, "Try again")));
  }
  const isLasting = error.status >= 400 && error.status < 500;
  if (!isLasting) {
    const shown = current;
    setTimeout(() => current === shown && show(main.querySelector(".error") ? "first" : "again"), RETRY);
  }
}

/** Shows at the top that the daemon does not answer; `null` hides the message. */
function told(text) {
  gone.hidden = !text;
  gone.textContent = text ? `${text} The page may show old data; it asks again every few seconds.` : "";
}

function badge(found) {
  const item = document.querySelector('nav a[data-route="problems"]');
  item.querySelector(".badge")?.remove();
  if (found > 0) item.append(h("span", { class: "badge bad", "aria-label": `${count(found)} found` }, count(found)));
}

// Events make the page reload its view, but not faster than a person can read.
let due = null;
function again() {
  if (due) return;
  const shown = current;
  const wait = Math.max(300, shown.at + (shown.view?.slow ? SLOW : CALM) - Date.now());
  due = setTimeout(async () => {
    due = null;
    if (document.hidden) return void document.addEventListener("visibilitychange", again, { once: true });
    if (current !== shown || shown.busy) return again();
    if (!shown.view || shown.view.still) return;
    if (!shown.view.refresh) return show("again");
    shown.at = Date.now();
    try {
      await shown.view.refresh();
    } catch (error) {
      if (error.name !== "AbortError" && error.status === 0) failed(error, "again");
    }
  }, wait);
}
live.addEventListener("batch", again);

const lamp = document.getElementById("live");
live.addEventListener("state", ({ detail }) => {
  lamp.dataset.state = live.state;
  lamp.textContent = { wait: "connecting", live: `live, revision ${count(live.revision)}`, lost: "not connected" }[live.state];
  if (!detail.changed) return;
  if (live.state === "lost") told("The daemon does not answer.");
  else if (!gone.hidden) show("again");
});

document.getElementById("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = query.value.trim();
  if (text) location.hash = to("search", text);
});
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

const THEMES = { auto: ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };
const root = document.documentElement;
const button = document.getElementById("theme");
function theme(name) {
  if (name === "auto") delete root.dataset.theme;
  else root.dataset.theme = name;
  const [sign, words] = THEMES[name];
  button.textContent = sign;
  button.title = `Colours: ${words}`;
  button.setAttribute("aria-label", button.title);
  document.dispatchEvent(new Event("themechange"));
}
function nextTheme() {
  const names = Object.keys(THEMES);
  const name = names[(names.indexOf(root.dataset.theme ?? "auto") + 1) % names.length];
  try {
    localStorage.setItem("theme", name);
  } catch {
    // Without storage, the choice lasts until the page is closed.
  }
  theme(name);
}
button.addEventListener("click", nextTheme);
theme(root.dataset.theme ?? "auto");

const keys = document.getElementById("keys");
document.getElementById("help").addEventListener("click", () => keys.showModal());
let went = 0;
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    hideTip();
    if (document.activeElement === query) query.blur();
  }
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, dialog")) return;
  const wentJustNow = Date.now() - went < 1200;
  went = 0;
  const act = wentJustNow && { p: () => (location.hash = "#/"), e: () => (location.hash = "#/events"), c: () => (location.hash = "#/problems") }[event.key]
    || { "/": () => { query.focus(); query.select(); }, "?": () => keys.showModal(), t: nextTheme, g: () => (went = Date.now()) }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

// A hidden page closes its event stream, which frees its connection for other clients.
let leaving = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (document.hidden) leaving = setTimeout(() => live.stop(), 5000);
  else if (!live.isOpen) live.start();
});

addEventListener("hashchange", () => show("moved"));
show("first");
live.start();
ask("about").then((about) => {
  document.getElementById("about").textContent = `Margay ${about.version}, ${about.engine}, ${about.store}`;
}).catch(() => {});

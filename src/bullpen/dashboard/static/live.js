// A stream tells that the page is out of date, and the page fetches its content: at most once in 700 ms, and nothing
// when nothing changed. A hidden tab closes its stream, so that many tabs of one browser work.
import { morph } from "./morph.js";

const { body } = document;
const byId = (id) => document.getElementById(id);
const LEAST_MS = 700;
const state = { source: null, paused: false, busy: false, again: false, last: 0, timer: 0, failures: 0, tag: "", polling: 0 };
let enhance = () => {};

export function live(afterChange) {
  enhance = afterChange;
  const button = byId("live");
  if (button) {
    button.hidden = false;
    button.addEventListener("click", togglePause);
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) stop();
    else if (!state.paused && body.dataset.stream) {
      start();
      refresh();
    }
  });
  addEventListener("pagehide", stop);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-reload]")) return;
    event.preventDefault();
    location.reload();
  });
  start();
}

export function refresh() {
  if (state.paused || document.hidden) return;
  if (state.busy) {
    state.again = true;
    return;
  }
  const wait = state.last + LEAST_MS - performance.now();
  if (wait > 0) {
    clearTimeout(state.timer);
    state.timer = setTimeout(refresh, wait);
    return;
  }
  state.busy = true;
  state.last = performance.now();
  const request = new XMLHttpRequest();
  request.open("GET", location.href);
  request.responseType = "document";
  request.setRequestHeader("X-Bullpen-Part", "main");
  if (state.tag) request.setRequestHeader("If-None-Match", state.tag);
  request.onload = () => arrived(request);
  request.onerror = () => away("The dashboard does not answer. What you see is older.");
  request.onloadend = () => {
    state.busy = false;
    if (state.again) {
      state.again = false;
      refresh();
    }
  };
  request.send();
}

function arrived(request) {
  const main = request.response?.getElementById("main");
  if (request.status === 304) away("");
  else if (request.status === 200 && main && !state.paused) {
    state.tag = request.getResponseHeader("etag") ?? "";
    show(main);
    away("");
  } else if (request.status === 401 || request.responseURL.includes("/login")) {
    away("You are logged out.");
    stop();
  } else if (request.status === 404) away("This is not there any more. What you see is older.");
  else if (request.status >= 500) away("The server does not answer. What you see is older.");
}

function show(main) {
  announce(main);
  const note = byId("note");
  note?.remove();
  morph(byId("main"), main);
  if (note) byId("main").prepend(note);
  for (const each of document.querySelectorAll("[data-badge]")) {
    const count = byId("main").dataset[each.dataset.badge] ?? "";
    if (each.textContent !== count) each.textContent = count;
    each.hidden = !count || count === "0";
  }
  enhance();
}

let announcedAt = -10000;
function announce(next) {
  const before = document.querySelector("[data-verdict]")?.dataset.verdict;
  const after = next.querySelector("[data-verdict]")?.dataset.verdict;
  if (before && after && before !== after && performance.now() - announcedAt > 10000) {
    announcedAt = performance.now();
    byId("announce").textContent = next.querySelector(".verdict-text").textContent.trim();
  }
}

function away(text) {
  const bar = byId("away");
  bar.textContent = text;
  bar.hidden = !text;
}

function start() {
  if (!body.dataset.stream || state.source || state.paused || document.hidden) return;
  state.source = new EventSource(body.dataset.stream);
  state.source.onopen = () => {
    state.failures = 0;
    body.dataset.live = "on";
    clearInterval(state.polling);
    state.polling = 0;
    away("");
  };
  state.source.addEventListener("changed", refresh);
  state.source.onerror = () => {
    body.dataset.live = "lost";
    state.failures += 1;
    away("Live updates are interrupted. Trying again.");
    stop();
    if (state.failures > 2 && !state.polling) state.polling = setInterval(refresh, 5000);
    setTimeout(start, Math.min(10000, 500 * 2 ** state.failures) * (0.5 + Math.random()));
  };
}

function stop() {
  state.source?.close();
  state.source = null;
}

export function togglePause() {
  const button = byId("live");
  if (!button) return;
  state.paused = !state.paused;
  button.setAttribute("aria-pressed", String(!state.paused));
  button.lastChild.data = state.paused ? `paused at ${new Date().toTimeString().slice(0, 8)}` : "live";
  body.dataset.live = state.paused ? "paused" : "on";
  if (state.paused) stop();
  else {
    start();
    refresh();
  }
}

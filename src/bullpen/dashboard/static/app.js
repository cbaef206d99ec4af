// Live updates, copying, keys and times. Every page works without this file.
// Trusted Types are on: nothing here turns text into HTML. Fresh pages are parsed by the browser (XMLHttpRequest with
// responseType "document", which runs no script) and moved in node by node.

const body = document.body;
const byId = (id) => document.getElementById(id);

// ---- copying, also over plain HTTP -------------------------------------------------------------------------------

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("readonly", "");
    area.className = "visually-hidden";
    body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const done = await copy(button.dataset.copy);
  button.textContent = done ? "copied" : "not copied";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
});

// ---- times in the zone of the viewer, until one is chosen ----------------------------------------------------------

function cookie(name) {
  return document.cookie.split("; ").find((part) => part.startsWith(`${name}=`))?.slice(name.length + 1) ?? "";
}

const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
if (!cookie("bullpen_zone") && zone && zone !== "UTC") {
  document.cookie = `bullpen_zone=${encodeURIComponent(zone)}; Path=/; Max-Age=31536000; SameSite=Lax`;
  const parts = new Intl.DateTimeFormat("sv-SE", {
    timeZone: zone, year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  });
  for (const each of document.querySelectorAll("time[datetime]")) each.textContent = parts.format(new Date(each.dateTime));
}

// ---- what a script adds --------------------------------------------------------------------------------------------

function enhance() {
  for (const each of document.querySelectorAll(".copy[hidden]")) each.hidden = false;
  const all = byId("all");
  if (all) all.hidden = false;
  count();
}

function boxes() {
  return [...document.querySelectorAll('#selection input[name="id"]')];
}

function count() {
  const told = byId("selected");
  if (!told) return;
  const chosen = boxes().filter((box) => box.checked).length;
  told.textContent = chosen ? `${chosen} selected:` : "With the selected jobs:";
}

let lastBox = null;
document.addEventListener("click", (event) => {
  const box = event.target;
  if (box.id === "all") for (const each of boxes()) each.checked = box.checked;
  if (box.name === "id" && box.type === "checkbox") {
    const list = boxes();
    if (event.shiftKey && lastBox && list.includes(lastBox)) {
      const [from, to] = [list.indexOf(lastBox), list.indexOf(box)].sort((a, b) => a - b);
      for (const each of list.slice(from, to + 1)) each.checked = box.checked;
    }
    lastBox = box;
  }
  count();
});

// ---- morphing: change what differs, keep focus, folds, selection and half-typed forms --------------------------------

function morph(now, next) {
  if (now.nodeType !== next.nodeType || now.nodeName !== next.nodeName) {
    now.replaceWith(document.adoptNode(next));
    return;
  }
  if (now.nodeType === Node.TEXT_NODE) {
    if (now.data !== next.data) {
      now.data = next.data;
      mark(now.parentElement);
    }
    return;
  }
  if (now.nodeType !== Node.ELEMENT_NODE) return;
  if (now.matches("[data-list]") && !sameRows(now, next)) {
    offer(now, next);
    return;
  }
  attributes(now, next);
  if (now.matches("textarea, select, input")) return;
  children(now, next);
}

function attributes(now, next) {
  const kept = now.matches("details") ? ["open"] : now.matches("input") ? ["checked", "value", "hidden"] : now.matches(".copy") ? ["hidden"] : [];
  if (idOf(now) === "offer") kept.push("hidden");
  for (const { name } of [...now.attributes]) {
    if (!next.hasAttribute(name) && !kept.includes(name) && !(name === "class" && now.matches("tr"))) now.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (now.getAttribute(name) !== value && !kept.includes(name)) now.setAttribute(name, value);
  }
}

// Not `element.id`: a form with a field of that name answers with the field.
const idOf = (node) => node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("id") : null;

function children(now, next) {
  const known = new Map();
  for (const each of now.children) if (idOf(each)) known.set(idOf(each), each);
  let place = now.firstChild;
  for (const each of [...next.childNodes]) {
    const named = idOf(each) ? known.get(idOf(each)) : null;
    if (named) {
      if (named === place) place = place.nextSibling;
      else now.insertBefore(named, place);
      morph(named, each);
    } else if (place && !idOf(place) && !idOf(each) && place.nodeType === each.nodeType && place.nodeName === each.nodeName) {
      const after = place.nextSibling;
      morph(place, each);
      place = after;
    } else {
      now.insertBefore(document.adoptNode(each), place);
    }
  }
  while (place) {
    const after = place.nextSibling;
    place.remove();
    place = after;
  }
}

function mark(element) {
  if (!element || !element.matches(".n, .count, .facts span")) return;
  element.classList.add("changed");
  setTimeout(() => element.classList.remove("changed"), 1000);
}

const rowIds = (table) => [...table.querySelectorAll("tr[data-row]")].map((row) => row.id);

function sameRows(now, next) {
  return rowIds(now).join("\n") === rowIds(next).join("\n");
}

// Rows never move under the pointer: those that stayed change in place, the others wait until they are asked for.
function offer(now, next) {
  const fresh = new Map([...next.querySelectorAll("tr[data-row]")].map((row) => [row.id, row]));
  for (const row of now.querySelectorAll("tr[data-row]")) {
    const after = fresh.get(row.id);
    if (after) morph(row, after);
    row.classList.toggle("gone", !after);
  }
  const bar = byId("offer");
  if (!bar) return;
  const known = new Set(rowIds(now));
  const added = [...fresh.keys()].filter((id) => !known.has(id)).length;
  const link = bar.querySelector("a");
  link.textContent = added ? `${added} new. Show them.` : "The list has changed. Show it.";
  link.href = location.href;
  bar.hidden = false;
}

// ---- live ----------------------------------------------------------------------------------------------------------

const live = { source: null, paused: false, busy: false, again: false, last: 0, timer: 0, failures: 0 };
const LEAST_MS = 700;

function fetchPage() {
  if (live.paused || document.hidden) return;
  if (live.busy) {
    live.again = true;
    return;
  }
  const wait = live.last + LEAST_MS - performance.now();
  if (wait > 0) {
    clearTimeout(live.timer);
    live.timer = setTimeout(fetchPage, wait);
    return;
  }
  live.busy = true;
  live.last = performance.now();
  const request = new XMLHttpRequest();
  request.open("GET", location.href);
  request.responseType = "document";
  request.onload = () => {
    const main = request.response?.getElementById("main");
    if (request.status === 200 && main && !live.paused) {
      announce(main);
      const note = byId("note");
      if (note) note.remove();
      morph(byId("main"), main);
      if (note) byId("main").prepend(note);
      enhance();
      away("");
    } else if (request.status === 401 || request.responseURL.includes("/login")) {
      away("You are logged out.");
      stop();
    } else if (request.status >= 500) {
      away("The server does not answer. What you see is older.");
    }
  };
  request.onerror = () => away("The dashboard does not answer. What you see is older.");
  request.onloadend = () => {
    live.busy = false;
    if (live.again) {
      live.again = false;
      fetchPage();
    }
  };
  request.send();
}

let announcedAt = 0;
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

let polling = 0;
function start() {
  if (!body.dataset.stream || live.source || live.paused || document.hidden) return;
  live.source = new EventSource(body.dataset.stream);
  live.source.onopen = () => {
    live.failures = 0;
    body.dataset.live = "on";
    clearInterval(polling);
    polling = 0;
    away("");
  };
  live.source.addEventListener("changed", fetchPage);
  live.source.onerror = () => {
    body.dataset.live = "lost";
    live.failures += 1;
    away("Live updates are interrupted. Trying again.");
    stop();
    if (live.failures > 2 && !polling) polling = setInterval(fetchPage, 5000);
    setTimeout(start, Math.min(10000, 500 * 2 ** live.failures) * (0.5 + Math.random()));
  };
}

function stop() {
  live.source?.close();
  live.source = null;
}

const button = byId("live");
function togglePause() {
  live.paused = !live.paused;
  button.setAttribute("aria-pressed", String(!live.paused));
  button.textContent = live.paused ? `paused at ${new Date().toTimeString().slice(0, 8)}` : "live";
  body.dataset.live = live.paused ? "paused" : "on";
  if (live.paused) stop();
  else {
    start();
    fetchPage();
  }
}

if (button) {
  button.hidden = false;
  button.addEventListener("click", togglePause);
}
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else if (!live.paused) {
    start();
    if (body.dataset.stream) fetchPage();
  }
});
addEventListener("pagehide", stop);
document.addEventListener("click", (event) => {
  if (event.target.closest("[data-reload]")) {
    event.preventDefault();
    location.reload();
  }
});

// ---- keys ----------------------------------------------------------------------------------------------------------

const PAGES = { o: "", q: "queues", d: "dead-letters", x: "outbox", r: "runs", m: "messages", s: "schedules", k: "workers" };
let afterG = false;

function current() {
  return document.querySelector("tr.current");
}

function move(step) {
  const rows = [...document.querySelectorAll("tr[data-row]")];
  if (!rows.length) return;
  const place = rows.indexOf(current());
  const next = rows[Math.max(0, Math.min(rows.length - 1, place + step))];
  current()?.classList.remove("current");
  next.classList.add("current");
  next.querySelector("th a")?.focus();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, [contenteditable]")) return;
  if (afterG) {
    afterG = false;
    const wanted = PAGES[event.key];
    const link = wanted === undefined ? null : [...document.querySelectorAll(".top nav a")].find((each) => each.pathname === `${body.dataset.root}/${wanted}`);
    if (link) link.click();
    return;
  }
  const actions = {
    g: () => { afterG = true; setTimeout(() => { afterG = false; }, 1500); },
    "/": () => { event.preventDefault(); byId("find")?.focus(); },
    "?": () => byId("help").showModal(),
    j: () => move(1),
    k: () => move(-1),
    x: () => current()?.querySelector('input[name="id"]')?.click(),
    p: () => { if (button) togglePause(); },
  };
  actions[event.key]?.();
});

enhance();
start();

// Keys. None fires in a field, and they can be switched off in the settings.
import { copyFrom } from "./copy.js";
import { togglePause } from "./live.js";
import { closeMenus } from "./menus.js";

const byId = (id) => document.getElementById(id);
const current = () => document.querySelector("[data-row].current");
let afterG = false;

function move(step) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const place = rows.indexOf(current());
  const next = rows[Math.max(0, Math.min(rows.length - 1, place + step))];
  current()?.classList.remove("current");
  next.classList.add("current");
  next.querySelector("th a, a")?.focus();
}

function back() {
  if (byId("help").open || closeMenus()) return;
  if (current()) {
    current().classList.remove("current");
    document.activeElement.blur();
  } else document.querySelector("[data-up]")?.click();
}

function act() {
  const menu = document.querySelector(".head .actions details.menu");
  if (menu) menu.open = true;
  document.querySelector(".head .actions a, .head .actions button, .head .actions summary")?.focus();
}

const ACTIONS = {
  g: () => { afterG = true; setTimeout(() => { afterG = false; }, 1500); },
  "/": (event) => { event.preventDefault(); byId("find")?.focus(); },
  "?": () => byId("help").showModal(),
  j: () => move(1),
  k: () => move(-1),
  x: () => current()?.querySelector('input[name="id"]')?.click(),
  a: act,
  c: () => { const button = (current() ?? byId("main")).querySelector("[data-copy]"); if (button) copyFrom(button); },
  p: togglePause,
  Escape: back,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.body.dataset.keys === "off") return;
  if (event.target.closest("input:not([type=checkbox]), textarea, select, [contenteditable]")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (afterG) {
    afterG = false;
    document.querySelector(`.top [data-key="${CSS.escape(event.key)}"]`)?.click();
    return;
  }
  ACTIONS[event.key]?.(event);
});

// Every page works without these files. They add live updates, copying, keys, times of the viewer and menus that close.
// Trusted Types are on: nothing here turns text into HTML. Fresh content is parsed by the browser (XMLHttpRequest with
// responseType "document", which runs no script) and moved in node by node.
import { tick } from "./ages.js";
import "./copy.js";
import "./keys.js";
import { live } from "./live.js";
import "./logs.js";
import "./menus.js";
import { enhanceSelection } from "./select.js";
import "./theme.js";
import { useOwnZone } from "./zone.js";

function enhance() {
  for (const each of document.querySelectorAll("[data-script][hidden]")) each.hidden = false;
  for (const each of document.querySelectorAll('input[name="csrf"]')) if (!each.value) each.value = document.body.dataset.csrf;
  enhanceSelection();
  tick();
}

document.documentElement.classList.add("scripted");
useOwnZone();
enhance();
live(enhance);

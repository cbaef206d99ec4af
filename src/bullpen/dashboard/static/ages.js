// How long ago, in how long: each second, by the clock of the server.
const offset = Number(document.body.dataset.now) - Date.now();

function duration(ms) {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return seconds < 10 ? `${(Math.floor(seconds * 10) / 10).toFixed(1)} s` : `${Math.floor(seconds)} s`;
  const whole = Math.floor(seconds);
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 2 * 86400) return `${Math.floor(whole / 3600)}h ${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)} d`;
}

export function tick() {
  const now = Date.now() + offset;
  for (const each of document.querySelectorAll("[data-at]")) {
    const ms = now - Number(each.dataset.at);
    const bare = each.dataset.form === "bare";
    // Below a second a number would only flicker.
    const text = Math.abs(ms) < 1000 ? (bare ? "0 s" : "now") : ms >= 0 ? `${duration(ms)}${bare ? "" : " ago"}` : `${bare ? "" : "in "}${duration(-ms)}`;
    if (each.textContent !== text) each.textContent = text;
  }
}

setInterval(tick, 1000);

// Copying, also over plain HTTP, where browsers offer no clipboard.
async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.setAttribute("readonly", "");
    area.className = "visually-hidden";
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// What a person sees when all is unfolded.
function content(element) {
  const whole = element.cloneNode(true);
  for (const each of whole.querySelectorAll(".json-more, .copy")) each.remove();
  return whole.textContent;
}

// Of a part of JSON: its path, made of the keys around it.
function path(element) {
  const parts = [];
  for (let item = element.closest("li"); item; item = item.parentElement.closest(".tree li")) parts.unshift(item.dataset.key);
  return parts.map((key) => (/^\d+$/.test(key) ? `[${key}]` : /^[A-Za-z_$][\w$]*$/.test(key) ? `.${key}` : `[${JSON.stringify(key)}]`)).join("").replace(/^\./, "");
}

// One button for all parts: it moves to the part under the pointer, or to the fold that has the focus.
const pathButton = document.createElement("button");
pathButton.type = "button";
pathButton.className = "copy json-path";
pathButton.dataset.copy = "path";
pathButton.title = "Copy the path";
pathButton.textContent = "path";
for (const event of ["mouseover", "focusin"]) {
  document.addEventListener(event, ({ target }) => {
    const item = target.closest(".tree li:not(.json-cut)");
    if (item && pathButton.parentElement !== item) item.insertBefore(pathButton, item.querySelector(":scope > .json-key")?.nextSibling ?? item.firstChild);
  });
}

function text(button) {
  const { copy } = button.dataset;
  if (copy === "path") return path(button);
  if (copy === "address") return address();
  if (copy === "below") return content(button.closest(".panel, .attempt, .callout").querySelector("pre, .tree"));
  return copy;
}

// What this page shows, for another browser: with the zone, which else is a matter of the browser.
function address() {
  const url = new URL(location.href);
  if (document.body.dataset.zone) url.searchParams.set("zone", document.body.dataset.zone);
  return url.href;
}

export async function copyFrom(button) {
  button.dataset.done = (await write(text(button))) ? "copied" : "not copied";
  setTimeout(() => delete button.dataset.done, 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy]");
  if (button) copyFrom(button);
});

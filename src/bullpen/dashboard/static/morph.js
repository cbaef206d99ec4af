// Change what differs, and keep focus, folds, selection and half-typed forms.

// Not `element.id`: a form with a field of that name answers with the field.
const idOf = (node) => node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("id") : null;

export function morph(now, next) {
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
  if (now.matches("[data-list]") && rowIds(now).join("\n") !== rowIds(next).join("\n")) {
    offer(now, next);
    return;
  }
  attributes(now, next);
  if (now.matches("textarea, select, input, [data-at]")) return;
  children(now, next);
}

function kept(element) {
  if (element.matches("details")) return ["open"];
  if (element.matches("input")) return ["checked", "value", "hidden"];
  if (element.matches("[data-script], #offer")) return ["hidden"];
  if (element.matches("[data-done]")) return ["data-done"];
  return [];
}

function attributes(now, next) {
  const own = kept(now);
  const ownClass = now.matches("tr, .bulk, .logs") ? ["class"] : [];
  for (const { name } of [...now.attributes]) {
    if (!next.hasAttribute(name) && !own.includes(name) && !ownClass.includes(name)) now.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (now.getAttribute(name) !== value && !own.includes(name) && !ownClass.includes(name)) now.setAttribute(name, value);
  }
}

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
  if (!element || !element.matches(".n, .n *, .count, .facts span")) return;
  element.classList.add("changed");
  setTimeout(() => element.classList.remove("changed"), 1000);
}

const rowIds = (table) => [...table.querySelectorAll("[data-row]")].map(idOf);

// Rows never move under the pointer: those that stayed change in place, the others wait until they are asked for.
function offer(now, next) {
  const fresh = new Map([...next.querySelectorAll("[data-row]")].map((row) => [idOf(row), row]));
  for (const row of now.querySelectorAll("[data-row]")) {
    const after = fresh.get(idOf(row));
    if (after) morph(row, after);
    row.classList.toggle("gone", !after);
  }
  const bar = document.getElementById("offer");
  if (!bar) return;
  const known = new Set(rowIds(now));
  const added = [...fresh.keys()].filter((id) => !known.has(id)).length;
  const link = bar.querySelector("a");
  link.textContent = added ? `${added} new · show` : "The list has changed · show";
  link.href = location.href;
  bar.hidden = false;
}

// Menus close with Escape, with a click elsewhere, and when another one opens.
const open = () => document.querySelectorAll("details.menu[open]");

export function closeMenus() {
  const menus = [...open()];
  for (const each of menus) {
    const inside = each.contains(document.activeElement);
    each.open = false;
    if (inside) each.querySelector("summary").focus();
  }
  return menus.length > 0;
}

document.addEventListener("click", (event) => {
  for (const each of open()) if (!each.contains(event.target)) each.open = false;
});
document.addEventListener("toggle", (event) => {
  if (event.target.matches?.("details.menu") && event.target.open) for (const each of open()) if (each !== event.target) each.open = false;
}, true);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && closeMenus()) event.stopImmediatePropagation();
}, true);

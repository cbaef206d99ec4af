// Rows that are ticked: one by one, a range with Shift, the whole page.
const boxes = () => [...document.querySelectorAll('#selection input[name="id"]')];

export function enhanceSelection() {
  const all = document.getElementById("all");
  if (all) all.hidden = false;
  count();
}

function count() {
  const told = document.getElementById("selected");
  if (!told) return;
  const list = boxes();
  const chosen = list.filter((box) => box.checked).length;
  told.textContent = chosen ? `${chosen} selected` : told.dataset.empty;
  told.closest(".bulk").classList.toggle("ready", chosen > 0);
  const all = document.getElementById("all");
  if (all) {
    all.checked = chosen > 0 && chosen === list.length;
    all.indeterminate = chosen > 0 && chosen < list.length;
  }
}

let last = null;
document.addEventListener("click", (event) => {
  const box = event.target;
  if (box.id === "all") for (const each of boxes()) each.checked = box.checked;
  else if (box.name === "id" && box.type === "checkbox") {
    const list = boxes();
    if (event.shiftKey && last && list.includes(last)) {
      const [from, to] = [list.indexOf(last), list.indexOf(box)].sort((a, b) => a - b);
      for (const each of list.slice(from, to + 1)) each.checked = box.checked;
    }
    last = box;
  } else return;
  count();
});

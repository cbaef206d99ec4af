// Light, dark or as the system: at once, and remembered for the next page.
const ORDER = ["", "light", "dark"];

document.addEventListener("click", (event) => {
  const button = event.target.closest("#theme");
  if (!button) return;
  event.preventDefault();
  const root = document.documentElement;
  const next = ORDER[(ORDER.indexOf(root.dataset.theme ?? "") + 1) % ORDER.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  document.cookie = `bullpen_theme=${next}; Path=/; Max-Age=31536000; SameSite=Lax`;
  button.title = `Colours: ${next || "as the system"}`;
  document.getElementById("announce").textContent = button.title;
});

document.addEventListener("change", (event) => {
  if (event.target.name !== "theme") return;
  if (event.target.value) document.documentElement.dataset.theme = event.target.value;
  else delete document.documentElement.dataset.theme;
});

// Lines of a log: those that hold a text, wrapped or not, the newest first or last.
function filter(input) {
  const wanted = input.value.toLowerCase();
  for (const line of document.querySelectorAll("#log-lines li")) line.hidden = !line.textContent.toLowerCase().includes(wanted);
}

document.addEventListener("input", (event) => {
  if (event.target.id === "log-filter") filter(event.target);
});
document.addEventListener("change", (event) => {
  const list = document.getElementById("log-lines");
  if (event.target.id === "log-wrap") list.classList.toggle("logs-nowrap", !event.target.checked);
  if (event.target.id === "log-newest") list.classList.toggle("logs-newest", event.target.checked);
});

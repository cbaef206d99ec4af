// Until a zone is chosen, times are in the browser's own.
const cookie = (name) => document.cookie.split("; ").find((part) => part.startsWith(`${name}=`))?.slice(name.length + 1) ?? "";

export function useOwnZone() {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (document.body.dataset.zone || cookie("bullpen_zone") || !zone) return;
  document.cookie = `bullpen_zone=${encodeURIComponent(zone)}; Path=/; Max-Age=31536000; SameSite=Lax`;
  document.body.dataset.zone = zone;
  const parts = new Intl.DateTimeFormat("sv-SE", {
    timeZone: zone, year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
  });
  for (const each of document.querySelectorAll("time[datetime]")) each.textContent = parts.format(new Date(each.dateTime));
  for (const each of document.querySelectorAll("[data-zone-name]")) each.textContent = zone;
}

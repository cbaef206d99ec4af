"""`/audit`: who did what."""

from __future__ import annotations

from bullpen.dashboard.access import Permission
from bullpen.dashboard.routes import Context, Page, PageRoute


async def audit(context: Context) -> Page:
    """Who did what. Whoever is no admin sees his own actions."""
    wanted = {name: context.query.get(name, "")[:200] for name in ("actor", "action", "subject")}
    found = await context.desk.audit(limit=500)
    if not context.principal.may(Permission.ADMIN):
        found = [entry for entry in found if entry.actor == context.principal.name]
    entries = [
        {
            "atMs": int(entry.at.timestamp() * 1000),
            "actor": entry.actor,
            "login": entry.login or "",
            "action": entry.action,
            "subject": entry.subject,
            "tenant": entry.tenant_id or "",
            "detail": entry.detail,
        }
        for entry in found
        if all(part.lower() in str(getattr(entry, name)).lower() for name, part in wanted.items() if part)
    ]
    kept = (await context.desk.trail()).kept
    view = {"entries": entries[:200], "kept": kept}
    return Page("audit.html", view, "Audit", "audit", values={"wanted": wanted})


ROUTES = (PageRoute("/audit", audit, menu="Audit", key="u"),)

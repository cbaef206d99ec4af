"""`/audit`: who did what, searched and exported. Nothing here changes it."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from bullpen.dashboard._web import PageAnswer, PageProblem, json_bytes
from bullpen.dashboard.access import Permission
from bullpen.dashboard.pages.jobs import instant_of
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.actions import AuditRecord, AuditSearch

_PER_PAGE: Final = 100
_PER_READ: Final = 500
_COLUMNS: Final = ("at", "actor", "login", "action", "subject", "tenant", "detail")
_FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r")


class AuditRow(msgspec.Struct, rename="camel", frozen=True):
    """One entry."""

    at_ms: int
    actor: str
    login: str
    action: str
    subject: str
    tenant: str
    detail: Any


class AuditView(msgspec.Struct, rename="camel", frozen=True):
    """Entries, newest first."""

    entries: tuple[AuditRow, ...]
    kept: str
    """For how long, in words."""
    next: str
    """Where the next page begins; empty: this was the last, or there are no pages."""


async def audit(context: Context) -> Page:
    """Who did what. Whoever is no admin sees his own actions."""
    search, tenant = _search(context)
    found = await _read(context, search, tenant, _PER_PAGE + 1)
    rows = tuple(_row(entry) for entry in found[:_PER_PAGE])
    more = found[_PER_PAGE - 1].cursor if len(found) > _PER_PAGE else ""
    view = AuditView(rows, (await context.desk.trail()).kept, more)
    names = ("actor", "action", "subject", "tenant", "since", "until")
    wanted = {name: context.query.get(name, "")[:200] for name in names}
    given = {name: value for name, value in wanted.items() if value}
    pages = {"next": context.url("audit", **given, before=more)} if more else {}
    if context.query.get("before"):
        pages["first"] = context.url("audit", **given)
    values = {
        "wanted": wanted,
        "pages": pages,
        "exports": {kind: context.url("audit", "export", **given, format=kind) for kind in ("csv", "ndjson")},
        "is_all": context.principal.may(Permission.ADMIN),
    }
    return Page("audit.html", view, "Audit", "audit", values=values)


def _search(context: Context) -> tuple[AuditSearch, str | None]:
    """What the address asks for, and of which tenant."""
    query = context.query
    since, until = (
        datetime.fromtimestamp(instant_of(query[name], context) / 1000, UTC) if query.get(name) else None
        for name in ("since", "until")
    )
    search = AuditSearch(
        actor=query.get("actor", "")[:200],
        action=query.get("action", "")[:200],
        subject=query.get("subject", "")[:200],
        since=since,
        until=until,
        before=query.get("before", "")[:20],
    )
    return search, query.get("tenant", "")[:200] or None


async def _read(context: Context, search: AuditSearch, tenant: str | None, limit: int) -> list[AuditRecord]:
    """Only entries that the visitor may see; of his own, those under exactly his name."""
    if context.principal.may(Permission.ADMIN):
        return await context.desk.audit(tenant_id=tenant, limit=limit, search=search)
    mine, name = list[AuditRecord](), context.principal.name
    if search.actor and search.actor.casefold() not in name.casefold():
        return []
    search = replace(search, actor=name)
    while True:  # a name may be a part of another one's
        found = await context.desk.audit(tenant_id=tenant, limit=_PER_READ, search=search)
        mine += [entry for entry in found if entry.actor == name]
        if len(mine) >= limit or len(found) < _PER_READ or not found[-1].cursor:
            return mine[:limit]
        search = replace(search, before=found[-1].cursor)


def _row(entry: AuditRecord) -> AuditRow:
    return AuditRow(
        *(int(entry.at.timestamp() * 1000), entry.actor, entry.login or "", entry.action),
        *(entry.subject, entry.tenant_id or "", entry.detail),
    )


async def export(context: Context) -> PageAnswer:
    """All that the filter finds, streamed page by page."""
    kind = context.query.get("format", "ndjson")
    if kind not in ("ndjson", "csv"):
        raise PageProblem(422, f"{kind[:40]!r} is no format; take ndjson or csv.")
    search, tenant = _search(context)
    first = await _read(context, search, tenant, _PER_READ)  # what cannot be read is said before the answer begins

    async def lines() -> AsyncGenerator[bytes, None]:
        page, wanted = first, search
        if kind == "csv":
            yield _csv(_COLUMNS)
        while page:
            for entry in page:
                yield _line(entry, kind)
            if len(page) < _PER_READ or not page[-1].cursor:
                return
            wanted = replace(wanted, before=page[-1].cursor)
            page = await _read(context, wanted, tenant, _PER_READ)

    content_type = "text/csv; charset=utf-8" if kind == "csv" else "application/x-ndjson"
    headers = {"content-disposition": f'attachment; filename="audit.{kind}"'}
    return PageAnswer(200, content_type=content_type, headers=headers, stream=lines())


def _line(entry: AuditRecord, kind: str) -> bytes:
    row = _row(entry)
    told = {**msgspec.structs.asdict(row), "at": entry.at.isoformat(timespec="milliseconds")}
    del told["at_ms"]
    if kind == "ndjson":
        return json_bytes(told) + b"\n"
    return _csv([told[name] if name != "detail" else json_bytes(entry.detail).decode() for name in _COLUMNS])


def _csv(cells: tuple[str, ...] | list[str]) -> bytes:
    """One row. A spreadsheet takes a cell that begins like a formula for one."""
    out = io.StringIO()
    csv.writer(out).writerow([f"'{cell}" if cell.startswith(_FORMULAS) else cell for cell in cells])
    return out.getvalue().encode("utf-8", "backslashreplace")


ROUTES = (
    PageRoute("/audit", audit, menu="Audit", key="u", view=AuditView),
    PageRoute("/audit/export", export, produces=("application/x-ndjson", "text/csv")),
)

"""What every page has around it: the menu, the zone and the colours of the viewer, a note of what was just done.

In: a request and who asks. Out: values for the templates.
"""

from __future__ import annotations

import secrets
import time
import urllib.parse
from typing import Any, Final

import msgspec

from bullpen.dashboard._web import PageProblem, PageRequest, join
from bullpen.dashboard.access import Permission, Visitor
from bullpen.dashboard.guard import masked
from bullpen.dashboard.render import STATIC, find_zone
from bullpen.dashboard.routes import FLASH, Context, DashboardState, Page, PageRoute

__all__ = ["first_page", "frame_of", "is_part", "read_note", "zone_of"]

_ZONE: Final = "bullpen_zone"
_THEME: Final = "bullpen_theme"
_KEYS: Final = "bullpen_keys"


def frame_of(context: Context, page: Page) -> dict[str, Any]:
    """What the frame and the templates need beside the view."""
    dashboard, request, visitor = context.dashboard, context.request, context.principal
    theme, zone_name = request.cookies.get(_THEME, ""), _zone_name(request)
    note, undo = read_note(request)
    return {
        "url": context.url,
        "static": lambda name: join(request.base, "static", STATIC.version, name),
        "scripts": STATIC.scripts,
        "principal": visitor,
        "may": lambda permission: _may(dashboard, visitor, Permission(permission)),
        "settings": dashboard.settings,
        "theme": theme if theme in ("light", "dark") else "",
        "zone": find_zone(zone_name),
        "zone_name": zone_name or "UTC",
        "is_zone_chosen": bool(zone_name),
        "keys_off": request.cookies.get(_KEYS) == "off",
        "has_login": dashboard.access.has_login,
        "menu": _menu(dashboard, visitor),
        "may_search": _search_is_for(dashboard, visitor),
        "dead_letters": None if visitor.tenants or not visitor.name else dashboard.desk.known_dead_letters,
        "stream": _stream(context, page),
        "request": request,
        "tenant": _tenant(context),
        "context": context,
        "page": page,
        "title": page.title,
        "is_part": is_part(request),
        "note": note,
        "undo": undo,
        "csrf": "" if is_part(request) else masked(dashboard.access.csrf(request)),
        "nonce": secrets.token_urlsafe(12),
        "payloads_shown": context.payloads,
        "now_ms": int(time.time() * 1000),
    }


def _stream(context: Context, page: Page) -> str:
    """Where the page hears that it is out of date; empty: nowhere."""
    if page.is_polled:
        return context.url("pulse")
    if page.stream is None:
        return ""
    return context.url("stream", page.stream) if page.stream else context.url("stream")


def _tenant(context: Context) -> str | None:
    try:
        return context.tenant
    except PageProblem:
        return None


def is_part(request: PageRequest) -> bool:
    """Whether a page that is open asks for its content alone. Then nothing is in it that differs each time: what has
    not changed need not be sent."""
    return request.headers.get("x-bullpen-part") == "main"


def first_page(dashboard: DashboardState, visitor: Visitor) -> str:
    """Where somebody begins who may not see the overview."""
    return next((route.nav for route in _menu(dashboard, visitor)), "settings")


def zone_of(request: PageRequest) -> Any:
    return find_zone(_zone_name(request))


def _zone_name(request: PageRequest) -> str:
    """The one in the address, else the one that the browser keeps; empty: none that exists."""
    for name in (request.query.get("zone", ""), urllib.parse.unquote(request.cookies.get(_ZONE, ""))):
        if name and str(find_zone(name)) == name:
            return name
    return ""


def _menu(dashboard: DashboardState, visitor: Visitor) -> list[PageRoute]:
    """The pages that somebody may open; of nobody none."""
    if not visitor.name:
        return []
    there = {"has_ledger": dashboard.has_ledger, "has_workflows": bool(dashboard.desk.app.workflows.all)}
    return [route for route in dashboard.routes if route.menu and route.is_for(visitor, **there)]


def _search_is_for(dashboard: DashboardState, visitor: Visitor) -> bool:
    return bool(visitor.name) and any(
        route.nav == "search" and route.is_for(visitor, has_ledger=True, has_workflows=True)
        for route in dashboard.routes
    )


def _may(dashboard: DashboardState, visitor: Visitor, permission: Permission) -> bool:
    is_fixed = dashboard.settings.read_only and permission in (Permission.ACT, Permission.ADMIN)
    return visitor.may(permission) and not is_fixed


def read_note(request: PageRequest) -> tuple[str, str]:
    """What was just done, and where it is undone."""
    try:
        note, undo = msgspec.json.decode(urllib.parse.unquote(request.cookies.get(FLASH, "")), type=tuple[str, str])
    except (msgspec.DecodeError, ValueError):
        return "", ""
    return note[:1_000], undo if undo.startswith("/") and not undo.startswith("//") else ""

"""What a route is, what it returns, and what it knows of the request.

Elsewhere: the routes themselves (`pages`), the order of checks (`app`), what every page has around it (`frame`).
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from bullpen.dashboard._web import PageAnswer, PageProblem, PageRequest, join
from bullpen.dashboard.access import Access, Permission, Visitor
from bullpen.dashboard.desk import Desk
from bullpen.dashboard.fields import FormField, check_fields
from bullpen.dashboard.guard import Rates
from bullpen.ops.actions import Actor
from bullpen.ops.doctor import Advice
from bullpen.settings import DashboardSettings

__all__ = ["FLASH", "Context", "DashboardState", "Page", "PageRoute"]

FLASH = "bullpen_note"
_CARRIED = ("zone", "tenant")
"""What a link of a page keeps of the address that it was opened with."""


@dataclass(slots=True)
class Page:
    """What a route shows: the view is its JSON, the template draws it."""

    template: str
    view: Any
    title: str
    nav: str = ""
    """The first part of the address of its menu entry; `overview` for the first page."""
    stream: str | None = None
    """The topic that tells when the page is out of date: a queue, or "" for all."""
    is_polled: bool = False
    """The store that it shows tells nobody of changes: the page asks again every second and a half."""
    values: dict[str, Any] = field(default_factory=dict)
    """What only the template needs."""
    status: int = 200


Handler = Callable[["Context"], Awaitable["Page | PageAnswer"]]


@dataclass(frozen=True, slots=True)
class PageRoute:
    """One address. Words in braces are any text."""

    pattern: str
    handler: Handler
    permission: Permission = Permission.SEE
    method: str = "GET"
    for_tenants: bool = False
    """Whether somebody who may see only some tenants may ask."""
    open: bool = False
    """Whether somebody unknown may ask."""
    menu: str = ""
    """Its name in the menu; empty: it has none."""
    key: str = ""
    """Opens it after `g`."""
    needs_ledger: bool = False
    view: Any = None
    """The type of its JSON; None: not described further."""
    produces: tuple[str, ...] = ()
    """What it answers under the API instead of JSON."""
    fields: tuple[FormField, ...] | None = None
    """What a change takes under the API; None: it is for browsers only, and nothing is checked."""
    fields_of: Callable[[Mapping[str, str]], tuple[FormField, ...]] | None = None
    """Which of them it takes at a path."""
    keeps_address: bool = False
    """Whether a browser's form, too, must say the same as its address."""
    needs_workflows: bool = False
    """In the menu only of a dashboard whose app has workflows."""

    @property
    def nav(self) -> str:
        return self.pattern.strip("/") or "overview"

    def match(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        parts = [part for part in self.pattern.split("/") if part]
        if len(parts) != len(segments):
            return None
        found: dict[str, str] = {}
        for part, given in zip(parts, segments, strict=True):
            if part.startswith("{"):
                found[part.strip("{}")] = given
            elif part != given:
                return None
        return found

    def is_for(self, visitor: Visitor, *, has_ledger: bool, has_workflows: bool) -> bool:
        """Whether somebody may open it, and there is something to see."""
        if (visitor.tenants and not self.for_tenants) or (self.needs_ledger and not has_ledger):
            return False
        if self.needs_workflows and not has_workflows:
            return False
        return visitor.may(self.permission)


class DashboardState(Protocol):
    """What routes use of the whole dashboard."""

    desk: Desk
    access: Access
    settings: DashboardSettings
    rates: Rates
    is_closing: bool
    examined: tuple[list[Advice], int]
    """What the doctor found when it was last asked, and when that was (Unix ms)."""
    examining: asyncio.Task[None] | None

    @property
    def routes(self) -> Sequence[PageRoute]: ...

    @property
    def has_ledger(self) -> bool: ...


class Context:
    """One request on its way through a route."""

    def __init__(self, dashboard: DashboardState, request: PageRequest, request_id: str) -> None:
        self.dashboard, self.request, self.id = dashboard, request, request_id
        self.principal = Visitor("")
        """Nobody, until it is known who asks."""
        self.desk = dashboard.desk
        self.path: dict[str, str] = {}
        self.query = request.query
        self.cookies: list[str] = []

    def url(self, *parts: str, **query: str | int | None) -> str:
        """The address of a page, with what this one was opened with."""
        carried = {name: self.query[name] for name in _CARRIED if self.query.get(name)}
        return join(self.request.base, *parts, **{**carried, **query})

    @property
    def payloads(self) -> bool:
        return self.principal.may(Permission.PAYLOADS)

    @property
    def tenant(self) -> str | None:
        """Whose objects are shown: of somebody who may see only some tenants the one that he chose, else his first.
        None: of everybody. Raises PageProblem for a tenant of others."""
        wanted, mine = self.query.get("tenant", ""), self.principal.tenants
        if not mine:
            return wanted or None
        if wanted and wanted not in mine:
            raise PageProblem(403, "You may not see this tenant.")
        return wanted or mine[0]

    @property
    def actor(self) -> Actor:
        return Actor(
            self.principal.name,
            "api" if self.request.is_api else "dashboard",
            self.principal.role.value,
            self.request.client,
            self.id,
        )

    def number(self, name: str, default: int = 0, *, most: int = 10_000_000_000) -> int:
        """A number of the query; the default for what is none."""
        text = self.query.get(name, "")
        return min(int(text), most) if text.isascii() and text.isdigit() and len(text) < 16 else default

    async def once(self, what: str, work: Callable[[], Awaitable[list[str]]]) -> list[str]:
        """Do what this request asks for. The same form, or the same `Idempotency-Key`, does it once."""
        nonce = self.request.headers.get("idempotency-key") or (await self.request.form()).get("nonce", "")
        if not nonce:
            return await work()
        return await self.desk.do_once.do(f"{self.principal.name}\n{what}\n{nonce}", work)

    async def take_fields(self, route: PageRoute) -> None:
        """Read the query and the body of the API as one form, before it is known what they may touch."""
        if self.request.is_api and route.method == "POST" and route.fields is not None:
            self.query = self.request.query = await self.request.merge()

    async def check_fields(self, route: PageRoute) -> None:
        """Refuse what the API does not understand, what is not complete, and a form that differs from its address."""
        if route.keeps_address:
            await self.request.merge()
        if self.request.is_api and route.method == "POST" and route.fields is not None:
            fields = route.fields if route.fields_of is None else route.fields_of(self.path)
            check_fields(fields, await self.request.form())

    def redirect(self, to: str, note: str = "", undo: str = "") -> PageAnswer:
        """Show another page, with a note of what was done."""
        cookies = list(self.cookies)
        if note:
            told = urllib.parse.quote(msgspec.json.encode([note, undo]).decode())
            cookies.append(f"{FLASH}={told}; Path=/; Max-Age=60; HttpOnly; SameSite=Lax")
        return PageAnswer(303, headers={"location": to}, cookies=cookies)

"""The ASGI application: from a request to its page, its JSON or its stream.

In: a `Bullpen` app and how people come in. Out: answers. The order of checks is one for all routes: host, principal,
rate, permission, and for changes origin and token. A route returns a page with its view; whoever asks under `/api/v1`
gets the view as JSON, a browser gets it drawn.
Elsewhere: the routes (`pages`), reads (`desk`), the checks (`guard`, `access`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import msgspec

from bullpen._kernel.logs import get_logger
from bullpen._kernel.scrub import scrub
from bullpen.app import Bullpen
from bullpen.dashboard import access as who
from bullpen.dashboard._web import JSON, PageAnswer, PageProblem, PageRequest, Receive, Send, join, read_request
from bullpen.dashboard.access import Access, Permission, Visitor
from bullpen.dashboard.desk import Desk
from bullpen.dashboard.guard import SAFE_METHODS, Rates, check_host, check_origin, check_token, security_headers
from bullpen.dashboard.render import STATIC, find_zone, render
from bullpen.errors import (
    BullpenError,
    DeadLetterNotFound,
    InvalidOption,
    JobNotFound,
    JobStateConflict,
    SchedulerNotFound,
)
from bullpen.ops.actions import Actor
from bullpen.ops.doctor import Advice
from bullpen.settings import DashboardSettings

__all__ = ["Context", "Dashboard", "Page", "PageRoute", "make_access", "make_dashboard"]

logger = get_logger("bullpen.dashboard")

_FLASH: Final = "bullpen_note"
_TELLING: Final = ("text", "error")
"""Filters that look into payloads: whoever may not see them could ask letter by letter."""
_ZONE, _THEME = "bullpen_zone", "bullpen_theme"


@dataclass(slots=True)
class Page:
    """What a route shows: the view is its JSON, the template draws it."""

    template: str
    view: Any
    title: str
    nav: str = ""
    stream: str | None = None
    """The topic that tells when the page is out of date: a queue, or "" for all."""
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


class Context:
    """One request on its way through a route."""

    def __init__(self, dashboard: Dashboard, request: PageRequest, principal: Visitor, request_id: str) -> None:
        self.dashboard, self.request, self.principal, self.id = dashboard, request, principal, request_id
        self.desk = dashboard.desk
        self.path: dict[str, str] = {}
        self.query = request.query
        self.cookies: list[str] = []

    def url(self, *parts: str, **query: str | int | None) -> str:
        """The address of a page."""
        return join(self.request.base, *parts, **query)

    @property
    def payloads(self) -> bool:
        return self.principal.may(Permission.PAYLOADS)

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

    def redirect(self, to: str, note: str = "", undo: str = "") -> PageAnswer:
        """Show another page, with a note of what was done."""
        cookies = list(self.cookies)
        if note:
            told = urllib.parse.quote(msgspec.json.encode([note, undo]).decode())
            cookies.append(f"{_FLASH}={told}; Path=/; Max-Age=60; HttpOnly; SameSite=Lax")
        return PageAnswer(303, headers={"location": to}, cookies=cookies)


class Dashboard:
    """The ASGI application. Close it to end open streams."""

    def __init__(self, app: Bullpen, access: Access, settings: DashboardSettings) -> None:
        from bullpen.dashboard.pages import ROUTES

        self.app, self.access, self.settings = app, access, settings
        self.desk = Desk(app)
        self.rates = Rates()
        self.routes = ROUTES
        self._pages = {route.pattern.strip("/") or "overview" for route in ROUTES if route.method == "GET"}
        self.hosts = {each.strip().lower() for each in (settings.hosts or "").split(",") if each.strip()}
        self.any_host = False
        """Set where the host application has checked the name."""
        self.headers = security_headers(settings.frame_ancestors or "'none'")
        self.is_closing = False
        self.examined: tuple[list[Advice], int] = [], 0
        """What the doctor found when it was last asked, and when that was (Unix ms)."""
        self.examining: asyncio.Task[None] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"only http is served here, not {scope['type']}")
        request_id = secrets.token_hex(6)
        try:
            request = read_request(scope, receive)
        except (PageProblem, ValueError):
            await PageAnswer(400, b"bad request", "text/plain").send(send, self.headers, head_only=False)
            return
        try:
            answer = await self._answer(request, scope, request_id)
        except PageProblem as problem:
            answer = self._problem(request, problem, request_id)
        except Exception:  # the page says that it was our mistake, the log says which
            logger.exception("dashboard: request %s to %s failed", request_id, request.path[:200])
            told = PageProblem(500, "This page could not be made. The log of the dashboard says why.")
            answer = self._problem(request, told, request_id)
        headers = {**self.headers, "x-request-id": request_id}
        await answer.send(send, headers, head_only=request.method == "HEAD", receive=receive)

    async def start(self) -> None:
        """Run bulk actions from now on, those too that another process left. `bullpen dashboard` and the lifespan of a
        server call it; an application that mounts the dashboard does. Without it, or when it is read-only, this
        process runs only what is asked for here. Safe to call twice."""
        if not self.settings.read_only:
            self.desk.operations.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End all streams and readers. The app stays open."""
        self.is_closing = True
        if self.examining is not None:
            self.examining.cancel()
        await self.desk.aclose()

    # ---- one request ------------------------------------------------------------------------------------------

    async def _answer(self, request: PageRequest, scope: Mapping[str, Any], request_id: str) -> PageAnswer:
        check_host(request, self.hosts, any_host=self.any_host)
        if request.segments[:1] == ("static",) and request.method in SAFE_METHODS:
            return self._static(request)
        route, path = self._route(request)
        principal = await self.access.principal(request, scope)
        if principal is None and not route.open:
            return self._ask_to_log_in(request)
        self.rates.count(request.client if principal is None else principal.name)
        context = Context(self, request, principal or Visitor("nobody"), request_id)
        context.path = path
        if request.method not in SAFE_METHODS:
            await self._check_change(context)
        if principal is not None and not route.open:
            await self._check_permission(context, route)
        try:
            found = await route.handler(context)
        except BullpenError as error:
            raise _as_problem(error) from None
        if isinstance(found, Page):
            return self._draw(context, found)
        return found

    def _route(self, request: PageRequest) -> tuple[PageRoute, dict[str, str]]:
        method = "GET" if request.method == "HEAD" else request.method
        others = set()
        for route in self.routes:
            path = route.match(request.segments)
            if path is not None:
                if route.method == method:
                    return route, path
                others.add(route.method)
        if others:
            raise PageProblem(
                405, f"This address takes {', '.join(sorted(others))}.", headers={"allow": ", ".join(others)}
            )
        raise PageProblem(404, "There is no such page.")

    async def _check_change(self, context: Context) -> None:
        request = context.request
        check_origin(request)
        if self.access.uses_cookies and "authorization" not in request.headers and request.segments[:1] != ("login",):
            given = request.headers.get("x-csrf-token") or (await request.form()).get("csrf", "")
            check_token(self.access.csrf(request), given)

    async def _check_permission(self, context: Context, route: PageRoute) -> None:
        principal = context.principal
        is_change = route.method != "GET"
        if self.settings.read_only and is_change and route.permission is not Permission.SEE:
            raise PageProblem(403, "This dashboard is read-only.")
        if principal.tenants and not route.for_tenants:
            raise PageProblem(403, "This page shows all tenants, and you may see only some.")
        if not context.payloads and any(context.query.get(name) for name in _TELLING):
            raise PageProblem(403, "Searching in data and errors needs the permission to see them.")
        if not principal.may(route.permission):
            if is_change:
                await self.refused(context, route.pattern)
            raise PageProblem(403, f"The role {principal.role.value} may not do this.")

    async def refused(self, context: Context, what: str) -> None:
        """Write down that somebody tried what he may not."""
        actions = await self.desk.actions(context.actor)
        await actions.note(
            "refused", "dashboard", "", {**context.actor.note(), "what": f"{what} {context.request.path}"}
        )

    def _ask_to_log_in(self, request: PageRequest) -> PageAnswer:
        if self.access.has_login and not request.is_api and request.method in SAFE_METHODS:
            back = join("", *request.segments) if request.segments else ""
            return PageAnswer(303, headers={"location": join(request.base, "login", next=back)})
        raise PageProblem(
            401, "Log in first.", headers={"www-authenticate": "Bearer"} if self.access.has_login else None
        )

    def _static(self, request: PageRequest) -> PageAnswer:
        found = STATIC.files.get(request.segments[-1]) if len(request.segments) == 3 else None
        if found is None:
            raise PageProblem(404, "There is no such file.")
        content, content_type = found
        return PageAnswer(200, content, content_type, {"cache-control": "public, max-age=31536000, immutable"})

    # ---- drawing ----------------------------------------------------------------------------------------------

    def _draw(self, context: Context, page: Page) -> PageAnswer:
        if context.request.is_api:
            return PageAnswer(page.status, msgspec.json.encode(page.view), JSON, cookies=context.cookies)
        cookies = list(context.cookies)
        note, undo = "", ""
        if _FLASH in context.request.cookies:
            note, undo = _read_flash(context.request.cookies[_FLASH])
            cookies.append(f"{_FLASH}=; Path=/; Max-Age=0; HttpOnly; SameSite=Lax")
        if isinstance(self.access, who.SessionAccess) and (younger := self.access.renewed(context.request)):
            cookies.append(who.session_cookie(context.request, younger))
        values = {
            **self._frame(context.request, context.principal),
            "view": page.view,
            "page": page,
            "title": page.title,
            "context": context,
            "note": note,
            "undo": undo,
            "csrf": self.access.csrf(context.request),
            "nonce": secrets.token_urlsafe(12),
            "payloads_shown": context.payloads,
            "now_ms": int(time.time() * 1000),
            **page.values,
        }
        return PageAnswer(page.status, render(page.template, values), cookies=cookies)

    def _problem(self, request: PageRequest, problem: PageProblem, request_id: str) -> PageAnswer:
        if request.is_api:
            body = {"type": "about:blank", "title": problem.text, "status": problem.status, "requestId": request_id}
            if problem.hint:
                body["detail"] = problem.hint
            return PageAnswer(problem.status, msgspec.json.encode(body), "application/problem+json", problem.headers)
        values = {
            **self._frame(request, Visitor("")),
            "problem": problem,
            "title": f"{problem.status}",
            "request_id": request_id,
            "note": "",
            "undo": "",
            "csrf": "",
            "page": Page("", None, ""),
        }
        return PageAnswer(problem.status, render("problem.html", values), headers=problem.headers)

    def _frame(self, request: PageRequest, principal: Visitor) -> dict[str, Any]:
        """What every page has around it."""
        theme = request.cookies.get(_THEME, "")
        zone_name = urllib.parse.unquote(request.cookies.get(_ZONE, ""))
        return {
            "url": lambda *parts, **query: join(request.base, *parts, **query),
            "static": lambda name: join(request.base, "static", STATIC.version, name),
            "principal": principal,
            "may": lambda permission: principal.may(Permission(permission)) and not self._is_fixed(permission),
            "settings": self.settings,
            "theme": theme if theme in ("light", "dark") else "",
            "zone": find_zone(zone_name),
            "zone_name": zone_name if zone_name and str(find_zone(zone_name)) == zone_name else "UTC",
            "has_login": self.access.has_login,
            "pages": self._pages,
            "has_ledger": self.app.made_ledger is not None or self.app.settings.has_ledger(),
            "request": request,
        }

    def _is_fixed(self, permission: str) -> bool:
        return self.settings.read_only and permission in (Permission.ACT, Permission.ADMIN)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return


def make_dashboard(
    app: Bullpen, *, access: who.Decide | Access | None = None, settings: DashboardSettings | None = None
) -> Dashboard:
    """The dashboard of an app as an ASGI application, to be served or mounted under any path.

    `access` is a function of the host application that takes the ASGI scope and returns a `Visitor`, or None for
    somebody unknown; without it the mode of the settings decides (`BULLPEN_DASHBOARD_ACCESS`).
    """
    settings = app.settings.dashboard if settings is None else settings
    if access is None:
        access = make_access(settings)
    if isinstance(access, Access):
        return Dashboard(app, access, settings)
    made = Dashboard(app, who.HostAccess(access), settings)
    made.any_host = True
    return made


def make_access(settings: DashboardSettings) -> Access:
    """How people come in, by the settings."""
    match settings.access:
        case "token":
            if settings.token is None:
                raise InvalidOption("dashboard.token", "a token, in mode token", None)
            return who.TokenAccess(settings.token)
        case "passwords":
            if settings.passwords is None:
                raise InvalidOption("dashboard.passwords", "a file of passwords, in mode passwords", None)
            return who.PasswordAccess(settings.passwords)
        case "proxy":
            return who.ProxyAccess(
                settings.proxies or "",
                user_header=settings.user_header,
                groups_header=settings.groups_header,
                admins=settings.admin_groups or "",
                operators=settings.operator_groups or "",
            )
    return who.LocalAccess()


def _as_problem(error: BullpenError) -> PageProblem:
    text = scrub(str(error))
    text = text[:1].upper() + text[1:]
    match error:
        case JobNotFound() | SchedulerNotFound() | DeadLetterNotFound():
            return PageProblem(404, text)
        case JobStateConflict():
            return PageProblem(409, text)
        case InvalidOption():
            return PageProblem(422, text)
    return PageProblem(503 if "Lost" in type(error).__name__ else 409, text)


def _read_flash(raw: str) -> tuple[str, str]:
    try:
        note, undo = msgspec.json.decode(urllib.parse.unquote(raw), type=tuple[str, str])
    except (msgspec.DecodeError, ValueError):
        return "", ""
    return note[:1_000], undo if undo.startswith("/") and not undo.startswith("//") else ""

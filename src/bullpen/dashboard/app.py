"""The ASGI application: from a request to its page, its JSON or its stream.

In: a `Bullpen` app and how people come in. Out: answers. The order of checks is one for all routes: host, principal,
rate, permission, and for changes origin and token. A route returns a page with its view; whoever asks under `/api/v1`
gets the view as JSON, a browser gets it drawn.
Elsewhere: the routes (`pages`), reads (`desk`), the checks (`guard`, `access`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final, Self

from bullpen._kernel.logs import get_logger
from bullpen.app import Bullpen
from bullpen.dashboard import access as who
from bullpen.dashboard._web import (
    JSON,
    PageAnswer,
    PageProblem,
    PageRequest,
    Receive,
    Send,
    join,
    json_bytes,
    read_request,
)
from bullpen.dashboard.access import Access, Permission
from bullpen.dashboard.desk import Desk
from bullpen.dashboard.frame import first_page, frame_of, is_part
from bullpen.dashboard.guard import SAFE_METHODS, Rates, check_host, check_origin, check_token, security_headers
from bullpen.dashboard.packing import gzipped, pack, reads_gzip
from bullpen.dashboard.pages import ROUTES
from bullpen.dashboard.problems import as_problem
from bullpen.dashboard.render import STATIC, render
from bullpen.dashboard.routes import FLASH, Context, Page, PageRoute
from bullpen.errors import BullpenError, InvalidOption
from bullpen.ops.doctor import Advice
from bullpen.ops.symptoms import DEAD_SUFFIX
from bullpen.settings import DashboardSettings

__all__ = ["Dashboard", "make_access", "make_dashboard"]

logger = get_logger("bullpen.dashboard")

_TELLING: Final = ("text", "error")
"""Filters that look into payloads: whoever may not see them could ask letter by letter."""


class Dashboard:
    """The ASGI application. Close it to end open streams."""

    def __init__(self, app: Bullpen, access: Access, settings: DashboardSettings) -> None:
        self.app, self.access, self.settings = app, access, settings
        self.desk = Desk(app)
        self.rates = Rates()
        self.routes = ROUTES
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
        context = Context(self, request, request_id)
        try:
            answer = await self._answer(context, scope)
        except PageProblem as problem:
            answer = self._problem(context, problem)
        except Exception:  # the page says that it was our mistake, the log says which
            logger.exception("dashboard: request %s to %s failed", request_id, request.path[:200])
            told = PageProblem(500, "This page could not be rendered. The log of the dashboard has the reason.")
            answer = self._problem(context, told)
        headers = {**self.headers, "x-request-id": request_id}
        await pack(answer, request).send(send, headers, head_only=request.method == "HEAD", receive=receive)

    async def start(self) -> None:
        """Run bulk actions from now on, those too that another process left. `bullpen dashboard` and the lifespan of a
        server call it; an application that mounts the dashboard does. Without it, or when it is read-only, this
        process runs only what is asked for here. Safe to call twice."""
        if not self.settings.read_only:
            self.desk.operations.start()
            if self.desk.app.settings.dashboard.history:
                self.desk.estimator.start()

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

    async def _answer(self, context: Context, scope: Mapping[str, Any]) -> PageAnswer:
        request = context.request
        check_host(request, self.hosts, any_host=self.any_host)
        if request.segments[:1] == ("static",) and request.method in SAFE_METHODS:
            return self._static(request)
        principal = await self.access.principal(request, scope)
        if principal is not None:
            context.principal = principal
        route, context.path = self._route(request)
        if principal is None and not route.open:
            return self._ask_to_log_in(request)
        self.rates.count(request.client if principal is None else principal.name)
        if request.method not in SAFE_METHODS:
            await self._check_change(context)
            await context.take_fields(route)
        if principal is not None and principal.queues:
            context.principal = principal = principal.on(await _queue_of(context))
        if principal is not None and not route.open:
            if principal.tenants and not request.segments and not request.is_api:
                return context.redirect(context.url(first_page(self, principal)))
            await self._check_permission(context, route)
        await context.check_fields(route)
        try:
            found = await route.handler(context)
        except BullpenError as error:
            raise as_problem(error) from None
        return self._draw(context, found) if isinstance(found, Page) else found

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
                405, f"This address accepts {', '.join(sorted(others))}.", headers={"allow": ", ".join(others)}
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
        answer = PageAnswer(200, found.content, found.content_type)
        answer.headers["cache-control"] = "public, max-age=31536000, immutable"
        return gzipped(answer, found.packed) if reads_gzip(request) else answer

    # ---- drawing ----------------------------------------------------------------------------------------------

    @property
    def has_ledger(self) -> bool:
        return self.app.made_ledger is not None or self.app.settings.has_ledger()

    def _draw(self, context: Context, page: Page) -> PageAnswer:
        cookies = list(context.cookies)
        if context.request.is_api:
            return PageAnswer(page.status, json_bytes(page.view), JSON, cookies=cookies)
        if FLASH in context.request.cookies and not is_part(context.request):
            cookies.append(f"{FLASH}=; Path=/; Max-Age=0; HttpOnly; SameSite=Lax")
        if isinstance(self.access, who.SessionAccess) and (younger := self.access.renewed(context.request)):
            cookies.append(who.session_cookie(context.request, younger))
        values = {**frame_of(context, page), "view": page.view, **page.values}
        return PageAnswer(page.status, render(page.template, values), cookies=cookies)

    def _problem(self, context: Context, problem: PageProblem) -> PageAnswer:
        if context.request.is_api:
            body = {"type": "about:blank", "title": problem.text, "status": problem.status, "requestId": context.id}
            if problem.hint:
                body["detail"] = problem.hint
            return PageAnswer(problem.status, json_bytes(body), "application/problem+json", problem.headers)
        page = Page("problem.html", None, f"{problem.status}", values={"problem": problem})
        values = {**frame_of(context, page), "view": None, **page.values}
        return PageAnswer(problem.status, render(page.template, values), headers=dict(problem.headers))

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


async def _queue_of(context: Context) -> str:
    """The queue whose objects a request is about, by its path; of dead letters by their store. Empty: none, or many."""
    if queue := context.path.get("queue", ""):
        return queue
    store = context.path.get("store", "")
    if context.request.segments[:2] == ("dead-letters", "act"):  # the deed takes the form's word, so this does, too
        is_form = context.request.method not in SAFE_METHODS
        store = (await context.request.form()).get("store", "") if is_form else context.query.get("store", "")
    return store.removesuffix(DEAD_SUFFIX)


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

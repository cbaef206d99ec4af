"""`/login`, `/logout`, `/settings`: coming in, going, and how one wants to see times and colours."""

from __future__ import annotations

import urllib.parse

from bullpen.dashboard import access as who
from bullpen.dashboard._web import PageAnswer, PageProblem
from bullpen.dashboard.app import Context, Page, PageRoute
from bullpen.dashboard.render import find_zone

_YEAR_S = 365 * 24 * 3600


async def login_form(context: Context) -> Page | PageAnswer:
    """Ask who it is; a link with a token of its own comes in at once."""
    if not context.dashboard.access.has_login:
        raise PageProblem(404, "There is no such page.")
    is_token = isinstance(context.dashboard.access, who.TokenAccess)
    return Page("login.html", {}, "Log in", values={"is_token": is_token, "next": _next(context, context.query)})


async def login(context: Context) -> PageAnswer:
    access = context.dashboard.access
    fields = await context.request.form()
    if not access.has_login:
        raise PageProblem(404, "There is no such page.")
    principal, cookie = access.login(context.request, fields)
    context.principal = principal
    actions = await context.desk.actions(context.actor)
    await actions.note("login", "dashboard", "", context.actor.note())
    answer = context.redirect(context.request.base + _next(context, fields))
    answer.cookies.append(who.session_cookie(context.request, cookie))
    return answer


async def logout(context: Context) -> PageAnswer:
    answer = context.redirect(context.url("login"))
    answer.cookies.append(who.session_cookie(context.request, ""))
    return answer


async def settings(context: Context) -> Page:
    return Page("settings.html", {"user": context.principal.name, "role": context.principal.role}, "Settings")


async def store(context: Context) -> PageAnswer:
    """Cookies of this browser; nothing is stored here."""
    fields = await context.request.form()
    answer = context.redirect(context.request.base + _next(context, fields))
    kept = f"; Path=/; Max-Age={_YEAR_S}; SameSite=Lax"
    if "theme" in fields:
        theme = fields["theme"] if fields["theme"] in ("light", "dark") else ""
        answer.cookies.append(f"bullpen_theme={theme}{kept}")
    if "zone" in fields:
        zone = fields["zone"].strip()
        if str(find_zone(zone)) != zone:
            raise PageProblem(422, f"{zone[:60]!r} is no time zone; write one such as Europe/Berlin or UTC.")
        answer.cookies.append(f"bullpen_zone={urllib.parse.quote(zone, safe='')}{kept}")
    return answer


def _next(context: Context, fields: dict[str, str]) -> str:
    """Where to go on: a page of ours only."""
    wanted = fields.get("next", "/")
    is_ours = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return urllib.parse.quote(wanted, safe="/%?=&~.-_") if is_ours else "/"


ROUTES = (
    PageRoute("/login", login_form, open=True),
    PageRoute("/login", login, method="POST", open=True),
    PageRoute("/logout", logout, method="POST", for_tenants=True),
    PageRoute("/settings", settings, for_tenants=True),
    PageRoute("/settings", store, method="POST", for_tenants=True),
)

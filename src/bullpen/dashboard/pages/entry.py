"""`/login`, `/logout`, `/settings`: coming in, going, and how one wants to see times and colours."""

from __future__ import annotations

import urllib.parse

from bullpen.dashboard import access as who
from bullpen.dashboard._web import PageAnswer, PageProblem
from bullpen.dashboard.pages.jobs import hidden_columns
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.render import find_zone
from bullpen.dashboard.routes import Context, Page, PageRoute

_YEAR_S = 365 * 24 * 3600
_ZONES = (
    *("UTC", "Europe/Berlin", "Europe/London", "America/New_York", "America/Los_Angeles", "America/Sao_Paulo"),
    *("Asia/Kolkata", "Asia/Shanghai", "Asia/Tokyo", "Australia/Sydney"),
)


async def login_form(context: Context) -> Page:
    """Ask who it is."""
    return await _login_form(context, context.query, "")


async def _login_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    if not context.dashboard.access.has_login:
        raise PageProblem(404, "There is no such page.")
    is_token = isinstance(context.dashboard.access, who.TokenAccess)
    values = {"is_token": is_token, "next": _next(fields), "user": fields.get("user", ""), "problem": problem}
    return Page("login.html", {}, "Log in", values=values)


async def login(context: Context) -> Page | PageAnswer:
    access = context.dashboard.access
    fields = await context.request.form()
    if not access.has_login:
        raise PageProblem(404, "There is no such page.")
    try:
        principal, cookie = access.login(context.request, fields)
    except PageProblem as problem:
        if problem.status != 403 or context.request.is_api:
            raise
        page = await _login_form(context, fields, problem.text)
        page.status = 403
        return page
    context.principal = principal
    actions = await context.desk.actions(context.actor)
    await actions.note("login", "dashboard", "", context.actor.note())
    answer = context.redirect(context.request.base + _next(fields))
    answer.cookies.append(who.session_cookie(context.request, cookie))
    return answer


async def logout(context: Context) -> PageAnswer:
    answer = context.redirect(context.url("login"))
    answer.cookies.append(who.session_cookie(context.request, ""))
    return answer


async def settings(context: Context) -> Page:
    return await _settings_form(context, {}, "")


async def _settings_form(context: Context, fields: dict[str, str], problem: str) -> Page:
    view = {"user": context.principal.name, "role": context.principal.role}
    values = {"fields": fields, "problem": problem, "zones": _ZONES}
    return Page("settings.html", view, "Settings", values=values)


async def store(context: Context) -> Page | PageAnswer:
    """Cookies of this browser; nothing is stored here."""
    fields = await context.request.form()

    async def work() -> PageAnswer:
        answer = context.redirect(context.request.base + _next(fields))
        if "theme" in fields:
            answer.cookies.append(_kept("theme", fields["theme"] if fields["theme"] in ("light", "dark") else ""))
        if "keys" in fields:
            answer.cookies.append(_kept("keys", "off" if fields["keys"] == "off" else ""))
        if "shown-of" in fields:
            shown = set(await context.request.choices("shown"))
            hidden = {each for each in fields["shown-of"].split(".") if each not in shown}
            stay = hidden_columns(context) - set(fields["shown-of"].split("."))
            answer.cookies.append(_kept("hidden", ".".join(sorted(each for each in hidden | stay if each.isalpha()))))
        if "zone" in fields:
            zone = fields["zone"].strip()
            if str(find_zone(zone)) != zone:
                raise PageProblem(422, f"{zone[:60]!r} is not a time zone; write one such as Europe/Berlin or UTC.")
            answer.cookies.append(_kept("zone", urllib.parse.quote(zone, safe="")))
        return answer

    return await or_form(context, _settings_form, work)


def _kept(name: str, value: str) -> str:
    return f"bullpen_{name}={value}; Path=/; Max-Age={_YEAR_S}; SameSite=Lax"


def _next(fields: dict[str, str]) -> str:
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

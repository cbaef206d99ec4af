"""Actions on what is kept in the ledger: said first, asked for, done once, and written to the audit with the change.

In: what an action would do, and how it is done. Out: its two routes: a form that says it, and the deed. The ledger
writes its own audit entry in the same transaction; who asked is in it.
Elsewhere: actions on queues and jobs, which the command line shares (`acting`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.fields import REASON, TENANT, FormField
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.routes import Context, Page, PageRoute

__all__ = ["LedgerDeed", "deed_routes"]


class LedgerDeed(msgspec.Struct, rename="camel", frozen=True):
    """What an action would do to one object."""

    name: str
    title: str
    subject: str
    says: str
    """What will happen."""
    undo: str
    """Whether it can be undone."""
    back: str
    """Where one comes from, and is afterwards."""
    command: str = ""
    danger: bool = False
    refused: str = ""
    """Why it cannot be done now."""
    undo_at: str = ""
    """Where it is undone."""
    choice: str = ""
    """The label of what is chosen; empty: nothing is."""
    choices: tuple[str, ...] = ()
    """The usual one first."""


Prepare = Callable[[Context], Awaitable[LedgerDeed]]
Work = Callable[[Context, str], Awaitable[str]]
"""Does it, with a reason; returns what was done, in words."""


def deed_routes(
    pattern: str,
    nav: str,
    prepare: Prepare,
    work: Work,
    *,
    for_tenants: bool = False,
    fields: tuple[FormField, ...] = (),
) -> tuple[PageRoute, PageRoute]:
    """The preview and the deed at one address."""

    async def form(context: Context, fields: dict[str, str], problem: str) -> Page:
        deed = await prepare(context)
        values = {"problem": problem, "fields": fields}
        return Page("deed.html", deed, f"{deed.title} · {deed.subject}", nav, values=values)

    async def preview(context: Context) -> Page:
        return await form(context, {}, "")

    async def perform(context: Context) -> Page | PageAnswer:
        async def act() -> PageAnswer:
            deed = await prepare(context)
            reason = (await context.request.form()).get("reason", "").strip()[:500]

            async def do() -> list[str]:
                if deed.refused:
                    raise PageProblem(409, deed.refused)
                return [await context.desk.within(work(context, reason), "ledger")]

            (told,) = await context.once(f"{deed.name} {deed.subject}", do)
            context.desk.forget()
            if context.request.is_api:
                return PageAnswer(200, msgspec.json.encode({"done": told}), JSON)
            return context.redirect(deed.back, told, deed.undo_at)

        return await or_form(context, form, act)

    taken = (*fields, REASON, *((TENANT,) if for_tenants else ()))
    return (
        PageRoute(pattern, preview, Permission.ACT, for_tenants=for_tenants, view=LedgerDeed),
        PageRoute(pattern, perform, Permission.ACT, "POST", for_tenants=for_tenants, fields=taken),
    )

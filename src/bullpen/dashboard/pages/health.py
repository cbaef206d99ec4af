"""`/health`, `/audit`, `/operations`, `/search`: is it well, who did what, what runs in bulk, where is it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import msgspec

from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.app import Context, Page, PageRoute
from bullpen.ops.actions import ACTIONS
from bullpen.ops.doctor import examine
from bullpen.ops.operations import Operation
from bullpen.ops.views.jobs import JobRow, job_row
from bullpen.ops.views.queues import OPERATIONS
from bullpen.queue import JobState

_SEARCHED: Final = 200
_MOST_SELECTED: Final = 1_000
_FREE_REMOVALS: Final = 100
"""More at once is for admins who type the name of the queue."""


async def health(context: Context) -> Page:
    """The verdict now, and what the doctor found when it was last asked."""
    overview = await context.desk.overview(most=0)
    found, at_ms = context.dashboard.examined
    view = {
        "verdict": overview.verdict,
        "advice": [advice.to_json() for advice in found],
        "examinedMs": at_ms,
        "isExamining": context.dashboard.examining is not None and not context.dashboard.examining.done(),
        "away": {part: int(since * 1000) for part, since in context.desk.away_since.items()},
    }
    return Page("health.html", view, "Health", "health", stream="")


async def run_doctor(context: Context) -> PageAnswer:
    """Ask the doctor. It walks over all keys, so it does so only when it is asked to."""
    dashboard, app = context.dashboard, context.desk.app

    async def work() -> None:
        ledger = await context.desk.ledger()
        dashboard.examined = await examine(app.connection, app.prefix, ledger), int(time.time() * 1000)

    if dashboard.examining is None or dashboard.examining.done():
        dashboard.examining = asyncio.create_task(work(), name="bullpen doctor")
    await asyncio.wait([dashboard.examining], timeout=2.0)
    if context.request.is_api:
        return PageAnswer(202, b"{}", JSON)
    return context.redirect(context.url("health"))


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


# Operations ---------------------------------------------------------------------------------------------------------


async def operations(context: Context) -> Page:
    desk = context.desk
    view = await desk.within(desk.operations.list())
    return Page("operations.html", view, "Operations", "operations", stream=OPERATIONS)


async def operation(context: Context) -> Page:
    desk = context.desk
    found = await desk.within(desk.operations.get(context.path["id"]))
    if found is None:
        raise PageProblem(404, "There is no such operation; finished ones are kept until a thousand newer ones ended.")
    return Page("operation.html", found, found.title, "operations", stream=OPERATIONS)


async def stop(context: Context) -> PageAnswer:
    await context.desk.operations.stop(context.path["id"], by=context.actor)
    return context.redirect(context.url("operations", context.path["id"]), "It ends before its next object.")


async def selected(context: Context) -> Page | PageAnswer:
    """What was ticked in a list: first a preview, then an operation."""
    fields, ids = await context.request.form(), await context.request.choices("id")
    queue, verb = context.path["queue"], fields.get("verb", "")
    action = ACTIONS.get(f"job.{verb}")
    if action is None or verb not in ("retry", "promote", "remove"):
        raise PageProblem(404, "There is no such action.")
    if not ids:
        raise PageProblem(422, "No job is selected. Go back and tick some.")
    if len(ids) > _MOST_SELECTED:
        raise PageProblem(422, f"At most {_MOST_SELECTED} jobs can be selected at once.")
    needs_name = verb == "remove" and len(ids) > _FREE_REMOVALS
    if needs_name and not context.principal.may(Permission.ADMIN):
        raise PageProblem(403, f"Removing more than {_FREE_REMOVALS} jobs needs the role admin.")
    if not fields.get("confirmed"):
        heads = await context.desk.within(context.desk.queue(queue).heads_of(ids[:10]))
        state = JobState(fields["state"]) if fields.get("state") in set(JobState) else JobState.UNKNOWN
        view = {"queue": queue, "verb": verb, "count": len(ids), "samples": [_sample(head, state) for head in heads]}
        values = {"ids": ids, "action": action, "typed": needs_name}
        return Page("selected.html", view, f"{action.title} {len(ids)}", "queues", values=values)
    if needs_name and fields.get("typed", "") != queue:
        raise PageProblem(422, f"Type the name of the queue to confirm: {queue}")
    asked = Operation(
        kind="jobs",
        by=context.principal.name,
        via=context.actor.via,
        role=context.principal.role.value,
        reason=fields.get("reason", "")[:500],
        queue=queue,
        verb=verb,
        ids=ids,
        total=len(ids),
    )
    return await _submitted(context, asked)


async def retry_all_form(context: Context) -> Page:
    queue = context.path["queue"]
    counts = await context.desk.counts(queue)
    view = {"queue": queue, "count": counts["failed"]}
    return Page(
        "retry_all.html", view, f"Retry all of {queue}", "queues", values={"until": _iso(await _now_ms(context))}
    )


async def retry_all(context: Context) -> PageAnswer:
    fields, queue = await context.request.form(), context.path["queue"]
    await context.desk.must_exist(queue)
    given = {name: fields.get(name, "").strip() for name in ("count", "most", "rate")}
    for name, text in given.items():
        if text and not (text.isascii() and text.isdigit() and len(text) < 10):
            raise PageProblem(422, f"{name} must be a whole number.")
    total = int(given["count"] or 0) or (await context.desk.counts(queue))["failed"]
    asked = Operation(
        kind="retry-all",
        by=context.principal.name,
        via=context.actor.via,
        role=context.principal.role.value,
        reason=fields.get("reason", "")[:500],
        queue=queue,
        until=fields.get("until", "") or _iso(await _now_ms(context)),
        total=total,
        most=int(given["most"] or 0),
        rate=float(given["rate"] or 0),
    )
    return await _submitted(context, asked)


async def _submitted(context: Context, asked: Operation) -> PageAnswer:
    async def work() -> list[str]:
        return [await context.desk.operations.submit(asked)]

    (number,) = await context.once(f"{asked.kind} {asked.queue}", work)
    if context.request.is_api:
        return PageAnswer(202, msgspec.json.encode({"operation": number}), JSON)
    return context.redirect(context.url("operations", number))


def _sample(head: Any, state: JobState) -> JobRow:
    return job_row(head, state, payloads=False)


async def _now_ms(context: Context) -> int:
    door = context.desk.app.connection.shared_door(f"{context.desk.app.prefix}:")
    seconds, micros = await context.desk.within(door.call("TIME"))
    return int(seconds) * 1000 + int(micros) // 1000


def _iso(ms: int) -> str:
    from bullpen.dashboard.render import iso

    return iso(ms)


# Search -------------------------------------------------------------------------------------------------------------


async def search(context: Context) -> Page | PageAnswer:
    """A queue by its name, a job by its id in any queue, a dead letter by the id of its job."""
    asked = context.query.get("q", "").strip()[:500]
    hits: list[dict[str, str]] = []
    looks = (await context.desk.snapshot()).looks
    if asked:
        exact = [look.queue for look in looks if look.queue == asked]
        partly = [look.queue for look in looks if asked.lower() in look.queue.lower() and look.queue != asked]
        hits += [_hit("queue", name, context.url("queues", name)) for name in [*exact, *partly[:20]]]
        hits += await _jobs_of_id(context, asked, [look.queue for look in looks][:_SEARCHED])
    if len(hits) == 1 and not context.request.is_api:
        return context.redirect(hits[0]["url"])
    view = {"asked": asked, "hits": hits, "lookedAt": min(len(looks), _SEARCHED)}
    return Page("search.html", view, "Find")


async def _jobs_of_id(context: Context, job_id: str, queues: list[str]) -> list[dict[str, str]]:
    """One command per queue, all in a few writes."""
    app, found = context.desk.app, list[dict[str, str]]()
    for name in queues:
        keys = context.desk.queue(name).keys
        exists, letter = await context.desk.within(
            app.connection.shared_door(keys.base).call_many(
                [("HEXISTS", keys.job(job_id), "name"), ("HEXISTS", f"{keys.prefix}:{name}-dlq:{job_id}", "name")]
            )
        )
        if exists == 1:
            found.append(_hit("job", f"{job_id} of {name}", context.url("queues", name, "jobs", job_id)))
        if letter == 1:
            url = context.url("dead-letters", f"{name}-dlq", job_id)
            found.append(_hit("dead letter", f"{job_id} of {name}-dlq", url))
    return found


def _hit(kind: str, text: str, url: str) -> dict[str, str]:
    return {"kind": kind, "text": text, "url": url}


ROUTES = (
    PageRoute("/health", health),
    PageRoute("/health/run", run_doctor, Permission.ACT, "POST"),
    PageRoute("/audit", audit),
    PageRoute("/search", search),
    PageRoute("/operations", operations),
    PageRoute("/operations/{id}", operation),
    PageRoute("/operations/{id}/stop", stop, Permission.ACT, "POST"),
    PageRoute("/queues/{queue}/selected", selected, Permission.ACT, "POST"),
    PageRoute("/queues/{queue}/retry-all", retry_all_form, Permission.ACT),
    PageRoute("/queues/{queue}/retry-all", retry_all, Permission.ACT, "POST"),
)

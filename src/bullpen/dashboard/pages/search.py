"""`/search`: where is this one? Ids of jobs, dead letters, outbox rows, runs and messages, correlation ids, urns; names
of queues, workers, schedules.

Each queue is asked nine constant questions, all queues of a server in one write for a hundred of them.
"""

from __future__ import annotations

import uuid
from typing import Any, Final

from bullpen.dashboard._web import PageAnswer, PageProblem
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.overview import ConnectedWorker, grouped_by_place, workers_by_queue
from bullpen.ops.symptoms import DEAD_SUFFIX
from bullpen.wire.keys import QueueKeys

_SEARCHED: Final = 1_000
_MOST_PARTLY: Final = 20
_STARTS: Final = 6
"""The id of a dead letter ends with how often its job had started: so many are tried for a job that is gone."""

Hit = dict[str, str]


async def search(context: Context) -> Page | PageAnswer:
    """Everything of this name or id; the only one at once."""
    asked = context.query.get("q", "").strip()[:500]
    names = [look.queue for look in (await context.desk.snapshot()).looks]
    hits: list[Hit] = []
    if asked:
        hits = [
            *_queues(context, asked, names),
            *await _jobs(context, asked, names[:_SEARCHED]),
            *await _rows(context, asked),
            *await _chains(context, asked),
            *await _entities(context, asked),
            *await _workers(context, asked),
        ]
    if len(hits) == 1 and not context.request.is_api:
        return context.redirect(hits[0]["url"])
    view = {"asked": asked, "hits": hits, "lookedAt": min(len(names), _SEARCHED)}
    return Page("search.html", view, "Find", "search")


def _queues(context: Context, asked: str, names: list[str]) -> list[Hit]:
    exact = [name for name in names if name == asked]
    partly = [name for name in names if asked.lower() in name.lower() and name != asked]
    return [_hit("queue", name, context.url("queues", name)) for name in [*exact, *partly[:_MOST_PARTLY]]]


async def _jobs(context: Context, asked: str, names: list[str]) -> list[Hit]:
    """Jobs and schedules of this id, and the dead letters of such jobs."""
    connection, prefix = context.desk.app.connection, context.desk.app.prefix
    found: list[Hit] = []
    for group in grouped_by_place(connection, [QueueKeys(prefix, name) for name in names]):
        commands = [command for keys in group for command in _questions(keys, asked)]
        replies = await context.desk.within(connection.shared_door(group[0].base).call_many(commands))
        size = len(replies) // len(group)
        for place, keys in enumerate(group):
            found += _answers(context, keys, asked, replies[place * size : (place + 1) * size])
    return found


def _questions(keys: QueueKeys, asked: str) -> list[tuple[str, ...]]:
    letters = QueueKeys(keys.prefix, keys.dead_letter_name())
    return [
        ("HMGET", keys.job(asked), "name", "bpdl"),
        ("ZSCORE", keys.repeat, asked),
        *(("HEXISTS", letters.job(entry), "name") for entry in _entries(asked)),
    ]


def _entries(asked: str) -> list[str]:
    """Dead letters that may be meant: the entry itself, or that of a job."""
    return [asked, *(f"dl-{asked}-{number}" for number in range(1, _STARTS + 1))]


def _answers(context: Context, keys: QueueKeys, asked: str, replies: list[Any]) -> list[Hit]:
    job, due, *letters = replies
    found: list[Hit] = []
    if isinstance(job, list) and job[0] is not None:
        found.append(_hit("job", f"{asked} of {keys.name}", context.url("queues", keys.name, "jobs", asked)))
    if isinstance(due, bytes | float):
        found.append(_hit("schedule", f"{asked} of {keys.name}", context.url("schedules", queue=keys.name)))
    store = f"{keys.name}{DEAD_SUFFIX}"
    entries = [entry for entry, is_there in zip(_entries(asked), letters, strict=True) if is_there == 1]
    if isinstance(job, list) and job[1] is not None and (known := job[1].decode("utf-8", "replace")) not in entries:
        entries.append(known)
    found += [
        _hit("dead letter", f"{entry} of {store}", context.url("dead-letters", store, entry)) for entry in entries
    ]
    return found


async def _rows(context: Context, asked: str) -> list[Hit]:
    """Rows of the ledger: their ids are UUIDs."""
    try:
        wanted = str(uuid.UUID(asked))
    except ValueError:
        return []
    ledger = await context.desk.ledger()
    if ledger is None:
        return []
    found: list[Hit] = []
    if await context.desk.within(ledger.outbox.get(wanted), "ledger") is not None:
        found.append(_hit("outbox row", wanted, context.url("outbox", wanted)))
    if "runs" in await ledger.parts() and await context.desk.within(ledger.runs.get(wanted), "ledger") is not None:
        found.append(_hit("run", wanted, context.url("runs", wanted)))
    if "messages" in await ledger.parts():
        from bullpen.ledger.messages import SqlMessages

        if await context.desk.within(SqlMessages(ledger.database).get(wanted), "ledger") is not None:
            found.append(_hit("message", wanted, context.url("messages", wanted)))
    return found


async def _chains(context: Context, asked: str) -> list[Hit]:
    """What carries this correlation id."""
    ledger = await context.desk.ledger()
    if ledger is None:
        return []
    parts = await context.desk.within(ledger.parts(), "ledger")
    found = await context.desk.within(ledger.looks.chain(asked[:200], parts=parts, limit=1), "ledger")
    if not found.rows and not found.moves:
        return []
    return [_hit("chain", f"chain of events and deliveries of {asked}", context.url("chains", asked))]


async def _entities(context: Context, asked: str) -> list[Hit]:
    """Entities of this urn, in the workflows of the app."""
    found: list[Hit] = []
    for workflow in context.desk.app.workflows.all:
        try:
            entity = await context.desk.within(workflow.load(asked), "The store of the workflow")
        except PageProblem:  # it is away, and hides nothing else
            continue
        if entity is not None:
            found.append(_hit("entity", f"{asked} of {workflow.name}", context.url("workflows", workflow.name, asked)))
    return found


async def _workers(context: Context, asked: str) -> list[Hit]:
    desk = context.desk

    async def ask() -> list[ConnectedWorker]:
        return await workers_by_queue(desk.app.connection, desk.app.prefix) or []

    found = await desk.within(desk.once("connected", ask, for_s=5.0))
    queues = {each.queue for each in found if each.name == asked}
    return [_hit("worker", f"{asked} of {queue}", context.url("workers", queue=queue)) for queue in sorted(queues)]


def _hit(kind: str, text: str, url: str) -> Hit:
    return {"kind": kind, "text": text, "url": url}


ROUTES = (PageRoute("/search", search),)

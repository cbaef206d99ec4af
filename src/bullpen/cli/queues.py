"""`bullpen queues`: which queues there are and how full they are; pause, limit and empty one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import click

from bullpen._kernel.command_line import command_line
from bullpen.cli import context
from bullpen.cli.arguments import DryRunOption, QueueArgument, StateOption, YesOption, duration
from bullpen.cli.context import OnServer, WrongCommand
from bullpen.cli.follow import follow_queues
from bullpen.cli.show import Column, Record, instant, say
from bullpen.cli.tree import Argument, Group, Option
from bullpen.ops.status import duration_text

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.queue import LaneSettings, Queue

app = Group()
lanes = app.group("lanes", "List and change the lanes (fair shares) of a queue: weights, limits, pauses.")
limits = app.group("limits", "Show and change the concurrency and rate limits of a queue.")
app.command("follow")(follow_queues)

ReasonOption = Annotated[str, Option(metavar="TEXT", help="Reason, stored in the audit trail and shown to others.")]
LaneArgument = Annotated[str, Argument("LANE", "The lane; - for all lanes without settings of their own.")]
ConcurrencyOption = Annotated[str | None, Option(metavar="NUMBER", help="Jobs that run at once; none: no limit.")]
RateOption = Annotated[
    str | None, Option(metavar="JOBS/TIME", help="Jobs that start per time: 100/1m; none: no limit.")
]
_NONE = "none"


@app.command("list")
async def list_(at: OnServer) -> None:
    """List all queues under the prefix."""
    async with at.app() as app:
        with at.patience("looking for queues"):
            names = await context.queue_names(app)
        found = [await _describe(app, name) for name in names]
    at.list(QUEUES, found, empty=context.NO_QUEUES)


@app.command()
async def show(at: OnServer, queue: QueueArgument) -> None:
    """Show one queue."""
    import msgspec

    from bullpen.ops.pauses import read_pause

    async with at.queue(queue) as (app, opened):
        found = {**await _describe(app, queue), "pause": msgspec.to_builtins(await read_pause(opened))}
    at.one(QUEUES, found)
    if (note := found["pause"]) is not None and not at.as_json:
        since = f" at {at.when(instant(note['atMs']))}" if note["atMs"] else ""
        why = f": {note['reason']}" if note["reason"] else ""
        say(f"paused by {note['by'] or 'another client'}{since}{why}")


@app.command()
async def history(
    at: OnServer,
    queue: QueueArgument,
    range: Annotated[str, Option(metavar="RANGE", help="1h, 24h, 7d or 30d.")] = "1h",
    name: Annotated[str, Option(metavar="NAME", help="Only jobs of this name.")] = "",
) -> None:
    """Show what the jobs of a queue did: throughput, failures, and how long they waited and ran."""
    import msgspec

    from bullpen.ops.history import history_view
    from bullpen.ops.views.queues import OPERATIONS
    from bullpen.wire.keys import QueueKeys

    async with at.queue(queue) as (app, opened):
        marks = QueueKeys(app.prefix, OPERATIONS)
        view = await history_view(app.connection, opened.keys, marks, over=range, name=name)
    if at.as_json:
        at.say(msgspec.to_builtins(view))
        return
    points = [msgspec.to_builtins(each) for each in view.points if each.done or each.failed or each.retried]
    at.list(HISTORY, points, empty=f"nothing ended in the last {range}")
    if view.estimated_from is not None:
        say(f"estimated from {view.estimated_from} jobs")


@app.command()
async def pause(at: OnServer, queue: QueueArgument, reason: ReasonOption = "") -> None:
    """Pause a queue: workers of all clients take no more jobs; running jobs finish."""
    await _switch(at, queue, reason, paused=True)


@app.command()
async def resume(at: OnServer, queue: QueueArgument, reason: ReasonOption = "") -> None:
    """Resume a queue: workers take jobs again."""
    await _switch(at, queue, reason, paused=False)


async def _switch(at: OnServer, queue: str, reason: str, *, paused: bool) -> None:
    async with at.acting(queue) as (_, actions):
        await actions.do("queue.pause" if paused else "queue.resume", queue, reason=reason)
    at.say({"queue": queue, "paused": paused}, f"{queue} is {'paused' if paused else 'running'}")


@app.command()
async def restore(at: OnServer, queue: QueueArgument) -> None:
    """Put lost jobs back into the queue: unfinished jobs that are in no state."""
    async with at.queue(queue) as (_, opened):
        with at.patience("looking for jobs without a place"):
            restored = await opened.restore_orphans()
    at.say({"queue": queue, "restored": restored}, f"restored: {restored}")


# Deleting many ------------------------------------------------------------------------------------------------------


@app.command(destroys=True)
async def clean(
    at: OnServer,
    queue: QueueArgument,
    state: Annotated[StateOption, Option(help="Which jobs.")] = StateOption.COMPLETED,
    older: Annotated[
        str, Option(metavar="TIME", help="Only jobs that ended, began or were added longer ago than this: 90s, 2h, 7d.")
    ] = "0",
    limit: Annotated[int | None, Option(min=1, help="At most this many, oldest first.")] = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Delete jobs of a state that are older than a given age. Running jobs stay."""
    from bullpen.queue import JobState

    grace = duration("--older", older)

    async def count(opened: Queue) -> int:
        if state not in (StateOption.COMPLETED, StateOption.FAILED):
            found = await _count(opened, state)
        else:
            newest = int(((await context.server_time(opened)) - grace).timestamp()) * 1000 + 999
            door = opened.connection.shared_door(opened.keys.base)
            found = int(await door.call("ZCOUNT", getattr(opened.keys, state), "-inf", newest))
        return found if limit is None else min(found, limit)

    async def delete(opened: Queue) -> int:
        return len(await opened.clean(grace, state=JobState(state), limit=limit))

    detail = {"state": state.value, "older": older, "limit": limit}
    question = f"Delete at most {{count}} {state} jobs of {queue!r} for good?"
    await _delete(at, "clean", queue, count, delete, question, detail, yes=yes, dry_run=dry_run)


@app.command(destroys=True)
async def drain(
    at: OnServer,
    queue: QueueArgument,
    delayed: Annotated[bool, Option("--delayed", help="Delayed jobs too.")] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Delete all waiting jobs. Running and finished jobs stay."""
    states = ("waiting", "prioritized", *(["delayed"] if delayed else []))
    question = f"Delete {{count}} waiting jobs of {queue!r} for good?"
    await _delete(
        at, "drain", queue, lambda opened: _count(opened, *states), lambda opened: opened.drain(delayed=delayed),
        question, {"delayed": delayed}, yes=yes, dry_run=dry_run,
    )  # fmt: skip


@app.command(destroys=True)
async def obliterate(
    at: OnServer,
    queue: QueueArgument,
    force: Annotated[bool, Option("--force", help="Also when jobs are running.")] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Delete a queue with all its jobs. Its dead letters are in another queue and stay."""
    question = f"Delete the queue {queue!r} with {{count}} jobs for good?"
    await _delete(
        at, "obliterate", queue, _count, lambda opened: opened.obliterate(force=force),
        question, {"force": force}, yes=yes, dry_run=dry_run,
    )  # fmt: skip


async def _delete(
    at: OnServer,
    verb: str,
    queue: str,
    count: Callable[[Queue], Awaitable[int]],
    delete: Callable[[Queue], Awaitable[int]],
    question: str,
    detail: dict[str, Any],
    *,
    yes: bool,
    dry_run: bool,
) -> None:
    """Count, ask, write it down, do it."""
    async with at.acting(queue) as (opened, actions):
        found = await count(opened)
        if not dry_run and (found or verb == "obliterate"):
            at.confirm(_plural(question.format(count=found), found), yes=yes)
        if not dry_run:
            await actions.note(f"queue.{verb}", queue, "", detail)
            found = await delete(opened)
    at.counted(f"{verb.removesuffix('e')}ed", found, dry_run=dry_run)


def _plural(question: str, count: int) -> str:
    return question.replace(" jobs ", " job ") if count == 1 else question


async def _count(queue: Queue, *states: str) -> int:
    """Jobs of these states, or of all."""
    counts = asdict(await queue.counts())
    return sum(counts[state.replace("-", "_")] for state in states) if states else sum(counts.values())


# Limits -------------------------------------------------------------------------------------------------------------


@limits.command("show")
async def show_limits(at: OnServer, queue: QueueArgument) -> None:
    """Show the limits for all workers of all clients together."""
    async with at.queue(queue) as (_, opened):
        at.fields(await _limits(opened))


@limits.command("set")
async def set_limits(
    at: OnServer,
    queue: QueueArgument,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    reason: ReasonOption = "",
) -> None:
    """Change the limits for all workers of all clients together. Options that are not given stay unchanged."""
    if concurrency is None and rate is None:
        raise WrongCommand("pass --concurrency, --rate or both")
    most, per = _read("--concurrency", concurrency, _read_count), _read("--rate", rate, _read_rate)
    async with at.acting(queue) as (opened, actions):
        if most is not None:
            await actions.do("queue.concurrency", queue, reason=reason, most=most)
        if per is not None:
            asked = {"most": str(per[0]), "duration": f"{per[1] // timedelta(milliseconds=1)}ms"} if per else {}
            await actions.do("queue.rate", queue, reason=reason, **asked)
        at.fields(await _limits(opened))


async def _limits(queue: Queue) -> dict[str, Any]:
    rate = await queue.global_rate_limit()
    return {
        "queue": queue.name,
        "concurrency": await queue.global_concurrency(),
        "rate": None if rate is None else {"max": rate.max, "durationMs": rate.duration_ms},
    }


def _read(option: str, text: str | None, read: Callable[[str], Any]) -> Any:
    """None: nothing was said. False: the limit is to go."""
    if text is None or text == _NONE:
        return None if text is None else False
    try:
        return read(text)
    except ValueError:
        wanted: dict[Any, str] = {
            _read_rate: "jobs and time, such as 100/1m",
            _read_count: "a whole number of at least 1",
        }
        expected = wanted.get(read, "a number")
        raise click.BadParameter(f"{text!r}; write {expected}, or {_NONE!r}", param_hint=f"'{option}'") from None


def _read_count(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def _read_rate(text: str) -> tuple[int, timedelta]:
    jobs, slash, time = text.partition("/")
    if not slash:
        raise ValueError(text)
    return _read_count(jobs), duration("--rate", time)


# Lanes --------------------------------------------------------------------------------------------------------------


@lanes.command("list")
async def list_lanes(at: OnServer, queue: QueueArgument) -> None:
    """List lanes that have settings, or waiting or running jobs."""
    async with at.queue(queue) as (_, opened):
        found = await opened.lanes.list()
    line = command_line("jobs add", queue, "NAME", lane="KEY")
    at.list(LANES, found, empty=f"no lanes in {queue!r} yet; `{line}` uses one")


@lanes.command("set")
async def set_lane(
    at: OnServer,
    queue: QueueArgument,
    lane: LaneArgument,
    weight: Annotated[
        str | None, Option(metavar="NUMBER", help="Turns per round, 1 by default; none: like all others.")
    ] = None,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    size: Annotated[
        str | None, Option(metavar="NUMBER", help="Jobs that may wait; further adds are refused; none: no limit.")
    ] = None,
) -> None:
    """Change the weight and limits of a lane. Options that are not given stay unchanged."""
    given: dict[str, Any] = {
        "weight": _read("--weight", weight, float),
        "concurrency": _read("--concurrency", concurrency, _read_count),
        "rate": _read("--rate", rate, _read_rate),
        "size": _read("--size", size, _read_count),
    }
    if all(value is None for value in given.values()):
        raise WrongCommand("pass --weight, --concurrency, --rate or --size")
    async with at.queue(queue) as (_, opened):
        _say_lane(at, lane, await opened.lanes.set(_lane(lane), **given))


@lanes.command("pause")
async def pause_lane(
    at: OnServer,
    queue: QueueArgument,
    lane: LaneArgument,
    for_: Annotated[
        str | None, Option("--for", metavar="TIME", help="Duration: 30s, 5m, 2h; by default until it is resumed.")
    ] = None,
) -> None:
    """Pause a lane: none of its jobs starts; running jobs finish."""
    length = None if for_ is None else duration("--for", for_)
    async with at.queue(queue) as (_, opened):
        await opened.lanes.pause(lane, length)
        _say_lane(at, lane, await opened.lanes.get(lane))


@lanes.command("resume")
async def resume_lane(at: OnServer, queue: QueueArgument, lane: LaneArgument) -> None:
    """Resume a lane: its jobs start again."""
    async with at.queue(queue) as (_, opened):
        await opened.lanes.resume(lane)
        _say_lane(at, lane, await opened.lanes.get(lane))


@lanes.command("remove", destroys=True)
async def remove_lane(at: OnServer, queue: QueueArgument, lane: LaneArgument) -> None:
    """Remove the settings of a lane. Its jobs stay."""
    async with at.queue(queue) as (_, opened):
        await opened.lanes.remove(_lane(lane))
        _say_lane(at, lane, await opened.lanes.get(_lane(lane)))


def _lane(name: str) -> str | None:
    return None if name == "-" else name


def _say_lane(at: OnServer, lane: str, settings: LaneSettings) -> None:
    from bullpen.queue.lanes import LaneInfo

    shown = LaneInfo(name=lane, settings=settings).to_json()
    own = {name: shown[name] for name in ("name", "weight", "concurrency", "rate", "size", "paused")}
    said = ", ".join(f"{name} {value}" for name, value in own.items() if name != "name" and value not in (None, False))
    at.say(own, f"lane {lane!r}: {said or 'as all others'}")


# How they are shown -------------------------------------------------------------------------------------------------


async def _describe(app: Bullpen, name: str) -> dict[str, Any]:
    queue = app.queue(name)
    counts = await queue.counts()
    return {
        "queue": name,
        "waiting": counts.waiting,
        "prioritized": counts.prioritized,
        "delayed": counts.delayed,
        "waitingChildren": counts.waiting_children,
        "active": counts.active,
        "completed": counts.completed,
        "failed": counts.failed,
        "deadLetters": await queue.dead_letters.depth(),
        "paused": await queue.is_paused(),
    }


def _rate(lane: dict[str, Any]) -> str:
    rate = lane["rate"]
    return "" if rate is None else f"{rate['max']} per {rate['durationMs']} ms"


def _time(what: str, share: str, point: dict[str, Any]) -> str:
    found = point[what][share]
    return "" if found is None else duration_text(round(found))


_PAUSED = Column("", lambda each: "paused" if each["paused"] else "")
QUEUES = Record(
    lambda each: each,
    (
        Column("queue"),
        Column("waiting"),
        Column("prioritized", worth=3),
        Column("delayed", worth=2),
        Column("parents", lambda each: each["waitingChildren"] or None, worth=5),
        Column("active"),
        Column("completed", worth=4),
        Column("failed"),
        Column("dead letters", "deadLetters", worth=1),
        _PAUSED,
    ),
)
HISTORY = Record(
    lambda each: each,
    (
        Column("from", lambda each: instant(each["atMs"])),
        *(Column(title, is_number=True) for title in ("done", "failed", "retried")),
        *(
            Column(f"{what} {share}", partial(_time, what, share), is_number=True, worth=worth)
            for what in ("wait", "run")
            for share, worth in (("p50", 1), ("p95", 0), ("p99", 2))
        ),
    ),
)
LANES = Record(
    lambda each: each.to_json(),
    (
        Column("lane", "name"),
        *(Column(title) for title in ("waiting", "held", "delayed", "active")),
        *(Column(title, worth=1) for title in ("weight", "concurrency")),
        Column("rate", _rate, worth=3),
        Column("size", worth=2),
        _PAUSED,
    ),
)

"""`bullpen schedules`: the job schedulers of a queue: see, add, change, pause, run and remove them.

Elsewhere: when they run (`bullpen.wire.schedules`), storing them (`bullpen.queue.schedulers`), tasks that declare their
schedule in code (`bullpen run`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import typer

from bullpen._kernel.command_line import command_line
from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, QueueArgument, QueueFirst, RedisOption, WrongCommand
from bullpen.errors import SchedulerNotFound
from bullpen.ops.actions import Actions
from bullpen.queue import Queue, SchedulerRecord, next_runs

T = TypeVar("T")
_HELP = (
    "See job schedulers and when they fire; add, pause, run and remove them. The queue may stand first: "
    "bullpen schedules emails."
)

app = typer.Typer(cls=QueueFirst, help=_HELP, no_args_is_help=True)

ScheduleArgument = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="Id of the scheduler, as listed.", show_default=False)
]
CountOption = Annotated[int, typer.Option(min=1, max=1_000, help="How many instants.")]
EveryOption = Annotated[str | None, typer.Option(metavar="TIME", help="Instead of a pattern: 90s, 15m, 2h, 1d.")]
ZoneOption = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="Time zone of the pattern; else UTC.")]
StartOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="No run before this instant (ISO: 2026-05-01T00:00:00Z).")
]
EndOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="None after this instant (ISO: 2026-05-01T00:00:00Z).")
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="So many runs, then no more.")]
OffsetOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="With --every: so long after each full interval of the clock.")
]


@app.callback()
def schedules() -> None:
    """See job schedulers and when they fire; add, pause, run and remove them. The queue may stand first:
    bullpen schedules emails."""


@app.command("list")
def list_(
    queue: QueueArgument,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    last: Annotated[bool, typer.Option("--last-first", help="The last to fire first.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the job schedulers of a queue, the next to fire first."""

    async def ask() -> list[tuple[SchedulerRecord, str | None]]:
        async with common.opened(redis, prefix) as opened:
            await common.must_exist(opened, queue)
            asked = opened.queue(queue)
            page = await asked.schedulers(count=limit, descending=last)
            return [(each, await asked.why_ended(each)) for each in page]

    found = common.wait_for(ask())
    if as_json:
        common.print_json([_to_json(each, ended) for each, ended in found])
    elif not found:
        common.err.print(f"no schedulers in {queue!r}", markup=False)
    else:
        rows = [(each.id, each.name, _rule(each), _when_next(each, ended), each.iterations) for each, ended in found]
        common.print_table(("schedule", "job", "rule", "next", "made"), rows, numbers=["made"])


@app.command()
def show(
    queue: QueueArgument,
    schedule: ScheduleArgument,
    count: CountOption = 5,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one scheduler and the instants at which it will fire."""

    async def ask(asked: Queue) -> tuple[SchedulerRecord, str | None]:
        found = await asked.get_scheduler(schedule)
        if found is None:
            raise SchedulerNotFound(queue, schedule)
        return found, await asked.why_ended(found)

    found, ended = _on(queue, redis, prefix, ask)
    instants = [] if ended else [_when(run) for run in found.next_runs(count)]
    if as_json:
        common.print_json({**_to_json(found, ended), "instants": instants})
        return
    rows = [(name, common.short(value, limit=10_000)) for name, value in _to_json(found, ended).items()]
    common.print_table(("field", "value"), rows)
    if ended:
        common.out.print(f"\nfires no more: {ended}", markup=False)
    elif found.is_paused:
        line = command_line("schedules resume", queue, schedule)
        common.out.print(f"\nis paused; `{line}` lets it go on", markup=False)
    else:
        common.out.print("\nfires at:", *instants, sep="\n", markup=False)


@app.command()
def add(
    queue: QueueArgument,
    schedule: Annotated[str, typer.Argument(metavar="SCHEDULE", help="Id of the scheduler.", show_default=False)],
    cron: Annotated[str | None, typer.Option(metavar="PATTERN", help="A cron pattern, in quotes.")] = None,
    every: EveryOption = None,
    zone: ZoneOption = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of its jobs; else the id.")] = None,
    data: Annotated[str, typer.Option(metavar="JSON", help="Data of its jobs; - reads it from stdin.")] = "{}",
    start: StartOption = None,
    end: EndOption = None,
    limit: LimitOption = None,
    offset: OffsetOption = None,
    immediately: Annotated[bool, typer.Option("--immediately", help="With --cron: the first run is now.")] = False,
    overlap: Annotated[
        Literal["queue", "one", "skip"] | None,
        typer.Option(help="A run that is due while one has not ended: beside it, after it, or not at all."),
    ] = None,
    catch_up: Annotated[
        str | None, typer.Option(metavar="HOW", help="Runs that were missed: once, skip, or how many of the newest.")
    ] = None,
    grace: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --catch-up skip: how late a run may begin.")
    ] = None,
    jitter: Annotated[str | None, typer.Option(metavar="TIME", help="Up to so much later, by chance.")] = None,
    priority: Annotated[int | None, typer.Option(help="Of its jobs: 0 before all others, then 1 to 2097151.")] = None,
    attempts: Annotated[int | None, typer.Option(help="Of its jobs: all tries, the first included.")] = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a scheduler, or change the one with this id."""
    options: Any = {
        **_rule_options(cron, every, zone, start, end, limit, offset),
        "immediately": immediately or None,
        "overlap": overlap,
        "catch_up": int(catch_up) if catch_up is not None and catch_up.isdigit() else catch_up,
        "grace": None if grace is None else common.duration("--grace", grace),
        "jitter": None if jitter is None else common.duration("--jitter", jitter),
        "priority": priority,
        "attempts": attempts,
    }
    given = {option: value for option, value in options.items() if value is not None}
    body = common.parse_json("--data", data)
    made = _on(queue, redis, prefix, lambda asked: asked.upsert_scheduler(schedule, name, body, **given), new=True)
    if as_json:
        common.print_json(_to_json(made, None))
    elif made.is_paused:
        common.out.print(f"{schedule} is stored, and paused as before", markup=False)
    else:
        common.out.print(f"{schedule} fires next at {common.when(made.next_ms)}", markup=False)


@app.command()
def remove(
    queue: QueueArgument,
    schedule: ScheduleArgument,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a scheduler and its next job; one that is in line or runs already is the last."""
    _do("remove", queue, schedule, redis, prefix)
    _print_done("removed", schedule, as_json=as_json)


@app.command()
def pause(
    queue: QueueArgument,
    schedule: ScheduleArgument,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a scheduler make no jobs until it is resumed; it stays listed, and a job that runs goes on."""
    _do("pause", queue, schedule, redis, prefix)
    _print_done("paused", schedule, as_json=as_json)


@app.command()
def resume(
    queue: QueueArgument,
    schedule: ScheduleArgument,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a paused scheduler go on at its next time; what it has missed is not made up for."""
    _do("resume", queue, schedule, redis, prefix)
    _print_done("resumed", schedule, as_json=as_json)


@app.command()
def preview(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="A cron pattern, in quotes.", show_default=False)
    ] = None,
    every: EveryOption = None,
    zone: ZoneOption = None,
    start: StartOption = None,
    end: EndOption = None,
    limit: LimitOption = None,
    offset: OffsetOption = None,
    count: CountOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Print when a schedule would fire, clock changes included. Needs no server and stores nothing."""
    options = _rule_options(pattern, every, zone, start, end, limit, offset)
    instants = [_when(run) for run in next_runs(count=count, **options)]
    if as_json:
        common.print_json(instants)
    else:
        common.out.print(*instants, sep="\n", markup=False)


@app.command("run")
def run_now(
    queue: QueueArgument,
    schedule: ScheduleArgument,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the next job of a scheduler run now; the one after it comes at its own time."""

    async def run(asked: Queue, actions: Actions) -> str:
        found = await asked.get_scheduler(schedule)
        await actions.do("schedule.run", queue, schedule)
        return "" if found is None else found.job_id

    job_id = _acting(queue, redis, prefix, run)
    if as_json:
        common.print_json({"promoted": job_id})
    else:
        common.out.print(f"runs now: {job_id}", markup=False)


def _do(verb: str, queue: str, schedule: str, redis: str | None, prefix: str | None) -> None:
    async def act(_asked: Queue, actions: Actions) -> None:
        await actions.do(f"schedule.{verb}", queue, schedule)

    _acting(queue, redis, prefix, act)


def _acting(queue: str, redis: str | None, prefix: str | None, act: Callable[[Queue, Actions], Awaitable[T]]) -> T:
    """What is written to the audit trail before it is done."""

    async def work() -> T:
        async with common.opened(redis, prefix) as opened:
            await common.must_exist(opened, queue)
            return await act(opened.queue(queue), await common.acting(opened))

    return common.wait_for(work())


def _on(
    queue: str, redis: str | None, prefix: str | None, act: Callable[[Queue], Awaitable[T]], *, new: bool = False
) -> T:
    """`new`: the queue may be one that nobody has used yet."""

    async def work() -> T:
        async with common.opened(redis, prefix) as opened:
            if not new:
                await common.must_exist(opened, queue)
            return await act(opened.queue(queue))

    return common.wait_for(work())


def _rule_options(
    cron: str | None,
    every: str | None,
    zone: str | None,
    start: str | None,
    end: str | None,
    limit: int | None,
    offset: str | None,
) -> Any:
    """As `next_runs` and `upsert_scheduler` take them."""
    if (cron is None) == (every is None):
        raise WrongCommand("give a cron pattern, or --every")
    if every is not None and common.duration("--every", every).total_seconds() <= 0:
        raise WrongCommand("--every: at least 1 ms")
    return {
        "cron": cron,
        "every": None if every is None else common.duration("--every", every),
        "tz": zone,
        "start": None if start is None else _instant("--start", start),
        "end": None if end is None else _instant("--end", end),
        "limit": limit,
        "offset": None if offset is None else common.duration("--offset", offset),
    }


def _when(instant: datetime) -> str:
    return common.when(round(instant.timestamp() * 1000))


def _instant(option: str, text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise WrongCommand(f"{option}: {text!r} is no instant with a zone; write 2026-05-01T00:00:00Z")
    return found


def _print_done(what: str, schedule: str, *, as_json: bool) -> None:
    if as_json:
        common.print_json({what: schedule})
    else:
        common.out.print(f"{what}: {schedule}", markup=False)


def _when_next(found: SchedulerRecord, ended: str | None) -> str:
    if found.is_paused:
        return "paused"
    return f"ended: {ended}" if ended else common.when(found.next_ms)


def _rule(found: SchedulerRecord) -> str:
    if found.pattern:
        return f"{found.pattern} {found.zone or 'machine zone'}"
    return f"every {found.every_ms} ms"


def _to_json(found: SchedulerRecord, ended: str | None) -> dict[str, Any]:
    fields = {
        "id": found.id,
        "name": found.name,
        "pattern": found.pattern,
        "tz": found.zone,
        "every": found.every_ms,
        "offset": found.offset_ms or None,
        "limit": found.limit,
        "startDate": common.when(found.starts_ms or 0) or None,
        "endDate": common.when(found.ends_ms or 0) or None,
        "overlap": None if found.overlap == "queue" else found.overlap,
        "catchUp": None if found.catch_up == "once" else found.catch_up,
        "jitter": found.jitter_ms or None,
        "declared": found.is_declared or None,
        "paused": common.when(found.paused_ms or 0) or None,
        "next": None if ended or found.is_paused else common.when(found.next_ms),
        "ended": ended,
        "iterations": found.iterations,
        "data": found.data,
    }
    return {name: value for name, value in fields.items() if value is not None}

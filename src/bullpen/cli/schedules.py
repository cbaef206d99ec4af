"""`bullpen schedules`: the job schedulers of a queue, when they fire next, and firing one now.

Schedulers are made by the programs that own them (Node's `upsertJobScheduler`); here they are looked at. Elsewhere: the
rules of cron (`bullpen._kernel.cron`), storing the next iteration (`bullpen.queue`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import typer

from bullpen._kernel.cron import LOCAL, next_after
from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, PrefixOption, QueueArgument, QueueFirst, RedisOption, WrongCommand
from bullpen.errors import InvalidOption, JobNotFound, JobStateConflict
from bullpen.queue import JobState, Queue
from bullpen.queue.browse import SchedulerRecord

app = typer.Typer(
    cls=QueueFirst,
    help="See job schedulers and when they fire, fire one now. The queue may stand first: bullpen schedules emails.",
    no_args_is_help=True,
)

ScheduleArgument = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="Id of the scheduler, as listed.", show_default=False)
]
CountOption = Annotated[int, typer.Option(min=1, max=1_000, help="How many instants.")]


@app.callback()
def schedules() -> None:
    """See job schedulers and when they fire, fire one now. The queue may stand first: bullpen schedules emails."""


@app.command("list")
def list_(
    queue: QueueArgument,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the job schedulers of a queue, the next to fire first."""

    async def ask() -> list[tuple[SchedulerRecord, str | None]]:
        async with common.opened(redis, prefix) as opened:
            await common.must_exist(opened, queue)
            asked = opened.queue(queue)
            return [(each, await _why_ended(asked, each)) for each in await asked.schedulers(count=limit)]

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

    async def ask() -> tuple[SchedulerRecord, str | None] | None:
        async with common.opened(redis, prefix) as opened:
            found = await opened.queue(queue).scheduler(schedule)
            return None if found is None else (found, await _why_ended(opened.queue(queue), found))

    answer = common.wait_for(ask())
    if answer is None:
        raise Done(f"there is no scheduler {schedule!r} in {queue!r}; `bullpen schedules {queue}` lists what there is")
    found, ended = answer
    instants = [] if ended else [common.when(instant) for instant in islice(_instants(found), count)]
    if as_json:
        common.print_json({**_to_json(found, ended), "instants": instants})
        return
    rows = [(name, common.short(value, limit=10_000)) for name, value in _to_json(found, ended).items()]
    common.print_table(("field", "value"), rows)
    if ended:
        common.out.print(f"\nfires no more: {ended}", markup=False)
    else:
        common.out.print("\nfires at:", *instants, sep="\n", markup=False)


@app.command()
def preview(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="A cron pattern, in quotes.", show_default=False)
    ] = None,
    every: Annotated[str | None, typer.Option(metavar="TIME", help="Instead of a pattern: 90s, 15m, 2h, 1d.")] = None,
    zone: Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="Time zone of the pattern.")] = None,
    count: CountOption = 5,
    as_json: JsonOption = False,
) -> None:
    """Print when a cron pattern would fire, clock changes included. Needs no server and stores nothing."""
    if (pattern is None) == (every is None):
        raise WrongCommand("give a cron pattern, or --every")
    now_ms = int(time.time() * 1000)
    if every is not None:
        every_ms = int(common.duration("--every", every).total_seconds() * 1000)
        if every_ms < 1:
            raise WrongCommand("--every: at least 1 ms")
        instants = [now_ms + every_ms * number for number in range(1, count + 1)]
    else:
        assert pattern is not None
        instants = list(islice(_matches(pattern, zone, now_ms), count))
    if as_json:
        common.print_json([common.when(instant) for instant in instants])
    else:
        common.out.print(*map(common.when, instants), sep="\n", markup=False)


@app.command("run")
def run_now(
    queue: QueueArgument,
    schedule: ScheduleArgument,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the next job of a scheduler run now; the one after it comes at its own time."""

    async def work() -> str:
        async with common.opened(redis, prefix) as opened:
            found = await opened.queue(queue).scheduler(schedule)
            if found is None:
                raise Done(f"there is no scheduler {schedule!r} in {queue!r}")
            job_id = _next_job(found)
            if (ended := await _why_ended(opened.queue(queue), found)) is not None:
                again = "upsert it again where it is made"
                raise Done(f"the scheduler {schedule!r} has ended ({ended}) and fires no more; {again}")
            try:
                await opened.queue(queue).promote(job_id)
            except JobStateConflict:
                raise Done(f"the job {job_id!r} of this scheduler is due already") from None
            except JobNotFound:
                raise Done(
                    f"the scheduler {schedule!r} has no job in line: it has ended, or its chain was cut; "
                    "upsert it again where it is made"
                ) from None
            return job_id

    job_id = common.wait_for(work())
    if as_json:
        common.print_json({"promoted": job_id})
    else:
        common.out.print(f"runs now: {job_id}", markup=False)


def _next_job(found: SchedulerRecord) -> str:
    return f"repeat:{found.id}:{found.next_ms}"


async def _why_ended(queue: Queue, found: SchedulerRecord) -> str | None:
    """Why a scheduler fires no more, or None: the job that its record names is over, and no other came after it."""
    state = await queue.state_of(_next_job(found))
    is_over = state in (JobState.COMPLETED, JobState.FAILED)
    if is_over or state is JobState.UNKNOWN:
        if found.limit is not None and found.iterations >= found.limit:
            return f"limit of {found.limit} reached"
        if found.ends_ms is not None and found.ends_ms < time.time() * 1000:
            return "its end date has passed"
    return "no further time" if is_over else None


def _instants(found: SchedulerRecord) -> Iterator[int]:
    """When it fires, the stored next time first; as far as its end and its limit allow."""
    instant, number = found.next_ms, max(1, found.iterations)
    while (found.limit is None or number <= found.limit) and (found.ends_ms is None or instant <= found.ends_ms):
        yield instant
        number += 1
        if found.every_ms:
            instant += found.every_ms
        elif found.pattern:
            # Without a zone as workers compute it: the machine's, as Node's do.
            instant = next_after(found.pattern, found.zone or LOCAL, instant, seed=f"{found.id} {found.pattern}")
        else:
            return


def _matches(pattern: str, zone: str | None, after_ms: int) -> Iterator[int]:
    while True:
        try:
            after_ms = next_after(pattern, zone, after_ms)
        except InvalidOption as error:
            raise WrongCommand(str(error)) from None
        yield after_ms


def _when_next(found: SchedulerRecord, ended: str | None) -> str:
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
        "next": None if ended else common.when(found.next_ms),
        "ended": ended,
        "iterations": found.iterations,
        "data": found.data,
    }
    return {name: value for name, value in fields.items() if value is not None}

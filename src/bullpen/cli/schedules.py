"""`bullpen schedules`: what runs by the clock: see, add, change, pause, run and remove it.

Elsewhere: when they run (`bullpen.wire.schedules`), storing them (`bullpen.queue.schedulers`), tasks that declare their
schedule in code (`bullpen run`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bullpen._kernel.command_line import command_line
from bullpen.cli import show
from bullpen.cli.arguments import LimitOption, QueueArgument, duration, instant, parse_json
from bullpen.cli.context import OnServer, Output, WrongCommand
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.queue import SchedulerRecord

app = Group()

ScheduleArgument = Annotated[str, Argument("SCHEDULE", "Id of the schedule, as listed.")]
CountOption = Annotated[int, Option(min=1, max=1_000, help="How many times.")]


@dataclass(frozen=True, kw_only=True)
class ScheduleRule(Output):
    """When a schedule fires."""

    every: Annotated[str | None, Option(metavar="TIME", help="Instead of a pattern: 90s, 15m, 2h, 1d.")] = None
    tz: Annotated[str | None, Option(metavar="ZONE", help="Time zone of the pattern; default: UTC.")] = None
    start: Annotated[
        str | None, Option(metavar="TIME", help="No run before this time (ISO: 2026-05-01T00:00:00Z).")
    ] = None
    end: Annotated[str | None, Option(metavar="TIME", help="No run after this time (ISO: 2026-05-01T00:00:00Z).")] = (
        None
    )
    runs: Annotated[int | None, Option("--limit", min=1, help="Number of runs, then the schedule ends.")] = None
    offset: Annotated[
        str | None, Option(metavar="TIME", help="With --every: offset after each full interval of the clock.")
    ] = None

    def options(self, cron: str | None) -> Any:
        """As `next_runs` and `upsert_scheduler` take them."""
        if (cron is None) == (self.every is None):
            raise WrongCommand("give a cron pattern, or --every")
        every = None if self.every is None else duration("--every", self.every)
        if every is not None and not every:
            raise WrongCommand("--every: at least 1 ms")
        return {
            "cron": cron,
            "every": every,
            "tz": self.tz,
            "start": instant("--start", self.start, zoned=True),
            "end": instant("--end", self.end, zoned=True),
            "limit": self.runs,
            "offset": None if self.offset is None else duration("--offset", self.offset),
        }


@dataclass(frozen=True, kw_only=True)
class RuleOnServer(ScheduleRule, OnServer):
    """When a schedule of a queue fires."""


@app.command("list")
async def list_(
    at: OnServer,
    queue: QueueArgument,
    limit: LimitOption = 100,
    last: Annotated[bool, Option("--last-first", help="The last to fire first.")] = False,
) -> None:
    """List the schedules of a queue, the next to fire first."""
    async with at.queue(queue) as (_, opened):
        page = await opened.schedulers(count=limit, descending=last)
        found = [(each, await opened.why_ended(each)) for each in page]
    add = f"`{command_line('schedules add', queue, 'ID', every='1h')}` adds one"
    at.list(SCHEDULES, found, empty=f"no schedules in {queue!r}; {add}")


@app.command("show")
async def show_(at: OnServer, queue: QueueArgument, schedule: ScheduleArgument, count: CountOption = 5) -> None:
    """Show one schedule and its next times."""
    from bullpen.errors import SchedulerNotFound

    async with at.queue(queue) as (_, opened):
        found = await opened.get_scheduler(schedule)
        if found is None:
            raise SchedulerNotFound(queue, schedule)
        ended = await opened.why_ended(found)
    instants = [] if ended else list(found.next_runs(count))
    at.fields({**to_json((found, ended)), "instants": instants}, without=("instants",))
    if at.as_json:
        return
    if ended:
        show.say(f"\nfires no more: {ended}")
    elif found.is_paused:
        show.say(f"\nis paused; `{command_line('schedules resume', queue, schedule)}` resumes it")
    else:
        show.say("\nfires at:", *map(at.when, instants))


@app.command()
async def add(
    at: RuleOnServer,
    queue: QueueArgument,
    schedule: Annotated[str, Argument("SCHEDULE", "Id of the schedule.")],
    cron: Annotated[str | None, Option(metavar="PATTERN", help="A cron pattern, in quotes.")] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="Name of its jobs; default: the id.")] = None,
    data: Annotated[str, Option(metavar="JSON", help="Data of its jobs; @FILE reads a file, - stdin.")] = "{}",
    immediately: Annotated[bool, Option("--immediately", help="With --cron: the first run is now.")] = False,
    overlap: Annotated[
        Literal["queue", "one", "skip"] | None,
        Option(help="When a run is due before the last one ended: run both, wait, or skip."),
    ] = None,
    catch_up: Annotated[
        str | None, Option(metavar="HOW", help="Runs that were missed: once, skip, or how many of the newest.")
    ] = None,
    grace: Annotated[str | None, Option(metavar="TIME", help="With --catch-up skip: how late a run may begin.")] = None,
    jitter: Annotated[str | None, Option(metavar="TIME", help="Random delay up to this.")] = None,
    priority: Annotated[
        int | None, Option(help="Priority of its jobs: 0 runs before all others, then 1 to 2097151.")
    ] = None,
    attempts: Annotated[int | None, Option(help="Attempts of its jobs, the first included.")] = None,
    new_queue: Annotated[
        bool, Option("--new-queue", help="Create the queue even if another has a similar name.")
    ] = False,
) -> None:
    """Add a schedule, or change the one with this id."""
    options: Any = {
        **at.options(cron),
        "immediately": immediately or None,
        "overlap": overlap,
        "catch_up": int(catch_up) if catch_up is not None and catch_up.isdigit() else catch_up,
        "grace": None if grace is None else duration("--grace", grace),
        "jitter": None if jitter is None else duration("--jitter", jitter),
        "priority": priority,
        "attempts": attempts,
    }
    given = {option: value for option, value in options.items() if value is not None}
    body = parse_json("--data", data)
    async with at.new_queue(queue, is_meant=new_queue) as (_, opened):
        made = await opened.upsert_scheduler(schedule, name, body, **given)
    fires = (
        "is stored, and paused as before" if made.is_paused else f"fires next at {at.when(show.instant(made.next_ms))}"
    )
    at.say(to_json((made, None)), f"{schedule} {fires}")


@app.command(destroys=True)
async def remove(at: OnServer, queue: QueueArgument, schedule: ScheduleArgument) -> None:
    """Remove a schedule and its next job. A job that is already waiting or running is the last one."""
    await _do(at, "remove", "removed", queue, schedule)


@app.command()
async def pause(at: OnServer, queue: QueueArgument, schedule: ScheduleArgument) -> None:
    """Pause a schedule: it makes no jobs until it is resumed. A running job continues."""
    await _do(at, "pause", "paused", queue, schedule)


@app.command()
async def resume(at: OnServer, queue: QueueArgument, schedule: ScheduleArgument) -> None:
    """Resume a paused schedule at its next time. Missed runs are not repeated."""
    await _do(at, "resume", "resumed", queue, schedule)


@app.command()
async def run(
    at: OnServer,
    queue: QueueArgument,
    schedule: ScheduleArgument,
    early: Annotated[
        bool,
        Option("--early", help="Run the next regular job now instead of at its time. The one after it stays."),
    ] = False,
) -> None:
    """Run a schedule once more, now. Its regular times stay where they are."""
    async with at.acting(queue) as (opened, actions):
        if not early:
            done = await actions.do("schedule.once", queue, schedule)
            at.say({"added": done}, done)
            return
        found = await opened.get_scheduler(schedule)
        await actions.do("schedule.run", queue, schedule)
    job_id = "" if found is None else found.job_id
    at.say({"promoted": job_id}, f"runs now: {job_id}")


@app.command()
def preview(
    at: ScheduleRule,
    pattern: Annotated[str | None, Argument("[PATTERN]", "A cron pattern, in quotes.")] = None,
    count: CountOption = 5,
) -> None:
    """Print the next times of a schedule, with clock changes. Needs no server and stores nothing."""
    from bullpen.queue import next_runs

    instants = list(next_runs(count=count, **at.options(pattern)))
    at.say(instants, *map(at.when, instants))


async def _do(at: OnServer, verb: str, done: str, queue: str, schedule: str) -> None:
    async with at.acting(queue) as (_, actions):
        await actions.do(f"schedule.{verb}", queue, schedule)
    at.say({done: schedule}, f"{done}: {schedule}")


# How they are shown -------------------------------------------------------------------------------------------------


def to_json(found: tuple[SchedulerRecord, str | None]) -> dict[str, Any]:
    record, ended = found
    fields = {
        "id": record.id,
        "name": record.name,
        "pattern": record.pattern,
        "tz": record.zone,
        "every": record.every_ms,
        "offset": record.offset_ms or None,
        "limit": record.limit,
        "startDate": show.instant(record.starts_ms),
        "endDate": show.instant(record.ends_ms),
        "overlap": None if record.overlap == "queue" else record.overlap,
        "catchUp": None if record.catch_up == "once" else record.catch_up,
        "jitter": record.jitter_ms or None,
        "declared": record.is_declared or None,
        "paused": show.instant(record.paused_ms),
        "next": None if ended or record.is_paused else show.instant(record.next_ms),
        "ended": ended,
        "iterations": record.iterations,
        "data": record.data,
    }
    return show.present(fields)


def _next(schedule: dict[str, Any]) -> Any:
    if "paused" in schedule:
        return "paused"
    return f"ended: {schedule['ended']}" if "ended" in schedule else schedule.get("next")


def _rule(schedule: dict[str, Any]) -> str:
    if "pattern" in schedule:
        return f"{schedule['pattern']} {schedule.get('tz', 'machine zone')}"
    return f"every {schedule.get('every')} ms"


SCHEDULES = Record(
    to_json,
    (
        Column("schedule", "id"),
        Column("job", "name", worth=2),
        Column("rule", _rule),
        Column("next", _next),
        Column("made", "iterations", worth=1),
    ),
)

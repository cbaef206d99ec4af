"""`bullpen jobs`: list, show, add, retry, promote, change, cancel and remove the jobs of a queue."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bullpen._kernel.command_line import command_line
from bullpen.cli import context, show
from bullpen.cli.arguments import (
    AllOption,
    DryRunOption,
    QueueArgument,
    StateOption,
    duration,
    instant,
    one_way,
    parse_json,
)
from bullpen.cli.context import OnServer, WrongCommand
from bullpen.cli.follow import follow_jobs, logs
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group, Option

if TYPE_CHECKING:
    from bullpen.queue import Job, Queue

app = Group()

OnFailure = Literal["fail_parent", "continue_parent", "ignore", "remove", "wait"]
IdArgument = Annotated[str, Argument("ID", "Id of the job.")]
IdsArgument = Annotated[list[str], Argument("ID...", "Ids of jobs.")]
SomeIdsArgument = Annotated[list[str] | None, Argument("[ID]...", "Ids of jobs.")]

app.command("follow")(follow_jobs)
app.command()(logs)


@app.command("list")
async def list_(
    at: OnServer,
    queue: QueueArgument,
    state: Annotated[
        list[StateOption] | None,
        Option(help="Only jobs in this state; may be repeated.", default="all"),
    ] = None,
    limit: Annotated[int, Option(min=1, help="At most this many jobs of each state.")] = 20,
) -> None:
    """List jobs: waiting jobs in the order they run, finished jobs newest first."""
    import asyncio

    from bullpen.queue import JobState
    from bullpen.queue.browse import list_jobs

    found: list[tuple[str, Job, Any]] = []
    async with at.queue(queue) as (_, opened):
        for name in state or StateOption:
            jobs = await list_jobs(opened, JobState(name), count=limit)
            counts: list[Any] = [None] * len(jobs)
            if name is StateOption.WAITING_CHILDREN:
                counts = await asyncio.gather(*(job.children_counts() for job in jobs))
            found += zip([name] * len(jobs), jobs, counts, strict=True)
    next_step = command_line("jobs list", queue) if state else command_line("jobs add", queue, "NAME")
    what = f"no jobs in {queue!r}{' in this state' if state else ''}"
    at.list(JOBS, found, empty=f"{what}; `{next_step}` {'shows all' if state else 'adds one'}")


@app.command("show")
async def show_(
    at: OnServer,
    queue: QueueArgument,
    job_id: IdArgument,
    opened: Annotated[
        bool, Option("--open", help="Open sealed data and return value with the configured codec.")
    ] = False,
) -> None:
    """Show everything that is stored about one job."""
    from bullpen.errors import JobNotFound

    async with at.queue(queue) as (app, found):
        if opened and app.codec is None:
            raise WrongCommand("--open needs a codec; set BULLPEN_CODEC_KEYS or BULLPEN_CODEC_STORE")
        job = await found.get_job(job_id, open=opened)
        if job is None:
            raise JobNotFound(queue, job_id)
        document = {**to_json((await job.state(), job, await job.children_counts())), "logs": await job.logs()}
    times = {name: show.instant(document.get(name)) for name in ("timestamp", "processedOn", "finishedOn")}
    people = {} if at.as_json else {name: instant for name, instant in times.items() if instant is not None}
    at.fields({**document, **people}, without=("logs", "stacktrace"))
    for title, lines in (("logs", document["logs"]), ("stack traces", document.get("stacktrace"))):
        if lines and not at.as_json:
            show.say(f"\n{title}:", *lines)


@app.command()
async def add(
    at: OnServer,
    queue: QueueArgument,
    name: Annotated[str, Argument("NAME", "Name of the job.")],
    data: Annotated[str, Option(metavar="JSON", help="Data of the job; @FILE reads a file, - reads stdin.")] = "{}",
    delay: Annotated[str | None, Option(metavar="TIME", help="Run it later: 1500 (ms), 90s, 15m, 2h, 1d.")] = None,
    run_at: Annotated[str | None, Option("--at", metavar="TIME", help="Run it then: 2026-07-01T09:00Z.")] = None,
    ttl: Annotated[
        str | None, Option(metavar="TIME", help="Do not run it if it waited longer than this, such as 15m.")
    ] = None,
    priority: Annotated[int | None, Option(help="0 runs before all others, then 1 to 2097151.")] = None,
    urgency: Annotated[int | None, Option(help="The other way round: higher runs earlier, 1 to 2097151.")] = None,
    lifo: Annotated[bool, Option("--lifo", help="Put it before all others that have no priority.")] = False,
    attempts: Annotated[int | None, Option(help="Number of attempts, the first included.", default="3")] = None,
    backoff: Annotated[
        str | None,
        Option(
            metavar="[TYPE:]TIME",
            help="Pause before another attempt: 5s, or exponential:1s, which doubles.",
            default="exponential:1s",
        ),
    ] = None,
    job_id: Annotated[str | None, Option("--id", metavar="ID", help="Your own job id.")] = None,
    lane: Annotated[str | None, Option(metavar="KEY", help="Lane (fair share) of the job, such as a tenant.")] = None,
    deduplication: Annotated[
        str | None, Option(metavar="ID", help="Add it only if no unfinished job has this deduplication id.")
    ] = None,
    parent: Annotated[
        str | None, Option(metavar="QUEUE:ID", help="A job that waits for this one; needs --on-failure.")
    ] = None,
    on_failure: Annotated[OnFailure | None, Option(help="What its failure does to the parent.")] = None,
    keep_completed: Annotated[
        int | None, Option(min=0, help="Keep this many completed jobs of the queue when it completes.")
    ] = None,
    keep_failed: Annotated[
        int | None, Option(min=0, help="Keep this many failed jobs of the queue when it fails.")
    ] = None,
    replace_finished: Annotated[
        bool, Option("--replace-finished", help="With --id: replace a finished job that has it.")
    ] = False,
    durability: Annotated[
        str | None, Option(metavar="LEVEL", help="Confirm it only when stored so: memory, fsync, replicated(N).")
    ] = None,
    new_queue: Annotated[
        bool, Option("--new-queue", help="Create the queue even if another has a similar name.")
    ] = False,
) -> None:
    """Add one job."""
    from bullpen.queue import Added

    if replace_finished and job_id is None:
        raise WrongCommand("--replace-finished goes with --id: the finished job that has this id is replaced")

    options: Any = {
        "delay": None if delay is None else duration("--delay", delay),
        "at": instant("--at", run_at, zoned=True),
        "ttl": None if ttl is None else duration("--ttl", ttl),
        "priority": priority,
        "urgency": urgency,
        "lifo": lifo or None,
        "attempts": attempts,
        "backoff": None if backoff is None else _read_backoff(backoff),
        "remove_on_complete": keep_completed,
        "remove_on_fail": keep_failed,
        "replace_finished": replace_finished or None,
        "durability": durability,
        "job_id": job_id,
        "lane": lane,
        "deduplication": deduplication,
        "on_failure": on_failure,
    }
    body = parse_json("--data", data)
    async with at.new_queue(queue, is_meant=new_queue) as (app, opened):
        if parent is not None:
            above, _, parent_id = parent.partition(":")
            options["parent"] = app.queue(above).key_of(parent_id)
        job = await opened.add(name, body, **options)
    if job.added is not Added.CREATED and not at.as_json:
        state = job.blocked_by.state.value if job.blocked_by else "known"
        other = job.blocked_by.job_id if job.blocked_by else job.id
        why = "exists" if job.added is Added.DUPLICATE else f"has the deduplication id {deduplication!r}"
        raise context.Done(f"job {other!r} {why} in {queue!r} already and is {state}; nothing was changed")
    at.say({"id": job.id, "added": job.added.value}, f"added job {job.id} to {queue}")


def _read_backoff(text: str) -> dict[str, Any] | timedelta:
    """A pause, the same each time, or a type with its first one."""
    kind, colon, pause = text.rpartition(":")
    wait = duration("--backoff", pause)
    return {"type": kind, "delay": wait} if colon else wait


@app.command()
async def retry(
    at: OnServer,
    queue: QueueArgument,
    ids: SomeIdsArgument = None,
    everything: Annotated[bool, Option("--all", help="All failed jobs of the queue, oldest first.")] = False,
    limit: Annotated[int | None, Option(min=1, help="With --all: at most this many.")] = None,
    rate: Annotated[float | None, Option(min=0.01, help="With --all: at most this many a second.")] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run failed jobs again, with all their attempts. Their dead letters are removed."""
    one_way(ids, everything, "jobs")
    if not everything:
        if limit is not None or rate is not None or dry_run:
            raise WrongCommand("--limit, --rate and --dry-run go with --all")
        await _each(at, "retried", queue, ids, "job.retry", reset=True)
        return
    async with at.acting(queue) as (opened, actions):
        count = (await opened.counts()).failed
        count = count if limit is None else min(count, limit)
        if count and not dry_run:
            await actions.note("queue.retry-all", queue, "", {"count": count, "rate": rate})
            count = await _retry_all(opened, count, rate)
    at.counted("retried", count, dry_run=dry_run)


@app.command()
async def promote(
    at: OnServer,
    queue: QueueArgument,
    ids: SomeIdsArgument = None,
    everything: AllOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run delayed jobs now. --all includes the next jobs of schedules."""
    one_way(ids, everything, "jobs")
    if not everything:
        if dry_run:
            raise WrongCommand("--dry-run goes with --all")
        await _each(at, "promoted", queue, ids, "job.promote")
        return
    async with at.acting(queue) as (opened, actions):
        count = (await opened.counts()).delayed
        if not dry_run:
            await actions.note("queue.promote-all", queue, "", {"count": count})
            count = await opened.promote_all()
    at.counted("promoted", count, dry_run=dry_run)


@app.command()
async def change(
    at: OnServer,
    queue: QueueArgument,
    ids: IdsArgument,
    delay: Annotated[str | None, Option(metavar="TIME", help="New delay from now: 0, 90s, 15m, 2h, 1d.")] = None,
    priority: Annotated[
        int | None, Option(min=0, max=2_097_151, help="0 runs before all others, then 1 to 2097151.")
    ] = None,
) -> None:
    """Change the delay or priority of jobs that have not started."""
    if delay is None and priority is None:
        raise WrongCommand("pass --delay, --priority or both")
    if delay is not None:
        duration("--delay", delay)
    async with at.acting(queue) as (_, actions):

        async def act(job_id: str) -> None:
            if delay is not None:
                await actions.do("job.delay", queue, job_id, delay=delay)
            if priority is not None:
                await actions.do("job.priority", queue, job_id, priority=priority)

        at.done("changed", *await context.each(ids, act))


@app.command()
async def cancel(
    at: OnServer,
    queue: QueueArgument,
    ids: IdsArgument,
    reason: Annotated[str | None, Option(help="Reason, shown to the code that waits for the result.")] = None,
) -> None:
    """Cancel jobs: waiting jobs fail now; workers are asked to stop running jobs."""
    await _each(at, "cancelled", queue, ids, "job.cancel", why=reason)


@app.command(destroys=True)
async def remove(at: OnServer, queue: QueueArgument, ids: IdsArgument) -> None:
    """Delete jobs for good, with their child jobs. Running jobs are refused."""
    await _each(at, "removed", queue, ids, "job.remove")


@app.command()
async def explain(at: OnServer, queue: QueueArgument, job_id: IdArgument) -> None:
    """Explain why a job is not running and what to do about it."""
    from bullpen.ops.explain import IdleCause, read_facts
    from bullpen.ops.explain import explain as decide

    async with at.queue(queue) as (_, opened):
        facts = await read_facts(opened, job_id)
    found = decide(facts)
    record = facts.record if found.cause is IdleCause.FAILED else None
    error = "" if record is None else show.short(record.failure_text, 500)
    at.say({**found.to_json(), "error": error}, *filter(None, (found.text, error, found.command)))
    if found.cause is IdleCause.NOT_HERE:
        raise context.Done("")


async def _each(at: OnServer, verb: str, queue: str, ids: list[str] | None, action: str, **given: Any) -> None:
    async with at.acting(queue) as (_, actions):
        at.done(verb, *await context.each(ids or (), lambda job_id: actions.do(action, queue, job_id, **given)))


async def _retry_all(queue: Queue, wanted: int, rate: float | None) -> int:
    """Only what has failed by now: with a rate, jobs that fail again meanwhile would come round for ever."""
    import asyncio

    until = await context.server_time(queue)
    if rate is None:
        return await queue.retry_all(count=wanted, until=until, reset_attempts=True)
    done, step = 0, max(1, min(100, int(rate)))
    while done < wanted:
        retried = await queue.retry_all(count=min(step, wanted - done), until=until, reset_attempts=True)
        done += retried
        if not retried:
            break
        if done < wanted:
            await asyncio.sleep(retried / rate)
    return done


# How they are shown -------------------------------------------------------------------------------------------------


def to_json(found: tuple[str, Job, Any]) -> dict[str, Any]:
    state, job, children = found
    counts = {} if children is None else {name: count for name, count in asdict(children).items() if count}
    return {"state": str(state), **job.to_json(), **({"children": counts} if counts else {})}


def _children(job: dict[str, Any]) -> str:
    counts = job.get("children", {})
    return f"{sum(counts.values()) - counts.get('pending', 0)}/{sum(counts.values())}" if counts else ""


def _parent(job: dict[str, Any]) -> str:
    above = job.get("parent")
    return f"{str(above.get('queueKey', '')).rpartition(':')[2]}:{above.get('id')}" if above else ""


def _note(job: dict[str, Any]) -> str:
    """The most useful fact about a job: why it failed, what it returned, else its data."""
    if reason := job.get("failedReason"):
        return show.short(reason)
    return show.short(job.get("returnvalue") if job.get("finishedOn") else job["data"])


JOBS = Record(
    to_json,
    (
        Column("id"),
        Column("name"),
        Column("state"),
        Column("attempts", "attemptsMade", worth=3),
        Column("added", lambda job: show.instant(job["timestamp"]), worth=2),
        Column("parent", _parent, worth=4),
        Column("children", _children, worth=5),
        Column("lane", worth=6),
        Column("deduplication", "deduplicationId", worth=7),
        Column("", _note, least=16),
    ),
)

"""`bullpen jobs`: look at the jobs of a queue, add one, retry, promote, cancel and remove them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, QueueArgument, QueueFirst, RedisOption
from bullpen.errors import JobNotFound, JobStateConflict
from bullpen.ops.actions import Actions
from bullpen.ops.explain import IdleCause, JobExplanation, why
from bullpen.queue import Added, Job, JobState
from bullpen.queue.browse import list_jobs

app = typer.Typer(
    cls=QueueFirst,
    help="List, show, add and change jobs. The queue may stand first: bullpen jobs emails.",
    no_args_is_help=True,
)

_STATES: list[JobState] = [state for state in JobState if state is not JobState.UNKNOWN]
StateOption = Annotated[
    list[JobState] | None, typer.Option("--state", help="Only jobs in this state; may be repeated.", show_default="all")
]
SomeIdsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Ids of jobs.", show_default=False)
]
IdsArgument = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids of jobs.", show_default=False)]


@app.callback()
def jobs() -> None:
    """List, show, add and change jobs. The queue may stand first: bullpen jobs emails."""


@app.command("list")
def list_(
    queue: QueueArgument,
    state: StateOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many jobs of each state.")] = 20,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs: what runs next first, of finished ones the newest first."""
    found = common.wait_for(_list(queue, state or _STATES, limit, redis, prefix))
    if as_json:
        common.print_json([{"state": each_state.value, **job.to_json()} for each_state, job in found])
    elif not found:
        common.err.print(f"no jobs in {queue!r}" + (" in this state" if state else ""))
    else:
        rows = [
            (job.id, job.name, st.value, job.attempts_made, common.when(job.timestamp), _note(job)) for st, job in found
        ]
        common.print_table(("id", "name", "state", "attempts", "added", ""), rows, numbers=["attempts"])


@app.command()
def show(
    queue: QueueArgument,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the job.", show_default=False)],
    opened: Annotated[
        bool, typer.Option("--open", help="Open sealed data and return value with the configured codec.")
    ] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show everything that is stored about one job."""
    state, job, logs = common.wait_for(_read(queue, job_id, redis, prefix, opened=opened))
    if as_json:
        common.print_json({"state": state.value, **job.to_json(), "logs": logs})
        return
    common.print_table(("field", "value"), [("state", state.value), *_fields(job)])
    for title, lines in (("logs", logs), ("stack traces", list(job.stacktrace))):
        if lines:
            common.out.print(f"\n{title}:", *lines, sep="\n", markup=False)


@app.command()
def add(
    queue: QueueArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the job.", show_default=False)],
    data: Annotated[str, typer.Option(metavar="JSON", help="Its data; - reads it from stdin.")] = "{}",
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Run it later: 1500 (ms), 90s, 15m, 2h, 1d.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="0 before all others, then 1 to 2097151.")] = None,
    attempts: Annotated[int | None, typer.Option(help="All tries, the first included.", show_default="3")] = None,
    job_id: Annotated[str | None, typer.Option("--id", metavar="ID", help="An id of your own.")] = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add one job."""
    options = {
        "delay": None if delay is None else common.duration("--delay", delay),
        "priority": priority,
        "attempts": attempts,
        "job_id": job_id,
    }
    job = common.wait_for(_add(queue, name, common.parse_json("--data", data), options, redis, prefix))
    if as_json:
        common.print_json({"id": job.id, "added": job.added.value})
    elif job.added is Added.CREATED:
        common.out.print(f"added job {job.id} to {queue}", markup=False)
    else:
        state = job.blocked_by.state.value if job.blocked_by else "known"
        raise common.Done(f"job {job.id!r} exists in {queue!r} already and is {state}; nothing was changed")


@app.command()
def retry(
    queue: QueueArgument,
    ids: SomeIdsArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="All failed jobs of the queue, the oldest first.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="With --all: at most so many.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.01, help="With --all: at most so many a second.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --all: count only, change nothing.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put failed jobs back in line with all their attempts. Their dead letters go."""
    _one_way(ids, everything)
    if not everything and (limit is not None or rate is not None or dry_run):
        raise common.WrongCommand("--limit, --rate and --dry-run go with --all")
    if everything:
        count = common.wait_for(_retry_all(queue, limit, rate, dry_run, redis, prefix))
        _tell_count("retried", count, dry_run, as_json)
        return

    async def act(actions: Actions, job_id: str) -> None:
        await actions.do("job.retry", queue, job_id, reset=True)

    _tell("retried", common.wait_for(_each(queue, ids or [], redis, prefix, act)), as_json)


@app.command()
def promote(
    queue: QueueArgument,
    ids: SomeIdsArgument = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All delayed jobs of the queue, the next ones of its schedulers too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --all: count only, change nothing.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let delayed jobs run now."""
    _one_way(ids, everything)
    if dry_run and not everything:
        raise common.WrongCommand("--dry-run goes with --all")
    if everything:
        _tell_count("promoted", common.wait_for(_promote_all(queue, dry_run, redis, prefix)), dry_run, as_json)
        return

    async def act(actions: Actions, job_id: str) -> None:
        await actions.do("job.promote", queue, job_id)

    _tell("promoted", common.wait_for(_each(queue, ids or [], redis, prefix, act)), as_json)


@app.command()
def change(
    queue: QueueArgument,
    ids: IdsArgument,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Delayed jobs become due after that: 0, 90s, 15m, 2h, 1d.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(min=0, max=2_097_151, help="0 before all others, then 1 to 2097151.")
    ] = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give jobs that have not begun another delay or priority."""
    if delay is None and priority is None:
        raise common.WrongCommand("say --delay, --priority or both")
    wait = None if delay is None else common.duration("--delay", delay)

    async def act(actions: Actions, job_id: str) -> None:
        if wait is not None:
            await actions.do("job.delay", queue, job_id, delay=delay)
        if priority is not None:
            await actions.do("job.priority", queue, job_id, priority=priority)

    _tell("changed", common.wait_for(_each(queue, ids, redis, prefix, act)), as_json)


@app.command()
def cancel(
    queue: QueueArgument,
    ids: IdsArgument,
    reason: Annotated[str | None, typer.Option(help="For whoever waits for the result.")] = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """End jobs: those that wait fail now, workers are asked to end those that run."""

    async def act(actions: Actions, job_id: str) -> None:
        await actions.do("job.cancel", queue, job_id, why=reason)

    _tell("cancelled", common.wait_for(_each(queue, ids, redis, prefix, act)), as_json)


@app.command()
def remove(
    queue: QueueArgument,
    ids: IdsArgument,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete jobs for good, with their children if they have any. Running ones are refused."""

    async def act(actions: Actions, job_id: str) -> None:
        await actions.do("job.remove", queue, job_id)

    _tell("removed", common.wait_for(_each(queue, ids, redis, prefix, act)), as_json)


@app.command()
def explain(
    queue: QueueArgument,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the job.", show_default=False)],
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a job is not running, and what to do about it."""

    async def ask() -> JobExplanation:
        async with common.opened(redis, prefix) as app:
            await common.must_exist(app, queue)
            return await why(app.queue(queue), job_id)

    found = common.wait_for(ask())
    if as_json:
        common.print_json(found.to_json())
    else:
        common.out.print(found.text, markup=False)
        if found.command:
            common.out.print(found.command, markup=False)
    if found.cause is IdleCause.NOT_HERE:
        raise common.Done("")


def _one_way(ids: list[str] | None, everything: bool) -> None:
    if bool(ids) == everything:
        raise common.WrongCommand("name the jobs, or say --all")


def _tell_count(verb: str, count: int, dry_run: bool, as_json: bool) -> None:
    if as_json:
        common.print_json({"matched" if dry_run else verb: count, "dryRun": dry_run})
    else:
        common.out.print(f"{'would be ' if dry_run else ''}{verb}: {count}")


def _tell(verb: str, problems: dict[str, str | None], as_json: bool) -> None:
    done = [job_id for job_id, problem in problems.items() if problem is None]
    skipped = {job_id: problem for job_id, problem in problems.items() if problem is not None}
    if as_json:
        common.print_json({verb: done, "skipped": skipped})
    else:
        common.out.print(f"{verb}: {len(done)}")
        for problem in skipped.values():
            common.err.print(problem, markup=False)
    if skipped:
        raise common.Done("" if as_json else f"not {verb}: {len(skipped)}")


async def _each(
    queue: str,
    ids: list[str],
    redis: str | None,
    prefix: str | None,
    act: Callable[[Actions, str], Awaitable[None]],
) -> dict[str, str | None]:
    """Do it to one job after the other; what cannot be done to one keeps nobody else from being done."""
    problems: dict[str, str | None] = {}
    async with common.opened(redis, prefix) as app:
        await common.must_exist(app, queue)  # before anything is written down about a queue that is not there
        actions = await common.acting(app)
        for job_id in ids:
            problems[job_id] = None
            try:
                await act(actions, job_id)
            except (JobNotFound, JobStateConflict) as error:
                problems[job_id] = str(error)
    return problems


async def _retry_all(
    queue: str, limit: int | None, rate: float | None, dry_run: bool, redis: str | None, prefix: str | None
) -> int:
    async with common.opened(redis, prefix) as app:
        await common.must_exist(app, queue)
        opened = app.queue(queue)
        wanted = (await opened.counts()).failed
        if limit is not None:
            wanted = min(wanted, limit)
        if dry_run or not wanted:
            return wanted
        await (await common.acting(app)).note("queue.retry-all", queue, "", {"count": wanted, "rate": rate})
        # Only what has failed by now: with a rate, jobs that fail again meanwhile would come round for ever.
        seconds, micros = await app.connection.shared_door(opened.keys.base).call("TIME")
        until = datetime.fromtimestamp(int(seconds) + int(micros) / 1e6, UTC)
        if rate is None:
            return await opened.retry_all(count=wanted, until=until, reset_attempts=True)
        done, step = 0, max(1, min(100, int(rate)))
        while done < wanted:
            retried = await opened.retry_all(count=min(step, wanted - done), until=until, reset_attempts=True)
            done += retried
            if not retried:
                break
            if done < wanted:
                await asyncio.sleep(retried / rate)
        return done


async def _promote_all(queue: str, dry_run: bool, redis: str | None, prefix: str | None) -> int:
    async with common.opened(redis, prefix) as app:
        await common.must_exist(app, queue)
        opened = app.queue(queue)
        delayed = (await opened.counts()).delayed
        if dry_run:
            return delayed
        await (await common.acting(app)).note("queue.promote-all", queue, "", {"count": delayed})
        return await opened.promote_all()


async def _list(
    queue: str, states: list[JobState], limit: int, redis: str | None, prefix: str | None
) -> list[tuple[JobState, Job]]:
    async with common.opened(redis, prefix) as app:
        found = [(state, job) for state in states for job in await list_jobs(app.queue(queue), state, count=limit)]
        if not found:
            await common.must_exist(app, queue)
        return found


async def _read(
    queue: str, job_id: str, redis: str | None, prefix: str | None, *, opened: bool = False
) -> tuple[JobState, Job, list[str]]:
    async with common.opened(redis, prefix) as app:
        if opened and app.codec is None:
            raise common.WrongCommand("--open needs a codec; set BULLPEN_CODEC_KEYS or BULLPEN_CODEC_STORE")
        job = await app.queue(queue).get_job(job_id, open=opened)
        if job is None:
            await common.must_exist(app, queue)
            raise JobNotFound(queue, job_id)
        return await job.state(), job, await job.logs()


async def _add(queue: str, name: str, data: Any, options: dict[str, Any], redis: str | None, prefix: str | None) -> Job:
    async with common.opened(redis, prefix) as app:
        return await app.queue(queue).add(name, data, **options)


def _note(job: Job) -> str:
    """The most telling thing about a job: why it failed, what it returned, else its data."""
    if job.failed_reason:
        return common.short(job.failed_reason)
    if job.finished_on:
        return common.short(job.return_value)
    return job.record.seal_words or common.short(job.record.raw_data.decode("utf-8", "replace"))


def _fields(job: Job) -> list[tuple[str, str]]:
    times = {"timestamp", "processedOn", "finishedOn"}
    return [
        (name, f"{value} ({common.when(value)})" if name in times and value else _whole(value))
        for name, value in job.to_json().items()
        if name != "stacktrace"
    ]


def _whole(value: Any) -> str:
    return common.short(value, limit=10_000)

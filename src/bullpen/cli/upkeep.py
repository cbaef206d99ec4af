"""`bullpen queues clean`, `drain` and `obliterate`: delete many jobs at once. Each says how many and asks first."""

from __future__ import annotations

from typing import Annotated

import typer

from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, QueueArgument, RedisOption, YesOption
from bullpen.queue import JobState
from bullpen.queue.administration import JobCounts

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Count only, change nothing.")]


def add_to(group: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (clean, drain, obliterate):
        group.command()(command)


def clean(
    queue: QueueArgument,
    state: Annotated[JobState, typer.Option(help="Which jobs.")] = JobState.COMPLETED,
    older: Annotated[
        str, typer.Option(metavar="TIME", help="Only those that ended, began or were added so long ago: 90s, 2h, 7d.")
    ] = "0",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many, the oldest.")] = None,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete jobs of a state that are older than a time. Running ones stay."""
    grace = common.duration("--older", older)

    async def work(count: int | None) -> int:
        async with common.opened(redis, prefix) as app:
            await common.must_exist(app, queue)
            opened = app.queue(queue)
            if count is None:
                keys, door = opened.keys, app.connection.shared_door(opened.keys.base)
                if state in (JobState.COMPLETED, JobState.FAILED):
                    seconds = int((await door.call("TIME"))[0])
                    newest = (seconds - int(grace.total_seconds())) * 1000 + 999
                    return int(await door.call("ZCOUNT", getattr(keys, state.value), "-inf", newest))
                return _of_state(await opened.counts(), state)
            detail = {"state": state.value, "older": older, "limit": limit}
            await (await common.acting(app)).note("queue.clean", queue, "", detail)
            return len(await opened.clean(grace, state=state, limit=limit))

    found = common.wait_for(work(None))
    if limit is not None:
        found = min(found, limit)
    what = f"{found} {state.value} job{'' if found == 1 else 's'} of {queue!r}"
    if not dry_run and found:
        common.confirm(f"Delete at most {what} for good?", yes=yes, as_json=as_json)
    _tell("cleaned", found if dry_run else common.wait_for(work(found)), dry_run, as_json)


def drain(
    queue: QueueArgument,
    delayed: Annotated[bool, typer.Option("--delayed", help="Delayed jobs too.")] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete all jobs that wait. Running and finished ones stay."""

    async def work(do_it: bool) -> int:
        async with common.opened(redis, prefix) as app:
            await common.must_exist(app, queue)
            if do_it:
                await (await common.acting(app)).note("queue.drain", queue, "", {"delayed": delayed})
                return await app.queue(queue).drain(delayed=delayed)
            counts = await app.queue(queue).counts()
            return counts.waiting + counts.prioritized + (counts.delayed if delayed else 0)

    found = common.wait_for(work(False))
    if not dry_run and found:
        common.confirm(f"Delete {found} waiting jobs of {queue!r} for good?", yes=yes, as_json=as_json)
    _tell("drained", found if dry_run else common.wait_for(work(True)), dry_run, as_json)


def obliterate(
    queue: QueueArgument,
    force: Annotated[bool, typer.Option("--force", help="Also when jobs are running.")] = False,
    yes: YesOption = False,
    dry_run: DryRunOption = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a queue with everything in it. Its dead letters are another queue and stay."""

    async def work(do_it: bool) -> int:
        async with common.opened(redis, prefix) as app:
            await common.must_exist(app, queue)
            if do_it:
                await (await common.acting(app)).note("queue.obliterate", queue, "", {"force": force})
                return await app.queue(queue).obliterate(force=force)
            counts = await app.queue(queue).counts()
            return sum(_of_state(counts, state) for state in JobState if state is not JobState.UNKNOWN)

    found = common.wait_for(work(False))
    if not dry_run:
        common.confirm(f"Delete the queue {queue!r} with {found} jobs for good?", yes=yes, as_json=as_json)
    _tell("obliterated", found if dry_run else common.wait_for(work(True)), dry_run, as_json)


def _of_state(counts: JobCounts, state: JobState) -> int:
    return int(getattr(counts, state.name.lower(), 0))


def _tell(verb: str, count: int, dry_run: bool, as_json: bool) -> None:
    if as_json:
        common.print_json({"matched" if dry_run else verb: count, "dryRun": dry_run})
    else:
        common.out.print(f"{'would be ' if dry_run else ''}{verb}: {count}")

"""`follow`, of everything: events and logs of queues as they come, and what the database holds by reading it again.

A line for people whenever something is new, a JSON document a line for programs; the exit code says how it ended. A
server or database that goes away is reported on stderr and waited for. Elsewhere: reading events
(`bullpen.ops.follow`), what a row, run, message or entity is (beside its other commands).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from bullpen._kernel.command_line import command_line
from bullpen.cli import context, show
from bullpen.cli.arguments import EventOption, QueueArgument, QueuesArgument, duration, instant, seconds
from bullpen.cli.context import Done, OnLedger, OnServer, Output, TimeUp, WrongCommand
from bullpen.cli.tree import Argument, Option

if TYPE_CHECKING:
    from bullpen.ops.follow import Happening, Outcome, Waited
    from bullpen.queue import JobState, Queue

T = TypeVar("T")
Fields = dict[str, Any]

_MOST_QUEUES: Final = 64
"""Each queue is a connection that waits."""
_WORTH_REPORTING_S: Final = 0.3

TimeoutOption = Annotated[
    str | None,
    Option(metavar="TIME", help="End after that, with exit code 4 if something is waited for: 90s, 15m, 2h."),
]


@dataclass(frozen=True, kw_only=True)
class FollowEvents(OnServer):
    """Which events, from when, for how long."""

    event: EventOption = None
    name: Annotated[list[str] | None, Option(metavar="TEXT", help="Only jobs of this name; may be repeated.")] = None
    since: Annotated[
        str | None,
        Option(metavar="TIME", help="Start in the past, as far as events are kept: 15m, or 2030-01-31T12:00."),
    ] = None
    timeout: TimeoutOption = None

    def check(self) -> None:
        """Before anything is opened."""
        seconds("--timeout", self.timeout)
        if self.since is not None and not _AGE.fullmatch(self.since.strip()):
            instant("--since", self.since)

    async def position(self, queue: Queue) -> str | None:
        from bullpen.ops.follow import position_at

        if self.since is None:
            return None
        if _AGE.fullmatch(self.since.strip()):
            begin = await context.server_time(queue) - duration("--since", self.since)
        else:
            begin = instant("--since", self.since)  # type: ignore[assignment]  # checked: it is one
        return position_at(int(begin.timestamp() * 1000))

    def wants(self, happening: Happening) -> bool:
        event = happening.event
        assert event is not None
        return (not self.event or event.event in self.event) and (not self.name or happening.name in self.name)


_AGE: Final = re.compile(r"\d+(ms|s|m|h|d)?")


@dataclass(frozen=True, kw_only=True)
class Polling(Output):
    """How often to read, and for how long."""

    interval: Annotated[str, Option(metavar="TIME", help="Time between two polls: 500 (ms), 2s, 1m.")] = "1s"
    timeout: TimeoutOption = None

    def check(self) -> None:
        """Before anything is opened."""
        duration("--interval", self.interval)
        seconds("--timeout", self.timeout)

    def polled(
        self, read: Callable[[], Awaitable[T]], is_end: Callable[[T], bool], still: Callable[[T], str]
    ) -> AsyncIterator[T]:
        """What is read whenever it differs from before, until it is the end. Raises TimeUp, in the words of `still`."""
        every_s = max(0.05, duration("--interval", self.interval).total_seconds())
        return _polled(read, is_end, still, every_s, seconds("--timeout", self.timeout))


async def _polled(
    read: Callable[[], Awaitable[T]],
    is_end: Callable[[T], bool],
    still: Callable[[T], str],
    every_s: float,
    limit_s: float | None,
) -> AsyncIterator[T]:
    import asyncio

    from bullpen.errors import DatabaseUnavailable

    give_up = None if limit_s is None else time.monotonic() + limit_s
    before: T | None = None
    is_away = False
    while True:
        try:
            found = await read()
        except DatabaseUnavailable as error:
            if before is None:  # at the first look it is an error like any other
                raise
            if not is_away:
                show.warn(f"bullpen: {error}; waiting for it")
            is_away = True
        else:
            is_away = False
            if found != before:
                yield found
                before = found
            if is_end(found):
                return
        if give_up is not None and time.monotonic() + every_s > give_up:
            assert before is not None
            raise TimeUp(f"{still(before)} after {limit_s:g} s")
        await asyncio.sleep(every_s)


# What the database holds --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FollowLedger(Polling, OnLedger):
    """A row of the database, until it has settled."""


# What changes without anything having happened, and what the first columns show.
_NOT_NEWS: Final = frozenset({"heartbeatAt", "status", "lockedBy"})


async def follow_row(at: FollowLedger, what: str, read: Callable[[], Awaitable[Fields]], good: str, *bad: str) -> None:
    """Print the changes of a row until it ends; raises Done unless it ends well."""
    before: Fields = {}
    async for found in at.polled(
        read, lambda row: row["status"] in (good, *bad), lambda row: f"{what} is still {row['status']}"
    ):
        news = {name: value for name, value in found.items() if name not in _NOT_NEWS and before.get(name) != value}
        if at.as_json or not before or news or before["status"] != found["status"]:
            told = ", ".join(f"{name} {show.short(value, 60)}" for name, value in news.items()) if before else ""
            at.line(
                found,
                (f"{at.when(show.instant(time.time() * 1000))}  ", "dim"),
                (f"{found['status']:<10}", show.style_of(found["status"])),
                (f"  {told}", ""),
            )
        before = found
    if before["status"] != good:
        reason = before.get("lastError") or before.get("errorMessage") or ""
        raise at.failed(f"{what} is {before['status']}{': ' if reason else ''}{show.short(reason)}")


# Queues -------------------------------------------------------------------------------------------------------------


async def follow_jobs(
    at: FollowEvents,
    queue: QueueArgument,
    ids: Annotated[
        list[str] | None,
        Argument("[ID]...", "Only these jobs; default: all jobs of the queue."),
    ] = None,
    wait: Annotated[
        bool, Option("--wait", help="End when these jobs have ended; exit code 1 if one of them failed.")
    ] = False,
) -> None:
    """Print the events of a queue's jobs until Ctrl-C; with --wait, until the jobs end."""
    from bullpen.ops.follow import Waited

    if wait and not ids:
        raise WrongCommand("--wait needs the ids of the jobs to wait for")
    at.check()
    async with at.queue(queue) as (_, opened):
        waited = Waited(opened, ids or ()) if wait else None
        async with _limited(at.timeout, f"still not done: {' '.join(ids or ())}" if wait else None):
            await _print_events(at, [opened], ids or [], waited)
    bad = [(job_id, each) for job_id, each in (waited.outcomes if waited else {}).items() if not each.is_good]
    if bad:
        more = f" (and {len(bad) - 1} more failed)" if len(bad) > 1 else ""
        raise at.failed(f"job {bad[0][0]} failed: {show.short(bad[0][1].value)}{more}")


async def follow_queues(at: FollowEvents, queues: QueuesArgument = None) -> None:
    """Print the events of several queues, or of all current queues, until Ctrl-C."""
    from bullpen.queue import find_queues

    at.check()
    async with at.app() as app:
        for each in queues or ():
            await context.must_exist(app, each)
        names = list(dict.fromkeys(queues or await find_queues(app.connection, app.prefix)))
        if not names:
            raise Done(context.NO_QUEUES)
        if len(names) > _MOST_QUEUES:
            raise Done(f"there are {len(names)} queues; name at most {_MOST_QUEUES} of them")
        async with _limited(at.timeout, None):
            await _print_events(at, [app.queue(each) for each in names], [], None)


async def logs(
    at: OnServer,
    queue: QueueArgument,
    job_id: Annotated[str, Argument("ID", "Id of the job.")],
    start: Annotated[int, Option(help="First line, counted from 0; -20: the last twenty.")] = 0,
    end: Annotated[int, Option(help="Last line; -1 is the end.")] = -1,
    follow: Annotated[
        bool, Option("--follow", "-f", help="Follow until the job ends; exit code 1 if it failed.")
    ] = False,
    timeout: TimeoutOption = None,
) -> None:
    """Print the log of a job."""
    from bullpen.errors import JobNotFound
    from bullpen.ops.follow import follow_logs
    from bullpen.queue import JobState

    if follow and (start, end) != (0, -1):
        raise WrongCommand("--start and --end select stored lines; --follow prints all lines")
    ended: list[JobState] = []
    seconds("--timeout", timeout)
    async with at.queue(queue) as (_, opened), _limited(timeout, f"job {job_id} has not ended"):
        if follow:
            async for line in follow_logs(opened, job_id, on_end=ended.append):
                at.line({"line": line}, (line, ""))
        else:
            job = await opened.get_job(job_id)
            if job is None:
                raise JobNotFound(queue, job_id)
            for line in (await job.logs())[start : None if end == -1 else end + 1]:
                at.line({"line": line}, (line, ""))
    if ended == [JobState.FAILED]:
        raise at.failed(f"job {job_id} failed; `{command_line('jobs show', queue, job_id)}` shows why")


async def _print_events(at: FollowEvents, queues: list[Queue], ids: list[str], waited: Waited | None) -> None:
    from bullpen.ops.follow import Wanted, follow

    # An outcome is an event too, also where it is not wanted in print.
    wanted = Wanted(at.event or () if waited is None else (), ids, at.name or () if waited is None else ())
    async with follow(queues, wanted, after=await at.position(queues[0])) as followed:
        if waited is not None:
            # After the position was fixed: what ends from now on is seen.
            _print_known(at, queues[0].name, await waited.ask())
        at.hint(f"following {', '.join(queue.name for queue in queues)}; Ctrl-C ends")
        while waited is None or waited.open:
            happening = await anext(followed)
            if happening.event is None:
                show.warn(
                    f"bullpen: events of {happening.queue} were trimmed before they were read; the stream is too short"
                )
                if waited is not None:
                    _print_known(at, queues[0].name, await waited.ask())
                continue
            if waited is not None:
                waited.note(happening.event)
            if at.wants(happening):
                _print_event(at, happening, with_queue=len(queues) > 1)


def _print_event(at: Output, happening: Happening, *, with_queue: bool) -> None:
    event = happening.event
    assert event is not None
    at.line(
        happening.to_json(),
        (at.when(show.instant(event.timestamp)), "dim"),
        (f"  {happening.queue}" if with_queue else "", ""),
        (f"  {event.event:<17}", show.style_of(event.event)),
        (f"  {event.job_id or '-':<8}  {happening.name or ''}  {show.short(_detail(event.data))}", ""),
    )


def _detail(data: Any) -> str:
    """What else the event says: a result, a reason, a number."""
    fields = {key: value for key, value in data.items() if key not in ("name", "prev", "stacktrace")}
    if len(fields) == 1:
        ((key, value),) = fields.items()
        text = value if isinstance(value, str) else show.short(value, 10_000)
        return text if key in ("returnvalue", "failedReason", "data") else f"{key} {text}"
    return ", ".join(f"{key} {value}" for key, value in fields.items())


def _print_known(at: Output, queue: str, ended: Mapping[str, Outcome]) -> None:
    """Jobs that ended unseen: their stored outcome instead of their event."""
    for job_id, outcome in ended.items():
        state = "completed" if outcome.is_good else "failed"
        document = {"queue": queue, "jobId": job_id, "state": state, "value": outcome.value}
        at.line(
            document, (f"job {job_id} is ", ""), (state, show.style_of(state)), (f": {show.short(outcome.value)}", "")
        )


# The server goes away, and time ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _limited(timeout: str | None, complaint: str | None) -> AsyncIterator[None]:
    """Report a server that goes away, and end after a while: without complaint that is what was asked for."""
    import asyncio

    limit_s = seconds("--timeout", timeout)
    try:
        async with asyncio.timeout(limit_s) as limit:
            with _reporting_the_server():
                yield
    except TimeoutError:
        if not limit.expired():
            raise
        if complaint is not None:
            raise TimeUp(f"{complaint} after {limit_s:g} s") from None


@contextlib.contextmanager
def _reporting_the_server() -> Iterator[None]:
    """Report on stderr when the server becomes unreachable and when it answers again.

    Not at once: a connection that is rarely used notices long afterwards that it broke, and is back in a moment.
    """
    import asyncio

    from bullpen._kernel import telemetry

    loop = asyncio.get_running_loop()
    waiting: asyncio.TimerHandle | None = None
    is_reported = False

    def report(endpoint: str) -> None:
        nonlocal is_reported
        is_reported = True
        show.warn(f"bullpen: {endpoint} is unreachable; waiting for it")

    def on_event(event: str, fields: dict[str, Any]) -> None:
        nonlocal waiting, is_reported
        if event == "connection.lost" and waiting is None:
            waiting = loop.call_later(_WORTH_REPORTING_S, report, fields["endpoint"])
        elif event == "connection.back" and waiting is not None:
            waiting.cancel()
            waiting = None
            if is_reported:
                show.warn(f"bullpen: {fields['endpoint']} is back")
            is_reported = False

    unsubscribe = telemetry.subscribe(on_event)
    try:
        yield
    finally:
        unsubscribe()
        if waiting is not None:
            waiting.cancel()

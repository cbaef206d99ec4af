"""`bullpen jobs follow`, `bullpen jobs logs` and `bullpen queues follow`: what happens, while it happens.

A line an event for people, a JSON document a line for programs. A server that goes away is told on stderr and waited
for. Elsewhere: reading (`bullpen.ops.follow`), rows of the ledger (`watch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from bullpen._kernel import telemetry
from bullpen._kernel.command_line import command_line
from bullpen._kernel.printable import printable
from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import Done, PrefixOption, QueueArgument, RedisOption, TimeUp, WrongCommand
from bullpen.errors import JobNotFound
from bullpen.ops.follow import Followed, Happening, Outcome, Waited, Wanted, follow, follow_logs, position_at
from bullpen.queue import JobState, Queue
from bullpen.queue.browse import find_queues
from bullpen.wire.envelope import seal_words
from bullpen.wire.events import EventName

EventOption = Annotated[
    list[str] | None,
    typer.Option("--event", metavar="EVENT", help="Only this kind, such as completed or failed; may be repeated."),
]
NameOption = Annotated[
    list[str] | None, typer.Option("--name", metavar="TEXT", help="Only jobs of this name; may be repeated.")
]
SinceOption = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Begin in the past: 15m ago, or at 2030-01-31T12:00 (UTC); as far as events are kept."
    ),
]
TimeoutOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="End after that: 1500 (ms), 90s, 15m, 2h.", show_default="never")
]
LinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON document a line.")]

_MOST_QUEUES: Final = 64
"""Each queue is a connection that waits."""
_WORTH_TELLING_S: Final = 0.3
_STYLES: Final = {
    EventName.COMPLETED: "green",
    EventName.FAILED: "red",
    EventName.RETRIES_EXHAUSTED: "red",
    EventName.STALLED: "yellow",
    EventName.RETRY: "yellow",
    EventName.ACTIVE: "cyan",
}


def add_to_jobs(group: typer.Typer) -> None:
    group.command("follow")(follow_jobs)
    group.command("logs")(logs)


def add_to_queues(group: typer.Typer) -> None:
    group.command("follow")(follow_queues)


def follow_jobs(
    queue: QueueArgument,
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Only these jobs; else all of the queue.", show_default=False),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="End when these jobs have; the exit code is 1 if one of them failed.")
    ] = False,
    event: EventOption = None,
    name: NameOption = None,
    since: SinceOption = None,
    timeout: TimeoutOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: LinesOption = False,
) -> None:
    """Print what happens to the jobs of a queue, until Ctrl-C; or with --wait until they are done."""
    if wait and not ids:
        raise WrongCommand("--wait needs the ids of the jobs to wait for")
    asked, seconds = _Asked(since, event, name), _seconds(timeout)

    async def work() -> dict[str, Outcome]:
        async with common.opened(redis, prefix) as app:
            await common.must_exist(app, queue)
            waited = Waited(app.queue(queue), ids or ()) if wait else None
            async with _following(seconds, f"still not done: {' '.join(ids or ())}" if wait else None):
                await _print([app.queue(queue)], asked, ids or (), waited, app, as_json)
            return waited.outcomes if waited is not None else {}

    bad = {job_id: outcome for job_id, outcome in common.wait_for(work()).items() if not outcome.is_good}
    if bad:
        first, outcome = next(iter(bad.items()))
        more = f" (and {len(bad) - 1} more failed)" if len(bad) > 1 else ""
        raise Done("" if as_json else f"job {first} failed: {common.short(outcome.value)}{more}")


def follow_queues(
    queues: Annotated[
        list[str] | None,
        typer.Argument(metavar="[QUEUE]...", help="Only these; else all that there are now.", show_default=False),
    ] = None,
    event: EventOption = None,
    name: NameOption = None,
    since: SinceOption = None,
    timeout: TimeoutOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: LinesOption = False,
) -> None:
    """Print what happens in several queues, until Ctrl-C."""
    asked, seconds = _Asked(since, event, name), _seconds(timeout)

    async def work() -> None:
        async with common.opened(redis, prefix) as app:
            for each in queues or ():
                await common.must_exist(app, each)
            names = list(dict.fromkeys(queues or await find_queues(app.connection, app.prefix)))
            if not names:
                raise Done("no queues here yet")
            if len(names) > _MOST_QUEUES:
                raise Done(f"there are {len(names)} queues; name at most {_MOST_QUEUES} of them")
            async with _following(seconds, None):
                await _print([app.queue(each) for each in names], asked, (), None, app, as_json)

    common.wait_for(work())


def logs(
    queue: QueueArgument,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the job.", show_default=False)],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends; the exit code is 1 if it failed.")
    ] = False,
    timeout: TimeoutOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: LinesOption = False,
) -> None:
    """Print the log of a job."""
    ended: list[JobState] = []
    seconds = _seconds(timeout)

    async def work() -> None:
        async with common.opened(redis, prefix) as app, _following(seconds, f"job {job_id} has not ended"):
            if not follow:
                job = await app.queue(queue).get_job(job_id)
                if job is None:
                    raise JobNotFound(queue, job_id)
                for line in await job.logs():
                    _print_log(line, as_json)
                return
            async for line in follow_logs(app.queue(queue), job_id, on_end=ended.append):
                _print_log(line, as_json)

    common.wait_for(work())
    if ended == [JobState.FAILED]:
        line = command_line("jobs show", queue, job_id)
        raise Done("" if as_json else f"job {job_id} failed; `{line}` tells why")


def _seconds(timeout: str | None) -> float | None:
    return None if timeout is None else common.duration("--timeout", timeout).total_seconds()


# Following ----------------------------------------------------------------------------------------------------------


class _Asked:
    """The filters, checked before anything is opened."""

    def __init__(self, since: str | None, events: Sequence[str] | None, names: Sequence[str] | None) -> None:
        self.since = None if since is None else _instant_or_age(since)
        self.events = frozenset(events or ())
        self.names = frozenset(names or ())

    async def position(self, app: Bullpen, queue: Queue) -> str | None:
        if self.since is None:
            return None
        if isinstance(self.since, datetime):
            return position_at(int(self.since.timestamp() * 1000))
        seconds, micros = await app.connection.shared_door(queue.keys.base).call("TIME")
        return position_at(int(seconds) * 1000 + int(micros) // 1000 - self.since)


def _instant_or_age(text: str) -> datetime | int:
    if re.fullmatch(r"\d+(ms|s|m|h|d)?", text.strip()):
        return int(common.duration("--since", text).total_seconds() * 1000)
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no time; write 90s, 15m, 2h, 1d, or 2030-01-31T12:00 (UTC)", param_hint="'--since'"
        ) from None
    return instant if instant.tzinfo is not None else instant.replace(tzinfo=UTC)


async def _print(
    queues: list[Queue], asked: _Asked, ids: Sequence[str], waited: Waited | None, app: Bullpen, as_json: bool
) -> None:
    # An outcome is an event too, also where it is not wanted in print.
    wanted = Wanted(asked.events if waited is None else (), ids, asked.names if waited is None else ())
    after = await asked.position(app, queues[0])
    async with follow(queues, wanted, after=after) as followed:
        if waited is not None:
            # After the position was fixed: what ends from now on is seen.
            _print_known(queues[0].name, await waited.ask(), as_json)
        if common.err.is_terminal and not as_json:
            common.err.print(f"following {', '.join(queue.name for queue in queues)}; Ctrl-C ends", markup=False)
        async for happening in _until_done(followed, waited):
            event = happening.event
            if event is None:
                common.err.print(
                    f"bullpen: events of {happening.queue} were trimmed before they were read; the stream is too short",
                    markup=False,
                )
                if waited is not None:
                    _print_known(queues[0].name, await waited.ask(), as_json)
            elif (not asked.events or event.event in asked.events) and (
                not asked.names or happening.name in asked.names
            ):
                _print_event(happening, with_queue=len(queues) > 1, as_json=as_json)


async def _until_done(followed: Followed, waited: Waited | None) -> AsyncIterator[Happening]:
    while waited is None or waited.open:
        happening = await anext(followed)
        if waited is not None and happening.event is not None:
            waited.note(happening.event)
        yield happening


@contextlib.asynccontextmanager
async def _following(seconds: float | None, complaint: str | None) -> AsyncIterator[None]:
    """Tell of a server that goes away, and end after a while: without complaint that is what was asked for."""
    try:
        async with asyncio.timeout(seconds) as limit:
            with _telling_of_the_server():
                yield
    except TimeoutError:
        if not limit.expired():
            raise
        if complaint is not None:
            raise TimeUp(f"{complaint} after {seconds:g} s") from None


@contextlib.contextmanager
def _telling_of_the_server() -> Iterator[None]:
    """Say on stderr that the server is away, and that it is back.

    Not at once: a connection that is rarely used notices long afterwards that it broke, and is back in a moment.
    """
    loop = asyncio.get_running_loop()
    waiting: asyncio.TimerHandle | None = None
    is_told = False

    def tell(endpoint: str) -> None:
        nonlocal is_told
        is_told = True
        common.err.print(f"bullpen: {endpoint} is away; waiting for it", markup=False)

    def on_event(event: str, fields: dict[str, Any]) -> None:
        nonlocal waiting, is_told
        if event == "connection.lost" and waiting is None:
            waiting = loop.call_later(_WORTH_TELLING_S, tell, fields["endpoint"])
        elif event == "connection.back" and waiting is not None:
            waiting.cancel()
            waiting = None
            if is_told:
                common.err.print(f"bullpen: {fields['endpoint']} is back", markup=False)
            is_told = False

    unsubscribe = telemetry.subscribe(on_event)
    try:
        yield
    finally:
        unsubscribe()
        if waiting is not None:
            waiting.cancel()


# Printing -----------------------------------------------------------------------------------------------------------


def _print_event(happening: Happening, *, with_queue: bool, as_json: bool) -> None:
    if as_json:
        common.print_line(happening.to_json())
        return
    event = happening.event
    assert event is not None
    line = Text(common.when(event.timestamp), style="dim")
    line.append(f"  {happening.queue}" if with_queue else "")
    style = _STYLES.get(EventName(event.event), "") if event.event in set(EventName) else "magenta"
    line.append(f"  {printable(event.event):<17}", style=style)
    line.append(f"  {printable(event.job_id or '-'):<8}  {printable(happening.name or '')}")
    line.append(f"  {printable(common.short(_detail(event.data)))}")
    common.out.print(Text(line.plain.rstrip(), spans=line.spans, style=line.style))


def _detail(data: Any) -> str:
    """What else the event tells: a result, a reason, a number."""
    fields = {key: value for key, value in data.items() if key not in ("name", "prev", "stacktrace")}
    if len(fields) == 1:
        ((key, value),) = fields.items()
        text = value if isinstance(value, str) else seal_words(value) or json.dumps(value, ensure_ascii=False)
        return text if key in ("returnvalue", "failedReason", "data") else f"{key} {text}"
    return ", ".join(f"{key} {value}" for key, value in fields.items())


def _print_known(queue: str, ended: Mapping[str, Outcome], as_json: bool) -> None:
    """Jobs that ended unseen: their stored outcome instead of their event."""
    for job_id, outcome in ended.items():
        state = "completed" if outcome.is_good else "failed"
        if as_json:
            known = {"queue": queue, "jobId": job_id, "state": state, "value": outcome.value}
            common.print_line(known)
        else:
            common.out.print(f"job {job_id} is {state}: {common.short(outcome.value)}", markup=False)


def _print_log(line: str, as_json: bool) -> None:
    if as_json:
        common.print_line({"line": line})
    else:
        common.out.print(printable(line), markup=False)
        sys.stdout.flush()

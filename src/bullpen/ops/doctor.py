"""What is wrong, or will be, and what to do about it.

In: the server of the queues, and a ledger if there is one. Out: advice, the worst first, each with its fix. Reads only,
in small steps; a question that cannot be answered is said to be so. Elsewhere: the signs that alerts tell of too
(`symptoms`), the questions about a server itself (`bullpen.redis.checks`), repairs (`bullpen queues`, `jobs`, `outbox`,
`migrate`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from bullpen._kernel.command_line import command_line
from bullpen.errors import BullpenError, LedgerNotReady, ServerRefused
from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.facts import SAMPLE, QueueFacts, ServerFacts, is_readable
from bullpen.ops.status import duration_text
from bullpen.ops.symptoms import ANNOUNCEMENTS, DEAD_SUFFIX, RULES, Symptom, ledger_symptoms, signs_of_queue
from bullpen.queue import Job, JobState, Queue
from bullpen.queue.browse import find_queues
from bullpen.queue.late_wakeups import read_late_wakeups, read_note
from bullpen.redis import Connection
from bullpen.redis.checks import ServerVerdict
from bullpen.redis.inspection import inspect_server
from bullpen.wire.options import DEFAULT_KEEP_COMPLETED, DEFAULT_KEEP_FAILED, LARGE_RETENTION

if TYPE_CHECKING:  # needs an extra, and who asks about a ledger has it
    from bullpen.ledger import Ledger

__all__ = ["Advice", "Level", "examine"]

_WAITING: Final = ("PENDING", "FAILED")
_LIMITS: Final = SymptomLimits()


class Level(IntEnum):
    """How bad it is."""

    GOOD = 0
    UNKNOWN = 1
    WARNING = 2
    BROKEN = 3


_NAME: Final = "set BULLPEN_REDIS_URL, or REDIS_HOST and REDIS_PORT, if you use queues"
_FIXES: Final = {
    Level.UNKNOWN: "allow this user the command, or ask the server's administrator",
    Level.WARNING: "upgrade the server",
    Level.BROKEN: "start or upgrade the server, or correct its address: BULLPEN_REDIS_URL, --redis",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """One answer."""

    level: Level
    subject: str
    """What it is about: a server, a queue, the ledger."""
    check: str
    message: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return {
            "level": self.level.name.lower(),
            "subject": self.subject,
            "check": self.check,
            "message": self.message,
            "fix": self.fix,
        }


async def examine(connection: Connection | None, prefix: str, ledger: Ledger | None = None) -> list[Advice]:
    """Ask everything; the worst first. No connection: none is configured, and who uses no queues needs none."""
    if connection is None:
        found = [Advice(Level.UNKNOWN, "redis", "address", "no address is configured: queues were not checked", _NAME)]
    else:
        found = [advice async for advice in _server(connection)]
    if connection is not None and not any(advice.level is Level.BROKEN for advice in found):
        found += await _answers("all queues", "list", _queues(connection, prefix))
    if ledger is not None:
        found += await _answers(f"ledger {ledger.database.address}", "rows", _ledger(ledger))
    return sorted(found, key=lambda advice: (-advice.level, advice.subject, advice.check))


async def _answers(subject: str, check: str, asked: AsyncIterator[Advice]) -> list[Advice]:
    """All that is found; what may not be asked or cannot be answered is said in place of the rest."""
    found: list[Advice] = []
    try:
        async for advice in asked:
            found.append(advice)  # noqa: PERF401 - what was found before an error is kept
    except ServerRefused as error:
        if "WRONGTYPE" in str(error):
            text = f"one of its keys has a type that no client writes: {error}"
            fix = "find it with the command TYPE, then rename or delete it"
            found.append(Advice(Level.BROKEN, subject, check, text, fix))
            return found
        found.append(Advice(Level.UNKNOWN, subject, check, f"cannot be asked: {error}", _FIXES[Level.UNKNOWN]))
    except BullpenError as error:
        found.append(Advice(Level.BROKEN, subject, check, f"no answer: {error}", "run the check again when it answers"))
    return found


async def _queues(connection: Connection, prefix: str) -> AsyncIterator[Advice]:
    names = await find_queues(connection, prefix)
    server = ServerFacts(connection, prefix, names)
    for name in names:
        subject = f"queue {name}"
        async with Queue(name, connection=connection, prefix=prefix) as queue:
            facts = QueueFacts(queue, server)
            questions = (
                {"dead letters": _dead_letters}
                if name.endswith(DEAD_SUFFIX)
                else {
                    "paused": _paused,
                    "workers": _workers,
                    "lost jobs": _lost,
                    "blocked parents": _blocked,
                    "jobs that can never run": _unreadable,
                    "orphaned keys": _orphans,
                    "retention": _retention,
                }
            )
            for check, ask in ({"library": _library} | questions).items():
                for advice in await _answers(subject, check, ask(facts, subject)):
                    yield advice


async def _server(connection: Connection) -> AsyncIterator[Advice]:
    levels = {
        ServerVerdict.GOOD: Level.GOOD,
        ServerVerdict.WARNING: Level.WARNING,
        ServerVerdict.REFUSED: Level.BROKEN,
        ServerVerdict.CANNOT_TELL: Level.UNKNOWN,
    }
    for finding in await inspect_server(connection):
        # A server that does not answer tells no version; everything else would only say so again.
        is_away = finding.check == "version" and finding.verdict is ServerVerdict.CANNOT_TELL
        is_broken = is_away and await connection.why_unhealthy() is not None  # the finding says it, no log beside it
        level = Level.BROKEN if is_broken else levels[finding.verdict]
        if level is Level.GOOD:
            yield Advice(level, finding.server, finding.check, finding.message)
        else:
            # Where a finding says what to do, it does so in its last sentence.
            message, _, fix = finding.message.rpartition(". ")
            yield Advice(
                level, finding.server, finding.check, message or finding.message, fix if message else _FIXES[level]
            )


async def _library(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    counts, meta = await facts.counts(), await facts.meta()
    if facts.name.endswith(DEAD_SUFFIX):
        text = f"{_count(counts.pending, 'dead letter')} to be handled by a person"
    else:
        text = f"last written by {meta.get('version', 'an unknown library')}; {_count(counts.pending, 'job')} to do"
    yield Advice(Level.GOOD, subject, "library", text)
    for where, note in read_late_wakeups(meta).items():
        yield _late(subject, where, *note)


_UNANNOUNCED: Final = "the program that stores {} without a notification (notify=False)"
_LATE_WAKEUPS: Final = {
    "worker": ("job was", "jobs were", "of a worker", "the client that adds jobs without setting the marker"),
    "results": ("wait for a result was", "waits for a result were", "", "what deletes or trims events of the queue"),
    "runs": ("wait for a run was", "waits for a run were", "", "what deletes or trims the events of the queue"),
    "cancels": ("request to cancel was", "requests to cancel were", "of a worker", "what deletes keys of the queue"),
    "deliveries": ("queue was", "queues were", "of the delivery workers", "what deletes or trims keys of Redis"),
    "dispatcher": ("row was", "rows were", "of the dispatcher", _UNANNOUNCED.format("rows")),
    "projector": ("event was", "events were", "of the projector", _UNANNOUNCED.format("events")),
}
"""By the waiting loop: what was found, by which component, and the likely cause."""


def _late(subject: str, where: str, count: int, last_at: datetime) -> Advice:
    """Work without a notification: it was late by up to the poll interval."""
    one, many, by, culprit = _LATE_WAKEUPS[where]
    text = f"{count} {one if count == 1 else many} found only by a fallback poll {by}".rstrip()
    text += f", the last at {last_at:%Y-%m-%d %H:%M:%S} UTC"
    return Advice(Level.WARNING, subject, "late wake-ups", text, f"find {culprit}; see bullpen_late_wakeups_total")


async def _dead_letters(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    async for sign in signs_of_queue(facts, _LIMITS):
        yield _advice(sign, subject)


async def _paused(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    if await facts.is_paused():
        fix = command_line("queues resume", facts.name)
        yield Advice(Level.WARNING, subject, "paused", "workers of all clients take nothing from it", fix)


def _advice(sign: Symptom, subject: str, level: Level = Level.WARNING) -> Advice:
    return Advice(level, subject, RULES[sign.rule].check, sign.message, sign.fix)


async def _workers(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    counts, workers = await facts.counts(), await facts.workers()
    waiting = counts.waiting + counts.prioritized
    if workers is None:
        text = "the server refuses CLIENT LIST, so workers cannot be counted"
        yield Advice(Level.UNKNOWN, subject, "workers", text, "watch bullpen_queue_oldest_waiting_seconds instead")
    elif not workers and facts.name in ANNOUNCEMENTS:
        text = f"no worker is connected: it has {_count(waiting, 'announcement')} of dead rows, for your own consumer"
        yield Advice(Level.GOOD, subject, "workers", text)
    elif not workers and waiting:
        age_ms = await facts.oldest_age_ms() or 0
        text = f"{_count(waiting, 'job')} {_wait(waiting)} and no worker is connected"
        text += f"; the next has waited {duration_text(age_ms)}"
        yield Advice(Level.BROKEN, subject, "workers", text, "start a worker: bullpen run MODULE:APP")
    elif not workers and counts.delayed:
        text = f"{_count(counts.delayed, 'delayed job')}, and no worker is connected"
        yield Advice(
            Level.WARNING, subject, "workers", text, "start a worker before they are due: bullpen run MODULE:APP"
        )
    else:
        yield Advice(Level.GOOD, subject, "workers", f"{len(workers)} connected")
        async for sign in signs_of_queue(facts, _LIMITS):
            yield _advice(sign, subject)
        if any(not worker.name.startswith("bullpen") and _is_node(worker.fields) for worker in workers):
            text = "Node workers fail any job at its second stall, ours isolate it and try again"
            yield Advice(Level.GOOD, subject, "mixed workers", text)


def _is_node(fields: dict[str, str]) -> bool:
    return "ioredis" in fields.get("lib-name", "")


# Jobs that cannot go on by themselves, among the first of each state.


async def _lost(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    unlocked = await facts.queue.unlocked(count=SAMPLE) if (await facts.counts()).active else []
    if unlocked:
        text = f"{_count(len(unlocked), 'active job')} without a lock ({_some(unlocked)}): the worker is gone"
        fix = "any running worker of the queue returns them to the queue within its stalled_interval"
        yield Advice(Level.WARNING, subject, "lost jobs", text, fix)


async def _blocked(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    if not (await facts.counts()).waiting_children:
        return
    queue = facts.queue
    parents = await queue.jobs(JobState.WAITING_CHILDREN, count=SAMPLE)
    blocked = [job.id for job in parents if not (await queue.children_counts(job)).pending]
    if blocked:
        text = f"{_count(len(blocked), 'parent')} {_wait(len(blocked))} although no child is left ({_some(blocked)})"
        yield Advice(
            Level.WARNING,
            subject,
            "blocked parents",
            text,
            f"{command_line('jobs remove', facts.name, 'ID')}, then add it again",
        )


async def _unreadable(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    broken, ids = list[str](), dict[str, str]()
    for state in (JobState.WAITING, JobState.PRIORITIZED, JobState.DELAYED):
        for job_id, record, why in await facts.first(state):
            if record is None:
                if not job_id.startswith("0:"):  # a marker of old clients
                    ids[job_id] = why
            elif not is_readable(record):
                broken.append(job_id)
    if ids:
        shown = _some([f"{job_id}: {why}" for job_id, why in ids.items()])
        text = f"{_count(len(ids), 'id')} waiting without a stored job ({shown})"
        fix = "workers drop them and log each one; find the program that deletes or writes the keys of jobs"
        yield Advice(Level.WARNING, subject, "ids without a job", text, fix)
    if broken:
        text = f"{_count(len(broken), 'job')} whose data no reader understands ({_some(broken)})"
        fix = "they fail finally when taken; find the producer that writes them"
        yield Advice(Level.WARNING, subject, "jobs that can never run", text, fix)


async def _retention(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    """How many finished jobs are kept, and where that is more than useful."""
    counts = await facts.counts()
    completed, failed = DEFAULT_KEEP_COMPLETED, DEFAULT_KEEP_FAILED
    assert completed.age_s is not None
    assert failed.age_s is not None
    text = (
        f"{counts.completed} completed and {counts.failed} failed jobs are stored; of those without a retention rule, "
    )
    text += (
        f"{completed.count} completed jobs are kept for {completed.age_s // 3_600} h, failed ones with a dead letter "
    )
    text += f"for {failed.age_s // 86_400} days, and jobs of other clients until somebody removes them"
    if counts.completed + counts.failed <= LARGE_RETENTION:
        yield Advice(Level.GOOD, subject, "retention", text)
        return
    fix = "set remove_on_complete and remove_on_fail where jobs are added, or on the worker; "
    fix += f"{command_line('queues clean', facts.name)} removes old jobs now"
    yield Advice(Level.WARNING, subject, "retention", text, fix)


async def _orphans(facts: QueueFacts, subject: str) -> AsyncIterator[Advice]:
    """Jobs that are stored and that no state lists, among the first that a scan meets."""
    lost = await facts.orphans()
    if lost:
        jobs = [await facts.queue.get_job(job_id) for job_id in lost]
        unfinished = [job.id for job in jobs if job is not None and _can_be_restored(job)]
        shown = _some(unfinished or lost)
        verb = "is" if len(lost) == 1 else "are"
        text = (
            f"{_count(len(lost), 'job')} {verb} stored and in no state ({shown}): keys were evicted, or deleted by hand"
        )
        if not unfinished:
            fix = "they have finished or cannot be read: queue.remove_orphans() deletes them"
            yield Advice(Level.WARNING, subject, "orphaned keys", text, fix)
            return
        line = command_line("queues restore", facts.name)
        fix = f"they never run: `{line}` puts unfinished jobs back into the queue"
        yield Advice(Level.BROKEN, subject, "orphaned keys", text, f"{fix}, queue.remove_orphans() deletes the others")


async def _ledger(ledger: Ledger) -> AsyncIterator[Advice]:
    from bullpen.ledger.late_wakeups import late_wakeups_in

    subject = f"ledger {ledger.database.address}"
    try:
        await ledger.check()
    except BullpenError as error:
        fix = error.command if isinstance(error, LedgerNotReady) else ""
        yield Advice(Level.BROKEN, subject, "schema", str(error), fix)
        return
    there = await ledger.parts()
    yield Advice(Level.GOOD, subject, "schema", f"its tables are those of this program: {', '.join(sorted(there))}")
    for where, text in (await late_wakeups_in(ledger)).items():
        if where in _LATE_WAKEUPS and (note := read_note(text)) is not None:
            yield _late(subject, where, *note)
    from bullpen.ledger.endpoint_records import type_label

    waiting: Counter[str] = Counter()
    for name, status, count, _ in await ledger.outbox.stats():
        waiting[name] += count if status in _WAITING else 0
    for name, destination in (await ledger.destinations.troubled()).items():
        if type_label(name) != name:
            continue  # a customer's: `bullpen endpoints list` has them
        if destination.state == "disabled":
            text = f"it is disabled; {_count(waiting[name], 'row')} to deliver"
            fix = command_line("outbox destinations enable", name)
        else:
            text = f"its breaker is open and has opened {_count(destination.trips, 'time')} since it last worked; "
            text += f"{_count(waiting[name], 'row')} to deliver"
            fix = "repair the target or the connection to it; "
            fix += "bullpen outbox destinations list shows when it is tried again"
        yield Advice(Level.WARNING, f"destination {name}", destination.state, text, fix)
    for sign in await ledger_symptoms(ledger, _LIMITS):
        level = Level.WARNING if sign.rule in ("outbox_dead", "parked_events", "endpoints_off") else Level.BROKEN
        about = (
            subject
            if sign.subject in ("outbox", "messages", "runs", "projector", "endpoints")
            else f"{subject} {sign.subject}"
        )
        yield _advice(sign, about, level)


def _can_be_restored(job: Job) -> bool:
    return bool(job.name) and job.timestamp > 0 and not job.finished_on


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _wait(number: int) -> str:
    return "waits" if number == 1 else "wait"


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:3]) + (", …" if len(ids) > 3 else "")

"""Late wake-ups at a queue (of workers, of waits for results and for runs, of requests to cancel): counted in the
process, and noted at the queue, where an operator's command sees them.

In: jobs, ends of jobs and requests that only a fallback poll found. Out: the count of `bullpen._kernel.telemetry`, and
a field of the queue's `meta`.
Clients that set no marker (BullMQ 4.x and older) wake no worker: what they leave as the version of the queue, or do not
leave, exempts its jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from bullpen._kernel import telemetry
from bullpen.errors import BullpenError
from bullpen.queue.changes import SendsScripts
from bullpen.wire.keys import QueueKeys

logger = logging.getLogger("bullpen.worker")

LATE_FIELDS: Final = {"worker": "bplate", "results": "bplateres", "runs": "bplaterun", "cancels": "bplatecan"}
"""Of `meta`, by the loop that waited: how many there were, and when the last one was."""


async def note_late_wakeup(
    actions: SendsScripts, keys: QueueKeys, job_ids: Sequence[str], count: int, now_ms: int
) -> None:
    """How many jobs a worker found late."""
    try:
        (version,) = await actions.command("HMGET", keys.meta, "version")
        if not _sets_markers(version):
            return
        await _note(actions, keys, LATE_FIELDS["worker"], count, now_ms)
    except (BullpenError, ValueError) as error:
        logger.debug("queue %r: a late wake-up was not noted: %s", keys.name, error)
    telemetry.late_wakeup("worker", count, queue=keys.name, jobs=list(job_ids[:3]))


async def note_late_result(actions: SendsScripts, keys: QueueKeys, job_id: str) -> None:
    """No event reported the end of this job to a waiting caller."""
    telemetry.late_wakeup("results", queue=keys.name, job_id=job_id)
    await _note_one(actions, keys, "results")


async def note_late_run(actions: SendsScripts, keys: QueueKeys, run_id: str) -> None:
    """No event reported the end of this run to a waiting caller."""
    telemetry.late_wakeup("runs", queue=keys.name, run_id=run_id)
    await _note_one(actions, keys, "runs")


async def note_late_cancel(actions: SendsScripts, keys: QueueKeys, job_id: str) -> None:
    """No message reported a cancel to the worker of this job."""
    telemetry.late_wakeup("cancels", queue=keys.name, job_id=job_id)
    await _note_one(actions, keys, "cancels")


async def _note_one(actions: SendsScripts, keys: QueueKeys, where: str) -> None:
    try:
        seconds, micros = map(int, await actions.command("TIME"))
        await _note(actions, keys, LATE_FIELDS[where], 1, seconds * 1000 + micros // 1000)
    except (BullpenError, ValueError) as error:
        logger.debug("queue %r: a late wake-up was not noted: %s", keys.name, error)


async def _note(actions: SendsScripts, keys: QueueKeys, field: str, count: int, now_ms: int) -> None:
    (before,) = await actions.command("HMGET", keys.meta, field)
    total = count + int((before or b"0").split()[0])
    await actions.command("HSET", keys.meta, field, f"{total} {now_ms}")


def read_late_wakeups(meta: Mapping[str, str]) -> dict[str, tuple[int, datetime]]:
    """How many there were at a queue, and when the last one was, by the loop that waited."""
    found = {where: read_note(meta.get(field, "")) for where, field in LATE_FIELDS.items()}
    return {where: note for where, note in found.items() if note is not None}


def read_note(text: str) -> tuple[int, datetime] | None:
    """How many, and when the last one was; None: none recorded, or not readable."""
    try:
        count, at_ms = map(int, text.split())
        return count, datetime.fromtimestamp(at_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _sets_markers(version: bytes | None) -> bool:
    """Whether the library that `meta` names sets markers: BullMQ from 5 on, and bullpen."""
    library, _, number = (version or b"").decode("utf-8", "replace").partition(":")
    return bool(library) and not (library.startswith("bullmq") and number.split(".")[0] in ("1", "2", "3", "4"))

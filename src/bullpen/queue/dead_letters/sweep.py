"""Write missing dead letters of failed jobs, and remove those of jobs that are no longer failed.

A bullpen worker writes the entry with the failure; but workers of other clients know no dead letters, and a
dead-letter queue that could not be written once can be later. In: a queue and the moment. Out: entries written, and
a cursor in the queue's meta that tells retention how far it may go. One worker per interval does it for all.
Elsewhere: what an entry holds (`entry`), when retention may evict (`bullpen.wire.lua`, lib/retention).
"""

from __future__ import annotations

import asyncio
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError, ConnectionLost
from bullpen.queue.actions import QueueActions
from bullpen.queue.dead_letters.entry import DeadLetterWriter
from bullpen.queue.job import Job
from bullpen.wire.keys import QueueKeys
from bullpen.wire.records import JobRecord

logger = get_logger("bullpen.dead_letters")

SWEEP_EVERY_MS: Final = 60_000
_LETTERS_PER_STEP: Final = 200
_LETTER_STEPS: Final = 25
"""In one sweep; the next one continues after them."""


class Sweeper:
    """Sweeps one queue."""

    def __init__(
        self, actions: QueueActions, keys: QueueKeys, writer: DeadLetterWriter, *, clock_offset_ms: int
    ) -> None:
        self._actions = actions
        self._keys = keys
        self._writer = writer
        self._clock_offset_ms = clock_offset_ms
        self._is_faulty = False

    async def run(self, interval_ms: int = SWEEP_EVERY_MS) -> None:
        """Sweep now and then every interval, until cancelled. A fault is logged when it begins, not each time."""
        while True:
            try:
                await self.sweep(interval_ms)
                self._is_faulty = False
            except ConnectionLost:
                pass  # told by the connection itself
            except BullpenError as error:
                if not self._is_faulty:
                    logger.error("queue %r: dead letters cannot be swept: %s", self._keys.name, error)
                self._is_faulty = True
            await asyncio.sleep(interval_ms / 1000)

    async def sweep(self, interval_ms: int = 0) -> int | None:
        """Offer what has no dead letter; how many were written, or None when another worker swept within the
        interval."""
        keys, base_args = self._keys, [self._keys.base, self._clock_offset_ms, interval_ms]
        with_cancelled = "1" if self._writer.with_cancelled else ""
        reply = await self._actions.evaluate("sweep", [keys.failed, keys.meta], [*base_args, "", 0, with_cancelled])
        if not reply:
            return None
        began_ms, written, is_complete = reply[0], 0, True
        while True:
            _, from_ms, skip, more, ids = reply
            for raw_id in ids:
                outcome = await self._offer(raw_id)
                written += outcome == 1
                is_complete = is_complete and outcome >= 0
            if not more:
                break
            reply = await self._actions.evaluate(
                "sweep", [keys.failed, keys.meta], [*base_args, from_ms, skip, with_cancelled]
            )
        await self._end_letters()
        if is_complete:
            await self._actions.evaluate("end_sweep", [keys.meta], [began_ms])
        if written:
            logger.warning(
                "queue %r: %d failed jobs without a dead letter got theirs in %r", keys.name, written, self._writer.name
            )
        return written

    async def _end_letters(self) -> None:
        """Other clients retry and complete failed jobs, and do not know dead letters."""
        keys, base = self._keys, self._writer.base
        for _ in range(_LETTER_STEPS):
            ended, more = await self._actions.evaluate(
                "sweep_dead_letters", [keys.meta, keys.failed, f"{base}wait"], [keys.base, base, _LETTERS_PER_STEP]
            )
            if ended:
                logger.info(
                    "queue %r: %d dead letters were removed, because their jobs are no longer failed", keys.name, ended
                )
            if not more:
                return

    async def _offer(self, raw_id: bytes) -> int:
        """1 written, 0 no longer needed, -1 it cannot be written."""
        keys = self._keys
        job_id = raw_id.decode("utf-8", "surrogateescape")
        flat = await self._actions.command("HGETALL", keys.base.encode() + raw_id)
        if not flat:
            return 0
        job = Job(self._actions, JobRecord.parse(job_id, flat))
        outcome = await self._actions.evaluate(
            "offer_dead_letter",
            [keys.base.encode() + raw_id, keys.failed],
            [
                *(keys.base, self._clock_offset_ms, raw_id, job.attempts_started, self._writer.base),
                *self._writer.parts_of_failed(job),
            ],
        )
        return int(outcome)

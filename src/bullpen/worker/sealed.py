"""Runs of jobs by a worker with a codec: the payload is opened before the handler, its return value sealed after it.

In: what runs the handler. Out: the same with open data. A payload that cannot be opened here now gives its job back
with no attempt counted, after a wait that grows, also when the handler met it in what children returned. One that was
tampered with fails its job for good; one whose object is gone is an error like others, tried again by the job's own
rules.
Elsewhere: opening and sealing (`bullpen.queue.codec`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from bullpen._kernel.outcome import RETURNED_NOTHING, Delayed, Ended, Raised, Returned
from bullpen._kernel.reminder import Reminder
from bullpen.errors import BullpenError, NotJson, PayloadTooLarge, PayloadUnavailable
from bullpen.queue.codec import Sealer, no_codec
from bullpen.queue.job import Job

__all__ = ["SealedRuns", "Unopened"]

Execute = Callable[[Job, float | None], Coroutine[Any, Any, Ended]]

_FIRST_WAIT_MS: Final = 5_000
_LONGEST_WAIT_MS: Final = 600_000


class Unopened:
    """What becomes of jobs that cannot be opened here now. Says so now and then, not for each of them."""

    def __init__(self, tell_error: Callable[[BaseException], None]) -> None:
        self._tell_error = tell_error
        self._reminders: dict[str | None, Reminder] = {}

    def give_back(self, job: Job, error: PayloadUnavailable) -> Delayed:
        """Twice as long each time: a worker without the key must not go round in circles with a whole queue."""
        if len(self._reminders) > 100:  # key ids are anybody's to invent
            self._reminders.clear()
        if self._reminders.setdefault(error.key_id, Reminder()).begins_or_lasts():
            self._tell_error(error)
        earlier = max(0, job.attempts_started - job.attempts_made - 1)
        return Delayed(min(_FIRST_WAIT_MS * 2 ** min(earlier, 20), _LONGEST_WAIT_MS))

    def refuse(self, job: Job) -> Delayed:
        """A sealed job at a worker without a codec: its handler would take the envelope for data."""
        return self.give_back(job, no_codec(job.record, job.queue_name))


class SealedRuns:
    """Opens and seals around a handler."""

    def __init__(self, execute: Execute, sealer: Sealer, unopened: Unopened) -> None:
        self._execute, self._sealer, self._unopened = execute, sealer, unopened

    async def run(self, job: Job, timeout_s: float | None) -> Ended:
        try:
            job.record = await self._sealer.open_record(job.record)
        except PayloadUnavailable as error:
            return self._unopened.give_back(job, error)
        except BullpenError as error:
            return Raised(error)
        result = await self._execute(job, timeout_s)
        if isinstance(result, Raised) and isinstance(result.error, PayloadUnavailable):
            # The handler asked for something sealed, as a parent asks for what its children returned.
            return self._unopened.give_back(job, result.error)
        if result is RETURNED_NOTHING or not isinstance(result, Returned):
            return result
        try:
            return Returned(self._sealer.seal_result(result.value))
        except (NotJson, PayloadTooLarge):
            return result  # refused as it would be without a codec

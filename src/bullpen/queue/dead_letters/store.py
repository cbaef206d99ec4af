"""The dead letters of a queue behind the interface of all stores (`bullpen.ports.dead_letters`).

In: a queue and the rule of its policy. Out: a store over its dead-letter queue, or over its failed set where that is
what the policy names.
Elsewhere: what only a queue's dead letters offer, such as filters and rates (`operations`), the failed set
(`failed_set`).
"""

from __future__ import annotations

import builtins

from bullpen._kernel import policy
from bullpen.errors import DeadLetterNotFound, InvalidOption, JobNotFound
from bullpen.ports.dead_letters import DeadLetterRecord, DeadLetterStore
from bullpen.ports.edits import Edit
from bullpen.queue.dead_letters.port import as_letter, complete_entry
from bullpen.queue.queue import Queue

__all__ = ["DeadLetterQueueStore", "dead_letter_store"]


def dead_letter_store(queue: Queue, rule: policy.DeadLetterPolicy) -> DeadLetterStore:
    """Where the finally failed jobs of a queue are, by the rule of its policy.

    Raises InvalidOption for the rules `none` and `row`: nothing is kept, or not by the queue.
    """
    match rule.store:
        case "queue":
            return DeadLetterQueueStore(queue)
        case "failed_set":
            return queue.failed_set
    raise InvalidOption("dead_letters.store", "'queue' or 'failed_set' for the dead letters of a queue", rule.store)


class DeadLetterQueueStore:
    """The entries in a queue of their own, `{queue}-dlq`."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._letters = queue, queue.dead_letters

    @property
    def name(self) -> str:
        return self._letters.queue_name

    async def depth(self) -> int:
        return await self._letters.depth()

    async def put(self, letter: DeadLetterRecord) -> None:
        """Workers write entries with the move to failed; this is for work that failed elsewhere."""
        async with Queue(self.name, connection=self._queue.connection, prefix=self._queue.keys.prefix) as entries:
            await entries.add(
                f"{letter.name or 'unknown'}-failed",
                complete_entry(letter),
                job_id=letter.id,
                attempts=1,
                remove_on_complete=False,
                remove_on_fail=False,
            )

    async def list(self, *, start: int = 0, count: int = 100) -> builtins.list[DeadLetterRecord]:
        return [as_letter(one) for one in await self._letters.list(start=start, count=count)]

    async def get(self, entry_id: str) -> DeadLetterRecord | None:
        found = await self._letters.get(entry_id)
        return None if found is None else as_letter(found)

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        """As the port says. Raises JobStateConflict when the job's id is in use by a job that has not failed."""
        try:
            return await self._letters.redrive(entry_id, by=by)
        except JobNotFound:
            raise DeadLetterNotFound(self.name, entry_id) from None

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        """As the port says, in one script. Raises JobStateConflict as `redrive` does."""
        try:
            return await self._letters.redrive(entry_id, by=by, edit=edit)
        except JobNotFound:
            raise DeadLetterNotFound(self.name, entry_id) from None

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        return await self._letters.discard(entry_id)

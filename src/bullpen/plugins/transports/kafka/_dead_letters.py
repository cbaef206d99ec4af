"""Dead letters in a Kafka topic.

A record cannot be taken out, so a letter that is done with gets a tombstone behind it in its partition. Every operation
reads the whole topic: it is a place for what people look at, not for a backlog. Elsewhere: writing letters
(`transport`), their fields (`bullpen.plugins.transports._dead_letters`).
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from bullpen._kernel import json
from bullpen.errors import DeadLetterNotFound
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.transports._dead_letters import check_event_edit, event_of, stored_entry, who
from bullpen.plugins.transports.kafka._records import read_value
from bullpen.ports.dead_letters import (
    ANY,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    LetterPage,
    groups_of,
    page_of,
)
from bullpen.ports.edits import Edit

if TYPE_CHECKING:
    from bullpen.plugins.transports.kafka.transport import KafkaTransport


class TopicDeadLetters:
    """The dead letters of one topic."""

    counts_by_reading: Final = True
    """Looking at how many there are costs as much as listing them."""

    def __init__(self, transport: KafkaTransport, source: str, name: str) -> None:
        self._transport, self._source, self.name = transport, source, name

    async def depth(self) -> int:
        return len(await self._read())

    async def put(self, letter: DeadLetter) -> None:
        value = json.encode(stored_entry(letter), what="dead letter")
        await self._transport.door.send(self.name, key=letter.id.encode(), value=value)

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetter]:
        found = sorted(await self._everything(), key=lambda letter: letter.failed_at)
        return found[start : start + count]

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        return page_of(await self._everything(), where, after=after, limit=limit)

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        return groups_of(await self._everything(), self.name, tenant_id=tenant_id, limit=limit)

    async def get(self, entry_id: str) -> DeadLetter | None:
        found = (await self._read()).get(entry_id)
        return None if found is None else found[0]

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        return await self._redrive(entry_id, by, None)

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        return await self._redrive(entry_id, by, edit)

    async def _redrive(self, entry_id: str, by: str | None, edit: Edit | None) -> str:
        found = (await self._read()).get(entry_id)
        if found is None:
            raise DeadLetterNotFound(self.name, entry_id)
        letter, partition = found
        if edit is not None:
            check_event_edit(self.name, letter, edit)
        by = by or who()
        # Sent first: a crash in between delivers it twice with the same identity, and loses nothing.
        await self._transport.publish(event_of(letter, by=by, edit=edit))
        await self._bury(entry_id, partition, by)
        MessagingReports(self._transport.label).redriven(letter, self.name, by)
        return letter.message_id

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        found = (await self._read()).get(entry_id)
        if found is None:
            return False
        await self._bury(entry_id, found[1], by or who())
        return True

    async def _bury(self, entry_id: str, partition: int, by: str) -> None:
        await self._transport.door.send(
            self.name, key=entry_id.encode(), value=None, partition=partition, headers={"x-removed-by": by}
        )

    async def _everything(self) -> builtins.list[DeadLetter]:
        return [letter for letter, _ in (await self._read()).values()]

    async def _read(self) -> Mapping[str, tuple[DeadLetter, int]]:
        """Letters without a tombstone behind them, with their partitions."""
        found: dict[str, tuple[DeadLetter, int]] = {}
        async for record in self._transport.door.read_all(self.name):
            entry_id = (record.key or b"").decode("utf-8", "replace")
            if record.value is None:
                found.pop(entry_id, None)
                continue
            entry, problem = read_value(record.value)
            told = entry if problem is None and isinstance(entry, dict) else {}
            found[entry_id] = (DeadLetter.from_entry(entry_id, told, source=self._source), record.partition.number)
        return found

"""Dead letters in a RabbitMQ queue. A queue has no index, so looking is receiving everything without acknowledging it.

The look happens on a channel of its own; afterwards what was not acknowledged is put back. Whoever looks at the same
moment sees the rest. Every operation reads the whole queue: it is a place for what people look at, not for a backlog.
Elsewhere: writing letters (`transport`).
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from bullpen.errors import DeadLetterNotFound
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.transports._dead_letters import check_event_edit, event_of, who
from bullpen.plugins.transports.rabbitmq._link import Link
from bullpen.plugins.transports.rabbitmq._messages import dead_letter_of_message
from bullpen.plugins.transports.rabbitmq.topology import QueueSpec
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
    from bullpen.plugins.transports.rabbitmq.transport import RabbitMQTransport

_PURPOSE: Final = "dead letters"
_SILENCE_S: Final = 1.0
"""When the broker counted more than it sends, somebody else holds the difference."""


class RabbitDeadLetters:
    """The dead letters of one queue."""

    def __init__(self, transport: RabbitMQTransport, link: Link, spec: QueueSpec) -> None:
        assert spec.dead_letter_queue is not None
        self._transport, self._link, self._spec = transport, link, spec
        self.name = spec.dead_letter_queue

    async def depth(self) -> int:
        """As the broker counts: a letter that a crash wrote twice counts twice."""
        await self._transport.declare(self._spec)
        return (await self._link.ask(partial(count, self.name)))[0]

    async def put(self, letter: DeadLetter) -> None:
        if await self.get(letter.id) is None:
            await self._transport.put_dead_letter(self._spec, letter)

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetter]:
        return [*await self._link.whole(self._read())][start : start + count]

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        return page_of(await self._link.whole(self._read()), where, after=after, limit=limit)

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        return groups_of(await self._link.whole(self._read()), self.name, tenant_id=tenant_id, limit=limit)

    async def get(self, entry_id: str) -> DeadLetter | None:
        return next((letter for letter in await self._link.whole(self._read()) if letter.id == entry_id), None)

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        return await self._link.whole(self._redrive(entry_id, by, None))

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        return await self._link.whole(self._redrive(entry_id, by, edit))

    async def _redrive(self, entry_id: str, by: str | None, edit: Edit | None) -> str:
        async with self._look() as look:
            found = look.copies(entry_id)
            if not found:
                raise DeadLetterNotFound(self.name, entry_id)
            letter, by = dead_letter_of_message(found[0], self._spec.name), by or who()
            if edit is not None:
                check_event_edit(self.name, letter, edit)
            # Sent and confirmed first: a crash in between delivers it twice with the same identity, and loses nothing.
            await self._transport.publish(event_of(letter, by=by, edit=edit))
            await look.remove(found)
        MessagingReports(self._transport.label).redriven(letter, self.name, by)
        return letter.message_id

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        return await self._link.whole(self._discard(entry_id))

    async def _read(self) -> Sequence[DeadLetter]:
        async with self._look() as look:
            return look.letters()

    async def _discard(self, entry_id: str) -> bool:
        async with self._look() as look:
            found = look.copies(entry_id)
            await look.remove(found)
            return bool(found)

    @asynccontextmanager
    async def _look(self) -> AsyncIterator[_QueueContents]:
        await self._transport.declare(self._spec)
        async with self._link.channel(_PURPOSE) as channel:
            look = _QueueContents(await self._receive(channel), self._spec.name)
            try:
                yield look
            finally:
                await self._put_back(channel, look.messages)

    async def _receive(self, channel: AbstractChannel) -> Sequence[AbstractIncomingMessage]:
        expected, _ = await count(self.name, channel)
        received: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        queue = await channel.get_queue(self.name, ensure=False)
        tag = await queue.consume(received.put)
        messages: list[AbstractIncomingMessage] = []
        try:
            while len(messages) < expected:
                async with asyncio.timeout(_SILENCE_S):
                    messages.append(await received.get())
        except TimeoutError:
            pass
        await queue.cancel(tag)
        while not received.empty():
            messages.append(received.get_nowait())
        return messages

    async def _put_back(self, channel: AbstractChannel, messages: Sequence[AbstractIncomingMessage]) -> None:
        """And wait until the broker has done it, so that the next look sees all."""
        for message in messages:
            await message.nack(requeue=True)
        deadline = asyncio.get_running_loop().time() + _SILENCE_S
        while (await count(self.name, channel))[0] < len(messages):
            if asyncio.get_running_loop().time() > deadline:
                return  # somebody else took some of them meanwhile
            await asyncio.sleep(0.01)


async def count(queue: str, channel: AbstractChannel) -> tuple[int, int]:
    """Messages that are ready in a queue, and its consumers."""
    declared = (await channel.declare_queue(queue, passive=True)).declaration_result
    return declared.message_count or 0, declared.consumer_count or 0


class _QueueContents:
    """What was in the queue, and is put back unless it is removed."""

    def __init__(self, messages: Sequence[AbstractIncomingMessage], source: str) -> None:
        self.messages, self._source = list(messages), source

    def letters(self) -> list[DeadLetter]:
        """Oldest first, each once however often it was written: putting back may change the queue's order."""
        unique = {letter.id: letter for letter in map(self._read, reversed(self.messages))}
        return sorted(unique.values(), key=lambda letter: letter.failed_at)

    def copies(self, entry_id: str) -> list[AbstractIncomingMessage]:
        return [message for message in self.messages if self._read(message).id == entry_id]

    async def remove(self, messages: Sequence[AbstractIncomingMessage]) -> None:
        for message in messages:
            await message.ack()
            self.messages.remove(message)

    def _read(self, message: AbstractIncomingMessage) -> DeadLetter:
        return dead_letter_of_message(message, self._source)

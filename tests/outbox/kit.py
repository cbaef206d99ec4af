"""Outboxes of one test, with a channel that remembers what it was given."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bullpen._kernel import telemetry
from bullpen.ledger import Ledger, OutboxRow, OutboxStatus
from bullpen.ports.channel import Accepted, ChannelHealth, Message, SendResult

PATIENCE_S = 45.0

Reply = SendResult | Exception | Callable[[Message], SendResult]


class SpyChannel:
    """A target at the edge of the system: answers as told and remembers what came."""

    def __init__(self, *answers: Reply, default: Reply | None = None) -> None:
        self.answers: deque[Reply] = deque(answers)
        self.default: Reply = default or Accepted()
        self.messages: list[Message] = []
        self.running = 0
        self.most_running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = False
        self._changed = asyncio.Event()

    async def send(self, message: Message) -> SendResult:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.messages.append(message)
        self._changed.set()
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        answer = self.answers.popleft() if self.answers else self.default
        if isinstance(answer, Exception):
            raise answer
        return answer(message) if callable(answer) else answer

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None:
        self.closed = True

    async def until(self, count: int) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self.messages) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{len(self.messages)} of {count} messages within {PATIENCE_S} s") from None

    @property
    def numbers(self) -> list[int]:
        return [message.payload["orderId"] for message in self.messages]


class Told:
    """Telemetry of the outbox, in order, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        if event.startswith(("outbox.", "projector.", "ticker.")):
            self.all.append((event, fields))
            self._changed.set()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.all if name == event]

    async def wait(self, event: str, count: int = 1) -> dict[str, Any]:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self.of(event)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            seen = [name for name, _ in self.all]
            raise AssertionError(f"no {count} × {event!r} within {PATIENCE_S} s, only {seen[-30:]}") from None
        return self.of(event)[count - 1]


@contextmanager
def telling() -> Iterator[Told]:
    told = Told()
    forget = telemetry.subscribe(told)
    try:
        yield told
    finally:
        forget()


async def rows(ledger: Ledger, **filters: Any) -> list[OutboxRow]:
    return await ledger.outbox.find(limit=10_000, **filters)


async def statuses(ledger: Ledger) -> list[OutboxStatus]:
    return [row.status for row in await rows(ledger)]


async def until_settled(ledger: Ledger, count: int, status: OutboxStatus = OutboxStatus.SENT) -> list[OutboxRow]:
    """Wait until so many rows have a status; the database tells nobody, so it is asked."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await rows(ledger, status=status)) < count:  # noqa: ASYNC110 - as said
            await asyncio.sleep(0.02)
    return found

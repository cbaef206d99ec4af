"""What the message suites share: a provider at the edge, a clock that moves, recipients."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from bullpen._kernel import telemetry
from bullpen._kernel.backoff import Backoff
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.ledger import Ledger
from bullpen.messages import MessageRow, Messages, MessageStatus, Recipient, SchedulerOptions, SenderOptions
from bullpen.ports.channel import Accepted, ChannelHealth, Message, SendResult

PATIENCE_S = 30.0

QUICK = RetryPolicy(
    attempts=6,
    backoff=Backoff.exponential(20, maximum=640),
    retry_owner="broker",
    dead_letters=DeadLetterPolicy(store="queue"),
)
"""The policy of scheduled messages, a hundred times faster."""

Answer = SendResult | Exception | Callable[[Message], SendResult]


class Provider:
    """A provider at the edge of the system: answers as told, remembers what came, drops a key it has seen."""

    def __init__(self, *answers: Answer, ledger: Ledger | None = None) -> None:
        self.answers: deque[Answer] = deque(answers)
        self.calls: list[Message] = []
        self.delivered: dict[str, Message] = {}
        self.at: dict[str, datetime] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.most_running = 0
        self.closed = False
        self._ledger = ledger
        self._changed = asyncio.Event()

    async def send(self, message: Message) -> SendResult:
        self.calls.append(message)
        self._changed.set()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        answer = self.answers.popleft() if self.answers else Accepted(f"provider-{len(self.calls)}")
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            answer = answer(message)
        if isinstance(answer, Accepted):
            self.delivered.setdefault(message.idempotency_key, message)
            if self._ledger is not None:
                self.at.setdefault(message.idempotency_key, now(self._ledger))
            self._changed.set()
        return answer

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None:
        self.closed = True

    async def until(self, count: int, what: Callable[[Provider], int] = lambda self: len(self.calls)) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while what(self) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{what(self)} of {count} within {PATIENCE_S} s") from None

    async def until_delivered(self, count: int) -> None:
        await self.until(count, lambda self: len(self.delivered))


class Told:
    """Telemetry of the messages, in order, and a way to wait for it."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        self.all.append((event, fields))
        self._changed.set()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.all if name == event]

    def take(self, event: str) -> list[dict[str, Any]]:
        """All of one kind so far; everything is forgotten then."""
        found, self.all = self.of(event), []
        return found

    async def wait(self, event: str, count: int = 1) -> dict[str, Any]:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while len(self.of(event)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"no {count} x {event!r}, only {[name for name, _ in self.all][-30:]}") from None
        return self.of(event)[count - 1]


@contextmanager
def telling() -> Iterator[Told]:
    told = Told()
    forget = telemetry.subscribe(told)
    try:
        yield told
    finally:
        forget()


def now(ledger: Ledger) -> datetime:
    """The ledger's clock."""
    return datetime.now(UTC) + timedelta(milliseconds=ledger.database.clock_offset_ms)


def set_clock(ledger: Ledger, instant: datetime) -> None:
    """Let the ledger believe that it is this time; not half a millisecond less, when nothing is due yet."""
    ledger.database.clock_offset_ms = math.ceil((instant - datetime.now(UTC)).total_seconds() * 1000)


def at(text: str) -> datetime:
    """`2026-03-14 09:00` in UTC."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def person(number: int | str = 1, **changes: Any) -> Recipient:
    given: dict[str, Any] = {
        "id": f"person-{number}",
        "name": f"Person {number}",
        "zone": "Europe/Paris",
        "channel": "email",
        "address": f"person-{number}@example.com",
        "occasions": {"birthday": "1990-03-14"},
        **changes,
    }
    return Recipient(**given)


def make(ledger: Ledger, client: Any, provider: Any = None, **options: Any) -> Messages:
    """Messages with one channel. Options of scheduler and sender begin with `scheduler_` and `sender_`."""
    scheduler = {name[10:]: options.pop(name) for name in list(options) if name.startswith("scheduler_")}
    sender = {name[7:]: options.pop(name) for name in list(options) if name.startswith("sender_")}
    channel = {name: options.pop(name) for name in ("after_crash", "rate_limit", "timeout") if name in options}
    messages = Messages(
        ledger,
        client,
        queue=options.pop("queue", "messages"),
        scheduler=SchedulerOptions(**scheduler),
        sender=SenderOptions(**{"attempts": 6, "lease_ms": 60_000, **sender}),
        **options,
    )
    messages.channel("email", provider or Provider(), **{"after_crash": "same_key", **channel})
    return messages


async def rows(messages: Messages, **filters: Any) -> list[MessageRow]:
    return await messages.store.find(limit=100_000, **filters)


async def statuses(messages: Messages) -> list[MessageStatus]:
    return [row.status for row in await rows(messages)]


async def until_status(messages: Messages, count: int, status: MessageStatus = MessageStatus.SENT) -> list[MessageRow]:
    """Wait until so many messages have a status; the database tells nobody, so it is asked."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(found := await rows(messages, status=status)) < count:  # noqa: ASYNC110 - as said
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(
            f"{len(found)} of {count} {status}; {[str(one) for one in await statuses(messages)]}"
        ) from None
    return found


async def due_now(messages: Messages, ledger: Ledger, count: int = 1, **changes: Any) -> None:
    """Save so many people whose birthday messages are planned and fall due right now."""
    set_clock(ledger, at("2026-03-14 08:00"))
    await messages.recipients.save_many(person(number, zone="UTC", **changes) for number in range(1, count + 1))
    await messages.planner().run_until_done()
    set_clock(ledger, at("2026-03-14 09:00"))

"""The client that workflows and message senders use, whatever carries the messages.

In: a queue (or topic), a name and `{urn, payload}`; a handler per queue. Out: receipts, and handled deliveries with the
same retries, dead letters, health and shutdown on every transport. Features know this interface only; the app decides
which client stands behind it. Elsewhere: the one implementation (`bullpen.plugins.messaging`), what it stands on
(`bullpen.ports.transport`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NotRequired, Protocol, Required, TypedDict, Unpack

from bullpen._kernel.backoff import Backoff, BackoffMapping
from bullpen._kernel.keep import Retention
from bullpen._kernel.outcome import Outcome, Result
from bullpen.errors import PublishFailed
from bullpen.ports.transport import Delivery, Features, Receipt_co

__all__ = [
    "Consumer",
    "EventData",
    "Handler",
    "Messaging",
    "Outgoing",
    "ProduceArguments",
    "ProduceManyArguments",
]


class EventData(TypedDict):
    """What every message holds."""

    urn: Required[str]
    payload: NotRequired[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One of many events to produce; the fields are the arguments of `produce`."""

    name: str
    data: EventData
    idempotency_key: str | None = None
    delay: int | timedelta = 0


Handler = Callable[[Delivery], Awaitable[Any] | Any]
"""Called for each delivery: `async def` on the loop, plain `def` in a thread. What it raises decides about a retry."""


class Consumer(Protocol):
    """Handles the deliveries of one queue until it is closed."""

    @property
    def queue(self) -> str: ...

    @property
    def running(self) -> int:
        """Deliveries being handled now."""
        ...

    @property
    def concurrency(self) -> int:
        """How many deliveries it handles at the same time."""
        ...

    async def resize(self, concurrency: int) -> None:
        """Change how many are handled at the same time, or a few more: slots change in groups. What is being
        handled continues."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it ended, by close or by an error that it cannot outlive."""
        ...

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Take nothing more, let running handlers end, give back what is unfinished after `timeout`."""
        ...


class ProduceArguments(TypedDict, total=False):
    """Options of an event: how often it is tried, and what only some transports can do.

    A transport refuses what it does not know (see `Features.options`). None means "not given".
    """

    attempts: int | None
    backoff: Backoff | int | timedelta | BackoffMapping | None
    at: datetime | None
    durability: str | None
    keep_logs: int | None
    lifo: bool | None
    priority: int | None
    urgency: int | None
    remove_on_complete: Retention
    remove_on_fail: Retention


class ProduceManyArguments(ProduceArguments, total=False):
    """Options of all events of one call."""

    idempotency_key: str | None
    headers: Mapping[str, str] | None


class Messaging(Protocol[Receipt_co]):
    """Produce and consume events, at least once, on one transport."""

    @property
    def label(self) -> str:
        """Name of the transport for people: "BullMQ"."""
        ...

    @property
    def features(self) -> Features: ...

    async def produce(
        self,
        queue: str,
        name: str,
        data: EventData,
        *,
        idempotency_key: str | None = None,
        delay: int | timedelta = 0,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[ProduceArguments],
    ) -> Receipt_co:
        """Send one event; returns when the broker has it. Raises InvalidOption before anything is sent, else
        PublishFailed.

        With an `idempotency_key` the same (name, urn, key) always has the same id.
        """
        ...

    async def produce_many(
        self, queue: str, events: Iterable[Outgoing | tuple[str, EventData]], **options: Unpack[ProduceManyArguments]
    ) -> Sequence[Receipt_co | PublishFailed]:
        """Send many, for less than one by one where the broker allows. One result per event, in order: its receipt, or
        why it was not taken. Raises InvalidOption before anything is sent if one of them is wrong."""
        ...

    async def consume(
        self,
        queue: str,
        handler: Handler,
        *,
        concurrency: int | None = None,
        ordered: bool = False,
        timeout: int | timedelta | None = None,
    ) -> Consumer:
        """Handle the deliveries of a queue from now on; one consumer per queue and client."""
        ...

    def judge(self, delivery: Delivery, result: Result) -> Outcome:
        """What will become of a delivery after this result: pure, and the same on every transport."""
        ...

    async def is_healthy(self) -> bool:
        """Whether the broker answers in time. Never raises; the reason of a False is logged."""
        ...

    async def sample(self) -> None:
        """Count what waits in every consumed queue and its dead letters, for gauges."""
        ...

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop all consumers, let running handlers end, then let go of the broker. Safe to call twice."""
        ...

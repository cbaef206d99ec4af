"""The client that workflows and message senders use, whatever carries the messages.

In: a queue (or topic), a name and `{urn, payload}`; a handler per queue. Out: receipts, and handled deliveries with the
same retries, dead letters, health and shutdown on every transport. Features know this interface only; the app decides
which client stands behind it. Elsewhere: the one implementation (`bullpen.plugins.messaging`), what it stands on
(`bullpen.ports.transport`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NotRequired, Protocol, Required, TypedDict

from bullpen._kernel.outcome import Outcome, Result
from bullpen.errors import BullpenError
from bullpen.ports.transport import Delivery, Features, Receipt_co

__all__ = ["Consumer", "EventData", "Handler", "Messaging", "Outgoing", "PublishFailed"]


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


class PublishFailed(BullpenError):
    """A message was not taken by the broker. The cause is chained; when the broker was away, it may have arrived."""

    def __init__(self, queue: str, reason: str) -> None:
        super().__init__(f"Failed to add job to queue {queue}: {reason}")
        self.queue, self.reason = queue, reason


class Consumer(Protocol):
    """Handles the deliveries of one queue until it is closed."""

    @property
    def queue(self) -> str: ...

    @property
    def running(self) -> int:
        """Deliveries being handled now."""
        ...

    @property
    def is_alive(self) -> bool:
        """False once it ended, by close or by an error that it cannot outlive."""
        ...

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Take nothing more, let running handlers end, give back what is unfinished after `timeout`."""
        ...


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
        **options: Any,
    ) -> Receipt_co:
        """Send one event; returns when the broker has it. Raises InvalidOption before anything is sent, else
        PublishFailed.

        With an `idempotency_key` the same (name, urn, key) always has the same id.
        """
        ...

    async def produce_many(
        self, queue: str, events: Iterable[Outgoing | tuple[str, EventData]], **options: Any
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
        """Tell how much waits in every consumed queue and its dead letters, for gauges."""
        ...

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop all consumers, let running handlers end, then let go of the broker. Safe to call twice."""
        ...

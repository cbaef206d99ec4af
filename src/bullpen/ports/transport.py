"""What carries workflow events and scheduled messages between processes: BullMQ on Redis, RabbitMQ, Kafka, memory.

In: events to publish, and outcomes of what was received. Out: deliveries. A transport translates and nothing more:
which outcome a failure has is decided above it, by one policy for all (`bullpen._kernel.outcome.judge`); it only makes
the outcome true. Elsewhere: the client that programs use (`bullpen.ports.messaging`), the plug-ins
(`bullpen.plugins.transports`), the suite that all of them pass (`bullpen.testing.contracts.transport`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from bullpen._kernel import tracing
from bullpen._kernel.backoff import Backoff, CustomBackoff
from bullpen._kernel.outcome import Outcome
from bullpen.errors import BullpenError, NotConfigured
from bullpen.ports.dead_letters import DeadLetterStore

__all__ = [
    "KEY_HEADER",
    "Deliveries",
    "Delivery",
    "Depth",
    "Event",
    "Features",
    "Published",
    "PublishesMany",
    "Receipt",
    "Settled",
    "Transport",
    "TransportHealth",
    "Tries",
]

KEY_HEADER: Final = "idempotencyKey"
"""Header that carries the key which the sender gave to an event: it stays the same when the event is sent again."""


@dataclass(frozen=True, slots=True)
class Tries:
    """How often one event is tried, when that differs from the consumer's policy."""

    attempts: int
    """Number of attempts, the first included."""
    backoff: Backoff | CustomBackoff | None
    """Pause between them; None is "at once"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What travels: an entity's urn and a payload."""

    source: str
    """The queue or topic."""
    urn: str
    """The entity; events of one urn may be kept in order."""
    name: str = ""
    """Kind of event: job name, routing key. Messages of foreign producers may have none."""
    payload: Any = None
    """Any JSON value."""
    id: str = ""
    """Identity, kept over retries and redrive. Empty: the transport gives one."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Correlation, tenant and trace ids, passed on as they are."""
    tries: Tries | None = None
    """Overrides the consumer's policy."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of one transport (see `Features.options`), such as a priority."""


class Delivery:
    """One event, given to us to be handled and settled.

    `on_lost` callbacks are called when it stops being ours before it was settled: its handler should stop, since
    another process may have it by now.
    """

    __slots__ = (
        "_callbacks",
        "attempt",
        "cancelled",
        "event",
        "handle",
        "idempotency_key",
        "is_lost",
        "is_redelivered",
        "problem",
        "waited_ms",
    )

    def __init__(
        self,
        event: Event,
        *,
        attempt: int,
        idempotency_key: str,
        handle: Any,
        problem: str | None = None,
        waited_ms: int | None = None,
        is_redelivered: bool = False,
    ) -> None:
        self.event = event
        self.attempt = attempt
        """Number of this try, from 1. A crash repeats the number: only failures that were settled count."""
        self.idempotency_key = idempotency_key
        """The same for every delivery of this event, also after a redrive, and for no other event."""
        self.handle = handle
        """For the transport only."""
        self.problem = problem
        """Why it cannot be handled: not JSON, no urn. It fails without being handled."""
        self.waited_ms = waited_ms
        """How long it was ready before it was delivered, where the transport knows."""
        self.is_redelivered = is_redelivered
        """An earlier delivery of this try was lost."""
        self.is_lost = False
        self.cancelled = False
        """True once its run is pointless: its time is over, or the consumer closes. Handlers in threads should check
        it."""
        self._callbacks: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"Delivery(source={self.source!r}, id={self.id!r}, attempt={self.attempt})"

    def log_fields(self) -> dict[str, Any]:
        """What log records show of it."""
        event = self.event
        return {
            "jobId": event.id,
            "jobName": event.name or None,
            "queue": event.source,
            "urn": event.urn,
            "attempt": self.attempt,
            **tracing.carried_ids(event.headers),
            "traceId": tracing.trace_id(event.headers),
        }

    @property
    def id(self) -> str:
        return self.event.id

    @property
    def source(self) -> str:
        return self.event.source

    @property
    def name(self) -> str:
        return self.event.name

    @property
    def urn(self) -> str:
        return self.event.urn

    @property
    def payload(self) -> Any:
        return self.event.payload

    @property
    def headers(self) -> Mapping[str, str]:
        return self.event.headers

    def on_lost(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the delivery is lost; at once when it is already."""
        if self.is_lost:
            callback()
        else:
            self._callbacks.append(callback)

    def lose(self) -> None:
        """Called by the transport. Harmless when repeated."""
        if not self.is_lost:
            self.is_lost = True
            callbacks, self._callbacks = self._callbacks, []
            for callback in callbacks:
                callback()


class Receipt(Protocol):
    """What `publish` returns: the identity of the stored event, and its result where the broker
    tracks single messages, as BullMQ does. Elsewhere `state` and `result` raise NotConfigured."""

    @property
    def id(self) -> str: ...

    async def state(self) -> str: ...

    async def result(self, timeout: int | timedelta | None = None) -> Any: ...


Receipt_co = TypeVar("Receipt_co", bound=Receipt, covariant=True)


@dataclass(frozen=True, slots=True)
class Published:
    """The receipt of brokers that do not track single messages."""

    id: str
    source: str
    position: str = ""
    """Where the broker put it, if it reports that: `orders[2]@1041`."""
    is_known: bool = False
    """The broker has, or had, an event with this id: nothing was added."""

    async def state(self) -> str:
        raise self._untracked("state")

    async def result(self, timeout: int | timedelta | None = None) -> Any:
        raise self._untracked("result")

    def _untracked(self, what: str) -> NotConfigured:
        return NotConfigured(
            f"{self.source!r} has no {what} of message {self.id!r}: only BullMQ tracks single messages"
        )


@dataclass(frozen=True, slots=True)
class Settled:
    """What settling did besides its purpose."""

    dead_letter: str | None = None
    """The dead-letter queue that has the entry now; None: there is no entry."""
    dead_letter_problem: str | None = None
    """Why an entry that should exist could not be written."""
    is_told: bool = False
    """The writer of the entry has logged it."""


@dataclass(frozen=True, slots=True)
class TransportHealth:
    """Whether the broker answers."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Depth:
    """How much waits in one source."""

    messages: int
    """Ready, delayed and being handled."""
    consumers: int | None = None
    """Consumers over all processes; None: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a transport can do. Asking for more is refused when it is asked, never at the first event."""

    ordered: bool
    """Can deliver the events of one urn strictly one after the other, a retry before its successor."""
    delays: bool
    """`publish(delay_ms=…)`."""
    stores_tries: bool = False
    """Attempts and backoff are stored with each event, so that the producer decides about them."""
    results: bool = False
    """Keeps what a handler returned, for callers that track the event; otherwise it is dropped."""
    marks_redelivered: bool = True
    """`Delivery.is_redelivered` can be relied on; where it cannot, any delivery may be a repetition."""
    children: bool = False
    """Knows jobs that wait for other jobs."""
    options: frozenset[str] = frozenset()
    """Names that `Event.options` may hold."""


class Deliveries(Protocol):
    """What one consumer receives, as an async iterator that ends after `stop`.

    It may have a `receiving_at()`: when the broker last let it receive, by the monotonic clock. Health checks ask it.
    It may have an `aclose()`: lets go of what only this one holds, once all that it received is settled.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delivery: ...

    async def stop(self) -> None:
        """Take nothing more. What was received can still be settled until the transport is closed."""
        ...


class Transport(Protocol[Receipt_co]):
    """Carries events, at least once.

    A published event is delivered until an outcome is settled for it. A delivery that is not settled comes again, to
    the next consumer, with its attempt number kept. An unreachable broker raises nothing in a consumer: it is
    waited for. `publish`, `settle` and the dead letters raise our errors only, never those of a vendor's client.
    """

    label: str
    """Name for people: "BullMQ"."""
    features: Features

    async def publish(self, event: Event, *, delay_ms: int = 0) -> Receipt_co:
        """Hand one event to the broker; returns when the broker has it for certain.

        Raises ConnectionLost when the broker is unreachable (the event may or may not have arrived), ServerRefused when
        it does not take the event: no route, forbidden; NotTakenNow when that may change by itself.
        """
        ...

    async def deliveries(self, source: str, *, prefetch: int, ordered: bool = False) -> Deliveries:
        """Begin to receive. At most `prefetch` deliveries are unsettled at any time.

        `ordered`: the events of one urn come strictly one after the other. Raises InvalidOption where that cannot be.
        """
        ...

    async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
        """Make the outcome true: done, again after a pause, or dead. Returns when the broker has it.

        Raises DeliveryLost when the delivery is no longer ours. Each delivery is settled once.
        """
        ...

    async def check(self) -> TransportHealth:
        """Whether the broker answers. Never raises and changes nothing; may take as long as the broker does."""
        ...

    async def depth(self, source: str) -> Depth:
        """How much waits there, and who takes it."""
        ...

    def dead_letters(self, source: str) -> DeadLetterStore:
        """Finally failed events of a source. Raises InvalidOption when the transport keeps none."""
        ...

    async def aclose(self) -> None:
        """Give back what is unsettled and let go of the broker. Safe to call twice."""
        ...


@runtime_checkable
class PublishesMany(Protocol[Receipt_co]):
    """A transport for which many events at once are cheaper than one by one. Others need not have it."""

    async def publish_many(self, events: Sequence[tuple[Event, int]]) -> Sequence[Receipt_co | BullpenError]:
        """Hand over events, each with its delay in milliseconds; returns when the broker has said something to each.

        One result per event, in order: its receipt, or what `publish` would have raised for it.
        """
        ...

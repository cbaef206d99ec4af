"""Exchanges, queues and bindings, described as records. No I/O: what is described here is declared by `_link`.

In: names, routing keys, limits. Out: declarations in an order in which each finds what it refers to, and routes for
messages. Declaring twice is harmless; declaring something else under the same name is refused by the broker.

**Delays.** RabbitMQ expires messages only at the head of a queue, so one queue holds one pause. The ladder has a queue
per power of two (1, 2, 4, 8, 16, 32 … units); a message goes down it and rests in the queues whose bits its delay has:
4 s is one rest, 5 s are two. The bits are the first words of its routing key, the name of its queue the rest. So a few
queues serve every delay of every queue on the broker, and no message waits behind one with a longer pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from bullpen._kernel.duration import check_int, is_text
from bullpen.errors import InvalidOption, require

__all__ = [
    "AmqpExchange",
    "Declaration",
    "DeclaredQueue",
    "DelayLadder",
    "QueueBinding",
    "QueueSpec",
    "Topology",
    "matches",
]

ONE_DAY_MS: Final = 86_400_000
DEFAULT_DELIVERY_LIMIT: Final = 20
_MOST_BROWSED: Final = 1_000_000
"""A look at dead letters counts as a delivery; brokers of version 4 drop a message after twenty unless told otherwise.
"""


@dataclass(frozen=True, slots=True)
class AmqpExchange:
    name: str
    kind: Literal["topic", "direct"]


@dataclass(frozen=True, slots=True)
class DeclaredQueue:
    """A durable quorum queue."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class QueueBinding:
    """From an exchange to a queue or, for the ladder, to another exchange."""

    exchange: str
    routing_key: str
    queue: str | None = None
    to_exchange: str | None = None


Declaration = AmqpExchange | DeclaredQueue | QueueBinding


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSpec:
    """One queue, and where its dead letters go."""

    name: str
    routing_keys: tuple[str, ...]
    """Topic patterns it is bound with: `birthday`, `orders.*`, `#`."""
    dead_letter_queue: str | None = None
    """None: what expires or fails finally is dropped."""
    dead_letter_key: str | None = None
    """Routing key of its dead letters; None: the name of the dead-letter queue."""
    ttl_ms: int | None = None
    """What waits longer is dead-lettered."""
    max_length: int | None = None
    """A full queue refuses publishes; nothing is dropped."""
    delivery_limit: int = DEFAULT_DELIVERY_LIMIT
    """Deliveries that ended with a dead consumer; more, and the broker dead-letters the message itself."""

    def __post_init__(self) -> None:
        require("queue", is_text(self.name), "non-empty text as the queue's name", self.name)
        fits = isinstance(self.routing_keys, tuple) and bool(self.routing_keys) and all(map(is_text, self.routing_keys))
        require("routing_keys", fits, "a tuple of at least one routing key", self.routing_keys)
        for name in ("ttl_ms", "max_length"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, minimum=1)
        check_int("delivery_limit", self.delivery_limit, minimum=1)

    @property
    def letter_key(self) -> str | None:
        return None if self.dead_letter_queue is None else self.dead_letter_key or self.dead_letter_queue

    def arguments(self, dead_letter_exchange: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "x-queue-type": "quorum",
            "x-quorum-initial-group-size": 3,
            "x-delivery-limit": self.delivery_limit,
            # Without it a full queue drops its oldest message; and only with it is dead-lettering confirmed.
            "x-overflow": "reject-publish",
        }
        if self.ttl_ms is not None:
            arguments["x-message-ttl"] = self.ttl_ms
        if self.max_length is not None:
            arguments["x-max-length"] = self.max_length
        if self.dead_letter_queue is not None:
            arguments |= {
                "x-dead-letter-exchange": dead_letter_exchange,
                "x-dead-letter-routing-key": self.letter_key,
                "x-dead-letter-strategy": "at-least-once",
            }
        return arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLadder:
    """Queues that hold messages back. Shared by everything on the broker that uses the same unit and levels."""

    unit_ms: int = 1_000
    """Delays are rounded up to a multiple of this."""
    levels: int = 13
    """Longest pause in one go: 2^levels - 1 units (13 levels of 1 s: 2 h 16 min). Longer ones go round again."""
    prefix: str = "bullpen.delay"

    def __post_init__(self) -> None:
        check_int("delay_unit_ms", self.unit_ms, minimum=1)
        check_int("delay_levels", self.levels, minimum=1, maximum=32)
        require("delay_prefix", is_text(self.prefix), "non-empty text", self.prefix)

    @property
    def longest_ms(self) -> int:
        return ((1 << self.levels) - 1) * self.unit_ms

    @property
    def _base(self) -> str:
        # Unit and levels are part of every name: another ladder is another set of queues, never a conflict.
        return f"{self.prefix}.{self.unit_ms}x{self.levels}"

    @property
    def entrance(self) -> str:
        return self._rung(self.levels - 1)

    @property
    def exit(self) -> str:
        return f"{self._base}.done"

    def _rung(self, level: int) -> str:
        return f"{self._base}.{self.unit_ms << level}" if level >= 0 else self.exit

    def declarations(self) -> Iterator[Declaration]:
        yield AmqpExchange(self.exit, "topic")
        for level in range(self.levels):
            name, below = self._rung(level), self._rung(level - 1)
            yield AmqpExchange(name, "topic")
            arguments = {
                "x-queue-type": "quorum",
                "x-quorum-initial-group-size": 3,
                "x-message-ttl": self.unit_ms << level,
                "x-overflow": "reject-publish",
                "x-dead-letter-strategy": "at-least-once",
                # No routing key here on purpose: the rest of the way stands in the message's own.
                "x-dead-letter-exchange": below,
            }
            yield DeclaredQueue(name, arguments)
            before = "*." * (self.levels - 1 - level)
            yield QueueBinding(name, f"{before}1.#", queue=name)
            yield QueueBinding(name, f"{before}0.#", to_exchange=below)

    def landing(self, queue: str) -> QueueBinding:
        """Where messages for a queue leave the ladder."""
        return QueueBinding(self.exit, "*." * self.levels + queue, queue=queue)

    def route(self, queue: str, delay_ms: int) -> tuple[str, str, int]:
        """Exchange, routing key, and the milliseconds that remain after this round."""
        units = -(-min(delay_ms, self.longest_ms) // self.unit_ms)
        bits = ".".join(f"{units:0{self.levels}b}")
        return self.entrance, f"{bits}.{queue}", max(0, delay_ms - units * self.unit_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A topic exchange, its queues, and a direct exchange for dead letters."""

    exchange: str = "bullpen.events"
    dead_letter_exchange: str = "bullpen.dead"
    queues: tuple[QueueSpec, ...] = ()
    delays: DelayLadder = field(default_factory=DelayLadder)
    is_open: bool = True
    """Queues that are not listed are made on first use, bound with their own name. False: they are refused."""

    def __post_init__(self) -> None:
        require("exchange", is_text(self.exchange), "non-empty text", self.exchange)
        fits = is_text(self.dead_letter_exchange) and self.dead_letter_exchange != self.exchange
        require("dead_letter_exchange", fits, "a name of its own", self.dead_letter_exchange)
        names = [spec.name for spec in self.queues]
        for name in names:
            require("queues", names.count(name) == 1, "each queue once", name)

    @classmethod
    def scheduled_messages(
        cls,
        *,
        exchange_name: str = "birthday.messages",
        dlx_name: str = "birthday.messages.dlx",
        queue_name: str = "birthday.messages.queue",
        dlq_name: str = "birthday.messages.dlq",
        routing_keys: tuple[str, ...] = ("birthday", "anniversary"),
        ttl_ms: int | None = ONE_DAY_MS,
        max_length: int | None = 100_000,
        delays: DelayLadder | None = None,
    ) -> Self:
        """The pipeline of scheduled messages: one queue, dead letters under the key `dlq`."""
        spec = QueueSpec(
            name=queue_name,
            routing_keys=routing_keys,
            dead_letter_queue=dlq_name,
            dead_letter_key="dlq",
            ttl_ms=ttl_ms,
            max_length=max_length,
        )
        return cls(
            exchange=exchange_name,
            dead_letter_exchange=dlx_name,
            queues=(spec,),
            delays=delays or DelayLadder(),
            is_open=False,
        )

    def spec(self, source: str, *, dead_letter_queue: str | None) -> QueueSpec:
        """The queue of a source: as listed, or by convention."""
        for spec in self.queues:
            if spec.name == source:
                return spec
        if not self.is_open:
            raise InvalidOption("queue", f"one of {', '.join(spec.name for spec in self.queues)}", source)
        return QueueSpec(name=source, routing_keys=(source,), dead_letter_queue=dead_letter_queue)

    def declarations(self) -> Iterator[Declaration]:
        """What all queues share, then the listed queues."""
        yield AmqpExchange(self.exchange, "topic")
        yield AmqpExchange(self.dead_letter_exchange, "direct")
        yield from self.delays.declarations()
        for spec in self.queues:
            yield from self.declarations_of(spec)

    def declarations_of(self, spec: QueueSpec) -> Iterator[Declaration]:
        if spec.dead_letter_queue is not None:
            assert spec.letter_key is not None
            arguments = {
                "x-queue-type": "quorum",
                "x-quorum-initial-group-size": 3,
                "x-delivery-limit": _MOST_BROWSED,
            }
            yield DeclaredQueue(spec.dead_letter_queue, arguments)
            yield QueueBinding(self.dead_letter_exchange, spec.letter_key, queue=spec.dead_letter_queue)
        yield DeclaredQueue(spec.name, spec.arguments(self.dead_letter_exchange))
        for routing_key in spec.routing_keys:
            yield QueueBinding(self.exchange, routing_key, queue=spec.name)
        yield self.delays.landing(spec.name)

    def routing_key(self, spec: QueueSpec, name: str) -> str:
        """The event's name where the queue is bound to it, else the queue's own first key."""
        if any(matches(pattern, name) for pattern in spec.routing_keys):
            return name
        return spec.routing_keys[0]


def matches(pattern: str, routing_key: str) -> bool:
    """Whether a topic binding takes a routing key: `*` is one word, `#` any number of them."""
    return _matches(pattern.split("."), routing_key.split("."))


def _matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(_matches(rest, words[at:]) for at in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _matches(rest, words[1:])

"""How a workflow is bound to a transport: which queue or topic brings which event. Frozen records, checked once.

In: what a definition says under `bullmq`, `kafka` or `rabbitmq`. Out: routes from a source and a job name to an event;
InvalidOption while the workflow is registered, never at the first job. Elsewhere: building the client these records
describe (`bullpen.plugins.transports`), consuming by the routes (`bullpen.workflow.bindings`).
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Literal, TypeVar

from bullpen._kernel.backoff import Backoff, from_option
from bullpen._kernel.duration import check_int, is_text
from bullpen._kernel.ids import check_queue_name
from bullpen._kernel.policy import WORKFLOW_EVENT, DeadLetterPolicy, RetryPolicy
from bullpen._kernel.rates import RateLimit
from bullpen.errors import InvalidOption, PermanentError, TwoTransports, require

__all__ = [
    "AnyEvent",
    "AnyTransport",
    "Binding",
    "BindingRoute",
    "BullMQ",
    "BullMQEvent",
    "DeadLetterQueue",
    "DefaultJobOptions",
    "Kafka",
    "KafkaEvent",
    "Memory",
    "RabbitMQ",
    "RabbitMQEvent",
    "RedisAddress",
    "choose_binding",
]

E = TypeVar("E")

# Generic records have no slots: `BullMQ[Order]()` must note its parameter, which a frozen record with slots cannot.


@dataclass(frozen=True, kw_only=True)
class BullMQEvent(Generic[E]):
    """Jobs of a queue cause an event; with `job_name`, only jobs of that name."""

    queue: str
    event: E
    job_name: str | None = None

    def __post_init__(self) -> None:
        check_queue_name(self.queue)
        require("job_name", self.job_name is None or is_text(self.job_name), "non-empty text or None", self.job_name)

    @property
    def source(self) -> str:
        return self.queue


@dataclass(frozen=True, kw_only=True)
class RabbitMQEvent(Generic[E]):
    """Messages of a queue cause an event; with `job_name`, only messages of that name."""

    queue: str
    event: E
    job_name: str | None = None

    def __post_init__(self) -> None:
        require("queue", is_text(self.queue), "non-empty text as the queue's name", self.queue)
        require("job_name", self.job_name is None or is_text(self.job_name), "non-empty text or None", self.job_name)

    @property
    def source(self) -> str:
        return self.queue


@dataclass(frozen=True, kw_only=True)
class KafkaEvent(Generic[E]):
    """Records of a topic cause an event; with `job_name`, only records of that name."""

    topic: str
    event: E
    job_name: str | None = None

    def __post_init__(self) -> None:
        require("topic", is_text(self.topic), "non-empty text as the topic's name", self.topic)
        require("job_name", self.job_name is None or is_text(self.job_name), "non-empty text or None", self.job_name)

    @property
    def source(self) -> str:
        return self.topic


@dataclass(frozen=True, kw_only=True)
class AnyEvent(Generic[E]):
    """Messages of a queue or topic cause an event, whatever carries them; with `job_name`, only those of that name."""

    source: str
    event: E
    job_name: str | None = None

    def __post_init__(self) -> None:
        check_queue_name(self.source)  # the strictest rule of all transports
        require("job_name", self.job_name is None or is_text(self.job_name), "non-empty text or None", self.job_name)


Mapped = BullMQEvent[E] | RabbitMQEvent[E] | KafkaEvent[E] | AnyEvent[E]


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultJobOptions:
    """What holds for every job that does not say otherwise."""

    attempts: int = WORKFLOW_EVENT.policy.attempts
    """Number of attempts, the first included."""
    backoff: Backoff = WORKFLOW_EVENT.policy.backoff or Backoff("exponential", 30_000)
    """Pause between tries; also `{"type": "exponential" or "fixed", "delay": ms}`."""
    remove_on_complete: bool | int = 1_000
    """How many completed jobs stay; True none, False all. Only on BullMQ."""
    remove_on_fail: bool | int = 5_000

    def __post_init__(self) -> None:
        check_int("default_job_options.attempts", self.attempts, minimum=1)
        object.__setattr__(self, "backoff", from_option(self.backoff))
        for name in ("remove_on_complete", "remove_on_fail"):
            value = getattr(self, name)
            require(f"default_job_options.{name}", isinstance(value, int) and value >= 0, "a bool or a count", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterQueue:
    """Where finally failed events go."""

    enabled: bool = True
    suffix: str = "-dlq"
    """What follows the name of the queue or topic."""

    def __post_init__(self) -> None:
        require("dead_letter_queue.enabled", isinstance(self.enabled, bool), "True or False", self.enabled)
        self.policy()

    def policy(self) -> DeadLetterPolicy:
        return DeadLetterPolicy(store="queue" if self.enabled else "none", suffix=self.suffix)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where Redis is, part by part: `RedisAddress("redis.internal", 6380, tls=True)`. A URL says the same."""

    host: str = "localhost"
    port: int = 6379
    _: KW_ONLY
    password: str | None = field(default=None, repr=False)
    db: int = 0
    tls: bool | ssl.SSLContext = False

    def __post_init__(self) -> None:
        require("connection.host", is_text(self.host), "non-empty text", self.host)
        check_int("connection.port", self.port, minimum=1, maximum=65_535)
        check_int("connection.db", self.db, minimum=0)
        require("connection.tls", isinstance(self.tls, bool | ssl.SSLContext), "True, False or a context", self.tls)


@dataclass(frozen=True)
class BindingRoute(Generic[E]):
    """The events that one source may cause, by job name."""

    source: str
    by_name: Mapping[str, E]
    otherwise: E | None
    """The event of jobs whose name no mapping asks for; None: such a job is a mistake."""

    def event_for(self, name: str) -> E:
        """Raises PermanentError when no mapping fits: trying again would not help."""
        event = self.by_name.get(name, self.otherwise)
        if event is None:
            known = ", ".join(sorted(self.by_name))
            raise PermanentError(f"no event is mapped to {name!r} of {self.source!r} (mapped are: {known})")
        return event


@dataclass(frozen=True, kw_only=True)
class Binding(Generic[E]):
    """What all transports have in common."""

    events: Sequence[Mapped[E]] = ()
    default_job_options: DefaultJobOptions = DefaultJobOptions()
    dead_letter_queue: DeadLetterQueue = DeadLetterQueue()
    concurrency: Mapping[str, int] | int = 1
    """Deliveries handled at the same time per source, or for some sources by name."""
    ordered: bool = False
    """Events of one urn strictly one after the other. Refused where the transport cannot do it."""
    batch_size: Mapping[str, int] | int = 1
    """Waiting events of one kind for one entity that may be handled in one transition, or for some sources by name.
    Above 1 the payload of such a transition is a `Batch`."""

    label: ClassVar[str] = "?"
    kind: ClassVar[type[Any]] = object

    def __post_init__(self) -> None:
        for mapped in self.events:
            require("events", isinstance(mapped, self.kind), f"a {self.kind.__name__}", mapped)
        options, letters = self.default_job_options, self.dead_letter_queue
        require("default_job_options", isinstance(options, DefaultJobOptions), "a DefaultJobOptions", options)
        require("dead_letter_queue", isinstance(letters, DeadLetterQueue), "a DeadLetterQueue", letters)
        ordered_batches = self.ordered and self.batch_size != 1
        require("batch_size", not ordered_batches, "1 with ordered=True: one event at a time", self.batch_size)
        routes = self.routes()
        for option in ("concurrency", "batch_size"):
            given = getattr(self, option)
            named = given if isinstance(given, Mapping) else {"": given}
            for source, number in named.items():
                check_int(f"{option}[{source!r}]" if source else option, number, minimum=1)
            strangers = sorted({source for source in named if source} - set(routes))
            if strangers:
                raise InvalidOption(option, f"sources of the events ({', '.join(routes)})", strangers[0])

    def routes(self) -> dict[str, BindingRoute[E]]:
        """One route per source, however many mappings share it."""
        by_name: dict[str, dict[str, E]] = {}
        otherwise: dict[str, E] = {}
        for mapped in self.events:
            names = by_name.setdefault(mapped.source, {})
            if mapped.job_name is None:
                if mapped.source in otherwise:
                    # Two would compete, and each job would cause a random one of the two events.
                    raise InvalidOption("events", f"one mapping without job_name for {mapped.source!r}", mapped)
                otherwise[mapped.source] = mapped.event
            elif mapped.job_name in names:
                raise InvalidOption("events", f"one mapping for {mapped.job_name!r} of {mapped.source!r}", mapped)
            else:
                names[mapped.job_name] = mapped.event
        return {
            source: BindingRoute(source, MappingProxyType(names), otherwise.get(source))
            for source, names in by_name.items()
        }

    def concurrency_of(self, source: str) -> int:
        return self.concurrency if isinstance(self.concurrency, int) else self.concurrency.get(source, 1)

    def batch_size_of(self, source: str) -> int:
        return self.batch_size if isinstance(self.batch_size, int) else self.batch_size.get(source, 1)

    def mapped(self, event: E) -> Mapped[E]:
        """Where to send an event so that it comes back as this event. Raises InvalidOption when nothing brings it."""
        for each in self.events:
            if each.event == event:
                return each
        raise InvalidOption("event", f"an event that a {self.label} source delivers", event)

    def policy(self) -> RetryPolicy:
        """The same policy object on every transport."""
        return RetryPolicy(
            attempts=self.default_job_options.attempts,
            backoff=self.default_job_options.backoff,
            dead_letters=self.dead_letter_queue.policy(),
        )


@dataclass(frozen=True, kw_only=True)
class BullMQ(Binding[E]):
    """Events come from BullMQ queues."""

    connection: str | RedisAddress | None = None
    """A URL or an address; None: what the app uses."""
    rate_limit: Mapping[str, RateLimit] | RateLimit | None = None
    """Events started per time on each queue, over all processes; or for some queues by name."""
    worker_options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the workers, such as `lock` and `stalled_interval`. The turn of an entity that no store keeps
    is leased for as long as a job is locked."""

    label = "BullMQ"
    kind = BullMQEvent

    def __post_init__(self) -> None:
        Binding.__post_init__(self)
        given = self.connection
        fits = given is None or is_text(given) or isinstance(given, RedisAddress)
        require("connection", fits, "a URL, a RedisAddress or None", given)
        limits = self.rate_limit if isinstance(self.rate_limit, Mapping) else {"": self.rate_limit}
        for source, limit in limits.items():
            require("rate_limit", limit is None or isinstance(limit, RateLimit), "a RateLimit", limit)
            known = source == "" or source in self.routes()
            require("rate_limit", known, f"sources of the events ({', '.join(self.routes())})", source)
        require("worker_options", isinstance(self.worker_options, Mapping), "a mapping", self.worker_options)
        for name, instead in (("concurrency", "concurrency"), ("limit", "rate_limit")):
            taken = name in self.worker_options
            require("worker_options", not taken, f"no {name!r}: `{instead}` of the binding sets it", name)
        backoff = self.default_job_options.backoff
        # Node workers that share the queue know no other kind.
        kind_fits = backoff.kind in ("fixed", "exponential")
        require("default_job_options.backoff.type", kind_fits, "'exponential' or 'fixed'", backoff.kind)

    def rate_limit_of(self, source: str) -> RateLimit | None:
        return self.rate_limit.get(source) if isinstance(self.rate_limit, Mapping) else self.rate_limit


@dataclass(frozen=True, kw_only=True)
class RabbitMQ(Binding[E]):
    """Events come from RabbitMQ quorum queues."""

    urls: str | Sequence[str] = "amqp://guest:guest@localhost:5672"
    """One address, or those of all nodes: when one does not answer, the next is tried."""

    label = "RabbitMQ"
    kind = RabbitMQEvent

    def __post_init__(self) -> None:
        Binding.__post_init__(self)
        urls = [self.urls] if isinstance(self.urls, str) else list(self.urls)
        for url in urls or [""]:
            fits = isinstance(url, str) and url.startswith(("amqp://", "amqps://"))
            require("urls", fits, "addresses that start with amqp:// or amqps://", url)
        require("ordered", not self.ordered, "False: RabbitMQ cannot keep the order of retries", self.ordered)


@dataclass(frozen=True, kw_only=True)
class Kafka(Binding[E]):
    """Events come from Kafka topics, keyed by urn."""

    brokers: str = "localhost:9092"
    """Comma-separated list of `host:port`."""
    client_id: str | None = None
    retry: Literal["pause", "park"] = "pause"
    """pause: the partition waits for the retry; park: the record waits on a topic of its own, and may be overtaken."""

    label = "Kafka"
    kind = KafkaEvent

    def __post_init__(self) -> None:
        Binding.__post_init__(self)
        require(
            "brokers", is_text(self.brokers) and all(self.broker_list()), "host:port, comma-separated", self.brokers
        )
        require("client_id", self.client_id is None or is_text(self.client_id), "text or None", self.client_id)
        require("retry", self.retry in ("pause", "park"), "'pause' or 'park'", self.retry)

    def broker_list(self) -> list[str]:
        return [broker.strip() for broker in self.brokers.split(",")]


@dataclass(frozen=True, kw_only=True)
class AnyTransport(Binding[E]):
    """Events come from queues or topics of a transport that a setting names."""

    label = "any transport"
    kind = AnyEvent

    def on(self, transport: str, **more: Any) -> Binding[E]:
        """The same on one transport. `more` are further options of its binding, such as where it is."""
        given: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(Binding) if each.name != "events"
        }
        as_queues: dict[str, tuple[type[Binding[Any]], type[Any], str]] = {
            "bullmq": (BullMQ, BullMQEvent, "queue"),
            "rabbitmq": (RabbitMQ, RabbitMQEvent, "queue"),
            "kafka": (Kafka, KafkaEvent, "topic"),
        }
        if transport == "memory":
            return Memory(events=self.events, **given)
        if transport not in as_queues:
            raise InvalidOption("transport", f"{', '.join(map(repr, as_queues))} or 'memory'", transport)
        kind, mapped, place = as_queues[transport]
        events = [mapped(event=one.event, job_name=one.job_name, **{place: one.source}) for one in self.events]
        return kind(events=events, **given, **more)


@dataclass(frozen=True, kw_only=True)
class Memory(Binding[E]):
    """Events come from queues inside this process: for tests and demos."""

    label = "Memory"
    kind = AnyEvent


def choose_binding(
    *,
    kafka: Kafka[E] | None = None,
    bullmq: BullMQ[E] | None = None,
    rabbitmq: RabbitMQ[E] | None = None,
    events: AnyTransport[E] | Memory[E] | None = None,
) -> Binding[E] | None:
    """The one binding of a workflow. Two for one workflow are refused; two workflows may differ."""
    given = [binding for binding in (kafka, bullmq, rabbitmq, events) if binding is not None]
    if len(given) > 1:
        raise TwoTransports(" and ".join(binding.label for binding in given))
    return given[0] if given else None

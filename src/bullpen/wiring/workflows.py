"""The workflows of an application: registered once, found by name or type, each with the one transport it asks for.

In: definitions, what registration says about transports, settings. Out: `Workflow` objects that the app runs. Only the
driver of the transport in use is imported. Elsewhere: what a workflow does (`bullpen.workflow`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar, Unpack, cast

from bullpen._kernel.container import Container
from bullpen._kernel.duration import is_text
from bullpen._kernel.logs import get_logger
from bullpen._kernel.policy import DEFAULT_LOCK_MS
from bullpen.errors import InvalidOption, TwoTransports, require
from bullpen.plugins import transports
from bullpen.ports.bindings import (
    AnyTransport,
    Binding,
    BullMQ,
    DeadLetterQueue,
    DefaultJobOptions,
    Kafka,
    Memory,
    RabbitMQ,
    RedisAddress,
    choose_binding,
)
from bullpen.ports.dead_letters import DeadLetterStore
from bullpen.ports.entity import UrnLocks
from bullpen.ports.messaging import Messaging
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.workflow.actions import Hooks
from bullpen.workflow.definition import Definition
from bullpen.workflow.locks import RedisLocks, locks_of
from bullpen.workflow.service import Workflow
from bullpen.workflow.stores.direct import DirectStore, as_store

__all__ = ["BullMQRegistration", "KafkaRegistration", "RegisterOptions", "WorkflowOptions", "Workflows"]

T = TypeVar("T")
P = TypeVar("P")
E = TypeVar("E")
S = TypeVar("S")

logger = get_logger("bullpen.workflow")

_PRIVATE = (Kafka,)
"""Where every workflow has a reading of its own, so that several may have the same source."""


class KafkaRegistration(TypedDict):
    """What `register` takes about Kafka; the events stand in the definition."""

    enabled: bool
    client_id: NotRequired[str]
    brokers: NotRequired[str]


class BullMQRegistration(TypedDict):
    """What `register` takes about BullMQ; the events stand in the definition."""

    enabled: bool
    config: NotRequired[Mapping[str, Any] | BullMQ[Any] | None]
    """Fields of `BullMQ`: `connection`, `default_job_options`, `dead_letter_queue`, `concurrency`, …; or a whole
    `BullMQ`, such as that of the definition. None: nothing to add."""


class RegisterOptions(TypedDict, Generic[T, P, E, S], total=False):
    """What `Bullpen.register` takes besides what it is there for."""

    rabbitmq: RabbitMQ[E] | None
    events: AnyTransport[E] | None
    """The one transport, unless the definition names it."""
    client: Messaging[Any] | None
    """A client of your own; the app does not close it."""
    client_options: Mapping[str, Any] | None
    """For the client that is made. Limits and options of workers are those of the binding."""
    locks: UrnLocks | Literal[False] | None
    """Lets events of one entity take turns over several processes. None: beside the entities (SqlEntities,
    RedisEntities), else in the Redis that is configured. False: only within each process."""
    service: type[Workflow[T, P, E, S]] | None
    """A subclass of `Workflow` to make."""
    strict: bool
    """Refuse what lint only warns of."""


class WorkflowOptions(RegisterOptions[T, P, E, S], Generic[T, P, E, S], total=False):
    """What `Bullpen.workflow` takes besides the definition."""

    name: str | None
    """None: that of the definition."""
    bullmq: BullMQ[E] | None
    kafka: Kafka[E] | None


class Workflows:
    """All workflows of one app."""

    def __init__(
        self,
        settings: Settings,
        connection: Callable[[], Connection],
        prefix: str,
        container: Container,
        taken: Callable[[str], bool],
    ) -> None:
        """`taken` tells whether a queue has a worker of the app."""
        self._settings, self._connection, self._prefix = settings, connection, prefix
        self._container, self._taken = container, taken
        self._by_name: dict[str, Workflow[Any, Any, Any, Any]] = {}
        self._broker: Any = None
        self._on_redis: set[str] = set()

    def is_on_redis(self, workflow: object) -> bool:
        """Whether a workflow uses the server of the app's queues, for its events or for turns."""
        return isinstance(workflow, Workflow) and workflow.name in self._on_redis

    @property
    def all(self) -> tuple[Workflow[Any, Any, Any, Any], ...]:
        return tuple(self._by_name.values())

    def add(
        self,
        definition: Definition[T, P, E, S],
        *,
        name: str | None = None,
        bullmq: BullMQ[E] | None = None,
        kafka: Kafka[E] | None = None,
        rabbitmq: RabbitMQ[E] | None = None,
        events: AnyTransport[E] | None = None,
        client: Messaging[Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        locks: UrnLocks | Literal[False] | None = None,
        service: type[Workflow[T, P, E, S]] | None = None,
        strict: bool = False,
        with_client: bool = True,
        container: Container | None = None,
    ) -> Workflow[T, P, E, S]:
        """See `Bullpen.workflow`."""
        name = self._free_name(name or definition.name)
        binding = _the_one(definition, bullmq=bullmq, kafka=kafka, rabbitmq=rabbitmq, events=events)
        binding = self._on_its_transport(binding)
        container = container or self._container
        owns_client = client is None
        if client is None and binding is not None and binding.events and with_client:
            client = self._client(name, binding, dict(client_options or {}))
        if binding is not None and with_client:
            self._refuse_competition(name, binding)
        store = as_store(_made(container, definition.entity))
        if locks is None:
            locks = locks_of(store) or self._locks(name, store, binding, client)
        hooks = Hooks([_made(container, each) for each in definition.actions])
        kind = service or cast("type[Workflow[T, P, E, S]]", Workflow)
        workflow = kind(
            name,
            definition,
            store,
            hooks=hooks,
            binding=binding,
            client=client,
            owns_client=owns_client,
            locks=locks or None,
            strict=strict,
        )
        self._by_name[name] = workflow
        self._container.name(name, workflow)
        if client is not None and owns_client:
            self._container.name(f"{name} client", client)
        return workflow

    def register(
        self,
        name: str,
        definition: Definition[T, P, E, S],
        *,
        imports: Sequence[Container] = (),
        providers: Mapping[type[Any], Any] | None = None,
        kafka: KafkaRegistration | None = None,
        bullmq: BullMQRegistration | None = None,
        **options: Unpack[RegisterOptions[T, P, E, S]],
    ) -> Workflow[T, P, E, S]:
        """See `Bullpen.register`."""
        container = Container([self._container, *imports])
        for kind, provider in (providers or {}).items():
            container.provide(kind, provider)
        by_kafka, by_bullmq = bool(kafka and kafka.get("enabled")), bool(bullmq and bullmq.get("enabled"))
        if (by_kafka or definition.kafka is not None) and (by_bullmq or definition.bullmq is not None):
            raise TwoTransports("Kafka and BullMQ")
        if kafka is not None and by_kafka:
            known = {key: value for key, value in kafka.items() if key != "enabled"}
            _refuse_unknown("kafka", known, ("client_id", "brokers"))
            binding: Kafka[E] = definition.kafka or Kafka()
            definition = replace(definition, kafka=replace(binding, **cast("dict[str, Any]", known)))
        if bullmq is not None and by_bullmq:
            _refuse_unknown("bullmq", bullmq, ("enabled", "config"))
            definition = replace(definition, bullmq=_configured(definition.bullmq or BullMQ(), bullmq.get("config")))
        enabled = by_kafka or by_bullmq or definition.rabbitmq is not None or definition.events is not None
        return self.add(definition, name=name, with_client=enabled, container=container, **options)

    def dead_letters_of(self, workflow: Workflow[Any, Any, Any, Any]) -> list[DeadLetterStore]:
        """Dead letters that nobody finds by looking at the app's Redis."""
        binding, client = workflow.binding, workflow.client
        if binding is None or client is None or binding.policy().dead_letters.store != "queue":
            return []
        if isinstance(binding, BullMQ) and binding.connection is None:
            return []
        transport = getattr(client, "transport", None)
        return [] if transport is None else [transport.dead_letters(source) for source in binding.routes()]

    # ---- inside -------------------------------------------------------------------------------------------------

    def _free_name(self, name: str | None) -> str:
        if not is_text(name) or name is None:
            raise InvalidOption("name", "a name, in the definition or where it is registered", name)
        require("name", name not in self._by_name, "a name that no other workflow of the app has", name)
        return name

    def _on_its_transport(self, binding: Binding[E] | None) -> Binding[E] | None:
        if not isinstance(binding, AnyTransport):
            return binding
        match self._settings.workflows.transport:
            case "kafka":
                return binding.on("kafka", brokers=self._settings.kafka.brokers)
            case "rabbitmq":
                return binding.on("rabbitmq", urls=self._settings.rabbitmq.urls)
            case transport:
                return binding.on(transport)

    def _client(self, name: str, binding: Binding[Any], options: dict[str, Any]) -> Messaging[Any]:
        load = transports.load
        match binding:
            case BullMQ():
                shared = {} if binding.connection is not None else {"connection": self._connection_for(name)}
                client = load("bullmq").from_binding(binding, **{"prefix": self._prefix, **shared, **options})
            case Kafka():
                client = load("kafka").from_binding(binding, workflow=name, **options)
            case RabbitMQ():
                client = load("rabbitmq").from_binding(binding, **options)
            case _:
                memory = load("memory")
                if self._broker is None:
                    from bullpen.plugins.transports.memory import MemoryBroker

                    self._broker = MemoryBroker()
                client = memory.from_binding(binding, broker=self._broker, **options)
        return cast("Messaging[Any]", client)

    def _connection_for(self, name: str) -> Connection:
        self._on_redis.add(name)
        return self._connection()

    def _locks(self, name: str, store: Any, binding: Binding[Any] | None, client: Any) -> UrnLocks | None:
        """For entities of which nobody knows where they are. Without versions nothing else keeps two events apart."""
        if isinstance(binding, Memory | None) or client is None:
            return None  # one process
        if isinstance(binding, BullMQ):
            # As long as a job's lock: after a crash the event comes again then, and must not wait for another lease.
            return RedisLocks(client.transport.connection, lease=binding.worker_options.get("lock", DEFAULT_LOCK_MS))
        if self._settings.redis.url is not None:
            return RedisLocks(self._connection_for(name))
        if not isinstance(store, DirectStore):
            return None  # versions are checked
        logger.warning(
            "workflow %r: two processes may handle events of one entity at the same time; keep entities in an "
            "EntityStore, which checks versions, or give locks=RedisLocks(connection)",
            name,
        )
        return None

    def _refuse_competition(self, name: str, binding: Binding[Any]) -> None:
        """Two who consume one queue each get a random half of its events."""
        if isinstance(binding, _PRIVATE):
            return
        for source in binding.routes():
            if isinstance(binding, BullMQ) and self._taken(source):
                raise InvalidOption("events", f"queues without a worker in this app; {source!r} has one", source)
            for other in self.all:
                if (
                    type(other.binding) is type(binding)
                    and other.binding is not None
                    and source in other.binding.routes()
                ):
                    raise InvalidOption("events", f"queues of one workflow; {source!r} feeds {other.name!r}", source)


def _the_one(definition: Definition[Any, Any, E, Any], **registered: Any) -> Binding[E] | None:
    """One inbound transport per workflow, over definition and registration together."""
    given = {}
    for name, binding in registered.items():
        own = getattr(definition, name)
        given[name] = binding if binding is not None else own
    return choose_binding(**given)


def _made(container: Container, given: Any) -> Any:
    return container.make(given) if isinstance(given, type) else given


def _configured(binding: BullMQ[Any], config: Mapping[str, Any] | BullMQ[Any] | None) -> BullMQ[Any]:
    if config is None:
        return binding
    if isinstance(config, BullMQ):
        one = not config.events or not binding.events or list(config.events) == list(binding.events)
        require("bullmq.config.events", one, "those of the definition, or none", config.events)
        return replace(config, events=config.events or binding.events)
    require("bullmq.config", isinstance(config, Mapping), "a mapping of fields of BullMQ, or a BullMQ", config)
    _refuse_unknown("bullmq.config", config, [each.name for each in fields(BullMQ) if each.name != "events"])
    records = {
        "connection": RedisAddress,
        "default_job_options": DefaultJobOptions,
        "dead_letter_queue": DeadLetterQueue,
    }
    given = dict(config)
    for name, record in records.items():
        if isinstance(given.get(name), Mapping):
            _refuse_unknown(f"bullmq.config.{name}", given[name], [each.name for each in fields(record)])
            given[name] = record(**given[name])
    return replace(binding, **given)


def _refuse_unknown(option: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        require(f"{option}.{name}", name in known, f"one of {', '.join(known)}", given[name])

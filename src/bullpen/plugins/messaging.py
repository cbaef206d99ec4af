"""Produce and consume on any transport: the one client, written once over the port.

In: a transport and a policy. Out: events checked and sent, deliveries judged, the same way everywhere. Elsewhere:
sending until the broker has it (`_publishing`), handling deliveries (`_consumer`), what travels and how an outcome
becomes true (`bullpen.plugins.transports`), what is logged (`_reports`), clients by name (`BullMQClient`,
`KafkaClient`, `RabbitMQClient`, each in the module of its transport).
"""

from __future__ import annotations

import asyncio
import difflib
import uuid
from collections.abc import Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

import msgspec

from bullpen._kernel import tracing
from bullpen._kernel.backoff import from_option
from bullpen._kernel.duration import check_int, is_text, to_ms
from bullpen._kernel.ids import keyed_id
from bullpen._kernel.outcome import (
    Cause,
    Failed,
    Outcome,
    Result,
    Returned,
    WaitingChildren,
    judge,
)
from bullpen._kernel.policy import WORKFLOW_EVENT, RetryPolicy
from bullpen.errors import (
    BullpenError,
    ConnectionLost,
    InvalidOption,
    PublishFailed,
    require,
)
from bullpen.plugins._consumer import MessagingConsumer
from bullpen.plugins._publishing import Publisher
from bullpen.plugins._reports import MessagingReports
from bullpen.ports.messaging import EventData, Handler, Outgoing, ProduceArguments, ProduceManyArguments
from bullpen.ports.transport import (
    KEY_HEADER,
    Delivery,
    Event,
    Features,
    Receipt,
    Transport,
    Tries,
)

__all__ = ["ClientArguments", "MessagingClient"]

ReceiptT = TypeVar("ReceiptT", bound=Receipt)


class ClientArguments(TypedDict, total=False):
    """What every client takes besides its transport and its policy."""

    concurrency: int
    schemas: Mapping[str, Any] | None
    publish_deadline: int | timedelta
    health_timeout: int | timedelta
    close_timeout: int | timedelta


class MessagingClient(Generic[ReceiptT]):
    """Sends events and handles deliveries on one transport.

    `policy` says how often a failed delivery is tried, with which pauses, and which errors are final. `schemas` maps an
    event name to the type its payload must have: a wrong payload is refused when it is produced, and is a permanent
    failure when it is received. A client belongs to one event loop.

        client = MessagingClient(transport)
        await client.consume("orders", handle)
        await client.produce("orders", "paid", {"urn": "urn:order:1", "payload": {"amount": 5}})
    """

    def __init__(
        self,
        transport: Transport[ReceiptT],
        *,
        policy: RetryPolicy = WORKFLOW_EVENT.policy,
        concurrency: int = 1,
        schemas: Mapping[str, Any] | None = None,
        publish_deadline: int | timedelta = 30_000,
        health_timeout: int | timedelta = 2_000,
        close_timeout: int | timedelta = 30_000,
    ) -> None:
        require("policy", isinstance(policy, RetryPolicy), "a RetryPolicy", policy)
        self.transport = transport
        self.policy = policy.over(WORKFLOW_EVENT.policy)
        self._concurrency = check_int("concurrency", concurrency, minimum=1)
        self._schemas = dict(schemas or {})
        self._health_timeout_ms = to_ms("health_timeout", health_timeout, minimum=1)
        self._close_timeout_ms = to_ms("close_timeout", close_timeout)
        self._sample_timeout_s = 5.0
        self._reports = MessagingReports(transport.label)
        publish_deadline_s = to_ms("publish_deadline", publish_deadline, minimum=1) / 1000
        self._publisher = Publisher(transport, self._reports, publish_deadline_s)
        self._consumers: dict[str, MessagingConsumer[ReceiptT]] = {}
        self._is_closed = False

    @property
    def label(self) -> str:
        return self.transport.label

    @property
    def features(self) -> Features:
        return self.transport.features

    # ---- producing --------------------------------------------------------------------------------------------

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
    ) -> ReceiptT:
        """Send one event; returns when the broker has it.

        `attempts` and `backoff` override the policy for this event; further options are those of the transport. The id
        is built from name, urn and the idempotency key, or something random when there is none. Raises InvalidOption
        before anything is sent, PublishFailed when the broker did not take it before the deadline.
        """
        require("name", is_text(name), "non-empty text as the event's name", name)
        event = self.event(queue, name, data, idempotency_key=idempotency_key, headers=headers, **options)
        return await self.send(event, delay=delay)

    async def produce_many(
        self, queue: str, events: Iterable[Outgoing | tuple[str, EventData]], **options: Unpack[ProduceManyArguments]
    ) -> list[ReceiptT | PublishFailed]:
        """Send many; one result per event, in order: its receipt, or why it was not taken. All are checked first.

        `options` are for all of them; an event that needs its own key or delay is an `Outgoing`.
        """
        made = [self._outgoing(queue, one, options) for one in events]
        self._must_be_open()
        return await self._publisher.send_many(queue, made)

    def _outgoing(
        self, queue: str, one: Outgoing | tuple[str, EventData], options: ProduceManyArguments
    ) -> tuple[Event, int]:
        given = one if isinstance(one, Outgoing) else Outgoing(name=one[0], data=one[1])
        own: ProduceManyArguments = {} if given.idempotency_key is None else {"idempotency_key": given.idempotency_key}
        whole: ProduceManyArguments = {**options, **own}
        event = self.event(queue, given.name, given.data, **whole)
        return event, self._delay_ms(given.delay)

    def event(
        self,
        queue: str,
        name: str,
        data: EventData,
        *,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[ProduceArguments],
    ) -> Event:
        """The checked event that `produce` would send."""
        require("queue", is_text(queue), "non-empty text as the queue's name", queue)
        if not isinstance(data, Mapping):
            raise InvalidOption("data", "{'urn': …, 'payload': …}", data)
        for key in data:
            if key not in ("urn", "payload"):
                raise InvalidOption(f"data.{key}", "only urn and payload", data[key])  # type: ignore[literal-required]  # whatever the caller wrote
        urn: Any = data.get("urn")
        require("data.urn", is_text(urn), "non-empty text that names the entity", urn)
        require("idempotency_key", idempotency_key is None or is_text(idempotency_key), "text", idempotency_key)
        payload = data.get("payload")
        problem = self._schema_problem(name, payload)
        if problem is not None:
            raise InvalidOption("data.payload", f"what the schema of {name!r} says ({problem})", payload)
        return Event(
            source=queue,
            name=name,
            urn=urn,
            payload=payload,
            id=keyed_id(name, urn, idempotency_key or str(uuid.uuid4())),
            headers={
                **tracing.carrier(),
                **_checked_headers(headers),
                **({} if idempotency_key is None else {KEY_HEADER: idempotency_key}),
            },
            tries=self._tries(options),
            options=self._transport_options(options),
        )

    async def send(self, event: Event, *, delay: int | timedelta = 0) -> ReceiptT:
        """Send a checked event. A broker that is away or full is tried again until the deadline; the id stays the
        same."""
        delay_ms = self._delay_ms(delay)
        self._must_be_open()
        return await self._publisher.send(event, delay_ms)

    def _delay_ms(self, delay: int | timedelta) -> int:
        delay_ms = to_ms("delay", delay)
        if delay_ms and not self.features.delays:
            raise InvalidOption("delay", f"0, because {self.label} cannot hold messages back", delay)
        return delay_ms

    def _tries(self, options: ProduceArguments) -> Tries | None:
        attempts, backoff = options.pop("attempts", None), options.pop("backoff", None)
        if attempts is None and backoff is None and not self.features.stores_tries:
            return None
        return Tries(
            self.policy.job_attempts if attempts is None else check_int("attempts", attempts, minimum=1),
            self.policy.backoff if backoff is None else from_option(backoff),
        )

    def _transport_options(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        known = self.features.options
        for name, value in options.items():
            if name not in known:
                near = difflib.get_close_matches(name, [*known, "attempts", "backoff", "delay"], 1)
                expected = f"an option of messages on {self.label}"
                raise InvalidOption(name, expected, value, suggestion=near[0] if near else None)
        return options

    def _schema_problem(self, name: str, payload: Any) -> str | None:
        schema = self._schemas.get(name)
        if schema is None:
            return None
        try:
            msgspec.convert(payload, schema)
        except msgspec.ValidationError as error:
            return str(error)
        return None

    # ---- consuming --------------------------------------------------------------------------------------------

    async def consume(
        self,
        queue: str,
        handler: Handler,
        *,
        concurrency: int | None = None,
        ordered: bool = False,
        timeout: int | timedelta | None = None,
    ) -> MessagingConsumer[ReceiptT]:
        """Handle the deliveries of a queue, up to `concurrency` at the same time.

        What the handler raises is a failed attempt, judged by the policy; PermanentError is final at once. `ordered`:
        the events of one urn are handled strictly one after the other, a retry before its successor. `timeout` bounds
        one run of the handler. A second consumer for the same queue is refused: each would get a random half.
        """
        self._must_be_open()
        require("queue", is_text(queue), "non-empty text as the queue's name", queue)
        require("handler", callable(handler), "a function that takes a Delivery", handler)
        if ordered and not self.features.ordered:
            raise InvalidOption("ordered", f"False, because {self.label} cannot keep the order of retries", ordered)
        known = self._consumers.get(queue)
        if known is not None and known.is_alive:
            raise InvalidOption("queue", f"a queue without a consumer; this client has one for {queue!r}", queue)
        consumer = MessagingConsumer(
            self.transport,
            self,
            queue,
            handler,
            concurrency=self._concurrency if concurrency is None else check_int("concurrency", concurrency, minimum=1),
            ordered=ordered,
            timeout_ms=None if timeout is None else to_ms("timeout", timeout, minimum=1),
            reports=self._reports,
        )
        self._consumers[queue] = consumer
        await consumer.start()
        return consumer

    def judge(self, delivery: Delivery, result: Result) -> Outcome:
        """The outcome of one attempt: pure, and the same on every transport."""
        tries = delivery.event.tries or Tries(self.policy.job_attempts, self.policy.backoff)
        if isinstance(result, Returned) and not self.features.results:
            result = Returned(None)
        outcome = judge(
            result,
            attempts_made_before=delivery.attempt - 1,
            attempts=tries.attempts,
            backoff=tries.backoff,
            policy=self.policy,
        )
        if isinstance(outcome, WaitingChildren) and not self.features.children:
            reason = f"waiting for other jobs is impossible on {self.label}"
            return Failed(reason, reason, Cause.PERMANENT)
        return outcome

    def problem_of(self, delivery: Delivery) -> str | None:
        """Why a delivery must fail without being handled."""
        return delivery.problem or self._schema_problem(delivery.name, delivery.payload)

    # ---- looking after it -------------------------------------------------------------------------------------

    async def is_healthy(self) -> bool:
        """Whether the broker answers within the health timeout and all consumers receive. Never raises."""
        reason = await self._ill_because()
        if reason:
            self._reports.unhealthy(reason)
        else:
            self._reports.healthy()
        return not reason

    async def _ill_because(self) -> str:
        if self._is_closed:
            return "the client was closed"
        for consumer in self._consumers.values():
            if consumer.crash is not None:
                return f"the consumer of {consumer.queue!r} ended: {consumer.crash}"
        reason = await self._away_because()
        if reason:
            return reason
        deaf = [consumer.queue for consumer in self._consumers.values() if not consumer.is_receiving]
        return f"the consumer of {', '.join(map(repr, deaf))} receives nothing" if deaf else ""

    async def _away_because(self) -> str:
        try:
            async with asyncio.timeout(self._health_timeout_ms / 1000):
                health = await self.transport.check()
        except TimeoutError:
            return f"no answer within {self._health_timeout_ms} ms"
        except Exception as error:  # noqa: BLE001 - whoever asks for health wants an answer, not an exception
            return str(error) or type(error).__name__
        return "" if health.ok else health.reason or "no reason given"

    async def sample(self) -> None:
        """Tell whether the broker answers, and how much waits in every consumed queue and its dead letters, for
        gauges. Call it now and then; never raises."""
        is_connected = not self._is_closed and not await self._away_because()
        self._reports.checked(is_connected)
        for queue, consumer in self._consumers.items() if is_connected else ():
            letters: int | None = None
            try:
                async with asyncio.timeout(self._sample_timeout_s):
                    depth = await self.transport.depth(queue)
                    if self.policy.dead_letters.store == "queue":
                        letters = await self.transport.dead_letters(queue).depth()
            except (BullpenError, TimeoutError):
                continue  # it went away meanwhile, or has too much to count: the last value stands
            self._reports.depth(queue, depth, letters, consumer.running, consumer.concurrency)

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop all consumers, let running handlers end within `timeout`, then let go of the broker. Safe to call
        twice."""
        self._is_closed = True
        bound = self._close_timeout_ms if timeout is None else timeout
        await asyncio.gather(*(consumer.close(bound) for consumer in self._consumers.values()))
        await self.transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _must_be_open(self) -> None:
        if self._is_closed:
            raise ConnectionLost(f"this {self.label} client was closed; make a new one")


def _checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Absent ids are left out rather than sent as null."""
    kept = {name: value for name, value in (headers or {}).items() if value is not None}
    for name, value in kept.items():
        require(f"headers[{name!r}]", is_text(name) and isinstance(value, str), "text", value)
    return kept

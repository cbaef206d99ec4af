"""Produce and consume on any transport: the one client, written once over the port.

In: a transport and a policy. Out: events sent, deliveries handled and settled, the same way everywhere. The life of a
delivery is `_Consumer._handle`: run the handler, judge, settle, tell. Elsewhere: what travels and how an outcome
becomes true (`bullpen.plugins.transports`), what is logged (`_reports`), clients by name (`BullMQClient`,
`KafkaClient`, `RabbitMQClient`, each in the module of its transport).
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Generic, Self, TypedDict, TypeVar, Unpack

import msgspec

from bullpen._kernel import tracing
from bullpen._kernel.backoff import from_option
from bullpen._kernel.duration import check_int, is_text, to_ms
from bullpen._kernel.ending import end
from bullpen._kernel.execute import is_async, run_async, run_thread
from bullpen._kernel.ids import keyed_id
from bullpen._kernel.lifecycle import Lifecycle
from bullpen._kernel.outcome import (
    Cause,
    Failed,
    Outcome,
    Raised,
    Result,
    Returned,
    Waiting,
    WaitingChildren,
    failure_in,
    judge,
)
from bullpen._kernel.patience import Patience
from bullpen._kernel.policy import WORKFLOW_EVENT, RetryPolicy
from bullpen.errors import (
    BullpenError,
    ConnectionLost,
    DeliveryLost,
    InvalidOption,
    NotTakenNow,
    PublishFailed,
    require,
)
from bullpen.plugins._reports import MessagingReports
from bullpen.ports.messaging import EventData, Handler, Outgoing, ProduceArguments, ProduceManyArguments
from bullpen.ports.transport import (
    KEY_HEADER,
    Deliveries,
    Delivery,
    Event,
    Features,
    PublishesMany,
    Receipt,
    Transport,
    Tries,
)

__all__ = ["ClientArguments", "MessagingClient"]

ReceiptT = TypeVar("ReceiptT", bound=Receipt)

_CANCEL_GRACE_S: Final = 0.5
_DEAF_S: Final = 5.0
"""A consumer that lost its subscription gets it back within this, or the process is not ready."""
_MOST_IN_FLIGHT: Final = 500
"""Publishes of one batch that wait for the broker at the same time."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


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
        self._publish_deadline_s = to_ms("publish_deadline", publish_deadline, minimum=1) / 1000
        self._health_timeout_ms = to_ms("health_timeout", health_timeout, minimum=1)
        self._close_timeout_ms = to_ms("close_timeout", close_timeout)
        self._sample_timeout_s = 5.0
        self._reports = MessagingReports(transport.label)
        self._consumers: dict[str, _Consumer[ReceiptT]] = {}
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
        found: list[ReceiptT | PublishFailed | None] = [None] * len(made)
        if len(made) > 1 and isinstance(self.transport, PublishesMany):
            found = await self._send_batch(self.transport, made)
        window = asyncio.Semaphore(_MOST_IN_FLIGHT)

        async def send(number: int) -> None:
            async with window:
                try:
                    found[number] = await self._send_one(*made[number], is_alone=is_alone)
                except PublishFailed as failure:
                    found[number] = failure

        is_alone = len(made) == 1
        await asyncio.gather(*(send(number) for number, result in enumerate(found) if result is None))
        results = [result for result in found if result is not None]
        if not is_alone:
            failures = [result for result in results if isinstance(result, PublishFailed)]
            known = sum(not isinstance(result, PublishFailed) and _is_known(result) for result in results)
            self._reports.published_many(queue, len(results) - len(failures), known, failures)
        return results

    def _outgoing(
        self, queue: str, one: Outgoing | tuple[str, EventData], options: ProduceManyArguments
    ) -> tuple[Event, int]:
        given = one if isinstance(one, Outgoing) else Outgoing(name=one[0], data=one[1])
        own: ProduceManyArguments = {} if given.idempotency_key is None else {"idempotency_key": given.idempotency_key}
        whole: ProduceManyArguments = {**options, **own}
        event = self.event(queue, given.name, given.data, **whole)
        return event, self._delay_ms(given.delay)

    async def _send_batch(
        self, transport: PublishesMany[ReceiptT], events: Sequence[tuple[Event, int]]
    ) -> list[ReceiptT | PublishFailed | None]:
        """None: not taken this time, and worth trying again alone, where a broker that is away is waited for."""
        started = time.monotonic()
        found: list[ReceiptT | PublishFailed | None] = []
        for (event, _), result in zip(events, await self._publish_many(transport, events), strict=True):
            if isinstance(result, ConnectionLost | NotTakenNow):
                found.append(None)
            elif isinstance(result, BullpenError):
                found.append(self._failed(event, result, is_alone=False))
            else:
                took_s = time.monotonic() - started
                self._reports.published(event, result.id, took_s, is_alone=False, is_known=_is_known(result))
                found.append(result)
        return found

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

    async def _publish_many(
        self, transport: PublishesMany[ReceiptT], events: Sequence[tuple[Event, int]]
    ) -> Sequence[ReceiptT | BullpenError]:
        if tracing.tracer is None:
            return await transport.publish_many(events)
        destination, count = events[0][0].source, len(events)
        outer = tracing.carrier()
        with tracing.sending(*(self.label.lower(), destination, "send"), messaging__batch__message_count=count):
            inner = tracing.carrier()
            # An event with a trace of its own keeps it.
            carried = [
                (replace(event, headers={**event.headers, **inner}), delay_ms)
                if event.headers.get("traceparent") == outer.get("traceparent")
                else (event, delay_ms)
                for event, delay_ms in events
            ]
            return await transport.publish_many(carried)

    async def send(self, event: Event, *, delay: int | timedelta = 0) -> ReceiptT:
        """Send a checked event. A broker that is away or full is tried again until the deadline; the id stays the
        same."""
        return await self._send_one(event, self._delay_ms(delay), is_alone=True)

    async def _send_one(self, event: Event, delay_ms: int, *, is_alone: bool) -> ReceiptT:
        """Alone it has a log line of its own; a batch has one for all."""
        self._must_be_open()
        started = time.monotonic()
        try:
            if tracing.tracer is None:
                receipt = await self._publish(event, delay_ms, started + self._publish_deadline_s)
            else:
                with self._sending(event) as carried:
                    receipt = await self._publish(carried, delay_ms, started + self._publish_deadline_s)
        except Exception as error:  # translated once, whatever the transport was: the cause is chained
            raise self._failed(event, error, is_alone=is_alone) from error
        took_s = time.monotonic() - started
        self._reports.published(event, receipt.id, took_s, is_alone=is_alone, is_known=_is_known(receipt))
        return receipt

    @contextlib.contextmanager
    def _sending(self, event: Event) -> Iterator[Event]:
        """A span of the trace that the event came with; the event that is sent carries it on."""
        with tracing.sending(
            *(self.label.lower(), event.source, "send"),
            event.headers,
            messaging__message__id=event.id or None,
            messaging__message__conversation_id=event.headers.get("correlationId"),
            bullpen__event__name=event.name or None,
            bullpen__event__urn=event.urn,
        ):
            yield replace(event, headers={**event.headers, **tracing.carrier()})

    def _failed(self, event: Event, error: Exception, *, is_alone: bool) -> PublishFailed:
        failure = PublishFailed(event.source, str(error) or type(error).__name__)
        failure.__cause__ = error
        self._reports.publish_failed(event, failure, is_alone=is_alone)
        return failure

    def _delay_ms(self, delay: int | timedelta) -> int:
        delay_ms = to_ms("delay", delay)
        if delay_ms and not self.features.delays:
            raise InvalidOption("delay", f"0, because {self.label} cannot hold messages back", delay)
        return delay_ms

    async def _publish(self, event: Event, delay_ms: int, give_up_at: float) -> ReceiptT:
        patience = Patience(first_s=_SHORTEST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, until=give_up_at)
        before = ""
        while True:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + give_up_at - time.monotonic()):
                    return await self.transport.publish(event, delay_ms=delay_ms)
            except TimeoutError as error:
                text = f"no answer within {self._publish_deadline_s:g} s; it may have arrived{before}"
                raise ConnectionLost(text) from error
            except (ConnectionLost, NotTakenNow) as error:
                before = f" (before that: {error})"
                if not await patience.pause():
                    raise

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
    ) -> _Consumer[ReceiptT]:
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
        consumer = _Consumer(
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


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """One subscription of a consumer."""

    deliveries: Deliveries
    size: int


class _Consumer(Generic[ReceiptT]):
    """Handles the deliveries of one queue. Made by `MessagingClient.consume`."""

    def __init__(
        self,
        client: MessagingClient[ReceiptT],
        queue: str,
        handler: Handler,
        *,
        concurrency: int,
        ordered: bool,
        timeout_ms: int | None,
        reports: MessagingReports,
    ) -> None:
        self._client, self._transport = client, client.transport
        self._queue, self._handler = queue, handler
        self._concurrency, self._ordered = concurrency, ordered
        self._timeout_s = None if timeout_ms is None else timeout_ms / 1000
        self._reports = reports
        self._is_async = is_async(handler)
        self._threads: ThreadPoolExecutor | None = None
        self._life = Lifecycle(f"consumer of {queue!r}", self._begin, self._end)
        self._running: dict[Delivery, asyncio.Task[None]] = {}
        self._streams: list[_Stream] = []
        self._resizing = asyncio.Lock()
        self._is_giving_up = False
        self._close_timeout_s = 30.0
        self._is_hurried = asyncio.Event()
        self.crash: BaseException | None = None
        """Why it ended by itself; None while all is well."""

    @property
    def queue(self) -> str:
        return self._queue

    @property
    def concurrency(self) -> int:
        return self._concurrency

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        return self._life.is_running and self.crash is None

    @property
    def is_receiving(self) -> bool:
        """Whether the broker has let it receive within the last seconds. Closed by its owner, it need not."""
        streams = self._streams if self.is_alive else ()
        receiving = [at() for each in streams if (at := getattr(each.deliveries, "receiving_at", None)) is not None]
        return not receiving or time.monotonic() - max(receiving) < _DEAF_S

    async def start(self) -> None:
        """Begin to receive. Raises what cannot be cured by waiting; a broker that is away is waited for."""
        await self._life.start()

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Take nothing more, let running handlers end, give back what is unfinished after `timeout`.

        A shorter one hurries a close that is under way.
        """
        if timeout is not None:
            self._close_timeout_s = to_ms("timeout", timeout) / 1000
            self._is_hurried.set()
        await self._life.stop()

    async def resize(self, concurrency: int) -> None:
        """Handle so many at the same time from now on, or a few more. More are received through another subscription,
        which is ended again when there are to be fewer; what it has received is handled to its end. Ordered consumers
        and those with threads stay as they are."""
        check_int("concurrency", concurrency, minimum=1)
        require("ordered", not self._ordered and self._is_async, "a consumer without order and threads", self._queue)
        async with self._resizing:
            while len(self._streams) > 1 and self._concurrency - self._streams[-1].size >= concurrency:
                stream = self._streams.pop()
                self._concurrency -= stream.size
                await stream.deliveries.stop()
            if self.is_alive and concurrency > self._concurrency:
                more = concurrency - self._concurrency
                self._concurrency += more
                await self._open(more)

    async def _open(self, size: int) -> None:
        deliveries = await self._transport.deliveries(self._queue, prefetch=size, ordered=self._ordered)
        self._streams.append(stream := _Stream(deliveries, size))
        task = asyncio.create_task(self._receive(stream), name=f"bullpen consumer {self._queue}")
        self._receiving.add(task)
        task.add_done_callback(self._receiving.discard)

    async def _begin(self) -> None:
        self._receiving: set[asyncio.Task[None]] = set()
        if not self._is_async:
            # Not the loop's own threads: there are few of them, and all consumers would share them.
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix=f"bullpen-{self._queue}")
        await self._open(self._concurrency)
        self._reports.consumer_started(self._queue, self._concurrency)

    async def _end(self) -> None:
        """The order of shutdown: take nothing more; wait; cancel what is left, which gives it back; settle."""
        if not hasattr(self, "_receiving"):
            return
        async with self._resizing:  # none may be opened behind our back
            for stream in self._streams:
                await stream.deliveries.stop()
        await self._wait_for_handlers()
        if self._receiving:
            self._is_giving_up = True
            for task in self._running.values():
                task.cancel()
            await asyncio.wait(self._receiving, timeout=_CANCEL_GRACE_S)
            for receiving in [*self._receiving]:
                await end(receiving)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._reports.consumer_stopped(self._queue, None)

    async def _wait_for_handlers(self) -> None:
        """Until all have ended or the time is up, which somebody may shorten meanwhile."""
        began = time.monotonic()
        while self._receiving:
            left_s = began + self._close_timeout_s - time.monotonic()
            if left_s <= 0:
                return
            self._is_hurried.clear()
            hurried = asyncio.create_task(self._is_hurried.wait())
            await asyncio.wait([*self._receiving, hurried], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()

    async def _receive(self, stream: _Stream) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for delivery in stream.deliveries:
                    task = group.create_task(self._handle(delivery))
                    self._running[delivery] = task
            aclose = getattr(stream.deliveries, "aclose", None)
            if stream not in self._streams and aclose is not None:
                # All of it is settled, and the consumer goes on without it.
                with contextlib.suppress(BullpenError):
                    await aclose()
        except ExceptionGroup as errors:  # shown by health and log; nobody awaits this task to hear it
            self.crash = errors.exceptions[0]
            self._reports.consumer_stopped(self._queue, self.crash)

    # ---- one delivery -----------------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        started = time.monotonic()
        self._reports.received(delivery, len(self._running), self._concurrency)
        try:
            outcome = await self._outcome_of(delivery)
            if outcome is None:
                self._reports.lost(delivery, "it is no longer ours")
                return
            settled = await self._transport.settle(delivery, outcome)
            duration_s = time.monotonic() - started
            self._reports.settled(delivery, outcome, settled, duration_s, len(self._running), self._concurrency)
        except DeliveryLost as loss:
            self._reports.lost(delivery, loss.why)
        except BullpenError as error:
            self._reports.lost(delivery, error)
        except Exception as error:  # noqa: BLE001 - a mistake of ours or a driver's costs one delivery, not the consumer
            self._reports.lost(delivery, f"{type(error).__name__}: {error}")
        finally:
            del self._running[delivery]

    async def _outcome_of(self, delivery: Delivery) -> Outcome | None:
        """None: the delivery was lost, and nothing may be settled."""
        try:
            problem = self._client.problem_of(delivery)
        except Exception as error:  # noqa: BLE001 - a schema's own code, or a payload that is too deep for it
            problem = f"the payload cannot be checked: {type(error).__name__}: {str(error)[:200]}"
        if problem is not None:
            return Failed(problem, problem, Cause.BAD_DATA)
        task = asyncio.current_task()
        assert task is not None
        is_handling = True
        # Only the handler is stopped: a settle that is under way must not be torn in half.
        delivery.on_lost(lambda: task.cancel() if is_handling else None)
        try:
            result = await self._run(delivery)
        except asyncio.CancelledError as error:
            if not delivery.is_lost and not self._is_giving_up:
                result = Raised(error)  # the handler's own doing
            else:
                task.uncancel()
                return None if delivery.is_lost else Waiting()
        finally:
            is_handling = False
        return None if delivery.is_lost else self._client.judge(delivery, result)

    async def _run(self, delivery: Delivery) -> Result:
        """The only place that calls user code with a delivery."""
        event = delivery.event
        with tracing.processing(
            *(self._client.label.lower(), event.source, event.id),
            event.headers,
            messaging__message__conversation_id=event.headers.get("correlationId"),
            bullpen__event__name=event.name or None,
            bullpen__event__urn=event.urn,
        ) as span:
            if self._threads is None:
                result = await run_async(self._handler, delivery, self._timeout_s)
            else:
                result = await run_thread(self._threads, self._handler, delivery, self._timeout_s)
            if (failure := failure_in(result)) is not None:
                span.fail(failure)
            return result


def _is_known(receipt: Receipt) -> bool:
    """Nothing was added: the id is that of an earlier event. Receipts are jobs where the broker tracks them."""
    return getattr(receipt, "is_known", False) or getattr(receipt, "added", None) in ("duplicate", "deduplicated")


def _checked_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Absent ids are left out rather than sent as null."""
    kept = {name: value for name, value in (headers or {}).items() if value is not None}
    for name, value in kept.items():
        require(f"headers[{name!r}]", is_text(name) and isinstance(value, str), "text", value)
    return kept

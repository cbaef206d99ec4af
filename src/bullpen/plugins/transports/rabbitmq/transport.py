"""The port over RabbitMQ quorum queues: confirmed publishes, manual acknowledgement, retries through the delay ladder.

A retry is a copy with a higher `x-retry-count`, published to the ladder and confirmed before the original is
acknowledged: a crash in between gives two copies, never none. Nothing is held unacknowledged to delay it.
Elsewhere: queues and ladder (`topology`), connections (`_link`), format (`_messages`), dead letters (`_dead_letters`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Self, assert_never

from aio_pika.abc import AbstractChannel, AbstractIncomingMessage, AbstractMessage, AbstractQueue
from aio_pika.exceptions import ChannelNotFoundEntity

from bullpen._kernel.duration import to_ms
from bullpen._kernel.ending import end
from bullpen._kernel.ids import random_id
from bullpen._kernel.outcome import Completed, Delayed, Failed, Outcome, Retry, Waiting, WaitingChildren
from bullpen._kernel.patience import Patience
from bullpen._kernel.policy import WORKFLOW_EVENT, DeadLetterPolicy
from bullpen.errors import (
    BullpenError,
    ConnectionLost,
    DeliveryLost,
    InvalidOption,
    NotTakenNow,
    ServerRefused,
    require,
)
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.transports._dead_letters import dead_letter_of
from bullpen.plugins.transports.rabbitmq._batch import MOST, OutgoingMessage, send_all
from bullpen.plugins.transports.rabbitmq._dead_letters import RabbitDeadLetters, count
from bullpen.plugins.transports.rabbitmq._link import Link, translated
from bullpen.plugins.transports.rabbitmq._messages import (
    content_of,
    copy_of,
    dead_letter_message,
    delay_left_ms,
    delivery_of,
    message_of,
)
from bullpen.plugins.transports.rabbitmq.topology import QueueSpec, Topology
from bullpen.ports.dead_letters import DeadLetter
from bullpen.ports.transport import Delivery, Depth, Event, Features, Published, Settled, TransportHealth

__all__ = ["RabbitMQTransport"]

LABEL: Final = "RabbitMQ"
_LEAVE_TIMEOUT_S: Final = 1.0
_DEFAULT_EXCHANGE: Final = ""
_BATCHES_UNDER_WAY: Final = 4
"""While the broker writes one to disk, the next are on their way."""


class RabbitMQTransport:
    """Events as messages of quorum queues.

    One connection per process, with a channel for publishing and one per consumer. `separate_connections` gives
    consumers their own: then the broker's flow control, which holds back whoever publishes too fast, cannot hold back
    acknowledgements. `urls` are the nodes of one cluster; when one is away the next is tried.
    """

    label = LABEL
    features = Features(ordered=False, delays=True)

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        topology: Topology | None = None,
        dead_letters: DeadLetterPolicy | None = None,
        separate_connections: bool = False,
        publish_timeout: int = 10_000,
    ) -> None:
        addresses = [urls] if isinstance(urls, str) else list(urls)
        for url in addresses or [""]:
            fits = isinstance(url, str) and url.startswith(("amqp://", "amqps://"))
            require("urls", fits, "addresses that start with amqp:// or amqps://", url)
        self._topology = topology or Topology()
        self._dead_letters = dead_letters or WORKFLOW_EVENT.policy.dead_letters
        self._publish_timeout_s = to_ms("publish_timeout", publish_timeout, minimum=1) / 1000
        self._reports = MessagingReports(LABEL)
        self._link = Link(addresses, self._topology, self._reports, name="bullpen")
        self._consuming = self._link
        if separate_connections:
            self._consuming = Link(addresses, self._topology, self._reports, name="bullpen consumers")
        self._consumers: list[_Consumption] = []
        self._publishing: dict[str, asyncio.Event] = {}

    def spec(self, source: str) -> QueueSpec:
        """The queue of a source."""
        return self._topology.spec(source, dead_letter_queue=self._dead_letters.queue_for(source))

    async def publish(self, event: Event, *, delay_ms: int = 0) -> Published:
        spec = self.spec(event.source)
        event_id = event.id or random_id(event.name)
        named = Event(
            source=event.source,
            urn=event.urn,
            name=event.name,
            payload=event.payload,
            id=event_id,
            headers=event.headers,
            tries=event.tries,
        )
        exchange, key, left_ms = self._route(spec, event.name, delay_ms)
        message = message_of(named, ready_in_ms=delay_ms - left_ms, delay_left_ms=left_ms)
        await self.declare(spec)
        try:
            await self.send(exchange, key, message)
        except NotTakenNow:
            raise
        except ServerRefused:
            self.forget(spec)  # somebody may have deleted it
            raise
        return Published(event_id, event.source)

    def _route(self, spec: QueueSpec, name: str, delay_ms: int) -> tuple[str, str, int]:
        """Exchange, routing key, and what remains of the delay after one way down the ladder."""
        if delay_ms:
            return self._topology.delays.route(spec.name, delay_ms)
        return self._topology.exchange, self._topology.routing_key(spec, name), 0

    async def publish_many(self, events: Sequence[tuple[Event, int]]) -> list[Published | BullpenError]:
        """Each has a confirm of its own; they share writes. What cannot be in a batch goes alone."""
        window = asyncio.Semaphore(_BATCHES_UNDER_WAY)

        async def send(part: Sequence[tuple[Event, int]]) -> list[Published | BullpenError]:
            async with window:
                done = await self._publish_batch(part)
                for number in range(len(part)):
                    if number not in done:
                        done[number] = await self._publish_alone(*part[number])
                return [done[number] for number in range(len(part))]

        parts = (events[at : at + MOST] for at in range(0, len(events), MOST))
        return [result for results in await asyncio.gather(*map(send, parts)) for result in results]

    async def _publish_alone(self, event: Event, delay_ms: int) -> Published | BullpenError:
        try:
            return await self.publish(event, delay_ms=delay_ms)
        except BullpenError as error:
            return error

    async def _publish_batch(self, events: Sequence[tuple[Event, int]]) -> dict[int, Published | BullpenError]:
        """Results by number; those that are missing were not sent."""
        results: dict[int, Published | BullpenError] = {}
        batch: dict[str, tuple[int, OutgoingMessage]] = {}
        for number, (event, delay_ms) in enumerate(events):
            if not event.id or event.id in batch or event.id in self._publishing:
                continue  # the driver matches a returned message with its publish by id
            try:
                spec = self.spec(event.source)
                exchange, key, left_ms = self._route(spec, event.name, delay_ms)
                body, properties = content_of(event, ready_in_ms=delay_ms - left_ms, delay_left_ms=left_ms)
                await self.declare(spec)
            except BullpenError as error:
                results[number] = error
                continue
            batch[event.id] = number, OutgoingMessage(exchange, key, properties, body)
        ended = asyncio.Event()
        self._publishing |= dict.fromkeys(batch, ended)
        try:
            found = await send_all(
                self._link, [outgoing for _, outgoing in batch.values()], timeout_s=self._publish_timeout_s
            )
        finally:
            for event_id in batch:
                del self._publishing[event_id]
            ended.set()
        for (number, _), problem in zip(batch.values(), found or (), strict=found is not None):
            event = events[number][0]
            if isinstance(problem, ServerRefused) and not isinstance(problem, NotTakenNow):
                self.forget(self.spec(event.source))  # somebody may have deleted it
            results[number] = problem or Published(event.id, event.source)
        return results

    async def deliveries(self, source: str, *, prefetch: int, ordered: bool = False) -> _Consumption:
        if ordered:
            raise InvalidOption("ordered", "False: RabbitMQ cannot keep the order of retries", ordered)
        spec = self.spec(source)
        try:
            await self.declare(spec)
        except ConnectionLost:
            pass  # waited for in the background; what waiting does not cure was raised
        consumption = _Consumption(self, self._consuming, spec, prefetch)
        consumption.start()
        self._consumers = [*(each for each in self._consumers if not each.is_closed), consumption]
        return consumption

    async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
        held: _HeldDelivery = delivery.handle
        if delivery.is_lost:
            raise DeliveryLost(delivery.source, delivery.id, "its channel broke")
        settled = Settled()
        try:
            match outcome:
                case Completed():
                    await held.ack()
                case Retry(delay_ms=delay_ms):
                    await self.park(held, delay_ms, failures=delivery.attempt)
                case Delayed(delay_ms):
                    await self.park(held, delay_ms, failures=delivery.attempt - 1)
                case Waiting(pause_ms):
                    await self.park(held, pause_ms, failures=delivery.attempt - 1)
                case Failed():
                    settled = await self._bury(held, delivery, outcome)
                case WaitingChildren():
                    raise InvalidOption("outcome", f"another outcome: {LABEL} cannot wait for other jobs", outcome)
                case _:
                    assert_never(outcome)
        except DeliveryLost:
            raise
        except Exception:
            # What should replace it has no place: the original comes again at once, with its old number, as often as
            # its delivery limit allows.
            await held.give_back()
            raise
        finally:
            held.consumption.forget(delivery)
        return settled

    async def check(self) -> TransportHealth:
        """The broker answers a question that changes nothing."""
        blocked = await self._link.blocked_because()
        if blocked:
            return TransportHealth(False, blocked)
        try:
            await self._link.ask(_answers)
            if self._consuming is not self._link:
                await self._consuming.ask(_answers)
        except BullpenError as error:
            return TransportHealth(False, str(error))
        return TransportHealth(True)

    async def depth(self, source: str) -> Depth:
        """Ready messages, and those that this process holds; what rests in the ladder belongs to no queue yet."""
        await self.declare(self.spec(source))
        ready, consumers = await self._link.ask(partial(count, source))
        held = sum(consumer.held for consumer in self._consumers if consumer.source == source)
        return Depth(ready + held, consumers)

    def dead_letters(self, source: str) -> RabbitDeadLetters:
        spec = self.spec(source)
        if spec.dead_letter_queue is None:
            raise InvalidOption("dead_letters", "a policy that keeps dead letters in a queue", self._dead_letters.store)
        return RabbitDeadLetters(self, self._link, spec)

    async def aclose(self) -> None:
        """What was received and not acknowledged goes back to its queue."""
        await asyncio.gather(*(consumer.aclose() for consumer in self._consumers))
        await self._consuming.aclose()
        await self._link.aclose()

    # ---- what consumers and dead letters need -------------------------------------------------------------------

    async def declare(self, spec: QueueSpec) -> None:
        await self._link.declare(spec.name, self._topology.declarations_of(spec))

    def forget(self, spec: QueueSpec) -> None:
        self._link.forget(spec.name)

    async def send(self, exchange: str, routing_key: str, message: AbstractMessage) -> None:
        """Publish, and wait until the broker has it on disk. A message that no queue takes is an error."""
        message_id = message.message_id or ""
        while message_id in self._publishing:
            # The driver matches a returned message with its publish by id; two at once would be mixed up.
            await self._publishing[message_id].wait()
        ended = self._publishing[message_id] = asyncio.Event()
        try:
            await self._send(exchange, routing_key, message)
        finally:
            del self._publishing[message_id]
            ended.set()

    async def _send_patiently(self, spec: QueueSpec, exchange: str, routing_key: str, message: AbstractMessage) -> None:
        """For what replaces a delivery: giving up puts the original back, and each time counts against its delivery
        limit. A queue that elects a leader takes it a moment later, and what was deleted is made again."""
        patience = Patience(longest_s=1.0, within_s=self._publish_timeout_s)
        while True:
            try:
                await self.declare(spec)
                return await self.send(exchange, routing_key, message)
            except (NotTakenNow, ConnectionLost):
                if not await patience.pause():
                    raise

    async def _send(self, exchange: str, routing_key: str, message: AbstractMessage) -> None:
        with translated():
            try:
                async with self._link.publishing() as channel:
                    to = await channel.get_exchange(exchange, ensure=False) if exchange else channel.default_exchange
                    async with asyncio.timeout(self._publish_timeout_s):
                        await to.publish(message, routing_key, mandatory=True)
            except TimeoutError as error:
                raise await self._link.silent("a publish was not confirmed in time") from error
            except ChannelNotFoundEntity:
                self._link.forget_topology()  # somebody deleted an exchange
                raise

    async def put_dead_letter(self, spec: QueueSpec, letter: DeadLetter) -> None:
        assert spec.letter_key is not None
        await self._send_patiently(
            spec, self._topology.dead_letter_exchange, spec.letter_key, dead_letter_message(letter)
        )

    async def park(self, held: _HeldDelivery, delay_ms: int, *, failures: int) -> None:
        """Publish a copy that arrives after the delay, then acknowledge the original."""
        spec = held.consumption.spec
        exchange, key, left_ms = _DEFAULT_EXCHANGE, spec.name, 0
        if delay_ms:
            exchange, key, left_ms = self._topology.delays.route(spec.name, delay_ms)
        copy = copy_of(held.message, failures=failures, ready_in_ms=delay_ms - left_ms, delay_left_ms=left_ms)
        await self._send_patiently(spec, exchange, key, copy)
        await held.ack()

    async def _bury(self, held: _HeldDelivery, delivery: Delivery, failed: Failed) -> Settled:
        spec = held.consumption.spec
        if spec.dead_letter_queue is None:
            await held.ack()
            return Settled()
        try:
            await self.put_dead_letter(spec, dead_letter_of(delivery, failed))
        except NotTakenNow:
            raise  # it comes again, fails again, and gets its letter then
        except (ServerRefused, InvalidOption) as error:
            # The broker dead-letters it itself, without our context: better a bare letter than none.
            await held.drop()
            return Settled(dead_letter_problem=str(error))
        await held.ack()
        return Settled(dead_letter=spec.dead_letter_queue)


class _HeldDelivery:
    """A message that waits for its acknowledgement."""

    __slots__ = ("channel", "consumption", "message")

    def __init__(self, consumption: _Consumption, channel: AbstractChannel, message: AbstractIncomingMessage) -> None:
        self.consumption, self.channel, self.message = consumption, channel, message

    async def ack(self) -> None:
        """Raises DeliveryLost when its channel broke: the broker delivers it again."""
        async with self._or_lost():
            await self.message.ack()

    async def drop(self) -> None:
        """Let the broker dead-letter it."""
        async with self._or_lost():
            await self.message.reject(requeue=False)

    async def give_back(self) -> bool:
        """Put it back into its queue; False: its channel is gone, and everything went back with it."""
        try:
            async with self._or_lost():
                await self.message.nack(requeue=True)
        except DeliveryLost:
            return False
        return True

    @asynccontextmanager
    async def _or_lost(self) -> AsyncIterator[None]:
        try:
            with translated():
                async with self.consumption.answering(self.channel):
                    yield
        except BullpenError as error:
            raise DeliveryLost(self.consumption.source, self.message.message_id or "", str(error)) from error


class _Consumption:
    """What one consumer receives; resumed on a new channel whenever the old one breaks."""

    def __init__(self, transport: RabbitMQTransport, link: Link, spec: QueueSpec, prefetch: int) -> None:
        self._transport, self._link, self.spec, self._prefetch = transport, link, spec, prefetch
        self._ready: asyncio.Queue[_HeldDelivery | None] = asyncio.Queue()
        self._held: dict[Delivery, _HeldDelivery] = {}
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._channel: AbstractChannel | None = None
        self._crash: Exception | None = None
        self._answers: dict[asyncio.Timeout, AbstractChannel] = {}
        self._is_subscribed = self.is_closed = False
        self._subscribed_until = time.monotonic()

    def receiving_at(self) -> float:
        """When the broker last had our subscription."""
        return time.monotonic() if self._is_subscribed else self._subscribed_until

    @property
    def source(self) -> str:
        return self.spec.name

    @property
    def held(self) -> int:
        """Received and not acknowledged, handed out or not."""
        return len(self._held) + (0 if self._stopping.is_set() else self._ready.qsize())

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"bullpen rabbitmq {self.source}")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while not self._stopping.is_set():
            held = await self._ready.get()
            if self._crash is not None:
                raise self._crash
            if held is None:
                break
            if held.channel is not self._channel:
                continue  # its channel broke before anybody saw it: the broker delivers it again
            left_ms = delay_left_ms(held.message)
            if left_ms:
                await self._send_on(held, left_ms)
                continue
            delivery = delivery_of(held.message, self.source, held)
            self._held[delivery] = held
            return delivery
        raise StopAsyncIteration

    async def stop(self) -> None:
        """Cancel the consumer. What nobody received yet goes back; what was received stays until it is settled."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        while not self._ready.empty():
            held = self._ready.get_nowait()
            if held is not None and not await held.give_back():
                break
        self._ready.put_nowait(None)

    async def aclose(self) -> None:
        await self.stop()
        if self._task is not None:
            if self._channel is not None:
                # It tells the broker that we leave; to cancel it in the middle of that makes the driver warn of it.
                await asyncio.wait([self._task], timeout=_LEAVE_TIMEOUT_S)
            await end(self._task)
        self._lose_all()
        channel, self._channel = self._channel, None
        if channel is not None:
            await self._link.close(channel)
        self.is_closed = True

    def forget(self, delivery: Delivery) -> None:
        self._held.pop(delivery, None)

    async def _run(self) -> None:
        try:
            await self._consume_for_ever()
        except Exception as error:  # noqa: BLE001 - a mistake of ours or the driver's: whoever iterates is told
            self._crash = error
            self._ready.put_nowait(None)

    async def _consume_for_ever(self) -> None:
        while not self._stopping.is_set():
            try:
                with translated():
                    await self._consume_until_broken()
            except (ConnectionLost, NotTakenNow):
                pass  # told by the link, or by whoever publishes
            except ServerRefused as error:
                # Told once by the link as well; somebody may mend the broker's queues or rights.
                self._transport_refused(error)
            if not self._stopping.is_set():
                self._lose_all()
                self._transport.forget(self.spec)  # it may have been deleted under us
                await asyncio.sleep(self._link.pause_s)

    async def _consume_until_broken(self) -> None:
        link = self._link
        connection = await link.connection()
        await self._transport.declare(self.spec)
        channel = await link.open_channel(connection, "consumer")
        broken = asyncio.Event()
        channel.close_callbacks.add(lambda *_: broken.set())
        channel.close_callbacks.add(lambda *_: self._end_answers(channel))
        try:
            queue, tag = await link.whole(self._subscribe(channel, broken))
            self._is_subscribed = True
            await _first(broken.wait(), self._stopping.wait())
            if self._stopping.is_set() and not broken.is_set():
                await link.whole(queue.cancel(tag))
        finally:
            if self._is_subscribed:
                self._is_subscribed, self._subscribed_until = False, time.monotonic()
            if not self._stopping.is_set():
                self._channel = None
                await link.close(channel)

    async def _subscribe(self, channel: AbstractChannel, broken: asyncio.Event) -> tuple[AbstractQueue, str]:
        with translated():
            await channel.set_qos(prefetch_count=self._prefetch)
            underlay = await channel.get_underlay_channel()
            underlay.on_consumer_cancel_callbacks.add(lambda _: broken.set())  # its queue was deleted, or its node left
            self._channel = channel
            queue = await channel.get_queue(self.source, ensure=False)

            async def receive(message: AbstractIncomingMessage) -> None:
                held = _HeldDelivery(self, channel, message)
                if self._stopping.is_set():
                    await held.give_back()  # it was on its way when we cancelled
                else:
                    self._ready.put_nowait(held)

            return queue, await queue.consume(receive)

    @asynccontextmanager
    async def answering(self, channel: AbstractChannel) -> AsyncIterator[None]:
        """Around an acknowledgement: the driver puts it into a queue that nobody empties once the channel is broken,
        and would wait for ever."""
        if channel.is_closed:
            raise ConnectionLost("its channel broke")
        async with asyncio.timeout(None) as limit:
            self._answers[limit] = channel
            try:
                yield
            finally:
                del self._answers[limit]

    def _end_answers(self, channel: AbstractChannel) -> None:
        now = asyncio.get_running_loop().time()
        for limit, on in self._answers.items():
            if on is channel and not limit.expired():
                limit.reschedule(now)

    async def _send_on(self, held: _HeldDelivery, left_ms: int) -> None:
        """A delay longer than the ladder goes round again."""
        failures = delivery_of(held.message, self.source, held).attempt - 1
        try:
            await self._transport.park(held, left_ms, failures=failures)
        except Exception as error:  # noqa: BLE001 - whatever the driver says about it, the others are received
            MessagingReports(LABEL).unhealthy(f"a delayed message cannot be sent on: {error}")
            await held.give_back()

    def _lose_all(self) -> None:
        lost, self._held = self._held, {}
        for delivery in lost:
            delivery.lose()

    def _transport_refused(self, error: ServerRefused) -> None:
        MessagingReports(LABEL).unhealthy(str(error))


async def _answers(channel: AbstractChannel) -> None:
    await channel.set_qos(prefetch_count=1)  # nothing is received on it


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()

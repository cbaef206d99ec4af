"""A transport inside one process: for tests, demos and programs that need no broker yet.

In and out as every transport; nothing survives the process. Events of one urn are delivered in order where that is
asked for, delays and retries run on the loop's clock, and a broker can be stopped and started, so that programs can be
tested against an outage without one. A `MemoryBroker` is shared by the transports of one event loop.
"""

from __future__ import annotations

import asyncio
import bisect
import builtins
import itertools
from typing import Any, Final, Self, Unpack, assert_never

from bullpen._kernel import json
from bullpen._kernel.ids import random_id
from bullpen._kernel.outcome import Completed, Delayed, Failed, Outcome, Retry, Waiting, WaitingChildren
from bullpen._kernel.policy import WORKFLOW_EVENT, DeadLetterPolicy, RetryPolicy
from bullpen.errors import ConnectionLost, DeadLetterNotFound, DeliveryLost, InvalidOption
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.messaging import ClientArguments, MessagingClient
from bullpen.plugins.transports._dead_letters import check_event_edit, dead_letter_of, event_of, who
from bullpen.plugins.transports._encoding import encode_payload
from bullpen.ports.bindings import Binding
from bullpen.ports.dead_letters import (
    ANY,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    LetterPage,
    groups_of,
    page_of,
)
from bullpen.ports.edits import Edit
from bullpen.ports.transport import Delivery, Depth, Event, Features, Published, Settled, TransportHealth

__all__ = ["MemoryBroker", "MemoryClient", "MemoryTransport"]

LABEL: Final = "Memory"


class _Message:
    """One event in the broker, with its place in line."""

    __slots__ = ("attempt", "due_at", "event", "is_redelivered", "number")

    def __init__(self, event: Event, number: int, due_at: float) -> None:
        self.event, self.number, self.due_at = event, number, due_at
        self.attempt = 1
        self.is_redelivered = False


class _SourceMessages:
    """The messages of one source in the order of their arrival, and those who wait for them."""

    def __init__(self) -> None:
        self.waiting: list[_Message] = []
        self.busy: dict[str, int] = {}  # urn -> deliveries in flight
        self.in_flight = 0
        self.paused_until = 0.0
        self.letters: dict[str, DeadLetter] = {}
        self.ids: set[str] = set()
        self.consumers: list[_MemoryDeliveries] = []

    def put(self, message: _Message) -> None:
        """Into its place: a message that comes back stands before all that arrived after it."""
        bisect.insort(self.waiting, message, key=lambda one: one.number)
        self.wake()

    def wake(self) -> None:
        for consumer in self.consumers:
            consumer.wake.set()

    def take(self, now: float, *, ordered: bool) -> _Message | None:
        if now < self.paused_until:
            return None
        blocked: set[str] = set()
        for place, message in enumerate(self.waiting):
            urn = message.event.urn
            if ordered and (urn in self.busy or urn in blocked):
                continue
            if message.due_at > now:
                blocked.add(urn)
                continue
            del self.waiting[place]
            self.busy[urn] = self.busy.get(urn, 0) + 1
            self.in_flight += 1
            return message
        return None

    def release(self, message: _Message) -> None:
        urn = message.event.urn
        self.in_flight -= 1
        self.busy[urn] -= 1
        if not self.busy[urn]:
            del self.busy[urn]

    def next_due(self, now: float) -> float | None:
        """When something becomes due by time alone; None: only somebody's act can change anything."""
        instants = [message.due_at for message in self.waiting if message.due_at > now]
        if self.paused_until > now:
            instants.append(self.paused_until)
        return min(instants, default=None)


class MemoryBroker:
    """Holds the messages. `stop` and `start` play an outage: nothing is lost, everything waits."""

    def __init__(self) -> None:
        self.is_running = True
        self._lines: dict[str, _SourceMessages] = {}
        self._numbers = itertools.count()
        self._transports: list[MemoryTransport] = []

    def line(self, source: str) -> _SourceMessages:
        return self._lines.setdefault(source, _SourceMessages())

    def add(self, event: Event, due_at: float) -> None:
        line = self.line(event.source)
        line.ids.add(event.id)
        line.put(_Message(event, next(self._numbers), due_at))

    def join(self, transport: MemoryTransport) -> None:
        self._transports.append(transport)

    def leave(self, transport: MemoryTransport) -> None:
        if transport in self._transports:
            self._transports.remove(transport)

    def stop(self) -> None:
        """Go away: what is in flight is lost to its consumers and will be delivered again."""
        self.is_running = False
        for transport in self._transports:
            transport.give_back()

    def start(self) -> None:
        self.is_running = True
        for line in self._lines.values():
            line.wake()


class MemoryTransport:
    """The port over a `MemoryBroker`."""

    label = LABEL
    features = Features(ordered=True, delays=True)

    def __init__(self, broker: MemoryBroker | None = None, *, dead_letters: DeadLetterPolicy | None = None) -> None:
        self.broker = broker or MemoryBroker()
        self._dead_letters = dead_letters or WORKFLOW_EVENT.policy.dead_letters
        self._unsettled: dict[Delivery, _Message] = {}
        self._subscriptions: list[_MemoryDeliveries] = []
        self._is_closed = False
        self.broker.join(self)

    async def publish(self, event: Event, *, delay_ms: int = 0) -> Published:
        self._must_reach()
        # Through JSON and back, as every broker does: what cannot travel is refused here too, and nothing is shared.
        payload = json.decode(encode_payload(event))
        event_id = event.id or random_id(event.name)
        is_known = event_id in self.broker.line(event.source).ids
        if not is_known:
            sent = Event(
                source=event.source,
                urn=event.urn,
                name=event.name,
                payload=payload,
                id=event_id,
                headers=dict(event.headers),
                tries=event.tries,
            )
            self.broker.add(sent, _now() + delay_ms / 1000)
        return Published(event_id, event.source, is_known=is_known)

    async def deliveries(self, source: str, *, prefetch: int, ordered: bool = False) -> _MemoryDeliveries:
        subscription = _MemoryDeliveries(self, source, prefetch=prefetch, ordered=ordered)
        self._subscriptions.append(subscription)
        return subscription

    async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
        message = self._unsettled.pop(delivery, None)
        if message is None:
            raise DeliveryLost(delivery.source, delivery.id, "the broker has taken it back")
        line = self.broker.line(delivery.source)
        line.release(message)
        message.is_redelivered = False
        settled = Settled()
        match outcome:
            case Completed():
                line.ids.discard(delivery.id)
            case Retry(delay_ms=delay_ms):
                message.attempt += 1
                self._back(line, message, delay_ms)
            case Delayed(delay_ms):
                self._back(line, message, delay_ms)
            case Waiting(pause_ms):
                line.paused_until = max(line.paused_until, _now() + pause_ms / 1000)
                self._back(line, message, 0)
            case Failed():
                line.ids.discard(delivery.id)
                settled = await self._bury(delivery, outcome)
            case WaitingChildren():
                self._back(line, message, 0)
                raise InvalidOption("outcome", f"another outcome: {LABEL} cannot wait for other jobs", outcome)
            case _:
                assert_never(outcome)
        line.wake()
        return settled

    async def check(self) -> TransportHealth:
        if self._is_closed:
            return TransportHealth(False, "the transport was closed")
        return TransportHealth(self.broker.is_running, "" if self.broker.is_running else "the broker is stopped")

    async def depth(self, source: str) -> Depth:
        line = self.broker.line(source)
        return Depth(len(line.waiting) + line.in_flight, len(line.consumers))

    def dead_letters(self, source: str) -> _MemoryDeadLetters:
        name = self._dead_letters.queue_for(source)
        if name is None:
            raise InvalidOption("dead_letters", "a policy that keeps dead letters in a queue", self._dead_letters.store)
        return _MemoryDeadLetters(self, source, name)

    async def aclose(self) -> None:
        for subscription in self._subscriptions:
            await subscription.stop()
        self.give_back()
        self.broker.leave(self)
        self._is_closed = True

    def give_back(self) -> None:
        """Lose every unsettled delivery, as a process that dies would: they stand in line again."""
        unsettled, self._unsettled = self._unsettled, {}
        for delivery, message in unsettled.items():
            line = self.broker.line(delivery.source)
            line.release(message)
            message.is_redelivered = True
            line.put(message)
            delivery.lose()

    # ---- what deliveries and dead letters need ------------------------------------------------------------------

    def take(self, source: str, *, ordered: bool) -> Delivery | None:
        if not self.broker.is_running:
            return None
        message = self.broker.line(source).take(_now(), ordered=ordered)
        if message is None:
            return None
        event = message.event
        delivery = Delivery(
            event,
            attempt=message.attempt,
            idempotency_key=f"{source}/{event.id}",
            handle=None,
            problem=None if event.urn else "urn: expected non-empty text that names the entity",
            waited_ms=max(0, int((_now() - message.due_at) * 1000)),
            is_redelivered=message.is_redelivered,
        )
        self._unsettled[delivery] = message
        return delivery

    def is_ours(self, delivery: Delivery) -> bool:
        return delivery in self._unsettled

    def _back(self, line: _SourceMessages, message: _Message, delay_ms: int) -> None:
        message.due_at = _now() + delay_ms / 1000
        line.put(message)

    async def _bury(self, delivery: Delivery, failed: Failed) -> Settled:
        name = self._dead_letters.queue_for(delivery.source)
        if name is None:
            return Settled()
        await _MemoryDeadLetters(self, delivery.source, name).put(dead_letter_of(delivery, failed))
        return Settled(dead_letter=name)

    def _must_reach(self) -> None:
        if self._is_closed or not self.broker.is_running:
            raise ConnectionLost("the memory broker is stopped, or this transport was closed")


class _MemoryDeliveries:
    """What one consumer receives."""

    def __init__(self, transport: MemoryTransport, source: str, *, prefetch: int, ordered: bool) -> None:
        self._transport, self._source = transport, source
        self._prefetch, self._ordered = prefetch, ordered
        self._line = transport.broker.line(source)
        self._line.consumers.append(self)
        self._mine: set[Delivery] = set()
        self._is_stopped = False
        self.wake = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while not self._is_stopped:
            self.wake.clear()
            self._mine = {delivery for delivery in self._mine if self._transport.is_ours(delivery)}
            if len(self._mine) < self._prefetch:
                delivery = self._transport.take(self._source, ordered=self._ordered)
                if delivery is not None:
                    self._mine.add(delivery)
                    return delivery
            await self._sleep()
        raise StopAsyncIteration

    async def _sleep(self) -> None:
        try:
            async with asyncio.timeout_at(self._line.next_due(_now())):
                await self.wake.wait()
        except TimeoutError:
            pass  # something is due

    async def stop(self) -> None:
        self._is_stopped = True
        if self in self._line.consumers:
            self._line.consumers.remove(self)
        self.wake.set()


class _MemoryDeadLetters:
    """The dead letters of one source."""

    def __init__(self, transport: MemoryTransport, source: str, name: str) -> None:
        self._transport, self._source, self.name = transport, source, name
        self._letters = transport.broker.line(source).letters

    async def depth(self) -> int:
        return len(self._letters)

    async def put(self, letter: DeadLetter) -> None:
        self._letters.setdefault(letter.id, letter)

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetter]:
        return [*self._letters.values()][start : start + count]

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        return page_of(self._letters.values(), where, after=after, limit=limit)

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        return groups_of(self._letters.values(), self.name, tenant_id=tenant_id, limit=limit)

    async def get(self, entry_id: str) -> DeadLetter | None:
        return self._letters.get(entry_id)

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        return await self._redrive(entry_id, by, None)

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        return await self._redrive(entry_id, by, edit)

    async def _redrive(self, entry_id: str, by: str | None, edit: Edit | None) -> str:
        letter = self._letters.get(entry_id)
        if letter is None:
            raise DeadLetterNotFound(self.name, entry_id)
        by = by or who()
        if edit is not None:
            check_event_edit(self.name, letter, edit)
        await self._transport.publish(event_of(letter, by=by, edit=edit))
        self._letters.pop(entry_id, None)
        MessagingReports(LABEL).redriven(letter, self.name, by)
        return letter.message_id

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        return self._letters.pop(entry_id, None) is not None


class MemoryClient(MessagingClient[Published]):
    """A messaging client inside one process."""

    def __init__(
        self,
        broker: MemoryBroker | None = None,
        *,
        policy: RetryPolicy = WORKFLOW_EVENT.policy,
        **options: Unpack[ClientArguments],
    ) -> None:
        """`options` are those of `MessagingClient`."""
        policy = policy.over(WORKFLOW_EVENT.policy)
        transport = MemoryTransport(broker, dead_letters=policy.dead_letters)
        super().__init__(transport, policy=policy, **options)

    @classmethod
    def from_binding(
        cls, binding: Binding[Any], *, broker: MemoryBroker | None = None, **options: Unpack[ClientArguments]
    ) -> MemoryClient:
        """The client for any workflow, whatever transport its binding names: for tests."""
        return cls(broker, policy=binding.policy(), **options)


def _now() -> float:
    return asyncio.get_running_loop().time()

"""The port over BullMQ queues: an event is a job, its retry is the queue's own, its dead letter a job of `{queue}-dlq`.

In: events. Out: jobs whose data is `{"urn", "payload"}`, so that Node services can produce and consume them. Locks,
stalls, batching and shutdown are those of a `Taker`. Elsewhere: that (`bullpen.worker`), the policy
(`bullpen.plugins.messaging`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, Self, Unpack, cast

import msgspec

from bullpen._kernel.backoff import CustomBackoff
from bullpen._kernel.duration import is_text, to_ms
from bullpen._kernel.outcome import Delayed, Failed, Outcome, Retry, Waiting
from bullpen._kernel.policy import WORKFLOW_EVENT, DeadLetterPolicy, RetryPolicy
from bullpen._kernel.rates import RateLimit
from bullpen.errors import ConnectionLost, DeadLetterNotFound, DeliveryLost, JobLockLost, require
from bullpen.plugins._reports import MessagingReports
from bullpen.plugins.messaging import ClientArguments, MessagingClient
from bullpen.plugins.transports._dead_letters import check_event_edit, who
from bullpen.ports.bindings import BullMQ, RedisAddress
from bullpen.ports.dead_letters import DeadLetter, PassedDeadLetters
from bullpen.ports.edits import Edit
from bullpen.ports.transport import KEY_HEADER, Delivery, Depth, Event, Features, Settled, TransportHealth, Tries
from bullpen.queue import Job, Queue
from bullpen.queue.arguments import JobDefaults
from bullpen.queue.dead_letters.operations import DeadLetters
from bullpen.redis import Connection, connection_for
from bullpen.wire.options import DEFAULT_OPTIONS, make_options
from bullpen.worker import Taker
from bullpen.worker.options import WorkerArguments

__all__ = ["BullMQClient", "BullMQTransport"]

LABEL: Final = "BullMQ"
_OPTIONS: Final = frozenset(
    {"at", "durability", "keep_logs", "lifo", "priority", "remove_on_complete", "remove_on_fail", "urgency"}
)
_WORKER_OPTIONS: Final = frozenset(WorkerArguments.__annotations__) - {"policy", "concurrency"}  # the client's own
_LONGER_THAN_ANY_CLOSE: Final = timedelta(days=1)


class BullMQTransport:
    """Events as jobs. One connection, and one queue object per queue, serve everything."""

    label = LABEL
    features = Features(ordered=True, delays=True, stores_tries=True, results=True, children=True, options=_OPTIONS)

    def __init__(
        self,
        connection: str | RedisAddress | Connection | None = None,
        *,
        prefix: str | None = None,
        tries: Tries | None = None,
        job_options: JobDefaults | None = None,
        dead_letters: DeadLetterPolicy | None = None,
        add_deadline: int | timedelta = 30_000,
        limit_of: Callable[[str], RateLimit | None] = lambda source: None,
        worker_options: WorkerArguments | None = None,
    ) -> None:
        """`tries` and `job_options` hold for every event that does not say otherwise; `limit_of` a queue is that of its
        worker; `worker_options` are those of `Worker`."""
        self.connection = connection_for(_dial(connection) if isinstance(connection, RedisAddress) else connection)
        self._owns_connection = not isinstance(connection, Connection)
        self._prefix = prefix
        preset = WORKFLOW_EVENT
        self._tries = tries or Tries(preset.policy.attempts, preset.policy.backoff)
        self._job_options: JobDefaults = {
            "remove_on_complete": preset.keep_completed,
            "remove_on_fail": preset.keep_failed,
            **(job_options or {}),
        }
        make_options(DEFAULT_OPTIONS, **self._job_options, **_tries_as_options(self._tries))  # refused now, not later
        self._dead_letters = dead_letters or preset.policy.dead_letters
        self._add_deadline_ms = to_ms("add_deadline", add_deadline, minimum=1)
        self._limit_of, self._worker_options = limit_of, worker_options or {}
        for name in self._worker_options:
            require("worker_options", name in _WORKER_OPTIONS, "options of Worker", name)
        self._queues: dict[str, Queue] = {}
        self._consumers: list[_JobDeliveries] = []
        self._is_closed = False

    def queue(self, name: str) -> Queue:
        """The queue of this name, made on first use and kept."""
        if self._is_closed:
            raise ConnectionLost("this BullMQ transport was closed")
        known = self._queues.get(name)
        if known is None:
            known = self._queues[name] = Queue(
                name,
                connection=self.connection,
                prefix=self._prefix,
                add_deadline=self._add_deadline_ms,
                dead_letter_suffix=self._suffix_for(name) or "-dlq",
                **self._job_options,
                **_tries_as_options(self._tries),
            )
        return known

    async def publish(self, event: Event, *, delay_ms: int = 0) -> Job:
        data: dict[str, Any] = {"urn": event.urn}
        if event.payload is not None:
            data["payload"] = event.payload
        options = {**event.options, "job_id": event.id or None}
        if delay_ms:
            options["delay"] = delay_ms
        if event.tries is not None:
            options.update(_tries_as_options(event.tries))
        if event.headers:
            options["tm"] = msgspec.json.encode(dict(event.headers)).decode()
        return await self.queue(event.source).add(event.name or event.source, data, **options)

    async def deliveries(self, source: str, *, prefetch: int, ordered: bool = False) -> _JobDeliveries:
        queue = self.queue(source)
        if ordered:
            # One job of the queue at a time, over all workers of all clients: the strongest order there is.
            await queue.set_global_concurrency(1)
        suffix = self._suffix_for(source)
        letters = replace(self._dead_letters, suffix=suffix, name=None) if suffix else self._dead_letters
        arguments: WorkerArguments = {
            "limit": self._limit_of(source),
            **self._worker_options,
            "policy": RetryPolicy(dead_letters=letters),
            "concurrency": 1 if ordered else prefetch,
        }
        consumer = _JobDeliveries(
            *(queue, self.connection, self._prefix, arguments),
            ordered=ordered,
            dead_letters=letters.queue_for(source),
        )
        await consumer.taker.start()
        self._consumers = [*(each for each in self._consumers if not each.is_closed), consumer]
        return consumer

    @property
    def workers(self) -> tuple[Taker, ...]:
        """Those that take jobs for its consumers: an app counts and checks them like its own."""
        return tuple(consumer.taker for consumer in self._consumers)

    async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
        consumer: _JobDeliveries = delivery.handle[0]
        return await consumer.settle(delivery, outcome)

    async def check(self) -> TransportHealth:
        key = next((queue.keys.base for queue in self._queues.values()), None)  # on a cluster: the server we use
        try:
            await self.connection.shared_door(key).call("PING")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            return TransportHealth(False, str(error) or type(error).__name__)
        return TransportHealth(True)

    async def depth(self, source: str) -> Depth:
        queue = self.queue(source)
        counts = await queue.counts()
        workers = await queue.workers()
        return Depth(counts.pending + counts.active, None if workers is None else len(workers))

    def dead_letters(self, source: str) -> _JobDeadLetters:
        require(
            "dead_letters", self._suffix_for(source) is not None, "a policy that keeps dead letters in a queue", source
        )
        return _JobDeadLetters(self.queue(source).dead_letters)

    async def aclose(self) -> None:
        """Jobs that were handed out and not settled go back to the front of the line, with no attempt counted."""
        self._is_closed = True
        await asyncio.gather(*(consumer.aclose() for consumer in self._consumers))
        for queue in self._queues.values():
            await queue.close()
        if self._owns_connection:
            await self.connection.aclose()

    def _suffix_for(self, source: str) -> str | None:
        """What follows the queue's name in that of its dead letters; None: they stay in the failed set."""
        name = self._dead_letters.queue_for(source)
        if name is None:
            return None
        fits = name.startswith(source) and len(name) > len(source)
        require("dead_letters.name", fits, f"a name that begins with {source!r}, the queue's name", name)
        return name[len(source) :]


class _JobDeliveries:
    """What one taker takes, as deliveries."""

    def __init__(
        self,
        queue: Queue,
        connection: Connection,
        prefix: str | None,
        options: WorkerArguments,
        *,
        ordered: bool,
        dead_letters: str | None,
    ) -> None:
        self.taker = Taker(
            queue.name, connection=connection, prefix=prefix, ahead=True, on_lost=self._on_lost, **options
        )
        self._queue, self._connection = queue, connection
        self._ordered, self._dead_letter_queue = ordered, dead_letters
        self._handed: dict[Job, Delivery] = {}
        self.is_closed = False
        self._closing: asyncio.Task[None] | None = None
        self._ready_at = time.monotonic()

    def receiving_at(self) -> float:
        """When the taker was last seen to consume."""
        if self.taker.is_ready:
            self._ready_at = time.monotonic()
        return self._ready_at

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        job = await anext(self.taker)
        delivery = self._handed[job] = _delivery_of(job, self)
        return delivery

    async def stop(self) -> None:
        """What was taken and nobody received goes back; what was received stays until it is settled."""
        if self._closing is None:
            self.taker.hand_out_no_more()
            self._closing = asyncio.create_task(self.taker.close(_LONGER_THAN_ANY_CLOSE))
            await asyncio.sleep(0)  # it has begun: a hurried close that follows must find it under way

    async def aclose(self) -> None:
        await self.taker.close(0)
        if self._closing is not None:
            await self._closing
        self.is_closed = True

    async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
        job: Job = delivery.handle[1]
        if delivery.is_lost or self._handed.pop(job, None) is None:
            raise DeliveryLost(delivery.source, delivery.id, "its lock expired, or it was given back")
        if self._ordered:
            outcome = await self._in_turn(outcome)
        if isinstance(outcome, Retry | Failed):
            outcome = replace(outcome, is_logged=True)  # by the client
        try:
            await self.taker.settle(job, outcome)
        except JobLockLost as error:
            delivery.lose()
            raise DeliveryLost(delivery.source, delivery.id, str(error)) from None
        if isinstance(outcome, Failed):
            return Settled(dead_letter=self._dead_letter_queue, is_told=True)
        return Settled()

    async def _in_turn(self, outcome: Outcome) -> Outcome:
        """Nothing may overtake a job that comes back: the whole queue pauses, and the job stands in front."""
        match outcome:
            case Retry(delay_ms=delay_ms):
                if delay_ms:
                    await self._queue.rate_limit(delay_ms)
                return replace(outcome, delay_ms=0, keeps_turn=True)
            case Delayed(delay_ms):
                return Waiting(delay_ms)
        return outcome

    def now_ms(self) -> int:
        """The server's time."""
        return self._connection.clock.now_ms()

    def _on_lost(self, job: Job) -> None:
        delivery = self._handed.pop(job, None)
        if delivery is not None:
            delivery.lose()


def _delivery_of(job: Job, consumer: _JobDeliveries) -> Delivery:
    data: Any = job.data
    urn: Any = data.get("urn") if isinstance(data, dict) else None
    event = Event(
        source=job.queue_name,
        urn=urn if is_text(urn) else "",
        name=job.name,
        payload=data.get("payload") if isinstance(data, dict) else None,
        id=job.id,
        headers=_headers_of(job.opts.tm),
        tries=Tries(job.opts.attempts, job.opts.backoff),
    )
    is_first = job.attempts_made == 0 and job.stalled_count == 0
    # With a key of its sender the id tells the event, also when an earlier job of it has left Redis. Other ids may come
    # from a counter that starts again; there the job's time tells two events apart.
    is_keyed = KEY_HEADER in event.headers and not event.id.isdecimal()
    return Delivery(
        event,
        attempt=job.attempts_made + 1,
        idempotency_key=f"{event.source}/{event.id}" if is_keyed else job.idempotency_key,
        handle=(consumer, job),
        problem=None if is_text(urn) else "data.urn: expected non-empty text that names the entity",
        waited_ms=_waited_ms(job, consumer) if is_first else None,
        is_redelivered=job.stalled_count > 0,
    )


def _waited_ms(job: Job, consumer: _JobDeliveries) -> int:
    return max(0, consumer.now_ms() - job.record.due_ms)


def _headers_of(carried: str | None) -> dict[str, str]:
    if carried is None:
        return {}
    with suppress(msgspec.DecodeError, msgspec.ValidationError):
        return msgspec.json.decode(carried, type=dict[str, str])
    return {}


def _dial(address: RedisAddress) -> Connection:
    return Connection(host=address.host, port=address.port, db=address.db, password=address.password, tls=address.tls)


def _tries_as_options(tries: Tries) -> dict[str, Any]:
    require("backoff", not isinstance(tries.backoff, CustomBackoff), "a known backoff", tries.backoff)
    return {"attempts": tries.attempts, "backoff": tries.backoff}


class _JobDeadLetters(PassedDeadLetters):
    """The dead letters of one queue; redriving one is told as by every transport."""

    def __init__(self, letters: DeadLetters) -> None:
        super().__init__(letters)
        self._letters = letters

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        found, by = await self._find(entry_id), by or who()
        job_id = await self._letters.redrive(entry_id, by=by)
        MessagingReports(LABEL).redriven(found, self.name, by)
        return job_id

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        found, by = await self._find(entry_id), by or who()
        check_event_edit(self.name, found, edit)
        job_id = await self._letters.redrive_edited(entry_id, edit, by=by)
        MessagingReports(LABEL).redriven(found, self.name, by)
        return job_id

    async def _find(self, entry_id: str) -> DeadLetter:
        found = await self._letters.get(entry_id)
        if found is None:
            raise DeadLetterNotFound(self.name, entry_id)
        return found


class BullMQClient(MessagingClient[Job]):
    """A messaging client on BullMQ queues. `produce` returns the `Job`, which can be tracked.

    `job_options` hold for every job that does not say otherwise: `remove_on_complete` (1000), `remove_on_fail` (5000),
    `keep_logs`, … Attempts, backoff and dead letters come from the policy.
    """

    def __init__(
        self,
        connection: str | RedisAddress | Connection | None = None,
        *,
        prefix: str | None = None,
        policy: RetryPolicy = WORKFLOW_EVENT.policy,
        job_options: JobDefaults | None = None,
        worker_options: WorkerArguments | None = None,
        limit_of: Callable[[str], RateLimit | None] = lambda source: None,
        **options: Unpack[ClientArguments],
    ) -> None:
        """`worker_options` are those of `Worker`, `options` those of `MessagingClient`."""
        policy = policy.over(WORKFLOW_EVENT.policy)
        transport = BullMQTransport(
            connection,
            prefix=prefix,
            tries=Tries(policy.job_attempts, policy.backoff),
            job_options=job_options,
            dead_letters=policy.dead_letters,
            add_deadline=options.get("publish_deadline", 30_000),
            limit_of=limit_of,
            worker_options=worker_options,
        )
        super().__init__(transport, policy=policy, **options)

    @classmethod
    def from_binding(
        cls,
        binding: BullMQ[Any],
        *,
        connection: str | Connection | None = None,
        worker_options: WorkerArguments | None = None,
        prefix: str | None = None,
        **options: Unpack[ClientArguments],
    ) -> BullMQClient:
        """The client that a workflow's `bullmq` describes. `connection` is used where the binding names none."""
        job_options: JobDefaults = {
            "remove_on_complete": binding.default_job_options.remove_on_complete,
            "remove_on_fail": binding.default_job_options.remove_on_fail,
        }
        return cls(
            connection if binding.connection is None else binding.connection,
            policy=binding.policy(),
            job_options=job_options,
            limit_of=binding.rate_limit_of,
            worker_options=cast("WorkerArguments", {**binding.worker_options, **(worker_options or {})}),
            prefix=prefix,
            **options,
        )

    def queue(self, name: str) -> Queue:
        """The queue behind this client, for everything that only BullMQ can do."""
        assert isinstance(self.transport, BullMQTransport)
        return self.transport.queue(name)

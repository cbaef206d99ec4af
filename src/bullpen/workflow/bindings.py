"""Let the events of a transport drive a workflow: one consumer per source, dispatched by job name.

In: a binding (which source causes which event), a messaging client, and the workflow's `emit`. Out: every delivery
emitted and awaited; what `emit` raises goes back to the client, whose policy decides about a retry. With a batch size,
events of one kind that wait for one entity are handed on together.
Elsewhere: what a binding may say (`bullpen.ports.bindings`), what an event does (`engine`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import Failed, Raised
from bullpen.errors import JobSignal, PermanentError
from bullpen.ports.bindings import Binding, BindingRoute
from bullpen.ports.messaging import Consumer, Messaging
from bullpen.ports.transport import KEY_HEADER, Delivery
from bullpen.workflow.context import Trigger, log_fields

__all__ = ["EventConsumers", "trigger_of"]

E = TypeVar("E")

logger = get_logger("bullpen.workflow")

_GIVEN_BACK: Final = (asyncio.CancelledError, JobSignal)
"""Nothing has failed: a consumer closes, or the event is to come again later."""

Emit = Callable[[E, str, Any], Awaitable[Any]]
"""`emit(event, urn, payload)`."""
Apply = Callable[[E, str, Any, Trigger], Awaitable[Any]]
"""As `Emit`, with what caused the event."""
ApplyBatch = Callable[[E, str, Sequence[tuple[Any, Trigger]]], Awaitable[Sequence[Exception | None]]]
"""Payloads and causes of several events of one kind; one result each."""


def trigger_of(delivery: Delivery, client: Messaging[Any]) -> Trigger:
    """What a workflow needs to know about a delivery."""
    return Trigger(
        # What the sender said, so that it is the same event on every way; else what the transport knows it by.
        key=delivery.headers.get(KEY_HEADER) or delivery.idempotency_key,
        headers=delivery.headers,
        job_id=delivery.id,
        queue=delivery.source,
        attempt=delivery.attempt,
        may_be_repeated=(delivery.is_redelivered or delivery.attempt > 1 or not client.features.marks_redelivered),
        # Not by counting attempts here: whoever decides about the retry is asked.
        is_final=lambda error: isinstance(client.judge(delivery, Raised(error)), Failed),
    )


class EventConsumers(Generic[E]):
    """The consumers of one workflow."""

    def __init__(
        self,
        binding: Binding[E] | None,
        client: Messaging[Any] | None,
        emit: Emit[E] | None = None,
        *,
        apply: Apply[E] | None = None,
        apply_batch: ApplyBatch[E] | None = None,
        label: str | None = None,
    ) -> None:
        """`label` names the transport in log lines when there is no binding. `apply` is asked instead of `emit` by
        those who want to know the cause, `apply_batch` for sources with a batch size."""
        self._binding, self._client = binding, client
        self._emit, self._apply, self._apply_batch = emit, apply, apply_batch
        self._label = binding.label if binding is not None else label or "BullMQ"
        self._consumers: list[Consumer] = []
        self.problem: str | None = None
        """Why a workflow that should consume does not; for the health check."""

    @property
    def is_healthy(self) -> bool:
        return self.problem is None and all(consumer.is_alive for consumer in self._consumers)

    @property
    def running(self) -> int:
        """Deliveries being handled now."""
        return sum(consumer.running for consumer in self._consumers)

    async def start(self) -> None:
        """Start one consumer per source. Sources that share a queue share its consumer: two would compete."""
        routes = self._binding.routes() if self._binding is not None else {}
        if not routes or self._binding is None:
            logger.info("No %s events defined.", self._label)
            return
        if self._client is None:
            self.problem = f"{self._label} client not available, skipping worker initialization."
            logger.warning("%s", self.problem)
            return
        for source, route in routes.items():
            batch_size = self._binding.batch_size_of(source) if self._apply_batch is not None else 1
            consumer = await self._client.consume(
                source,
                self._handler(route, self._client, batch_size),
                concurrency=max(self._binding.concurrency_of(source), batch_size),
                ordered=self._binding.ordered,
            )
            self._consumers.append(consumer)
            logger.info("Initialized %s worker for queue: %s", self._label, source, extra={"queue": source})

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop consuming; the client stays open, it may serve others."""
        await asyncio.gather(*(consumer.close(timeout) for consumer in self._consumers))

    def _handler(
        self, route: BindingRoute[E], client: Messaging[Any], batch_size: int
    ) -> Callable[[Delivery], Awaitable[None]]:
        gathered = None
        if batch_size > 1 and self._apply_batch is not None:
            gathered = _Gathering(self._apply_batch, batch_size)

        async def handle(delivery: Delivery) -> None:
            trigger = trigger_of(delivery, client)
            fields = log_fields(delivery.urn, trigger)
            # At a level below what the client says of the same: one line for each thing that happens.
            logger.debug("%s job received", self._label, extra=fields)
            try:
                event = route.event_for(delivery.name)
                if gathered is not None:
                    await gathered.add(event, delivery.urn, delivery.payload, trigger)
                elif self._apply is not None:
                    await self._apply(event, delivery.urn, delivery.payload, trigger)
                elif self._emit is not None:
                    await self._emit(event, delivery.urn, delivery.payload)
            except BaseException as error:
                if isinstance(error, _GIVEN_BACK) and not isinstance(error, PermanentError):
                    why = str(error) or "it was interrupted"
                    logger.info("%s job goes back to its queue: %s", self._label, why, extra=fields)
                else:
                    reason = str(error)
                    logger.debug("%s job processing failed: %s", self._label, reason, extra={**fields, "error": reason})
                raise
            logger.debug("%s job processed successfully", self._label, extra=fields)

        return handle


class _Waiting:
    """One event that waits to be handed on with others."""

    def __init__(self, payload: Any, trigger: Trigger) -> None:
        self.payload, self.trigger = payload, trigger
        self.result: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()


class _Gathering(Generic[E]):
    """Hands on together what has gathered while the batch before was under way. Never waits for a batch to fill."""

    def __init__(self, apply: ApplyBatch[E], size: int) -> None:
        self._apply, self._size = apply, size
        self._lines: dict[tuple[E, str], list[_Waiting]] = {}
        self._turns: dict[tuple[E, str], asyncio.Lock] = {}

    async def add(self, event: E, urn: str, payload: Any, trigger: Trigger) -> None:
        place, mine = (event, urn), _Waiting(payload, trigger)
        line, turn = self._lines.setdefault(place, []), self._turns.setdefault(place, asyncio.Lock())
        line.append(mine)
        try:
            async with turn:
                if not mine.result.done():
                    await self._hand_on(event, urn, line)
        finally:
            if mine in line:
                line.remove(mine)  # cancelled before its turn
            if not line and not turn.locked():
                self._lines.pop(place, None)
                self._turns.pop(place, None)
        error = mine.result.result()
        if error is not None:
            raise error

    async def _hand_on(self, event: E, urn: str, line: list[_Waiting]) -> None:
        batch = line[: self._size]
        # They stay in line until they are done: if this task is cancelled, the next one takes them along.
        results = await self._apply(event, urn, [(each.payload, each.trigger) for each in batch])
        for each, result in zip(batch, results, strict=True):
            if not each.result.done():
                each.result.set_result(result)
            if each in line:
                line.remove(each)

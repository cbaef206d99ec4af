"""Handle the deliveries of one queue: receive, run the handler, judge, settle, report.

In: a transport, a handler, and rules that judge. Out: every delivery settled, or lost and delivered again. The life of
one delivery is `MessagingConsumer._handle`. Elsewhere: what an outcome means to a broker
(`bullpen.plugins.transports`), calling user code (`bullpen._kernel.execute`), judging (`messaging`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from bullpen._kernel import tracing
from bullpen._kernel.duration import check_int
from bullpen._kernel.ending import end
from bullpen._kernel.execute import is_async, run_async, run_thread
from bullpen._kernel.outcome import Cause, Failed, Outcome, Raised, Result, Waiting, failure_in
from bullpen._kernel.service import BaseService
from bullpen.errors import BullpenError, DeliveryLost, require
from bullpen.plugins._reports import MessagingReports
from bullpen.ports.messaging import Handler
from bullpen.ports.transport import Deliveries, Delivery, Receipt, Transport

__all__ = ["DeliveryRules", "MessagingConsumer"]

ReceiptT = TypeVar("ReceiptT", bound=Receipt)

_CANCEL_GRACE_S: Final = 0.5
_DEAF_S: Final = 5.0
"""A consumer that lost its subscription gets it back within this, or the process is not ready."""


class DeliveryRules(Protocol):
    """What a consumer is told about deliveries."""

    def problem_of(self, delivery: Delivery) -> str | None:
        """Why it must fail without being handled."""
        ...

    def judge(self, delivery: Delivery, result: Result) -> Outcome:
        """The outcome of one attempt."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _OpenSubscription:
    deliveries: Deliveries
    size: int


class MessagingConsumer(BaseService, Generic[ReceiptT]):
    """Handles the deliveries of one queue until closed. Made by `MessagingClient.consume`.

    The order of its end: take nothing more; wait for running handlers, as long as the close may take; cancel what is
    left, which gives it back; settle.
    """

    def __init__(
        self,
        transport: Transport[ReceiptT],
        rules: DeliveryRules,
        queue: str,
        handler: Handler,
        *,
        concurrency: int,
        ordered: bool,
        timeout_ms: int | None,
        reports: MessagingReports,
    ) -> None:
        super().__init__(f"consumer of {queue!r}", close_timeout=30_000)
        self._transport, self._rules = transport, rules
        self._queue, self._handler = queue, handler
        self._concurrency, self._ordered = concurrency, ordered
        self._timeout_s = None if timeout_ms is None else timeout_ms / 1000
        self._reports = reports
        self._is_async = is_async(handler)
        self._threads: ThreadPoolExecutor | None = None
        self._running: dict[Delivery, asyncio.Task[None]] = {}
        self._subscriptions: list[_OpenSubscription] = []
        self._resizing = asyncio.Lock()
        self._is_giving_up = False

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
        return self.is_running

    @property
    def is_receiving(self) -> bool:
        """Whether the broker has let it receive within the last seconds. Closed by its owner, it need not."""
        opened = self._subscriptions if self.is_alive else ()
        receiving = [at() for each in opened if (at := getattr(each.deliveries, "receiving_at", None)) is not None]
        return not receiving or time.monotonic() - max(receiving) < _DEAF_S

    async def resize(self, concurrency: int) -> None:
        """Handle so many at the same time from now on, or a few more. More are received through another subscription,
        which is ended again when there are to be fewer; what it has received is handled to its end. Ordered consumers
        and those with threads stay as they are."""
        check_int("concurrency", concurrency, minimum=1)
        require(
            "ordered",
            not self._ordered and self._is_async,
            "a consumer that is not ordered and uses no threads",
            self._queue,
        )
        async with self._resizing:
            while len(self._subscriptions) > 1 and self._concurrency - self._subscriptions[-1].size >= concurrency:
                last = self._subscriptions.pop()
                self._concurrency -= last.size
                await last.deliveries.stop()
            if self.is_alive and concurrency > self._concurrency:
                more = concurrency - self._concurrency
                self._concurrency += more
                await self._open(more)

    async def _begin(self) -> None:
        """Begin to receive. Raises what cannot be cured by waiting; a broker that is away is waited for."""
        if not self._is_async:
            # Not the loop's own threads: there are few of them, and all consumers would share them.
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix=f"bullpen-{self._queue}")
        await self._open(self._concurrency)
        self._reports.consumer_started(self._queue, self._concurrency)

    async def _open(self, size: int) -> None:
        deliveries = await self._transport.deliveries(self._queue, prefetch=size, ordered=self._ordered)
        self._subscriptions.append(subscription := _OpenSubscription(deliveries, size))
        self._spawn(self._receive(subscription))

    async def _end(self) -> None:
        if not self._subscriptions:
            return
        async with self._resizing:  # none may be opened behind our back
            for subscription in self._subscriptions:
                await subscription.deliveries.stop()
        await self._let_end(self._tasks)
        if receiving := [*self._tasks]:
            self._is_giving_up = True
            for task in self._running.values():
                task.cancel()
            await asyncio.wait(receiving, timeout=_CANCEL_GRACE_S)
            await end(*receiving)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self.crash is None:  # else it was reported when it came
            self._reports.consumer_stopped(self._queue, None)

    def _report_crash(self, error: BaseException) -> None:
        self._reports.consumer_stopped(self._queue, error)

    async def _receive(self, subscription: _OpenSubscription) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                async for delivery in subscription.deliveries:
                    self._running[delivery] = group.create_task(self._handle(delivery))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        aclose = getattr(subscription.deliveries, "aclose", None)
        if subscription not in self._subscriptions and aclose is not None:
            # All of it is settled, and the consumer goes on without it.
            with contextlib.suppress(BullpenError):
                await aclose()

    # ---- one delivery -----------------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        started = time.monotonic()
        self._reports.received(delivery, len(self._running), self._concurrency)
        try:
            outcome = await self._outcome_of(delivery)
            if outcome is None:
                self._reports.lost(delivery, "its claim has expired")
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
            problem = self._rules.problem_of(delivery)
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
        return None if delivery.is_lost else self._rules.judge(delivery, result)

    async def _run(self, delivery: Delivery) -> Result:
        """The only place that calls user code with a delivery."""
        event = delivery.event
        with tracing.processing(
            *(self._transport.label.lower(), event.source, event.id),
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

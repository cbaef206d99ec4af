"""Hand events to a transport until it has them, or the time is up.

In: checked events, each with its delay. Out: a receipt for each, or why it was not taken. A broker that is away or full
is tried again until the deadline, with the same id. Elsewhere: making and checking events (`messaging`), what travels
(`bullpen.plugins.transports`), what is logged (`_reports`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, Generic, TypeVar

from bullpen._kernel import tracing
from bullpen._kernel.patience import Patience
from bullpen.errors import BullpenError, ConnectionLost, NotTakenNow, PublishFailed
from bullpen.plugins._reports import MessagingReports
from bullpen.ports.transport import Event, PublishesMany, Receipt, Transport

__all__ = ["Publisher"]

ReceiptT = TypeVar("ReceiptT", bound=Receipt)

_MOST_IN_FLIGHT: Final = 500
"""Publishes of one batch that wait for the broker at the same time."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Publisher(Generic[ReceiptT]):
    """Publishes for one client."""

    def __init__(self, transport: Transport[ReceiptT], reports: MessagingReports, deadline_s: float) -> None:
        self._transport, self._reports, self._deadline_s = transport, reports, deadline_s

    async def send(self, event: Event, delay_ms: int, *, is_alone: bool = True) -> ReceiptT:
        """Alone it has a log line of its own; a batch has one for all. Raises PublishFailed."""
        started = time.monotonic()
        try:
            if tracing.tracer is None:
                receipt = await self._publish(event, delay_ms, started + self._deadline_s)
            else:
                with self._span(event) as carried:
                    receipt = await self._publish(carried, delay_ms, started + self._deadline_s)
        except Exception as error:  # translated once, whatever the transport was: the cause is chained
            raise self._failed(event, error, is_alone=is_alone) from error
        took_s = time.monotonic() - started
        self._reports.published(event, receipt.id, took_s, is_alone=is_alone, is_known=_is_known(receipt))
        return receipt

    async def send_many(self, queue: str, events: Sequence[tuple[Event, int]]) -> list[ReceiptT | PublishFailed]:
        """One result per event, in order."""
        found: list[ReceiptT | PublishFailed | None] = [None] * len(events)
        if len(events) > 1 and isinstance(self._transport, PublishesMany):
            found = await self._send_batch(self._transport, events)
        window, is_alone = asyncio.Semaphore(_MOST_IN_FLIGHT), len(events) == 1

        async def send(number: int) -> None:
            async with window:
                try:
                    found[number] = await self.send(*events[number], is_alone=is_alone)
                except PublishFailed as failure:
                    found[number] = failure

        await asyncio.gather(*(send(number) for number, result in enumerate(found) if result is None))
        results = [result for result in found if result is not None]
        if not is_alone:
            failures = [result for result in results if isinstance(result, PublishFailed)]
            known = sum(not isinstance(result, PublishFailed) and _is_known(result) for result in results)
            self._reports.published_many(queue, len(results) - len(failures), known, failures)
        return results

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

    async def _publish_many(
        self, transport: PublishesMany[ReceiptT], events: Sequence[tuple[Event, int]]
    ) -> Sequence[ReceiptT | BullpenError]:
        if tracing.tracer is None:
            return await transport.publish_many(events)
        destination, count = events[0][0].source, len(events)
        outer = tracing.carrier()
        label = self._transport.label.lower()
        with tracing.sending(*(label, destination, "send"), messaging__batch__message_count=count):
            inner = tracing.carrier()
            # An event with a trace of its own keeps it.
            carried = [
                (replace(event, headers={**event.headers, **inner}), delay_ms)
                if event.headers.get("traceparent") == outer.get("traceparent")
                else (event, delay_ms)
                for event, delay_ms in events
            ]
            return await transport.publish_many(carried)

    async def _publish(self, event: Event, delay_ms: int, give_up_at: float) -> ReceiptT:
        patience = Patience(first_s=_SHORTEST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, until=give_up_at)
        before = ""
        while True:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + give_up_at - time.monotonic()):
                    return await self._transport.publish(event, delay_ms=delay_ms)
            except TimeoutError as error:
                text = f"no answer within {self._deadline_s:g} s; it may have arrived{before}"
                raise ConnectionLost(text) from error
            except (ConnectionLost, NotTakenNow) as error:
                before = f" (before that: {error})"
                if not await patience.pause():
                    raise

    @contextlib.contextmanager
    def _span(self, event: Event) -> Iterator[Event]:
        """A span of the trace that the event came with; the event that is sent carries it on."""
        with tracing.sending(
            *(self._transport.label.lower(), event.source, "send"),
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


def _is_known(receipt: Receipt) -> bool:
    """Nothing was added: the id is that of an earlier event. Receipts are jobs where the broker tracks them."""
    return getattr(receipt, "is_known", False) or getattr(receipt, "added", None) in ("duplicate", "deduplicated")

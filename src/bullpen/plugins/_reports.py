"""The one place where messaging tells what happens: a log line with fields, and a telemetry event.

In: what happened to a message, a connection or a channel. Out: log records whose texts never change (people search for
them) with ids as fields, and events for counters and spans. Payloads and secrets are in neither.
Elsewhere: metrics and traces made from the events (`bullpen.ops`).

Events and their fields; all have `transport` and, where it applies, `source`:

    transport.published         name, id, duration_s
    transport.deduplicated      name, id; published before, nothing was added
    transport.publish_failed    name, id, error
    delivery.received           name, id, attempt, is_redelivered, wait_s (None: unknown), running, concurrency
    delivery.settled            name, id, attempt, outcome, is_acked, duration_s, running, concurrency
    delivery.lost               name, id, attempt
    dead_letter.written         id, store
    dead_letter.unwritten       id, error
    dead_letter.redriven        id, store, by
    transport.checked           is_connected
    transport.depth             messages, consumers, dead_letters, running, concurrency
    transport.connected         endpoint
    transport.disconnected      endpoint, reason
    transport.channel_opened    purpose
    transport.channel_closed    purpose
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, assert_never

from bullpen._kernel import telemetry
from bullpen._kernel.outcome import Cause, Completed, Delayed, Failed, Outcome, Retry, Waiting, WaitingChildren
from bullpen._kernel.reminder import REMIND_AFTER_S, Reminder
from bullpen._kernel.report import Reporter
from bullpen.ports.dead_letters import DeadLetter
from bullpen.ports.transport import Delivery, Depth, Event, Settled


class MessagingReports(Reporter):
    """What one client or transport reports."""

    def __init__(self, label: str) -> None:
        super().__init__("bullpen.messaging", transport=label.lower())
        self.label = label
        self._lost_since: float | None = None
        self._reminded_at = 0.0
        self._illness = Reminder()

    # ---- producing --------------------------------------------------------------------------------------------

    def published(
        self, event: Event, event_id: str, duration_s: float, *, is_alone: bool = True, is_known: bool = False
    ) -> None:
        if is_alone:
            text = "Job was added before, nothing was added to queue" if is_known else "Job added to queue"
            self.log(logging.INFO, text, jobId=event_id, queue=event.source, urn=event.urn)
        if is_known:
            self.emit("transport.deduplicated", source=event.source, name=event.name, id=event_id)
        self.emit("transport.published", source=event.source, name=event.name, id=event_id, duration_s=duration_s)

    def publish_failed(self, event: Event, error: Exception, *, is_alone: bool = True) -> None:
        if is_alone:
            reason = str(error.__cause__)
            self.log(logging.ERROR, str(error), jobId=event.id, queue=event.source, urn=event.urn, error=reason)
        self.emit("transport.publish_failed", source=event.source, name=event.name, id=event.id, error=error.__cause__)

    def published_many(self, source: str, count: int, known: int, failures: Sequence[Exception]) -> None:
        """One line for a batch, and one for what of it was not taken."""
        if count:
            before = f", {known} of them were added before" if known else ""
            self.log(logging.INFO, f"{count} jobs added to queue{before}", queue=source, count=count)
        if failures:
            text = f"{len(failures)} of {count + len(failures)} jobs were not added to queue, the first: {failures[0]}"
            self.log(logging.ERROR, text, queue=source, count=len(failures), error=str(failures[0].__cause__))

    # ---- consuming --------------------------------------------------------------------------------------------

    def consumer_started(self, source: str, concurrency: int) -> None:
        self.log(logging.INFO, "Worker initialized for queue", queue=source)
        self.emit("consumer.started", source=source, concurrency=concurrency)

    def consumer_stopped(self, source: str, error: BaseException | None) -> None:
        if error is not None:
            self.logger.critical("consumer of %r cannot continue", source, exc_info=error, extra={"queue": source})
        self.emit("consumer.stopped", source=source, error=error)

    def received(self, delivery: Delivery, running: int, concurrency: int) -> None:
        self.log(logging.INFO, "Processing job", **_fields(delivery))
        if telemetry.is_enabled():
            self.emit(
                "delivery.received",
                **_ids(delivery),
                is_redelivered=delivery.is_redelivered or delivery.attempt > 1,
                wait_s=None if delivery.waited_ms is None else delivery.waited_ms / 1000,
                running=running,
                concurrency=concurrency,
            )

    def settled(
        self,
        delivery: Delivery,
        outcome: Outcome,
        settled: Settled,
        duration_s: float,
        running: int,
        concurrency: int,
    ) -> None:
        """Called after the broker has the outcome: nothing is told that did not happen."""
        self._log_outcome(delivery, outcome)
        if isinstance(outcome, Failed):
            self._dead_letter(delivery, settled)
        if telemetry.is_enabled():
            self.emit(
                "delivery.settled",
                **_ids(delivery),
                outcome=type(outcome).__name__.lower(),
                is_acked=isinstance(outcome, Completed),
                duration_s=duration_s,
                running=running,
                concurrency=concurrency,
            )

    def lost(self, delivery: Delivery, reason: object) -> None:
        self.log(logging.WARNING, f"Job lost, it will be delivered again: {reason}", **_fields(delivery))
        self.emit("delivery.lost", **_ids(delivery))

    def _log_outcome(self, delivery: Delivery, outcome: Outcome) -> None:
        fields = _fields(delivery)
        match outcome:
            case Completed():
                self.log(logging.INFO, "Job processed successfully", **fields)
            case Retry(reason, _, delay_ms):
                self.log(
                    logging.WARNING, f"Job processing failed: {reason}", **fields, error=reason, retryInMs=delay_ms
                )
            case Failed(reason, _, cause):
                text = f"Job processing failed: {reason}"
                self.log(logging.ERROR, text, outcome.error, **fields, error=reason, cause=cause.value)
                if cause is Cause.EXHAUSTED:  # the line above is the error: one each
                    self.log(logging.WARNING, "Job exceeded retry limit", **fields, error=reason, cause=cause.value)
            case Delayed() | Waiting() | WaitingChildren():
                self.log(logging.INFO, "Job returned to its queue", **fields)
            case _:
                assert_never(outcome)

    def _dead_letter(self, delivery: Delivery, settled: Settled) -> None:
        fields = _fields(delivery)
        if settled.dead_letter_problem is not None:
            text = f"Failed to send job to DLQ: {settled.dead_letter_problem}"
            self.log(logging.ERROR, text, **fields, error=settled.dead_letter_problem)
            self.emit(
                "dead_letter.unwritten",
                source=delivery.source,
                id=delivery.id,
                error=settled.dead_letter_problem,
            )
        elif settled.dead_letter is not None:
            if not settled.is_told:
                self.log(logging.WARNING, "Job sent to DLQ", **fields, dlq=settled.dead_letter)
            self.emit("dead_letter.written", source=delivery.source, id=delivery.id, store=settled.dead_letter)

    def redriven(self, letter: DeadLetter, store: str, by: str | None) -> None:
        self.log(
            logging.WARNING, "Dead letter redriven", jobId=letter.message_id, queue=letter.source, dlq=store, by=by
        )
        self.emit("dead_letter.redriven", source=letter.source, id=letter.message_id, store=store, by=by)

    # ---- connection -------------------------------------------------------------------------------------------

    def unhealthy(self, reason: str) -> None:
        """Probes ask every few seconds: told when it begins, once a minute while it lasts, and when it is over."""
        if self._illness.begins_or_lasts():
            self.log(logging.ERROR, f"{self.label} health check failed: {reason}", error=reason)

    def healthy(self) -> None:
        if self._illness.is_over():
            self.log(logging.WARNING, f"{self.label} health check is good again")

    def checked(self, is_connected: bool) -> None:
        self.emit("transport.checked", is_connected=is_connected)

    def depth(self, source: str, depth: Depth, dead_letters: int | None, running: int, concurrency: int) -> None:
        self.emit(
            "transport.depth",
            source=source,
            messages=depth.messages,
            consumers=depth.consumers,
            dead_letters=dead_letters,
            running=running,
            concurrency=concurrency,
        )

    def connected(self, endpoint: str, *, again: bool) -> None:
        if again:
            self.log(logging.WARNING, f"{self.label} connection is back", endpoint=endpoint)
        self._lost_since = None
        self.emit("transport.connected", endpoint=endpoint)

    def disconnected(self, endpoint: str, reason: object) -> None:
        """A lasting fault is told when it begins, once a minute while it lasts, and when it ends; not on every
        attempt."""
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = self._reminded_at = now
            text = f"{self.label} connection lost, reconnecting until it works: {reason}"
            self.emit("transport.disconnected", endpoint=endpoint, reason=str(reason))
        elif now - self._reminded_at >= REMIND_AFTER_S:
            self._reminded_at = now
            text = (
                f"{self.label} has been unreachable for {now - self._lost_since:.0f} s, "
                f"reconnecting until it works: {reason}"
            )
        else:
            return
        self.log(logging.WARNING, text, endpoint=endpoint)

    def closed(self, endpoint: str) -> None:
        """By us: no fault, but no connection either."""
        self._lost_since = None
        self.emit("transport.disconnected", endpoint=endpoint, reason="closed by us")

    def channel_opened(self, purpose: str) -> None:
        self.emit("transport.channel_opened", purpose=purpose)

    def channel_closed(self, purpose: str) -> None:
        self.emit("transport.channel_closed", purpose=purpose)


def _fields(delivery: Delivery) -> dict[str, Any]:
    """Names as in every log record of ours."""
    return {
        "jobId": delivery.id,
        "queue": delivery.source,
        "jobName": delivery.name or None,
        "urn": delivery.urn,
        "attempt": delivery.attempt,
        "attemptsMade": delivery.attempt - 1,
    }


def _ids(delivery: Delivery) -> dict[str, Any]:
    return {"source": delivery.source, "name": delivery.name, "id": delivery.id, "attempt": delivery.attempt}

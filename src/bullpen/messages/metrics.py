"""What became of messages, counted: sent, skipped, failed, by occasion and channel, and how late they were.

In: telemetry events of this process. Out: plain records. Elsewhere: the text format and the HTTP page (`bullpen.ops`),
the numbers of the transport that carries the orders (`bullpen.plugins.metrics`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.histogram import Histogram
from bullpen.ledger.message_records import MessageStatus
from bullpen.ports.metrics import Metric, Sample

_COUNTERS: Final = {
    "bullpen_messages_sent_total": "Messages that their provider accepted.",
    "bullpen_messages_skipped_total": "Messages that were not sent: too late, cancelled, or sent before.",
    "bullpen_messages_failed_total": "Messages that failed finally, or need a person to decide.",
}
_BY_STATUS: Final = {
    MessageStatus.SENT: "bullpen_messages_sent_total",
    MessageStatus.SKIPPED: "bullpen_messages_skipped_total",
    MessageStatus.EXPIRED: "bullpen_messages_skipped_total",
    MessageStatus.CANCELLED: "bullpen_messages_skipped_total",
    MessageStatus.FAILED: "bullpen_messages_failed_total",
    MessageStatus.PARKED: "bullpen_messages_failed_total",
}

_OUTCOMES: Final = {
    MessageStatus.SENT: "sent",
    MessageStatus.FAILED: "failed",
    MessageStatus.PARKED: "parked",
    MessageStatus.EXPIRED: "expired",
    MessageStatus.SKIPPED: "skipped",
    MessageStatus.CANCELLED: "cancelled",
}
_LATENESS: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0)
"""Seconds: a message is on time in the minute of its hour."""


class MessageMetrics:
    """Listens until closed."""

    def __init__(self, known: Callable[[], Iterable[tuple[str, str]]] = list) -> None:
        """`known`: pairs of occasion and channel that are shown before anything became of their messages."""
        self._known = known
        self._lock = threading.Lock()
        self._outcomes: Counter[tuple[str, str, str]] = Counter()
        self._lateness: dict[tuple[str, str], Histogram] = {}
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))  # from 0 on, so that the first one is an increase
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()

    async def collect(self) -> Sequence[Metric]:
        with self._lock:
            for occasion, channel in self._known():
                self._lateness_of(occasion, channel)
                for outcome in _OUTCOMES.values():
                    self._outcomes[occasion, channel, outcome] += 0
            counts = [
                Metric(name, "counter", text, [Sample({}, self._counts[name])]) for name, text in _COUNTERS.items()
            ]
            outcomes = [
                Sample({"occasion": occasion, "channel": channel, "outcome": outcome}, count)
                for (occasion, channel, outcome), count in sorted(self._outcomes.items())
            ]
            lateness = [
                Sample({"occasion": occasion, "channel": channel}, values.sum, values.cumulative(), values.count)
                for (occasion, channel), values in sorted(self._lateness.items())
            ]
        return [
            *counts,
            Metric("bullpen_messages_outcomes_total", "counter", "Messages by final outcome.", outcomes),
            Metric(
                "bullpen_messages_lateness_seconds",
                "histogram",
                "Time from when a message was due until its provider had accepted it.",
                lateness,
            ),
        ]

    def _lateness_of(self, occasion: str, channel: str) -> Histogram:
        known = self._lateness.get((occasion, channel))
        if known is None:
            known = self._lateness[occasion, channel] = Histogram(_LATENESS)
        return known

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if event == "messages.skipped":
            name: str | None = "bullpen_messages_skipped_total"
        elif event in ("messages.settled", "messages.ended", "messages.late"):
            name = _BY_STATUS.get(fields["status"])  # a status is its own text
        else:
            return
        if name is None:
            return
        with self._lock:
            self._counts[name] += fields.get("count", 1)
            if event == "messages.skipped":
                return  # an order that came again: its message was counted when it ended
            occasion, channel = fields["occasion"], fields["channel"]
            self._outcomes[occasion, channel, _OUTCOMES[fields["status"]]] += fields.get("count", 1)
            if "late_s" in fields and fields["status"] == MessageStatus.SENT:
                self._lateness_of(occasion, channel).observe(fields["late_s"])

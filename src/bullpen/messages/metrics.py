"""What became of messages, counted: sent, skipped, failed.

In: telemetry events of this process. Out: plain records. Elsewhere: the text format and the HTTP page (`bullpen.ops`),
the numbers of the transport that carries the orders (`bullpen.plugins.metrics`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen.ledger.message_records import MessageStatus
from bullpen.ports.metrics import Metric, Sample

_COUNTERS: Final = {
    "bullpen_messages_sent_total": "Messages that their provider took.",
    "bullpen_messages_skipped_total": "Messages that were not sent: too late, cancelled, or sent before.",
    "bullpen_messages_failed_total": "Messages that failed finally, or wait for a person.",
}
_BY_STATUS: Final = {
    MessageStatus.SENT: "bullpen_messages_sent_total",
    MessageStatus.SKIPPED: "bullpen_messages_skipped_total",
    MessageStatus.EXPIRED: "bullpen_messages_skipped_total",
    MessageStatus.CANCELLED: "bullpen_messages_skipped_total",
    MessageStatus.FAILED: "bullpen_messages_failed_total",
    MessageStatus.PARKED: "bullpen_messages_failed_total",
}


class MessageMetrics:
    """Listens until closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))  # from 0 on, so that the first one is an increase
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()

    async def collect(self) -> Sequence[Metric]:
        with self._lock:
            counts = dict(self._counts)
        return [Metric(name, "counter", text, [Sample({}, counts[name])]) for name, text in _COUNTERS.items()]

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if event == "messages.skipped":
            name: str | None = "bullpen_messages_skipped_total"
        elif event in ("messages.settled", "messages.ended", "messages.late"):
            name = _BY_STATUS.get(fields["status"])  # a status is its own text
        else:
            return
        if name is not None:
            with self._lock:
                self._counts[name] += fields.get("count", 1)

"""The numbers of the message pipeline, under the names that dashboards know.

In: telemetry of this process: what clients and transports tell of publishes, deliveries, connections and channels. Out:
plain records. Labels are the transport and the queue. Elsewhere: who tells (`bullpen.plugins._reports`), the text
format and the HTTP page (`bullpen.ops`).
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen.ports.metrics import Histogram, Kind, Metric, Sample

__all__ = ["BUCKETS_S", "MessageMetrics"]

BUCKETS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0),
)

_HELP: Final[dict[str, tuple[Kind, str]]] = {
    "queue_message_publish_duration_seconds": ("histogram", "Time from publishing until the broker's confirm."),
    "queue_message_consume_duration_seconds": ("histogram", "Time from receiving until the outcome was settled."),
    "queue_wait_time_seconds": ("histogram", "Time that a message was ready before it was delivered."),
    "queue_message_ack_total": ("counter", "Deliveries acknowledged after success."),
    "queue_message_nack_total": ("counter", "Deliveries that failed and are retried or dead."),
    "queue_message_redelivery_total": ("counter", "Deliveries that were not the first of their message."),
    "queue_depth_messages": ("gauge", "Messages in the queue."),
    "queue_consumers_active": ("gauge", "Consumers of the queue."),
    "queue_connection_status": ("gauge", "1 connected, 0 disconnected."),
    "queue_channel_opens_total": ("counter", "Channels opened."),
    "queue_channel_closes_total": ("counter", "Channels closed."),
}

_Labels = tuple[tuple[str, str], ...]


class MessageMetrics:
    """Listens until closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._histograms: dict[str, dict[_Labels, Histogram]] = defaultdict(dict)
        self._numbers: dict[str, Counter[_Labels]] = defaultdict(Counter)
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()

    async def collect(self) -> list[Metric]:
        """All metrics now, in the order of their table."""
        with self._lock:
            return [Metric(name, kind, text, self._samples(name, kind)) for name, (kind, text) in _HELP.items()]

    def _samples(self, name: str, kind: Kind) -> list[Sample]:
        if kind == "histogram":
            return [histogram.sample(dict(labels)) for labels, histogram in sorted(self._histograms[name].items())]
        return [Sample(dict(labels), value) for labels, value in sorted(self._numbers[name].items())]

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if "transport" not in fields:
            return
        labels: _Labels = (("transport", fields["transport"]),)
        if "source" in fields:
            labels = (*labels, ("queue", fields["source"]))
        with self._lock:
            self._count(event, fields, labels)

    def _count(self, event: str, fields: dict[str, Any], labels: _Labels) -> None:
        match event:
            case "transport.published":
                self._observe("queue_message_publish_duration_seconds", labels, fields["duration_s"])
            case "delivery.received":
                if fields["wait_s"] is not None:
                    self._observe("queue_wait_time_seconds", labels, fields["wait_s"])
                if fields["is_redelivered"]:
                    self._numbers["queue_message_redelivery_total"][labels] += 1
            case "delivery.settled":
                self._observe("queue_message_consume_duration_seconds", labels, fields["duration_s"])
                name = "queue_message_ack_total" if fields["is_acked"] else "queue_message_nack_total"
                self._numbers[name][labels] += 1
            case "transport.depth":
                self._numbers["queue_depth_messages"][labels] = fields["messages"]
                if fields["consumers"] is not None:
                    self._numbers["queue_consumers_active"][labels] = fields["consumers"]
            case "transport.connected":
                self._numbers["queue_connection_status"][labels] = 1
            case "transport.disconnected":
                self._numbers["queue_connection_status"][labels] = 0
            case "transport.channel_opened":
                self._numbers["queue_channel_opens_total"][labels] += 1
            case "transport.channel_closed":
                self._numbers["queue_channel_closes_total"][labels] += 1
            case _:
                pass  # told for others

    def _observe(self, name: str, labels: _Labels, seconds: float) -> None:
        known = self._histograms[name]
        if labels not in known:
            known[labels] = Histogram(BUCKETS_S)
        known[labels].observe(seconds)

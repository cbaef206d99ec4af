"""The numbers of messaging, under the names that dashboards know.

In: telemetry events of this process (`_reports` tells them, for every transport alike), and clients that are asked for
gauges when somebody collects. Out: plain records with the labels `transport` and `queue`. Durations are in seconds.
Elsewhere: the text format and the HTTP page (`bullpen.ops`).
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.histogram import Histogram
from bullpen.plugins.messaging import MessagingClient
from bullpen.ports.metrics import Kind, Metric, Sample

__all__ = ["MessagingMetrics"]

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TRIES: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0)

_METRICS: Final[Mapping[str, tuple[Kind, str]]] = {
    "queue_message_publish_duration_seconds": ("histogram", "Time until the broker confirmed a message."),
    "queue_message_publish_failed_total": ("counter", "Messages that the broker did not accept before the deadline."),
    "queue_message_consume_duration_seconds": ("histogram", "Time to handle and settle one delivery."),
    "queue_message_deduplicated_total": ("counter", "Messages that existed already; nothing was added."),
    "queue_wait_time_seconds": ("histogram", "Time a message was ready before it was delivered."),
    "queue_message_attempts": ("histogram", "Attempts per message until it succeeded or failed finally."),
    "queue_message_ack_total": ("counter", "Deliveries that succeeded."),
    "queue_message_nack_total": ("counter", "Deliveries that failed or were put back."),
    "queue_message_failed_total": ("counter", "Failed attempts, by outcome: retry or failed."),
    "queue_message_redelivery_total": ("counter", "Deliveries after the first of their message."),
    "queue_message_lost_total": ("counter", "Deliveries whose lock, channel or partition was lost in mid-flight."),
    "queue_depth_messages": ("gauge", "Messages that wait or are being handled."),
    "queue_consumers_active": ("gauge", "Consumers of all processes, if the broker reports them."),
    "queue_dead_letters_messages": ("gauge", "Dead letters that were neither redriven nor discarded."),
    "queue_worker_utilisation_ratio": ("gauge", "Share of this process's delivery slots in use."),
    "queue_connection_status": ("gauge", "1 connected, 0 disconnected."),
    "queue_channel_opens_total": ("counter", "Channels opened, by purpose."),
    "queue_channel_closes_total": ("counter", "Channels closed, by purpose."),
}
_OF_CONSUMERS: Final = (
    "queue_message_ack_total",
    "queue_message_nack_total",
    "queue_message_redelivery_total",
    "queue_message_lost_total",
)
_BOUNDS: Final = {"queue_message_attempts": _TRIES}

Labels = tuple[tuple[str, str], ...]


class MessagingMetrics:
    """Listens until closed. `clients` tells whom to ask for gauges whenever somebody collects."""

    def __init__(self, clients: Callable[[], Iterable[MessagingClient[Any]]] = tuple) -> None:
        self._clients = clients
        self._lock = threading.Lock()
        self._histograms: dict[str, dict[Labels, Histogram]] = {
            name: defaultdict(partial(Histogram, _BOUNDS.get(name, _SECONDS))) for name in _names("histogram")
        }
        self._counters: dict[str, Counter[Labels]] = {name: Counter() for name in _names("counter")}
        self._gauges: dict[str, dict[Labels, float]] = {name: {} for name in _names("gauge")}
        self._on: dict[str, Callable[[Labels, dict[str, Any]], None]] = {
            "transport.published": self._on_published,
            "transport.publish_failed": self._on_publish_failed,
            "transport.deduplicated": self._on_deduplicated,
            "delivery.received": self._on_received,
            "delivery.settled": self._on_settled,
            "delivery.lost": self._on_lost,
            "transport.checked": self._on_checked,
            "transport.depth": self._on_depth,
            "transport.connected": self._on_connected,
            "transport.disconnected": self._on_disconnected,
            "transport.channel_opened": self._on_channel_opened,
            "transport.channel_closed": self._on_channel_closed,
        }
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()

    async def collect(self) -> list[Metric]:
        """All metrics now. A broker that is away shows as such; its other gauges keep their last value."""
        for client in self._clients():
            await client.sample()
        with self._lock:
            return [Metric(name, kind, help_, self._samples(name, kind)) for name, (kind, help_) in _METRICS.items()]

    def _samples(self, name: str, kind: Kind) -> list[Sample]:
        if kind == "histogram":
            return [
                Sample(dict(labels), one.sum, one.cumulative(), one.count)
                for labels, one in sorted(self._histograms[name].items())
            ]
        values = self._counters[name] if kind == "counter" else self._gauges[name]
        return [Sample(dict(labels), value) for labels, value in sorted(values.items())]

    # ---- one method per event -----------------------------------------------------------------------------------

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        handle = self._on.get(event)
        if handle is not None:
            labels = {"transport": fields["transport"]}
            if "source" in fields:
                labels["queue"] = fields["source"]
            with self._lock:
                handle(tuple(labels.items()), fields)

    def _observe(self, name: str, labels: Labels, value: float) -> None:
        self._histograms[name][labels].observe(value)

    def _count(self, name: str, labels: Labels, **more: str) -> None:
        self._counters[name][labels + tuple(more.items())] += 1

    def _begin(self, labels: Labels, *names: str) -> None:
        """From 0 on: a counter that begins with its first failure hides that one from `increase`."""
        for name in names:
            self._counters[name][labels] += 0

    def _on_published(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._begin(labels, "queue_message_publish_failed_total", "queue_message_deduplicated_total")
        self._observe("queue_message_publish_duration_seconds", labels, fields["duration_s"])

    def _on_publish_failed(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._count("queue_message_publish_failed_total", labels)

    def _on_deduplicated(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._count("queue_message_deduplicated_total", labels)

    def _on_received(self, labels: Labels, fields: dict[str, Any]) -> None:
        if fields["is_redelivered"]:
            self._count("queue_message_redelivery_total", labels)
        if fields["wait_s"] is not None:
            self._observe("queue_wait_time_seconds", labels, fields["wait_s"])

    def _on_settled(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._observe("queue_message_consume_duration_seconds", labels, fields["duration_s"])
        self._count("queue_message_ack_total" if fields["is_acked"] else "queue_message_nack_total", labels)
        if fields["outcome"] in ("retry", "failed"):
            self._count("queue_message_failed_total", labels, outcome=fields["outcome"])
        if fields["outcome"] in ("completed", "failed"):
            self._observe("queue_message_attempts", labels, fields["attempt"])

    def _on_lost(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._count("queue_message_lost_total", labels)

    def _on_depth(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._begin(labels, *_OF_CONSUMERS)
        for outcome in ("retry", "failed"):
            self._begin((*labels, ("outcome", outcome)), "queue_message_failed_total")
        self._gauges["queue_depth_messages"][labels] = fields["messages"]
        self._gauges["queue_worker_utilisation_ratio"][labels] = fields["running"] / fields["concurrency"]
        if fields["consumers"] is not None:
            self._gauges["queue_consumers_active"][labels] = fields["consumers"]
        if fields["dead_letters"] is not None:
            self._gauges["queue_dead_letters_messages"][labels] = fields["dead_letters"]

    def _on_checked(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._gauges["queue_connection_status"][labels] = int(fields["is_connected"])

    def _on_connected(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._gauges["queue_connection_status"][labels] = 1

    def _on_disconnected(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._gauges["queue_connection_status"][labels] = 0

    def _on_channel_opened(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._count("queue_channel_opens_total", labels, purpose=fields["purpose"])

    def _on_channel_closed(self, labels: Labels, fields: dict[str, Any]) -> None:
        self._count("queue_channel_closes_total", labels, purpose=fields["purpose"])


def _names(wanted: Kind) -> list[str]:
    return [name for name, (kind, _) in _METRICS.items() if kind == wanted]

"""The numbers of the outbox, under the names that dashboards know.

`outbox_pending_total` and `outbox_claimed_total` are gauges although their names say total: how many rows wait and how
many are claimed now. Sent, failed and dead are counters of what this process did, by integration type. The two
durations are histograms in milliseconds. In: telemetry events of this process, and the store for the gauges. Out: plain
records. Elsewhere: the text format and the HTTP page (`bullpen.ops`).
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.histogram import Histogram
from bullpen.errors import DatabaseUnavailable
from bullpen.ledger import OutboxRepository, OutboxStatus
from bullpen.ledger.endpoint_records import type_label
from bullpen.ports.metrics import Kind, Metric, Sample

BUCKETS_MS: Final = (
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1_000.0,
    2_500.0,
    5_000.0,
    10_000.0,
    30_000.0,
)

_COUNTED: Final = {"SENT": "outbox_sent_total", "FAILED": "outbox_failed_total", "DEAD": "outbox_dead_total"}
_HELP: Final = {
    "outbox_pending_total": "Rows that wait for delivery, retries included (a gauge).",
    "outbox_claimed_total": "Rows that are claimed or queued but not settled (a gauge).",
    "outbox_sent_total": "Deliveries that succeeded.",
    "outbox_failed_total": "Deliveries that failed and will be tried again.",
    "outbox_dead_total": "Rows that failed finally.",
    "outbox_unparked_total": "Rows of ordering keys that a process left asleep when it died, and that were woken.",
    "outbox_claim_duration_ms": "Time of one claim, in milliseconds.",
    "outbox_delivery_duration_ms": "Time of one delivery, in milliseconds.",
}


class OutboxMetrics:
    """Listens until closed."""

    def __init__(
        self, store: OutboxRepository | None = None, *, types: Callable[[], Iterable[str]] | None = None
    ) -> None:
        """`types`, and those that have rows, count from 0: a counter that begins with its first failure hides that one
        from `increase`."""
        self._store, self._types = store, types
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in _COUNTED.values()}
        self._unparked = 0
        self._claims = Histogram(BUCKETS_MS)
        self._deliveries: dict[str, Histogram] = defaultdict(partial(Histogram, BUCKETS_MS))
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if event == "outbox.claimed":
            with self._lock:
                self._claims.observe(fields["took_ms"])
        elif event == "outbox.delivered":
            integration_type = type_label(fields["integration_type"])
            with self._lock:
                self._deliveries[integration_type].observe(fields["took_ms"])
                if fields["status"] in _COUNTED:
                    self._counts[_COUNTED[fields["status"]]][integration_type] += 1
        elif event == "outbox.unparked":
            with self._lock:
                self._unparked += fields["count"]

    async def collect(self) -> list[Metric]:
        """All metrics now; the gauges are asked of the database."""
        gauges, waiting = await self._gauges()
        known = dict.fromkeys((*(self._types() if self._types is not None else ()), *waiting), 0)
        with self._lock:
            counters = {
                name: [
                    Sample({"integration_type": label}, count) for label, count in sorted({**known, **counts}.items())
                ]
                for name, counts in self._counts.items()
            }
            unparked = [Sample({}, self._unparked)]
            claims = [_sample(self._claims, {})]
            deliveries = [
                _sample(histogram, {"integration_type": label}) for label, histogram in sorted(self._deliveries.items())
            ]
        found: list[tuple[str, Kind, list[Sample]]] = [
            *((name, "gauge", [Sample({}, value) for value in values]) for name, values in gauges.items()),
            *((name, "counter", samples) for name, samples in counters.items()),
            ("outbox_unparked_total", "counter", unparked),
            ("outbox_claim_duration_ms", "histogram", claims),
            ("outbox_delivery_duration_ms", "histogram", deliveries),
        ]
        return [Metric(name, kind, _HELP[name], samples) for name, kind, samples in found]

    async def _gauges(self) -> tuple[dict[str, list[int]], set[str]]:
        """And the types that have rows. Without values while the database does not answer; the counters of this process
        are shown all the same."""
        try:
            stats = [] if self._store is None else await self._store.stats()
        except DatabaseUnavailable:
            return {"outbox_pending_total": [], "outbox_claimed_total": []}, set()
        counts: Counter[OutboxStatus] = Counter()
        for _, status, count, _ in stats:
            counts[status] += count
        pending = counts[OutboxStatus.PENDING] + counts[OutboxStatus.FAILED]
        gauges = {"outbox_pending_total": [pending], "outbox_claimed_total": [counts[OutboxStatus.CLAIMED]]}
        return gauges, {type_label(name) for name, *_ in stats}


def _sample(histogram: Histogram, labels: Mapping[str, str]) -> Sample:
    return Sample(labels, histogram.sum, tuple(histogram.cumulative()), histogram.count)

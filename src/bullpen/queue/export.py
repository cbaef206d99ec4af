"""What a queue publishes: custom events, and its metrics for Prometheus under BullMQ's names.

In: a queue. Out: an entry of its event stream, or text. Elsewhere: reading events (`events`), the numbers of bullpen
(`bullpen.ops.metrics`), the meter of OpenTelemetry (`bullpen.ops.meter`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import is_encodable
from bullpen.errors import require
from bullpen.queue.base import QueuePart
from bullpen.wire.events import EventName
from bullpen.wire.records import read_int

__all__ = ["STATES", "Exporting"]

STATES: Final = ("active", "completed", "delayed", "failed", "prioritized", "waiting", "waiting-children")
"""In BullMQ's order."""
_LONGEST_NAME: Final = 200
_MOST_FIELDS: Final = 200
_ESCAPED: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


class Exporting(QueuePart):
    """What a `Queue` publishes."""

    async def publish_event(
        self, event: str, fields: Mapping[str, Any] | None = None, *, max_len: int | None = None
    ) -> str:
        """Write an event of your own into the queue's stream and return its id: every `QueueEvents`, Node's too, gets
        it.

        Texts travel as they are, numbers and all else as JSON text. The names of BullMQ's own events are refused: who
        waits for results would believe them. The stream is trimmed to the queue's bound, or to about `max_len`. Not
        repeated: raises ConnectionLost when the reply is lost; then it may have been written.
        """
        is_name = isinstance(event, str) and 0 < len(event) <= _LONGEST_NAME and is_encodable(event)
        require("event", is_name, f"a name of 1 to {_LONGEST_NAME} characters", event)
        require("event", event not in set(EventName), "a name that BullMQ does not use itself", event)
        given = dict(fields or {})
        fits = len(given) <= _MOST_FIELDS and all(map(_is_field, given))
        require("fields", fits, f"at most {_MOST_FIELDS} named fields, none of them 'event'", list(given))
        bound = "" if max_len is None else check_int("max_len", max_len, minimum=1)
        flat = [part for name, value in given.items() for part in (name, _value(value))]
        json.check_payload_size(sum(map(len, flat)))
        reply = await self._ready().evaluate_once(
            "publish_event", [self._keys.events], [self._keys.base, bound, "event", event, *flat]
        )
        return str(reply.decode())

    async def prometheus_metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """Job counts by state and the totals of finished jobs in Prometheus' text format, under the names and labels
        of Node's `exportPrometheusMetrics`; `labels` stand on each line.

        The totals count while a worker keeps metrics (`metrics_minutes`, in Node `metrics`). The numbers under
        bullpen's own names are those of `bullpen.ops`.
        """
        keys, actions = self._keys, self._ready()
        read = [("LLEN", keys.wait), ("LLEN", keys.paused), ("LLEN", keys.active)]
        scored = ("completed", "delayed", "failed", "prioritized", "waiting_children")
        wait, paused, active, *rest = await actions.commands(
            [*read, *(("ZCARD", getattr(keys, state)) for state in scored)]
        )
        counts = dict(zip(scored, rest, strict=True)) | {"active": active, "waiting": wait + paused}
        totals = await actions.commands(
            [("HGET", keys.metrics_completed, "count"), ("HGET", keys.metrics_failed, "count")]
        )
        own = [f'queue="{_escaped(keys.name)}"']
        given = [f'{name}="{_escaped(value)}"' for name, value in (labels or {}).items()]
        lines = ["# HELP bullmq_job_count Number of jobs in the queue by state", "# TYPE bullmq_job_count gauge"]
        for state in STATES:
            shown = ", ".join([*own, f'state="{state}"', *given])
            lines.append(f"bullmq_job_count{{{shown}}} {counts[state.replace('-', '_')]}")
        shown = ", ".join([*own, *given])
        for state, total in zip(("completed", "failed"), totals, strict=True):
            lines += [
                f"# HELP bullmq_job_{state}_total Total number of {state} jobs",
                f"# TYPE bullmq_job_{state}_total counter",
                f"bullmq_job_{state}_total{{{shown}}} {read_int(total or b'0')}",
            ]
        return "\n".join(lines)


def _is_field(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", "event") and is_encodable(name)


def _value(value: Any) -> bytes:
    return value.encode("utf-8", "backslashreplace") if isinstance(value, str) else json.encode(value, what="fields")


def _escaped(value: str) -> str:
    return str(value).translate(_ESCAPED)

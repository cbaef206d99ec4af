"""Metrics of workflows: transitions, repeated events, and changes that were decided again.

In: telemetry of the engines. Out: plain records. Entities are not counted by state: only their store knows them all.
Elsewhere: the text format (`bullpen.ops`), deliveries and dead letters of the transport (`bullpen.plugins.metrics`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen.errors import word
from bullpen.ports.metrics import Metric, Sample
from bullpen.workflow.service import Workflow

__all__ = ["WorkflowMetrics"]

COUNTED: Final = {
    "workflow.moved": ("bullpen_workflow_moves_total", "Transitions that were stored.", ("workflow", "event", "kind")),
    "workflow.refused": (
        "bullpen_workflow_refused_total",
        "Events that changed nothing because no condition held.",
        ("workflow", "event"),
    ),
    "workflow.ignored": (
        "bullpen_workflow_ignored_total",
        "Events that the state of the entity ignores.",
        ("workflow", "event"),
    ),
    "workflow.repeated": (
        "bullpen_workflow_repeated_total",
        "Events that were applied before and changed nothing.",
        ("workflow",),
    ),
    "workflow.conflict": (
        "bullpen_workflow_conflicts_total",
        "Changes that were decided again because another process stored first.",
        ("workflow",),
    ),
}
"""By event of telemetry: name, meaning and labels of its counter."""


class WorkflowMetrics:
    """Listens until closed."""

    def __init__(self, workflows: Callable[[], Iterable[Workflow[Any, Any, Any, Any]]] = tuple) -> None:
        """`workflows` count from 0: a counter that begins with its first failure hides that one from `increase`."""
        self._workflows = workflows
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[tuple[str, ...]]] = {event: Counter() for event in COUNTED}
        self._unsubscribe = telemetry.subscribe(self._on_event)

    def close(self) -> None:
        """Stop listening. Safe to call twice."""
        self._unsubscribe()

    def _on_event(self, event: str, fields: dict[str, Any]) -> None:
        if event in COUNTED:
            labels = tuple(str(fields[name]) for name in COUNTED[event][2])
            with self._lock:
                self._counts[event][labels] += 1

    async def collect(self) -> list[Metric]:
        """All metrics now."""
        known = [each for workflow in self._workflows() for each in _known(workflow)]
        with self._lock:
            counts = {
                event: {**dict.fromkeys((labels for name, labels in known if name == event), 0), **counter}
                for event, counter in self._counts.items()
            }
        return [
            Metric(
                name,
                "counter",
                meaning,
                [Sample(dict(zip(labels, values, strict=True)), count) for values, count in counts[event].items()],
            )
            for event, (name, meaning, labels) in COUNTED.items()
        ]


def _known(workflow: Workflow[Any, Any, Any, Any]) -> Iterable[tuple[str, tuple[str, ...]]]:
    """What may be counted of a workflow: telemetry event and labels."""
    transitions, states = workflow.definition.transitions, workflow.definition.states
    events = {word(event) for transition in transitions for event in transition.events}
    ignored = {word(event) for transition in transitions if transition.ignore_in for event in transition.events}
    by_itself = [each for each in transitions if each.to != states.failed and not all(map(states.rests, each.sources))]
    moves = {*product(events, ("event", "failed")), *((word(each.events[0]), "automatic") for each in by_itself)}
    yield from (("workflow.moved", (workflow.name, *each)) for each in sorted(moves))
    yield from (("workflow.refused", (workflow.name, event)) for event in sorted(events))
    yield from (("workflow.ignored", (workflow.name, event)) for event in sorted(ignored))
    yield from (("workflow.repeated", (workflow.name,)), ("workflow.conflict", (workflow.name,)))

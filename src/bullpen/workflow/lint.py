"""Doubts about a definition that is otherwise in order: found once, when it is registered.

In: a definition and its hooks. Out: findings. An error cannot work and refuses the registration; a warning may be meant
and is logged. Elsewhere: mistakes in a single value (`definition`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from bullpen.errors import InvalidOption
from bullpen.ports.entity import word
from bullpen.workflow.actions import Hook
from bullpen.workflow.definition import Definition, Transition, many
from bullpen.workflow.machine import automatic_exits, reachable

__all__ = ["DoubtfulDefinition", "Finding", "lint"]

AnyDefinition = Definition[Any, Any, Any, Any]
AnyTransition = Transition[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One doubt."""

    level: Literal["error", "warning"]
    code: Literal["unreachable-state", "dead-end", "ambiguous-exit", "endless-loop", "impossible-hook"]
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text} [{self.code}]"


class DoubtfulDefinition(InvalidOption):
    """A workflow that cannot work as it is defined, or, with `strict=True`, that may not."""

    def __init__(self, workflow: str, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        listed = "; ".join(map(str, self.findings))
        super().__init__(f"workflow {workflow!r}", "a definition without these findings", listed)
        self.args = (f"workflow {workflow!r} is refused: {listed}",)


def lint(definition: AnyDefinition, hooks: Iterable[Hook] = ()) -> list[Finding]:
    """All findings, errors first."""
    found = [
        *_unreachable(definition),
        *_dead_ends(definition),
        *_ambiguous(definition),
        *_loops(definition),
        *_impossible(definition, hooks),
    ]
    return sorted(found, key=lambda finding: finding.level)


def _unreachable(definition: AnyDefinition) -> Iterator[Finding]:
    states = definition.states
    if states.initial is not None:
        starts = {states.initial}
    else:
        # Nobody says where entities begin: at any state to rest at, or where no transition leads to.
        targets = {transition.to for transition in definition.transitions}
        starts = {*states.idles, *(state for each in definition.transitions for state in each.sources)}
        starts = {state for state in starts if state in states.idles or state not in targets}
    seen = {state for start in starts for state in reachable(definition, start)}
    for state in definition.all_states():
        if state not in seen:
            yield Finding("warning", "unreachable-state", f"no event leads to state {word(state)}")


def _dead_ends(definition: AnyDefinition) -> Iterator[Finding]:
    states = definition.states
    for state in definition.all_states():
        if state in states.finals or state == states.failed:
            continue
        if not any(state in transition.sources for transition in definition.transitions):
            yield Finding("warning", "dead-end", f"no event leads out of state {word(state)}, which is not final")


def _ambiguous(definition: AnyDefinition) -> Iterator[Finding]:
    for state in definition.all_states():
        for event in definition.all_events():
            fitting = [one for one in definition.transitions if event in one.events and state in one.sources]
            yield from _shadowed(fitting, f"event {word(event)} in state {word(state)}")
        if not definition.states.rests(state):
            yield from _shadowed(list(automatic_exits(definition, state)), f"the automatic step from {word(state)}")


def _shadowed(fitting: list[AnyTransition], where: str) -> Iterator[Finding]:
    """What stands behind a transition without conditions is never taken."""
    for place, transition in enumerate(fitting[:-1]):
        if not transition.conditions:
            later = ", ".join(word(each.to) for each in fitting[place + 1 :])
            text = f"{where} always leads to {word(transition.to)}, never to {later}; give the first one a condition"
            yield Finding("warning", "ambiguous-exit", text)
            return


def _loops(definition: AnyDefinition) -> Iterator[Finding]:
    told: set[frozenset[Any]] = set()
    passing = [state for state in definition.all_states() if not definition.states.rests(state)]
    for start in passing:
        circle = _circle(definition, start)
        if circle is None or frozenset(circle) in told:
            continue
        told.add(frozenset(circle))
        names = " -> ".join(map(word, (*circle, circle[0])))
        if all(_is_forced(definition, state, circle) for state in circle):
            yield Finding("error", "endless-loop", f"automatic steps run in a circle for ever: {names}")
        else:
            text = f"automatic steps may run in a circle, ended only by conditions: {names}"
            yield Finding("warning", "endless-loop", text)


def _circle(definition: AnyDefinition, start: Any) -> tuple[Any, ...] | None:
    """The shortest way of automatic steps from a state back to itself."""
    ways: list[tuple[Any, ...]] = [(start,)]
    seen: set[Any] = set()
    while ways:
        way = ways.pop(0)
        for transition in automatic_exits(definition, way[-1]):
            if transition.to == start:
                return way
            if transition.to not in seen and not definition.states.rests(transition.to):
                seen.add(transition.to)
                ways.append((*way, transition.to))
    return None


def _is_forced(definition: AnyDefinition, state: Any, circle: tuple[Any, ...]) -> bool:
    first = next(automatic_exits(definition, state))
    return not first.conditions and not definition.conditions and first.to in circle


def _impossible(definition: AnyDefinition, hooks: Iterable[Hook]) -> Iterator[Finding]:
    events = set(definition.all_events())
    changes = {(source, each.to) for each in definition.transitions for source in each.sources}
    for hook in hooks:
        if hook.is_on_event:
            for event in many(hook.event):
                if event not in events:
                    yield Finding("error", "impossible-hook", f"{hook.name} waits for {word(event)}, which is no event")
        elif not any((source, target) in changes for source in many(hook.source) for target in many(hook.target)):
            source, target = ("/".join(map(word, many(each))) for each in (hook.source, hook.target))
            text = f"{hook.name} waits for a change from {source} to {target}, which no transition makes"
            yield Finding("error", "impossible-hook", text)

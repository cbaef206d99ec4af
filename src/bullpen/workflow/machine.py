"""Decide what an event does to an entity: pure functions from a definition and a status to a step. No I/O here.

In: a definition, a status, an event, and a way to ask conditions. Out: the step to take, or why there is none. The
engine performs what is decided (`engine`); diagrams, lint, simulation and the property tests use the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bullpen.errors import NoTransition
from bullpen.workflow.definition import Definition, Transition

__all__ = [
    "Step",
    "automatic_exits",
    "first_step",
    "holds_for",
    "is_ignored",
    "is_target",
    "next_step",
    "reachable",
]

T = TypeVar("T")
P = TypeVar("P")
E = TypeVar("E")
S = TypeVar("S")


@dataclass(frozen=True)
class Step(Generic[T, P, E, S]):
    """One transition to perform."""

    transition: Transition[T, P, E, S]
    event: E
    source: S
    is_automatic: bool = False

    @property
    def target(self) -> S:
        return self.transition.to


Holds = Callable[[Transition[T, P, E, S]], bool]
"""Whether the conditions of a transition hold now."""


def holds_for(definition: Definition[T, P, E, S], entity: T, payload: P) -> Holds[T, P, E, S]:
    """Ask the conditions about an entity and a payload."""

    def holds(transition: Transition[T, P, E, S]) -> bool:
        return all(condition(entity, payload) for condition in (*definition.conditions, *transition.conditions))

    return holds


def first_step(
    definition: Definition[T, P, E, S], status: S, event: E, holds: Holds[T, P, E, S]
) -> Step[T, P, E, S] | None:
    """The step that an event causes: that of the first transition whose conditions hold; None when none hold.

    Raises NoTransition when the event leads nowhere from this status, whatever the conditions say.
    """
    fitting = [each for each in definition.transitions if event in each.events and status in each.sources]
    if not fitting:
        raise NoTransition(event, status)
    chosen = next((each for each in fitting if holds(each)), None)
    return None if chosen is None else Step(chosen, event, status)


def is_ignored(definition: Definition[Any, Any, E, S], status: S, event: E) -> bool:
    """Whether the event comes too late in this state, by rule."""
    return any(event in each.events and status in each.ignore_in for each in definition.transitions)


def next_step(definition: Definition[T, P, E, S], status: S, holds: Holds[T, P, E, S]) -> Step[T, P, E, S] | None:
    """The automatic step from here, if the status is none to rest at. Never into the failed state."""
    if definition.states.rests(status):
        return None
    for transition in automatic_exits(definition, status):
        if holds(transition):
            return Step(transition, transition.events[0], status, is_automatic=True)
    return None


def automatic_exits(definition: Definition[T, P, E, S], status: S) -> Iterator[Transition[T, P, E, S]]:
    """Transitions that the engine may take without an event, in their order."""
    for transition in definition.transitions:
        if status in transition.sources and transition.to != definition.states.failed:
            yield transition


def is_target(definition: Definition[Any, Any, E, S], event: E, status: S) -> bool:
    """Whether the event, with the automatic steps behind it, may have led to this status."""
    targets = [each.to for each in definition.transitions if event in each.events]
    seen: set[S] = set()
    while targets:
        state = targets.pop()
        if state == status:
            return True
        if state not in seen and not definition.states.rests(state):
            targets += [each.to for each in automatic_exits(definition, state)]
        seen.add(state)
    return False


def reachable(definition: Definition[Any, Any, Any, S], start: S) -> set[S]:
    """Every state that some sequence of events leads to, the first and the failed one included."""
    seen, waiting = {definition.states.failed}, [start, definition.states.failed]
    while waiting:
        state = waiting.pop()
        seen.add(state)
        waiting += [each.to for each in definition.transitions if state in each.sources and each.to not in seen]
    return seen

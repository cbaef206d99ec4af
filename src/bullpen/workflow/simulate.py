"""Try a definition without doing anything: what would these events do, and what may happen to this entity now?

In: a definition, events, an entity. Out: the steps that would be taken; conditions are asked, no action runs, nothing
is stored. Elsewhere: deciding (`machine`), the real thing (`engine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from bullpen.errors import NoTransition, word
from bullpen.ports.entity import HistoryEntry, Move
from bullpen.workflow.definition import Definition
from bullpen.workflow.machine import first_step, holds_for, is_ignored, next_step

__all__ = ["Explanation", "PossibleEvent", "Simulation", "explain", "simulate"]

T = TypeVar("T")
P = TypeVar("P")
E = TypeVar("E")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a sequence of events would do."""

    start: str
    moves: tuple[Move, ...]
    refused: tuple[str, ...]
    """Events that would change nothing, each with the reason."""
    end: str

    def __str__(self) -> str:
        lines = [f"{move.source} --{move.event}--> {move.target} ({move.kind})" for move in self.moves]
        return "\n".join([f"begins at {self.start}", *lines, *self.refused, f"ends at {self.end}"])


def simulate(definition: Definition[T, P, E, S], status: S, entity: T, events: Iterable[tuple[E, Any]]) -> Simulation:
    """Follow the events from a status. The entity is only shown to conditions: no action changes it."""
    moves: list[Move] = []
    refused: list[str] = []
    start = status
    for event, payload in events:
        holds = holds_for(definition, entity, payload)
        try:
            step = first_step(definition, status, event, holds)
        except NoTransition as error:
            late = f"Event {word(event)} is ignored in state {word(status)}"
            refused.append(late if is_ignored(definition, status, event) else str(error))
            continue
        if step is None:
            refused.append(f"No condition holds for event: {word(event)} and status: {word(status)}")
        taken = 0
        while step is not None and taken <= definition.max_steps:
            kind: Literal["automatic", "event"] = "automatic" if step.is_automatic else "event"
            moves.append(Move(word(step.event), word(step.source), word(step.target), kind))
            status, taken = step.target, taken + 1
            step = next_step(definition, status, holds)
        if step is not None:
            refused.append(
                f"Event {word(event)} runs in a circle: stopped after {definition.max_steps} automatic steps"
            )
    return Simulation(word(start), tuple(moves), tuple(refused), word(status))


@dataclass(frozen=True, slots=True)
class PossibleEvent:
    """One transition that an event may cause now."""

    event: str
    target: str
    holds: bool
    conditions: tuple[tuple[str, str], ...]
    """Each condition by its name, with `holds`, `does not hold`, or why it is unknown."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where an entity is, how it came there, and what may happen next."""

    urn: str
    status: str
    kind: Literal["idle", "final", "failed", "passing"]
    """passing: no state to rest at; an automatic step is missing, or no condition holds."""
    options: tuple[PossibleEvent, ...]
    history: tuple[HistoryEntry, ...]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "history": [asdict(entry) for entry in self.history]}

    def __str__(self) -> str:
        lines = [f"{self.urn} is {self.status} ({self.kind})"]
        for entry in self.history:
            by = f" by {entry.job_id}" if entry.job_id else ""
            reason = f": {entry.reason}" if entry.reason else ""
            at = entry.at.isoformat(timespec="milliseconds")
            lines.append(f"  {at} {entry.source} --{entry.event}--> {entry.target} ({entry.kind}{by}){reason}")
        if not self.options:
            lines.append("no event leads out of this state")
        for option in self.options:
            lines.append(f"{option.event} leads to {option.target}" + ("" if option.holds else ", but not now"))
            lines += [f"  {name}: {answer}" for name, answer in option.conditions]
        return "\n".join(lines)


def explain(
    definition: Definition[T, P, E, S], urn: str, status: S, entity: T, payload: Any, history: Sequence[HistoryEntry]
) -> Explanation:
    """Ask every condition of every transition from here."""
    options = []
    for transition in definition.transitions:
        if status not in transition.sources:
            continue
        asked = [
            (condition, _ask(condition, entity, payload))
            for condition in (*definition.conditions, *transition.conditions)
        ]
        answers = tuple((getattr(one, "__qualname__", repr(one)), answer) for one, answer in asked)
        holds = all(answer == "holds" for _, answer in answers)
        options += [PossibleEvent(word(event), word(transition.to), holds, answers) for event in transition.events]
    states = definition.states
    kind: Literal["idle", "final", "failed", "passing"] = "passing"
    if status == states.failed:
        kind = "failed"
    elif status in states.finals:
        kind = "final"
    elif status in states.idles:
        kind = "idle"
    return Explanation(urn, word(status), kind, tuple(options), tuple(history))


def _ask(condition: Any, entity: Any, payload: Any) -> str:
    try:
        return "holds" if condition(entity, payload) else "does not hold"
    except Exception as error:  # noqa: BLE001 - user code, perhaps for want of the payload
        return f"cannot tell: {error}"

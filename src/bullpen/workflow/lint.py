"""Doubts about a definition that is otherwise in order: found once, when it is registered.

In: a definition and its hooks. Out: findings. An error cannot work and refuses the registration; a warning may be meant
and is logged. Elsewhere: mistakes in a single value (`definition`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

from bullpen.errors import word
from bullpen.ports.entity import EntityStore
from bullpen.workflow.actions import Hook, name_of
from bullpen.workflow.definition import Definition, InlineEntities, Transition, many
from bullpen.workflow.machine import automatic_exits, reachable

__all__ = ["LintFinding", "lint"]

AnyDefinition = Definition[Any, Any, Any, Any]
AnyTransition = Transition[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One doubt."""

    level: Literal["error", "warning"]
    code: Literal[
        "unreachable-state", "dead-end", "ambiguous-exit", "endless-loop", "impossible-hook", "final-exit",
        "no-final-state", "wrong-arity", "changed-urn", "unknown-status",
    ]  # fmt: skip
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.text} [{self.code}]"


def lint(
    definition: AnyDefinition, hooks: Iterable[Hook] = (), store: EntityStore[Any, Any] | None = None
) -> list[LintFinding]:
    """All findings, errors first."""
    hooks = tuple(hooks)
    found = [
        *_final_exits(definition),
        *_no_finals(definition),
        *_arity(definition, hooks),
        *_changed_urns(definition, hooks),
        *_blank_status(definition, store),
        *_unreachable(definition),
        *_dead_ends(definition),
        *_ambiguous(definition),
        *_loops(definition),
        *_impossible(definition, hooks),
    ]
    return sorted(found, key=lambda finding: finding.level)


def _unreachable(definition: AnyDefinition) -> Iterator[LintFinding]:
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
            yield LintFinding("warning", "unreachable-state", f"no event leads to state {word(state)}")


def _dead_ends(definition: AnyDefinition) -> Iterator[LintFinding]:
    states = definition.states
    for state in definition.all_states():
        if state in states.finals or state == states.failed:
            continue
        if not any(state in transition.sources for transition in definition.transitions):
            yield LintFinding("warning", "dead-end", f"no event leads out of state {word(state)}, which is not final")


def _final_exits(definition: AnyDefinition) -> Iterator[LintFinding]:
    for transition in definition.transitions:
        for state in transition.sources:
            if state in definition.states.finals:
                yield LintFinding(
                    "warning", "final-exit", f"state {word(state)} is final, but {transition} leads out of it"
                )


def _no_finals(definition: AnyDefinition) -> Iterator[LintFinding]:
    if not definition.states.finals:
        yield LintFinding("warning", "no-final-state", "no state is final, so no entity is ever done; name finals=[…]")


def _arity(definition: AnyDefinition, hooks: Iterable[Hook]) -> Iterator[LintFinding]:
    """Functions that cannot be called as they will be."""
    two: list[tuple[str, Callable[..., Any]]] = [
        *(("condition", each) for each in definition.conditions),
        *(("action", each) for one in definition.transitions for each in one.actions),
        *(("condition", each) for one in definition.transitions for each in one.conditions),
        *(("action", hook.run) for hook in hooks if hook.run is not None),
    ]
    asked: list[tuple[str, Callable[..., Any], tuple[str, ...]]] = [
        (what, function, ("entity", "payload")) for what, function in two
    ]
    if definition.fallback is not None:
        asked.append(("fallback", definition.fallback, ("entity", "event", "payload")))
    if definition.create is not None:
        asked.append(("create", definition.create, ("urn", "payload")))
    for what, function, names in dict.fromkeys(asked):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of some that are written in C nobody can tell
            continue
        try:
            signature.bind(*names)
        except TypeError as error:
            text = f"{what} {name_of(function)} cannot be called with ({', '.join(names)}): {error}"
            yield LintFinding("error", "wrong-arity", text)


_COPIES: Final = frozenset({"replace", "_replace", "evolve", "copy", "model_copy", "copy_with"})


def _changed_urns(definition: AnyDefinition, hooks: Iterable[Hook]) -> Iterator[LintFinding]:
    """Actions whose text gives the entity another urn. What their text does not show is refused when it happens."""
    access = definition.entity
    names = _read_by(access.urn_ if isinstance(access, InlineEntities) else getattr(access, "urn", None))
    actions = [each for one in definition.transitions for each in one.actions]
    for action in dict.fromkeys([*actions, *(hook.run for hook in hooks if hook.run is not None)]):
        changed = next(_changes(action, names), None)
        if changed is not None:
            text = f"action {name_of(action)} changes {changed!r}, which must never change: it identifies the entity"
            yield LintFinding("warning", "changed-urn", text)


def _read_by(function: Any) -> frozenset[str]:
    """Attributes and items that a function of an entity reads; `urn` where nobody can tell."""
    found = {
        name
        for node in ast.walk(_text_of(function))
        if (name := getattr(node, "attr", None)) or (name := getattr(getattr(node, "slice", None), "value", None))
        if isinstance(name, str) and not name.startswith("_")
    }
    return frozenset(found | {"urn"})


def _changes(action: Any, names: frozenset[str]) -> Iterator[str]:
    tree = _text_of(action)
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef))
    parameters = [each.arg for each in first.args.args] if (first := next(functions, None)) is not None else []
    entity = next((each for each in parameters if each != "self"), None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
            if isinstance(node.value, ast.Name) and node.value.id == entity and name in names:
                yield str(name)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            of_entity = any(isinstance(each, ast.Name) and each.id == entity for each in _objects(node))
            if called in _COPIES and of_entity:
                yield from (each.arg for each in node.keywords if each.arg in names)


def _objects(call: ast.Call) -> Iterator[ast.expr]:
    """What a copy is made of: `replace(entity, …)` or `entity.model_copy(…)`."""
    yield from call.args
    if isinstance(call.func, ast.Attribute):
        yield call.func.value


def _text_of(function: Any) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # a lambda inside of a call, or what has no text at all
        return ast.Module([], [])


def _blank_status(definition: AnyDefinition, store: EntityStore[Any, Any] | None) -> Iterator[LintFinding]:
    if store is None:
        return
    try:
        status = store.status(store.new())
    except (AttributeError, KeyError, TypeError, ValueError):  # a blank entity need not have a status yet
        return
    if status is not None and status not in definition.all_states():
        text = f"a new entity has the status {word(status)}, which is not a state of the workflow"
        yield LintFinding("warning", "unknown-status", text)


def _ambiguous(definition: AnyDefinition) -> Iterator[LintFinding]:
    for state in definition.all_states():
        for event in definition.all_events():
            fitting = [one for one in definition.transitions if event in one.events and state in one.sources]
            yield from _shadowed(fitting, f"event {word(event)} in state {word(state)}")
        if not definition.states.rests(state):
            yield from _shadowed(list(automatic_exits(definition, state)), f"the automatic step from {word(state)}")


def _shadowed(fitting: list[AnyTransition], where: str) -> Iterator[LintFinding]:
    """What stands behind a transition without conditions is never taken."""
    for place, transition in enumerate(fitting[:-1]):
        if not transition.conditions:
            later = ", ".join(word(each.to) for each in fitting[place + 1 :])
            text = f"{where} always leads to {word(transition.to)}, never to {later}; give the first one a condition"
            yield LintFinding("warning", "ambiguous-exit", text)
            return


def _loops(definition: AnyDefinition) -> Iterator[LintFinding]:
    told: set[frozenset[Any]] = set()
    passing = [state for state in definition.all_states() if not definition.states.rests(state)]
    for start in passing:
        circle = _circle(definition, start)
        if circle is None or frozenset(circle) in told:
            continue
        told.add(frozenset(circle))
        names = " -> ".join(map(word, (*circle, circle[0])))
        if all(_is_forced(definition, state, circle) for state in circle):
            yield LintFinding("error", "endless-loop", f"automatic steps run in an endless circle: {names}")
        else:
            text = f"automatic steps may run in a circle that only conditions end: {names}"
            yield LintFinding("warning", "endless-loop", text)


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


def _impossible(definition: AnyDefinition, hooks: Iterable[Hook]) -> Iterator[LintFinding]:
    events = set(definition.all_events())
    changes = {(source, each.to) for each in definition.transitions for source in each.sources}
    for hook in hooks:
        if hook.is_on_event:
            for event in many(hook.event):
                if event not in events:
                    yield LintFinding(
                        "error",
                        "impossible-hook",
                        f"{hook.name} waits for {word(event)}, which is not an event of the workflow",
                    )
        elif not any((source, target) in changes for source in many(hook.source) for target in many(hook.target)):
            source, target = ("/".join(map(word, many(each))) for each in (hook.source, hook.target))
            text = f"{hook.name} waits for a change from {source} to {target}, which no transition makes"
            yield LintFinding("error", "impossible-hook", text)

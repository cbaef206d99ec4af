"""For random definitions and events the engine does what ten lines of plain Python do."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullpen.errors import EndlessSteps, NoTransition, UnknownEvent
from bullpen.workflow.actions import Hooks
from bullpen.workflow.definition import Definition, States, Transition
from bullpen.workflow.engine import Engine
from bullpen.workflow.stores.direct import DirectStore
from tests.workflow.kit import call

STATES, EVENTS = list("abcdef"), list("uvwxyz")
FAILED, MOST = "f", 8
LONG = os.environ.get("BULLPEN_CHAOS") == "long"


@dataclass(frozen=True)
class Rule:
    events: tuple[str, ...]
    sources: tuple[str, ...]
    target: str
    below: int | None
    """Holds for payloads below it; None: always."""
    breaks: int | None
    """The action fails for payloads above it."""


Rules = st.lists(
    st.builds(
        Rule,
        st.lists(st.sampled_from(EVENTS), min_size=1, max_size=2, unique=True).map(tuple),
        st.lists(st.sampled_from(STATES), min_size=1, max_size=3, unique=True).map(tuple),
        st.sampled_from(STATES),
        st.none() | st.integers(0, 9),
        st.none() | st.integers(0, 9),
    ),
    min_size=1,
    max_size=8,
)


def reference(rules: list[Rule], rests: set[str], state: str, event: str, payload: int) -> str:
    """The ten lines."""
    fitting = [rule for rule in rules if event in rule.events and state in rule.sources]
    if not fitting:
        return "nowhere"
    rule = next((rule for rule in fitting if rule.below is None or payload < rule.below), None)
    for steps in range(MOST + 2):
        if rule is None:
            return state
        if steps > MOST:
            return "endless"
        if rule.breaks is not None and payload > rule.breaks:
            return FAILED
        state = rule.target
        onward = [] if state in rests else [r for r in rules if state in r.sources and r.target != FAILED]
        rule = next((r for r in onward if r.below is None or payload < r.below), None)
    raise AssertionError


class Memory:
    """Entities that are nothing but their state, and change only when all went well."""

    def __init__(self, state: str) -> None:
        self.state = state

    def new(self) -> str:
        return self.state

    async def load(self, urn: str) -> str:
        return self.state

    async def update(self, entity: str, status: str) -> str:
        return status

    def status(self, entity: str) -> str:
        return entity

    def urn(self, entity: str) -> str:
        return "urn"


def transition(rule: Rule) -> Transition[str, int, str, str]:
    async def action(entity: str, payload: int) -> str:
        if rule.breaks is not None and payload > rule.breaks:
            raise RuntimeError("broken")
        return entity

    def condition(entity: str, payload: int) -> bool:
        return rule.below is None or payload < rule.below

    conditions: list[Any] = [] if rule.below is None else [condition]
    return Transition(
        event=list(rule.events), from_=list(rule.sources), to=rule.target, actions=[action], conditions=conditions
    )


@pytest.mark.many
@pytest.mark.requirement("W-9", "W-11", "W-12", "W-13", "W-15")
@settings(max_examples=2_000 if LONG else 80, deadline=None)
@given(
    Rules,
    st.sets(st.sampled_from(STATES[:-1]), max_size=4),
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9)), min_size=1, max_size=12),
)
def test_the_engine_agrees_with_the_reference(
    rules: list[Rule], idles: set[str], events: list[tuple[str, int]]
) -> None:
    definition = Definition[str, int, str, str](
        states=States(idles=sorted(idles), failed=FAILED),
        transitions=[transition(rule) for rule in rules],
        entity=Memory("a"),
        max_steps=MOST,
        on_action_error="fail",
    )
    memory = Memory("a")
    engine = Engine("model", definition, DirectStore(memory), Hooks([]))

    async def follow() -> None:
        for event, payload in events:
            expected = reference(rules, {*idles, FAILED}, memory.state, event, payload)
            try:
                reached = await engine.emit(event, "urn", payload, call())
            except (NoTransition, UnknownEvent):
                assert expected == "nowhere"
            except EndlessSteps:
                assert expected == "endless"
            else:
                assert reached == expected
                memory.state = reached

    asyncio.run(follow())

"""Doubts about definitions: each kind is found, and a sound definition has none."""

from __future__ import annotations

from typing import Any

import pytest

from bullpen.workflow.actions import Hooks, on_event, on_status_changed
from bullpen.workflow.definition import Definition, States, Transition
from bullpen.workflow.lint import lint
from tests.workflow.kit import Order, Shelf, define

Words = Definition[Any, Any, str, str]


def sometimes(entity: Any, payload: Any) -> bool:
    return bool(payload)


def move(event: str, source: str, target: str, *conditions: Any) -> Transition[Any, Any, str, str]:
    return Transition(event=event, from_=source, to=target, conditions=list(conditions))


def words(*moves: Transition[Any, Any, str, str], initial: str | None = "a", **states: Any) -> Words:
    given: dict[str, Any] = {"idles": ["a"], "finals": ["z"], "failed": "f", "initial": initial, **states}
    return Words(states=States(**given), transitions=list(moves), entity=Shelf().access())  # type: ignore[arg-type]  # nobody looks at entities here


def test_a_sound_definition_has_no_findings() -> None:
    assert lint(define()) == []
    assert lint(words(move("go", "a", "z"))) == []


@pytest.mark.parametrize(
    ("definition", "found"),
    [
        (
            words(move("go", "a", "z"), move("back", "lost", "a")),
            ["warning: no event leads to state lost [unreachable-state]"],
        ),
        (
            words(move("go", "a", "z"), move("go", "x", "y"), move("on", "y", "x"), idles=["a", "x", "y"], initial="a"),
            [
                "warning: no event leads to state x [unreachable-state]",
                "warning: no event leads to state y [unreachable-state]",
            ],
        ),
        (
            words(move("go", "a", "b"), move("end", "a", "z"), idles=["a", "b"]),
            ["warning: no event leads out of state b, which is not final [dead-end]"],
        ),
        (
            words(move("go", "a", "z"), move("go", "a", "a", sometimes)),
            [
                (
                    "warning: event go in state a always leads to z, never to a; give the first one a condition "
                    "[ambiguous-exit]"
                )
            ],
        ),
        (
            words(move("go", "a", "b"), move("one", "b", "z"), move("two", "b", "a")),
            [
                (
                    "warning: the automatic step from b always leads to z, never to a; give the first one a condition "
                    "[ambiguous-exit]"
                )
            ],
        ),
        (
            words(move("go", "a", "b"), move("on", "b", "c"), move("back", "c", "b"), move("end", "a", "z")),
            ["error: automatic steps run in a circle for ever: b -> c -> b [endless-loop]"],
        ),
        (
            words(move("go", "a", "b"), move("on", "b", "b", sometimes), move("end", "b", "z")),
            ["warning: automatic steps may run in a circle, ended only by conditions: b -> b [endless-loop]"],
        ),
    ],
)
def test_a_doubt_is_found(definition: Words, found: list[str]) -> None:
    assert [str(finding) for finding in lint(definition)] == found


def test_without_an_initial_state_every_state_to_rest_at_may_be_one() -> None:
    begins_anywhere = words(move("make", "blank", "a"), move("go", "a", "z"), initial=None)
    circle = words(move("go", "a", "z"), move("x", "p", "q"), move("y", "q", "p", sometimes), initial=None)

    assert lint(begins_anywhere) == []
    assert {finding.code for finding in lint(circle)} == {"unreachable-state", "endless-loop"}


class Hopeful:
    @on_event(["go", "gone"])
    async def event(self, entity: Order, payload: Any) -> Order:
        return entity

    @on_status_changed(from_="z", to=["a", "b"])
    async def change(self, entity: Order, payload: Any) -> Order:
        return entity

    @on_status_changed(from_="a", to=["z", "nowhere"])
    async def possible(self, entity: Order, payload: Any) -> Order:
        return entity


def test_hooks_for_what_cannot_happen_are_errors() -> None:
    found = lint(words(move("go", "a", "z")), Hooks([Hopeful()]).all)

    assert [str(finding) for finding in found] == [
        "error: Hopeful.event waits for gone, which is no event [impossible-hook]",
        "error: Hopeful.change waits for a change from z to a/b, which no transition makes [impossible-hook]",
    ]

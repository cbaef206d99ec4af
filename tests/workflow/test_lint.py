"""Doubts about definitions: each kind is found, and a sound definition has none."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from bullpen import Bullpen, Connection
from bullpen.errors import DoubtfulDefinition, InvalidOption, PermanentError
from bullpen.workflow.actions import Hooks, on_event, on_status_changed
from bullpen.workflow.definition import Definition, States, Transition
from bullpen.workflow.lint import lint
from bullpen.workflow.stores import RedisEntities
from bullpen.workflow.stores.direct import as_store
from tests.workflow.kit import Order, Shelf, define, delivery, engine_of

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
            ["error: automatic steps run in an endless circle: b -> c -> b [endless-loop]"],
        ),
        (
            words(move("go", "a", "b"), move("on", "b", "b", sometimes), move("end", "b", "z")),
            ["warning: automatic steps may run in a circle that only conditions end: b -> b [endless-loop]"],
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
        "error: Hopeful.event waits for gone, which is not an event of the workflow [impossible-hook]",
        "error: Hopeful.change waits for a change from z to a/b, which no transition makes [impossible-hook]",
    ]


async def one(entity: Order) -> Order:
    return entity


async def three(entity: Order, payload: Any, more: Any) -> Order:
    return entity


async def optional(entity: Order, payload: Any, more: Any = None) -> Order:
    return entity


async def wrong_fallback(entity: Order, payload: Any) -> Order:
    return entity


async def renamed(entity: Order, payload: Any) -> Order:
    return dataclasses.replace(entity, urn="urn:other")


async def assigned(entity: Order, payload: Any) -> Order:
    entity.urn = "urn:other"  # type: ignore[misc]  # its text is read, it never runs
    return entity


class TestFunctions:
    def test_an_exit_from_a_final_state_and_no_final_state_are_doubtful(self) -> None:
        leaves = words(move("go", "a", "z"), move("again", "z", "a"))
        endless = words(move("go", "a", "a"), finals=[])

        assert [str(each) for each in lint(leaves)] == [
            "warning: state z is final, but z --again--> a leads out of it [final-exit]"
        ]
        assert [str(each) for each in lint(endless)] == [
            "warning: no state is final, so no entity is ever done; name finals=[…] [no-final-state]"
        ]

    def test_functions_that_cannot_be_called_are_errors(self) -> None:
        mistakes: list[Any] = [one, three, optional]
        wrong: Any = {"fallback": wrong_fallback, "create": lambda urn: None}
        go = Transition[Any, Any, str, str](event="go", from_="a", to="z", actions=mistakes)
        definition = replace(words(go), **wrong)

        found = [(each.level, each.code, each.text) for each in lint(definition)]

        assert [each[:2] for each in found] == [("error", "wrong-arity")] * 4
        assert [each[2].partition(":")[0] for each in found] == [
            "action one cannot be called with (entity, payload)",
            "action three cannot be called with (entity, payload)",
            "fallback wrong_fallback cannot be called with (entity, event, payload)",
            "create <lambda> cannot be called with (urn, payload)",
        ]
        with pytest.raises(DoubtfulDefinition, match="action one cannot be called"):
            Bullpen().workflow(replace(words(go), name="w"))

    def test_an_action_that_changes_the_urn_is_doubtful(self) -> None:
        go = Transition[Any, Any, str, str](event="go", from_="a", to="z", actions=[renamed, assigned, optional])

        assert [str(each) for each in lint(words(go))] == [
            f"warning: action {name} changes 'urn', which must never change: it identifies the entity [changed-urn]"
            for name in ("renamed", "assigned")
        ]

    def test_a_blank_entity_in_no_state_is_doubtful(self) -> None:
        definition = words(move("go", "a", "z"))

        assert [str(each) for each in lint(definition, (), as_store(Shelf().access()))] == [
            "warning: a new entity has the status new, which is not a state of the workflow [unknown-status]"
        ]
        assert lint(define(), (), as_store(Shelf().access())) == []


async def test_what_the_text_does_not_show_is_refused_when_it_happens() -> None:
    """Nothing is stored under another urn; a retry could not help, so the entity is parked."""
    shelf = Shelf()
    shelf.put("urn:1")
    other = {"urn": "urn:2"}

    async def hidden(entity: Order, payload: Any) -> Order:
        return dataclasses.replace(entity, **other)  # type: ignore[arg-type]  # hidden from mypy too

    first = replace(define(shelf).transitions[0], actions=[hidden])
    definition = replace(define(shelf), transitions=[first, *define(shelf).transitions[1:]])
    with pytest.raises(PermanentError, match="action hidden changed the urn from 'urn:1' to 'urn:2'"):
        await engine_of(definition).emit(first.events[0], "urn:1", None, delivery(attempt=1))
    assert set(shelf.orders) == {"urn:1"}


async def test_an_entity_cannot_be_created_in_a_state_that_the_workflow_lacks(redis_url: str) -> None:
    connection = Connection(redis_url)
    entities: RedisEntities[str] = RedisEntities(connection, "orders")
    async with Bullpen(redis_url) as app:
        definition = Words(
            name="words",
            states=States(idles=["a"], finals=["z"], failed="f"),
            transitions=[move("go", "a", "z")],
            entity=entities,
            create=lambda urn, payload: {"urn": urn, "status": "nowhere"},
        )
        workflow = app.workflow(definition)

        with pytest.raises(InvalidOption, match="a state of the workflow: a, f, z"):
            await entities.create({"urn": "urn:1", "status": "nowhere"})
        await entities.create({"urn": "urn:1", "status": "a"})
        assert await workflow.emit("go", "urn:1")
        with pytest.raises(InvalidOption, match="an entity in a state of the workflow"):
            await workflow.emit("go", "urn:new")
        await entities.delete("urn:1")
    await connection.aclose()

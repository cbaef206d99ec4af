"""Diagrams, simulation, history and explanations."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from bullpen.errors import EntityNotFound, NotConfigured
from bullpen.workflow.definition import Definition, States, Transition
from bullpen.workflow.diagram import mermaid, svg
from bullpen.workflow.service import Workflow
from bullpen.workflow.stores.direct import as_store
from tests.workflow.kit import Event, OrderTransition, Shelf, Status, define, states, transitions


def is_rich(order: Any, payload: Any) -> bool:
    return bool(order.amount > 100)


def is_express(order: Any, payload: Any) -> bool:
    return bool(payload["express"])


def workflow_of(shelf: Shelf, **changes: Any) -> Workflow[Any, Any, Event, Status]:
    definition = define(shelf, **changes)
    access: Any = definition.entity
    return Workflow("order", definition, as_store(access))


# ---- diagrams ------------------------------------------------------------------------------------------------------


def test_mermaid_shows_states_events_and_conditions() -> None:
    definition = define(
        transitions=[
            *transitions(),
            OrderTransition(
                event=[Event.REOPEN, Event.PAY],
                from_=[Status.PACKED, Status.FAILED],
                to=Status.NEW,
                conditions=[is_rich, lambda order, payload: True],
            ),
        ]
    )

    assert mermaid(definition) == (
        "stateDiagram-v2\n"
        "    [*] --> new\n"
        "    new --> paid: pay\n"
        "    paid --> packed: pack\n"
        "    packed --> shipped: ship\n"
        "    packed --> new: reopen or pay [is_rich, lambda]\n"
        "    failed --> new: reopen or pay [is_rich, lambda]\n"
        "    shipped --> [*]\n"
        "    classDef idle fill:#e8f1fb,stroke:#3b6ea5\n"
        "    classDef failed fill:#fbe8e8,stroke:#a53b3b\n"
        "    class new idle\n"
        "    class paid idle\n"
        "    class packed idle\n"
        "    class failed failed\n"
    )


def test_odd_names_break_neither_diagram() -> None:
    odd = Definition[Any, Any, str, str](
        name='<&">',
        states=States(idles=["two words"], finals=["end"], failed='"failed"; <b>'),
        transitions=[
            Transition(event="a:b;c\n", from_="two words", to="end"),
            Transition(event="loop", from_="two words", to="two words"),
            Transition(event="other", from_="two words", to="two words"),
            Transition(event="back", from_="end", to="two words"),
        ],
        entity=Shelf().access(),  # type: ignore[arg-type]  # nobody looks at entities here
    )

    text = mermaid(odd)
    picture = ET.fromstring(svg(odd))

    assert 'state "two words" as s0' in text
    assert "s0 --> s1: a b c" in text
    assert text.count("\n") == len(text.splitlines())
    labels = {each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"two words", "end", '"failed"; <b>', "loop", "other", "back"} <= labels
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}rect"))) == 3


def test_the_picture_has_every_state_and_every_transition() -> None:
    picture = ET.fromstring(svg(define()))

    names = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {state.value for state in Status} | {event.value for event in (Event.PAY, Event.PACK, Event.SHIP)} == {
        *names
    }
    boxes = [(float(each.attrib["x"]), float(each.attrib["y"])) for each in picture.iter() if each.tag.endswith("rect")]
    assert len(set(boxes)) == len(Status)
    width, height = (float(picture.attrib[side]) for side in ("width", "height"))
    assert all(x + 130 <= width and y + 40 <= height for x, y in boxes)


# ---- simulation ----------------------------------------------------------------------------------------------------


def test_simulation_follows_events_without_acting() -> None:
    shelf = Shelf()
    through = workflow_of(shelf, states=states(idles=[Status.NEW, Status.PACKED]))

    told = through.simulate([Event.SHIP, Event.PAY, (Event.SHIP, {"by": "post"})])

    assert str(told).splitlines() == [
        "begins at new",
        "new --pay--> paid (event)",
        "paid --pack--> packed (automatic)",
        "packed --ship--> shipped (event)",
        "Unable to find transition for event: ship and status: new",
        "ends at shipped",
    ]
    assert (told.start, told.end, len(told.refused)) == ("new", "shipped", 1)
    assert shelf.updates == []


def test_simulation_asks_conditions_about_the_entity_it_is_given() -> None:
    shelf = Shelf()
    rich_only = workflow_of(
        shelf,
        transitions=[
            OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, conditions=[is_rich]),
            *transitions()[1:],
        ],
    )

    poor = rich_only.simulate([Event.PAY])
    rich = rich_only.simulate([Event.PAY], entity=shelf.put(amount=500))
    later = rich_only.simulate([Event.SHIP], start=Status.PACKED)

    assert poor.refused == ("No condition holds for event: pay and status: new",)
    assert (rich.end, later.end) == ("paid", "shipped")


def test_simulation_ends_a_circle() -> None:
    circle = workflow_of(
        Shelf(),
        max_steps=4,
        states=states(idles=[Status.NEW]),
        transitions=[
            OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID),
            OrderTransition(
                event=Event.PACK, from_=Status.PAID, to=Status.PAID, conditions=[lambda order, payload: True]
            ),
            OrderTransition(event=Event.SHIP, from_=Status.PAID, to=Status.SHIPPED),
        ],
    )

    told = circle.simulate([Event.PAY])

    assert len(told.moves) == 5 and "runs in a circle" in told.refused[0]


# ---- explanations --------------------------------------------------------------------------------------------------


async def test_an_explanation_tells_what_may_happen_and_why_not() -> None:
    shelf = Shelf()
    shelf.put(amount=5)
    choosy = workflow_of(
        shelf,
        transitions=[
            OrderTransition(
                event=[Event.PAY, Event.REOPEN],
                from_=Status.NEW,
                to=Status.PAID,
                conditions=[is_rich, is_express],
            ),
            OrderTransition(event=Event.PACK, from_=Status.NEW, to=Status.PACKED),
            *transitions()[1:],
        ],
    )

    told = await choosy.explain("urn:1")

    assert str(told).splitlines() == [
        "urn:1 is new (idle)",
        "pay leads to paid, but not now",
        "  is_rich: does not hold",
        "  is_express: cannot tell: 'NoneType' object is not subscriptable",
        "reopen leads to paid, but not now",
        "  is_rich: does not hold",
        "  is_express: cannot tell: 'NoneType' object is not subscriptable",
        "pack leads to packed",
    ]
    assert told.to_json()["options"][2]["holds"] is True
    assert (await choosy.explain("urn:1", {"express": True})).options[0].conditions[1] == ("is_express", "holds")
    with pytest.raises(EntityNotFound):
        await choosy.explain("urn:9")
    assert await choosy.history("urn:1") == []


@pytest.mark.parametrize(
    ("status", "kind"), [(Status.SHIPPED, "final"), (Status.FAILED, "failed"), (Status.PAID, "passing")]
)
async def test_an_explanation_tells_what_kind_of_state_it_is(status: Status, kind: str) -> None:
    shelf = Shelf()
    shelf.put(status=status)

    told = await workflow_of(shelf, states=states(idles=[Status.NEW])).explain("urn:1")

    assert told.kind == kind
    assert ("no event leads out of this state" in str(told)) == (kind != "passing")


def test_events_are_found_by_how_they_are_written() -> None:
    orders = workflow_of(Shelf())

    assert orders.event("pay") is Event.PAY
    with pytest.raises(NotConfigured, match="no event 'pya'; there is pay, pack, ship"):
        orders.event("pya")
    assert repr(orders) == "Workflow('order')"
    assert orders.mermaid().startswith("stateDiagram-v2") and orders.svg().startswith("<svg")

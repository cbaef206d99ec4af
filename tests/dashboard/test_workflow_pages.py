"""Workflows on the dashboard: the definition with its numbers, an entity, and an event that is emitted by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor
from bullpen.workflow import BullMQ, BullMQEvent, Definition, States, Transition
from tests.dashboard._kit import settings, visit
from tests.workflow.kit import Event, Status
from tests.workflow.stored import make_tables, redis_orders, sql_orders

ADMIN = Visitor("ada", Role.ADMIN)
_EVENTS = (Event.PAY, Event.SHIP)


def is_covered(order: Any, _payload: Any) -> bool:
    return bool(order.amount < 100)


def definition(store: Any) -> Any:
    return Definition(
        entity=store,
        states=States(
            initial=Status.NEW, idles=(Status.NEW, Status.PAID), finals=(Status.SHIPPED,), failed=Status.FAILED
        ),
        transitions=(
            Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, conditions=(is_covered,)),
            Transition(event=Event.SHIP, from_=Status.PAID, to=Status.SHIPPED),
        ),
    )


@pytest.fixture
async def app(redis_url: str, sqlite_url: str, queue_name: str) -> AsyncIterator[Bullpen]:
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as made:
        await made.ledger.migrate()
        await make_tables(made.ledger)
        orders = sql_orders(made.ledger)
        workflow = made.workflow(
            definition(orders.store),
            name="orders",
            bullmq=BullMQ(
                events=[
                    BullMQEvent(queue=queue_name, event=each, job_name=each.value) for each in (Event.PAY, Event.SHIP)
                ]
            ),
        )
        for number in range(60):
            await orders.create(f"urn:{number:03}", amount=1_000 if number == 1 else 1)
        for number in range(3):
            if number != 1:
                await workflow.emit(Event.PAY, f"urn:{number:03}", correlation_id="c-9", user_id="u7")
        await workflow.emit(Event.SHIP, "urn:002")
        yield made


@pytest.mark.requirement("W-77")
@pytest.mark.requirement("D-67")
async def test_a_definition_is_drawn_with_the_number_of_entities_in_each_state(app: Bullpen) -> None:
    listed, page, data = await visit(app, ADMIN, "/workflows", "/workflows/orders", "/api/v1/workflows/orders")

    assert ">Workflows</a>" in listed.text
    found = data.json()
    counts = {state["name"]: (state["count"], state["kind"]) for state in found["states"]}
    assert counts == {"new": (58, "idle"), "paid": (1, "idle"), "shipped": (1, "final"), "failed": (0, "failed")}
    assert "<title>new, idle: 58</title>" in page.text
    assert (len(found["entities"]), found["nextAfter"]) == (50, "urn:049")


@pytest.mark.requirement("D-68")
async def test_entities_are_found_by_urn_and_state(app: Bullpen) -> None:
    for query, expected in {
        "?state=paid": ["urn:000"],
        "?urn=urn:05&state=new": [f"urn:05{number}" for number in range(10)],
        "?after=urn:057": ["urn:058", "urn:059"],
        "?urn=urn:%25": [],
    }.items():
        (answer,) = await visit(app, ADMIN, f"/api/v1/workflows/orders{query}")
        assert [each["urn"] for each in answer.json()["entities"]] == expected, query


@pytest.mark.requirement("D-69")
async def test_an_entity_says_where_it_is_how_it_came_there_and_what_may_happen_next(app: Bullpen) -> None:
    paid, stuck, page, missing = await visit(
        app,
        ADMIN,
        "/api/v1/workflows/orders/urn:000",
        "/api/v1/workflows/orders/urn:001",
        "/workflows/orders/urn:000",
        "/workflows/orders/urn:nothing",
    )
    chain = (await visit(app, ADMIN, "/chains/c-9"))[0]

    found = paid.json()
    assert (found["status"], found["kind"]) == ("paid", "idle")
    assert [(each["event"], each["target"], each["user"]) for each in found["history"]] == [("pay", "paid", "u7")]
    assert [(each["event"], each["holds"]) for each in found["options"]] == [("ship", True)]
    (blocked,) = stuck.json()["options"]
    assert (blocked["holds"], blocked["conditions"]) == (False, [["is_covered", "does not hold"]])
    assert '/chains/c-9">chain</a>' in page.text
    assert "urn:000: new → paid on pay" in chain.text
    assert missing.status_code == 404


@pytest.mark.requirement("D-70")
async def test_an_event_is_shown_first_and_then_carried_once(app: Bullpen, queue_name: str) -> None:
    address = "/workflows/orders/urn:005/emit"
    refused = (await visit(app, Visitor("v"), address))[0]
    fields = {"event": "pay", "payload": "", "nonce": "n1"}
    shown = (await visit(app, ADMIN, address, data={**fields, "step": "preview"}))[0]
    nothing = (await visit(app, ADMIN, address, data={**fields, "event": "ship", "step": "preview"}))[0]
    wrong = (await visit(app, ADMIN, address, data={**fields, "payload": "{", "step": "preview"}))[0]
    assert (await app.queue(queue_name).counts()).waiting == 0
    done = [(await visit(app, ADMIN, address, data={**fields, "step": "send"}))[0] for _ in range(2)]

    assert refused.status_code == 403
    assert "new → <b>paid</b>" in shown.text
    assert "It would do nothing." in nothing.text
    assert wrong.status_code == 422
    assert [each.status_code for each in done] == [303, 303]
    assert (await app.queue(queue_name).counts()).waiting == 1
    entries = await app.ledger.audit.read()
    assert [each.subject for each in entries if each.action == "workflow.send"] == ["dashboard/orders urn:005"]


@pytest.mark.requirement("D-68")
async def test_a_store_that_cannot_list_still_opens_an_entity(redis_url: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        orders = redis_orders(app.connection)
        app.workflow(definition(orders.store), name="orders")
        await orders.create("urn:1")
        page, opened = await visit(app, ADMIN, "/workflows/orders", "/workflows/orders?urn=urn:1&open=1")
        await app.connection.shared_door("orders").call("DEL", "bullpen:entities:orders:{urn%3A1}")

    assert "cannot list its entities" in page.text
    assert opened.headers["location"] == "/workflows/orders/urn%3A1"

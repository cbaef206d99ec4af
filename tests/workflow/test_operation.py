"""What operators see of workflows: health, dead letters, metrics, log lines for machines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen.errors import PermanentError
from bullpen.ops.logs import FIELDS, JsonFormatter
from bullpen.ports.bindings import AnyEvent, AnyTransport, BullMQ, BullMQEvent
from bullpen.workflow.metrics import COUNTED, WorkflowMetrics
from tests.transports._listening import listening
from tests.workflow.kit import (
    Event,
    Order,
    OrderTransition,
    Shelf,
    Status,
    call,
    define,
    delivery,
    engine_of,
    failing,
    states,
    transitions,
)
from tests.workflow.test_registration import make_app

EVENTS = AnyTransport(events=[AnyEvent(source="orders", event=Event.PAY)])


@pytest.mark.requirement("X-56", "W-46")
async def test_a_workflow_that_consumes_nothing_is_seen_in_the_apps_health() -> None:
    app = make_app()
    idle = app.register(
        "idle", define(bullmq=BullMQ(events=[BullMQEvent(queue="q", event=Event.PAY)])), bullmq={"enabled": False}
    )
    fine = app.workflow(define(name="fine"), events=EVENTS)
    await idle.start()
    await fine.start()

    checks = (await app.health.report()).checks

    assert checks["workflow idle"] == "BullMQ client not available, skipping worker initialization."
    assert checks["workflow fine"] is None
    assert fine.client is not None
    await fine.client.close()
    assert "does not answer" in str(await fine.check())
    await app.aclose()


async def test_dead_events_of_any_transport_are_in_the_console(redis_url: str) -> None:
    app = make_app(redis_url=redis_url)
    shelf = Shelf()
    shelf.put()
    broken = OrderTransition(
        event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[failing(PermanentError("card stolen"))]
    )
    workflow = app.workflow(define(shelf, transitions=[broken, *transitions()[1:]]), events=EVENTS)

    with listening() as heard:
        await workflow.start()
        await workflow.send(Event.PAY, "urn:1")
        await heard.wait("dead_letter.written")

    console = await app.dead_letters()
    found = [each async for each in console.find()]
    assert [(each.store, each.letter.error_message) for each in found] == [("orders-dlq", "card stolen")]
    await app.aclose()


async def test_moves_repetitions_and_conflicts_are_counted() -> None:
    listeners = len(telemetry._listeners)
    assert make_app().workflows.all == () and len(telemetry._listeners) == listeners  # nothing to count, nothing to pay
    app, shelf = make_app(), Shelf()
    shelf.put()
    app.workflow(define())
    engine = engine_of(define(shelf))

    async def counted() -> dict[tuple[str, ...], float]:
        return {
            (metric.name, *sample.labels.values()): sample.value
            for metric in await app.metrics()
            for sample in metric.samples
        }

    # From 0 on: a counter that begins with its first failure hides that one from `increase`.
    before = {name: value for name, value in (await counted()).items() if name[0].startswith("bullpen_workflow_")}
    await engine.emit(Event.PAY, "urn:1", None, call())
    await engine.emit(Event.PAY, "urn:1", None, delivery(may_be_repeated=True))

    found = await counted()
    assert before["bullpen_workflow_moves_total", "order", "pay", "failed"] == 0
    assert before["bullpen_workflow_refused_total", "order", "pay"] == 0
    assert before["bullpen_workflow_conflicts_total", "order"] == 0
    assert set(before.values()) == {0}
    assert {name: found[name] for name, value in before.items() if found[name] != value} == {
        ("bullpen_workflow_moves_total", "order", "pay", "event"): 1,
        ("bullpen_workflow_repeated_total", "order"): 1,
    }
    await app.aclose()
    assert len(telemetry._listeners) == listeners


async def test_every_counter_of_a_workflow_is_there_from_the_first_scrape_on() -> None:
    """Whatever its events can do is counted from 0, so that `increase` sees the first one."""
    shelf = Shelf()
    shelf.put()
    definition = define(
        shelf,
        states=states(idles=[Status.NEW, Status.PACKED]),
        transitions=[
            OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, ignore_in=[Status.PACKED]),
            OrderTransition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED),
            OrderTransition(event=Event.SHIP, from_=Status.PACKED, to=Status.SHIPPED),
        ],
    )
    app = make_app()
    workflow = app.workflow(definition)
    metrics = WorkflowMetrics(lambda: [workflow])

    async def counted() -> dict[tuple[str, ...], float]:
        found = await metrics.collect()
        return {(each.name, *sample.labels.values()): sample.value for each in found for sample in each.samples}

    before = await counted()
    engine = engine_of(definition)
    await engine.emit(Event.PAY, "urn:1", None, call())
    await engine.emit(Event.PAY, "urn:1", None, call())
    after = await counted()
    metrics.close()
    await app.aclose()

    assert set(before.values()) == {0}
    assert {name[0] for name in before} == {name for name, _, _ in COUNTED.values()}
    assert after.keys() == before.keys()
    assert {name: value for name, value in after.items() if value} == {
        ("bullpen_workflow_moves_total", "order", "pay", "event"): 1,
        ("bullpen_workflow_moves_total", "order", "pack", "automatic"): 1,
        ("bullpen_workflow_ignored_total", "order", "pay"): 1,
    }


def test_everything_that_is_counted_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "workflows.md").read_text()

    assert [event for event in COUNTED if f"| `{event}` |" not in guide] == []
    assert [name for name, _, _ in COUNTED.values() if f"`{name}{{" not in guide] == []


@pytest.mark.requirement("X-24")
async def test_log_lines_for_machines_have_the_ids_and_nothing_that_is_absent() -> None:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("bullpen.workflow")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    shelf = Shelf()
    shelf.put()
    try:
        headers = {"tenantId": "t-1", "correlationId": "c-1"}
        await engine_of(define(shelf)).emit(Event.PAY, "urn:1", None, delivery(2, queue="orders", headers=headers))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)

    (line,) = map(json.loads, lines.getvalue().splitlines())
    assert {name: line[name] for name in FIELDS if name in line} == {
        "message": "Entity moved from new to paid by pay (event)",
        "jobId": "7",
        "queue": "orders",
        "urn": "urn:1",
        "tenantId": "t-1",
        "correlationId": "c-1",
        "attemptsMade": 1,
    }


async def test_ids_of_a_careless_producer_do_not_fail_an_event() -> None:
    trigger = delivery(headers={"correlationId": "c\0" * 500, "userId": "u" * 500})

    assert (trigger.correlation_id, trigger.user_id, trigger.tenant_id) == ("c" * 120, "u" * 60, None)


@pytest.mark.requirement("X-54")
async def test_ordered_events_of_one_entity_come_one_after_the_other_over_retries() -> None:
    """Without `ordered` a retry is overtaken by its successor."""
    app, shelf = make_app(), Shelf()
    shelf.put()
    order: list[Any] = []
    tries = 0

    async def sometimes(entity: Order, payload: Any) -> Order:
        nonlocal tries
        tries += 1
        order.append(payload)
        if tries == 1:
            raise ConnectionError("once")
        return entity

    definition = define(
        shelf, transitions=[OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[sometimes])]
    )
    events = AnyTransport(
        events=[AnyEvent(source="orders", event=Event.PAY)], ordered=True, concurrency=5,
        default_job_options=EVENTS.default_job_options.__class__(backoff={"type": "fixed", "delay": 30}),  # type: ignore[arg-type]  # the wire's form
    )  # fmt: skip
    workflow = app.workflow(definition, events=events)
    for number in (1, 2, 3):
        await workflow.send(Event.PAY, "urn:1", number)

    with listening() as heard:
        await workflow.start()
        await heard.wait("delivery.settled", 4)

    assert order == [1, 1, 2, 3]
    await app.aclose()


@pytest.mark.requirement("W-57")
async def test_a_close_waits_for_running_events_and_a_second_one_hurries_it() -> None:
    """What is unfinished then is given back with no attempt counted."""
    app, shelf = make_app(), Shelf()
    shelf.put()
    began, never = asyncio.Event(), asyncio.Event()

    async def slow(entity: Order, payload: Any) -> Order:
        began.set()
        await never.wait()
        return entity

    definition = define(
        shelf, transitions=[OrderTransition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[slow])]
    )
    workflow = app.workflow(definition, events=EVENTS)
    await workflow.start()
    await workflow.send(Event.PAY, "urn:1")
    await began.wait()

    with listening() as heard:
        closing = asyncio.create_task(workflow.close(60_000))
        await asyncio.wait([closing], timeout=0.1)
        assert not closing.done() and workflow.running == 1
        async with asyncio.timeout(20):
            await workflow.close(0)
            await closing

    assert heard.of("delivery.settled")[0]["outcome"] == "waiting"
    assert shelf.updates == []
    await app.aclose()

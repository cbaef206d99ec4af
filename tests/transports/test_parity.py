"""Moving a workflow to another transport changes its configuration and nothing else: the same story ends the same."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.app import Bullpen
from bullpen.plugins.transports.rabbitmq import DelayLadder, Topology
from bullpen.ports.bindings import AnyEvent, AnyTransport, DefaultJobOptions
from bullpen.settings import Settings
from tests.transports._listening import listening
from tests.transports.scenario import Event, Shop, play

TRANSPORTS = ["memory", "bullmq", "rabbitmq", "kafka", "kafka, parking"]
PAUSE_MS = 40

OUTCOMES = {
    # Order: (its status, its amount, tries to charge it, (cause, attempts, error) of its dead letter).
    "plain": ("paid", 5, 1, None),
    "paid": ("shipped", 0, 0, None),
    "early": ("new", 0, 0, ("exhausted", 3, "Unable to find transition for event: ship and status: new")),
    "free": ("new", 0, 0, None),
    "flaky": ("paid", 7, 2, None),
    "hopeless": ("failed", 0, 3, ("exhausted", 3, "card company gone")),
    "refused": ("failed", 0, 1, ("permanent", 1, "card stolen")),
    "patient": ("paid", 13, 2, None),
    "buggy": ("failed", 0, 3, ("exhausted", 3, "'typo'")),
    "missing": (
        None,
        None,
        0,
        (
            "exhausted",
            3,
            (
                "workflow 'order-SOURCE' has no entity 'urn:order:missing'; create it before its first event, "
                "or let `create` of the definition make it with that event"
            ),
        ),
    ),
    "unmapped": (
        "new",
        0,
        0,
        ("permanent", 1, "no event is mapped to 'unknown' of 'SOURCE' (mapped are: pay, ship)"),
    ),
}


def configuration(transport: str, request: pytest.FixtureRequest) -> tuple[dict[str, str], dict[str, Any]]:
    """All that differs: what the environment says, and options that make the tests quick."""
    match transport:
        case "bullmq":
            return {"BULLPEN_REDIS_URL": request.getfixturevalue("redis_url")}, {}
        case "rabbitmq":
            quick = Topology(delays=DelayLadder(unit_ms=20, levels=9))
            return {"RABBITMQ_URL": request.getfixturevalue("rabbit").url}, {"topology": quick}
        case "kafka":
            return {"KAFKA_BROKERS": request.getfixturevalue("kafka").address}, {}
        case "kafka, parking":
            return {"KAFKA_BROKERS": request.getfixturevalue("kafka").address}, {"retry": "park"}
    return {}, {}


async def tell(transport: str, request: pytest.FixtureRequest) -> dict[str, tuple[Any, ...]]:
    source = f"orders-{uuid.uuid4().hex[:6]}"
    environ, client_options = configuration(transport, request)
    app = Bullpen(settings=Settings.load(environ={**environ, "BULLPEN_TRANSPORT": transport.partition(",")[0]}))
    shop = Shop(PAUSE_MS)
    workflow = app.workflow(
        shop.definition(),
        name=f"order-{source}",
        events=AnyTransport(
            events=[AnyEvent(source=source, event=event, job_name=event.value) for event in Event],
            default_job_options=DefaultJobOptions(attempts=3, backoff=Backoff.exponential(PAUSE_MS)),
            concurrency=4,
        ),
        client_options=client_options,
    )
    with listening() as heard:
        table = await play(workflow, shop, source, heard)
    assert await workflow.is_healthy()
    await workflow.close()
    await app.aclose()
    return table


@pytest.mark.requirement("W-1", "W-2", "W-3", "W-38", "W-39", "W-49", "W-54", "W-59", "X-39")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_same_story_ends_the_same_everywhere(transport: str, request: pytest.FixtureRequest) -> None:
    assert await tell(transport, request) == OUTCOMES

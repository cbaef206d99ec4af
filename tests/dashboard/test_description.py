"""The API's description: true for what is answered, and tried by a machine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.ledger import OutboxItem
from tests.dashboard._kit import HOST, As, settings, transport, visit
from tests.dashboard.test_pages import fail_one
from tests.openapi import problems_of, served

ADMIN = Visitor("ada", Role.ADMIN)


@pytest.fixture
async def app(redis_url: str, sqlite_url: str) -> AsyncIterator[Bullpen]:
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as made:
        await made.ledger.migrate()
        await fail_one(redis_url, made.queue("mails"), {"to": "x"})
        await made.queue("mails").add("send", {"text": "x"}, job_id="one")
        await made.queue("mails").upsert_scheduler("x", cron="0 3 * * *")
        item = OutboxItem(
            integration_type="webhook:x", event_type="e", source_stream_id="s", source_event_id="1", payload={},
            correlation_id="x",
        )  # fmt: skip
        await made.ledger.outbox.enqueue_many([item])
        yield made


@pytest.mark.requirement("D-124")
async def test_what_is_described_is_what_is_answered(app: Bullpen) -> None:
    """Every answer has exactly the members of its view's type, and every address is described."""
    (told,) = await visit(app, Visitor("v"), "/api/v1/openapi.json")
    described = told.json()
    assert described["openapi"] == "3.1.0"
    ids = [operation["operationId"] for path in described["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    (row,) = await app.ledger.outbox.find()
    dashboard, checked = make_dashboard(app, access=As(ADMIN)), 0
    async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
        for route in dashboard.routes:
            if route.pattern.startswith(("/stream", "/pulse", "/login", "/logout", "/settings")):
                continue
            assert route.method.lower() in described["paths"][route.pattern]
            if route.view is None or route.method != "GET":
                continue
            ids_of = {"queue": "mails", "job": "one", "type": "webhook:x", "verb": "pause", "store": "mails-dlq"}
            given = {**ids_of, "id": row.id if "outbox" in route.pattern else "x", "entry": "dl-1-1"}
            path = "/".join(given.get(part[1:-1], "x") if "{" in part else part for part in route.pattern.split("/"))
            answer = await http.get(f"/api/v1{path}")
            if answer.status_code == 200:
                checked += 1
                body: Any = answer.json()
                made = msgspec.json.decode(msgspec.json.encode(msgspec.convert(body, route.view)))
                assert made == body, path
    await dashboard.aclose()
    assert checked >= 20


@pytest.mark.requirement("D-124")
@pytest.mark.long
async def test_a_machine_that_tries_the_api_finds_nothing(app: Bullpen) -> None:
    dashboard = make_dashboard(app, access=lambda _: ADMIN)
    async with dashboard, served(dashboard) as address:
        assert await problems_of(f"{address}/api/v1", "", examples=3) == []

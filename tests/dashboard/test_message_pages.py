"""Scheduled messages on the dashboard: by status, one with its way, the calendar, and what people may do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor
from bullpen.messages import Messages, Recipient
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from tests.dashboard._kit import settings, visit
from tests.messages.kit import make

ADMIN = Visitor("ada", Role.ADMIN)


@pytest.fixture(params=["sqlite_url", "postgres_url"])
async def app(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Bullpen]:
    url = request.getfixturevalue(request.param)
    async with Bullpen(settings=settings(redis_url, ledger_url=url)) as made:
        await made.ledger.migrate()
        messages: Messages = make(made.ledger, MemoryClient(MemoryBroker()))
        tomorrow = (datetime.now(UTC) + timedelta(days=1)).strftime("1990-%m-%d")
        people = [
            Recipient(
                id=f"p{number}",
                tenant_id="t1" if number % 2 else "t2",
                zone="UTC" if number % 3 else "Asia/Tokyo",
                channel="email",
                address=f"p{number}@example.com",
                occasions={"birthday": tomorrow},
            )
            for number in range(60)
        ]
        await messages.recipients.save_many(people)
        await messages.planner().run_until_done()
        yield made
        await messages.aclose()


@pytest.mark.requirement("W-77")
@pytest.mark.requirement("D-73")
async def test_messages_are_read_page_by_page_and_counted_by_hour(app: Bullpen) -> None:
    first, calendar, page, mine, his = [
        *await visit(app, ADMIN, "/api/v1/messages", "/api/v1/messages/calendar", "/messages/calendar"),
        *await visit(app, Visitor("t", Role.VIEWER, ("t1",)), "/api/v1/messages", "/api/v1/messages/calendar"),
    ]
    found = first.json()
    (second,) = await visit(app, ADMIN, f"/api/v1/messages?after={found['nextAfter']}")

    assert (found["counts"], len(found["messages"])) == ({"CREATED": 60}, 50)
    ids = [each["id"] for each in found["messages"] + second.json()["messages"]]
    assert len(set(ids)) == 60
    assert [each["count"] for each in calendar.json()["byClock"] if each["at"].endswith("T09")] == [60]
    assert sum(each["count"] for each in calendar.json()["byInstant"]) == 60
    assert dict(calendar.json()["zones"]) == {"UTC": 40, "Asia/Tokyo": 20}
    assert page.status_code == 200
    assert ({each["tenant"] for each in mine.json()["messages"]}, mine.json()["counts"]) == ({"t1"}, {})
    assert his.json()["total"] == 30


@pytest.mark.requirement("D-73")
async def test_a_message_says_how_it_stands_and_is_cancelled_once(app: Bullpen) -> None:
    row = (await visit(app, ADMIN, "/api/v1/messages"))[0].json()["messages"][0]
    other = Visitor("t", Role.OPERATOR, ("t1" if row["tenant"] == "t2" else "t2",))
    address = f"/messages/{row['id']}"
    page, missing = await visit(app, ADMIN, address, "/messages/00000000-0000-0000-0000-000000000000")
    hidden = (await visit(app, other, address))[0]
    poor = (await visit(app, Visitor("v"), address))[0]
    refused = [
        *await visit(app, Visitor("v"), f"{address}/act/cancel", data={}),
        *await visit(app, other, f"{address}/act/cancel", data={}),
        *await visit(app, ADMIN, f"{address}/act/retry", data={}),
    ]
    done = (await visit(app, ADMIN, f"{address}/act/cancel", data={"reason": "moved"}))[0]
    again = (await visit(app, ADMIN, f"{address}/act/cancel", data={"nonce": "2"}))[0]

    assert "It leaves in" in page.text
    assert "@example.com" in page.text
    assert "@example.com" not in poor.text
    assert (missing.status_code, hidden.status_code) == (404, 404)
    assert [each.status_code for each in refused] == [403, 404, 409]
    assert (done.status_code, again.status_code) == (303, 409)
    counts = (await visit(app, ADMIN, "/api/v1/messages"))[0].json()["counts"]
    assert counts == {"CREATED": 59, "CANCELLED": 1}

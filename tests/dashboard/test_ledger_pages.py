"""The outbox and runs on the dashboard, with a real ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.ledger import OutboxItem
from bullpen.settings import DashboardSettings
from tests.dashboard._kit import HOST, SAME, As, opened, settings, transport


@pytest.fixture
async def app(redis_url: str, sqlite_url: str) -> AsyncIterator[Bullpen]:
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as made:
        await made.prepare()
        items = [
            OutboxItem(
                integration_type="webhook:x",
                event_type="order.paid",
                source_stream_id="order-1",
                source_event_id=f"{number}",
                payload={"order": number, "token": "sk_live_0123456789abcdef"},
                tenant_id="t1" if number % 2 else "t2",
            )
            for number in range(60)
        ]
        await made.ledger.outbox.enqueue_many(items)
        yield made


async def visit(app: Bullpen, visitor: Visitor, *paths: str) -> list[httpx.Response]:
    dashboard = make_dashboard(app, access=As(visitor))
    async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
        answers = [await http.get(path) for path in paths]
    await dashboard.aclose()
    return answers


ADMIN = Visitor("ada", Role.ADMIN)


@pytest.mark.requirement("D-59")
async def test_the_outbox_is_read_page_by_page(app: Bullpen) -> None:
    (first,) = await visit(app, ADMIN, "/api/v1/outbox?status=PENDING")
    found = first.json()
    (second,) = await visit(app, ADMIN, f"/api/v1/outbox?status=PENDING&after={found['nextAfter']}")

    assert found["counts"]["PENDING"] == 60
    assert len(found["rows"]) == 50
    assert found["rows"][0]["word"] == "waiting"
    assert len(second.json()["rows"]) == 10
    assert second.json()["nextAfter"] == ""
    assert not {row["id"] for row in found["rows"]} & {row["id"] for row in second.json()["rows"]}


@pytest.mark.requirement("D-60")
async def test_a_row_shows_its_payload_without_secrets(app: Bullpen) -> None:
    (listed,) = await visit(app, ADMIN, "/api/v1/outbox")
    row_id = listed.json()["rows"][0]["id"]
    page, hidden, wrong, missing = [
        *await visit(app, ADMIN, f"/outbox/{row_id}"),
        *await visit(app, Visitor("v"), f"/outbox/{row_id}"),
        *await visit(app, ADMIN, "/outbox/nonsense", "/outbox/00000000-0000-0000-0000-000000000000"),
    ]

    assert page.status_code == 200
    assert "order.paid" in page.text
    assert "sk_live" not in page.text
    assert "You may not see payloads" in hidden.text
    assert (wrong.status_code, missing.status_code) == (404, 404)


@pytest.mark.requirement("D-112")
async def test_a_tenant_sees_his_rows_and_no_number_of_others(app: Bullpen) -> None:
    tenant = Visitor("t", Role.ADMIN, ("t1",))
    (listed,) = await visit(app, ADMIN, "/api/v1/outbox")
    other = next(row["id"] for row in listed.json()["rows"] if row["tenant"] == "t2")
    mine, refused, runs = await visit(app, tenant, "/api/v1/outbox", f"/outbox/{other}", "/api/v1/runs")

    assert {row["tenant"] for row in mine.json()["rows"]} == {"t1"}
    assert mine.json()["counts"] == {}
    assert refused.status_code == 404
    assert runs.json()["rows"] == []


async def test_what_is_done_goes_to_the_audit_table(app: Bullpen) -> None:
    await app.queue("mails").add("job", {})
    dashboard = make_dashboard(app, access=As(ADMIN))
    async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
        await http.post("/queues/mails/act/pause", data={"reason": "month end"}, headers=SAME)
        page = (await http.get("/audit")).text
        assert "month end" in (await http.get("/queues/mails")).text
        runs = await http.get("/runs")
        assert ">Outbox</a>" in runs.text
    await dashboard.aclose()

    (entry,) = await app.ledger.audit.read(subject="mails")
    assert (entry.actor, entry.action, entry.detail["reason"]) == ("ada", "queue.pause", "month end")
    assert "for good" in page


async def test_the_audit_shows_the_login_of_the_database_beside_the_name(redis_url: str, postgres_url: str) -> None:
    """The name is what that login said; where both do not fit, somebody sees it here."""
    async with Bullpen(settings=settings(redis_url, ledger_url=postgres_url)) as app:
        await app.ledger.audit.write("the chief", "dead_letter.redrive", "q/1", tenant_id=None, detail={})
        (entry,) = await app.ledger.audit.read()
        page, listed = await visit(app, ADMIN, "/audit", "/api/v1/audit")

    assert entry.login
    assert [(each["actor"], each["login"]) for each in listed.json()["entries"]] == [("the chief", entry.login)]
    assert f"login <bdi>{entry.login}</bdi>" in page.text


async def test_without_a_ledger_its_pages_are_not_offered(redis_url: str) -> None:
    async with opened(redis_url) as (http, _):
        assert ">Outbox</a>" not in (await http.get("/")).text
        assert (await http.get("/outbox")).status_code == 404


async def test_an_export_of_a_store_that_is_none_says_so(app: Bullpen) -> None:
    """Before the answer begins: it was a download of nothing, with an error in the log."""
    made = make_dashboard(app, settings=DashboardSettings())
    async with made, httpx.AsyncClient(transport=transport(made), base_url=HOST) as http:
        wrong = await http.get("/dead-letters/export?store=nowhere")
        right = await http.get("/dead-letters/export?store=integration_outbox")

    assert wrong.status_code == 422
    assert "nowhere" in wrong.text
    assert right.status_code == 200


@pytest.mark.parametrize("text", ["%ED%B3%BF", "%ED%A0%80", "%FF"])
async def test_a_chain_whose_id_is_no_text_is_not_found(app: Bullpen, text: str) -> None:
    (answer,) = await visit(app, ADMIN, f"/chains/{text}")

    assert answer.status_code == 404

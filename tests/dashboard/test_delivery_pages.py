"""Chains from event to receipt, destinations and what holds a row up, with a real ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor
from bullpen.ledger import OutboxItem
from bullpen.ledger.records import Died, Retried, Sent, Settlement
from bullpen.runs import RunPayload, Runs
from tests.dashboard._kit import settings, visit

ADMIN = Visitor("ada", Role.ADMIN)
OF_T2 = Visitor("t", Role.OPERATOR, ("t2",))


@pytest.fixture(params=["sqlite_url", "postgres_url"])
async def app(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Bullpen]:
    url = request.getfixturevalue(request.param)
    async with Bullpen(settings=settings(redis_url, ledger_url=url)) as made:
        await made.ledger.migrate()
        await deliver(made, "webhook:good", Sent("receipt-77"), "c-1")
        await deliver(made, "webhook:bad", Died("HTTP 401 no", "REJECTED"), "c-1")
        await deliver(made, "webhook:slow", Retried("HTTP 503 later", "UNAVAILABLE", 3_600_000), "c-2", tenant="t2")
        yield made


async def deliver(app: Bullpen, kind: str, outcome: Any, correlation: str, *, tenant: str = "t1") -> str:
    """One row, claimed by a dispatcher, with one attempt."""
    item = OutboxItem(
        integration_type=kind,
        event_type="order.paid",
        source_stream_id="order-1",
        source_event_id=f"e-{kind}",
        payload={"order": 1},
        tenant_id=tenant,
        correlation_id=correlation,
        ordering_key="order-1",
    )
    (stored,) = await app.ledger.outbox.enqueue_many([item])
    rows = await app.ledger.outbox.claim_due_batch("d-1", 10, lease_ms=60_000)
    begun = [row for row in rows if row.id == stored.id]
    await app.ledger.outbox.settle([Settlement(row, outcome, worker="d-1") for row in begun])
    return str(stored.id)


@pytest.mark.requirement("W-77")
@pytest.mark.requirement("D-66")
async def test_a_chain_leads_from_the_event_to_the_receipt(app: Bullpen) -> None:
    page, data, other, missing, poor = [
        *await visit(app, ADMIN, "/chains/c-1", "/api/v1/chains/c-1"),
        *await visit(app, OF_T2, "/chains/c-1"),
        *await visit(app, ADMIN, "/chains/nothing"),
        *await visit(app, Visitor("v"), "/chains/c-1"),
    ]

    found = data.json()
    assert (found["word"], found["rows"]) == ("dead", 2)
    assert found["says"] == "1 delivery of 2 failed finally."
    kinds = [step["kind"] for step in found["steps"]]
    assert kinds.count("row") == 3, "the announcement of the dead row too"
    assert kinds.count("attempt") == 2
    assert [step["atMs"] for step in found["steps"]] == sorted(step["atMs"] for step in found["steps"])
    assert "receipt-77" in page.text
    assert "HTTP 401" in page.text
    assert (other.status_code, missing.status_code) == (404, 404)
    assert "receipt-77" not in poor.text
    assert "HTTP 401" not in poor.text


@pytest.mark.requirement("D-59")
async def test_rows_are_found_by_what_is_known_of_them(app: Bullpen) -> None:
    for query, expected in {
        "type=webhook:bad": ["webhook:bad"],
        "correlation=c-2": ["webhook:slow"],
        "ordering=order-1&order=newest": ["webhook:slow", "webhook:bad", "webhook:good"],
        "code=REJECTED": ["webhook:bad"],
        "event=nothing": [],
    }.items():
        (answer,) = await visit(app, ADMIN, f"/api/v1/outbox?{query}")
        assert [row["kind"] for row in answer.json()["rows"]] == expected, query


@pytest.mark.requirement("D-63")
async def test_destinations_tell_how_deliveries_went_and_are_switched_off(app: Bullpen) -> None:
    before, listed, one = await visit(app, ADMIN, "/api/v1/destinations", "/destinations", "/destinations/webhook:bad")
    assert (listed.status_code, one.status_code) == (200, 200)
    rows = {row["type"]: row for row in before.json()["destinations"]}
    assert rows["webhook:good"]["windows"][0]["ok"] == 1.0
    assert rows["webhook:bad"]["windows"][0]["ok"] == 0.0
    assert (rows["webhook:bad"]["dead"], rows["webhook:slow"]["retrying"]) == (1, 1)
    assert [rows[f"webhook:{name}"]["failing"] for name in ("good", "bad")] == [0, 1]
    assert rows["webhook:bad"]["failingSinceMs"] > 0
    assert "The newest attempt failed, the last with <b" in one.text
    assert "REJECTED" in one.text

    address = "/destinations/webhook:slow/act/disable"
    preview, refused = (await visit(app, ADMIN, address))[0], (await visit(app, Visitor("v"), address))[0]
    done = (await visit(app, ADMIN, address, data={"reason": "month end", "nonce": "n1"}))[0]
    again = (await visit(app, ADMIN, address, data={"reason": "month end", "nonce": "n1"}))[0]
    third = (await visit(app, ADMIN, address, data={"nonce": "n2"}))[0]

    assert "no attempt is counted" in preview.text
    assert (refused.status_code, done.status_code, again.status_code, third.status_code) == (403, 303, 303, 409)
    (entry,) = await app.ledger.audit.read(subject="webhook:slow")
    assert (entry.actor, entry.action, entry.detail["reason"]) == ("ada", "outbox.disable", "month end")
    row = (await visit(app, ADMIN, "/api/v1/outbox?type=webhook:slow"))[0].json()["rows"][0]["id"]
    held, above = await visit(app, ADMIN, f"/outbox/{row}", "/outbox")
    assert "webhook:slow was disabled by ada: month end." in held.text
    (chain,) = await visit(app, ADMIN, "/api/v1/chains/c-2")
    assert chain.json()["says"] == "1 delivery waits. webhook:slow was disabled by ada: month end."
    assert "is switched off; 1 row waits for it" in " ".join(above.text.split())
    assert (await visit(app, ADMIN, "/destinations/webhook:slow/act/enable", data={}))[0].status_code == 303
    assert await app.ledger.destinations.troubled() == {}


@pytest.mark.requirement("D-72")
async def test_a_run_is_cancelled_by_its_own_tenant_alone(app: Bullpen) -> None:
    runs = Runs(app.ledger, app.connection, prefix=app.prefix)
    payload = RunPayload(
        run_id="7c6f4b0e-0000-4000-8000-000000000001", tenant_id="t1", version_id="v1", definition={}, context_inputs={}
    )
    await runs.service.submit(payload, actor="test", cost=0)
    address = f"/runs/{payload.run_id}/act/cancel"
    others = await visit(app, OF_T2, address)
    others += await visit(app, OF_T2, address, data={})
    shown = (await visit(app, ADMIN, f"/runs/{payload.run_id}"))[0]
    mine = await visit(app, Visitor("m", Role.OPERATOR, ("t1",)), address, data={"reason": "not needed"})
    again = (await visit(app, ADMIN, address))[0]

    assert [each.status_code for each in others] == [404, 404]
    assert "Cancel…" in shown.text
    assert mine[0].status_code == 303
    row = await app.ledger.runs.get(payload.run_id)
    assert row is not None
    assert row.status.value == "CANCELLED"
    assert "It has ended: it is CANCELLED." in again.text

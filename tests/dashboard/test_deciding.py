"""What people decide about deliveries: unknown outcomes, history, tests, parked events; on both databases."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.ledger import OutboxItem, OutboxStatus
from bullpen.ledger.records import Died, Sent, Settlement
from bullpen.ports.channel import Accepted, ChannelHealth
from bullpen.ports.source import SourceEvent
from tests.dashboard._kit import As, settings, visit
from tests.ops.test_history import until

ADMIN = Visitor("ada", Role.ADMIN)
OPERATOR = Visitor("bo", Role.OPERATOR)
UNKNOWN = Died("the connection ended", "UNKNOWN_OUTCOME")


@pytest.fixture(params=["sqlite_url", "postgres_url"])
async def app(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Bullpen]:
    url = request.getfixturevalue(request.param)
    async with Bullpen(settings=settings(redis_url, ledger_url=url)) as made:
        await made.ledger.migrate()
        yield made


async def deliver(app: Bullpen, kind: str, outcome: Any, correlation: str, *, tenant: str = "t1") -> str:
    """One row with one attempt."""
    item = OutboxItem(
        integration_type=kind,
        event_type="order.paid",
        source_stream_id="order-1",
        source_event_id=correlation,
        payload={"order": 1},
        tenant_id=tenant,
        correlation_id=correlation,
    )
    (stored,) = await app.ledger.outbox.enqueue_many([item])
    rows = await app.ledger.outbox.claim_due_batch("d-1", 10, lease_ms=60_000)
    settled = [Settlement(row, outcome, worker="d-1") for row in rows if row.id == stored.id]
    await app.ledger.outbox.settle(settled)
    return str(stored.id)


async def status(app: Bullpen, row_id: str) -> str:
    row = await app.ledger.outbox.get(row_id)
    assert row is not None
    return row.status.value


@pytest.mark.requirement("D-62")
@pytest.mark.parametrize(("verb", "becomes"), [("delivered", "SENT"), ("again", "PENDING")])
async def test_a_person_decides_what_became_of_a_row(app: Bullpen, verb: str, becomes: str) -> None:
    """With a word about what the target does with a repetition; somebody else's decision stays."""
    row_id = await deliver(app, "webhook:x", UNKNOWN, "c-1")
    known = await deliver(app, "webhook:x", Died("no", "REJECTED"), "c-2")
    page, tab, form, wrong = await visit(
        app, OPERATOR, f"/outbox/{row_id}", "/outbox?status=DEAD&code=UNKNOWN_OUTCOME",
        f"/outbox/{row_id}/act/{verb}", f"/outbox/{known}/act/{verb}",
    )  # fmt: skip
    assert "Was it delivered?" in page.text
    assert row_id in tab.text and known not in tab.text
    assert ("same idempotency key" in form.text) == (verb == "again")
    assert "Its outcome is known" in wrong.text

    first, second = [
        (await visit(app, OPERATOR, f"/outbox/{row_id}/act/{verb}", data={"nonce": nonce}))[0] for nonce in "ab"
    ]
    assert (first.status_code, second.status_code) == (303, 409)
    assert await status(app, row_id) == becomes
    assert await status(app, known) == "DEAD"
    actions = [entry.action for entry in await app.ledger.audit.read() if entry.actor == "bo"]
    assert actions == ["outbox.confirm" if verb == "delivered" else "outbox.redrive"]


@pytest.mark.requirement("D-62")
@pytest.mark.parametrize(("verb", "becomes"), [("confirm", "SENT"), ("resend", "PENDING")])
async def test_many_are_decided_together(app: Bullpen, verb: str, becomes: str) -> None:
    """Of one destination; one that becomes unknown after the form was made is left alone."""
    ids = [await deliver(app, "webhook:x", UNKNOWN, f"c-{number}") for number in range(5)]
    other = await deliver(app, "webhook:y", UNKNOWN, "c-9")
    address = f"/destinations/webhook:x/rows/{verb}"
    one, form = await visit(app, OPERATOR, "/destinations/webhook:x", address)
    assert "5 with an unknown outcome" in one.text
    assert "<strong>5</strong>" in form.text
    fixed = re.findall(r'name="fixed" value="([^"]+)"', form.text)[0]
    late = await deliver(app, "webhook:x", UNKNOWN, "c-8")
    await operate(app, OPERATOR, address, {"confirmed": "1", "fixed": fixed, "nonce": "n", "reason": "asked them"})
    assert [await status(app, each) for each in ids] == [becomes] * 5
    assert [await status(app, each) for each in (other, late)] == ["DEAD", "DEAD"]


async def operate(app: Bullpen, visitor: Visitor, address: str, fields: dict[str, str]) -> dict[str, Any]:
    """Send a form, and wait for the operation that it starts."""
    dashboard = make_dashboard(app, access=As(visitor))
    (answer,) = await visit(app, visitor, address, data=fields)
    assert answer.status_code == 303, answer.text
    number = answer.headers["location"].rpartition("/")[2]
    dashboard.desk.operations.wake()
    found: Any = None

    async def ended() -> bool:
        nonlocal found
        found = await dashboard.desk.operations.get(number)
        return found is not None and found.state == "completed"

    await until(ended)
    await dashboard.aclose()
    return {"done": found.done, "skipped": found.skipped, "title": found.title}


@pytest.mark.requirement("D-64")
async def test_history_is_sent_again_once_under_a_name(app: Bullpen) -> None:
    """By type, period and tenant, with the count first; the same name again copies nothing."""
    for number in range(3):
        await deliver(app, "webhook:x", Sent(f"r{number}"), f"c-{number}", tenant="t1" if number else "t2")
    await deliver(app, "webhook:y", Sent("r"), "c-7")
    address = "/destinations/webhook:x/rows/replay"
    counted, none, nameless, poor = [
        (await visit(app, visitor, address, data=data))[0]
        for visitor, data in (
            (ADMIN, {"tenant": "t1"}),
            (ADMIN, {"before": "2001-01-01"}),
            (ADMIN, {"confirmed": "1"}),
            (OPERATOR, {"confirmed": "1", "label": "again"}),
        )
    ]
    assert "<strong>2</strong>" in counted.text and "<strong>0</strong>" in none.text
    assert nameless.status_code == 422 and "Name the replay" in nameless.text
    assert poor.status_code == 403
    fields = {"confirmed": "1", "label": "restored", "tenant": "t1", "reason": "restored a backup"}
    first = await operate(app, ADMIN, address, {**fields, "nonce": "a"})
    again = await operate(app, ADMIN, address, {**fields, "nonce": "b"})
    assert (first["done"], again["done"]) == (2, 0)
    assert first["title"] == "Replay webhook:x"
    rows = await app.ledger.outbox.find(integration_type="webhook:x", status=OutboxStatus.PENDING)
    assert [row.tenant_id for row in rows] == ["t1", "t1"]


class Provider:
    """Takes everything."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    async def send(self, message: Any) -> Any:
        self.taken.append(message)
        return Accepted("250 fine")

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None: ...


@pytest.mark.requirement("D-63")
async def test_a_test_message_goes_to_a_destination_of_the_app(app: Bullpen) -> None:
    await deliver(app, "webhook:x", Sent("r"), "c-1")
    address = "/destinations/webhook:x/test"
    (without,) = await visit(app, OPERATOR, address)
    assert "bullpen dashboard MODULE:APP" in without.text
    provider = Provider()
    app.use_outbox().route("webhook:x", provider)
    (done, refused) = [(await visit(app, who, address, data={}))[0] for who in (OPERATOR, Visitor("v"))]
    assert done.status_code == 303 and "250%20fine" in done.headers["set-cookie"]
    assert [message.event_type for message in provider.taken] == ["bullpen.test.v1"]
    assert refused.status_code == 403
    (entry,) = [each for each in await app.ledger.audit.read() if each.action == "outbox.test"]
    assert entry.actor == "bo"


@pytest.mark.requirement("D-65")
async def test_parked_events_are_tried_again_or_skipped(app: Bullpen) -> None:
    async with app.ledger.database.transaction_without_tenant() as connection:
        for number, data in enumerate((b'{"order": 1, "token": "sk_live_1"}', b"no json")):
            event = SourceEvent(
                id=f"e{number}", stream="order-1", type="order.paid", version=number, position=number,
                recorded_at=datetime.now(UTC), data_bytes=data, metadata_bytes=b"{}",
            )  # fmt: skip
            await app.ledger.parked.park(connection, "default", event, "KeyError: 'vat'", tries=3)
    first, second = await app.ledger.parked.find()
    listed, one, broken, poor = [
        *await visit(app, OPERATOR, "/parked", f"/parked/{first.id}", f"/parked/{second.id}"),
        *await visit(app, Visitor("v"), "/parked"),
    ]
    assert "KeyError" in listed.text and "order.paid" in listed.text
    assert 'href="/parked">projector' in (await visit(app, OPERATOR, "/"))[0].text, "the verdict leads there"
    assert "sk_live_1" not in one.text and "order" in one.text
    assert "no json" in broken.text
    assert "KeyError" not in poor.text, "errors are payload"

    answers = [
        (await visit(app, OPERATOR, path, data={}))[0].status_code
        for path in (
            f"/parked/{first.id}/act/retry",
            f"/parked/{first.id}/act/retry",
            f"/parked/{second.id}/act/skip",
            f"/parked/{second.id}/act/skip",
        )
    ]
    assert answers == [303, 409, 303, 404]
    (left,) = await app.ledger.parked.find()
    assert (left.id, left.retry_wanted) == (first.id, True)

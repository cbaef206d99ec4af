"""The projector keeps the outbox up with the events: nothing lost, nothing twice, nothing in silence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen.errors import DatabaseUnavailable, InvalidOption, LedgerNotReady, NotConfigured
from bullpen.ledger import Ledger, OutboxStatus, ParkedEvent
from bullpen.outbox import EventRoutes, IntegrationMessage, Outbox, Projector, ProjectorOptions
from bullpen.outbox.mapping import Since
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.channel import Unavailable
from bullpen.ports.source import BEGINNING, EventBatch, SourceEvent
from bullpen.testing.contracts.source import an_event
from bullpen.testing.postgres import PostgresServer
from tests.contracts.outbox_repository import execute
from tests.databases import ROLES, MakeLedger
from tests.outbox.kit import PATIENCE_S, SpyChannel, Told, rows, until_settled

MakeProjector = Callable[..., Projector]
QUICK = {"retry_pause_ms": 1, "standby_ms": 100, "parked_interval_ms": 20}


def payments(since: Since = "beginning", to: str = "webhook:partnerX") -> EventRoutes:
    routes = EventRoutes()

    @routes.on("payment.*", to=to, since=since)
    def payment(event: SourceEvent) -> dict[str, Any]:
        if event.data["number"] == 13:
            raise RuntimeError("thirteen, and https://ada:secret@host/ too")
        return {"orderId": event.data["number"]}

    return routes


@pytest.fixture
async def make_projector(ledger: Ledger) -> AsyncIterator[MakeProjector]:
    opened: list[Projector] = []

    def make(
        routes: EventRoutes | None = None, *, ledger: Ledger = ledger, name: str = "default", source: Any = None,
        **options: Any,
    ) -> Projector:  # fmt: skip
        given = source or SqlEvents(ledger, batch_size=10, poll_ms=50)
        chosen = ProjectorOptions(**{**QUICK, **options})
        opened.append(Projector(ledger, given, payments() if routes is None else routes, name=name, options=chosen))
        return opened[-1]

    yield make

    for projector in opened:
        await projector.close(1_000)


async def append(ledger: Ledger, *numbers: int, **fields: Any) -> None:
    for number in numbers:
        await ledger.events.append(None, f"payment-{number % 3}", [an_event(number, **fields)])


async def numbers(ledger: Ledger) -> list[int]:
    return sorted(row.payload["orderId"] for row in await rows(ledger))


async def until_rows(ledger: Ledger, count: int) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await numbers(ledger)) < count:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.01)
    return found


async def until_parked(ledger: Ledger, count: int) -> list[ParkedEvent]:
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await ledger.parked.find()) != count:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    return found


# Storing ------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-31", "O-36", "O-3", "O-71", "X-75")
async def test_events_become_rows_and_the_checkpoint_follows(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    await append(ledger, 1, 2, tenant_id="acme", user_id="u-7")
    await ledger.events.append(None, "order-1", [an_event(3, "order.paid.v1")])

    await make_projector().start()
    await told.wait("projector.caught_up")

    first, _ = await rows(ledger)
    assert (first.integration_type, first.event_type) == ("webhook:partnerX", "payment.completed.v1")
    assert (first.correlation_id, first.tenant_id, first.user_id) == ("c-1", "acme", "u-7")
    assert first.source_stream_id == "payment-1"
    assert first.idempotency_key == first.source_event_id
    assert first.status is OutboxStatus.PENDING
    # The last event was passed over, and the checkpoint is behind it all the same.
    assert await ledger.checkpoints.read("projector/default") == "3"


@pytest.mark.requirement("O-32", "O-82", "O-4", "X-16", "O-66", "O-65")
async def test_a_replay_changes_nothing_and_says_duplicate(
    ledger: Ledger, make_projector: MakeProjector, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    await append(ledger, 1, 2, 3)
    first = make_projector()
    await first.start()
    await told.wait("projector.caught_up")
    await first.close()
    before = await rows(ledger)
    async with ledger.database.transaction() as connection:
        await ledger.checkpoints.write(connection, "projector/default", str(BEGINNING))

    with caplog.at_level(logging.DEBUG, "bullpen.outbox"):
        again = make_projector()
        await again.start()
        await told.wait("projector.caught_up", 2)

    assert await rows(ledger) == before
    assert (again.projected.created, again.projected.duplicates) == (0, 3)
    told_of = [record for record in caplog.records if getattr(record, "operation", "") == "OUTBOX_ENQUEUE"]
    assert [getattr(record, "phase") for record in told_of] == ["START"] * 3 + ["DUPLICATE"] * 3  # noqa: B009 - extra
    for record in told_of:
        fields = vars(record)
        assert {"correlationId", "source", "operation", "phase", "eventType", "sourceEventId"} <= set(fields)


@pytest.mark.requirement("O-66", "O-70")
async def test_every_row_is_told_of_and_no_payload_is(
    ledger: Ledger, make_projector: MakeProjector, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "bullpen"):
        await append(ledger, 1, 13, tenant_id="acme", user_id="u-7")
        await make_projector(max_tries=1).start()
        await told.wait("projector.caught_up")

    phases = [vars(each)["phase"] for each in caplog.records if vars(each).get("operation") == "OUTBOX_ENQUEUE"]
    assert phases == ["START", "START", "SUCCESS", "ERROR"]
    text = "\n".join([*(record.getMessage() for record in caplog.records), caplog.text])
    assert "tenantId=acme" in text
    assert "userId=u-7" in text
    for secret in ("naïve", "secret@", "thirteen"):
        assert secret not in text


@pytest.mark.requirement("X-75", "O-36")
async def test_rows_and_checkpoint_are_stored_together_or_not_at_all(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    """The transaction is torn after the rows were written, as by a crash: neither rows nor checkpoint are there."""
    from bullpen._kernel import telemetry

    await append(ledger, 1, 2)
    torn: list[int] = []

    async def tear(*_: Any, **__: Any) -> bool:
        torn.append(len(torn))
        raise DatabaseUnavailable("torn")

    real = ledger.enqueuer.enqueue_many

    async def store_then_tear(connection: Any, items: Any) -> Any:
        results = await real(connection, items)
        if not torn:
            await tear()
        return results

    ledger.enqueuer.enqueue_many = store_then_tear  # type: ignore[method-assign]  # the fault
    during: list[Any] = []

    async def look() -> None:
        during.append((await numbers(ledger), await ledger.checkpoints.read("projector/default")))

    looks: list[asyncio.Task[None]] = []

    def on_event(event: str, fields: dict[str, Any]) -> None:
        if event == "projector.interrupted":
            looks.append(asyncio.create_task(look()))

    forget = telemetry.subscribe(on_event)
    await make_projector().start()
    await told.wait("projector.caught_up")
    forget()
    await asyncio.gather(*looks)

    assert torn == [0]
    assert during == [([], None)]
    assert await numbers(ledger) == [1, 2]


@pytest.mark.requirement("X-74", "O-32")
async def test_only_a_conflict_on_the_fence_is_a_duplicate(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    """A row that the database refuses for another reason is an error: it is tried again, then parked; others pass."""
    await _refuse_rows_about(ledger, 2)
    await append(ledger, 1, 2, 3)

    projector = make_projector(max_tries=3)
    await projector.start()
    (parked,) = await until_parked(ledger, 1)
    await told.wait("projector.caught_up")

    assert await numbers(ledger) == [1, 3]
    assert (parked.event.data["number"], parked.tries) == (2, 3)
    assert "refused" in parked.error
    assert projector.projected.duplicates == 0
    assert await ledger.checkpoints.read("projector/default") == "3"


async def _refuse_rows_about(ledger: Ledger, number: int) -> None:
    if ledger.database.is_postgres:
        rule = f"CHECK ((payload->>'orderId')::int <> {number})"
        await execute(ledger, f"ALTER TABLE {{outbox}} ADD CONSTRAINT no_such_number {rule}")
    else:
        when = f"json_extract(NEW.payload, '$.orderId') = {number}"
        fail = "BEGIN SELECT RAISE(ABORT, 'no such number'); END"
        await execute(ledger, f"CREATE TRIGGER no_such_number BEFORE INSERT ON {{outbox}} WHEN {when} {fail}")


async def _refuse_rows_to(ledger: Ledger, target: str) -> None:
    if ledger.database.is_postgres:
        rule = f"CHECK (integration_type <> '{target}')"
        await execute(ledger, f"ALTER TABLE {{outbox}} ADD CONSTRAINT no_such_target {rule}")
    else:
        when = f"NEW.integration_type = '{target}'"
        fail = "BEGIN SELECT RAISE(ABORT, 'no such target'); END"
        await execute(ledger, f"CREATE TRIGGER no_such_target BEFORE INSERT ON {{outbox}} WHEN {when} {fail}")


@pytest.mark.requirement("X-74")
async def test_a_database_that_is_not_as_it_must_be_is_no_events_fault(
    sqlite_url: str, make_ledger: MakeLedger, make_projector: MakeProjector, told: Told
) -> None:
    """Nothing is parked and no checkpoint moves, however long it takes until somebody mends it."""
    ledger = make_ledger(sqlite_url)
    await append(ledger, 1)
    await execute(ledger, "ALTER TABLE {outbox} RENAME TO elsewhere")

    await make_projector(ledger=ledger, max_tries=1).start()
    first = await told.wait("projector.interrupted", 3)
    await execute(ledger, "ALTER TABLE elsewhere RENAME TO {outbox}")
    found = await until_rows(ledger, 1)

    assert isinstance(first["error"], LedgerNotReady)
    assert found == [1]
    assert await ledger.parked.count() == 0


# Poison -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-74", "W-74")
async def test_a_poison_event_is_parked_after_its_tries_and_the_others_go_on(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    await append(ledger, 12, 13, 14)

    await make_projector(max_tries=3).start()
    (parked,) = await until_parked(ledger, 1)
    await told.wait("projector.caught_up")

    assert await numbers(ledger) == [12, 14]
    assert (parked.projector, parked.event.position, parked.tries) == ("default", 2, 3)
    assert parked.event.data == an_event(13).data
    assert parked.error == "RuntimeError: thirteen, and https://***@host/ too"
    assert len(told.of("projector.failed")) == 2
    assert await ledger.checkpoints.read("projector/default") == "3"


async def test_events_whose_mapper_fails_wait_together_and_not_one_behind_the_other(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    """Ten of them in a batch cost the pauses of one: the route that works gets the batch so much sooner."""
    routes, asked = two_ways({"partner"})
    await append(ledger, *range(1, 11))

    await make_projector(routes, max_tries=2).start()
    await until_parked(ledger, 10)

    assert asked == [*["partner", "ledger"] * 10, *["partner"] * 10], "all once, a pause, then those that failed"
    stored = [row.payload["orderId"] for row in await rows(ledger)]
    assert stored == list(range(1, 11)), "in their order"


def two_ways(broken: set[str]) -> tuple[EventRoutes, list[str]]:
    """Two routes for each payment; those that are named in `broken` fail. And which mappers were asked."""
    routes, asked = EventRoutes(), list[str]()

    def way(name: str, to: str) -> None:
        @routes.on("payment.*", to=to, since="beginning", name=name)
        def mapper(event: SourceEvent) -> dict[str, Any]:
            asked.append(name)
            if name in broken:
                raise RuntimeError(f"{name} does not know {event.data['number']}")
            return {"orderId": event.data["number"]}

    way("partner", "webhook:partnerX")
    way("ledger", "kafka:payments")
    return routes, asked


@pytest.mark.requirement("X-74", "W-74")
async def test_a_mapper_that_fails_parks_its_event_for_its_own_route_alone(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    """The others have nothing to do with it, and their targets must not wait for somebody to mend it."""
    broken = {"partner"}
    routes, asked = two_ways(broken)
    projector = make_projector(routes, max_tries=3)
    await append(ledger, 1, 2)

    await projector.start()
    parked = await until_parked(ledger, 2)
    await told.wait("projector.caught_up")

    assert [(row.integration_type, row.payload["orderId"]) for row in await rows(ledger)] == [
        ("kafka:payments", 1),
        ("kafka:payments", 2),
    ]
    assert [(one.route, one.event.data["number"], one.tries) for one in parked] == [
        ("partner", 1, 3),
        ("partner", 2, 3),
    ]
    assert asked.count("ledger") == 2, "a mapper that has answered is not asked again"
    assert (projector.projected.events, projector.projected.parked) == (2, 2)
    assert await ledger.checkpoints.read("projector/default") == "2"

    broken.clear()
    await ledger.parked.retry([one.id for one in parked], by="ada")
    await until_parked(ledger, 0)

    assert sorted((row.integration_type, row.payload["orderId"]) for row in await rows(ledger)) == [
        *(("kafka:payments", number) for number in (1, 2)),
        *(("webhook:partnerX", number) for number in (1, 2)),
    ]
    assert len({row.idempotency_key for row in await rows(ledger)}) == 4
    assert asked.count("ledger") == 2


async def test_both_routes_of_an_event_may_fail_each_for_itself(ledger: Ledger, make_projector: MakeProjector) -> None:
    routes, _ = two_ways({"partner", "ledger"})
    await append(ledger, 1)

    await make_projector(routes, max_tries=1).start()
    parked = await until_parked(ledger, 2)

    assert [(one.route, one.error) for one in parked] == [
        ("partner", "RuntimeError: partner does not know 1"),
        ("ledger", "RuntimeError: ledger does not know 1"),
    ]


@pytest.mark.requirement("X-74")
async def test_a_row_that_the_database_refuses_keeps_no_other_route_from_its_message(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    routes, _ = two_ways(set())
    await _refuse_rows_to(ledger, "webhook:partnerX")
    await append(ledger, 1, 2)

    await make_projector(routes, max_tries=2).start()
    parked = await until_parked(ledger, 2)
    await told.wait("projector.caught_up")

    assert {one.route for one in parked} == {"partner"}
    assert [row.integration_type for row in await rows(ledger)] == ["kafka:payments"] * 2


async def test_messages_of_two_routes_with_one_key_are_told_apart(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    """The fence would take the second for a repetition of the first."""
    routes = EventRoutes()
    for name in ("first", "second"):
        routes.on("payment.*", since="beginning", name=name)(
            lambda event: IntegrationMessage(payload={"orderId": 1}, integration_type="webhook:partnerX")
        )
    await append(ledger, 1)

    await make_projector(routes).start()
    (parked,) = await until_parked(ledger, 1)

    assert parked.route == "second"
    assert "a route key of its own" in parked.error
    assert len(await rows(ledger)) == 1


class WithoutMetadata(SqlEvents):
    """Events of somebody who writes no metadata."""

    async def subscribe(self, after: int) -> AsyncGenerator[EventBatch, None]:
        async for batch in super().subscribe(after):
            yield replace(batch, events=tuple(replace(event, metadata_bytes=b"{}") for event in batch.events))


async def test_an_event_that_nobody_can_read_is_parked_as_a_whole(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    routes, _ = two_ways(set())
    await append(ledger, 1)

    await make_projector(routes, source=WithoutMetadata(ledger, poll_ms=50)).start()
    (parked,) = await until_parked(ledger, 1)

    assert parked.route is None


async def test_a_parked_event_of_a_route_that_is_gone_stays_and_says_so(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    """It must not stop the retries of others, which it did."""
    broken = {"partner"}
    routes, _ = two_ways(broken)
    await append(ledger, 1)
    first = make_projector(routes, max_tries=1)
    await first.start()
    (parked,) = await until_parked(ledger, 1)
    await first.close()
    await ledger.parked.retry([parked.id], by="ada")

    await make_projector(payments(to="kafka:payments")).retry_parked()

    (left,) = await ledger.parked.find()
    assert left.error == "there is no route 'partner' any more; skip it"
    assert not left.retry_wanted


@pytest.mark.requirement("X-74")
async def test_a_mapper_that_fails_once_parks_nothing(ledger: Ledger, make_projector: MakeProjector) -> None:
    tries = []
    routes = EventRoutes()

    @routes.on("payment.*", to="webhook:partnerX", since="beginning")
    def moody(event: SourceEvent) -> dict[str, Any]:
        tries.append(event.id)
        if len(tries) < 3:
            raise OSError("not now")
        return {"orderId": 1}

    await append(ledger, 1)
    await make_projector(routes).start()

    assert await until_rows(ledger, 1) == [1]
    assert len(tries) == 3
    assert await ledger.parked.count() == 0


@pytest.mark.requirement("X-74", "X-92")
@pytest.mark.parametrize(
    ("routes", "told_why"),
    [
        (payments(to="webhook:" + "x" * 200), "at most 120"),
        (payments(to="bad\ntype"), "control characters"),
    ],
)
async def test_what_cannot_be_stored_is_parked_at_once(
    ledger: Ledger, make_projector: MakeProjector, routes: EventRoutes, told_why: str
) -> None:
    await append(ledger, 1)

    await make_projector(routes).start()
    (parked,) = await until_parked(ledger, 1)

    assert told_why in parked.error
    assert parked.tries == 1


@pytest.mark.requirement("O-33", "O-74")
async def test_a_payload_that_is_a_blob_is_refused(ledger: Ledger, make_projector: MakeProjector) -> None:
    routes = EventRoutes()
    routes.on("payment.*", to="webhook:x", since="beginning", name="blob")(lambda event: {"blob": "x" * 500})
    await append(ledger, 1)

    await make_projector(routes, max_payload_bytes=500).start()
    (parked,) = await until_parked(ledger, 1)

    assert "at most 500 bytes" in parked.error


async def test_a_strict_ledger_takes_one_route_per_event(
    ledger: Ledger, make_ledger: MakeLedger, make_projector: MakeProjector
) -> None:
    """There the second message would be taken for a duplicate of the first."""
    strict = make_ledger(ledger.database.url.render_as_string(hide_password=False), strict_sources=True)
    routes = payments()
    routes.on("payment.*", to="kafka:payments", since="beginning", name="second")(lambda event: {"orderId": 9})
    await append(ledger, 1)

    await make_projector(routes, ledger=strict).start()
    (parked,) = await until_parked(ledger, 1)

    assert "one route per event" in parked.error


async def test_without_a_limit_of_tries_the_projector_waits_at_the_event(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    """For targets that must not get a later event without the earlier one."""
    await append(ledger, 12, 13, 14)

    await make_projector(max_tries=None).start()
    await told.wait("projector.failed", 8)

    assert await ledger.parked.count() == 0
    assert await numbers(ledger) == []


@pytest.mark.requirement("X-74")
async def test_a_parked_event_is_tried_again_when_somebody_asks_and_has_mended_the_mapper(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    await append(ledger, 13)
    broken = make_projector(max_tries=1)
    await broken.start()
    (parked,) = await until_parked(ledger, 1)

    assert await ledger.parked.retry([parked.id, 999], by="ada") == [parked.id]
    async with asyncio.timeout(PATIENCE_S):
        while (again := (await ledger.parked.find())[0]).tries == 1:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.01)
    await broken.close()
    assert (again.tries, again.retry_wanted) == (2, False)

    routes = EventRoutes()
    routes.on("payment.*", to="webhook:partnerX", since="beginning", name="payment")(lambda event: {"orderId": 13})
    await make_projector(routes).start()
    assert await ledger.parked.retry([parked.id], by="ada") == [parked.id]

    await until_parked(ledger, 0)
    assert await numbers(ledger) == [13]
    audited = await execute(ledger, "SELECT actor, action, subject FROM {audit} ORDER BY id")
    assert audited == [("ada", "projector.retry", f"parked-event/{parked.id}")] * 2


async def test_a_parked_event_that_the_database_refuses_again_stays_parked(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    await _refuse_rows_about(ledger, 2)
    await append(ledger, 2)
    await make_projector(max_tries=1).start()
    (parked,) = await until_parked(ledger, 1)

    await ledger.parked.retry([parked.id], by="ada")
    async with asyncio.timeout(PATIENCE_S):
        while (again := (await ledger.parked.find())[0]).tries == 1:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.01)

    assert "refused" in again.error


async def test_a_parked_event_can_be_skipped_for_good(ledger: Ledger, make_projector: MakeProjector) -> None:
    await append(ledger, 13)
    await make_projector(max_tries=1).start()
    (parked,) = await until_parked(ledger, 1)

    assert await ledger.parked.skip([parked.id], by="ada") == [parked.id]
    assert await ledger.parked.skip([parked.id], by="ada") == []

    assert await ledger.parked.find() == []
    assert await execute(ledger, "SELECT action FROM {audit}") == [("projector.skip",)]


# Routes that begin later --------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-86")
async def test_a_new_route_sends_nothing_of_the_past_not_even_in_a_replay(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    await append(ledger, 1, 2)
    first = make_projector()
    await first.start()
    await told.wait("projector.caught_up")
    await first.close()
    routes = payments()
    routes.on("payment.*", to="kafka:payments", since="now", name="new")(
        lambda event: {"orderId": event.data["number"]}
    )
    await append(ledger, 3)  # behind the checkpoint when the new route is first seen: it must not be lost for it

    second = make_projector(routes)
    await second.start()
    await told.wait("projector.caught_up", 2)
    await second.close()
    async with ledger.database.transaction() as connection:
        await ledger.checkpoints.write(connection, "projector/default", str(BEGINNING))
    await make_projector(routes).start()
    await told.wait("projector.caught_up", 3)

    new = [row.payload["orderId"] for row in await rows(ledger, integration_type="kafka:payments")]
    old = [row.payload["orderId"] for row in await rows(ledger, integration_type="webhook:partnerX")]
    assert sorted(old) == [1, 2, 3]
    assert new == [3]


@pytest.mark.requirement("X-86")
@pytest.mark.parametrize("kind", ["position", "instant", "now"])
async def test_a_first_start_begins_where_the_route_says(
    ledger: Ledger, make_projector: MakeProjector, told: Told, kind: str
) -> None:
    await append(ledger, 1, 2)
    (last,) = (await ledger.events.page(BEGINNING, 10))[-1:]
    since: Since = last.position if kind == "position" else "now"
    if kind == "instant":
        await asyncio.sleep(0.01)
        since = datetime.now(UTC)
        await asyncio.sleep(0.01)
    projector = make_projector(payments(since))
    if kind == "now":
        await projector.start()
        await told.wait("projector.subscribing")
    await append(ledger, 3, 4)

    await projector.start()

    assert await until_rows(ledger, 2) == [3, 4]


@pytest.mark.requirement("X-86")
async def test_a_backfill_sends_the_past_through_one_route_and_may_be_repeated(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    await append(ledger, *range(1, 26))
    await make_projector().start()
    await told.wait("projector.caught_up")
    routes = payments()
    routes.on("payment.*", to="kafka:payments", since="now", name="new")(
        lambda event: {"orderId": event.data["number"] + 100}
    )
    projector, shares = make_projector(routes), []

    done = await projector.backfill("new", since="beginning", progress=lambda so_far: shares.append(so_far.share))
    again = await projector.backfill("new", since="beginning")
    restarted = await projector.backfill("new", since="beginning", restart=True)

    new = await rows(ledger, integration_type="kafka:payments")
    assert sorted(row.payload["orderId"] for row in new) == list(range(101, 126))
    assert len(await rows(ledger, integration_type="webhook:partnerX")) == 24  # 13 is parked
    assert (done.done.created, again.done.created, restarted.done.duplicates) == (25, 0, 25)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    # Never the key of the other route's message, which a target may know.
    assert {row.idempotency_key.partition("/")[2] for row in new} == {"kafka:payments"}


@pytest.mark.requirement("X-86")
async def test_an_interrupted_backfill_goes_on_where_it_was(ledger: Ledger, make_projector: MakeProjector) -> None:
    await append(ledger, *range(1, 26))
    projector = make_projector(payments(since="now", to="kafka:payments"))

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await projector.backfill("payment", since="beginning", progress=interrupt)
    status = await projector.status()
    done = await projector.backfill("payment", since="beginning")

    assert status.backfills == {"payment": 10}
    assert done.done.events == 15
    assert len(await rows(ledger)) == 24
    (parked,) = await ledger.parked.find()
    assert parked.route == "payment"


@pytest.mark.requirement("X-86")
async def test_a_backfill_may_begin_at_a_position_or_an_instant_and_never_now(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    await append(ledger, 1, 2, 3)
    projector = make_projector(payments(since="now"))

    some = await projector.backfill("payment", since=2)
    none = await projector.backfill("payment", since=datetime.now(UTC) + timedelta(hours=1), restart=True)

    assert (some.done.created, none.done.created) == (1, 0)
    assert await numbers(ledger) == [3]
    with pytest.raises(InvalidOption, match="in the past"):
        await projector.backfill("payment", since="now")
    with pytest.raises(InvalidOption, match="one of payment"):
        await projector.backfill("other", since="beginning")


@pytest.mark.requirement("X-74", "X-86")
async def test_a_backfilled_event_that_was_parked_is_retried_for_its_route_alone(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    await append(ledger, 13)
    await make_projector(payments(since="now"), max_tries=1).backfill("payment", since="beginning")
    (parked,) = await ledger.parked.find()
    mended = EventRoutes()
    mended.on("payment.*", to="webhook:partnerX", since="now", name="payment")(lambda event: {"orderId": 13})
    mended.on("payment.*", to="kafka:payments", since="beginning", name="other")(lambda event: {"orderId": 99})
    await ledger.parked.retry([parked.id], by="ada")

    await make_projector(mended).retry_parked()

    assert await numbers(ledger) == [13]


# Several of one name ------------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-2", "O-36")
async def test_of_two_projectors_one_works_and_the_other_takes_over(
    ledger: Ledger, make_ledger: MakeLedger, make_projector: MakeProjector, told: Told
) -> None:
    second_ledger = make_ledger(ledger.database.url.render_as_string(hide_password=False))
    first, second = make_projector(), make_projector(ledger=second_ledger)
    await first.start()
    await second.start()
    await append(ledger, *range(20, 30))
    await until_rows(ledger, 10)
    await append(ledger, *range(30, 60))
    await until_rows(ledger, 40)
    await told.wait("projector.standing_by")

    working, waiting = (second, first) if first.state == "standing by" else (first, second)
    await working.close()
    await append(ledger, 60, 61)

    assert (await until_rows(ledger, 42))[-2:] == [60, 61]
    assert waiting.projected.created > 0
    # Nobody even tried to store a row twice: the checkpoint decides before the rows do.
    assert first.projected.duplicates + second.projected.duplicates == 0


async def test_two_names_do_the_work_twice_and_the_fence_holds(ledger: Ledger, make_projector: MakeProjector) -> None:
    await append(ledger, 1, 2)
    one, two = make_projector(name="one"), make_projector(name="two")
    await one.start()
    await until_rows(ledger, 2)
    await two.start()
    async with asyncio.timeout(PATIENCE_S):
        while two.projected.duplicates < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)

    assert await numbers(ledger) == [1, 2]


# Starting, stopping, looking ----------------------------------------------------------------------------------------


async def test_what_it_does_can_be_asked(ledger: Ledger, make_projector: MakeProjector, told: Told) -> None:
    await append(ledger, 1, 13)
    routes = payments()
    routes.on("order.*", to="webhook:a", since="now", name="later")(lambda event: None)
    routes.on("order.*", to="webhook:b", since=7, name="position")(lambda event: None)
    routes.on("order.*", to="webhook:c", since=datetime(2026, 1, 1, tzinfo=UTC), name="instant")(lambda event: None)
    projector = make_projector(routes, max_tries=1)
    before = await projector.status()

    await projector.start()
    await told.wait("projector.caught_up")
    await append(ledger, *range(20, 25))
    await until_rows(ledger, 6)
    await told.wait("projector.caught_up", 2)
    after = await projector.status()

    assert (before.position, before.head, before.lag, before.parked) == (None, 2, None, 0)
    assert (after.lag, after.parked) == (0, 1)
    assert before.routes["later"] == "now"
    assert after.routes == {
        "payment": "beginning",
        "later": "behind 2",
        "position": "behind 7",
        "instant": "from 2026-01-01T00:00:00+00:00",
    }
    assert projector.state == "caught up"
    assert projector.behind_s == 0.0


async def test_an_idle_projector_is_caught_up_and_a_lost_database_is_told(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    """Readiness must not depend on events: a store without any is no trouble, and one that is away is."""
    projector = make_projector()
    await projector.start()
    await told.wait("projector.caught_up")
    assert projector.state == "caught up"
    assert await ledger.checkpoints.read("projector/default") is None

    await execute(ledger, f"ALTER TABLE {ledger.database.table('bullpen_events')} RENAME TO elsewhere")
    await told.wait("projector.interrupted", 2)
    assert projector.state == "waiting"

    schema = f"{ledger.database.schema}." if ledger.database.is_postgres else ""
    await execute(ledger, f"ALTER TABLE {schema}elsewhere RENAME TO bullpen_events")
    await told.wait("projector.caught_up", 2)
    assert projector.state == "caught up"


async def test_closing_lets_the_batch_end_and_may_be_done_twice(ledger: Ledger, make_projector: MakeProjector) -> None:
    projector = make_projector()
    running = asyncio.create_task(projector.run(signals=False))
    await append(ledger, 1)
    await until_rows(ledger, 1)

    await projector.close()
    await projector.close()
    await running

    assert projector.state == "stopped"


async def test_closing_does_not_wait_for_ever_at_an_event_that_cannot_be_mapped(
    ledger: Ledger, make_projector: MakeProjector, told: Told
) -> None:
    await append(ledger, 13)
    projector = make_projector(max_tries=None)
    await projector.start()
    await told.wait("projector.failed")

    async with asyncio.timeout(PATIENCE_S):
        await projector.close(50)

    assert projector.state == "stopped"
    assert await ledger.checkpoints.read("projector/default") is None


async def test_a_route_that_comes_after_the_start_is_refused(ledger: Ledger, make_projector: MakeProjector) -> None:
    """Nobody has settled where it begins; its first events would be lost or parked."""
    routes = payments()
    await make_projector(routes).start()

    with pytest.raises(InvalidOption, match="before the projector starts"):
        routes.on("order.*", to="webhook:a", since="now", name="late")(lambda event: None)


async def test_a_start_that_cannot_work_is_refused(
    ledger: Ledger, make_projector: MakeProjector, postgres_server: PostgresServer, guarded_database: str,
    make_ledger: MakeLedger,
) -> None:  # fmt: skip
    with pytest.raises(InvalidOption, match="at least one route"):
        await make_projector(EventRoutes()).start()
    with pytest.raises(InvalidOption, match="1 to 60"):
        make_projector(name="")
    url = postgres_server.url(guarded_database, role=ROLES.tenant)
    with pytest.raises(NotConfigured, match="duty='service'"):
        await make_projector(ledger=make_ledger(url, roles=ROLES, duty="tenant")).start()


@pytest.mark.parametrize("wrong", [{"max_tries": 0}, {"standby_ms": 0}, {"require_metadata": 1}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        ProjectorOptions(**wrong)


async def test_a_projector_with_a_bug_says_so(ledger: Ledger, make_projector: MakeProjector) -> None:
    """An error that nobody expected ends the process instead of leaving a projector that does nothing."""

    class Broken(SqlEvents):
        async def head(self) -> int:
            raise ZeroDivisionError

    projector = make_projector(payments(since="now"), source=Broken(ledger))

    with pytest.raises(ZeroDivisionError):
        await projector.run(signals=False)


# The whole way ------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-83", "O-1", "O-3", "O-85")
async def test_from_the_event_to_sent(ledger: Ledger, make_projector: MakeProjector) -> None:
    channel = SpyChannel()
    outbox = Outbox(ledger, {"webhook:*": channel})
    await append(ledger, 1, tenant_id="acme", user_id="u-7", headers={"traceparent": "00-ab-cd-01"})
    await make_projector().start()
    dispatcher = outbox.dispatcher()
    await dispatcher.start()

    await until_settled(ledger, 1)

    (message,) = channel.messages
    assert (message.tenant_id, message.user_id, message.correlation_id) == ("acme", "u-7", "c-1")
    assert message.headers["traceparent"] == "00-ab-cd-01"
    await dispatcher.close()


@pytest.mark.requirement("O-84")
async def test_a_target_that_never_answers_ends_dead_after_the_attempts_that_the_mapper_gave(
    ledger: Ledger, make_projector: MakeProjector
) -> None:
    channel = SpyChannel(default=Unavailable("no answer", "NO_ANSWER"))
    outbox = Outbox(ledger, {"webhook:*": channel})
    routes = EventRoutes()
    routes.on("payment.*", to="webhook:x", since="beginning", name="payment")(
        lambda event: IntegrationMessage(payload={"orderId": 1}, max_attempts=3, backoff=1)
    )
    await append(ledger, 1)
    await make_projector(routes).start()
    dispatcher = outbox.dispatcher()
    await dispatcher.start()
    async with asyncio.timeout(PATIENCE_S):
        while not await rows(ledger, status=OutboxStatus.DEAD, integration_type="webhook:x"):
            dispatcher.wake()
            await asyncio.sleep(0.01)

    (row,) = await rows(ledger, integration_type="webhook:x")  # its death is announced by a row of its own
    assert (row.attempts, len(channel.messages)) == (3, 3)
    assert len({message.idempotency_key for message in channel.messages}) == 1
    await dispatcher.close()

"""Endpoints: where tenants want their events, as rows. Real receivers, both databases."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import sqlalchemy as sa
from standardwebhooks import Webhook as Verifier

from bullpen import Codec
from bullpen.errors import InvalidOption, LedgerError, RowNotFound, RowStateConflict, UnsafeDatabaseRole
from bullpen.ledger import EndpointStore, Ledger, OutboxStatus, tables
from bullpen.outbox import Endpoint, EndpointOptions, EndpointRate, Endpoints, EndpointState, Outbox
from bullpen.outbox import endpoints as endpoints_module
from bullpen.outbox.endpoints import ENDPOINTS, NewSecret
from bullpen.outbox.vault import Secret, Vault
from bullpen.ports.channel import Accepted, Refused
from bullpen.settings import Settings
from bullpen.testing.postgres import PostgresServer
from bullpen.testing.receivers import Answer, HttpReceiver
from bullpen.wiring.endpoints import make_endpoints
from tests.databases import ROLES, MakeLedger
from tests.outbox.conftest import MakeOutbox
from tests.outbox.kit import Told, rows, until_settled

PENDING, CLAIMED, SENT, FAILED, DEAD = OutboxStatus
DAY_MS = 86_400_000
HERE: dict[str, Any] = {"endpoints_allow_http": True, "endpoints_allowed_networks": "127.0.0.0/8"}
KEYS = {"k1": os.urandom(32), "k2": os.urandom(32)}

MakeEndpoints = Callable[..., Endpoints]


@pytest.fixture
async def receiver() -> AsyncIterator[HttpReceiver]:
    async with HttpReceiver() as opened:
        yield opened


@pytest.fixture
async def make() -> AsyncIterator[MakeEndpoints]:
    """Endpoints that may be on this machine; all are closed in the end. Further arguments are settings."""
    opened: list[Endpoints] = []

    def made(ledger: Ledger, codec: Codec | None = None, **settings: Any) -> Endpoints:
        chosen = {f"endpoints_{name}": value for name, value in settings.items()}
        opened.append(make_endpoints(Settings.load(environ={}, **{**HERE, **chosen}), ledger, codec))
        return opened[-1]

    yield made

    for endpoints in opened:
        await endpoints.aclose()


@pytest.fixture
def endpoints(ledger: Ledger, make: MakeEndpoints) -> Endpoints:
    return make(ledger)


async def publish(ledger: Ledger, make_outbox: MakeOutbox, tenant: str = "acme", **fields: Any) -> list[str | None]:
    given = {"event_type": "order.paid.v1", "payload": {"order": 7}, **fields}
    async with ledger.database.transaction(tenant=tenant) as connection:
        return [each.id for each in await make_outbox({}).publish(connection, tenant_id=tenant, **given)]


async def deliver(make_outbox: MakeOutbox, endpoints: Endpoints) -> None:
    """As a dispatcher that begins now: it knows nothing from before."""
    async with make_outbox({ENDPOINTS: endpoints.route}).dispatcher() as dispatcher:
        while await dispatcher.tick():
            await dispatcher.idle()
        await dispatcher.idle()


async def audited(ledger: Ledger) -> list[tuple[str, str, str | None]]:
    return [(each.action, each.actor, each.tenant_id) for each in reversed(await ledger.audit.read())]


# Events go out ------------------------------------------------------------------------------------------------------


async def test_an_event_goes_to_each_endpoint_of_the_tenant_that_wants_it(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    """And each message has a key of its own, the same for every attempt: `<event id>/<route key>`."""
    every = (await endpoints.create("acme", f"{receiver.url}/all", by="ada")).endpoint
    orders = (await endpoints.create("acme", f"{receiver.url}/orders", by="ada", events=["order.*"])).endpoint
    await endpoints.create("acme", f"{receiver.url}/users", by="ada", events=["user.*", "order.paid"])
    await endpoints.create("other", f"{receiver.url}/other", by="bob")

    stored = await publish(ledger, make_outbox, event_id="e-1")
    await deliver(make_outbox, endpoints)

    assert len(stored) == 2
    got = {request.path: request for request in receiver.requests}
    assert sorted(got) == ["/hook/all", "/hook/orders"]
    for endpoint, path in ((every, "/hook/all"), (orders, "/hook/orders")):
        assert got[path].headers["webhook-id"] == f"e-1/endpoint:{endpoint.id}"
        assert got[path].headers["idempotency-key"] == got[path].headers["webhook-id"]
        assert json.loads(got[path].body)["data"] == {"order": 7}


async def test_an_event_that_is_published_twice_is_sent_once(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    """The caller's process may die after the commit, and does the same again."""
    await endpoints.create("acme", receiver.url, by="ada")

    first = await publish(ledger, make_outbox, event_id="e-1")
    assert await publish(ledger, make_outbox, event_id="e-1") == first
    await publish(ledger, make_outbox)  # without an id each call is an event
    await publish(ledger, make_outbox)
    await deliver(make_outbox, endpoints)

    assert len(receiver.requests) == 3


async def test_a_rolled_back_event_goes_nowhere(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    await endpoints.create("acme", receiver.url, by="ada")

    async with ledger.database.transaction(tenant="acme") as connection:
        assert len(await make_outbox({}).publish(connection, tenant_id="acme", event_type="x")) == 1
        await connection.rollback()

    assert await rows(ledger) == []


def test_a_blocking_connection_publishes_too(ledger_url: str) -> None:
    async def prepare() -> None:
        async with Ledger(ledger_url) as ledger:
            made = make_endpoints(Settings.load(environ={}, **HERE), ledger, None)
            await made.create("acme", "https://example.com/", by="ada")
            await made.create("acme", "https://example.com/2", by="ada", events=["user.*"])

    asyncio.run(prepare())
    drivers = {"postgresql": "postgresql+psycopg", "sqlite": "sqlite"}
    url = sa.make_url(ledger_url)
    engine = sa.create_engine(url.set(drivername=drivers[url.get_backend_name()]))

    with engine.begin() as connection:
        stored = Outbox().publish_sync(connection, tenant_id="acme", event_type="order.paid.v1", event_id="e")

    assert [each.created for each in stored] == [True]
    engine.dispose()


async def test_a_thousand_endpoints_are_rows_and_need_no_restart(
    ledger: Ledger, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    """The dispatcher has one route, begins before they exist, and asks for each lane once and not per tenant."""
    endpoints = make(ledger)
    outbox = make_outbox({ENDPOINTS: endpoints.route})
    async with outbox.dispatcher() as dispatcher:
        await dispatcher.tick()
        for number in range(250):
            await endpoints.create(f"t{number}", f"{receiver.url}/{number}", by="ada")
            await publish(ledger, make_outbox, f"t{number}")

        claims = 0
        while await rows(ledger, status=PENDING):
            await dispatcher.tick()
            await dispatcher.idle()
            claims += 1

    assert len({request.path for request in receiver.requests}) == len(receiver.requests) == 250
    assert claims <= 4, "a batch of 100 takes 100 of them"


# Secrets ------------------------------------------------------------------------------------------------------------


def signed_by(secret: str, receiver: HttpReceiver, number: int = -1) -> bool:
    request = receiver.requests[number]
    try:
        Verifier(secret).verify(request.body, dict(request.headers))
    except Exception:
        return False
    return True


async def test_messages_are_signed_and_a_rotated_secret_signs_beside_the_new_one(
    ledger: Ledger, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    endpoints = make(ledger, overlap_ms=60_000)
    old = await endpoints.create("acme", receiver.url, by="ada")
    await publish(ledger, make_outbox)
    await deliver(make_outbox, endpoints)
    new = await endpoints.rotate_secret("acme", old.endpoint.id, by="ada")
    assert new.endpoint.old_secret_until is not None

    await publish(ledger, make_outbox)
    await deliver(make_outbox, make(ledger))
    ledger.database.clock_offset_ms += 61_000
    await publish(ledger, make_outbox)
    await deliver(make_outbox, make(ledger))

    assert [signed_by(old.secret, receiver, n) for n in range(3)] == [True, True, False]
    assert [signed_by(new.secret, receiver, n) for n in range(3)] == [False, True, True]
    assert (await endpoints.get("acme", old.endpoint.id)).old_secret_until is None


async def test_without_an_overlap_the_old_secret_ends_at_once(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    """It was stolen."""
    old = await endpoints.create("acme", receiver.url, by="ada")

    new = await endpoints.rotate_secret("acme", old.endpoint.id, by="ada", overlap_ms=0)
    await publish(ledger, make_outbox)
    await deliver(make_outbox, endpoints)

    assert (signed_by(old.secret, receiver), signed_by(new.secret, receiver)) == (False, True)


async def test_of_two_rotations_at_once_none_is_lost_silently(ledger: Ledger, endpoints: Endpoints) -> None:
    """Both callers were shown a secret: one that no message is ever signed with must not look like one that is."""
    made = await endpoints.create("acme", "https://example.com/", by="ada")

    done = await asyncio.gather(
        *(endpoints.rotate_secret("acme", made.endpoint.id, by="ada") for _ in range(3)), return_exceptions=True
    )

    good = {each.secret for each in done if isinstance(each, NewSecret)}
    assert all(isinstance(each, NewSecret | RowStateConflict) for each in done)
    row = await ledger.endpoints.get(made.endpoint.id)
    assert row is not None
    assert {secret.key for secret in Vault(None).secrets_of(row)} == {made.secret, *good}


@pytest.mark.parametrize("text", ["whsec_!", "whsec_c2hvcnQ=", "plain"])
async def test_a_secret_that_cannot_sign_is_refused_and_not_shown(endpoints: Endpoints, text: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        await endpoints.create("acme", "https://example.com/", by="ada", secret=text)

    assert "secret" in str(refused.value)
    assert text not in str(refused.value)


async def everything_stored(ledger: Ledger) -> str:
    async with ledger.database.transaction_without_tenant() as connection:
        found = await connection.execute(sa.text(f"SELECT * FROM {ledger.database.table('bullpen_endpoints')}"))
        audit = await connection.execute(sa.text(f"SELECT * FROM {ledger.database.table('bullpen_audit')}"))
        return repr([*found.all(), *audit.all()])


async def test_secrets_and_headers_are_stored_encrypted_where_there_are_keys(
    ledger: Ledger, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    endpoints = make(ledger, Codec(keys={"k1": KEYS["k1"]}))
    made = await endpoints.create("acme", receiver.url, by="ada", headers={"authorization": "Bearer abcdef"})

    stored = await everything_stored(ledger)
    assert made.secret not in stored
    assert made.secret.removeprefix("whsec_") not in stored
    assert "abcdef" not in stored
    assert '"kid":"k1"' in stored
    await publish(ledger, make_outbox)
    await deliver(make_outbox, endpoints)
    assert signed_by(made.secret, receiver)
    assert receiver.requests[0].headers["authorization"] == "Bearer abcdef"


async def test_a_process_without_the_key_sends_nothing_unsigned(
    ledger: Ledger,
    make: MakeEndpoints,
    make_outbox: MakeOutbox,
    receiver: HttpReceiver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It keeps the row, says what is missing, and costs it no attempt."""
    endpoints = make(ledger, Codec(keys={"k1": KEYS["k1"]}))
    await endpoints.create("acme", receiver.url, by="ada")
    await publish(ledger, make_outbox)

    await deliver(make_outbox, make(ledger))
    await deliver(make_outbox, make(ledger, Codec(keys={"k2": KEYS["k2"]})))

    assert receiver.requests == []
    assert [(row.status, row.attempts) for row in await rows(ledger)] == [(PENDING, 0)]
    assert "k1" in caplog.text


async def test_what_is_sealed_opens_in_no_other_row(ledger: Ledger, make: MakeEndpoints) -> None:
    """Somebody with the right to write the table cannot move a secret to an endpoint of his own."""
    codec = Codec(keys={"k1": KEYS["k1"]})
    endpoints = make(ledger, codec)
    hers = (await endpoints.create("acme", "https://example.com/", by="ada")).endpoint
    his = (await endpoints.create("evil", "https://evil.example/", by="eve")).endpoint
    row = await ledger.endpoints.get(hers.id)
    assert row is not None
    await ledger.endpoints.change("evil", his.id, {"secrets": row.secrets}, action="endpoint.x", by="eve", detail={})

    result = await endpoints.send_test("evil", his.id)

    assert isinstance(result, Refused)
    assert result.code == "ENDPOINT_UNUSABLE"


async def test_keys_are_replaced(ledger: Ledger, make: MakeEndpoints) -> None:
    both = Codec(keys=KEYS, current="k2")
    plain = await make(ledger).create("acme", "https://example.com/1", by="ada")
    old = await make(ledger, Codec(keys={"k1": KEYS["k1"]})).create("acme", "https://example.com/2", by="ada")

    assert await make(ledger, both).reseal(by="ada") == 2

    new = Vault(Codec(keys={"k2": KEYS["k2"]}))
    found = [new.secrets_of(row) for row in await ledger.endpoints.find()]
    assert found == [[Secret(plain.secret)], [Secret(old.secret)]]


async def test_keys_are_replaced_while_endpoints_change_and_go(
    ledger: Ledger, make: MakeEndpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on the border of a page is removed, one is rotated at that moment, and one goes before its turn."""
    monkeypatch.setattr(endpoints_module, "_PAGE", 2)
    before, both = make(ledger, Codec(keys={"k1": KEYS["k1"]})), make(ledger, Codec(keys=KEYS, current="k2"))
    urls = [f"https://example.com/{number}" for number in range(6)]
    made = [(await before.create("acme", url, by="ada")).endpoint.id for url in urls]
    change, meanwhile = EndpointStore.change, {made[0]: made[1], made[4]: made[5]}

    async def change_beside(self: EndpointStore, tenant: str, id_: str, values: Any, **options: Any) -> Any:
        if options["action"] == "endpoint.reseal":
            if (gone := meanwhile.pop(id_, None)) is not None:
                await before.remove(tenant, gone, by="customer")
            if id_ == made[2] and options["version"] == 1:
                await before.rotate_secret(tenant, id_, by="customer")
        return await change(self, tenant, id_, values, **options)

    monkeypatch.setattr(EndpointStore, "change", change_beside)
    assert await both.reseal(by="ada") == 4
    assert await both.reseal(by="ada") == 0, "all are"

    found = await ledger.endpoints.find()
    assert [row.id for row in found] == [made[0], made[2], made[3], made[4]]
    new = Vault(Codec(keys={"k2": KEYS["k2"]}))
    assert [len(new.secrets_of(row)) for row in found] == [1, 2, 1, 1], "and the rotation is not lost"


async def test_without_keys_nothing_is_to_be_replaced(ledger: Ledger, endpoints: Endpoints) -> None:
    await endpoints.create("acme", "https://example.com/", by="ada", headers={"x-key": "1"})
    assert await endpoints.reseal(by="ada") == 0


async def test_secrets_are_in_no_representation_and_no_log(
    ledger: Ledger,
    endpoints: Endpoints,
    make_outbox: MakeOutbox,
    receiver: HttpReceiver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="bullpen")
    made = await endpoints.create("acme", f"{receiver.url}/t0ken", by="ada", headers={"x-key": "h1dden"})
    await publish(ledger, make_outbox)
    receiver.default = Answer(410)
    await deliver(make_outbox, endpoints)
    row = await ledger.endpoints.get(made.endpoint.id)

    shown = repr([made, made.endpoint, row]) + caplog.text + repr(caplog.records)
    for hidden in (made.secret, made.secret[6:], "h1dden", "t0ken"):
        assert hidden not in shown


# States -------------------------------------------------------------------------------------------------------------


async def test_an_endpoint_that_says_it_is_gone_is_switched_off_and_somebody_is_told(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver, told: Told
) -> None:
    made = (await endpoints.create("acme", receiver.url, by="ada", description="the shop")).endpoint
    await publish(ledger, make_outbox, event_id="e-1")
    receiver.default = Answer(410)

    await deliver(make_outbox, endpoints)
    assert await publish(ledger, make_outbox) == []

    off = await endpoints.get("acme", made.id)
    assert (off.state, off.state_by, off.error_code) == (EndpointState.DISABLED, "bullpen", "HTTP_410")
    assert "gone" in str(off.reason)
    (notice,) = [row for row in await rows(ledger) if row.event_type == "outbox.endpoint.disabled.v1"]
    assert notice.integration_type == "bullmq:outbox.dead"
    assert notice.tenant_id == "acme"
    assert notice.payload["endpointId"] == made.id
    assert notice.payload["reason"] == off.reason
    assert ("endpoint.disabled", "bullpen", "acme") in await audited(ledger)
    assert [event["endpoint_id"] for event in told.of("outbox.endpoint_disabled")] == [made.id]


async def test_days_of_failure_switch_it_off_and_one_success_begins_anew(
    ledger: Ledger, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    endpoints = make(ledger, off_after_ms=5 * DAY_MS, off_failures=3)
    made = (await endpoints.create("acme", receiver.url, by="ada")).endpoint

    async def pass_by(days: float, status: int) -> Endpoint:
        ledger.database.clock_offset_ms += int(days * DAY_MS)
        receiver.default = Answer(status)
        await publish(ledger, make_outbox, max_attempts=1)
        await deliver(make_outbox, make(ledger, off_after_ms=5 * DAY_MS, off_failures=3))
        return await endpoints.get("acme", made.id)

    assert (await pass_by(0, 500)).failures == 1
    assert (await pass_by(6, 400)).state is EndpointState.ENABLED, "two failures are not three"
    healed = await pass_by(0, 200)
    assert (healed.failures, healed.failing_since, healed.error_code) == (0, None, None)
    for days in (0, 2, 2):
        assert (await pass_by(days, 503)).state is EndpointState.ENABLED, "four days are not five"
    off = await pass_by(1.5, 503)

    assert off.state is EndpointState.DISABLED
    assert "5 days" in str(off.reason)
    assert [row.event_type for row in await rows(ledger)].count("outbox.endpoint.disabled.v1") == 1


async def test_what_the_old_address_answers_late_says_nothing_about_the_new_one(
    ledger: Ledger, endpoints: Endpoints
) -> None:
    made = (await endpoints.create("acme", "https://old.example/", by="ada")).endpoint
    old = await ledger.endpoints.get(made.id)
    assert old is not None
    await endpoints.update("acme", made.id, by="ada", url="https://new.example/")

    assert await ledger.endpoints.note_failure(old, "HTTP_410", gone=True, after_ms=1, least=1) is None

    moved = await ledger.endpoints.get(made.id)
    assert moved is not None
    assert (moved.state, moved.failures) == (EndpointState.ENABLED, 0)
    await ledger.endpoints.note_failure(moved, "HTTP_500", gone=False, after_ms=DAY_MS, least=10)
    await ledger.endpoints.note_success(old)
    assert (await endpoints.get("acme", made.id)).failures == 1
    assert await ledger.endpoints.note_failure(moved, "HTTP_410", gone=True, after_ms=1, least=1) is not None


async def test_an_endpoint_that_moves_begins_without_failures(ledger: Ledger, endpoints: Endpoints) -> None:
    made = (await endpoints.create("acme", "https://old.example/", by="ada")).endpoint
    row = await ledger.endpoints.get(made.id)
    assert row is not None
    await ledger.endpoints.note_failure(row, "HTTP_500", gone=False, after_ms=DAY_MS, least=1)

    same = await endpoints.update("acme", made.id, by="ada", url="https://old.example/", description="x")
    assert (same.failures, same.error_code) == (1, "HTTP_500"), "it has not moved"
    assert same.failing_since is not None
    moved = await endpoints.update("acme", made.id, by="ada", url="https://new.example/")

    assert (moved.failures, moved.failing_since, moved.error_code) == (0, None, None)


async def test_failures_alone_switch_nothing_off_where_that_is_wanted(
    ledger: Ledger, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    endpoints = make(ledger, off_after_ms=0, off_failures=1)
    made = (await endpoints.create("acme", receiver.url, by="ada")).endpoint
    receiver.default = Answer(500)

    for _ in range(2):
        ledger.database.clock_offset_ms += 50 * DAY_MS
        await publish(ledger, make_outbox, max_attempts=1)
        await deliver(make_outbox, endpoints)

    assert (await endpoints.get("acme", made.id)).state is EndpointState.ENABLED


async def test_several_failures_at_once_tell_once(
    ledger: Ledger, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    endpoints = make(ledger, concurrency=10)
    await endpoints.create("acme", receiver.url, by="ada")
    for _ in range(10):
        await publish(ledger, make_outbox)
    receiver.default = Answer(410, delay_s=0.05)

    await deliver(make_outbox, endpoints)

    found = [row.event_type for row in await rows(ledger)]
    assert found.count("outbox.endpoint.disabled.v1") == 1
    assert [action for action, _, _ in await audited(ledger)].count("endpoint.disabled") == 1


async def test_what_waits_for_a_paused_endpoint_loses_nothing_and_goes_when_it_is_enabled(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, make: MakeEndpoints, receiver: HttpReceiver
) -> None:
    made = (await endpoints.create("acme", receiver.url, by="ada")).endpoint
    await endpoints.pause("acme", made.id, by="ada", reason="moving")
    await publish(ledger, make_outbox)
    await deliver(make_outbox, endpoints)

    assert receiver.requests == []
    assert [(row.status, row.attempts) for row in await rows(ledger)] == [(PENDING, 0)]
    assert [each.state for each in (await ledger.destinations.troubled()).values()] == ["disabled"]

    assert (await endpoints.enable("acme", made.id, by="ada")).state is EndpointState.ENABLED
    await deliver(make_outbox, make(ledger))
    assert len(receiver.requests) == 1
    assert await ledger.destinations.troubled() == {}
    assert await audited(ledger) == [
        ("endpoint.create", "ada", "acme"),
        ("endpoint.paused", "ada", "acme"),
        ("endpoint.enabled", "ada", "acme"),
    ]


async def test_a_running_dispatcher_follows_a_change_within_moments(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    """No restart: the address changes while it runs, and what waited for a paused one goes."""
    made = (await endpoints.create("acme", f"{receiver.url}/old", by="ada")).endpoint
    dispatcher = make_outbox({ENDPOINTS: endpoints.route}, tick_interval_ms=100).dispatcher()
    await dispatcher.start()
    await publish(ledger, make_outbox)
    await receiver.until(1)

    await endpoints.pause("acme", made.id, by="ada")
    await endpoints.update("acme", made.id, by="ada", url=f"{receiver.url}/new")
    await publish(ledger, make_outbox)
    await endpoints.enable("acme", made.id, by="ada")
    await until_settled(ledger, 2)
    await dispatcher.close()

    assert receiver.requests[0].path == "/hook/old"
    assert len(receiver.requests) == 2


async def test_a_removed_endpoint_leaves_rows_that_say_so(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    made = (await endpoints.create("acme", receiver.url, by="ada")).endpoint
    await publish(ledger, make_outbox)
    await endpoints.remove("acme", made.id, by="ada")

    await deliver(make_outbox, endpoints)

    assert [row.error_code for row in await rows(ledger, status=DEAD)] == ["NO_SUCH_ENDPOINT"]
    assert receiver.requests == []
    with pytest.raises(RowNotFound):
        await endpoints.get("acme", made.id)


async def test_a_rate_holds_over_all_dispatchers_and_costs_no_attempt(
    ledger: Ledger, endpoints: Endpoints, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    made = (await endpoints.create("acme", receiver.url, by="ada", rate=EndpointRate(3, 60_000))).endpoint
    for _ in range(8):
        await publish(ledger, make_outbox)

    await deliver(make_outbox, endpoints)
    await deliver(make_outbox, make(ledger))
    assert len(receiver.requests) == 3
    assert {row.attempts for row in await rows(ledger)} == {0}

    ledger.database.clock_offset_ms += 61_000
    await deliver(make_outbox, make(ledger))
    assert len(receiver.requests) == 6

    await endpoints.update("acme", made.id, by="ada", rate=None)
    ledger.database.clock_offset_ms += 61_000
    await deliver(make_outbox, make(ledger))
    assert len(receiver.requests) == 8


async def test_a_dispatcher_goes_on_by_itself_when_the_rate_allows_it(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    """It waits for the instant, not for its interval, which is far away here."""
    await endpoints.create("acme", receiver.url, by="ada", rate=EndpointRate(1, 200))
    for _ in range(4):
        await publish(ledger, make_outbox)
    dispatcher = make_outbox({ENDPOINTS: endpoints.route}, tick_interval_ms=600_000).dispatcher()

    await dispatcher.start()
    await receiver.until(4)
    await dispatcher.close()


# Looking after it ---------------------------------------------------------------------------------------------------


async def test_attempts_are_kept_and_paged(
    ledger: Ledger, endpoints: Endpoints, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    made = (await endpoints.create("acme", receiver.url, by="ada")).endpoint
    other = (await endpoints.create("acme", f"{receiver.url}/2", by="ada", events=["nothing"])).endpoint
    receiver.answers.extend([Answer(503), Answer(200)])
    await publish(ledger, make_outbox, event_id="e-1", backoff=1_000)
    await deliver(make_outbox, endpoints)
    ledger.database.clock_offset_ms += 60_000
    await deliver(make_outbox, make(ledger))

    newest, first = await endpoints.attempts("acme", made.id)

    assert (first.outcome, first.error_code, first.source_event_id) == ("FAILED", "HTTP_503", "e-1")
    assert (newest.outcome, newest.event_type) == ("SENT", "order.paid.v1")
    assert await endpoints.attempts("acme", made.id, before=newest.number) == [first]
    assert await endpoints.attempts("acme", made.id, limit=1) == [newest]
    assert await endpoints.attempts("acme", other.id) == []


async def test_a_test_message_reaches_it_in_any_state_and_leaves_no_trace(
    ledger: Ledger, endpoints: Endpoints, receiver: HttpReceiver
) -> None:
    made = await endpoints.create("acme", receiver.url, by="ada")
    await endpoints.disable("acme", made.endpoint.id, by="ada")
    receiver.answers.append(Answer(410))

    refused = await endpoints.send_test("acme", made.endpoint.id)
    taken = await endpoints.send_test("acme", made.endpoint.id, {"hello": 1})

    assert isinstance(refused, Refused)
    assert isinstance(taken, Accepted)
    assert signed_by(made.secret, receiver)
    assert json.loads(receiver.requests[1].body)["type"] == "bullpen.test.v1"
    assert await rows(ledger) == []
    assert (await endpoints.get("acme", made.endpoint.id)).failures == 0


async def test_replay_sends_one_endpoint_what_it_had_or_what_failed(
    ledger: Ledger, endpoints: Endpoints, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    made = (await endpoints.create("acme", receiver.url, by="ada")).endpoint
    await endpoints.create("acme", f"{receiver.url}/2", by="ada")
    await publish(ledger, make_outbox, event_id="good")
    await deliver(make_outbox, endpoints)
    receiver.default = Answer(400)
    await publish(ledger, make_outbox, event_id="bad")
    await deliver(make_outbox, make(ledger))
    receiver.default, receiver.requests = Answer(200), []

    assert await endpoints.replay("acme", made.id, by="ada", label="again") == 1
    assert await endpoints.replay("acme", made.id, by="ada", label="again") == 0
    assert await endpoints.replay("acme", made.id, by="ada", label="failed", failed=True) == 1
    await deliver(make_outbox, make(ledger))

    got = [(request.path, request.headers["webhook-id"]) for request in receiver.requests]
    assert sorted(got) == [("/hook", f"bad/endpoint:{made.id}"), ("/hook", f"good/endpoint:{made.id}")]


async def test_pages_of_endpoints(ledger: Ledger, endpoints: Endpoints) -> None:
    made = [(await endpoints.create("acme", f"https://example.com/{n}", by="ada")).endpoint for n in range(5)]
    other = (await endpoints.create("other", "https://example.com/x", by="bob")).endpoint
    await endpoints.disable("acme", made[3].id, by="ada")

    first = await endpoints.find("acme", limit=3)
    rest = await endpoints.find("acme", after=first[-1].id, limit=3)

    assert [each.id for each in first + rest] == [each.id for each in made]
    assert [each.id for each in await endpoints.find(state=EndpointState.DISABLED)] == [made[3].id]
    assert other.id in {each.id for each in await endpoints.find()}


# Borders ------------------------------------------------------------------------------------------------------------


async def test_a_page_begins_after_an_endpoint_that_was_removed(endpoints: Endpoints) -> None:
    made = [(await endpoints.create("acme", f"https://example.com/{n}", by="ada")).endpoint for n in range(6)]
    page = await endpoints.find("acme", limit=3)
    await endpoints.remove("acme", page[-1].id, by="ada")

    assert await endpoints.find("acme", after=page[-1].cursor, limit=3) == made[3:]
    assert await endpoints.find("acme", after=made[0].id) == [made[1], *made[3:]]
    with pytest.raises(RowNotFound):
        await endpoints.find("acme", after=page[-1].id)


async def test_an_id_of_another_tenant_is_no_place_in_a_list(endpoints: Endpoints) -> None:
    his = (await endpoints.create("other", "https://example.com/", by="bob")).endpoint
    await endpoints.create("acme", "https://example.com/", by="ada")

    with pytest.raises(RowNotFound):
        await endpoints.find("acme", after=his.id)


@pytest.mark.parametrize("after", ["x", "1.x", "x.", ".", "-1.", "9" * 40 + ".", 5])
async def test_what_is_no_cursor_is_refused(endpoints: Endpoints, after: Any) -> None:
    made = (await endpoints.create("acme", "https://example.com/", by="ada")).endpoint
    wrong = after if after in ("x", "1.x", 5) else f"{after}{made.id}"
    with pytest.raises(InvalidOption):
        await endpoints.find("acme", after=wrong)


async def test_another_tenants_endpoint_does_not_exist(
    ledger: Ledger, endpoints: Endpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    hers = (await endpoints.create("acme", receiver.url, by="ada")).endpoint

    for act in (
        endpoints.get("evil", hers.id),
        endpoints.update("evil", hers.id, by="eve", url="https://evil.example/"),
        endpoints.rotate_secret("evil", hers.id, by="eve"),
        endpoints.enable("evil", hers.id, by="eve"),
        endpoints.pause("evil", hers.id, by="eve"),
        endpoints.disable("evil", hers.id, by="eve"),
        endpoints.remove("evil", hers.id, by="eve"),
        endpoints.attempts("evil", hers.id),
        endpoints.send_test("evil", hers.id),
        endpoints.replay("evil", hers.id, by="eve", label="x"),
    ):
        with pytest.raises(RowNotFound):
            await act
    assert await endpoints.get("acme", hers.id) == hers
    assert [actor for _, actor, _ in await audited(ledger)] == ["ada"], "what was not done is not written down"
    # A row that names another tenant's endpoint goes nowhere.
    async with ledger.database.transaction(tenant="evil") as connection:
        await make_outbox({}).enqueue(
            connection, integration_type=hers.integration_type, event_type="x", payload={}, tenant_id="evil"
        )
    await deliver(make_outbox, endpoints)
    assert receiver.requests == []
    assert [row.error_code for row in await rows(ledger, status=DEAD)] == ["NO_SUCH_ENDPOINT"]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "https://user:password@example.com/",
        "https://10.0.0.1/",
        "https://[::1]/",
        "https://169.254.169.254/latest",
        "ftp://example.com/",
        "https://",
        "https://" + "a" * 2_000,
        "",
    ],
)
async def test_an_address_that_may_not_be_called_is_not_stored(sqlite_url: str, url: str) -> None:
    async with Ledger(sqlite_url) as ledger:
        strict = make_endpoints(Settings.load(environ={}), ledger, None)

        with pytest.raises(InvalidOption, match="url"):
            await strict.create("acme", url, by="ada")

        made = (await strict.create("acme", "https://example.com/", by="ada")).endpoint
        with pytest.raises(InvalidOption, match="url"):
            await strict.update("acme", made.id, by="ada", url=url)


async def test_a_name_that_leads_into_our_network_is_refused_when_it_is_called(
    ledger: Ledger, make: MakeEndpoints, make_outbox: MakeOutbox, receiver: HttpReceiver
) -> None:
    endpoints = make(ledger, allowed_networks="10.99.0.0/16")
    await endpoints.create("acme", receiver.url.replace("127.0.0.1", "localhost"), by="ada")
    await publish(ledger, make_outbox)

    await deliver(make_outbox, endpoints)

    assert receiver.requests == []
    assert [row.error_code for row in await rows(ledger, status=DEAD)] == ["ADDRESS_REFUSED"]


@pytest.mark.parametrize(
    "fields",
    [
        {"events": []},
        {"events": ["*.paid"]},
        {"events": ["order*"]},
        {"events": "order.*"},
        {"events": [""]},
        {"events": ["x"] * 101},
        {"headers": {"content-length": "1"}},
        {"headers": {"x": "a\r\nb: c"}},
        {"headers": {f"x{n}": "v" for n in range(21)}},
        {"headers": "x"},
        {"description": "x" * 201},
        {"rate": EndpointRate(0)},
        {"rate": EndpointRate(1, 0)},
        {"rate": 5},
    ],
)
async def test_what_cannot_be_used_is_refused_and_nothing_stored(sqlite_url: str, fields: dict[str, Any]) -> None:
    async with Ledger(sqlite_url) as ledger:
        endpoints = make_endpoints(Settings.load(environ={}), ledger, None)

        with pytest.raises(InvalidOption):
            await endpoints.create("acme", "https://example.com/", by="ada", **fields)

        assert await endpoints.find() == []


@pytest.mark.parametrize("by", [None, 5, ""])
async def test_who_does_it_is_a_text(ledger: Ledger, endpoints: Endpoints, by: Any) -> None:
    with pytest.raises(InvalidOption, match="by"):
        await endpoints.create("acme", "https://example.com/", by=by)
    assert await ledger.endpoints.find() == []
    made = (await endpoints.create("acme", "https://example.com/", by="ada")).endpoint
    with pytest.raises(InvalidOption, match="by"):
        await endpoints.pause("acme", made.id, by=by)


@pytest.mark.parametrize("key", ["surrogate", "", "x" * 201, 5])
async def test_a_key_that_cannot_be_is_refused(endpoints: Endpoints, key: Any) -> None:
    given = chr(0xD800) if key == "surrogate" else key
    with pytest.raises(InvalidOption, match="idempotency_key"):
        await endpoints.create("acme", "https://example.com/", by="ada", idempotency_key=given)


async def test_a_rotation_never_ends_a_secret_earlier_than_was_promised(endpoints: Endpoints) -> None:
    made = (await endpoints.create("acme", "https://example.com/", by="ada")).endpoint
    for _ in range(4):
        await endpoints.rotate_secret("acme", made.id, by="ada")

    with pytest.raises(RowStateConflict, match="5 secrets"):
        await endpoints.rotate_secret("acme", made.id, by="ada")

    at_once = await endpoints.rotate_secret("acme", made.id, by="ada", overlap_ms=0)
    assert at_once.endpoint.old_secret_until is None


async def test_a_tenant_has_a_bounded_number(ledger: Ledger, make: MakeEndpoints) -> None:
    endpoints = make(ledger, most_per_tenant=2)
    for _ in range(2):
        await endpoints.create("acme", "https://example.com/", by="ada")

    with pytest.raises(InvalidOption, match="fewer than 2"):
        await endpoints.create("acme", "https://example.com/", by="ada")
    await endpoints.create("other", "https://example.com/", by="bob")


async def test_several_calls_with_one_key_at_the_same_moment_make_one(ledger: Ledger, endpoints: Endpoints) -> None:
    calls = [endpoints.create("acme", "https://example.com/", by="ada", idempotency_key="k") for _ in range(8)]

    made = await asyncio.gather(*calls)

    assert len({each.endpoint.id for each in made}) == 1
    assert [each.secret != "" for each in made].count(True) == 1, "it is shown to one"
    assert [action for action, _, _ in await audited(ledger)] == ["endpoint.create"]


async def test_what_a_statement_that_failed_was_given_is_in_no_traceback(ledger: Ledger) -> None:
    """Nor in the error of the engine that caused it, which a log shows with it."""
    values = {"id": "a", "tenant_id": None, "url": "https://h1dden/", "events": "[]", "secrets": "whsec_h1dden"}
    statement = tables.endpoints.insert().values(**values)
    options = {"schema_translate_map": ledger.database.translate_map}

    with pytest.raises(LedgerError) as refused:
        async with ledger.database.transaction() as connection:
            await connection.execute(statement, execution_options=options)

    assert "whsec_h1dden" not in str(refused.value.__cause__).partition("DETAIL")[0]
    assert "SQL parameters hidden" in str(refused.value.__cause__)


async def test_strict_sources_and_endpoints_exclude_each_other(ledger_url: str, make_ledger: MakeLedger) -> None:
    """The second endpoint would get nothing, and nobody would know."""
    ledger = make_ledger(ledger_url, strict_sources=True)

    async with ledger.database.transaction(tenant="acme") as connection:
        with pytest.raises(InvalidOption, match="strict_sources"):
            await Outbox(ledger).publish(connection, tenant_id="acme", event_type="x")


async def test_options_are_checked() -> None:
    for wrong in (
        {"off_after_ms": 0},
        {"off_failures": 0},
        {"overlap_ms": -1},
        {"most_per_tenant": 0},
        {"concurrency": 0},
    ):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            EndpointOptions(**wrong)


async def test_row_level_security_keeps_endpoints_apart(
    postgres_server: PostgresServer,
    guarded_database: str,
    make_ledger: MakeLedger,
    make: MakeEndpoints,
    make_outbox: MakeOutbox,
    receiver: HttpReceiver,
) -> None:
    """An API process manages, publishes and replays with the tenant's rights; the service process delivers."""
    url = postgres_server.url
    api = make_ledger(url(guarded_database, role=ROLES.tenant), roles=ROLES, duty="tenant")
    service = make_ledger(url(guarded_database, role=ROLES.service), roles=ROLES, duty="service")
    theirs = make(api)
    made = await theirs.create("acme", receiver.url, by="ada")
    await theirs.create("other", f"{receiver.url}/other", by="bob")
    await theirs.update("acme", made.endpoint.id, by="ada", description="new")
    await theirs.rotate_secret("acme", made.endpoint.id, by="ada")

    await publish(api, make_outbox, event_id="e-1")
    await deliver_on(service, make_outbox, make)
    assert await theirs.replay("acme", made.endpoint.id, by="ada", label="again") == 1
    await deliver_on(service, make_outbox, make)

    assert [request.path for request in receiver.requests] == ["/hook", "/hook"]
    assert len(await theirs.attempts("acme", made.endpoint.id)) == 2
    with pytest.raises(UnsafeDatabaseRole):
        await theirs.find()
    async with api.database.transaction(tenant="other") as connection:
        seen = await connection.execute(sa.text("SELECT tenant_id FROM core_outbox.bullpen_endpoints"))
        assert [row[0] for row in seen.all()] == ["other"]
        changed = await connection.execute(
            sa.text("UPDATE core_outbox.bullpen_endpoints SET url = 'x' WHERE tenant_id = 'acme'")
        )
        assert changed.rowcount == 0
    receiver.default = Answer(410)
    await publish(api, make_outbox)
    await deliver_on(service, make_outbox, make)
    assert (await theirs.get("acme", made.endpoint.id)).state is EndpointState.DISABLED


async def deliver_on(ledger: Ledger, make_outbox: MakeOutbox, make: MakeEndpoints) -> None:
    async with make_outbox({ENDPOINTS: make(ledger).route}, ledger=ledger).dispatcher() as dispatcher:
        while await dispatcher.tick():
            await dispatcher.idle()
        await dispatcher.idle()

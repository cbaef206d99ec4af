"""From the event to the target, as an application has it: settings, `app.projector`, `bullpen run`, its commands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bullpen.app import Bullpen
from bullpen.cli.commands import run
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.ledger import Ledger, OutboxStatus
from bullpen.outbox import EventRoutes, ProjectorOptions
from bullpen.plugins._kafka import Brokers, KafkaDoor
from bullpen.plugins.channels.email import Email
from bullpen.plugins.channels.kafka import KafkaChannel
from bullpen.plugins.channels.webhook import Webhook
from bullpen.plugins.sources.kurrent import KurrentSource
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.source import SourceEvent
from bullpen.settings import Settings
from bullpen.testing.contracts.source import an_event
from bullpen.testing.kafka import MockKafka, need_kafka
from bullpen.testing.kurrent import KurrentServer
from bullpen.testing.receivers import Answer, HttpReceiver, Request, SmtpReceiver
from tests.forks import WarmChild
from tests.outbox.kit import PATIENCE_S, rows, until_settled

Type = Callable[..., tuple[int, str, str]]
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(params=["embedded", "servers"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Settings]:
    """Nothing configured at all; and PostgreSQL, Redis and an event store on its own protocol."""
    environ = {"BULLPEN_DATA_DIR": str(tmp_path / "data"), "ESDB_SUBSCRIPTION_PREFIX": "payment., account."}
    if request.param == "embedded":
        yield Settings.load(environ=environ, start=tmp_path)
        return
    with KurrentServer() as server:
        environ |= {
            "BULLPEN_EMBEDDED": "never",
            "BULLPEN_DATABASE_URL": request.getfixturevalue("postgres_url"),
            "BULLPEN_REDIS_URL": request.getfixturevalue("redis_url"),
            "ESDB_CONNECTION_STRING": server.url,
        }
        yield Settings.load(environ=environ, start=tmp_path)


def payments() -> EventRoutes:
    routes = EventRoutes()

    @routes.on("payment.completed.v1", to="webhook:partnerX", since="beginning")
    def payment_completed(event: SourceEvent) -> dict[str, Any]:
        return {"paymentId": event.data["number"]}

    @routes.on("payment.completed.v1", to="webhook:audit", since="beginning")
    def audit(event: SourceEvent) -> dict[str, Any]:
        return {"audited": event.data["number"]}

    return routes


@contextlib.asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    task = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await task


def partner(receiver: HttpReceiver) -> Webhook:
    return Webhook(receiver.url, allow_http=True, allowed_networks=["127.0.0.0/8"])


@pytest.mark.requirement("O-1", "O-3", "O-4", "O-83", "O-85", "O-59", "X-96", "O-71", "X-122", "O-36", "X-16")
async def test_from_the_event_to_the_target(settings: Settings) -> None:
    """Event, row, job, delivery, SENT: with the ids of the event arriving at both targets, as one trace."""
    async with HttpReceiver(_once_per_key()) as receiver:
        app = Bullpen(settings=settings)
        app.use_outbox().route("webhook:*", partner(receiver))
        projector = app.projector(payments())
        async with running(app):
            event = an_event(17, tenant_id="acme", user_id="u-7", headers={"traceparent": TRACE})
            ignored = an_event(18, "order.paid.v1")
            if isinstance(projector.source, KurrentSource):
                await projector.source.append("payment-17", [event, ignored])
            else:
                await app.prepare()
                await app.ledger.events.append(None, "payment-17", [event, ignored])
            requests = await receiver.until(2, within_s=PATIENCE_S)
            sent = await until_settled(app.ledger, 2)
            report = await app.health.report()
            names = {metric.name for metric in await app.metrics()}

    assert {row.status for row in sent} == {OutboxStatus.SENT}
    assert {row.attempts for row in sent} == {0}
    for request in requests:
        assert request.headers["x-correlation-id"] == "c-17"
        assert request.headers["x-tenant-id"] == "acme"
        assert request.headers["x-user-id"] == "u-7"
        assert request.headers["traceparent"].split("-")[1] == TRACE.split("-")[1]
        assert json.loads(request.body)["type"] == "payment.completed.v1"
    keys = {request.headers["idempotency-key"] for request in requests}
    assert keys == {f"{event.id}/webhook:partnerX", f"{event.id}/webhook:audit"}
    assert report.checks["projector default"] is None
    assert {"outbox_projector_lag", "outbox_parked_events", "outbox_enqueued_total"} <= names


@pytest.mark.requirement("O-1", "O-3", "O-4", "O-54", "O-56", "O-57", "O-83", "O-85", "X-89", "X-94", "X-122", "O-86")
async def test_one_event_reaches_kafka_http_and_mail(settings: Settings) -> None:
    """Three routes, three kinds of target, one correlation: `payment.completed.v1` to `kafka:payments` and two more."""
    need_kafka()
    routes = EventRoutes()

    @routes.on("payment.completed.v1", to="kafka:payments", since="beginning")
    def payments_topic(event: SourceEvent) -> dict[str, Any]:
        return {"paymentId": event.data["number"]}

    @routes.on("payment.completed.v1", to="webhook:partnerX", since="beginning")
    def partner_hook(event: SourceEvent) -> dict[str, Any]:
        return {"paymentId": event.data["number"]}

    @routes.on("payment.completed.v1", to="email:receipts", since="beginning")
    def receipt(event: SourceEvent) -> dict[str, Any]:
        return {"to": "ada@example.com", "subject": "Receipt", "text": f"Payment {event.data['number']}"}

    with MockKafka.start(1) as cluster:
        cluster.create_topic("payments", partitions=2)
        async with HttpReceiver() as receiver, SmtpReceiver() as smtp:
            app = Bullpen(settings=settings)
            app.use_outbox().route("webhook:*", partner(receiver))
            app.use_outbox().route("kafka:*", KafkaChannel(cluster.address, key="stream"))
            app.use_outbox().route(
                "email:*", Email("127.0.0.1", port=smtp.port, security="none", sender="shop@example.com")
            )
            projector = app.projector(routes)
            event = an_event(17, tenant_id="acme", headers={"traceparent": TRACE})
            async with running(app):
                if isinstance(projector.source, KurrentSource):
                    await projector.source.append("payment-17", [event])
                else:
                    await app.prepare()
                    await app.ledger.events.append(None, "payment-17", [event])
                sent = await until_settled(app.ledger, 3)
            door = KafkaDoor(Brokers.parse(cluster.address))
            (record,) = [each async for each in door.read_all("payments")]
            await door.aclose()
            (request,), (mail,) = receiver.requests, smtp.mails

    headers = {name: value.decode() for name, value in record.headers}
    assert {row.status for row in sent} == {OutboxStatus.SENT}
    assert record.key == b"payment-17"  # in the order of the aggregate
    assert headers["idempotencyKey"] == f"{event.id}/kafka:payments"
    assert request.headers["idempotency-key"] == f"{event.id}/webhook:partnerX"
    assert (headers["correlationId"], headers["tenantId"]) == ("c-17", "acme")
    assert "userId" not in headers  # the event has none
    assert (request.headers["x-correlation-id"], request.headers["x-tenant-id"]) == ("c-17", "acme")
    assert "x-user-id" not in request.headers
    assert headers["traceparent"].split("-")[1] == request.headers["traceparent"].split("-")[1] == TRACE.split("-")[1]
    assert mail.recipient == "ada@example.com"
    assert "Payment 17" in mail.message.get_content()


def _once_per_key() -> Callable[[Request], Answer]:
    """A target that honours the key: the effect happens once."""
    seen: set[str] = set()

    def answer(request: Request) -> Answer:
        seen.add(request.headers["idempotency-key"])
        return Answer(200)

    return answer


@pytest.mark.requirement("O-84", "O-4")
async def test_a_target_that_refuses_ends_dead_and_the_projector_goes_on(settings: Settings) -> None:
    async with HttpReceiver(Answer(400)) as receiver:
        app = Bullpen(settings=settings)
        app.use_outbox().route("webhook:*", partner(receiver))
        projector = app.projector(payments())
        async with running(app):
            if isinstance(projector.source, KurrentSource):
                await projector.source.append("payment-1", [an_event(1)])
            else:
                await app.prepare()
                await app.ledger.events.append(None, "payment-1", [an_event(1)])
            dead = await until_settled(app.ledger, 2, OutboxStatus.DEAD)

    assert {row.error_code for row in dead} == {"HTTP_400"}


# Settings and registration ------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-59", "X-96", "O-29")
def test_the_event_store_is_configured_by_the_names_that_are_known(tmp_path: Path) -> None:
    environ = {
        "ESDB_CONNECTION_STRING": "esdb+discover://admin:changeit@events:2113",
        "ESDB_SUBSCRIPTION_PREFIX": "payment. , account.",
    }
    settings = Settings.load(environ=environ, start=tmp_path)
    shown = {each.key: each.value for each in settings.describe()}

    assert settings.events.prefixes == ("payment.", "account.")
    assert shown["events.connection_string"] == "esdb+discover://admin:***@events:2113"
    assert "changeit" not in repr(settings)
    assert Settings.load(environ={}, start=tmp_path).events.prefixes == ()


@pytest.mark.requirement("O-59")
@pytest.mark.parametrize(
    ("variable", "value"),
    [("ESDB_CONNECTION_STRING", "http://x"), ("ESDB_SUBSCRIPTION_PREFIX", "a,,b"), ("ESDB_SUBSCRIPTION_PREFIX", "$x")],
)
def test_settings_that_cannot_be_used_name_their_variable(tmp_path: Path, variable: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=variable):
        Settings.load(environ={variable: value}, start=tmp_path)


@pytest.mark.requirement("O-28", "O-59")
async def test_the_settings_choose_the_event_store(tmp_path: Path) -> None:
    environ = {"BULLPEN_DATA_DIR": str(tmp_path), "ESDB_CONNECTION_STRING": "esdb://events:2113"}
    group = {**environ, "BULLPEN_SUBSCRIPTION_GROUP": "outbox"}
    async with (
        Bullpen(settings=Settings.load(environ=environ, start=tmp_path)) as kurrent,
        Bullpen(settings=Settings.load(environ=group, start=tmp_path)) as grouped,
        Bullpen(settings=Settings.load(environ={"BULLPEN_DATA_DIR": str(tmp_path)}, start=tmp_path)) as own,
    ):
        assert isinstance(kurrent.projector(payments()).source, KurrentSource)
        assert vars(grouped.projector(payments()).source)["_group"] == "outbox"
        assert isinstance(own.projector(payments()).source, SqlEvents)
        given = SqlEvents(own.ledger)
        assert own.projector(payments(), source=given, name="second").source is given
        with pytest.raises(InvalidOption, match="no other projector"):
            own.projector(payments())
        assert [projector.name for projector in own.projectors] == ["default", "second"]


async def test_parts_can_run_alone(tmp_path: Path) -> None:
    settings = Settings.load(environ={"BULLPEN_DATA_DIR": str(tmp_path / "data")}, start=tmp_path)
    app = Bullpen(settings=settings)
    app.projector(payments())
    app.use_outbox().route("webhook:*", partner_that_must_not_be_called())
    task = asyncio.create_task(app.run(signals=False, only=["projector"]))
    async with asyncio.timeout(PATIENCE_S):
        while app.projectors[0].state != "caught up":  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    await app.ledger.events.append(None, "payment-1", [an_event(1)])
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await rows(app.ledger)) < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    await app.stop()
    await task

    assert {row.status for row in found} == {OutboxStatus.PENDING}
    with pytest.raises(InvalidOption, match="one of worker, outbox, projector"):
        await app.run(only=["dispatcher"])
    with pytest.raises(NotConfigured, match="no part of the kind messages"):
        await app.run(only=["messages"])


def partner_that_must_not_be_called() -> Webhook:
    return Webhook("https://203.0.113.1/")


# The commands -------------------------------------------------------------------------------------------------------


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Type:
    monkeypatch.setenv("NO_COLOR", "1")

    def typed(*words: str) -> tuple[int, str, str]:
        code = run(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return typed


APP = """
    from bullpen import Bullpen
    from bullpen.outbox import EventRoutes, ProjectorOptions

    routes = EventRoutes()

    @routes.on("payment.*", to="webhook:partnerX", since="now")
    def payment(event):
        return {"number": event.data["number"], "inverse": 1 / event.data["number"]}

    app = Bullpen()
    app.projector(routes, options=ProjectorOptions(max_tries=1, parked_interval_ms=50))
"""


@pytest.fixture
def shop(sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with an app, and events of the past: the first of them cannot be mapped."""
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(APP))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("BULLPEN_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))

    async def fill() -> None:
        async with Ledger(sqlite_url) as ledger:
            await ledger.events.append(None, "payment-1", [an_event(n) for n in range(3)])

    asyncio.run(fill())
    return name


@pytest.mark.requirement("X-86", "X-74", "X-40")
def test_a_backfill_and_what_it_parked(shop: str, type_: Type) -> None:
    code, out, err = type_("projectors", "backfill", shop, "payment", "--since", "beginning", "--yes")
    assert (code, out.strip()) == (0, "events: 3, created: 2, duplicates: 0, parked: 1, position: 3"), err
    code, out, _ = type_(
        "projectors", "backfill", f"{shop}:app", "payment", "--since", "0", "--yes", "--restart", "--json"
    )
    assert json.loads(out)["duplicates"] == 2

    code, out, _ = type_("projectors", "parked", "list", "--json")
    (parked,) = json.loads(out)
    number = str(parked["event"])
    assert (parked["route"], parked["error"]) == ("payment", "ZeroDivisionError: division by zero")
    assert "ZeroDivisionError" in type_("projectors", "parked", "list")[1]
    shown = json.loads(type_("projectors", "parked", "show", number, "--json")[1])
    assert shown["data"]["number"] == 0
    assert shown["metadata"]["correlationId"] == "c-0"
    assert "correlationId" in type_("projectors", "parked", "show", number)[1]

    assert type_("projectors", "parked", "retry", number)[:2] == (0, "retry: 1\n")
    assert json.loads(type_("projectors", "parked", "list", "--json")[1])[0]["retryWanted"] is True
    code, _, err = type_("projectors", "parked", "retry", number, "99")
    assert (code, "not there: 99" in err) == (1, True)
    assert json.loads(type_("projectors", "parked", "skip", "--all", "--yes", "--json")[1]) == {"skip": [int(number)]}
    assert "nothing is parked" in type_("projectors", "parked", "list")[2]
    code, _, err = type_("projectors", "parked", "show", number)
    assert (code, "no parked event" in err) == (1, True)


def test_how_far_projectors_are(shop: str, type_: Type) -> None:
    code, out, _ = type_("projectors", "list", shop, "--json")
    (status,) = json.loads(out)
    assert code == 0
    assert (status["name"], status["position"], status["head"], status["lag"]) == ("default", None, 3, None)
    assert status["routes"] == {"payment": "now"}
    assert "unknown" in type_("projectors", "list", shop)[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("backfill", "{app}", "payment", "--since", "yesterday", "--yes"), "an instant with its zone"),
        (("backfill", "{app}", "payment", "--since", "2026-05-01T00:00:00", "--yes"), "an instant with its zone"),
        (("backfill", "{app}", "nope", "--since", "0", "--yes"), "one of payment"),
        (("backfill", "{app}", "payment", "--since", "0", "--yes", "--projector", "x"), "there is default"),
        (("parked", "retry"), "name the events, or pass --all"),
        (("parked", "retry", "1", "--all"), "name the events, or pass --all"),
    ],
)
def test_commands_that_make_no_sense_say_why(shop: str, type_: Type, words: tuple[str, ...], told: str) -> None:
    code, _, err = type_("projectors", *(word.replace("{app}", shop) for word in words))

    assert code == 2
    assert told in err


def test_an_app_without_projectors_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_: Type) -> None:
    name = f"bare_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("from bullpen import Bullpen\napp = Bullpen()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    code, _, err = type_("projectors", "list", name)

    assert (code, "app.projector(routes)" in err) == (1, True)


@pytest.mark.requirement("O-36")
async def test_bullpen_run_starts_the_projector_alone(
    shop: str, sqlite_url: str, tmp_path: Path, make_ledger: Any
) -> None:
    ledger: Ledger = make_ledger(sqlite_url)
    with WarmChild.module("bullpen.cli", "run", shop, "--only", "projector", cwd=tmp_path) as child:
        async with asyncio.timeout(PATIENCE_S):
            while await ledger.checkpoints.read("projector/default/route/payment") is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        await ledger.events.append(None, "payment-2", [an_event(7)])
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await rows(ledger)):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        child.terminate()
        code = await asyncio.to_thread(child.wait, 30)

    assert [row.payload["number"] for row in found] == [7]
    assert code == 0


def test_options_reach_the_projector(tmp_path: Path) -> None:
    app = Bullpen(settings=Settings.load(environ={"BULLPEN_DATA_DIR": str(tmp_path)}, start=tmp_path))

    projector = app.projector(payments(), options=ProjectorOptions(max_tries=9))

    assert projector.options.max_tries == 9

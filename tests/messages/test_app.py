"""Messages as an application has them: made from settings, run by `run`, on whichever transport is configured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aio_pika
import pytest

from bullpen.app import Bullpen
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.messages import Messages, MessageStatus
from bullpen.plugins.channels.webhook import Webhook
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.plugins.transports.rabbitmq import RabbitMQClient
from bullpen.ports.channel import Message
from bullpen.queue import Job
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.testing import free_port
from bullpen.testing.rabbitmq import RabbitServer
from bullpen.testing.receivers import HttpReceiver
from bullpen.wiring.messages import make_client
from tests.messages.kit import PATIENCE_S, Provider, Told, at, person, set_clock, telling, until_status

DEFAULTS = {
    "exchange": "birthday.messages",
    "dlx": "birthday.messages.dlx",
    "queue": "birthday.messages.queue",
    "dlq": "birthday.messages.dlq",
}


def load(tmp_path: Path, **environ: str) -> Settings:
    return Settings.load(environ={"BULLPEN_DATA_DIR": str(tmp_path / "data"), **environ}, start=tmp_path)


@contextlib.asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    task = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await task


@pytest.fixture(params=["memory", "bullmq", "rabbitmq"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """The same application, configured for each transport; the scheduler runs every second."""
    environ = {"BULLPEN_MESSAGES_TRANSPORT": request.param, "CRON_MINUTE_SCHEDULE": "* * * * * *"}
    if request.param == "bullmq":
        environ["BULLPEN_REDIS_URL"] = request.getfixturevalue("redis_url")
    if request.param == "rabbitmq":
        environ["RABBITMQ_URL"] = request.getfixturevalue("rabbit").url
    return load(tmp_path, **environ)


@pytest.mark.requirement("S-1", "S-15")
async def test_an_app_sends_on_any_transport(settings: Settings, told: Told) -> None:
    """From an empty directory: tables, topology, scheduler, sender, and a provider that gets one message."""
    app = Bullpen(settings=settings)
    seen: list[Message] = []

    @app.use_messages().channel("email", after_crash="same_key")
    async def send(message: Message) -> str:
        seen.append(message)
        return "taken"

    app.use_messages().occasion("birthday", text="Happy {number}, {name}!", subject="For {name}")
    await app.prepare()
    set_clock(app.ledger, at("2026-03-14 08:00"))
    await app.use_messages().recipients.save(person(zone="UTC"))
    set_clock(app.ledger, at("2026-03-14 08:59:59"))
    async with running(app):
        (sent,) = await until_status(app.use_messages(), 1)
        metrics = {metric.name for metric in await app.metrics()}

    assert [message.payload["text"] for message in seen] == ["Happy 36, Person 1!"]
    assert sent.response["detail"] == "taken"
    assert sent.sent_at is not None and sent.sent_at >= sent.due_at
    assert {"queue_message_publish_duration_seconds", "bullpen_messages_failed_total"} <= metrics


@pytest.mark.requirement("S-4", "S-10", "S-11", "S-12", "S-47", "S-48", "X-67", "X-68", "X-69")
async def test_the_topology_on_rabbitmq_has_the_names_and_settings_of_the_pipeline(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    """As the broker itself tells it, with nothing configured but its address."""
    client = make_client(
        load(tmp_path, RABBITMQ_URL=rabbit.url, BULLPEN_MESSAGES_TRANSPORT="rabbitmq"),
        ("birthday", "anniversary"),
        lambda: pytest.fail("no Redis is needed"),
        "bull",
    )
    assert isinstance(client, RabbitMQClient)
    await client.transport.declare(client.transport.spec(DEFAULTS["queue"]))  # type: ignore[attr-defined]
    await client.close()

    told = json.loads(await asyncio.to_thread(rabbit.control, "export_definitions", "-", "--silent"))
    exchanges = {one["name"]: (one["type"], one["durable"]) for one in told["exchanges"]}
    queues = {one["name"]: one for one in told["queues"]}
    bindings = {(one["source"], one["destination"], one["routing_key"]) for one in told["bindings"]}

    assert exchanges[DEFAULTS["exchange"]] == ("topic", True)
    assert exchanges[DEFAULTS["dlx"]] == ("direct", True)
    main, dead = (queues[DEFAULTS[name]] for name in ("queue", "dlq"))
    assert main["durable"] and dead["durable"]
    assert main["arguments"] == {
        "x-queue-type": "quorum",
        "x-quorum-initial-group-size": 3,
        "x-message-ttl": 86_400_000,
        "x-max-length": 100_000,
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "birthday.messages.dlx",
        "x-dead-letter-routing-key": "dlq",
        "x-dead-letter-strategy": "at-least-once",
        "x-delivery-limit": 20,
    }
    assert dead["arguments"]["x-queue-type"] == "quorum"
    assert "x-message-ttl" not in dead["arguments"]
    for key in ("birthday", "anniversary"):
        assert (DEFAULTS["exchange"], DEFAULTS["queue"], key) in bindings
    assert (DEFAULTS["dlx"], DEFAULTS["dlq"], "dlq") in bindings


@pytest.mark.requirement("S-6", "S-12", "S-13", "S-22")
async def test_an_order_on_the_wire_is_persistent_json_under_the_name_of_its_kind(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    """A kind that is registered later is one more routing key; what was there is not touched."""
    settings = load(tmp_path, RABBITMQ_URL=rabbit.url, BULLPEN_MESSAGES_TRANSPORT="rabbitmq", **own_names("wire"))
    first = Bullpen(settings=settings)
    first.use_messages().channel("email", Provider(), after_crash="park")
    await first.prepare()
    await (await first.use_messages().messaging.consume(settings.rabbitmq.queue_name, lambda _: None)).close()
    await first.aclose()
    app = Bullpen(settings=settings)
    app.use_messages().occasion("high-priority", text="Now {name}")
    app.use_messages().channel("email", Provider(), after_crash="park")
    set_clock(app.ledger, at("2026-03-14 08:00"))
    dates = {"birthday": "1990-03-14", "high-priority": "1990-03-14"}
    await app.use_messages().recipients.save(person(zone="UTC", occasions=dates))
    await app.use_messages().planner().run_until_done()
    set_clock(app.ledger, at("2026-03-14 09:00"))

    await app.use_messages().scheduler().run_once()

    async with await aio_pika.connect(rabbit.url) as connection:
        queue = await (await connection.channel()).get_queue(settings.rabbitmq.queue_name)
        found = [await queue.get(), await queue.get()]
    await app.aclose()
    keys = sorted(message.routing_key or "" for message in found if message is not None)
    assert keys == ["birthday", "high-priority"]
    for message in found:
        assert message is not None
        assert message.delivery_mode == aio_pika.DeliveryMode.PERSISTENT
        assert message.headers["x-retry-count"] == 0
        assert message.content_type == "application/json"
        for secret in (b"Person", b"example.com"):
            assert secret not in message.body


def own_names(prefix: str) -> dict[str, str]:
    base = f"{prefix}-{os.urandom(4).hex()}"
    return {
        "RABBITMQ_QUEUE_NAME": f"{base}.queue",
        "RABBITMQ_DLQ_NAME": f"{base}.dlq",
        "RABBITMQ_EXCHANGE_NAME": base,
        "RABBITMQ_DLX_NAME": f"{base}.dlx",
    }


@pytest.mark.many
@pytest.mark.requirement("S-47", "S-52", "X-67")
async def test_what_a_full_queue_refuses_stays_in_the_database_and_leaves_later(
    rabbit: RabbitServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load(
        tmp_path,
        RABBITMQ_URL=rabbit.url,
        BULLPEN_MESSAGES_TRANSPORT="rabbitmq",
        BULLPEN_MESSAGES_MAX_QUEUE_LENGTH="10",
        **own_names("full"),
    )
    app = Bullpen(settings=settings)
    provider = Provider()
    app.use_messages().channel("email", provider, after_crash="same_key")
    await app.prepare()
    client: Any = app.use_messages().messaging
    monkeypatch.setattr(client._publisher, "_deadline_s", 2)  # half a minute of waiting for room
    enqueuer = app.use_messages().enqueuer()
    for first in (0, 60):  # the broker begins to refuse when it has noticed: what is under way by then it still takes
        set_clock(app.ledger, at("2026-03-14 08:00"))
        await app.use_messages().recipients.save_many(person(number, zone="UTC") for number in range(first, first + 60))
        await app.use_messages().planner().run_until_done()
        set_clock(app.ledger, at("2026-03-14 09:00"))

        await enqueuer.run_once()
    refused = [row for row in await app.use_messages().store.find() if row.status is MessageStatus.CREATED]
    await app.use_messages().sender().start()
    async with asyncio.timeout(PATIENCE_S):
        while len(provider.delivered) < 120:
            await enqueuer.run_once()
            await asyncio.sleep(0.05)

    assert refused
    assert all("full" in (row.last_error or "") for row in refused)
    assert len(provider.calls) == 120
    await app.aclose()


@pytest.mark.requirement("S-48", "X-67", "X-69")
async def test_an_order_that_waited_too_long_is_dead_lettered_and_the_row_is_not_lost(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    """No sender ran for longer than the TTL: the broker moves the order aside, the scheduler publishes a new one."""
    settings = load(
        tmp_path,
        RABBITMQ_URL=rabbit.url,
        BULLPEN_MESSAGES_TRANSPORT="rabbitmq",
        BULLPEN_MESSAGES_MESSAGE_TTL_MS="200",
        **own_names("old"),
    )
    app = Bullpen(settings=settings)
    provider = Provider()
    app.use_messages().channel("email", provider, after_crash="same_key")
    await app.prepare()
    set_clock(app.ledger, at("2026-03-14 08:00"))
    await app.use_messages().recipients.save(person(zone="UTC"))
    await app.use_messages().planner().run_until_done()
    set_clock(app.ledger, at("2026-03-14 09:00"))
    await app.use_messages().scheduler().run_once()
    client: Any = app.use_messages().messaging
    letters = client.transport.dead_letters(settings.rabbitmq.queue_name)
    async with asyncio.timeout(PATIENCE_S):
        while await letters.depth() == 0:  # noqa: ASYNC110 - the broker tells nobody
            await asyncio.sleep(0.05)

    (letter,) = await letters.list()
    set_clock(app.ledger, at("2026-03-14 10:05"))
    await app.use_messages().sender().start()
    await app.use_messages().scheduler().run_once()
    await until_status(app.use_messages(), 1)

    assert letter.cause == "expired"
    assert len(provider.calls) == 1
    await app.aclose()


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-20", "S-41", "S-42", "X-2")
@pytest.mark.parametrize(
    ("transport", "backoff", "pauses"),
    [
        ("memory", "exponential", [100, 200, 400]),
        ("bullmq", "exponential", [100, 200, 400]),
        ("rabbitmq", "exponential", [100, 200, 400]),
        ("memory", "linear", [100, 200, 300]),
        ("rabbitmq", "linear", [100, 200, 300]),
    ],
)
async def test_retries_are_the_same_on_every_transport(
    tmp_path: Path, transport: str, backoff: str, pauses: list[int]
) -> None:
    settings = load(
        tmp_path,
        BULLPEN_MESSAGES_TRANSPORT=transport,
        QUEUE_MAX_RETRIES="3",
        QUEUE_RETRY_DELAY="100",
        QUEUE_RETRY_BACKOFF=backoff,
        QUEUE_CONCURRENCY="7",
    )

    client: Any = make_client(settings, ("birthday",), lambda: Connection("redis://localhost:1"), "bull")

    kinds = {"memory": "MemoryClient", "bullmq": "BullMQClient", "rabbitmq": "RabbitMQClient"}
    assert type(client).__name__ == kinds[transport]
    assert client.policy.attempts == 4
    assert [client.policy.backoff.delay_for(n, lambda: 0.5) for n in (1, 2, 3)] == pauses
    assert client._concurrency == 7
    if transport == "bullmq":
        await client.transport.connection.aclose()


@pytest.mark.requirement("S-42")
def test_linear_growth_is_refused_where_node_could_not_follow(tmp_path: Path) -> None:
    settings = load(tmp_path, QUEUE_RETRY_BACKOFF="linear")

    with pytest.raises(InvalidOption, match=r"messages\.retry_backoff: expected 'exponential' on BullMQ"):
        make_client(settings, ("birthday",), lambda: pytest.fail("too late"), "bull")


@pytest.mark.requirement("X-71")
@pytest.mark.parametrize(("connections", "separate"), [("", False), ("1", False), ("2", True)])
def test_consumers_may_have_a_connection_of_their_own(tmp_path: Path, connections: str, separate: bool) -> None:
    settings = load(tmp_path, BULLPEN_MESSAGES_TRANSPORT="rabbitmq", BULLPEN_RABBITMQ_CONNECTIONS=connections)

    client: Any = make_client(settings, ("birthday",), lambda: pytest.fail("no Redis"), "bull")

    assert (client.transport._consuming is not client.transport._link) is separate


@pytest.mark.requirement("S-15", "S-20", "S-47", "S-48", "X-71")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CRON_MINUTE_SCHEDULE", "every minute"),
        ("BULLPEN_MESSAGES_TRANSPORT", "pigeon"),
        ("BULLPEN_MESSAGES_LOOK_AHEAD", "-1"),
        ("BULLPEN_MESSAGES_MESSAGE_TTL_MS", "0"),
        ("BULLPEN_MESSAGES_MAX_QUEUE_LENGTH", "many"),
        ("BULLPEN_RABBITMQ_CONNECTIONS", "3"),
        ("QUEUE_CONCURRENCY", "0"),
    ],
)
def test_a_setting_that_cannot_be_used_stops_the_start(tmp_path: Path, variable: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=f"environment variable {variable}"):
        load(tmp_path, **{variable: value})


@pytest.mark.requirement("S-15")
async def test_the_scheduler_follows_its_settings(tmp_path: Path) -> None:
    settings = load(tmp_path, CRON_MINUTE_SCHEDULE="*/5 * * * *", BULLPEN_MESSAGES_LOOK_AHEAD="0")
    app = Bullpen(settings=settings)

    options = app.use_messages()._scheduler_options

    assert (options.schedule, options.look_ahead_ms) == ("*/5 * * * *", 0)
    assert load(tmp_path).messages.schedule == "* * * * *"
    assert load(tmp_path).messages.look_ahead_ms == 3_600_000
    await app.aclose()


# ---- the façade ------------------------------------------------------------------------------------------------------


async def test_a_webhook_gets_the_key_and_its_answer_is_kept(tmp_path: Path) -> None:
    settings = load(tmp_path, BULLPEN_MESSAGES_TRANSPORT="memory")
    app = Bullpen(settings=settings)
    async with HttpReceiver() as receiver:
        hook = Webhook(receiver.url, body="payload", allow_http=True, allowed_networks=["127.0.0.0/8"])
        app.use_messages().channel("hook", hook, after_crash="same_key")
        await app.prepare()
        set_clock(app.ledger, at("2026-03-14 08:00"))
        await app.use_messages().recipients.save(person(zone="UTC", channel="hook"))
        await app.use_messages().sender().start()
        set_clock(app.ledger, at("2026-03-14 08:59:59.5"))
        await app.use_messages().scheduler().run_once()
        (request,) = await receiver.until(1)
        (row,) = await until_status(app.use_messages(), 1)
        await app.aclose()

    assert request.headers["idempotency-key"] == row.id
    assert b'"to":"person-1@example.com"' in request.body


async def test_roles_let_two_machines_have_one_part_each(tmp_path: Path) -> None:
    app = Bullpen(settings=load(tmp_path, BULLPEN_MESSAGES_TRANSPORT="memory"))
    app.use_messages().roles = frozenset({"scheduler"})  # no channel is registered: a sender could not even be made

    async with running(app):
        async with asyncio.timeout(PATIENCE_S):
            while (await health_of(app.use_messages())).last_success is None:  # noqa: ASYNC110 - the tables come first
                await asyncio.sleep(0.02)


async def health_of(messages: Messages) -> Any:
    from bullpen.errors import LedgerNotReady

    class Nothing:
        last_success = None

    try:
        return await messages.health()
    except LedgerNotReady:
        return Nothing


async def test_what_is_said_wrong_is_refused_where_it_is_said(tmp_path: Path) -> None:
    app = Bullpen(settings=load(tmp_path, BULLPEN_MESSAGES_TRANSPORT="memory"))
    messages = app.use_messages()

    with pytest.raises(NotConfigured, match="no channel is registered"):
        messages.sender()
    with pytest.raises(InvalidOption, match="'same_key', 'resend', 'look_up' or 'park'"):
        messages.channel("email", Provider(), after_crash="pray")  # type: ignore[call-overload]
    with pytest.raises(InvalidOption, match="none, because the texts have their own"):
        messages.occasion("x", text={"": Any}, subject="y")  # type: ignore[dict-item]
    with pytest.raises(InvalidOption, match="channel: expected a name"):
        messages.channel("", Provider(), after_crash="park")
    with pytest.raises(InvalidOption, match="'scheduler' and 'sender'"):
        Messages(app.ledger, MemoryClient(), roles=("janitor",))
    _ = messages.messaging
    with pytest.raises(InvalidOption, match="registration before the first message is sent"):
        messages.occasion("late", text="x")
    assert messages.occasions.get("birthday").rule.repeats == "yearly"
    await app.aclose()


class Relay:
    """A way to a broker that can be cut: connections break, and nobody answers new ones."""

    def __init__(self, port: int) -> None:
        self._to, self.port = port, free_port()
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        further, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers |= {writer, back}
        self._pumps |= {asyncio.create_task(self._pump(*ends)) for ends in ((reader, back), (further, writer))}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)


@pytest.mark.requirement("W-77", "S-17")
async def test_readiness_asks_the_broker_of_messages_and_not_a_redis_that_they_do_not_use(
    rabbit: RabbitServer, tmp_path: Path
) -> None:
    """The process said ready for minutes after its RabbitMQ had died, and 503 while an unneeded Redis was away."""
    relay = Relay(urlsplit(rabbit.url).port or 0)
    await relay.open()
    nowhere = f"redis://127.0.0.1:{free_port()}"
    settings = load(
        tmp_path,
        BULLPEN_MESSAGES_TRANSPORT="rabbitmq",
        RABBITMQ_URL=f"amqp://guest:guest@127.0.0.1:{relay.port}/",
        BULLPEN_REDIS_URL=nowhere,
        **own_names("ready"),
    )
    app = Bullpen(settings=settings)

    @app.use_messages().channel("email", after_crash="same_key")
    async def send(message: Message) -> str:
        return "taken"

    @app.handler("elsewhere")
    async def handle(job: Job) -> None: ...

    async def checks_when(*, ready: bool) -> dict[str, str | None]:
        async with asyncio.timeout(30):
            while True:
                report = await app.health.report()
                if report.ready is ready and "messages" in report.checks:
                    return report.checks
                await asyncio.sleep(0.05)

    task = asyncio.create_task(app.run(signals=False, only=["messages"]))
    well = await checks_when(ready=True)
    await relay.cut()
    ill = await checks_when(ready=False)
    live = (await app.health.report(vital_only=True)).live
    await relay.open()
    again = await checks_when(ready=True)
    await app.stop()
    await task
    await relay.cut()

    assert sorted(well) == sorted(again) == ["ledger", "messages", "scheduler"]
    assert [name for name, reason in ill.items() if reason] == ["messages"]
    assert "RabbitMQ does not answer" in str(ill["messages"])
    assert live


async def test_what_cannot_be_sent_is_told_when_it_starts_and_when_it_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at nine in the morning of the day: a channel that nobody registered, a name that nobody has."""
    app = Bullpen(settings=load(tmp_path, BULLPEN_MESSAGES_TRANSPORT="memory"))
    messages = app.use_messages()
    messages.occasion("trial", text="Dear {name|customer}, {plan} ends. You have {points|no} points.")
    messages.channel("email", Provider(), after_crash="same_key")
    await app.prepare()
    await messages.recipients.save(person("ada", occasions={"trial": "2020-05-05"}, attributes={"plan": "gold"}))
    assert await messages.lint() == []
    assert caplog.messages == []

    for name in ("bob", "cyd"):
        await messages.recipients.save(person(name, id=name, channel="pigeon", occasions={"trial": "2020-05-05"}))
    warned = (
        "the text of 'trial' needs {plan}, which recipient 'bob' lacks; write {plan|something}, or give the attribute"
    )
    assert [each for each in caplog.messages if "plan" in each] == [warned]
    caplog.clear()

    two = "2 recipients ('bob', 'cyd')"
    channel = f"{two} have the channel 'pigeon', which is not registered; there is email [unregistered-channel]"
    name = f"the text of 'trial' needs {{plan}}, which {two} lack; write {{plan|something}}, or give them the attribute"
    found = [channel, f"{name} [unknown-name]"]
    assert [str(each) for each in await messages.lint()] == found
    with telling() as told:
        async with running(app):
            await told.wait("messages.sender_started")
    assert [each.removeprefix("messages: ") for each in caplog.messages if each.startswith("messages: ")] == found

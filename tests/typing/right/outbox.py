"""Right programs: the outbox and its channels."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

from bullpen import Bullpen, Queue, RateLimit, Settings
from bullpen.channels import (
    Accepted,
    ChannelHealth,
    Email,
    EmailTemplate,
    KafkaChannel,
    Message,
    QueueChannel,
    Refused,
    SendResult,
    Slack,
    Sms,
    Unavailable,
    Webhook,
    WebhookArguments,
    WhenUnknown,
)
from bullpen.outbox import (
    Breaker,
    DispatcherOptions,
    EndpointRate,
    Enqueued,
    EventRoutes,
    IntegrationMessage,
    Ledger,
    Outbox,
    OutboxFields,
    OutboxItem,
    OutboxReceipt,
    OutboxStatus,
    Route,
    RouteArguments,
)
from bullpen.sources import EventMetadata, NewEvent, SourceEvent, SqlEvents

app = Bullpen(settings=Settings.load(ledger_url="sqlite:///shop.db"))


class Printer:
    """A channel of one's own."""

    when_unknown = WhenUnknown.RESEND

    async def send(self, message: Message) -> SendResult:
        if message.attempt > 3:
            return Refused("too often", "OFTEN")
        return Accepted(message.id) if message.payload else Unavailable("later", "LATER")

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None: ...


async def a_message(outbox: Outbox, session: object) -> str | None:
    stored = await outbox.enqueue(session, integration_type="webhook:x", event_type="order.paid.v1", payload={"n": 1})
    assert_type(stored, Enqueued)
    return stored.id if stored.created else None


async def a_message_with_everything(outbox: Outbox, session: object) -> None:
    await outbox.enqueue(
        session,
        integration_type="webhook:x",
        event_type="order.paid.v1",
        source_stream_id="order-1",
        source_event_id="1",
        tenant_id="acme",
        user_id="u-1",
        correlation_id="c-1",
        ordering_key="order-1",
        headers={"a": 1},
        delay=timedelta(seconds=5),
        max_attempts=3,
        backoff=500,
        idempotency_key="k",
        route_key="r",
        due_at=datetime.now(UTC),
    )


async def fields_of_ones_own(outbox: Outbox, session: object) -> None:
    fields: OutboxFields = {"tenant_id": "acme", "delay": 500}
    await outbox.enqueue(session, integration_type="webhook:x", event_type="a", **fields)


async def many_messages(outbox: Outbox, session: object) -> list[bool]:
    item = OutboxItem(integration_type="kafka:a", event_type="b", source_stream_id="s", source_event_id="1")
    return [stored.created for stored in await outbox.enqueue_many(session, [item])]


def a_blocking_message(outbox: Outbox, connection: object) -> Enqueued:
    return outbox.enqueue_sync(connection, integration_type="webhook:x", event_type="a", tenant_id="acme")


async def a_job_in_a_transaction(outbox: Outbox, session: object, queue: Queue) -> None:
    await outbox.add_in_transaction(session, "mails", "welcome", {"to": "ada"}, attempts=5, tenant_id="acme")
    await outbox.add_in_transaction(session, queue, "welcome", job_id="a", replace_finished=True, durability="fsync")


def routes() -> None:
    outbox = app.use_outbox()
    outbox.route("print:*", Printer())
    outbox.route("webhook:x", app.channels.webhook("https://x.example", secret="whsec_AAAA"), concurrency=5)
    outbox.route("kafka:*", app.channels.kafka(key="stream", username="u", password="p"), strategy="direct")
    outbox.route("slack:*", Route(channel=app.channels.slack("https://slack.example"), breaker=Breaker(failures=3)))
    outbox.route("sms:*", app.channels.sms(templates={"a": "b"}), rate_limit=RateLimit(1, 1_000), split_tenants=True)


def options_of_ones_own(outbox: Outbox) -> None:
    options: RouteArguments = {"concurrency": 5, "timeout_ms": None, "breaker": None}
    outbox.route("print:*", Printer(), **options)


def mails() -> Email:
    receipt = EmailTemplate(to="$to", subject="$subject", text="$text")
    return app.channels.email(templates={"order.paid.v1": receipt}, timeout_ms=500)


def channels_by_hand() -> list[object]:
    return [
        Webhook("https://x.example", secret=["whsec_AAAA", "whsec_BBBB"], body="payload"),
        KafkaChannel("localhost:9092", topic="orders", key="tenant", sasl_mechanism="PLAIN"),
        Slack("https://slack.example", when_unknown="park"),
        Sms("https://sms.example", account="a", token="t", sender="s", allow_http=True),
        Email("localhost", sender="a@example.com", security="none"),
        QueueChannel(app.connection),
    ]


def arguments_of_a_channel(url: str, tests: bool) -> Webhook:
    options: WebhookArguments = {"timeout_ms": 500}
    if tests:
        options["allowed_networks"] = ["127.0.0.0/8"]
    return app.channels.webhook(url, **options)


async def what_became_of_it(outbox: Outbox, id: str) -> OutboxStatus | None:
    found = await outbox.receipt(id, tenant_id="acme")
    assert_type(found, OutboxReceipt | None)
    return None if found is None else found.status


async def an_outbox_by_hand() -> None:
    ledger = Ledger("sqlite:///shop.db")
    outbox = Outbox(ledger, {"print:*": Printer()}, options=DispatcherOptions())
    async with outbox.dispatcher() as dispatcher:
        assert dispatcher is not None
    workers = outbox.workers(discover_ms=500, worker_options={"lock": 1_000})
    await workers.close()
    await outbox.replay("webhook:x", by="ada", label="again", since=datetime.now(UTC), limit=10)


def to_webhook(event: SourceEvent) -> IntegrationMessage | Mapping[str, Any] | None:
    return {"id": event.id}


async def events(ledger: Ledger) -> None:
    source = SqlEvents(ledger, prefixes=["order."])
    event = NewEvent(type="order.paid.v1", data={"n": 1}, metadata=EventMetadata(correlation_id="c", source="shop"))
    async with ledger.database.transaction() as connection:
        await ledger.events.append(connection, "order-1", [event])
    assert await source.check()


def projected(routes: EventRoutes) -> None:
    app.projector(routes, name="orders")


async def endpoints_of_customers(outbox: Outbox, session: object) -> str:
    made = await app.endpoints.create(
        "acme", "https://x.example", by="ada", events=["order.*"], rate=EndpointRate(5), headers={"x-a": "b"}
    )
    await app.endpoints.update("acme", made.endpoint.id, by="ada", rate=None)
    stored = await outbox.publish(session, tenant_id="acme", event_type="order.paid.v1", payload={}, event_id="e")
    blocking = outbox.publish_sync(session, tenant_id="acme", event_type="order.paid.v1", max_attempts=3)
    return made.secret if stored or blocking else made.endpoint.state.value

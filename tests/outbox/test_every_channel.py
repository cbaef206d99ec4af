"""One transaction, six messages, six targets: everything arrives with its ids, and nobody reads along in the logs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bullpen import Job
from bullpen._kernel.log_formats import TELLS_PAYLOADS
from bullpen.app import Bullpen
from bullpen.ledger import OutboxStatus
from bullpen.outbox import Outbox
from bullpen.plugins._kafka import Brokers, KafkaDoor, KafkaRecord
from bullpen.ports.channel import ChannelHealth, Message, SendResult
from bullpen.settings import Settings
from bullpen.testing.kafka import PRODUCE, MockKafka, need_kafka
from bullpen.testing.receivers import Answer, HttpReceiver, SmtpReceiver
from tests.outbox.kit import rows, until_settled

LOCAL: dict[str, Any] = {"allow_http": True, "allowed_networks": ["127.0.0.0/8"]}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MESSAGE_TOO_LARGE = 10

PLANTED = {
    "a name in a payload": "Ada-Lovelace-1815",
    "a mail address": "ada.lovelace@example.com",
    "a number": "+4930123456",
    "a webhook secret": "TWZLUTlyOEdLWXFyVHdqVVBEOElMUFpJbzJMYUxhU3c=",
    "a token": "token-of-sms-4f3c",
    "a password": "password-of-smtp-9d2e",
    "a path that is a secret": "T000/B000/slack-secret-77",
    "a credential that a target repeats": "Bearer abcdefghijklmnop",
}


def log_everything(caplog: pytest.LogCaptureFixture) -> None:
    """As `bullpen run --log-level debug` does: libraries that write payloads at that level are left out."""
    caplog.set_level(logging.DEBUG)
    for name in TELLS_PAYLOADS:
        caplog.set_level(logging.INFO, logger=name)


@dataclass
class Town:
    """An app and all its targets."""

    app: Bullpen
    web: HttpReceiver
    smtp: SmtpReceiver
    kafka: MockKafka
    jobs: list[Job]

    async def store(self, outbox: Outbox, **changes: Any) -> None:
        """Six messages in one transaction."""
        name, mail, number = PLANTED["a name in a payload"], PLANTED["a mail address"], PLANTED["a number"]
        payloads: dict[str, Any] = {
            "webhook:partnerX": {"orderId": 1, "name": name},
            "kafka:payments": {"paymentId": 1, "name": name},
            "email:receipts": {"to": mail, "subject": "Receipt", "text": f"Dear {name}"},
            "sms:codes": {"to": number, "text": f"{name}: 1234"},
            "slack:alerts": {"text": f"{name} paid"},
        }
        ids: dict[str, Any] = {"tenant_id": "acme", "user_id": "u-7", "correlation_id": "c-42", **changes}
        engine = create_async_engine(self.app.ledger.database.url)
        async with AsyncSession(engine) as session, session.begin():
            for integration_type, payload in payloads.items():
                await outbox.enqueue(
                    session,
                    integration_type=integration_type,
                    event_type="order.paid.v1",
                    payload=payload,
                    headers={"traceparent": TRACE},
                    **ids,
                )
            await outbox.add_in_transaction(session, "receipts", "print", {"name": name, **ids}, **ids)
        await engine.dispose()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.app.run(signals=False))
        yield
        await self.app.stop()
        await task


@pytest.fixture
def cluster() -> Iterator[MockKafka]:
    need_kafka()
    with MockKafka.start(1) as cluster:
        cluster.create_topic("payments", partitions=2)
        yield cluster


@pytest.fixture(params=["embedded", "postgresql"])
async def town(request: pytest.FixtureRequest, tmp_path: Path, cluster: MockKafka) -> AsyncIterator[Town]:
    login = ("shop", PLANTED["a password"])
    async with HttpReceiver(Answer(body=b'{"sid": "SM1"}')) as web, SmtpReceiver(login=login) as smtp:
        environ = {
            "BULLPEN_DATA_DIR": str(tmp_path),
            "KAFKA_BROKERS": cluster.address,
            "BULLPEN_SMTP_URL": f"smtp+plain://{login[0]}:{login[1]}@127.0.0.1:{smtp.port}",
            "BULLPEN_SMTP_SENDER": "shop@example.com",
            "BULLPEN_SMS_URL": f"{web.url}/sms",
            "BULLPEN_SMS_ACCOUNT": "AC1",
            "BULLPEN_SMS_TOKEN": PLANTED["a token"],
            "BULLPEN_SMS_SENDER": "Shop",
        }
        if request.param == "postgresql":
            environ["BULLPEN_DATABASE_URL"] = request.getfixturevalue("postgres_url")
            environ["BULLPEN_REDIS_URL"] = request.getfixturevalue("redis_url")
        app = Bullpen(settings=Settings.load(environ=environ, start=tmp_path))
        town = Town(app, web, smtp, cluster, [])

        @app.handler("receipts")
        async def print_receipt(job: Job) -> None:
            town.jobs.append(job)

        secret = f"whsec_{PLANTED['a webhook secret']}"
        slack = web.url.replace("/hook", f"/services/{PLANTED['a path that is a secret']}")
        app.use_outbox().route("webhook:partnerX", app.channels.webhook(web.url, secret=secret, **LOCAL))
        app.use_outbox().route("kafka:*", app.channels.kafka())
        app.use_outbox().route("email:*", app.channels.email())
        app.use_outbox().route("sms:*", app.channels.sms(**LOCAL))
        app.use_outbox().route("slack:*", app.channels.slack(slack, **LOCAL))
        await app.prepare()
        yield town
        await app.aclose()


async def records(cluster: MockKafka) -> list[KafkaRecord]:
    door = KafkaDoor(Brokers.parse(cluster.address))
    try:
        return [record async for record in door.read_all("payments")]
    finally:
        await door.aclose()


def assert_nothing_planted(*texts: str) -> None:
    for what, planted in PLANTED.items():
        found = [text[max(0, text.index(planted) - 200) :][:400] for text in texts if planted in text]
        assert not found, f"{what} is in {found[0]!r}"


@pytest.mark.requirement("O-1", "O-3", "O-54", "O-56", "O-57", "O-71", "O-83", "O-85", "O-70")
async def test_everything_arrives_with_its_ids_and_nothing_is_in_the_logs(
    town: Town, caplog: pytest.LogCaptureFixture
) -> None:
    log_everything(caplog)

    async with town.running():
        await town.store(town.app.use_outbox())
        stored = await until_settled(town.app.ledger, 6)
        async with asyncio.timeout(20):
            while not town.jobs:  # noqa: ASYNC110 - the handler tells nobody
                await asyncio.sleep(0.02)
        metrics = str(await town.app.metrics())
        receipts = {row.integration_type: await town.app.use_outbox().receipt(row.id) for row in stored}

    hook, sms, slack = (
        next(request for request in town.web.requests if part in request.path)
        for part in ("/hook", "/sms", "/services")
    )
    (record,), (mail,) = await records(town.kafka), town.smtp.mails
    record_headers = {name: value.decode() for name, value in record.headers}
    keys = {row.integration_type: row.idempotency_key for row in stored}
    assert (hook.headers["x-tenant-id"], hook.headers["x-user-id"], hook.headers["x-correlation-id"]) == (
        "acme",
        "u-7",
        "c-42",
    )
    assert hook.headers["traceparent"] == record_headers["traceparent"] == TRACE
    assert (record_headers["tenantId"], record_headers["correlationId"], record_headers["userId"]) == (
        "acme",
        "c-42",
        "u-7",
    )
    assert (mail.message["X-Tenant-ID"], mail.message["X-Correlation-ID"]) == ("acme", "c-42")
    assert town.jobs[0].data["correlation_id"] == "c-42"
    assert hook.headers["idempotency-key"] == keys["webhook:partnerX"]
    assert record_headers["idempotencyKey"] == keys["kafka:payments"]
    assert sms.headers["idempotency-key"] == keys["sms:codes"]
    assert slack.headers["idempotency-key"] == keys["slack:alerts"]
    assert json.loads(record.value or b"")["paymentId"] == 1
    told = {name: receipt.receipt for name, receipt in receipts.items() if receipt is not None}
    assert told["sms:codes"] == "SM1"
    assert str(told["kafka:payments"]).startswith("payments/")
    lines = [record for record in caplog.records if getattr(record, "operation", "") == "OUTBOX_DELIVER"]
    assert len(lines) >= 5
    assert all(getattr(line, "correlationId", None) == "c-42" for line in lines)
    assert_nothing_planted(caplog.text, "".join(str(vars(line)) for line in caplog.records), metrics)


class Broken:
    """A channel with a bug, whose error shows everything it has."""

    async def send(self, message: Message) -> SendResult:
        raise RuntimeError(
            f"cannot send to {PLANTED['a mail address']} with {PLANTED['a credential that a target repeats']}"
        )

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None: ...


@pytest.mark.requirement("O-70", "W-74", "X-8")
async def test_failures_are_told_without_secrets_and_people(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    """Targets repeat in their errors what they were sent, and bugs show it."""
    log_everything(caplog)
    mail, number, token = (
        PLANTED[name] for name in ("a mail address", "a number", "a credential that a target repeats")
    )
    town.web.default = Answer(400, body=json.dumps({"code": 1, "message": f"{mail} {number} {token}"}).encode())
    town.smtp.to_recipient.append(f"550 <{mail}> is unknown to {token}")
    town.kafka.fail_next(PRODUCE, MESSAGE_TOO_LARGE)
    town.app.use_outbox().route("broken:x", Broken())

    async with town.running():
        await town.store(town.app.use_outbox())
        engine = create_async_engine(town.app.ledger.database.url)
        async with AsyncSession(engine) as session, session.begin():
            await town.app.use_outbox().enqueue(
                session, integration_type="broken:x", event_type="e", payload={"name": PLANTED["a name in a payload"]}
            )
        await engine.dispose()
        await until_settled(town.app.ledger, 5, OutboxStatus.DEAD)
        await until_settled(town.app.ledger, 1, OutboxStatus.FAILED)
        await until_settled(town.app.ledger, 6)  # the job, and the announcements of the five dead

    errors = [
        str(row.last_error)
        for status in (OutboxStatus.DEAD, OutboxStatus.FAILED)
        for row in await rows(town.app.ledger, status=status)
    ]
    announced = [str(row.payload) for row in await rows(town.app.ledger, integration_type="bullmq:outbox.dead")]
    attempts = [
        str(attempt)
        for row in await rows(town.app.ledger)
        for attempt in await town.app.ledger.outbox.attempts_of(row.id)
    ]
    assert len(errors) == 6
    assert len(announced) == 5
    assert_nothing_planted(caplog.text, *errors, *announced, *attempts)

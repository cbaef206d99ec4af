"""Every channel passes the suite of all channels, each against a real server of its kind."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

import pytest

from bullpen.plugins._kafka import Brokers, KafkaDoor
from bullpen.plugins.channels.email import Email
from bullpen.plugins.channels.kafka import KafkaChannel
from bullpen.plugins.channels.queue import QueueChannel
from bullpen.plugins.channels.slack import Slack
from bullpen.plugins.channels.sms import Sms
from bullpen.plugins.channels.webhook import Webhook
from bullpen.ports.channel import Message, SendResult
from bullpen.queue import JobState, Queue
from bullpen.redis import Connection
from bullpen.testing import RedisServer
from bullpen.testing.contracts.channel import Arrived, ChannelContract, ChannelTarget
from bullpen.testing.kafka import PRODUCE, MockKafka, need_kafka
from bullpen.testing.receivers import Answer, HttpReceiver, SmtpReceiver
from tests.conftest import StartServer

LOCAL: dict[str, Any] = {"allow_http": True, "allowed_networks": ["127.0.0.0/8"], "timeout_ms": 20_000}
MESSAGE_TOO_LARGE, NO_RIGHTS = 10, 29


class HttpTarget(ChannelTarget):
    """A target that speaks HTTP; what it is called differs."""

    def __init__(self, receiver: HttpReceiver, taken: Answer) -> None:
        self.receiver, self.taken = receiver, taken
        receiver.default = taken

    async def arrived(self) -> list[Arrived]:
        return [
            Arrived(
                request.headers["idempotency-key"],
                "\n".join([*(f"{name}: {value}" for name, value in request.headers.items()), request.body.decode()]),
            )
            for request in self.receiver.requests
        ]

    def refuse_next(self) -> None:
        self.receiver.answers.append(Answer(400, body=b"no_text"))

    def put_off_next(self) -> None:
        self.receiver.answers.append(Answer(429, headers={"retry-after": "7"}))

    def go_silent(self) -> None:
        self.receiver.default = Answer(delay_s=float("inf"))

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        await self.receiver.__aexit__(None, None, None)
        yield
        await self.receiver.__aenter__()


class WebhookTarget(HttpTarget):
    integration_type = "webhook:partnerX"
    payload: ClassVar[Any] = {"orderId": 1}
    secrets = ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "orderId", "/hook")

    def hopeless(self) -> Message:
        self.channel = Webhook("https://127.0.0.1/hook")
        return self.message()


class TestWebhook(ChannelContract):
    @pytest.fixture
    async def target(self) -> AsyncIterator[ChannelTarget]:
        async with HttpReceiver() as receiver:
            target = WebhookTarget(receiver, Answer())
            target.channel = opened = Webhook(receiver.url, secret=target.secrets[0], **LOCAL)
            yield target
            await opened.aclose()
            await target.channel.aclose()


class SlackTarget(HttpTarget):
    integration_type = "slack:alerts"
    payload: ClassVar[Any] = {"text": "order 1 was paid by Ada"}
    carries_ids = False
    secrets = ("T000/B000/secret-of-slack", "was paid by Ada")

    def hopeless(self) -> Message:
        return self.message(payload={"orderId": 1})


class TestSlack(ChannelContract):
    @pytest.fixture
    async def target(self) -> AsyncIterator[ChannelTarget]:
        async with HttpReceiver() as receiver:
            target = SlackTarget(receiver, Answer(body=b"ok"))
            target.channel = Slack(receiver.url.replace("/hook", "/services/T000/B000/secret-of-slack"), **LOCAL)
            yield target
            await target.channel.aclose()


class SmsTarget(HttpTarget):
    integration_type = "sms:alerts"
    payload: ClassVar[Any] = {"to": "+4930123456", "text": "your code is 1234"}
    carries_ids = False
    secrets = ("token-of-sms", "QUMxOnRva2VuLW9mLXNtcw", "+4930123456", "%2B4930123456", "code is 1234")

    def refuse_next(self) -> None:
        body = b'{"code": 21211, "message": "+4930123456 is not a phone number"}'
        self.receiver.answers.append(Answer(400, body=body))

    def hopeless(self) -> Message:
        return self.message(payload={"to": "030 123456", "text": "x"})


class TestSms(ChannelContract):
    @pytest.fixture
    async def target(self) -> AsyncIterator[ChannelTarget]:
        async with HttpReceiver() as receiver:
            target = SmsTarget(receiver, Answer(201, body=b'{"sid": "SM1", "status": "queued"}'))
            target.channel = Sms(receiver.url, account="AC1", token="token-of-sms", sender="+49301", **LOCAL)
            yield target
            await target.channel.aclose()


class EmailTarget(ChannelTarget):
    integration_type = "email:receipts"
    payload: ClassVar[Any] = {"to": "ada@example.com", "subject": "Receipt", "text": "Thank you, Ada."}
    secrets = ("password-of-smtp", "cGFzc3dvcmQtb2Ytc210cA", "Thank you, Ada", "ada@example.com")

    def __init__(self, receiver: SmtpReceiver) -> None:
        self.receiver = receiver
        self.channel = Email(
            "127.0.0.1", port=receiver.port, sender="Shop <shop@example.com>", security="none", username="shop",
            password="password-of-smtp", timeout_ms=3_000,
        )  # fmt: skip

    async def arrived(self) -> list[Arrived]:
        return [
            Arrived(mail.message["Message-ID"], "\n".join(f"{n}: {v}" for n, v in mail.message.items()))
            for mail in self.receiver.mails
        ]

    def refuse_next(self) -> None:
        self.receiver.to_recipient.append("550 no such user")

    def put_off_next(self) -> None:
        self.receiver.to_data.append("451 come back later")

    def go_silent(self) -> None:
        self.receiver.to_data.append(60.0)

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        await self.receiver.__aexit__(None, None, None)
        yield
        await self.receiver.__aenter__()

    def hopeless(self) -> Message:
        return self.message(payload={**self.payload, "to": "ada@example.com, eve@example.com"})


class TestEmail(ChannelContract):
    @pytest.fixture
    async def target(self) -> AsyncIterator[ChannelTarget]:
        async with SmtpReceiver(login=("shop", "password-of-smtp")) as receiver:
            yield EmailTarget(receiver)


class QueueTarget(ChannelTarget):
    integration_type = "bullmq:receipts"
    payload: ClassVar[Any] = {"orderId": 1}
    carries_ids = False  # a job has the fields of a job; ids travel in its data
    secrets = ("password-of-redis",)

    def __init__(self, server: RedisServer, connection: Connection) -> None:
        self.server, self.connection = server, connection
        self.channel = QueueChannel(connection, deadline_ms=500)

    async def arrived(self) -> list[Arrived]:
        async with Queue("receipts", connection=self.connection) as queue:
            return [
                Arrived(job.idempotency_key, f"{job.name!r} {job.data}") for job in await queue.jobs(JobState.WAITING)
            ]

    def refuse_next(self) -> None:
        self.integration_type = "bullmq:no:queue"

    def put_off_next(self) -> None:
        """No memory is left for one message."""
        self.server.client().config_set("maxmemory", "1")
        sending = self.channel.send

        async def send_one(message: Message) -> SendResult:
            result = await sending(message)
            self.server.client().config_set("maxmemory", "0")
            return result

        self.channel.send = send_one  # type: ignore[method-assign]  # the server is what is changed

    def go_silent(self) -> None:
        self.server.pause()

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        self.server.kill()
        yield
        self.server.restart()

    def hopeless(self) -> Message:
        return self.message(integration_type="bullmq:no:queue")


class TestQueue(ChannelContract):
    @pytest.fixture
    async def target(self, start_server: StartServer) -> AsyncIterator[ChannelTarget]:
        server = start_server(persistent=True)
        connection = Connection(server.url, command_timeout_ms=3_000)
        target = QueueTarget(server, connection)
        yield target
        await target.channel.aclose()
        await connection.aclose()


class KafkaTarget(ChannelTarget):
    integration_type = "kafka:payments"
    payload: ClassVar[Any] = {"paymentId": 1}
    secrets = ("paymentId",)

    def __init__(self, cluster: MockKafka) -> None:
        self.cluster = cluster
        self.channel = KafkaChannel(cluster.address, timeout_ms=3_000)

    async def arrived(self) -> list[Arrived]:
        door = KafkaDoor(Brokers.parse(self.cluster.address))
        try:
            return [
                Arrived((record.key or b"").decode(), "\n".join(f"{n}: {v.decode()!r}" for n, v in record.headers))
                async for record in door.read_all("payments")
            ]
        finally:
            await door.aclose()

    def refuse_next(self) -> None:
        self.cluster.fail_next(PRODUCE, MESSAGE_TOO_LARGE)

    def put_off_next(self) -> None:
        self.cluster.fail_next(PRODUCE, NO_RIGHTS)

    def go_silent(self) -> None:
        self.cluster.slow_down(60_000)

    @contextlib.asynccontextmanager
    async def away(self) -> AsyncIterator[None]:
        with self.cluster.down():
            yield

    def hopeless(self) -> Message:
        return self.message(integration_type="kafka:no topic")


class TestKafka(ChannelContract):
    @pytest.fixture
    def cluster(self) -> Iterator[MockKafka]:
        need_kafka()
        with MockKafka.start(1) as cluster:
            cluster.create_topic("payments", partitions=4)
            yield cluster

    @pytest.fixture
    async def target(self, cluster: MockKafka) -> AsyncIterator[ChannelTarget]:
        target = KafkaTarget(cluster)
        yield target
        cluster.slow_down(0)
        await target.channel.aclose()

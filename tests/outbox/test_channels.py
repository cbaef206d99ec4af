"""What each channel makes of a message, beyond what all channels promise."""

from __future__ import annotations

import json
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from email import policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.scrub import scrub
from bullpen._kernel.templates import Template, for_form, one_header
from bullpen.app import Bullpen
from bullpen.errors import InvalidOption, MissingValue, NotConfigured
from bullpen.ledger import OutboxStatus
from bullpen.plugins._http import AddressGuard, HttpClient, HttpFailed
from bullpen.plugins._kafka import Brokers, KafkaDoor, KafkaRecord
from bullpen.plugins.channels.email import Email, EmailTemplate
from bullpen.plugins.channels.email import _serialised as serialised
from bullpen.plugins.channels.kafka import KafkaChannel, headers_of
from bullpen.plugins.channels.slack import Slack
from bullpen.plugins.channels.sms import Sms
from bullpen.ports.channel import (
    Accepted,
    Message,
    Refused,
    Unavailable,
    Unknown,
    WhenUnknown,
)
from bullpen.settings import Settings
from bullpen.testing import need
from bullpen.testing.kafka import MockKafka, need_kafka
from bullpen.testing.receivers import Answer, HttpReceiver, SmtpReceiver
from tests.databases import item
from tests.outbox.kit import until_settled

LOCAL: dict[str, Any] = {"allow_http": True, "allowed_networks": ["127.0.0.0/8"]}


def message(payload: Any = None, **changes: Any) -> Message:
    fields: dict[str, Any] = {
        "id": "0f9d4f3e-0000-4000-8000-000000000001",
        "integration_type": "kafka:payments",
        "event_type": "payment.completed.v1",
        "payload": {"paymentId": 1} if payload is None else payload,
        "headers": {"idempotencyKey": "event-1", "traceparent": "00-ab-cd-01", "attempt": 3, "nothing": None},
        "idempotency_key": "event-1/kafka:payments",
        "source_stream_id": "payment-7",
        "source_event_id": "event-1",
        "tenant_id": "acme",
        "user_id": "u-7",
        "correlation_id": "c-1",
        "created_ms": 1_700_000_000_000,
    }
    return Message(**{**fields, **changes})


# Kafka ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kafka() -> Iterator[MockKafka]:
    need_kafka()
    with MockKafka.start(1) as cluster:
        for topic in ("payments", "other", "outbox.dead"):
            cluster.create_topic(topic, partitions=4)
        yield cluster


async def records(cluster: MockKafka, topic: str = "payments") -> list[KafkaRecord]:
    door = KafkaDoor(Brokers.parse(cluster.address))
    try:
        return [record async for record in door.read_all(topic)]
    finally:
        await door.aclose()


@pytest.mark.requirement("O-56", "O-57", "X-89", "X-94")
async def test_a_record_has_the_payload_the_event_as_key_and_all_ids(kafka: MockKafka) -> None:
    channel = KafkaChannel(kafka.address)

    result = await channel.send(message())
    await channel.aclose()

    (record,) = await records(kafka)
    assert result == Accepted(f"payments/{record.partition.number}@0")
    assert (record.key, json.loads(record.value or b"")) == (b"event-1", {"paymentId": 1})
    assert {name: value.decode() for name, value in record.headers} == {
        "traceparent": "00-ab-cd-01",
        "attempt": "3",
        "idempotencyKey": "event-1/kafka:payments",
        "eventType": "payment.completed.v1",
        "outboxId": "0f9d4f3e-0000-4000-8000-000000000001",
        "sourceStreamId": "payment-7",
        "sourceEventId": "event-1",
        "correlationId": "c-1",
        "tenantId": "acme",
        "userId": "u-7",
    }


@pytest.mark.requirement("X-94")
def test_what_is_absent_is_no_header() -> None:
    headers = headers_of(message(correlation_id=None, tenant_id=None, user_id=None))

    assert {"correlationId", "tenantId", "userId", "nothing"} & set(headers) == set()


@pytest.mark.requirement("X-89")
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("event", b"event-1"),
        ("stream", b"payment-7"),
        ("tenant", b"acme"),
        ("idempotency", b"event-1/kafka:payments"),
        ("none", None),
    ],
)
async def test_the_key_is_an_option(kafka: MockKafka, key: Any, expected: bytes | None) -> None:
    channel = KafkaChannel(kafka.address, key=key)

    await channel.send(message())
    await channel.aclose()

    (record,) = await records(kafka)
    assert record.key == expected
    assert ("idempotencyKey", b"event-1/kafka:payments") in record.headers


async def test_the_stream_as_key_keeps_an_aggregate_in_one_partition(kafka: MockKafka) -> None:
    channel = KafkaChannel(kafka.address, key="stream", topic="other")

    for number in range(10):
        await channel.send(message({"n": number}, source_event_id=f"event-{number}"))
    await channel.aclose()

    found = await records(kafka, "other")
    assert len({record.partition for record in found}) == 1
    assert [json.loads(record.value or b"")["n"] for record in found] == list(range(10))


@pytest.mark.parametrize("options", [{"key": "colour"}, {"topic": "no topic"}, {"timeout_ms": 0}])
def test_kafka_options_are_checked_at_the_door(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        KafkaChannel("localhost:9092", **options)


@pytest.mark.requirement("O-61", "O-63", "X-91")
async def test_the_death_of_a_row_is_announced_on_a_topic(kafka: MockKafka, tmp_path: Path) -> None:
    environ = {
        "BULLPEN_DATA_DIR": str(tmp_path),
        "KAFKA_BROKERS": kafka.address,
        "OUTBOX_DEADLETTER_TOPIC": "kafka:outbox.dead",
    }
    async with Bullpen(settings=Settings.load(environ=environ, start=tmp_path)) as app:
        app.use_outbox().route("kafka:*", app.channels.kafka(), strategy="direct")
        app.use_outbox().route("webhook:*", _Refusing(), strategy="direct")
        await app.prepare()
        await app.ledger.outbox.enqueue(item(tenant_id="acme"))
        dispatcher = app.use_outbox().dispatcher()
        await dispatcher.start()
        await until_settled(app.ledger, 1)
        (dead,) = await until_settled(app.ledger, 1, OutboxStatus.DEAD)
        await dispatcher.close()

    (record,) = await records(kafka, "outbox.dead")
    told = json.loads(record.value or b"")
    assert (told["outboxId"], told["errorCode"]) == (dead.id, "NO")
    assert ("tenantId", b"acme") in record.headers


class _Refusing:
    async def send(self, message: Message) -> Refused:
        return Refused("no", "NO")

    async def check(self) -> Any: ...

    async def aclose(self) -> None: ...


# Email ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def smtp() -> AsyncIterator[SmtpReceiver]:
    async with SmtpReceiver() as receiver:
        yield receiver


def email(receiver: SmtpReceiver, **options: Any) -> Email:
    return Email("127.0.0.1", port=receiver.port, sender="Shop <shop@example.com>", security="none", **options)


TEMPLATE = EmailTemplate(
    to="{customer.email}",
    subject="Order {order} for {customer.name}",
    text="Dear {customer.name}, that is $5.",
    html="<p>Dear <b>{customer.name}</b></p>",
)


@pytest.mark.requirement("O-57", "O-54")
async def test_a_mail_is_written_from_a_template(smtp: SmtpReceiver) -> None:
    channel = email(smtp, templates={"payment.completed.v1": TEMPLATE})

    result = await channel.send(message({"order": 7, "customer": {"name": "Ada <b>", "email": "ada@example.com"}}))

    (mail,) = smtp.mails
    written = mail.message
    assert isinstance(result, Accepted)
    assert written["Message-ID"] == f"<{result.detail.partition(' ')[0]}@example.com>"
    assert result.detail.endswith("250 taken as 4711")
    assert (mail.sender, mail.recipient) == ("shop@example.com", "ada@example.com")
    assert (written["Subject"], written["From"]) == ("Order 7 for Ada <b>", "Shop <shop@example.com>")
    assert written["X-Idempotency-Key"] == "event-1/kafka:payments"
    assert (written["X-Tenant-ID"], written["X-Correlation-ID"]) == ("acme", "c-1")
    text, html = (part.get_content().strip() for part in written.iter_parts())
    assert text == "Dear Ada <b>, that is $5."
    assert html == "<p>Dear <b>Ada &lt;b&gt;</b></p>"


@pytest.mark.requirement("O-57", "X-16")
async def test_the_same_message_is_the_same_mail_byte_for_byte(smtp: SmtpReceiver) -> None:
    payload = {"to": "ada@example.com", "subject": "Hi", "text": "x"}
    channel = email(smtp)

    for attempt in (1, 2):
        await channel.send(message(payload, attempt=attempt))
    await channel.send(message(payload, idempotency_key="another"))

    first, second, third = smtp.mails
    assert first.content == second.content
    assert first.message["Message-ID"] != third.message["Message-ID"]
    assert first.message["Message-ID"].endswith("@example.com>")


@given(st.text(max_size=60))
def test_no_value_can_become_a_header(text: str) -> None:
    """Whatever a customer calls himself, a mail has the headers that we wrote."""
    channel = Email("localhost", sender="shop@example.com", templates={"payment.completed.v1": TEMPLATE})
    payload = {"order": text, "customer": {"name": text, "email": "ada@example.com"}}

    _, mail = channel._write(message(payload, correlation_id=text, tenant_id=text, idempotency_key=text or "k"))

    head = mail.as_bytes().partition(b"\r\n\r\n")[0].decode("ascii")
    names = {line.partition(":")[0] for line in head.split("\r\n") if not line.startswith((" ", "\t"))}
    assert names <= {
        *("From", "To", "Subject", "Date", "Message-ID", "MIME-Version", "Content-Type"),
        *("X-Idempotency-Key", "X-Event-Type", "X-Correlation-ID", "X-Tenant-ID"),
    }


INJECTIONS = [
    "=?utf-8?q?Ann=0d=0aReply-To:_eve@example.com?=",
    "=?UTF-8?Q?Ann=0D=0A=0D=0A<h1>pay_here</h1>?=",
    "=?utf-8?b?QW5uDQpCY2M6IGV2ZUBleGFtcGxlLmNvbQ==?=",
    "=?utf-8?q?Ann?= =?utf-8?q?=0d=0aBcc:_eve@example.com?=",
    "=?us-ascii*en?q?Ann=0aBcc:_eve@example.com?=",
    "==?utf-8?q?=0d=0aBcc:_eve@example.com?=?=",
    "=\x00?utf-8?q?=0d=0aBcc:_eve@example.com?=",
    "é =?utf-8?q?=0d=0aBcc:_eve@example.com?=",
    "x" * 70 + "=?utf-8?q?=0d=0aBcc:_eve@example.com?=",
]


@pytest.mark.parametrize("text", INJECTIONS)
@pytest.mark.parametrize("has_template", [True, False])
async def test_an_encoded_word_becomes_no_header_and_no_body(smtp: SmtpReceiver, text: str, has_template: bool) -> None:
    """Some versions of Python decode it while the mail is written, line breaks included."""
    channel = email(smtp, templates={"payment.completed.v1": TEMPLATE} if has_template else {})
    filled = {"order": text, "customer": {"name": text, "email": "ada@example.com"}}
    plain = {"to": "ada@example.com", "subject": f"Order {text}", "text": "x"}
    ids = {"correlation_id": text, "tenant_id": text, "idempotency_key": text}

    assert isinstance(await channel.send(message(filled if has_template else plain, **ids)), Accepted)

    (mail,) = smtp.mails
    names = mail.message.keys()
    assert sorted({*names, "Content-Transfer-Encoding"}) == sorted(
        [
            *("From", "To", "Subject", "Date", "Message-ID", "MIME-Version", "Content-Type"),
            *("X-Idempotency-Key", "X-Event-Type", "X-Correlation-ID", "X-Tenant-ID", "Content-Transfer-Encoding"),
        ]
    )
    assert len(names) == len(set(names))
    assert b"pay_here</h1>" not in mail.content.partition(b"\r\n\r\n")[2][:30]


@pytest.mark.parametrize("end", ["\r\n.\r\n", "\n.\n", "\n.\r\n", "\r.\r", "\r\n.\r", "\n\r\n.\r\n"], ids=repr)
async def test_a_text_cannot_end_its_mail_and_begin_another(smtp: SmtpReceiver, end: str) -> None:
    """Servers differ in what they take for the end of a mail: none of their forms may be in what we send."""
    text = f"Dear Ann{end}MAIL FROM:<eve@example.com>\r\nRCPT TO:<bob@example.com>\r\nDATA\r\nSubject: pay{end}QUIT\r\n"

    assert isinstance(await email(smtp).send(message({"to": "a@b.example", "subject": "x", "text": text})), Accepted)

    (mail,) = smtp.mails
    assert mail.recipient == "a@b.example"
    assert re.search(rb"(?<!\r)\n|\r(?!\n)", mail.content) is None
    assert b"Subject: pay" in mail.content


def test_a_mail_with_headers_that_nobody_set_does_not_leave() -> None:
    """The last border: what a library of some version makes of a value is not known before it is written."""
    mail = EmailMessage(policy=policy.SMTP)
    mail["Subject"] = INJECTIONS[0]
    mail.set_content("x")

    if b"\r\nReply-To" in mail.as_bytes():
        with pytest.raises(ValueError, match="header of the mail"):
            serialised(mail)
    else:  # a version of Python that encodes it again
        assert serialised(mail) == mail.as_bytes()


@pytest.mark.parametrize(
    "to",
    [
        "=?utf-8?q?a=0d=0aBcc=3aeve?=@example.com",
        *("ada@example.com\r\nBcc: eve@example.com", "ada@example.com, eve@example.com", "ada", "", "@", 7, None),
        *("ada@example.com>\r\nDATA", "<ada@example.com>", "ada@exa mple.com", "ädä@example.com"),
    ],
)
async def test_a_recipient_is_one_plain_address(smtp: SmtpReceiver, to: Any) -> None:
    result = await email(smtp).send(message({"to": to, "subject": "Hi", "text": "x"}))

    assert isinstance(result, Refused)
    assert result.code == "BAD_PAYLOAD"
    assert str(to) not in result.reason or not to
    assert smtp.mails == []


@pytest.mark.parametrize("payload", [{"to": "ada@example.com"}, "text", [1]])
async def test_a_mail_needs_its_parts(smtp: SmtpReceiver, payload: Any) -> None:
    assert isinstance(await email(smtp).send(message(payload)), Refused)


@pytest.mark.requirement("O-52", "O-70")
@pytest.mark.parametrize(
    ("recipient", "data", "expected", "code"),
    [
        ("550 <ada@example.com> unknown", None, Refused, "SMTP_550"),
        ("450 greylisted", None, Unavailable, "SMTP_450"),
        (None, "554 spam", Refused, "SMTP_554"),
        (None, "452 disk full", Unavailable, "SMTP_452"),
    ],
)
async def test_answers_of_the_server_are_read_by_their_class(
    smtp: SmtpReceiver, recipient: str | None, data: str | None, expected: type, code: str
) -> None:
    smtp.to_recipient.extend([recipient] if recipient else [])
    smtp.to_data.extend([data] if data else [])

    result = await email(smtp).send(message({"to": "ada@example.com", "subject": "Hi", "text": "x"}))

    assert isinstance(result, expected)
    assert isinstance(result, Refused | Unavailable)
    assert result.code == code
    assert "ada@example.com" not in scrub(result.reason)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("smtp-tls")
    subprocess.run(
        [
            *(need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", directory / "key.pem", "-out", directory / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return directory


@pytest.mark.requirement("O-64")
@pytest.mark.parametrize(
    ("password", "is_trusted", "expected"),
    [("right", True, Accepted), ("wrong", True, Unavailable), ("right", False, Unavailable)],
)
async def test_a_password_travels_only_after_starttls_to_a_server_that_is_known(
    certificate: Path, password: str, is_trusted: bool, expected: type
) -> None:
    """A wrong password is ours to mend: it must not cost every message its life."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem") if is_trusted else None)
    async with SmtpReceiver(tls=context, login=("shop", "right")) as receiver:
        channel = Email(
            "localhost", port=receiver.port, sender="shop@example.com", username="shop", password=password, tls=trusting
        )

        result = await channel.send(message({"to": "ada@example.com", "subject": "Hi", "text": "x"}))
        health = await channel.check()

    assert isinstance(result, expected)
    assert health.ok == (expected is Accepted)
    assert len(receiver.mails) == (expected is Accepted)


async def test_a_server_that_cannot_encrypt_gets_nothing(smtp: SmtpReceiver) -> None:
    channel = Email("127.0.0.1", port=smtp.port, sender="shop@example.com", username="shop", password="secret")

    result = await channel.send(message({"to": "ada@example.com", "subject": "Hi", "text": "x"}))

    assert isinstance(result, Unavailable)
    assert smtp.mails == []


@pytest.mark.parametrize(
    "options",
    [
        {"sender": "nobody"},
        {"sender": "a@b.c\r\nBcc: x@y.z"},
        {"security": "maybe"},
        {"username": "ada"},
        {"timeout_ms": 0},
    ],
)
def test_email_options_are_checked_at_the_door(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options))):
        Email("localhost", **{"sender": "shop@example.com", **options})


# SMS and Slack -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def receiver() -> AsyncIterator[HttpReceiver]:
    async with HttpReceiver(Answer(201, body=b'{"sid": "SM42", "status": "queued"}')) as receiver:
        yield receiver


def sms(receiver: HttpReceiver, **options: Any) -> Sms:
    return Sms(receiver.url, account="AC1", token="secret", sender="+49301", **LOCAL, **options)


@pytest.mark.parametrize("key", ["a\r\nX-Evil: 1", "a\x00b", " a ", "a\x7fb", "\ud800", "é"])
async def test_whatever_the_key_is_an_sms_and_a_post_leave(receiver: HttpReceiver, key: str) -> None:
    """A key that no header can carry failed before anything left, and was taken for a message that nobody knows of: an
    SMS was parked for ever."""
    slack = Slack(receiver.url, **LOCAL)
    channel = sms(receiver)
    results = [
        await channel.send(message({"to": "+4930123456", "text": "x"}, idempotency_key=key)),
        await slack.send(message({"text": "x"}, idempotency_key=key)),
    ]
    await channel.aclose()
    await slack.aclose()

    assert [type(result) for result in results] == [Accepted, Accepted]
    sent = {request.headers["idempotency-key"] for request in receiver.requests}
    assert len(sent) == 1 and "x-evil" not in receiver.requests[0].headers


async def test_what_cannot_be_written_was_not_sent(receiver: HttpReceiver) -> None:
    """So it may be tried again: nobody has it."""
    client = HttpClient(AddressGuard.allowing(LOCAL["allowed_networks"]))
    with pytest.raises(HttpFailed) as failed:
        await client.post(receiver.url, headers={"x": "a\nb"}, content=b"", timeout_ms=5_000)
    await client.aclose()

    assert not failed.value.was_sent
    assert receiver.requests == []


@pytest.mark.requirement("O-54", "O-57")
async def test_an_sms_is_a_form_and_its_receipt_the_providers_id(receiver: HttpReceiver) -> None:
    channel = sms(receiver, templates={"payment.completed.v1": "Paid: {amount} €"})

    result = await channel.send(message({"to": "+4930123456", "amount": 5}))
    await channel.aclose()

    (request,) = receiver.requests
    assert result == Accepted("SM42")
    assert parse_qs(request.body.decode()) == {"To": ["+4930123456"], "From": ["+49301"], "Body": ["Paid: 5 €"]}
    assert request.headers["authorization"] == "Basic QUMxOnNlY3JldA=="
    assert request.headers["idempotency-key"] == "event-1/kafka:payments"


@pytest.mark.parametrize(
    "payload",
    [
        {"to": "030123456", "text": "x"},
        {"to": "+4930123456\r\n", "text": "x"},
        {"to": "+4930123456"},
        {"to": "+4930123456", "text": "  "},
        {"to": "+4930123456", "text": "x" * 1_601},
        "text",
    ],
)
async def test_what_is_no_sms_is_refused(receiver: HttpReceiver, payload: Any) -> None:
    channel = sms(receiver)

    result = await channel.send(message(payload))
    await channel.aclose()

    assert isinstance(result, Refused)
    assert receiver.requests == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            Answer(400, body=b'{"code": 21211, "message": "+4930123456 is bad"}'),
            Refused("the target answered 400: code 21211", "HTTP_400"),
        ),
        (Answer(401), Unavailable("the provider answered 401; check account and token", "SMS_LOGIN")),
        (Answer(429, headers={"retry-after": "3"}), Unavailable("the target answered 429", "HTTP_429", 3_000)),
        (Answer(503, body=b"<html>"), Unavailable("the target answered 503", "HTTP_503")),
        (Answer(200, body=b"[1]"), Accepted("200")),
        (
            Answer(drop=True),
            Unknown("RemoteProtocolError: Server disconnected without sending a response.", "NO_ANSWER"),
        ),
    ],
)
async def test_answers_of_the_provider(receiver: HttpReceiver, answer: Answer, expected: Any) -> None:
    receiver.default = answer
    channel = sms(receiver)

    result = await channel.send(message({"to": "+4930123456", "text": "hello"}))
    await channel.aclose()

    assert result == expected


async def test_an_unknown_sms_is_left_to_a_person_unless_the_provider_can_be_asked(receiver: HttpReceiver) -> None:
    async def look_up(message: Message) -> Accepted | None:
        return Accepted("SM1") if message.idempotency_key == "event-1/kafka:payments" else None

    asking = sms(receiver, look_up=look_up)

    assert sms(receiver).when_unknown is WhenUnknown.PARK
    assert sms(receiver, when_unknown="resend").when_unknown is WhenUnknown.RESEND
    assert asking.when_unknown is WhenUnknown.LOOK_UP
    assert await asking.look_up(message()) == Accepted("SM1")
    with pytest.raises(InvalidOption, match="needs the argument look_up"):
        sms(receiver, when_unknown="look_up")
    with pytest.raises(InvalidOption, match="token") as refused:
        Sms("https://x.example/", account="AC1", token="", sender="x")
    assert "secret" not in str(refused.value)


async def test_slack_gets_text_with_its_markup_taken_out_of_values(receiver: HttpReceiver) -> None:
    receiver.default = Answer(body=b"ok")
    channel = Slack(receiver.url, templates={"payment.completed.v1": "<!here> {name} paid"}, **LOCAL)

    result = await channel.send(message({"name": "<!channel> & Co"}))
    plain = await channel.send(message({"text": "as it is", "blocks": [], "token": "x"}, event_type="other"))
    await channel.aclose()

    assert (result, plain) == (Accepted("ok"), Accepted("ok"))
    assert [json.loads(request.body) for request in receiver.requests] == [
        {"text": "<!here> &lt;!channel&gt; &amp; Co paid"},
        {"text": "as it is", "blocks": []},
    ]


@pytest.mark.parametrize("payload", [{}, "x", {"text": 7}, {"blocks": "x"}, {"text": "x" * 40_001}])
async def test_what_is_no_post_is_refused(receiver: HttpReceiver, payload: Any) -> None:
    channel = Slack(receiver.url, **LOCAL)

    result = await channel.send(message(payload))
    await channel.aclose()

    assert isinstance(result, Refused)
    assert receiver.requests == []


@pytest.mark.requirement("X-21")
async def test_slack_says_how_long_to_wait(receiver: HttpReceiver) -> None:
    receiver.answers.extend([Answer(429, headers={"retry-after": "30"}), Answer(404, body=b"no_service")])
    channel = Slack(receiver.url, **LOCAL)

    slow, gone = [await channel.send(message({"text": "x"})) for _ in range(2)]
    await channel.aclose()

    assert slow == Unavailable("the target answered 429", "HTTP_429", 30_000)
    assert gone == Refused("the target answered 404: no_service", "HTTP_404")


# Templates -----------------------------------------------------------------------------------------------------------


def payload_template(text: Any) -> Template:
    return Template(text, values="payload")


def test_fields_are_filled_in_and_nothing_else_is_touched() -> None:
    template = payload_template("{a}, {b.c}; {b.c}.c {{a}} $a %s{d|}{e|x}")

    assert template.render({"a": [1, "x"], "b": {"c": True}, "e": ""}) == '[1,"x"], true; true.c {a} $a %sx'
    assert payload_template("[{a}]").render({"a": ""}) == "[]"


@pytest.mark.parametrize("payload", [{}, {"a": {}}, {"a": {"b": {}}}, None, "a", []])
def test_a_missing_field_is_told(payload: Any) -> None:
    with pytest.raises(MissingValue, match=r"a\.b\.c"):
        payload_template("{a.b.c}").render(payload)


@pytest.mark.parametrize("text", ["{", "costs } 5", "{a", "{}", "{1}", "{a..b}", "{a.__class__}", 7])
def test_a_template_that_is_none_is_refused(text: Any) -> None:
    with pytest.raises(InvalidOption, match="template"):
        payload_template(text)


def test_templates_reach_nothing_but_the_payload() -> None:
    with pytest.raises(MissingValue):
        payload_template("{a.upper}").render({"a": "x"})


@given(st.text())
def test_values_are_escaped_for_where_they_go(text: str) -> None:
    assert not set("\r\n\x85\u2028\u2029") & set(for_form(text, "line"))
    assert "=?" not in one_header(text)
    assert "<" not in for_form(text, "html") and '"' not in for_form(text, "html")
    assert "<" not in for_form(text, "slack")


# Channels from settings ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-63", "O-64", "X-26")
async def test_channels_are_made_from_settings(receiver: HttpReceiver, tmp_path: Path) -> None:
    environ = {
        "BULLPEN_DATA_DIR": str(tmp_path),
        "WEBHOOK_TIMEOUT_MS": "120",
        "KAFKA_BROKERS": "one:1,two:2",
        "BULLPEN_SMTP_URL": "smtps://user%40x:p%2Fw@mail.example:2465",
        "BULLPEN_SMTP_SENDER": "Shop <shop@example.com>",
        "BULLPEN_SMS_URL": receiver.url,
        "BULLPEN_SMS_ACCOUNT": "AC9",
        "BULLPEN_SMS_TOKEN": "token-of-sms",
        "BULLPEN_SMS_SENDER": "Shop",
    }
    settings = Settings.load(environ=environ, start=tmp_path)
    channels = Bullpen(settings=settings).channels
    receiver.answers.append(Answer(delay_s=60))

    hook = channels.webhook(receiver.url, **LOCAL)
    slow = await hook.send(message())
    short = channels.sms(**LOCAL)
    await short.send(message({"to": "+4930123456", "text": "x"}))
    mail = channels.email()
    for channel in (hook, short):
        await channel.aclose()

    assert slow == Unknown("no answer within 120 ms", "NO_ANSWER")
    assert receiver.requests[1].headers["authorization"] == "Basic QUM5OnRva2VuLW9mLXNtcw=="
    assert (mail._host, mail._port, mail._security, mail._login) == ("mail.example", 2465, "tls", ("user@x", "p/w"))
    assert repr(mail) == "Email('mail.example', port=2465, sender='Shop <shop@example.com>')"
    assert channels.kafka()._door._brokers.addresses == ("one:1", "two:2")
    assert repr(channels.slack("https://hooks.example/a/b")) == "Slack('https://hooks.example/…')"
    shown = " ".join(f"{entry.key}={entry.value}" for entry in settings.describe()) + repr(settings)
    assert "p%2Fw" not in shown and "token-of-sms" not in shown


@pytest.mark.parametrize(("kind", "missing"), [("email", "BULLPEN_SMTP_URL"), ("sms", "BULLPEN_SMS_URL")])
def test_what_is_not_configured_is_named(kind: str, missing: str, tmp_path: Path) -> None:
    channels = Bullpen(settings=Settings.load(environ={}, start=tmp_path)).channels

    with pytest.raises(NotConfigured, match=missing):
        getattr(channels, kind)()


@pytest.mark.requirement("X-26")
@pytest.mark.parametrize(
    ("variable", "value"),
    [("BULLPEN_SMTP_URL", "mail.example"), ("BULLPEN_SMS_URL", "ftp://x"), ("BULLPEN_SMS_TOKEN", "a\nb")],
)
def test_a_bad_channel_setting_names_its_variable_and_shows_no_secret(
    variable: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOption, match=variable):
        Settings.load(environ={variable: value}, start=tmp_path)


def test_every_code_is_in_the_guide() -> None:
    """Whoever sees one in a dead row looks it up there."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "guides" / "channels.md").read_text()
    rooms = ("plugins/channels", "outbox", "delivery")
    sources = [path for room in rooms for path in (root / "src/bullpen" / room).glob("*.py")]
    written = {
        code
        for path in sources
        if path.name != "__init__.py"
        for code in re.findall(r'"([A-Z][A-Z0-9]*(?:_[A-Z]+)+|TIMEOUT)"', path.read_text())
        if not code.startswith("OUTBOX_")
    }

    assert {code for code in written if f"`{code}`" not in page} == set()

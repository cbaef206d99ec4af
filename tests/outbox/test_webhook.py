"""Webhooks: what is sent, how answers are read, and where they may never go."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook as Verifier

from bullpen.errors import InvalidOption
from bullpen.plugins._http import AddressGuard, HttpClient, HttpFailed, check_url
from bullpen.plugins.channels.webhook import Webhook
from bullpen.ports.channel import Accepted, Channel, Message, Refused, SendResult, Unavailable, Unknown
from bullpen.testing import need
from bullpen.testing.receivers import Answer, HttpReceiver

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()
LOOPBACK = ("127.0.0.0/8", "::1/128")


def message(**changes: Any) -> Message:
    fields: dict[str, Any] = {
        "id": "row-1",
        "integration_type": "webhook:partnerX",
        "event_type": "order.paid.v1",
        "payload": {"orderId": 1, "name": "Zoë"},
        "idempotency_key": "event-1",
        "source_stream_id": "order-1",
        "source_event_id": "event-1",
        "tenant_id": "acme",
        "user_id": "u-1",
        "correlation_id": "c-1",
        "created_ms": 1_893_456_000_000,
    }
    return Message(**{**fields, **changes})


@pytest.fixture
async def receiver() -> AsyncIterator[HttpReceiver]:
    async with HttpReceiver() as opened:
        yield opened


@pytest.fixture
async def webhook(receiver: HttpReceiver) -> AsyncIterator[Webhook]:
    channel = Webhook(receiver.url, secret=SECRET, allow_http=True, allowed_networks=LOOPBACK, timeout_ms=2_000)
    yield channel
    await channel.aclose()


@pytest.mark.requirement("O-57", "O-3", "O-71", "O-54")
async def test_a_request_carries_key_signature_and_ids(webhook: Webhook, receiver: HttpReceiver) -> None:
    channel: Channel = webhook

    assert await channel.send(message()) == Accepted("200")

    (request,) = receiver.requests
    assert (request.method, request.path) == ("POST", "/hook")
    assert request.headers["idempotency-key"] == request.headers["webhook-id"] == "event-1"
    ids = {name: request.headers[name] for name in ("x-correlation-id", "x-tenant-id", "x-user-id", "x-outbox-id")}
    assert ids == {"x-correlation-id": "c-1", "x-tenant-id": "acme", "x-user-id": "u-1", "x-outbox-id": "row-1"}
    assert json.loads(request.body) == {
        "type": "order.paid.v1",
        "timestamp": "2030-01-01T00:00:00.000Z",
        "data": {"orderId": 1, "name": "Zoë"},
    }
    assert (await channel.check()).ok


async def test_the_signature_satisfies_the_reference_verifier(webhook: Webhook, receiver: HttpReceiver) -> None:
    await webhook.send(message())

    (request,) = receiver.requests
    verified = Verifier(SECRET).verify(request.body, dict(request.headers))
    assert verified["type"] == "order.paid.v1"


@pytest.mark.many
@pytest.mark.requirement("O-57")
async def test_a_thousand_keys_of_any_characters_verify(webhook: Webhook, receiver: HttpReceiver) -> None:
    """What is signed is what is sent: a receiver sees the key only as its header carries it."""
    random = Random(7)
    alphabet = "az09-_.:/%+ ~äëßñ東京🚚\u00a0\n\t\x7f\ud800"
    keys = [" a ", "Zoë", "%20", "\ud800"]
    keys += ["".join(random.choices(alphabet, k=random.randint(1, 40))) for _ in range(1_000 - len(keys))]

    for start in range(0, len(keys), 50):
        some = keys[start : start + 50]
        assert await asyncio.gather(*(webhook.send(message(idempotency_key=key)) for key in some)) == [
            Accepted("200")
        ] * len(some)

    assert len(receiver.requests) == 1_000
    for request in receiver.requests:
        assert Verifier(SECRET).verify(request.body, dict(request.headers))
        assert request.headers["webhook-id"] == request.headers["idempotency-key"]


async def test_while_a_secret_is_replaced_both_verify(receiver: HttpReceiver) -> None:
    channel = Webhook(receiver.url, secret=[SECRET, OTHER], allow_http=True, allowed_networks=LOOPBACK)

    await channel.send(message())
    await channel.aclose()

    (request,) = receiver.requests
    for secret in (SECRET, OTHER):
        assert Verifier(secret).verify(request.body, dict(request.headers))


async def test_without_ids_and_secret_their_headers_are_left_out(receiver: HttpReceiver) -> None:
    channel = Webhook(
        receiver.url, body="payload", allow_http=True, allowed_networks=LOOPBACK, headers={"X-Api-Version": "2"}
    )

    await channel.send(message(tenant_id=None, user_id=None, correlation_id=None, headers={"traceparent": "00-a-b-01"}))
    await channel.aclose()

    (request,) = receiver.requests
    absent = {"webhook-signature", "x-tenant-id", "x-user-id", "x-correlation-id"}
    assert absent.isdisjoint(request.headers)
    assert (request.headers["x-api-version"], request.headers["traceparent"]) == ("2", "00-a-b-01")
    assert json.loads(request.body) == {"orderId": 1, "name": "Zoë"}


async def test_ids_cannot_smuggle_headers(webhook: Webhook, receiver: HttpReceiver) -> None:
    await webhook.send(message(tenant_id="a\r\nx-evil: 1", correlation_id="Zoë"))

    (request,) = receiver.requests
    assert "x-evil" not in request.headers
    assert request.headers["x-tenant-id"] == "a%0D%0Ax-evil: 1"
    assert request.headers["x-correlation-id"] == "Zo%C3%AB"


@pytest.mark.requirement("O-52", "X-21", "O-80")
@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_any_2xx_is_accepted(webhook: Webhook, receiver: HttpReceiver, status: int) -> None:
    receiver.default = Answer(status)

    assert await webhook.send(message()) == Accepted(str(status))


@pytest.mark.requirement("O-52", "X-21", "O-80")
@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 410, 413, 422, 451, 301, 302, 307, 308])
async def test_other_4xx_and_redirects_are_refused(webhook: Webhook, receiver: HttpReceiver, status: int) -> None:
    receiver.default = Answer(status, headers={"location": "http://127.0.0.1:1/elsewhere"})

    result = await webhook.send(message())

    assert isinstance(result, Refused)
    assert result.code == f"HTTP_{status}"
    assert len(receiver.requests) == 1


@pytest.mark.requirement("X-21", "O-80")
@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
async def test_what_may_pass_is_unavailable(webhook: Webhook, receiver: HttpReceiver, status: int) -> None:
    receiver.default = Answer(status, body=b"ada@example.com is not available")

    result = await webhook.send(message())

    assert result == Unavailable(f"the target answered {status}", f"HTTP_{status}", None)


@pytest.mark.requirement("X-21")
@pytest.mark.parametrize(
    ("value", "after_ms"),
    [
        ("120", 120_000),
        ("0", 0),
        ("Wed, 02 Jan 2030 00:01:00 GMT", 60_000),
        ("Tue, 01 Jan 2030 00:00:00 GMT", 0),
        ("soon", None),
        ("-5", None),
        ("1e9", None),
        ("999999999", 86_400_000),
        ("9" * 5_000, 86_400_000),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400_000),
        ("Fri, 31 Dec 9999 23:59:59 -2359", 86_400_000),
        ("Fri, 99 Dec 99999999999999999999 23:59:59 GMT", None),
    ],
)
async def test_a_target_may_say_when_to_come_back(receiver: HttpReceiver, value: str, after_ms: int | None) -> None:
    receiver.default = Answer(429, headers={"retry-after": value})
    channel = Webhook(receiver.url, allow_http=True, allowed_networks=LOOPBACK, now=lambda: 1_893_542_400.0)

    result = await channel.send(message())
    await channel.aclose()

    assert isinstance(result, Unavailable)
    assert result.after_ms == after_ms


@pytest.mark.requirement("O-63")
@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        (Answer(delay_s=60), Unknown("no answer within 150 ms", "NO_ANSWER")),
        (Answer(202, body=b"x", headers={"content-length": "9"}), Accepted("202")),
        (Answer(404, body=b"x", headers={"content-length": "9"}), Refused("the target answered 404", "HTTP_404")),
    ],
)
async def test_the_time_is_for_the_whole_exchange(receiver: HttpReceiver, answer: Answer, meaning: SendResult) -> None:
    """A target that sends one byte a second would otherwise hold a place for ever. Once it has answered, the answer
    counts, whatever becomes of its body."""
    receiver.default = answer
    channel = Webhook(receiver.url, allow_http=True, allowed_networks=LOOPBACK, timeout_ms=150)

    result = await channel.send(message())
    await channel.aclose()

    assert result == meaning


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"transfer-encoding": "chunked"}, b"no chunk\r\n"),
        ({"transfer-encoding": "chunked"}, b"ffffffffffffffffffffffff\r\n"),
        ({"content-length": "5"}, b"x"),
    ],
)
async def test_an_answer_that_cannot_be_read_after_acceptance_is_accepted(headers: dict[str, str], body: bytes) -> None:
    """Sent again it would be delivered twice."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        writer.write(f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = Webhook(f"http://127.0.0.1:{port}/", allow_http=True, allowed_networks=LOOPBACK)

    result = await channel.send(message())
    await channel.aclose()
    server.close()

    assert result == Accepted("200")


@pytest.mark.requirement("O-63")
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (200, Accepted("200")),
        (422, Refused("the target answered 422", "HTTP_422")),
        (503, Unavailable("the target answered 503", "HTTP_503")),
    ],
)
@pytest.mark.parametrize("body", ["slow", "cut"])
async def test_an_answer_counts_when_its_status_has_arrived(
    receiver: HttpReceiver, status: int, expected: object, body: str
) -> None:
    """The target has decided then. A second delivery because of a lost body would be one too many."""
    slow = Answer(status, body=b"x", headers={"content-length": "9"})
    receiver.default = slow if body == "slow" else Answer(status, body=b"x", cut=True)
    channel = Webhook(receiver.url, allow_http=True, allowed_networks=LOOPBACK, timeout_ms=150)

    result = await channel.send(message())
    await channel.aclose()

    assert result == expected
    assert len(receiver.requests) == 1


@pytest.mark.requirement("O-54")
async def test_headers_of_the_message_travel_with_it(receiver: HttpReceiver) -> None:
    own = {"Partner": "p-7", "X-Kept": "ours"}
    channel = Webhook(receiver.url, secret=SECRET, headers=own, allow_http=True, allowed_networks=LOOPBACK)
    sent = {
        "traceparent": "00-ab-cd-01",
        "X-Region": "Zürich\r\nX-Evil: 1",
        "X-Count": 7,
        "X-Flag": True,
        "X-List": ["a", 1],
        "X-None": None,
        "x-kept": "theirs",
        "x-tenant-id": "somebody else",
    }

    await channel.send(message(headers=sent))
    await channel.aclose()

    got = receiver.requests[0].headers
    assert {name: got[name] for name in ("traceparent", "x-region", "x-count", "x-flag", "x-list", "partner")} == {
        "traceparent": "00-ab-cd-01",
        "x-region": "Z%C3%BCrich%0D%0AX-Evil: 1",
        "x-count": "7",
        "x-flag": "true",
        "x-list": '["a",1]',
        "partner": "p-7",
    }
    assert (got["x-kept"], got["x-tenant-id"]) == ("ours", "acme")
    assert "x-none" not in got


@pytest.mark.requirement("O-54")
async def test_headers_that_would_change_the_request_stay_behind(webhook: Webhook, receiver: HttpReceiver) -> None:
    """What came with an event must not log in, split requests, or take the place of what was signed."""
    dangerous = {
        "Host": "evil.example",
        "Content-Length": "1",
        "Transfer-Encoding": "chunked",
        "Connection": "close",
        "Authorization": "Bearer x",
        "Cookie": "a=b",
        "Webhook-Id": "x",
        "webhook-signature": "v1,x",
        "Expect": "100-continue",
        "": "x",
        "no name": "x",
        "jobOptions": {"delay": 1},
        "idempotencyKey": "x",
        "replayOf": "row-0",
        "editOf": "row-0",
    }

    assert await webhook.send(message(headers=dangerous)) == Accepted("200")

    (request,) = receiver.requests
    assert Verifier(SECRET).verify(request.body, dict(request.headers))
    unwanted = {"authorization", "cookie", "expect", "transfer-encoding", "no name", "joboptions", "idempotencykey"}
    assert not {*unwanted, "replayof", "editof"} & set(request.headers)
    assert request.headers["host"] != "evil.example"


async def test_a_target_that_hangs_up_may_have_it(webhook: Webhook, receiver: HttpReceiver) -> None:
    receiver.default = Answer(drop=True)

    result = await webhook.send(message())

    assert isinstance(result, Unknown)
    assert result.code == "NO_ANSWER"


async def test_a_target_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        channel = Webhook(url, allow_http=True, allowed_networks=LOOPBACK)
        result = await channel.send(message())
        await channel.aclose()

    assert isinstance(result, Unavailable)
    assert result.code == "NO_CONNECTION"


async def test_a_huge_answer_is_not_read_to_its_end(webhook: Webhook, receiver: HttpReceiver) -> None:
    receiver.default = Answer(200, body=b"x" * 5_000_000)

    assert await webhook.send(message()) == Accepted("200")
    assert await webhook.send(message()) == Accepted("200")


# Where it may never go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        *(
            "127.0.0.1",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "0.0.0.0",
            "224.0.0.1",
        ),
        *("255.255.255.255", "198.18.0.1", "192.0.0.8", "::1", "::", "fe80::1", "fd00::1", "::ffff:127.0.0.1"),
        *(
            "::ffff:10.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:7f00:1::",
            "2001:0:0:1::1",
            "ff02::1",
            "::127.0.0.1",
        ),
    ],
)
def test_addresses_of_our_own_network_are_refused(address: str) -> None:
    assert not AddressGuard().allows(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101", "::ffff:8.8.8.8"]
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert AddressGuard().allows(ipaddress.ip_address(address))


@given(st.ip_addresses())
def test_nothing_that_is_private_is_ever_allowed(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    if address.is_private or address.is_loopback or address.is_link_local or address.is_multicast:
        embeds_public = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
        assert embeds_public or not AddressGuard().allows(address)


async def test_a_loopback_target_is_refused_before_anything_is_sent(receiver: HttpReceiver) -> None:
    channel = Webhook(receiver.url, allow_http=True)

    result = await channel.send(message())
    await channel.aclose()

    assert isinstance(result, Refused)
    assert result.code == "ADDRESS_REFUSED"
    assert receiver.requests == []


async def test_a_name_with_one_bad_address_is_refused(receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server of an attacker mixes a good answer with a bad one, or changes its mind between two questions."""
    asked: list[str] = []

    def answer(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("93.184.216.34", "127.0.0.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    channel = Webhook(f"http://partner.example:{receiver.port}/", allow_http=True)

    result = await channel.send(message())
    await channel.aclose()

    assert isinstance(result, Refused)
    assert (asked, receiver.requests) == (["partner.example"], [])


async def test_the_checked_address_is_the_one_that_is_called(
    receiver: HttpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is asked for once. A second answer, which could be another, is never used."""
    asked: list[str] = []

    def answer(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    channel = Webhook(f"http://partner.example:{receiver.port}/", allow_http=True, allowed_networks=LOOPBACK)

    result = await channel.send(message())
    await channel.aclose()

    assert result == Accepted("200")
    assert [host for host in asked if host == "partner.example"] == ["partner.example"]
    assert receiver.requests[0].headers["host"] == f"partner.example:{receiver.port}"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for partner.example."""
    directory = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *(need("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=partner.example", "-addext", "subjectAltName=DNS:partner.example"),
            *("-keyout", directory / "key.pem", "-out", directory / "cert.pem"),
        ],
        check=True,
        capture_output=True,
    )
    return directory


@pytest.mark.parametrize(("host", "accepted"), [("partner.example", True), ("other.example", False)])
async def test_tls_checks_the_name_although_the_address_is_pinned(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, host: str, accepted: bool
) -> None:
    def answer(name: str, port: int, **_: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server_context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context)
    port = server.sockets[0].getsockname()[1]
    monkeypatch.setattr(socket, "getaddrinfo", answer)
    trusting = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    channel = Webhook(f"https://{host}:{port}/", allowed_networks=LOOPBACK, tls=trusting)

    result = await channel.send(message())
    await channel.aclose()
    server.close()

    assert isinstance(result, Accepted if accepted else Unavailable)


@pytest.mark.parametrize(
    ("url", "allow_http"),
    [
        ("http://partner.example/", False),
        ("ftp://partner.example/", True),
        ("file:///etc/passwd", True),
        ("https://", False),
        ("https://ada:pw@partner.example/", False),
        ("https://partner.example/a b", False),
        ("https://pärtner.example/", False),
        ("https://partner.example:0/", False),
        ("https://[bad/", False),
        (None, False),
    ],
)
def test_addresses_that_make_no_sense_are_refused(url: Any, allow_http: bool) -> None:
    with pytest.raises(InvalidOption, match="url") as refused:
        check_url(url, allow_http=allow_http)

    assert "pw" not in str(refused.value)


@pytest.mark.requirement("O-64")
@pytest.mark.parametrize("secret", ["whsec_", "whsec_!!", "short", "whsec_" + base64.b64encode(b"x" * 5).decode(), 7])
def test_a_bad_secret_is_refused_and_not_shown(secret: Any) -> None:
    with pytest.raises(InvalidOption, match="secret") as refused:
        Webhook("https://partner.example/", secret=[secret])

    assert str(secret) not in str(refused.value).replace("whsec_'", "")


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"webhook-id": "x"}},
        {"headers": {"bad name": "x"}},
        {"headers": {"Transfer-Encoding": "chunked"}},
        {"headers": {"connection": "upgrade"}},
        {"headers": {"TE": "trailers"}},
        {"headers": {"Upgrade": "h2c"}},
        {"headers": {"expect": "100-continue"}},
        {"headers": {"proxy-authorization": "Basic eA=="}},
        {"headers": {"x-a": "line\nbreak"}},
        {"body": "xml"},
        {"timeout_ms": 0},
        {"allowed_networks": ["not a network"]},
    ],
)
def test_options_are_checked_at_the_door(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=r"headers|body|timeout_ms|allowed_networks"):
        Webhook("https://partner.example/", **options)


async def test_a_name_that_nobody_knows_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(host: str, port: int, **_: object) -> list[Any]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    client = HttpClient()

    with pytest.raises(HttpFailed, match="cannot be resolved"):
        await client.post("https://nowhere.invalid/", headers={}, content=b"", timeout_ms=1_000)
    await client.aclose()

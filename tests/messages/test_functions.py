"""Functions as channels: of any kind, with any receipt, and with the errors of the usual clients."""

from __future__ import annotations

import asyncio
import smtplib
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import aiosmtplib
import httpx
import pytest
import requests

from bullpen.errors import InvalidOption, PermanentError
from bullpen.messages import Accepted, FunctionChannel, Message, Refused, Unavailable
from bullpen.testing import free_port
from bullpen.testing.receivers import Answer, HttpReceiver, SmtpReceiver

MESSAGE = Message(
    id="m-1",
    integration_type="email:ada",
    event_type="birthday",
    payload={"to": "ada@example.com", "text": "Happy birthday!"},
    idempotency_key="k-1",
    source_stream_id="s",
    source_event_id="e",
)


@pytest.fixture
async def http() -> AsyncIterator[HttpReceiver]:
    async with HttpReceiver() as receiver:
        yield receiver


@pytest.fixture
async def smtp() -> AsyncIterator[SmtpReceiver]:
    async with SmtpReceiver() as receiver:
        yield receiver


# ---- functions and receipts ----------------------------------------------------------------------------------------


async def test_a_plain_function_is_called_once_and_in_a_thread() -> None:
    """Its answer could not be awaited, and the provider was called six times."""
    threads: list[int] = []

    def send(message: Message) -> str:
        threads.append(threading.get_ident())
        return f"receipt for {message.id}"

    assert await FunctionChannel(send).send(MESSAGE) == Accepted("receipt for m-1")
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize(
    ("answer", "receipt"),
    [
        ({"id": 7, "to": ["ada"]}, '{"id": 7, "to": ["ada"]}'),
        (["a", 1], '["a", 1]'),
        (4711, "4711"),
        (None, ""),
        ("plain", "plain"),
        ("x" * 5_000, "x" * 2_000),
        (object(), "(object that cannot be written: TypeError)"),
    ],
    ids=["a dict", "a list", "a number", "nothing", "text", "long text", "no JSON"],
)
async def test_whatever_comes_back_is_a_receipt(answer: Any, receipt: str) -> None:
    """The message has left: what the provider answers is no reason to send it again."""

    async def send(message: Message) -> Any:
        return answer

    assert await FunctionChannel(send).send(MESSAGE) == Accepted(receipt)
    assert await FunctionChannel(lambda message: answer).send(MESSAGE) == Accepted(receipt)


async def test_answers_of_a_function_stay_what_they_are() -> None:
    later = Unavailable("busy", "BUSY", 5_000)

    def refuses(message: Message) -> None:
        raise PermanentError("no such person")

    assert await FunctionChannel(lambda message: later).send(MESSAGE) == later
    assert await FunctionChannel(refuses).send(MESSAGE) == Refused("no such person", "REFUSED")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(InvalidOption, match="a function of one message"):
        FunctionChannel("send")  # type: ignore[arg-type]  # what people write


# ---- errors of clients ---------------------------------------------------------------------------------------------


def by_httpx(url: str) -> Callable[[Message], Any]:
    async def send(message: Message) -> None:
        async with httpx.AsyncClient() as client:
            (await client.post(url, json=message.payload)).raise_for_status()

    return send


def by_requests(url: str) -> Callable[[Message], Any]:
    def send(message: Message) -> None:
        with requests.Session() as session, session.post(url, json=message.payload, timeout=5) as answer:
            answer.raise_for_status()

    return send


def by_aiohttp(url: str) -> Callable[[Message], Any]:
    async def send(message: Message) -> None:
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.post(url, json=message.payload):
            pass

    return send


def by_urllib(url: str) -> Callable[[Message], Any]:
    def send(message: Message) -> None:
        try:
            with urllib.request.urlopen(url, data=b"{}", timeout=5):
                pass
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise

    return send


CLIENTS = [by_httpx, by_requests, by_aiohttp, by_urllib]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Answer(404), Refused("the provider answered 404", "HTTP_404")),
        (Answer(422), Refused("the provider answered 422", "HTTP_422")),
        (
            Answer(429, headers={"Retry-After": "7"}),
            Unavailable("the provider answered 429", "HTTP_429", 7_000),
        ),
        (
            Answer(503, headers={"Retry-After": "3"}),
            Unavailable("the provider answered 503", "HTTP_503", 3_000),
        ),
        (Answer(500), Unavailable("the provider answered 500", "HTTP_500")),
    ],
    ids=["404", "422", "429", "503", "500"],
)
async def test_errors_of_http_clients_are_answers(
    http: HttpReceiver, client: Any, answer: Answer, expected: object
) -> None:
    http.default = answer

    assert await FunctionChannel(client(http.url)).send(MESSAGE) == expected
    assert len(http.requests) == 1


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_refused_connection_means_not_sent(client: Any) -> None:
    result = await FunctionChannel(client(f"http://127.0.0.1:{free_port()}/")).send(MESSAGE)

    assert isinstance(result, Unavailable)
    assert result.code == "NO_CONNECTION"


@pytest.mark.parametrize("client", CLIENTS)
async def test_of_a_connection_that_breaks_nobody_knows(http: HttpReceiver, client: Any) -> None:
    """The provider may have the message: what follows is the rule of the channel."""
    http.default = Answer(drop=True)

    with pytest.raises(Exception, match=r"(?i)disconnect|abort|closed|reset|without"):
        await FunctionChannel(client(http.url)).send(MESSAGE)


def by_smtplib(port: int) -> Callable[[Message], Any]:
    def send(message: Message) -> None:
        with smtplib.SMTP("127.0.0.1", port, timeout=5) as server:
            server.sendmail("shop@example.com", message.payload["to"], "Subject: Hi\r\n\r\nHi")

    return send


def by_aiosmtplib(port: int) -> Callable[[Message], Any]:
    async def send(message: Message) -> None:
        await aiosmtplib.send(
            "Subject: Hi\r\n\r\nHi",
            sender="shop@example.com",
            recipients=[message.payload["to"]],
            hostname="127.0.0.1",
            port=port,
        )

    return send


@pytest.mark.parametrize("client", [by_smtplib, by_aiosmtplib])
@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("550 no such user", Refused("the server answered 550", "SMTP_550")),
        ("451 try later", Unavailable("the server answered 451", "SMTP_451")),
    ],
)
async def test_errors_of_smtp_clients_are_answers(
    smtp: SmtpReceiver, client: Any, reply: str, expected: object
) -> None:
    smtp.to_recipient.append(reply)
    by_recipient = await FunctionChannel(client(smtp.port)).send(MESSAGE)
    smtp.to_data.append(reply)
    by_content = await FunctionChannel(client(smtp.port)).send(MESSAGE)
    taken = await FunctionChannel(client(smtp.port)).send(MESSAGE)

    assert by_recipient == by_content == expected
    assert isinstance(taken, Accepted)
    assert len(smtp.mails) == 1


@pytest.mark.parametrize("client", [by_smtplib, by_aiosmtplib])
async def test_a_mail_server_that_is_not_there_means_not_sent(client: Any) -> None:
    result = await FunctionChannel(client(free_port())).send(MESSAGE)

    assert isinstance(result, Unavailable)
    assert result.code == "NO_CONNECTION"


async def test_a_function_that_takes_too_long_can_be_left() -> None:
    release = threading.Event()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await FunctionChannel(lambda message: release.wait(10)).send(MESSAGE)

    release.set()

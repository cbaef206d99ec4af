"""Local targets for deliveries: an HTTP and an SMTP server that answer as they are told and remember what came.

In: which answers to give, in order. Out: the requests, as they arrived. A real socket and a real server, in the event
loop of the test. Elsewhere: queues and databases (`servers`, `postgres`).
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from types import TracebackType
from typing import Self

__all__ = ["Answer", "HttpReceiver", "Mail", "Request", "SmtpReceiver"]

_REASONS = {200: "OK", 429: "Too Many Requests", 500: "Internal Server Error"}


@dataclass(frozen=True, slots=True)
class Request:
    """What arrived. Header names are lower-case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What to answer. `delay_s` makes the caller wait, for ever when it is infinite; `drop` hangs up without a word,
    `cut` in the middle of the body."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    delay_s: float = 0.0
    drop: bool = False
    cut: bool = False


class HttpReceiver:
    """Enter it, then read `url`. Answers are taken from `answers` while there are any, then from `default`."""

    def __init__(self, default: Answer | Callable[[Request], Answer] | None = None) -> None:
        self.default = default or Answer()
        self.answers: deque[Answer] = deque()
        self.requests: list[Request] = []
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def until(self, count: int, *, within_s: float = 15.0) -> list[Request]:
        """Wait until so many requests have arrived."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.requests) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{len(self.requests)} of {count} requests within {within_s} s") from None
        return self.requests[:count]

    async def __aenter__(self) -> Self:
        # On the same port when it is entered again: a target that was away and is back.
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self.port
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            while await self._talk(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the caller hung up, or the test is over
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")
        method, path, _ = first.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(method, path, headers, body)
        self.requests.append(request)
        self._changed.set()
        answer = self.answers.popleft() if self.answers else self.default
        if callable(answer):
            answer = answer(request)
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        if answer.drop:
            return False
        lengths = {"content-length": str(len(answer.body) + answer.cut), **answer.headers}
        text = "".join(f"{name}: {value}\r\n" for name, value in lengths.items())
        writer.write(
            f"HTTP/1.1 {answer.status} {_REASONS.get(answer.status, 'Answer')}\r\n{text}\r\n".encode("latin-1")
        )
        writer.write(answer.body)
        await writer.drain()
        return not answer.cut


@dataclass(frozen=True, slots=True)
class Mail:
    """What arrived over SMTP."""

    sender: str
    recipient: str
    content: bytes

    @property
    def message(self) -> EmailMessage:
        return message_from_bytes(self.content, policy=policy.default)


class SmtpReceiver:
    """Enter it, then read `port`. Speaks as much of SMTP as a client needs: EHLO, STARTTLS, AUTH PLAIN, MAIL to QUIT.

    `to_recipient` and `to_data` hold replies for the next RCPT and DATA, such as `"550 no such user"`; a number is how
    many seconds the reply to DATA takes. Mail that was taken, answered or not, is in `mails`. With `tls` mail is taken
    only after STARTTLS, with `login` only after AUTH.
    """

    def __init__(self, *, tls: ssl.SSLContext | None = None, login: tuple[str, str] | None = None) -> None:
        self.to_recipient: deque[str] = deque()
        self.to_data: deque[str | float] = deque()
        self.mails: list[Mail] = []
        self._tls, self._login = tls, login
        self._server: asyncio.Server | None = None
        self._talks: set[asyncio.Task[None]] = set()
        self._port = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self.port
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for talk in self._talks:
            talk.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        try:
            await self._talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the caller hung up, or the test is over
        finally:
            self._talks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sender, recipient, is_safe, is_known = "", "", self._tls is None, self._login is None
        writer.write(b"220 receiver\r\n")
        while True:
            line = (await reader.readuntil(b"\r\n")).decode("latin-1").strip()
            word, _, rest = line.partition(" ")
            match word.upper():
                case "EHLO":
                    offers = [*(["STARTTLS"] * (not is_safe)), *(["AUTH PLAIN"] * (not is_known)), "8BITMIME"]
                    lines = ["receiver", *offers]
                    reply = "".join(f"250{'-' * (each is not lines[-1]) or ' '}{each}\r\n" for each in lines).rstrip()
                case "STARTTLS" if self._tls is not None:
                    writer.write(b"220 go ahead\r\n")
                    await writer.start_tls(self._tls)
                    is_safe = True
                    continue
                case "AUTH":
                    _, user, password = base64.b64decode(rest.split()[-1]).decode().split("\0")
                    is_known = (user, password) == self._login
                    reply = "235 welcome" if is_known else "535 no"
                case "MAIL" if is_safe and is_known:
                    sender, reply = rest.partition("<")[2].partition(">")[0], "250 ok"
                case "MAIL":
                    reply = "530 not yet"
                case "RCPT":
                    reply = self.to_recipient.popleft() if self.to_recipient else "250 ok"
                    recipient = rest.partition("<")[2].partition(">")[0]
                case "DATA":
                    writer.write(b"354 go ahead\r\n")
                    content = (await reader.readuntil(b"\r\n.\r\n"))[:-3].replace(b"\r\n..", b"\r\n.")
                    reply = await self._take(Mail(sender, recipient, content))
                case "QUIT":
                    writer.write(b"221 bye\r\n")
                    return
                case _:
                    reply = "250 ok"
            writer.write(f"{reply}\r\n".encode("latin-1"))
            await writer.drain()

    async def _take(self, mail: Mail) -> str:
        reply = self.to_data.popleft() if self.to_data else "250 taken as 4711"
        if not isinstance(reply, str) or reply.startswith("2"):
            self.mails.append(mail)
        if not isinstance(reply, str):
            await asyncio.sleep(reply)
            reply = "250 taken late"
        return reply

"""Serve an ASGI application, beside the workers of a process or in a process of its own.

In: an application and where to listen. Out: a service that an app runs: it starts, stops and fails with the others.
Whoever can connect is a stranger: connections, headers, bodies and the time for a request are limited (`HttpLimits`).
Needs the extra `metrics` (uvicorn), which `http` brings too. Elsewhere: the protocol with the limits (`_protocol`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from bullpen._kernel.duration import check_int
from bullpen._kernel.logs import get_logger
from bullpen._kernel.service import BaseService
from bullpen.errors import InvalidOption, MissingExtra

__all__ = ["HttpLimits", "HttpService", "parse_address"]

logger = get_logger("bullpen.http")

_ANSWERS_WITHIN_S: Final = 5
"""For requests that are being answered when it is closed."""
_ACCEPT_PAUSE_S: Final = 1.0
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[HOST]:PORT` or `:PORT` (this machine only)."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidOption("http", "HOST:PORT, such as 127.0.0.1:9464", text)
    return host.strip("[]") or "127.0.0.1", int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one client, and all of them together, may use."""

    connections: int = 200
    """At the same time. Who comes when all are taken waits until one is closed."""
    header_bytes: int = 16_384
    """Of one request, its first line included. More is answered with 400 or 431."""
    body_bytes: int = 11_534_336
    """Of one request: 11 MiB, a little more than the largest run. More is answered with 413."""
    request_ms: int = 30_000
    """For a complete request to arrive, and for each part of the answer to be read. Then the connection is closed."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            check_int(name, getattr(self, name), minimum=1)


class HttpService(BaseService):
    """Listens as soon as it is made, so that a taken port is told before any job is; serves while it runs.

    `public=True` allows an address that other machines can reach. `lifespan=True` tells the application its start and
    its end.
    """

    role = "http"

    def __init__(
        self,
        application: Any,
        host: str,
        port: int,
        *,
        limits: HttpLimits | None = None,
        public: bool = False,
        lifespan: bool = False,
        extra: str = "metrics",
    ) -> None:
        try:
            import uvicorn

            from bullpen.http._protocol import limited, protocol_for
        except ImportError:
            raise MissingExtra(extra, "serving over HTTP") from None
        super().__init__("http")
        self._limits = limits or HttpLimits()
        self._socket = _listen(host, port, public=public)
        self.port: int = self._socket.getsockname()[1]
        self._places = asyncio.Semaphore(self._limits.connections)
        config = uvicorn.Config(
            limited(application, header_bytes=self._limits.header_bytes, body_bytes=self._limits.body_bytes),
            http=protocol_for(self._limits.request_ms / 1000, self._places.release),
            ws="none",
            h11_max_incomplete_event_size=self._limits.header_bytes,
            log_config=None,
            access_log=False,
            lifespan="auto" if lifespan else "off",
            timeout_graceful_shutdown=_ANSWERS_WITHIN_S,
        )
        stop_accepting = self._stop_accepting

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # the app that runs us handles them for all

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                await stop_accepting()
                await super().shutdown(sockets)

        self.ends_last = True
        self._server = Server(config)
        self._accepting: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    async def _begin(self) -> None:
        logger.info("serving http on port %d", self.port)
        self._accepting = self._spawn(self._accept(), "accept")
        # Without sockets: asyncio's own accepting does not pause between failures, and knows no limit.
        self._serving = self._spawn(self._server.serve(sockets=[]), is_all=True)  # an application may refuse to start

    async def _hurry(self) -> None:
        self._server.force_exit = self._close_timeout == 0

    async def _end(self) -> None:
        self._server.should_exit = True
        await self._hurry()
        if self._serving is not None:
            await asyncio.wait([self._serving])
        await self._stop_accepting()

    async def _accept(self) -> None:
        loop, server = asyncio.get_running_loop(), self._server
        while not server.started:  # noqa: ASYNC110 - uvicorn does not tell
            await asyncio.sleep(0.01)
        is_exhausted = False
        while True:
            await self._places.acquire()
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                self._places.release()
                if error.errno not in _EXHAUSTED:
                    continue  # that client was gone before its turn
                if not is_exhausted:  # once, and not every second as long as it lasts
                    logger.error("connections cannot be accepted now: %s", error.strerror)
                is_exhausted = True
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if is_exhausted:
                is_exhausted = False
                logger.info("connections are accepted again")
            try:
                await loop.connect_accepted_socket(self._protocol, connection)
            except OSError:  # gone meanwhile
                connection.close()
                self._places.release()

    def _protocol(self) -> Any:
        server, make = self._server, self._server.config.http_protocol_class
        return make(  # type: ignore[call-arg]
            config=server.config, server_state=server.server_state, app_state=server.lifespan.state
        )

    async def _stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            if not self._accepting.cancelled():
                self._accepting.result()
        self._socket.close()


def _listen(host: str, port: int, *, public: bool) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setblocking(False)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        bound = listening.getsockname()[0]
        if not public and not ipaddress.ip_address(bound.partition("%")[0]).is_loopback:
            raise InvalidOption(
                "http",
                "an address of this machine only, such as 127.0.0.1; to let other machines connect, "
                "pass --http-public or public=True",
                f"{host}:{port}",
            )
        listening.listen()  # who comes before we run waits, instead of being refused
    except OSError as error:
        listening.close()
        free = f"an address that is free ({error.strerror}); pass another one with --http HOST:PORT"
        raise InvalidOption("http", free, f"{host}:{port}") from None
    except InvalidOption:
        listening.close()
        raise
    return listening

"""Serve an ASGI application beside the workers of a process.

In: an application and where to listen. Out: a service that an app runs: it starts, stops and fails with the others.
Needs the extra `metrics` (uvicorn), which `http` brings too.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel.logs import get_logger
from bullpen.errors import InvalidOption, MissingExtra

__all__ = ["HttpService", "parse_address"]

logger = get_logger("bullpen.http")

_ANSWERS_WITHIN_S: Final = 5
"""For requests that are being answered when it is closed."""


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[HOST]:PORT` or `:PORT` (this machine only)."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidOption("http", "HOST:PORT, such as 127.0.0.1:9464", text)
    return host.strip("[]") or "127.0.0.1", int(port)


class HttpService:
    """Listens as soon as it is made, so that a taken port is told before any job is; serves while it runs."""

    role = "http"

    def __init__(self, application: Any, host: str, port: int) -> None:
        try:
            import uvicorn
        except ImportError:
            raise MissingExtra("metrics", "serving over HTTP") from None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen()  # who comes before we run waits, instead of being refused
        except OSError as error:
            self._socket.close()
            raise InvalidOption("http", f"an address that is free ({error.strerror})", f"{host}:{port}") from None
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            application, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=_ANSWERS_WITHIN_S
        )

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield  # the app that runs us handles them for all

        self.ends_last = True
        self._server = Server(config)
        self._is_running = False
        self._ended = asyncio.Event()

    async def run(self, *, signals: bool | None = None) -> None:
        logger.info("serving http on port %d", self.port)
        self._is_running = True
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()

    async def close(self, timeout: int | timedelta | None = None) -> None:
        self._server.should_exit = True
        if timeout == 0:
            self._server.force_exit = True
        if not self._is_running:
            self._socket.close()
        else:
            # Not for the task that serves: whoever runs all services closes them from there.
            await self._ended.wait()

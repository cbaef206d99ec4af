"""`/livez`, `/readyz` and `/metrics` as one small ASGI application.

In: functions that answer. Out: 200 or 503 with reasons as JSON, and the metrics as text. No framework: it mounts in any
(`app.mount("/ops", OpsApp(...))`). Payloads, names of tenants and secrets are in none of the answers.
Elsewhere: what is checked (`bullpen.ops.health`), what is counted (`bullpen.ops.metrics`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

from bullpen.ops.exposition import CONTENT_TYPE, render
from bullpen.ops.health import HealthReport
from bullpen.ports.metrics import Metric

__all__ = ["OpsApp"]

_JSON: Final = "application/json"
_REMEMBERED_S: Final = 1.0
T = TypeVar("T")
_Receive = Callable[[], Awaitable[dict[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


class _Report(Protocol):
    """`Health.report`."""

    def __call__(self, *, vital_only: bool = False) -> Awaitable[HealthReport]: ...


class OpsApp:
    """The ASGI application. An answer is used for a second: however many ask, server and database are asked once."""

    def __init__(self, health: _Report, metrics: Callable[[], Awaitable[Iterable[Metric]]]) -> None:
        self._vital = _Remembered(lambda: health(vital_only=True))
        self._health = _Remembered(health)

        async def text() -> bytes:
            return render(await metrics()).encode()

        self._metrics = _Remembered(text)

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, send)
        else:
            raise ValueError(f"only http is served here, not {scope['type']}")

    async def _serve(self, scope: dict[str, Any], send: _Send) -> None:
        # Mounted below another application the path begins with where we are.
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        match path:
            case _ if scope["method"] not in ("GET", "HEAD"):
                await _answer(send, 405, _JSON, b'{"error":"GET only"}', allow=b"GET, HEAD")
            case "/livez":
                # Nobody else is asked: a server that does not answer must not let a liveness probe run out of time.
                report = await self._vital()
                shown = {"live": report.live, "checks": report.to_json()["checks"]}
                await _answer(send, 200 if report.live else 503, _JSON, json.dumps(shown).encode())
            case "/readyz":
                report = await self._health()
                await _answer(send, 200 if report.ready else 503, _JSON, json.dumps(report.to_json()).encode())
            case "/metrics":
                await _answer(send, 200, CONTENT_TYPE, await self._metrics())
            case _:
                await _answer(send, 404, _JSON, b'{"error":"there is /livez, /readyz and /metrics"}')


class _Remembered(Generic[T]):
    """What a function answered, for a second. All who ask meanwhile get the same; a failure is not remembered."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[T] | None = None
        self._until = 0.0

    async def __call__(self) -> T:
        task = self._asking
        if task is None or (task.done() and (time.monotonic() >= self._until or task.cancelled() or task.exception())):
            task = self._asking = asyncio.create_task(self._find_out())
        return await asyncio.shield(task)  # who goes away takes nobody along

    async def _find_out(self) -> T:
        answer = await self._ask()
        self._until = time.monotonic() + _REMEMBERED_S
        return answer


async def _answer(send: _Send, status: int, content_type: str, body: bytes, **headers: bytes) -> None:
    names = [(b"content-type", content_type.encode()), (b"cache-control", b"no-store")]
    names += [(name.encode(), value) for name, value in headers.items()]
    names.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": names})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: _Receive, send: _Send) -> None:
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            await send({"type": "lifespan.shutdown.complete"})
            return

"""`/stream`, `/stream/{queue}` and `/pulse`: tell a page that it is out of date. The page fetches itself again.

A stream carries no data: whoever may see a page fetches it under his own name, and everybody else learns nothing. At
most four notices a second leave, however much happens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Final

from bullpen.dashboard._web import PageAnswer
from bullpen.dashboard.routes import Context, PageRoute
from bullpen.ops.hub import ALL_QUEUES

_LEAST_BETWEEN_S: Final = 0.25
_LOOK_S: Final = 1.0
"""How soon a stream notices that the dashboard closes."""
_PULSE_S: Final = 1.5
_SIGN_OF_LIFE_S: Final = 15.0


async def stream(context: Context) -> PageAnswer:
    """Notices as server-sent events."""
    name = context.path.get("queue", ALL_QUEUES)
    if name != ALL_QUEUES:
        context.desk.queue(name)  # refuses what can be no name
    return _open(context, _notices(context, name))


async def pulse(context: Context) -> PageAnswer:
    """Notices for pages of stores that tell nobody of changes: databases. Nothing is read here."""
    return _open(context, _beats(context))


def _open(context: Context, notices: AsyncGenerator[bytes, None]) -> PageAnswer:
    viewer, rates = context.principal.name, context.dashboard.rates
    rates.open_stream(viewer)
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return PageAnswer(
        200,
        content_type="text/event-stream",
        headers=headers,
        stream=notices,
        ended=lambda: rates.close_stream(viewer),
    )


async def _notices(context: Context, name: str) -> AsyncGenerator[bytes, None]:
    dashboard = context.dashboard
    yield b"retry: 2000\n\n"
    async with context.desk.hub.watch(name) as subscription:
        sent_at = time.monotonic()
        while not dashboard.is_closing:
            if await subscription.changed(_LOOK_S):
                yield b"event: changed\ndata: 1\n\n"
                sent_at = time.monotonic()
                await asyncio.sleep(_LEAST_BETWEEN_S)
            elif time.monotonic() - sent_at > _SIGN_OF_LIFE_S:
                yield b": here\n\n"
                sent_at = time.monotonic()


async def _beats(context: Context) -> AsyncGenerator[bytes, None]:
    yield b"retry: 2000\n\n"
    while not context.dashboard.is_closing:
        await asyncio.sleep(_PULSE_S)
        yield b"event: changed\ndata: 1\n\n"


ROUTES = (
    PageRoute("/stream", stream),
    PageRoute("/stream/{queue}", stream),
    PageRoute("/pulse", pulse, for_tenants=True),
)

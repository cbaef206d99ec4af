"""A dashboard over the shared server, and a client that speaks to it without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from bullpen import Bullpen
from bullpen.dashboard import Dashboard, make_dashboard
from bullpen.dashboard.access import Access
from bullpen.settings import DashboardSettings, Settings

HOST = "http://127.0.0.1:9467"
SAME = {"sec-fetch-site": "same-origin"}

HOSTILE = (
    "<script>window.hit=1</script>",
    "<img src=x onerror=window.hit=1>",
    '"><svg/onload=window.hit=1>',
    "' onmouseover='window.hit=1",
    "{{7*7}}{% raw %}",
    "javascript:window.hit=1",
    "</title><script>window.hit=1</script>",
    "</textarea><script>window.hit=1</script>",
    "a/../../b",
    "..",
    ".",
    "~x",
    "%2e%2e%2f",
    "\u202eevil\u202c",
    "\x1b[31mred\x07",
    "=cmd|' /C calc'!A0",
    "&lt;b&gt;",
    "quote\"and'quote",
    "\\u003cscript\\u003e",
    "שלום <b>x</b>",
    "very-" + "long" * 60,
)


def settings(url: str, **changes: Any) -> Settings:
    return Settings.load(environ={}, redis_url=url, **changes)


@asynccontextmanager
async def opened(
    url: str, *, access: Any = None, dashboard: DashboardSettings | None = None, client: str = "127.0.0.1"
) -> AsyncIterator[tuple[httpx.AsyncClient, Dashboard]]:
    """A dashboard and a client of it."""
    async with (
        Bullpen(settings=settings(url)) as app,
        make_dashboard(app, access=access, settings=dashboard or DashboardSettings()) as made,
        httpx.AsyncClient(transport=transport(made, client), base_url=HOST) as http,
    ):
        yield http, made


def transport(application: Any, client: str = "127.0.0.1") -> httpx.ASGITransport:
    return httpx.ASGITransport(application, client=(client, 50_000))


class As(Access):
    """Whoever the test says."""

    def __init__(self, principal: Any) -> None:
        self._principal = principal

    async def principal(self, request: Any, scope: Any) -> Any:
        return self._principal

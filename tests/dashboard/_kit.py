"""A dashboard over the shared server, and a client that speaks to it without a network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from bullpen import Bullpen
from bullpen.dashboard import Dashboard, Visitor, make_dashboard
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
    "<svg><script>window.hit=1</script></svg>",
    "<math><mtext></mtext><img src onerror=window.hit=1>",
    "<iframe srcdoc='<script>parent.hit=1</script>'>",
    "<a href='javascript:window.hit=1'>x</a>",
    "<object data='data:text/html,<script>parent.hit=1</script>'>",
    "<base href='http://elsewhere.example/'>",
    "<meta http-equiv=refresh content='0;url=http://elsewhere.example/'>",
    "<link rel=stylesheet href=http://elsewhere.example/x.css>",
    "<style>*{display:none}</style>",
    "<body onload=window.hit=1>",
    "<details open ontoggle=window.hit=1>x</details>",
    "<input autofocus onfocus=window.hit=1>",
    "<marquee onstart=window.hit=1>x</marquee>",
    "<video><source onerror=window.hit=1></video>",
    "<form action=http://elsewhere.example/><button>x</button></form>",
    "</script><script>window.hit=1</script>",
    "<!--<script>window.hit=1</script>-->",
    "<![CDATA[<script>window.hit=1</script>]]>",
    "<x/onclick=window.hit=1>x</x>",
    "<template><script>window.hit=1</script></template>",
    "`${window.hit=1}`",
    "${window.hit=1}",
    "{{constructor.constructor('window.hit=1')()}}",
    "{% include '/etc/passwd' %}",
    "{# hidden #}",
    "#{7*7}",
    "<%= 7*7 %>",
    "data:text/html,<script>window.hit=1</script>",
    "//elsewhere.example/x",
    "http://elsewhere.example/?q=1&r=2",
    "?a=b&c=d#e",
    "%00%0d%0aSet-Cookie:x=y",
    "a\r\nSet-Cookie: x=y",
    "+1+1|calc",
    "@SUM(1+1)",
    "-2+3",
    "\u0000\u0001\u001f",
    "\u200b\u200d\ufeff",
    "\U0001f4a3" * 20,
    "\u0301" * 80,
    "\udcff lone surrogate".encode("utf-8", "replace").decode(),
    "null",
    "__proto__",
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


async def visit(app: Bullpen, visitor: Visitor, *paths: str, data: Any = None) -> list[httpx.Response]:
    """What somebody gets at these paths, one after the other; with `data` the forms there are sent."""
    dashboard = make_dashboard(app, access=As(visitor))
    async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
        if data is None:
            answers = [await http.get(path) for path in paths]
        else:
            answers = [await http.post(path, data=data, headers=SAME) for path in paths]
    await dashboard.aclose()
    return answers

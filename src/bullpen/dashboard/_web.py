"""Requests, answers and addresses of the dashboard, on plain ASGI.

In: an ASGI scope. Out: a request whose path is cut into decoded segments, and answers that can be sent. Names of queues
and ids of jobs may hold slashes, dots and any other character: the path is cut before it is decoded, which routers of
frameworks do the other way round.
Elsewhere: who may do what (`access`, `guard`), what pages show (`pages`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode

import msgspec

from bullpen._kernel.json import lenient_text

__all__ = ["PageAnswer", "PageProblem", "PageRequest", "join", "json_bytes", "read_request", "segment"]

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

MOST_BODY: Final = 10 * 1024 * 1024
_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9._~-]+)+")
_HTML: Final = "text/html; charset=utf-8"
JSON: Final = "application/json"


class PageProblem(Exception):
    """Ends a request with a status and a sentence."""

    def __init__(self, status: int, text: str, *, hint: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.hint, self.headers = status, text, hint, dict(headers or {})


@dataclass(slots=True)
class PageRequest:
    """One request."""

    method: str
    segments: tuple[str, ...]
    """The decoded parts of the path, below where the dashboard is mounted and without `api/v1`."""
    is_api: bool
    base: str
    """What every link begins with: where the dashboard is mounted; empty at the root."""
    query: dict[str, str]
    headers: dict[str, str]
    """By names in lower case."""
    cookies: dict[str, str]
    client: str
    """Address of who connects."""
    is_tls: bool
    receive: Receive = field(repr=False)
    _body: bytes | None = None
    _merged: dict[str, str] | None = None

    @property
    def path(self) -> str:
        """The address of this page, below the mount, without its query."""
        return "/" + "/".join(segment(each) for each in self.segments)

    async def body(self) -> bytes:
        if self._body is None:
            parts, size = [], 0
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise PageProblem(400, "The request ended before it was complete.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MOST_BODY:
                    raise PageProblem(413, "The request is larger than 10 MiB.")
                if not message.get("more_body"):
                    break
            self._body = b"".join(parts)
        return self._body

    async def merge(self) -> dict[str, str]:
        """Read the query and the body as one form from now on. Raises PageProblem for a field that differs in them:
        of two scopes, nobody knows which one is meant."""
        if self._merged is None:
            body = await self.form()
            for name in self.query.keys() & body.keys():
                if self.query[name] != body[name]:
                    said = f"{self.query[name][:80]!r} in the address and {body[name][:80]!r} in the body"
                    raise PageProblem(400, f"{name} is {said}.")
            self._merged = {**self.query, **body}
        return self._merged

    async def form(self) -> dict[str, str]:
        """The fields of a form, or the members of a JSON object; lists and objects as JSON. With the query once it was
        merged."""
        if self._merged is not None:
            return self._merged
        if self._is_json:
            return {name: _as_field(value) for name, value in (await self._json()).items()}
        raw = await self.body()
        try:
            pairs = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=2_000, errors="replace")
        except (ValueError, UnicodeDecodeError):
            raise PageProblem(400, "The form cannot be read.") from None
        return dict(pairs)

    async def choices(self, name: str) -> list[str]:
        """All values of one field of a form: boxes that were ticked; or a list of texts in a JSON object."""
        if self._is_json:
            given = (await self._json()).get(name, [])
            return [_as_field(each) for each in (given if isinstance(given, list) else [given])]
        pairs = parse_qsl((await self.body()).decode("utf-8", "replace"), max_num_fields=2_000)
        return [value for key, value in pairs if key == name]

    @property
    def _is_json(self) -> bool:
        return self.headers.get("content-type", "").startswith(JSON)

    async def _json(self) -> dict[str, Any]:
        try:
            given = msgspec.json.decode(await self.body() or b"{}")
        except (msgspec.DecodeError, RecursionError) as error:
            raise PageProblem(400, f"The body is not JSON: {error}.") from None
        if not isinstance(given, dict):
            raise PageProblem(400, "The body is not a JSON object.")
        return given


@dataclass(slots=True)
class PageAnswer:
    """What is sent back."""

    status: int = 200
    body: bytes = b""
    content_type: str = _HTML
    headers: dict[str, str] = field(default_factory=dict)
    cookies: list[str] = field(default_factory=list)
    stream: AsyncGenerator[bytes, None] | None = None
    """Sent in parts, instead of the body, until the browser goes away."""
    ended: Callable[[], None] = lambda: None
    """Called when all was sent, or nobody wants the rest."""

    async def send(
        self, send: Send, more_headers: Mapping[str, str], *, head_only: bool, receive: Receive | None = None
    ) -> None:
        try:
            await self._send(send, more_headers, head_only, receive)
        finally:
            if self.stream is not None:
                await self.stream.aclose()
            self.ended()

    async def _send(
        self, send: Send, more_headers: Mapping[str, str], head_only: bool, receive: Receive | None
    ) -> None:
        headers = {"content-type": self.content_type, **more_headers, **self.headers}
        if self.stream is None:
            headers["content-length"] = str(len(self.body))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        raw += [(b"set-cookie", cookie.encode("latin-1")) for cookie in self.cookies]
        await send({"type": "http.response.start", "status": self.status, "headers": raw})
        if self.stream is not None and not head_only:
            async for part in _while_there(self.stream, receive):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        body = b"" if head_only or self.stream is not None else self.body
        await send({"type": "http.response.body", "body": body})


async def _while_there(stream: AsyncGenerator[bytes, None], receive: Receive | None) -> AsyncIterator[bytes]:
    """The parts of a stream, until they end or the browser is gone: nobody tells a stream that only waits."""
    if receive is None:
        async for part in stream:
            yield part
        return
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        while True:
            part_task = asyncio.ensure_future(anext(stream, None))
            await asyncio.wait([part_task, gone], return_when=asyncio.FIRST_COMPLETED)
            if not part_task.done():
                part_task.cancel()
                await asyncio.wait([part_task])
                return
            if (found := part_task.result()) is None:
                return
            yield found
    finally:
        gone.cancel()
        await asyncio.wait([gone])


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def read_request(scope: Mapping[str, Any], receive: Receive) -> PageRequest:
    """The request of a scope. Raises PageProblem for a path that cannot be read."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name = raw_name.decode("latin-1").lower()
        value = raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers and name != "cookie" else value
    raw_path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    path = raw_path.decode("latin-1").partition("?")[0]
    mounted = quote(scope.get("root_path", "")).rstrip("/")
    if mounted and (path == mounted or path.startswith(f"{mounted}/")):
        path = path[len(mounted) :]
    forwarded = headers.get("x-forwarded-prefix", "").rstrip("/")
    base = forwarded if forwarded and _PREFIX.fullmatch(forwarded) else mounted
    parts = [_decoded(each) for each in path.strip("/").split("/")] if path.strip("/") else []
    is_api = parts[:2] == ["api", "v1"]
    client = scope.get("client") or ("", 0)
    return PageRequest(
        method=scope["method"],
        segments=tuple(parts[2:] if is_api else parts),
        is_api=is_api,
        base=base,
        query=dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=100, errors="replace")),
        headers=headers,
        cookies=_cookies(headers.get("cookie", "")),
        client=str(client[0]),
        is_tls=scope.get("scheme") == "https",
        receive=receive,
    )


def json_bytes(value: Any) -> bytes:
    """A view as JSON. Texts of other clients may hold halves of characters, which UTF-8 has not: they stay escapes."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return lenient_text(msgspec.to_builtins(value)).encode()


def segment(text: str) -> str:
    """One part of a path. Browsers resolve `.` and `..`, also when they are escaped: these get a mark in front."""
    marked = f"~{text}" if text in ("", ".", "..") or text.startswith("~") else text
    return quote(marked, safe="", errors="surrogateescape")


def join(base: str, *parts: str, **query: object) -> str:
    """The address of a page: `join(base, "queues", name, state="failed")`. Empty values of the query are left out."""
    path = base + "/" + "/".join(segment(part) for part in parts)
    given = {name: str(value) for name, value in query.items() if value not in (None, "")}
    return f"{path}?{urlencode(given, errors='surrogateescape')}" if given else path


def _as_field(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return json_bytes(value).decode()
    return "1" if value is True else "" if value is None or value is False else str(value)


def _decoded(part: str) -> str:
    text = unquote_to_bytes(part).decode("utf-8", "surrogateescape")
    return text.removeprefix("~")


def _cookies(raw: str) -> dict[str, str]:
    found: SimpleCookie = SimpleCookie()
    try:
        found.load(raw)
    except CookieError:
        return {}
    return {name: morsel.value for name, morsel in found.items()}

"""Deliver a message as a webhook, signed by the rules of Standard Webhooks.

In: a message and the target's URL and secret. Out: accepted (2xx), refused (other 4xx, redirects, addresses that may
not be called), or unavailable (408, 425, 429, 5xx, no answer). `webhook-id` and `Idempotency-Key` are the message's
key, the same for every attempt; the message's own headers travel too. Elsewhere: connecting safely
(`bullpen.plugins._http`), what an answer means (`bullpen.outbox`).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypedDict
from urllib.parse import urlsplit

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen._version import __version__
from bullpen.errors import InvalidOption, require
from bullpen.plugins._http import (
    AddressGuard,
    AddressRefused,
    HttpClient,
    HttpFailed,
    check_url,
    header_text,
    hide_path,
)
from bullpen.plugins.channels._answers import read_answer, read_failure
from bullpen.ports.channel import ChannelHealth, Message, SendResult, WhenUnknown

__all__ = ["Webhook", "WebhookArguments"]

_SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - how secrets begin, not one of them
_OURS: Final = frozenset(
    {
        "content-type",
        "content-length",
        "host",
        "idempotency-key",
        "webhook-id",
        "webhook-timestamp",
        "webhook-signature",
        # Of one connection, not of a request: they would change how the body is read, or end in the receiver's proxy.
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "expect", "http2-settings"),
    }
)
_NOT_PASSED_ON: Final = _OURS | {
    # Of the connection, not of the message.
    *("connection", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
    # Whoever may write an event must not log in with our requests, nor send a login on to a partner.
    *("authorization", "cookie", "proxy-authorization"),
    # Notes of the outbox to itself.
    *("editof", "idempotencykey", "joboptions", "replayof"),
}
_is_header_name = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+").fullmatch


class WebhookArguments(TypedDict, total=False):
    """What `app.channels.webhook` takes besides the address: the arguments of `Webhook`."""

    secret: str | Iterable[str] | None
    timeout_ms: int
    headers: Mapping[str, str] | None
    body: Literal["event", "payload"]
    allow_http: bool
    allowed_networks: Iterable[str]
    tls: ssl.SSLContext | None
    now: Callable[[], float]


class Webhook:
    """One endpoint.

    `secret` is the shared key (`whsec_…`, base64); while one is being replaced give both, and both signatures are sent.
    `body="event"` sends `{"type", "timestamp", "data"}`, `body="payload"` the payload alone. Private addresses are
    refused unless their network is in `allowed_networks`.
    """

    when_unknown = WhenUnknown.RESEND
    """The target gets the same `webhook-id` and `Idempotency-Key` again."""

    def __init__(
        self,
        url: str,
        *,
        secret: str | Iterable[str] | None = None,
        timeout_ms: int = 5_000,
        headers: Mapping[str, str] | None = None,
        body: Literal["event", "payload"] = "event",
        allow_http: bool = False,
        allowed_networks: Iterable[str] = (),
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = check_url(url, allow_http=allow_http)
        secrets = [secret] if isinstance(secret, str) else list(secret or ())
        self._keys = [_read_secret(text) for text in secrets]
        self._timeout_ms = check_int("timeout_ms", timeout_ms, minimum=1)
        self._headers = {_check_header(name): _check_value(name, value) for name, value in (headers or {}).items()}
        require("body", body in ("event", "payload"), "'event' or 'payload'", body)
        self._body = body
        self._now = now
        self._guard = AddressGuard.allowing(allowed_networks)
        self._client = HttpClient(self._guard, tls=tls)

    def __repr__(self) -> str:
        return f"Webhook({hide_path(self._url)!r})"

    async def send(self, message: Message) -> SendResult:
        content = self._content(message)
        try:
            answer = await self._client.post(
                self._url,
                headers=self._all_headers(message, content),
                content=content,
                timeout_ms=message.limit_ms(self._timeout_ms),
            )
        except (AddressRefused, HttpFailed) as error:
            return read_failure(error)
        return read_answer(answer, now=self._now())

    def why_not(self, url: str) -> str | None:
        """Why an address can never be called; None: it may be. Asks nobody, so it knows no names."""
        allowed = self._guard.allows_host(urlsplit(url).hostname or "")
        return None if allowed else "an address that is public, or in one of the allowed networks"

    async def check(self) -> ChannelHealth:
        """Nothing can be said about a target without sending it something."""
        return ChannelHealth(True)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _content(self, message: Message) -> bytes:
        if self._body == "payload":
            return json.encode(message.payload)
        stored = datetime.fromtimestamp(message.created_ms / 1000, UTC).isoformat(timespec="milliseconds")
        event = {"type": message.event_type, "timestamp": stored.replace("+00:00", "Z"), "data": message.payload}
        return json.encode(event)

    def _all_headers(self, message: Message, content: bytes) -> dict[str, str]:
        timestamp, key = str(int(self._now())), header_text(message.idempotency_key)
        headers = {
            "content-type": "application/json",
            "user-agent": f"bullpen/{__version__}",
            "idempotency-key": key,
            "webhook-id": key,
            "webhook-timestamp": timestamp,
            "x-event-type": message.event_type,
            "x-outbox-id": message.id,
        }
        if self._keys:
            # The key as it is sent: nobody can verify what he does not see.
            signed = f"{key}.{timestamp}.".encode() + content
            headers["webhook-signature"] = " ".join(f"v1,{_sign(secret, signed)}" for secret in self._keys)
        ids = {
            "x-correlation-id": message.correlation_id,
            "x-tenant-id": message.tenant_id,
            "x-user-id": message.user_id,
        }
        headers |= {name: value for name, value in ids.items() if value}
        every = {**_passed_on(message.headers), **headers, **self._headers}
        return {name: header_text(value) for name, value in every.items()}


def _passed_on(headers: Mapping[str, Any]) -> dict[str, str]:
    """The headers of the message that a target may get: text as it is, other values as JSON, None not at all."""
    return {
        name.lower(): value if isinstance(value, str) else json.encode(value).decode()
        for name, value in headers.items()
        if value is not None and _is_header_name(name) and name.lower() not in _NOT_PASSED_ON
    }


def _read_secret(text: Any) -> bytes:
    """The key of a secret. Messages never show it."""
    if isinstance(text, str):
        try:
            key = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
        except ValueError:  # what is not base64, and what is not ASCII
            key = b""
        if len(key) >= 16:
            return key
    raise InvalidOption("secret", "'whsec_' and at least 16 bytes (better 24 to 64) in base64", "***")


def _sign(key: bytes, signed: bytes) -> str:
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def _check_header(name: str) -> str:
    fits = isinstance(name, str) and _is_header_name(name) is not None and name.lower() not in _OURS
    require("headers", fits, "names of headers that the webhook does not set itself", name)
    return name.lower()


def _check_value(name: str, value: Any) -> str:
    fits = isinstance(value, str) and value.isprintable()
    require(f"headers[{name!r}]", fits, "printable text", "***")
    return str(value)

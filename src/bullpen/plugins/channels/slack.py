"""Deliver a message to a channel of Slack through an incoming webhook: `slack:<name>`.

In: a payload with `text` or `blocks`, or any payload and a template for its event type. Out: posted. 429 is tried again
after `Retry-After`. The address of the webhook is its secret, so it is shown nowhere. Elsewhere: connecting safely
(`bullpen.plugins._http`).
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypedDict

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen._kernel.templates import Template
from bullpen.errors import MissingValue
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
from bullpen.ports.channel import ChannelHealth, Message, Refused, SendResult, WhenUnknown

__all__ = ["Slack", "SlackArguments"]

_MOST_TEXT: Final = 40_000


class SlackArguments(TypedDict, total=False):
    """What `app.channels.slack` takes besides the address: the arguments of `Slack`."""

    templates: Mapping[str, str] | None
    timeout_ms: int
    when_unknown: WhenUnknown | str
    allow_http: bool
    allowed_networks: Iterable[str]
    tls: ssl.SSLContext | None
    now: Callable[[], float]


class Slack:
    """One incoming webhook. `templates` are texts by event type, filled from the payload and escaped for Slack."""

    def __init__(
        self,
        url: str,
        *,
        templates: Mapping[str, str] | None = None,
        timeout_ms: int = 10_000,
        when_unknown: WhenUnknown | str = WhenUnknown.RESEND,
        allow_http: bool = False,
        allowed_networks: Iterable[str] = (),
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = check_url(url, allow_http=allow_http)
        self._templates = {
            name: Template(text, form="slack", values="payload") for name, text in (templates or {}).items()
        }
        self._timeout_ms = check_int("timeout_ms", timeout_ms, minimum=1)
        self.when_unknown = WhenUnknown(when_unknown)
        """Slack knows no idempotency key: after a lost answer a post may appear twice. `park` leaves it to a person."""
        self._now = now
        self._client = HttpClient(AddressGuard.allowing(allowed_networks), tls=tls)

    def __repr__(self) -> str:
        return f"Slack({hide_path(self._url)!r})"

    async def send(self, message: Message) -> SendResult:
        try:
            content = self._content(message)
        except (MissingValue, ValueError) as error:
            return Refused(str(error), "BAD_PAYLOAD")
        try:
            answer = await self._client.post(
                self._url,
                headers={"content-type": "application/json", "idempotency-key": header_text(message.idempotency_key)},
                content=json.encode(content),
                timeout_ms=message.limit_ms(self._timeout_ms),
            )
        except (AddressRefused, HttpFailed) as error:
            return read_failure(error)
        # Plain words such as `no_text` or `channel_is_archived`.
        told = answer.body[:100].decode("utf-8", "replace").strip()
        return read_answer(answer, now=self._now(), receipt=told, error=told)

    async def check(self) -> ChannelHealth:
        """Nothing can be said about it without posting something."""
        return ChannelHealth(True)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _content(self, message: Message) -> dict[str, Any]:
        template, payload = self._templates.get(message.event_type), message.payload
        if template is not None:
            content: dict[str, Any] = {"text": template.render(payload)}
        elif isinstance(payload, dict):
            content = {name: payload[name] for name in ("text", "blocks") if name in payload}
        else:
            content = {}
        text = content.get("text")
        if not content or not isinstance(text, str | None) or not isinstance(content.get("blocks", []), list):
            raise ValueError("the payload needs `text` (text) or `blocks` (a list), or its event type a template")
        if text is not None and len(text) > _MOST_TEXT:
            raise ValueError(f"the text has {len(text)} characters, Slack takes {_MOST_TEXT}")
        return content

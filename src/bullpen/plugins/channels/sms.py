"""Deliver a message as an SMS through a provider with an HTTP interface: `sms:<name>`.

In: a payload with `to` and `text`, or any payload and a template for its event type. Out: taken by the provider; its id
is the receipt. The shape is the common one: a form with To, From and Body, basic authentication, JSON with an id in the
answer. Such providers know no idempotency key, and a second SMS costs money and trust: when nobody knows whether one
was taken, it is left to a person, or looked up where the provider can be asked. Elsewhere: connecting safely
(`bullpen.plugins._http`).
"""

from __future__ import annotations

import base64
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypedDict
from urllib.parse import urlencode

import msgspec

from bullpen._kernel.duration import check_int, is_text
from bullpen._kernel.templates import Template
from bullpen.errors import MissingValue, require
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
from bullpen.ports.channel import Accepted, ChannelHealth, Message, Refused, SendResult, Unavailable, WhenUnknown

__all__ = ["Sms", "SmsArguments"]

LookUp = Callable[[Message], Awaitable[Accepted | Unavailable | None]]

_MOST_TEXT: Final = 1_600
_NUMBER: Final = "a number with its country, such as +4930123456"
_is_number = re.compile(r"\+[1-9][0-9]{6,14}").fullmatch


class SmsArguments(TypedDict, total=False):
    """What `app.channels.sms` takes: the arguments of `Sms`, in place of what is configured."""

    url: str | None
    account: str | None
    token: str | None
    sender: str | None
    templates: Mapping[str, str] | None
    look_up: LookUp | None
    when_unknown: WhenUnknown | str | None
    timeout_ms: int
    allow_http: bool
    allowed_networks: Iterable[str]
    tls: ssl.SSLContext | None
    now: Callable[[], float]


class Sms:
    """One account at a provider.

    `url` is where messages are posted to, such as `https://api.provider.example/Accounts/AC1/Messages.json`. `look_up`
    asks the provider whether it has a message; with it, what is unknown is looked up instead of parked.
    """

    def __init__(
        self,
        url: str,
        *,
        account: str,
        token: str,
        sender: str,
        templates: Mapping[str, str] | None = None,
        look_up: LookUp | None = None,
        when_unknown: WhenUnknown | str | None = None,
        timeout_ms: int = 10_000,
        allow_http: bool = False,
        allowed_networks: Iterable[str] = (),
        tls: ssl.SSLContext | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = check_url(url, allow_http=allow_http)
        for name, value in (("account", account), ("token", token), ("sender", sender)):
            require(name, is_text(value), "text", "***")
        self._login = base64.b64encode(f"{account}:{token}".encode()).decode()
        self._sender = sender
        self._templates = {name: Template(text, values="payload") for name, text in (templates or {}).items()}
        self._look_up = look_up
        default = WhenUnknown.PARK if look_up is None else WhenUnknown.LOOK_UP
        self.when_unknown = default if when_unknown is None else WhenUnknown(when_unknown)
        can = self.when_unknown is not WhenUnknown.LOOK_UP or look_up is not None
        require("when_unknown", can, "'resend' or 'park'; 'look_up' needs the argument look_up", when_unknown)
        self._timeout_ms = check_int("timeout_ms", timeout_ms, minimum=1)
        self._now = now
        self._client = HttpClient(AddressGuard.allowing(allowed_networks), tls=tls)

    def __repr__(self) -> str:
        return f"Sms({hide_path(self._url)!r})"

    async def send(self, message: Message) -> SendResult:
        try:
            to, text = self._content(message)
        except (MissingValue, ValueError) as error:
            return Refused(str(error), "BAD_PAYLOAD")
        try:
            answer = await self._client.post(
                self._url,
                headers={
                    "authorization": f"Basic {self._login}",
                    "content-type": "application/x-www-form-urlencoded",
                    "idempotency-key": header_text(message.idempotency_key),
                },
                content=urlencode({"To": to, "From": self._sender, "Body": text}).encode(),
                timeout_ms=message.limit_ms(self._timeout_ms),
            )
        except (AddressRefused, HttpFailed) as error:
            return read_failure(error)
        told = _read_body(answer.body)
        # Their texts repeat the number, so only their code is kept.
        code = f"code {told['code']}" if isinstance(told.get("code"), int) else ""
        if answer.status in (401, 403):
            # Our account is the problem, not this message: it must not cost every message its life.
            return Unavailable(f"the provider answered {answer.status}; check account and token", "SMS_LOGIN")
        return read_answer(answer, now=self._now(), receipt=str(told.get("sid") or told.get("id") or ""), error=code)

    async def look_up(self, message: Message) -> Accepted | Unavailable | None:
        """Whether the provider has it, by the function that was given."""
        assert self._look_up is not None
        return await self._look_up(message)

    def why_not(self, address: str) -> str | None:
        return None if _is_number(address) else _NUMBER

    async def check(self) -> ChannelHealth:
        """Nothing can be said about it without sending something."""
        return ChannelHealth(True)

    async def aclose(self) -> None:
        await self._client.aclose()

    def _content(self, message: Message) -> tuple[str, str]:
        payload = message.payload
        to = payload.get("to") if isinstance(payload, dict) else None
        if not isinstance(to, str) or self.why_not(to) is not None:
            raise ValueError(f"`to` must be {_NUMBER}")
        template = self._templates.get(message.event_type)
        text = payload.get("text") if template is None else template.render(payload)
        if not isinstance(text, str) or not text.strip():
            raise ValueError("the payload needs `text`, or its event type a template")
        if len(text) > _MOST_TEXT:
            raise ValueError(f"the text has {len(text)} characters, an SMS takes {_MOST_TEXT}")
        return to, text


def _read_body(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}

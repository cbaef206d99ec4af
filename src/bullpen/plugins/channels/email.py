"""Deliver a message as an email over SMTP: `email:<name>`.

In: a payload with `to`, `subject` and `text` (and `html`), or any payload and a template for its event type. Out: taken
by the server. The Message-ID is made from the idempotency key, so a mail that is sent twice is known again. One
recipient per message: a mail to several could be half delivered. No value of a payload can become a header. Elsewhere:
what an answer means for the message (`bullpen.outbox`).
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email import policy
from email.message import EmailMessage
from email.utils import format_datetime, parseaddr
from typing import Any, Final, Literal, TypedDict

from bullpen._kernel.duration import check_int
from bullpen._kernel.templates import Template, one_header
from bullpen.errors import MissingExtra, MissingValue, require
from bullpen.ports.channel import (
    Accepted,
    ChannelHealth,
    Message,
    Refused,
    SendResult,
    Unavailable,
    Unknown,
    WhenUnknown,
)

try:
    import aiosmtplib
except ImportError as error:
    raise MissingExtra("email", "the email channel") from error

__all__ = ["Email", "EmailArguments", "EmailTemplate"]

Security = Literal["starttls", "tls", "none"]

_PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
_is_address = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]{1,64}@[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
).fullmatch
_LOGIN_CODES: Final = frozenset({530, 534, 535, 538})


@dataclass(frozen=True, slots=True, kw_only=True)
class EmailTemplate:
    """How the mail of an event type is written: `EmailTemplate(subject="Order {order.id}", text="Dear {name}, …")`."""

    subject: str
    text: str
    html: str | None = None
    """Values are escaped; the text of the template itself is taken as it is."""
    to: str = "{to}"


class EmailArguments(TypedDict, total=False):
    """What `app.channels.email` takes: the arguments of `Email`, in place of what is configured."""

    sender: str | None
    port: int | None
    security: Security
    username: str | None
    password: str | None
    templates: Mapping[str, EmailTemplate] | None
    when_unknown: WhenUnknown | str
    timeout_ms: int
    tls: ssl.SSLContext | None


class Email:
    """One SMTP server and one sender.

    `security`: `starttls` (default) and `tls` refuse a server that cannot encrypt; `none` is for a server on this
    machine. `templates` are by event type.
    """

    def __init__(
        self,
        host: str,
        *,
        sender: str,
        port: int | None = None,
        security: Security = "starttls",
        username: str | None = None,
        password: str | None = None,
        templates: Mapping[str, EmailTemplate] | None = None,
        when_unknown: WhenUnknown | str = WhenUnknown.RESEND,
        timeout_ms: int = 20_000,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        require("security", security in _PORTS, " or ".join(map(repr, _PORTS)), security)
        self._from_address = parseaddr(sender)[1]
        fits = bool(_is_address(self._from_address)) and sender.isprintable()
        require("sender", fits, "an address such as 'Shop <shop@example.com>'", sender)
        require("username", (username is None) == (password is None), "user name and password, or neither", "***")
        self._sender, self._security = sender, security
        self._host, self._port = host, port or _PORTS[security]
        self._login = None if username is None or password is None else (username, password)
        self._templates = {name: _Compiled(template) for name, template in (templates or {}).items()}
        self.when_unknown = WhenUnknown(when_unknown)
        """A server that knows the Message-ID again drops the second copy; not all do. `park` leaves it to a person."""
        self._timeout_ms = check_int("timeout_ms", timeout_ms, minimum=1)
        self._tls = tls

    def __repr__(self) -> str:
        return f"Email({self._host!r}, port={self._port}, sender={self._sender!r})"

    async def send(self, message: Message) -> SendResult:
        try:
            to, mail = self._write(message)
            content = _serialised(mail)
        except (MissingValue, ValueError) as error:
            return Refused(str(error), "BAD_PAYLOAD")
        client = self._client(message.limit_ms(self._timeout_ms))
        is_leaving = False
        try:
            await client.connect()
            await client.mail(self._from_address)
            await client.rcpt(to)
            is_leaving = True
            answer = await client.data(content)
        except aiosmtplib.SMTPResponseException as error:
            return _read_refusal(error)
        except (aiosmtplib.SMTPException, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            return Unknown(reason, "NO_ANSWER") if is_leaving else Unavailable(reason, "NO_CONNECTION")
        finally:
            client.close()
        # Without its host the Message-ID does not look like somebody's address.
        return Accepted(f"{_digest(message)} {answer.code} {answer.message}"[:300])

    def why_not(self, address: str) -> str | None:
        return None if _is_address(address) and "=?" not in address else "one plain mail address"

    async def check(self) -> ChannelHealth:
        """Whether the server lets us in."""
        client = self._client(self._timeout_ms)
        try:
            await client.connect()
        except (aiosmtplib.SMTPException, OSError) as error:
            return ChannelHealth(False, f"{type(error).__name__}: {error}")
        finally:
            client.close()
        return ChannelHealth(True)

    async def aclose(self) -> None:
        """Nothing is kept open between messages."""

    def _client(self, timeout_ms: int) -> aiosmtplib.SMTP:
        user, password = self._login or (None, None)
        return aiosmtplib.SMTP(
            hostname=self._host,
            port=self._port,
            username=user,
            password=password,
            timeout=timeout_ms / 1000,
            use_tls=self._security == "tls",
            start_tls=self._security == "starttls",
            tls_context=self._tls,
        )

    def _write(self, message: Message) -> tuple[str, EmailMessage]:
        """The mail, deterministic: the same message is the same mail whenever it is sent."""
        template = self._templates.get(message.event_type)
        fields = template.fill(message.payload) if template is not None else _fields(message.payload)
        to = fields["to"]
        if not isinstance(to, str) or self.why_not(to) is not None:
            raise ValueError("`to` must be one plain mail address")
        mail = EmailMessage(policy=policy.SMTP)
        mail["From"], mail["To"] = self._sender, to
        mail["Subject"] = one_header(str(fields["subject"]))
        mail["Date"] = format_datetime(datetime.fromtimestamp(message.created_ms / 1000, UTC))
        mail["Message-ID"] = f"<{_digest(message)}@{self._from_address.partition('@')[2]}>"
        ids = {
            "X-Idempotency-Key": message.idempotency_key,
            "X-Event-Type": message.event_type,
            "X-Correlation-ID": message.correlation_id,
            "X-Tenant-ID": message.tenant_id,
        }
        for name, value in ids.items():
            if value:
                mail[name] = one_header(value)
        mail.set_content(str(fields["text"]))
        if fields.get("html") is not None:
            mail.add_alternative(str(fields["html"]), subtype="html")
        return to, mail


class _Compiled:
    def __init__(self, template: EmailTemplate) -> None:
        self._parts = {
            "to": Template(template.to, values="payload"),
            "subject": Template(template.subject, form="line", values="payload"),
            "text": Template(template.text, values="payload"),
            **({} if template.html is None else {"html": Template(template.html, form="html", values="payload")}),
        }

    def fill(self, payload: Any) -> dict[str, Any]:
        return {name: template.render(payload) for name, template in self._parts.items()}


def _digest(message: Message) -> str:
    """The idempotency key as a Message-ID can hold it."""
    return hashlib.sha256(message.idempotency_key.encode()).hexdigest()[:40]


def _serialised(mail: EmailMessage) -> bytes:
    """The mail as it leaves. Its head is read again as a receiver does: what writes it has let values through before.
    Raises ValueError when there is a header that nobody set, or one is missing."""
    content = mail.as_bytes(policy=policy.SMTP)
    lines = content.partition(b"\r\n\r\n")[0].split(b"\r\n")
    names = [line.partition(b":")[0].decode("ascii", "replace") for line in lines if not line.startswith((b" ", b"\t"))]
    if names != list(mail.keys()) or any(b"\r" in line or b"\n" in line for line in lines):
        raise ValueError("a value of the payload would have become a header of the mail")
    return content


def _fields(payload: Any) -> dict[str, Any]:
    if not isinstance(payload, dict) or not all(
        isinstance(payload.get(name), str) for name in ("to", "subject", "text")
    ):
        raise ValueError("the payload needs `to`, `subject` and `text`, or its event type a template")
    return payload


def _read_refusal(error: aiosmtplib.SMTPResponseException) -> SendResult:
    told = f"the server answered {error.code} {' '.join(error.message.split())}"[:500]
    if error.code in _LOGIN_CODES or isinstance(error, aiosmtplib.SMTPAuthenticationError):
        # Our login is the problem, not this message: it must not cost every message its life.
        return Unavailable(f"{told}; check user name and password", "SMTP_LOGIN")
    code = f"SMTP_{error.code}"
    return Refused(told, code) if 500 <= error.code < 600 else Unavailable(told, code)

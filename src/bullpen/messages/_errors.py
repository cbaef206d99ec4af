"""What an exception of a provider's client means for the message: sent, never, not now, or nobody knows.

In: whatever a function that sends has raised. Out: an answer, or None when it tells nothing. Clients are known by their
attributes and by the names of their classes, because none of them is a dependency of ours: httpx, requests, aiohttp and
urllib over HTTP, smtplib and aiosmtplib for mail. Elsewhere: what the answer means for the row (`sender`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any, Final

from bullpen._kernel.retry_after import retry_after_ms
from bullpen.ports.channel import Refused, SendResult, Unavailable

_TRY_AGAIN: Final = frozenset({408, 425, 429})
"""The 4xx that mean "not now"; all others mean "never"."""
_LOGIN: Final = frozenset({530, 534, 535})
_NOT_CONNECTED: Final = frozenset(
    {
        *("httpx.ConnectError", "httpx.ConnectTimeout", "httpx.PoolTimeout", "aiohttp.ClientConnectorError"),
        *("requests.ConnectTimeout", "urllib3.NewConnectionError", "urllib3.ConnectTimeoutError"),
        *("urllib3.NameResolutionError", "aiosmtplib.SMTPConnectError", "aiosmtplib.SMTPConnectTimeoutError"),
    }
)
"""Package and class of errors that come before anything was sent."""


def read_error(error: BaseException) -> SendResult | None:
    """The answer that an exception stands for. None: the provider may or may not have the message."""
    if (status := _http_status(error)) is not None:
        return _read_http(status, _header(error, "retry-after"))
    if (codes := _smtp_codes(error)) is not None:
        return _read_smtp(codes)
    for each in _chain(error):
        if isinstance(each, ConnectionRefusedError | socket.gaierror) or _NOT_CONNECTED & set(_names(each)):
            return Unavailable(f"{type(error).__name__}: {error}", "NO_CONNECTION")
    return None


def _read_http(status: int, retry_after: str) -> SendResult:
    told, code = f"the provider answered {status}", f"HTTP_{status}"
    if status in _TRY_AGAIN or status >= 500:
        return Unavailable(told, code, retry_after_ms(retry_after, time.time()))
    return Refused(told, code)


def _read_smtp(codes: list[int]) -> SendResult:
    code = max(codes)
    told = f"the server answered {code}"
    if code in _LOGIN:
        # Our login is the problem, not this message: it must not cost every message its life.
        return Unavailable(f"{told}; check user name and password", "SMTP_LOGIN")
    return Refused(told, f"SMTP_{code}") if 500 <= code < 600 else Unavailable(told, f"SMTP_{code}")


def _http_status(error: BaseException) -> int | None:
    """Of an answer that the client turned into an error."""
    if _package(error) in ("httpx", "requests"):
        return _status(getattr(getattr(error, "response", None), "status_code", None))
    if _package(error) == "aiohttp":
        return _status(getattr(error, "status", None))
    return _status(getattr(error, "code", None)) if "urllib.HTTPError" in _names(error) else None


def _status(value: Any) -> int | None:
    return value if isinstance(value, int) and 300 <= value < 600 else None


def _header(error: BaseException, name: str) -> str:
    headers = getattr(getattr(error, "response", error), "headers", None)
    return str(headers.get(name, "")) if headers is not None else ""


def _smtp_codes(error: BaseException) -> list[int] | None:
    if _package(error) not in ("smtplib", "aiosmtplib"):
        return None
    each: list[Any] = [getattr(error, "smtp_code", None), getattr(error, "code", None)]
    refused = getattr(error, "recipients", None)
    if isinstance(refused, dict):  # smtplib: address to (code, text)
        each += [code for code, _ in refused.values()]
    elif isinstance(refused, list | tuple):  # aiosmtplib: one error for each
        each += [getattr(one, "code", None) for one in refused]
    codes = [code for code in each if isinstance(code, int) and 400 <= code < 600]
    return codes or None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from; some clients only keep that among their arguments."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, BaseException) or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]


def _package(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _names(error: BaseException) -> list[str]:
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__]

"""What every request must pass, and what every answer carries.

In: a request. Out: nothing, or a PageProblem that refuses it: a Host that is not ours (DNS rebinding), a change that
comes from another page or without the token of its session, more requests than one visitor may send. And the headers
that let a browser run nothing but our own files.
Elsewhere: who the principal is (`access`).
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import time
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from bullpen.dashboard._web import PageProblem, PageRequest

__all__ = ["SAFE_METHODS", "Rates", "check_host", "check_origin", "check_token", "masked", "security_headers"]

SAFE_METHODS: Final = ("GET", "HEAD")
_LOCAL_NAMES: Final = ("localhost",)


def security_headers(frame_ancestors: str = "'none'") -> dict[str, str]:
    """For every answer. Trusted Types: no script of ours can turn text into HTML, not even by mistake."""
    return {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
            f"form-action 'self'; base-uri 'none'; frame-ancestors {frame_ancestors}; "
            "require-trusted-types-for 'script'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }


def check_host(request: PageRequest, allowed: Collection[str], *, any_host: bool = False) -> None:
    """Refuse a name that leads to us and is not ours: a page of a stranger can give its own name our address."""
    host = _name_of(f"//{request.headers.get('host', '')}")
    if any_host or host in allowed or host in _LOCAL_NAMES or host.endswith(".localhost"):
        return
    try:
        if ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:
        pass
    raise PageProblem(
        421, "This host name is not configured.", hint="Add it to BULLPEN_DASHBOARD_HOSTS, or use the address itself."
    )


def _name_of(address: str) -> str:
    """The host in an address that anybody may have sent; empty when it has none."""
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:  # such as a bracket that is not closed
        return ""


def _place_of(address: str) -> str:
    """The same with its port."""
    return urlsplit(address).netloc.lower() if _name_of(address) else ""


def check_origin(request: PageRequest) -> None:
    """Refuse a change that another site asked for. Programs send neither header, and cookies of nobody."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site == "same-origin":
            return
        raise PageProblem(403, "This change was requested by another site and was refused.")
    origin = request.headers.get("origin")
    if origin is None:
        if "cookie" not in request.headers or "authorization" in request.headers:
            return
        raise PageProblem(403, "This change does not name the page that requested it and was refused.")
    place = _place_of(origin)
    if not place or place != request.headers.get("host", "").lower():
        raise PageProblem(403, "This change was requested by another site and was refused.")


def masked(token: str) -> str:
    """The token of a session as a form carries it: different each time, so that no size tells of it."""
    raw = bytes.fromhex(token)
    pad = secrets.token_bytes(len(raw))
    return (pad + bytes(one ^ other for one, other in zip(raw, pad, strict=True))).hex()


def _unmasked(text: str) -> str:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return ""
    half = len(raw) // 2
    return bytes(one ^ other for one, other in zip(raw[:half], raw[half:], strict=False)).hex()


def check_token(expected: str, given: str) -> None:
    """Refuse a change without the token of the session."""
    if expected and not hmac.compare_digest(expected, _unmasked(given)):
        raise PageProblem(403, "This form is too old, or not from this session. Go back, reload, and send it again.")


class Rates:
    """How many requests each principal may send: so many a second on average, more for a moment."""

    def __init__(self, per_second: float = 50.0, burst: int = 200, most_streams: int = 20) -> None:
        self._per_second, self._burst, self._most_streams = per_second, burst, most_streams
        self._left: dict[str, tuple[float, float]] = {}
        self._streams: dict[str, int] = {}

    def count(self, name: str) -> None:
        """Count one request; raises PageProblem when there were too many."""
        now = time.monotonic()
        left, at = self._left.pop(name, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_second)
        if left < 1:
            self._left[name] = (left, now)
            raise PageProblem(429, "Too many requests.", headers={"retry-after": "1"})
        self._left[name] = (left - 1, now)
        while len(self._left) > 10_000:  # the one that was quiet for longest
            self._left.pop(next(iter(self._left)))

    def open_stream(self, name: str) -> None:
        """Count one stream that stays open; raises PageProblem when there are too many."""
        if self._streams.get(name, 0) >= self._most_streams:
            raise PageProblem(
                429, f"More than {self._most_streams} pages are open at once.", headers={"retry-after": "5"}
            )
        self._streams[name] = self._streams.get(name, 0) + 1

    def close_stream(self, name: str) -> None:
        self._streams[name] -= 1
        if not self._streams[name]:
            del self._streams[name]

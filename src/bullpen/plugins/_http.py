"""The one door to HTTP: short requests to addresses that were looked at first.

In: a URL that somebody configured, perhaps a customer. Out: status, headers and the beginning of the body, or
HttpFailed. No redirects, no cookies, no proxy from the environment, no hidden retry, a deadline for the whole exchange.

A URL of a customer must not lead into our own network. Checking the name and then connecting by name would leave a
moment in which the answer of the name server can change, so the name is resolved once, every address of it is checked,
and the connection goes to a checked address, while TLS and the Host header still use the name. Names are resolved in
threads of their own, one per name at a time: a name server that lets us wait holds up nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit

from bullpen._kernel.addresses import hide_path, show_address
from bullpen._kernel.duration import check_texts
from bullpen.errors import InvalidOption, MissingExtra

try:
    import httpcore2
except ImportError as error:
    raise MissingExtra("http", "webhooks and other targets over HTTP") from error

__all__ = ["AddressGuard", "AddressRefused", "HttpAnswer", "HttpClient", "HttpFailed", "check_url", "hide_path"]

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

_MOST_BODY_BYTES: Final = 4_096
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")

# Written out, because what the standard library calls global has changed from release to release.
_NOT_PUBLIC: Final = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "168.63.129.16/32",  # a public address, behind which Azure answers every machine with its own secrets
        # ::/96 holds "compatible" IPv4 addresses, ::ffff:0:0:0/96 translated ones, 2001::/23 Teredo and the like,
        # 2002::/16 6to4: all can carry a private IPv4 address inside.
        *(
            "::/96",
            "::ffff:0:0:0/96",
            "64:ff9b:1::/48",
            "100::/64",
            "2001::/23",
            "2001:db8::/32",
            "2002::/16",
            "3fff::/20",
            "5f00::/16",
        ),
        *("fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
    )
)


class HttpFailed(Exception):
    """No answer: the connection failed, broke, or the time was over.

    `was_sent`: the request had begun to leave, so nobody knows whether the target acted. Otherwise it did not.
    """

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(reason)
        self.was_sent = was_sent


class AddressRefused(Exception):
    """The name leads to an address that may not be called. Nothing was sent."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes
    """The beginning of it."""


@dataclass(frozen=True, slots=True)
class AddressGuard:
    """Which addresses may be called: public ones, and networks that were allowed by name."""

    allowed_networks: tuple[IpNetwork, ...] = ()

    @classmethod
    def allowing(cls, networks: Iterable[str]) -> AddressGuard:
        """`AddressGuard.allowing(["10.1.0.0/16"])`. Raises InvalidOption for what is no network."""
        parsed = []
        for network in check_texts("allowed_networks", networks):
            try:
                parsed.append(ipaddress.ip_network(network))
            except ValueError as error:
                raise InvalidOption("allowed_networks", "networks such as '10.1.0.0/16'", network) from error
        return cls(tuple(parsed))

    def allows(self, address: IpAddress) -> bool:
        """True for a public address, and for one that was allowed."""
        plain = _unwrap(address)
        if any(plain.version == network.version and plain in network for network in self.allowed_networks):
            return True
        return not any(plain.version == network.version and plain in network for network in _NOT_PUBLIC)


def _unwrap(address: IpAddress) -> IpAddress:
    """The IPv4 address inside an IPv6 one, where that is where packets would go."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def check_url(url: str, *, allow_http: bool = False) -> str:
    """Return a URL that may be called: https (http only where allowed), a host, no user or password in it."""
    schemes = ("https", "http") if allow_http else ("https",)
    try:
        parts = urlsplit(url)
        fits = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except (ValueError, AttributeError, TypeError):
        fits = False
    if not fits:
        raise InvalidOption(
            "url", f"an address that starts with {' or '.join(f'{scheme}://' for scheme in schemes)}", show_address(url)
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidOption("url", "an address without user and password", "***")
    if any(not 32 < ord(character) < 127 for character in url):
        # Characters of other scripts may become digits and dots on the way to the resolver.
        raise InvalidOption(
            "url", "an address in plain ASCII: names as xn--…, other characters as %XX, no spaces", hide_path(url)
        )
    return url


class HttpClient:
    """Keeps connections open between requests. Belongs to one event loop."""

    def __init__(
        self, guard: AddressGuard | None = None, *, tls: ssl.SSLContext | None = None, max_connections: int = 100
    ) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=tls or _default_tls(),
            max_connections=max_connections,
            max_keepalive_connections=20,
            keepalive_expiry=10.0,
            network_backend=_PinnedBackend(guard or AddressGuard()),
        )

    async def post(self, url: str, *, headers: Mapping[str, str], content: bytes, timeout_ms: int) -> HttpAnswer:
        """Send one request. The time is for everything: name, connection, TLS, sending, and the answer's beginning.

        Raises AddressRefused before anything was sent, HttpFailed when no status came. An answer whose body is cut or
        takes too long is an answer with less of a body: what the target decided has arrived.
        """
        timeout_s, progress = timeout_ms / 1000, _Progress()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(url, headers, content, timeout_s, progress)
        except AddressRefused:
            raise
        except _FAILURES as error:
            if progress.answer is not None:  # it answered: what the rest of the body would have said changes nothing
                return progress.answer
            raise _failed(error, timeout_ms, was_sent=progress.was_sent) from error

    async def _exchange(
        self, url: str, headers: Mapping[str, str], content: bytes, timeout_s: float, progress: _Progress
    ) -> HttpAnswer:
        timeouts = {"connect": timeout_s, "read": timeout_s, "write": timeout_s, "pool": timeout_s}
        async with self._pool.stream(
            "POST",
            url,
            headers=list(headers.items()),
            content=content,
            extensions={"timeout": timeouts, "trace": progress},
        ) as response:
            body = b""
            decoded = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
            progress.answer = HttpAnswer(response.status, decoded, b"")
            # Closed explicitly: a body that is not read to its end must give up its connection now, not when collected.
            async with contextlib.aclosing(response.aiter_stream()) as parts:
                async for part in parts:
                    body += part
                    progress.answer = HttpAnswer(response.status, decoded, body[:_MOST_BODY_BYTES])
                    if len(body) >= _MOST_BODY_BYTES:
                        break
            return progress.answer

    async def aclose(self) -> None:
        await self._pool.aclose()


@cache
def _default_tls() -> ssl.SSLContext:
    """One for all: reading the certificates of the system takes a tenth of a second."""
    return ssl.create_default_context()


class _Progress:
    """Watches one request: has any of it left, and what has come back so far?"""

    was_sent = False
    answer: HttpAnswer | None = None

    async def __call__(self, event: str, _info: Mapping[str, Any]) -> None:
        if event.endswith("send_request_headers.started"):
            self.was_sent = True


_FAILURES: Final = (
    *(TimeoutError, httpcore2.TimeoutException, httpcore2.NetworkError, httpcore2.ProtocolError),
    *(httpcore2.ProxyError, OSError, ssl.SSLError),
)


def _failed(error: BaseException, timeout_ms: int, *, was_sent: bool) -> HttpFailed:
    if isinstance(error, TimeoutError | httpcore2.TimeoutException):
        return HttpFailed(f"no answer within {timeout_ms} ms", was_sent=was_sent)
    return HttpFailed(f"{type(error).__name__}: {error}", was_sent=was_sent)


def _errno_of(error: BaseException) -> str:
    """Why, as the system says it, without the address that its own text has."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return f" ({os.strerror(cause.errno)})"
        cause = cause.__cause__ or cause.__context__
    return ""


AddressInfo = list[tuple[Any, ...]]


class _Resolver:
    """Asks the system for the addresses of names. The default executor of the loop is for everybody: a few names whose
    servers do not answer would hold up all that needs a thread. Here a name has one thread at a time, whoever asks for
    it, and the threads end with the process."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], asyncio.Future[AddressInfo]] = {}

    async def resolve(self, host: str, port: int) -> AddressInfo:
        """As `socket.getaddrinfo`. Raises OSError."""
        key = (host, port)
        if key not in self._asked:
            if len(self._asked) >= _MOST_LOOKUPS:
                raise OSError(f"{_MOST_LOOKUPS} names are being resolved already")
            self._ask(key)
        # Shielded: one that gives up must not end it for others, nor let a second thread wait for the same name.
        return await asyncio.shield(self._asked[key])

    def _ask(self, key: tuple[str, int]) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AddressInfo] = loop.create_future()
        self._asked[key] = answer

        def settle(found: AddressInfo | None, error: Exception | None) -> None:
            self._asked.pop(key, None)
            if answer.cancelled():
                return
            if error is None and found is not None:
                answer.set_result(found)
            else:
                answer.set_exception(error or OSError("no answer"))
                answer.exception()  # whoever asked may be gone

        def ask() -> None:
            found: AddressInfo | None = None
            problem: Exception | None = None
            try:
                found = list(socket.getaddrinfo(*key, type=socket.SOCK_STREAM))
            except OSError as error:
                problem = error
            except Exception as error:  # noqa: BLE001 - such as a name that cannot be encoded
                problem = OSError(str(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, found, problem)

        threading.Thread(target=ask, name="bullpen name", daemon=True).start()


_MOST_LOOKUPS: Final = 200
_resolvers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Resolver] = weakref.WeakKeyDictionary()


def _resolver() -> _Resolver:
    """One for all channels of a loop."""
    return _resolvers.setdefault(asyncio.get_running_loop(), _Resolver())


class _PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to addresses that were resolved and checked here, and to nothing else."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard = guard
        self._inner = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in await self._resolve(host, port):
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout=timeout, local_address=local_address, socket_options=socket_options
                )
            except httpcore2.ConnectTimeout as error:
                failure = error
            except httpcore2.ConnectError as error:
                # In words of our own: theirs name the address, which may be one of our network.
                failure = httpcore2.ConnectError(f"{host} does not accept connections{_errno_of(error)}")
        raise failure

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore2.AsyncNetworkStream:
        raise AddressRefused("unix sockets are never called")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _resolve(self, host: str, port: int) -> list[str]:
        """Addresses of a name, all of them allowed: one forbidden among them is a trap, not bad luck."""
        try:
            found = await _resolver().resolve(host, port)
        except OSError as error:
            raise httpcore2.ConnectError(f"{host} cannot be resolved: {error.strerror or error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        for address in addresses:
            if not self._guard.allows(ipaddress.ip_address(address.partition("%")[0])):
                # Without the address: a customer who reads the stored error would map our network with it.
                raise AddressRefused(f"{host} leads to an address that is not public")
        return addresses

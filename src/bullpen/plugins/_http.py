"""The one door to HTTP: short requests to addresses that were looked at first.

In: a URL that somebody configured, perhaps a customer. Out: status, headers and the beginning of the body, or
HttpFailed. No redirects, no cookies, no proxy from the environment, no hidden retry, a deadline for the whole exchange.

A URL of a customer must not lead into our own network. Checking the name and then connecting by name would leave a
moment in which the answer of the name server can change, so the name is resolved once, every address of it is checked,
and the connection goes to a checked address, while TLS and the Host header still use the name. Names are resolved in
threads of their own, one per name and a few per domain at a time: a name server that lets us wait holds up its own
names.
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
from collections import Counter
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

__all__ = [
    "AddressGuard",
    "AddressRefused",
    "HttpAnswer",
    "HttpClient",
    "HttpFailed",
    "check_url",
    "header_text",
    "hide_path",
]

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

    def allows_host(self, host: str) -> bool:
        """False for an address that is written out and may not be called. A name is looked at when it is called."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return True
        return self.allows(address)

    def allows(self, address: IpAddress) -> bool:
        """True for a public address, and for one that was allowed."""
        plain = _unwrap(address)
        if any(plain.version == network.version and plain in network for network in self.allowed_networks):
            return True
        if any(plain.version == network.version and plain in network for network in _NOT_PUBLIC):
            return False
        inner = _isatap(plain)
        return inner is None or self.allows(inner)


def _unwrap(address: IpAddress) -> IpAddress:
    """The IPv4 address inside an IPv6 one, where that is where packets would go."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _isatap(address: IpAddress) -> ipaddress.IPv4Address | None:
    """The IPv4 address at the end of an IPv6 one to which a router of that scheme (RFC 5214) would send packets."""
    if isinstance(address, ipaddress.IPv6Address) and int(address) >> 32 & 0xFDFFFFFF == 0x5EFE:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None


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
            "url", "an address in ASCII: names as xn--…, other characters as %XX, no spaces", hide_path(url)
        )
    return url


def header_text(value: str) -> str:
    """Text as a header can carry it: what ASCII has not is percent-encoded, line breaks can never get in.

    So are spaces at its ends, which every receiver cuts off.
    """
    text = "".join(
        character
        if 32 <= ord(character) < 127
        else "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "replace"))
        for character in value
    )
    inner = text.lstrip(" ")
    start = "%20" * (len(text) - len(inner))
    return start + inner.rstrip(" ") + "%20" * (len(inner) - len(inner.rstrip(" ")))


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
                return await self._exchange("POST", url, headers, content, timeout_s, progress)
        except AddressRefused:
            raise
        except _FAILURES as error:
            if progress.status is not None:  # it answered: what the rest of the body would have said changes nothing
                return progress.answer(_MOST_BODY_BYTES)
            # A local error is about a request that cannot be written: none of it has left.
            was_sent = progress.was_sent and not isinstance(error, httpcore2.LocalProtocolError)
            raise _failed(error, timeout_ms, was_sent=was_sent) from error

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        content: bytes = b"",
        timeout_ms: int,
        most_bytes: int,
    ) -> HttpAnswer:
        """As `post`, for those who need the whole body, up to `most_bytes` of it: one that is cut raises HttpFailed."""
        timeout_s, progress = timeout_ms / 1000, _Progress()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(method, url, headers, content, timeout_s, progress, most_bytes)
        except AddressRefused:
            raise
        except _FAILURES as error:
            raise _failed(error, timeout_ms, was_sent=progress.was_sent) from error

    async def _exchange(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes,
        timeout_s: float,
        progress: _Progress,
        most_bytes: int = _MOST_BODY_BYTES,
    ) -> HttpAnswer:
        timeouts = {"connect": timeout_s, "read": timeout_s, "write": timeout_s, "pool": timeout_s}
        async with self._pool.stream(
            method,
            url,
            headers=list(headers.items()),
            content=content,
            extensions={"timeout": timeouts, "trace": progress},
        ) as response:
            progress.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers
            }
            progress.status = response.status
            # Closed explicitly: a body that is not read to its end must give up its connection now, not when collected.
            async with contextlib.aclosing(response.aiter_stream()) as parts:
                async for part in parts:
                    progress.body += part
                    if len(progress.body) >= most_bytes:
                        break
            return progress.answer(most_bytes)

    async def aclose(self) -> None:
        await self._pool.aclose()


@cache
def _default_tls() -> ssl.SSLContext:
    """One for all: reading the certificates of the system takes a tenth of a second."""
    return ssl.create_default_context()


class _Progress:
    """Watches one request: has any of it left, and what has come back so far?"""

    def __init__(self) -> None:
        self.was_sent = False
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.body = bytearray()

    def answer(self, most_bytes: int) -> HttpAnswer:
        return HttpAnswer(self.status or 0, self.headers, bytes(self.body[:most_bytes]))

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


_MOST_LOOKUPS: Final = 200
_MOST_LOOKUPS_OF_DOMAIN: Final = 10
"""The rest wait, as long as their delivery does."""


class _Resolver:
    """Asks the system for the addresses of names. The default executor of the loop is for everybody: a few names whose
    servers do not answer would hold up all that needs a thread. Here a name has one thread at a time, whoever asks for
    it and for which port. A lookup cannot be stopped and outlives who asked for it, so a domain, which one customer can
    fill with names, has few of them. The threads end with the process."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[list[str]]] = {}
        self._domains: Counter[str] = Counter()
        self._has_ended = asyncio.Event()

    async def resolve(self, host: str) -> list[str]:
        """The addresses of a name; an address is its own. Raises OSError."""
        if _is_address(host):
            return [host]
        name = host.lower().rstrip(".")
        while name not in self._asked and not self._has_room(name):
            await self._has_ended.wait()
        if name not in self._asked:
            self._ask(name)
        # Shielded: one that gives up must not end it for others, nor let a second thread wait for the same name.
        return await asyncio.shield(self._asked[name])

    def _has_room(self, name: str) -> bool:
        return len(self._asked) < _MOST_LOOKUPS and self._domains[_domain(name)] < _MOST_LOOKUPS_OF_DOMAIN

    def _ask(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[str]] = loop.create_future()
        self._asked[name] = answer
        self._domains[_domain(name)] += 1

        def settle(found: list[str], error: Exception | None) -> None:
            del self._asked[name]
            self._domains -= Counter([_domain(name)])
            self._has_ended.set()
            self._has_ended = asyncio.Event()
            if answer.cancelled():
                return
            if error is None:
                answer.set_result(found)
            else:
                answer.set_exception(error)
                answer.exception()  # whoever asked may be gone

        def ask() -> None:
            found: list[str] = []
            problem: Exception | None = None
            try:
                entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
                found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except OSError as error:
                problem = error
            except Exception as error:  # noqa: BLE001 - such as a name that cannot be encoded
                problem = OSError(str(error))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, found, problem)

        threading.Thread(target=ask, name="bullpen name", daemon=True).start()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _domain(name: str) -> str:
    """What somebody can register, roughly: `a.b.shop.example` is of `shop.example`, `a.shop.co.uk` of `shop.co.uk`."""
    labels = name.split(".")
    return ".".join(labels[-3:] if len(labels) > 2 and len(labels[-2]) <= 3 else labels[-2:])


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
        for address in await self._resolve(host):
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

    async def _resolve(self, host: str) -> list[str]:
        """Addresses of a name, all of them allowed: one forbidden among them is a trap, not bad luck."""
        try:
            addresses = await _resolver().resolve(host)
        except OSError as error:
            raise httpcore2.ConnectError(f"{host} cannot be resolved: {error.strerror or error}") from error
        for address in addresses:
            if not self._guard.allows(ipaddress.ip_address(address.partition("%")[0])):
                # Without the address: a customer who reads the stored error would map our network with it.
                raise AddressRefused(f"{host} resolves to an address that is not public")
        return addresses

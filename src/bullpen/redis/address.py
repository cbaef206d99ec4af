"""What a user may write to say where Redis is, and what we make of it.

In: a URL, or its parts by keyword. Out: one of three addresses: a server, the sentinels that know the server, or the
seeds of a cluster. Nothing here connects. Elsewhere: asking sentinels and clusters (`discovery`), connecting
(`client`).
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from bullpen._kernel.addresses import show_address
from bullpen._kernel.logs import showable
from bullpen._kernel.scrub import scrub
from bullpen.errors import ConnectionLost, InvalidOption, require

Command = tuple[str | bytes | int, ...]
Password = str | Callable[[], str]
"""Text, or a function that is asked each time a connection is opened."""

URL_FORMS: Final = (
    "redis://host:port/db, rediss://host:port/db, unix:///path/to/socket, redis+sentinel://host:port,host:port/service "
    "or redis+cluster://host:port,host:port or embedded://directory; special "
    "characters in user name and password percent-encoded"
)
_DEFAULT_PORTS: Final = {"redis": 6379, "redis+sentinel": 26379, "redis+cluster": 6379}
_LOGIN: Final = ("username", "password")
_TLS: Final = ("ca", "cert", "key", "verify")
_SENTINEL_LOGIN: Final = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where one server is and how to introduce ourselves."""

    host: str = "localhost"
    port: int = 6379
    path: str | None = None
    """A unix socket; host and port are then unused."""
    db: int = 0
    username: str | None = None
    password: Password | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        require("port", _is_whole(self.port) and 0 < self.port < 65536, "a port from 1 to 65535", self.port)
        require("db", _is_whole(self.db) and self.db >= 0, "a database number from 0", self.db)
        require("password", self.username is None or self.password is not None, "a password beside `username`", None)

    def __str__(self) -> str:
        return f"unix:{self.path}" if self.path else host_and_port(self.host, self.port)

    def at(self, host: str, port: int) -> NodeAddress:
        """The same introduction, to another server."""
        return dataclasses.replace(self, host=host, port=port)

    def greeting(self, client_name: str | None) -> list[Command]:
        """The commands that open a connection, in order. Asks for the password where that is a function, which may
        take its time. Raises ConnectionLost when it gives none: it is asked again with the next attempt."""
        commands: list[Command] = []
        password = _asked(self.password) if callable(self.password) else self.password
        if password is not None:
            commands.append(("AUTH", self.username, password) if self.username else ("AUTH", password))
        if self.db:
            commands.append(("SELECT", self.db))
        if client_name:
            commands.append(("CLIENT", "SETNAME", client_name))
        return commands


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelAddress:
    """A service that sentinels watch over; they know which server is its primary now."""

    seeds: tuple[NodeAddress, ...]
    """The sentinels, with their own user and password."""
    service: str
    node: NodeAddress
    """How to introduce ourselves to the primary; its host and port are what the sentinels say."""

    def __str__(self) -> str:
        return f"service {self.service!r} of sentinels {', '.join(map(str, self.seeds))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """A cluster, of which at least one seed must answer."""

    seeds: tuple[NodeAddress, ...]

    @property
    def node(self) -> NodeAddress:
        """How to introduce ourselves to any node."""
        return self.seeds[0]

    def __str__(self) -> str:
        return f"cluster {', '.join(map(str, self.seeds))}"


Address = NodeAddress | SentinelAddress | ClusterAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """What keywords add to a URL, or say instead of one."""

    db: int | None = None
    username: str | None = None
    password: Password | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: Password | None = field(default=None, repr=False)

    def applied_to(self, address: Address) -> Address:
        for name in _SENTINEL_LOGIN:
            fits = getattr(self, name) is None or isinstance(address, SentinelAddress)
            require(name, fits, "redis+sentinel://… beside it", str(address))
        if isinstance(address, NodeAddress):
            return self._with(address)
        if isinstance(address, ClusterAddress):
            require("db", not self.db, "no database number: a cluster has only number 0", self.db)
            return ClusterAddress(seeds=tuple(map(self._with, address.seeds)))
        watchers = Login(username=self.sentinel_username, password=self.sentinel_password, tls=self.tls)
        return dataclasses.replace(
            address, node=self._with(address.node), seeds=tuple(map(watchers._with, address.seeds))
        )

    def _with(self, endpoint: NodeAddress) -> NodeAddress:
        given = {
            name: value
            for name, value in (
                ("db", self.db),
                ("username", self.username),
                ("password", self.password),
                ("tls", self.tls),
            )
            if value is not None
        }
        return dataclasses.replace(endpoint, **given) if given else endpoint  # type: ignore[arg-type]  # checked above


class NoPassword(ConnectionLost):
    """The function that knows the password gave none; it is asked again with the next attempt."""


def _asked(password: Callable[[], str]) -> str:
    failure: Exception | None = None
    try:
        given = password()
    except Exception as error:  # noqa: BLE001 - whatever it is, the password is not known
        failure = error
    if failure is not None:
        # Raised here and not above: what the error says, and what it came from, may be the password itself.
        why = f"{type(failure).__name__}: {scrub(str(failure))}" if str(failure) else type(failure).__name__
        raise NoPassword(f"the function for the password failed: {why}") from showable(failure)
    if not isinstance(given, str):
        raise NoPassword(f"the function for the password returned {type(given).__name__}, not text")
    return given


def parse_url(url: str) -> Address:
    """Read a URL. TLS certificates are verified unless it says `?verify=no`. Messages never show a password."""
    try:
        parts = _split(url)
        scheme = parts.scheme.replace("rediss", "redis", 1)
        if parts.scheme == "unix":
            return _socket(parts)
        if scheme not in _DEFAULT_PORTS:
            raise _unreadable(url)
        query = _query(parts, (*_LOGIN, *(_TLS if scheme != parts.scheme else ()), *_extras(scheme)))
        hosts = [_host_and_port(text, _DEFAULT_PORTS[scheme]) for text in _authority(parts)[1].split(",")]
        username, password = _login(parts, query)
        node = NodeAddress(
            host=hosts[0][0],
            port=hosts[0][1],
            username=username,
            password=password,
            tls=_tls_context(query) if scheme != parts.scheme else None,
        )
        path = unquote(parts.path.strip("/"))
    except InvalidOption:
        raise
    except ValueError:
        raise _unreadable(url) from None  # the cause would show a part of the URL, perhaps of the password
    shown = show_address(url)
    match scheme:
        case "redis+sentinel":
            require("connection", bool(path), "the name of the service after the sentinels: /service", shown)
            watcher = dataclasses.replace(
                node, username=query.get("sentinel_username"), password=query.get("sentinel_password")
            )
            return SentinelAddress(
                seeds=tuple(watcher.at(*host) for host in hosts),
                service=path,
                node=dataclasses.replace(node, db=_number(query.get("db", "0"), url)),
            )
        case "redis+cluster":
            require("connection", path in ("", "0"), "no database number: a cluster has only number 0", shown)
            return ClusterAddress(seeds=tuple(node.at(*host) for host in hosts))
    require("connection", len(hosts) == 1, f"one host, or {URL_FORMS}", shown)
    return dataclasses.replace(node, db=_number(path or query.get("db", "0"), url))


def host_and_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def verified_tls() -> ssl.SSLContext:
    """TLS as it should be: the system's authorities, and the host's name must match."""
    return ssl.create_default_context()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unreadable(url: str) -> InvalidOption:
    if url.startswith("embedded:"):
        expected = "the address of a server; the embedded one is opened by `connection=` of Queue, Worker and Bullpen"
        return InvalidOption("connection", expected, show_address(url))
    return InvalidOption("connection", URL_FORMS, show_address(url))


def _number(text: str, url: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidOption("connection", "a database number: a whole number from 0", show_address(url))
    return int(text)


def _extras(scheme: str) -> tuple[str, ...]:
    return {"redis": ("db",), "redis+sentinel": ("db", *_SENTINEL_LOGIN)}.get(scheme, ())


class _Parts(NamedTuple):
    scheme: str
    authority: str
    path: str
    query: str


def _split(url: str) -> _Parts:
    """Cut a URL at its marks. Not `urlsplit`: which brackets it takes in a list of hosts changes with its version."""
    scheme, _, rest = url.strip().partition(":")
    rest, _, query = rest.partition("#")[0].partition("?")
    authority, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest)
    return _Parts(scheme.lower(), authority, slash + path, query)


def _query(parts: _Parts, known: Collection[str]) -> dict[str, str]:
    query = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    for name in query:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            expected = f"one of {', '.join(sorted(known))} after the `?` of {parts.scheme}://"
            raise InvalidOption("connection", expected, name, suggestion=near[0] if near else None)
    return query


def _authority(parts: _Parts) -> tuple[str, str]:
    """(user information, hosts). Only the last @ divides them."""
    user, _, hosts = parts.authority.rpartition("@")
    return user, hosts


def _login(parts: _Parts, query: Mapping[str, str]) -> tuple[str | None, str | None]:
    username, colon, password = _authority(parts)[0].partition(":")
    if username and not colon:
        raise ValueError("a user name without a password")
    return (
        unquote(username) or query.get("username"),
        unquote(password) if password else query.get("password"),
    )


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or not host or (rest and not rest.startswith(":")):
            raise ValueError("brackets of an IPv6 address")
        host, port = str(ipaddress.IPv6Address(unquote(host))), rest[1:]
    else:
        host, _, port = text.partition(":")
        host = unquote(host)
    if port and not (port.isascii() and port.isdigit()):
        raise ValueError("a port is a number")
    return host or "localhost", int(port) if port else default_port


def _socket(parts: _Parts) -> NodeAddress:
    query = _query(parts, ("db", *_LOGIN))
    path = unquote(_authority(parts)[1] + parts.path)
    require("connection", bool(path), "a socket path after unix://", "unix://")
    username, password = _login(parts, query)
    return NodeAddress(path=path, db=_number(query.get("db", "0"), "unix://…"), username=username, password=password)


def _tls_context(query: Mapping[str, str]) -> ssl.SSLContext:
    verify = query.get("verify", "yes")
    require("connection", verify in ("yes", "ca", "no"), "verify=yes, verify=ca or verify=no", f"verify={verify}")
    require("connection", "key" not in query or "cert" in query, "cert=<file> beside key=<file>", "key without cert")
    try:
        context = ssl.create_default_context(cafile=query.get("ca"))
    except OSError as error:
        expected = f"ca=<file with certificates> that can be read ({error.strerror or error})"
        raise InvalidOption("connection", expected, query.get("ca")) from error
    if verify != "yes":
        # `ca`: who signed it counts, its name does not. Sentinels and clusters hand out addresses that no
        # certificate may name.
        context.check_hostname = False
    if verify == "no":
        context.verify_mode = ssl.CERT_NONE
    if "cert" in query:
        try:
            context.load_cert_chain(query["cert"], query.get("key"))
        except OSError as error:
            expected = f"cert=<file> and key=<file> that match each other ({error.strerror or error})"
            raise InvalidOption("connection", expected, query["cert"]) from error
    return context

"""Where the server is, in the forms that PyPI's `bullmq` takes.

In: nothing (localhost:6379, whatever is configured elsewhere), a URL, `embedded://` too, a dictionary of redis-py's
arguments, a redis-py client, or a Connection. Out: a Connection. A redis-py client is asked for its address and never
spoken through: blocking reads and numbered calls need sockets of our own.
"""

from __future__ import annotations

import importlib
import ssl
from typing import Any, Final
from urllib.parse import quote

from bullpen._kernel.ids import check_prefix
from bullpen.compat.bullmq._names import check_names
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.redis.address import NodeAddress, host_and_port
from bullpen.redis.client import Connection

_ADDRESS: Final = frozenset(
    {"host", "port", "db", "username", "password", "ssl", "unix_socket_path", "path", "socket_connect_timeout"}
)
_TLS: Final = frozenset(
    {"ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"}
    | {"ssl_password", "ssl_cert_reqs", "ssl_check_hostname"}
)
_OF_THE_CLIENT: Final = frozenset(
    {"decode_responses", "encoding", "encoding_errors", "retry", "retry_on_error", "retry_on_timeout", "protocol"}
    | {"single_connection_client", "socket_timeout", "socket_keepalive", "socket_keepalive_options", "socket_type"}
    | {"socket_read_size", "health_check_interval", "client_name", "lib_name", "lib_version", "max_connections"}
    | {"auto_close_connection_pool", "credential_provider"}
)
"""How redis-py reads, waits and repeats: ours has rules of its own for that."""
ARGUMENTS: Final = _ADDRESS | _TLS | _OF_THE_CLIENT


def prefix_of(opts: Any) -> str:
    """The key prefix. PyPI's clients take `bull`, whatever is configured elsewhere."""
    return check_prefix(opts.get("prefix", "bull"))


def connection_of(opts: Any) -> tuple[Connection, bool]:
    """The connection that the options name, and whether it is ours to close. Raises InvalidOption."""
    given = opts.get("connection")
    if isinstance(given, Connection):
        return given, False
    if given is None:
        return Connection(host="localhost", port=6379), True
    if isinstance(given, str):
        return _from_url(given), True
    if isinstance(given, dict):
        return _from_arguments(given), True
    return _from_client(given), True


def _from_url(url: str) -> Connection:
    if url.startswith("embedded:"):
        from bullpen.app import connect  # loaded where it is wanted: it brings the embedded server with it

        return connect(url)
    return Connection(url)


def _from_client(client: Any) -> Connection:
    if (nodes := getattr(client, "nodes_manager", None)) is not None:
        login = getattr(client, "connection_kwargs", None) or getattr(nodes, "connection_kwargs", {})
        seeds = ",".join(host_and_port(node.host, node.port) for node in nodes.startup_nodes.values())
        return Connection(f"redis+cluster://{seeds}", **_login(login), tls=_tls_of(login))
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        # The kind alone: what somebody took for a client may hold a password.
        kind = type(client).__name__
        raise InvalidOption("connection", "a URL, a dictionary, a redis-py client or a Connection", kind)
    arguments = {**pool.connection_kwargs, "connection_class": pool.connection_class}
    if (sentinels := getattr(pool, "sentinel_manager", None)) is not None:
        return _from_sentinels(sentinels, pool.service_name, arguments)
    known = _ADDRESS | _TLS  # what else its library keeps there is about itself
    address = {name: value for name, value in arguments.items() if name in known}
    return _from_arguments({**address, "ssl": _is_tls(arguments)})


def _from_sentinels(sentinels: Any, service: str, arguments: dict[str, Any]) -> Connection:
    """Nothing in the arguments is the address of a server: sentinels are asked for it."""
    watchers = [each.connection_pool.connection_kwargs for each in sentinels.sentinels]
    seeds = ",".join(host_and_port(each["host"], each["port"]) for each in watchers)
    return Connection(
        f"redis+sentinel://{seeds}/{quote(service, safe='')}",
        **_login(arguments),
        db=arguments.get("db") or None,
        sentinel_username=watchers[0].get("username") or None,
        sentinel_password=_text_of(watchers[0].get("password")),
        tls=_tls_of(arguments),
    )


def _login(given: dict[str, Any]) -> dict[str, Any]:
    return {"username": given.get("username") or None, "password": _text_of(given.get("password"))}


def _is_tls(given: dict[str, Any]) -> bool:
    """Some of its clients say it, others have a class of connections for it, or one derived from that."""
    kinds = getattr(given.get("connection_class"), "__mro__", ())
    return bool(given.get("ssl")) or any("SSL" in kind.__name__ for kind in kinds)


def _tls_of(given: dict[str, Any]) -> bool | ssl.SSLContext:
    return _tls(given) if _is_tls(given) else False


def _from_arguments(given: dict[str, Any]) -> Connection:
    check_names(given, ARGUMENTS, "an argument of redis.asyncio.Redis", "connection")
    login = {"db": given.get("db") or None, **_login(given)}
    if (wait_s := given.get("socket_connect_timeout")) is not None:
        login["connect_timeout_ms"] = max(1, round(wait_s * 1000))
    if path := given.get("unix_socket_path") or given.get("path"):
        return Connection(f"unix://{quote(str(path))}", **login)
    if given.get("ssl"):
        login["tls"] = _tls(given)
    return Connection(host=str(given.get("host") or "localhost"), port=int(given.get("port") or 6379), **login)


def _text_of(password: Any) -> str | None:
    return None if not password else password.decode() if isinstance(password, bytes) else str(password)


def _tls(given: dict[str, Any]) -> ssl.SSLContext:
    context = ssl.create_default_context(
        cafile=given.get("ssl_ca_certs"), capath=given.get("ssl_ca_path"), cadata=given.get("ssl_ca_data")
    )
    if given.get("ssl_cert_reqs") in ("none", ssl.CERT_NONE):  # the caller's word, as with redis-py
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif given.get("ssl_check_hostname") is False:
        context.check_hostname = False
    if certificate := given.get("ssl_certfile"):
        password = given.get("ssl_keyfile_password") or given.get("ssl_password")
        context.load_cert_chain(certificate, given.get("ssl_keyfile"), password)
    return context


def raw_client(opts: Any) -> Any:
    """A redis-py client for the same server: the caller's own, or a new one, where that library is installed."""
    given = opts.get("connection")
    if hasattr(given, "connection_pool") or hasattr(given, "nodes_manager"):
        return given
    try:
        library = importlib.import_module("redis.asyncio")
    except ImportError as error:
        raise NotConfigured(
            "`client` is a redis-py client, and redis-py is not installed: pip install redis"
        ) from error
    if isinstance(given, str) and given.startswith("embedded:"):
        node = _from_url(given).address  # starts that server, as first use does
        assert isinstance(node, NodeAddress)  # it is one server
        place = {"unix_socket_path": node.path} if node.path else {"host": node.host, "port": node.port}
        return library.Redis(decode_responses=True, db=node.db, **place)
    if isinstance(given, str):
        return library.from_url(given, decode_responses=True)
    if given is None or isinstance(given, dict):
        return library.Redis(decode_responses=True, **{"host": "localhost", "port": 6379, **(given or {})})
    kind = type(given).__name__
    raise InvalidOption("connection", "a URL, a dictionary or a redis-py client, to have a `client`", kind)

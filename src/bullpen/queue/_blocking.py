"""Blocking clients for threads that have no event loop.

In: a Connection. Out: redis-py clients to the same servers that the event loop's doors find. Elsewhere: the doors
(`_redis`), how answers about primaries are read (`_discovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Final

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bullpen.errors import ServerRefused
from bullpen.queue._address import Endpoint
from bullpen.queue._discovery import Directory, Shard, pick
from bullpen.queue._redis import Connection
from bullpen.wire.scripts import Script

BlockingClient = redis.Redis

# redis-py tells the server its own name and version, for which the least rights are not enough: each connection would
# leave two entries in the server's ACL log. How to stop that depends on its version.
_NO_SELF_PRAISE: Final[dict[str, Any]] = (
    {"driver_info": None} if find_spec("redis.driver_info") else {"lib_name": None, "lib_version": None}
)


def blocking_client(connection: Connection, key: str | None = None) -> BlockingClient:
    """A client to the server that holds `key` now. Closing it closes its sockets.

    It repeats nothing by itself: a renewal that comes late twice is worse than one that fails.
    """
    return _client(find(connection, key), connection.connect_timeout_s, connection.command_timeout_s)


def evaluate(client: BlockingClient, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
    """One script call, as the doors of a loop make it."""
    execute: Callable[..., Any] = client.execute_command
    try:
        return execute("EVALSHA", script.sha1, len(keys), *keys, *args)
    except redis.exceptions.NoScriptError:
        return execute("EVAL", script.body, len(keys), *keys, *args)


def find(connection: Connection, key: str | None = None) -> Endpoint:
    """Where the server is; asks sentinels or the cluster. Raises what redis-py raises, ConnectionLost or
    ServerRefused."""
    address, directory = connection.address, connection.directory
    if directory is None:
        assert isinstance(address, Endpoint)
        return address
    return pick(_ask(directory, connection.connect_timeout_s), key)


def _ask(directory: Directory, timeout_s: float) -> list[Shard]:
    reasons: list[tuple[Endpoint, Exception]] = []
    for asked in directory.candidates():
        client = _client(asked, timeout_s, timeout_s)
        try:
            execute: Callable[..., Any] = client.execute_command
            return directory.read(asked, execute(*directory.question))
        except redis.ResponseError as error:
            reasons.append((asked, ServerRefused(str(error))))
        except (redis.RedisError, OSError) as error:
            reasons.append((asked, error))
        finally:
            client.close()
    raise directory.nobody(reasons)


def _client(endpoint: Endpoint, connect_timeout_s: float, command_timeout_s: float) -> BlockingClient:
    options: dict[str, Any] = {
        "db": endpoint.db,
        "username": endpoint.username,
        "password": endpoint.password,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": command_timeout_s,
        **_NO_SELF_PRAISE,
    }
    if endpoint.path:
        pool = redis.ConnectionPool(connection_class=redis.UnixDomainSocketConnection, path=endpoint.path, **options)
    else:
        kind = redis.Connection if endpoint.tls is None else _tls_connection(endpoint)
        options |= {"host": endpoint.host, "port": endpoint.port, "socket_connect_timeout": connect_timeout_s}
        pool = redis.ConnectionPool(connection_class=kind, **options)
    return redis.Redis.from_pool(pool)


def _tls_connection(endpoint: Endpoint) -> type[redis.Connection]:
    """redis-py builds its own TLS context from options; ours is ready made and verified, so it is put in its place."""
    context = endpoint.tls

    class OurTls(redis.Connection):
        def _connect(self) -> Any:
            connect: Callable[[], Any] = super()._connect
            plain = connect()
            assert context is not None
            try:
                return context.wrap_socket(plain, server_hostname=endpoint.host)
            except BaseException:
                plain.close()
                raise

    return OurTls

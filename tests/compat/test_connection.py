"""What the import shim makes of connections of redis-py: the same server, as encrypted, and no password for others."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster

from bullpen import Queue
from bullpen.compat.bullmq._connection import connection_of, raw_client
from bullpen.errors import InvalidOption
from bullpen.redis.address import ClusterAddress, NodeAddress, SentinelAddress

SECRET = "hunter-2-hunter"


class Wiretap:
    """Whoever listens at the place of a server: takes what comes and answers nothing."""

    def __init__(self) -> None:
        self.heard = b""
        self.has_heard = asyncio.Event()
        self.port = 0

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard += await reader.read(4_096)
        self.has_heard.set()
        writer.close()


@pytest.fixture
async def wiretap() -> AsyncIterator[Wiretap]:
    tap = Wiretap()
    server = await asyncio.start_server(tap.listen, "127.0.0.1", 0)
    tap.port = server.sockets[0].getsockname()[1]
    async with server:
        yield tap


def clusters(port: int) -> dict[str, Any]:
    login: dict[str, Any] = {"ssl": True, "username": "u", "password": SECRET}
    waiting = redis.cluster.RedisCluster.__new__(redis.cluster.RedisCluster)  # making one asks the server
    nodes = redis.cluster.NodesManager.__new__(redis.cluster.NodesManager)
    nodes.startup_nodes = {"x": redis.cluster.ClusterNode("127.0.0.1", port)}  # type: ignore[no-untyped-call]
    nodes.connection_kwargs = login
    waiting.nodes_manager = nodes
    return {"asyncio": redis.asyncio.RedisCluster(host="127.0.0.1", port=port, **login), "blocking": waiting}


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_cluster_client_with_tls_stays_encrypted(wiretap: Wiretap, kind: str) -> None:
    connection, _ = connection_of({"connection": clusters(wiretap.port)[kind]})

    async with asyncio.timeout(20), Queue("{shop}", connection=connection) as queue:
        asked = asyncio.create_task(queue.is_paused())
        await wiretap.has_heard.wait()
        asked.cancel()
        await asyncio.wait([asked])
    await connection.aclose()

    assert isinstance(connection.address, ClusterAddress)
    assert wiretap.heard[:1] == b"\x16"  # a TLS handshake
    assert SECRET.encode() not in wiretap.heard


async def test_a_cluster_client_without_tls_has_none() -> None:
    client = redis.asyncio.RedisCluster(host="::1", port=7_000)
    connection, _ = connection_of({"connection": client})

    assert isinstance(connection.address, ClusterAddress)
    assert connection.address.seeds == (NodeAddress(host="::1", port=7_000),)


async def test_a_class_of_connections_that_is_derived_from_tls_is_tls() -> None:
    class Ours(redis.asyncio.connection.SSLConnection):
        pass

    pool = redis.asyncio.ConnectionPool(connection_class=Ours, host="db", password=SECRET)
    connection, _ = connection_of({"connection": redis.asyncio.Redis(connection_pool=pool)})

    assert isinstance(connection.address, NodeAddress)
    assert isinstance(connection.address.tls, ssl.SSLContext)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_client_behind_sentinels_asks_sentinels(has_tls: bool) -> None:
    """And gives its password to no server that happens to be on this machine."""
    watched = redis.asyncio.sentinel.Sentinel(  # type: ignore[no-untyped-call]
        [("one", 26_379), ("two", 26_380)], sentinel_kwargs={"password": "of-sentinels"}
    )
    client = watched.master_for("shop", password=SECRET, db=2, ssl=has_tls)

    connection, _ = connection_of({"connection": client})

    address = connection.address
    assert isinstance(address, SentinelAddress)
    assert address.service == "shop"
    assert [(each.host, each.port, each.password) for each in address.seeds] == [
        ("one", 26_379, "of-sentinels"),
        ("two", 26_380, "of-sentinels"),
    ]
    assert (address.node.db, address.node.password, address.node.tls is not None) == (2, SECRET, has_tls)


@pytest.mark.parametrize(
    "given",
    [{"host": "h", "pasword": SECRET}, {"auth": SECRET}, ("h", 6_379, SECRET), [SECRET]],
    ids=lambda given: type(given).__name__,
)
def test_an_error_shows_no_value(given: Any) -> None:
    """A password whose name is misspelt is still one."""
    for read in (connection_of, raw_client):
        if read is raw_client and isinstance(given, dict):
            continue
        with pytest.raises(InvalidOption) as raised:
            read({"connection": given})
        assert SECRET not in str(raised.value)

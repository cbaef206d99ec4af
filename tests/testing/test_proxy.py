"""The fault proxy: transparent until told otherwise, and then exactly as told."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from bullpen.testing import FaultProxy, RedisServer
from bullpen.testing._resp import RespFramer

# The proxy's counters and data are looked at, not queues.
pytestmark = [pytest.mark.leaves_queue_broken]


@pytest.fixture
def proxy(redis_server: RedisServer, redis_url: str) -> Iterator[FaultProxy]:
    with FaultProxy(redis_server) as proxy:
        yield proxy


def _connect(proxy: FaultProxy, *, protocol: int = 2, timeout: float = 5) -> redis.Redis:
    return redis.Redis.from_url(proxy.url, protocol=protocol, socket_timeout=timeout, retry=Retry(NoBackoff(), 0))


def _read_until_reset(raw: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            chunk = raw.recv(100)
        except ConnectionResetError:
            return received
        assert chunk, "the connection ended with FIN"
        received += chunk


@pytest.mark.parametrize("protocol", [2, 3])
def test_commands_pipelines_and_big_values_pass_unchanged(proxy: FaultProxy, protocol: int) -> None:
    """Without an ordered fault nobody may notice the proxy."""
    big = bytes(range(256)) * 40_000
    with _connect(proxy, protocol=protocol) as client:
        client.set("big", big)
        client.hset("hash", mapping={"a": "1", "b": ""})
        pipeline = client.pipeline(transaction=True)
        for number in range(500):
            pipeline.rpush("list", number)

        lengths = pipeline.execute()

        assert client.get("big") == big
        assert client.hgetall("hash") == {b"a": b"1", b"b": b""}
        assert lengths == list(range(1, 501))
        assert client.get("nothing") is None
    counters = proxy.counters
    assert counters.connections == 1
    assert counters.requests == counters.replies
    assert counters.bytes_to_server > len(big)
    assert counters.bytes_to_client > len(big)


def test_a_unix_socket_can_be_behind_it(redis_server: RedisServer, redis_url: str) -> None:
    """The embedded server has no TCP port."""
    with FaultProxy(redis_server.unix_url) as proxy, _connect(proxy) as client:
        assert client.ping()
    with FaultProxy(redis_server.url) as proxy, _connect(proxy) as client:
        assert client.ping()
    with pytest.raises(ValueError, match="expected redis://host:port"):
        FaultProxy("http://example.org")


def test_a_lost_reply_leaves_the_command_done(proxy: FaultProxy, redis_server: RedisServer) -> None:
    """This is the fault that makes an honest client add a job twice."""
    with _connect(proxy) as client:
        client.ping()
        fault = proxy.lose_reply(b"INCR")

        with pytest.raises(redis.ConnectionError):
            client.incr("counter")

        fault.wait()
        assert fault.count == 1
        assert redis_server.command("GET", "counter") == b"1"
        assert client.incr("counter") == 2
    assert proxy.counters.lost_replies == 1
    assert proxy.counters.resets == 1


def test_only_the_reply_that_was_meant_is_lost(proxy: FaultProxy) -> None:
    """Replies that came before it in the same pipeline are delivered."""
    fault = proxy.lose_reply(b"LAST")
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(b"*2\r\n$4\r\nECHO\r\n$5\r\nFIRST\r\n*2\r\n$4\r\nECHO\r\n$4\r\nLAST\r\n")

        assert _read_until_reset(raw) == b"$5\r\nFIRST\r\n"
    fault.wait()


def test_a_torn_reply_ends_in_the_middle(proxy: FaultProxy) -> None:
    """Half a reply must not be taken for a whole one."""
    proxy.lose_reply(b"ECHO", torn=True)
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(b"*2\r\n$4\r\nECHO\r\n$8\r\nabcdefgh\r\n")

        assert _read_until_reset(raw) == b"$8\r\nabc"


def test_losses_can_be_skipped_repeated_and_cancelled(proxy: FaultProxy, redis_server: RedisServer) -> None:
    """A test aims at the n-th call."""
    fault = proxy.lose_reply(b"INCR", times=2, skip=1)
    with _connect(proxy) as client:
        assert client.incr("counter") == 1
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                client.incr("counter")
        assert client.incr("counter") == 4
        never = proxy.lose_reply(b"GET")
        with pytest.raises(TimeoutError, match="lost 0 of 1 messages with b'GET'"):
            never.wait(timeout=0.01)
        never.cancel()
        assert client.get("counter") == b"4"
    assert fault.count == 2


async def test_a_lost_request_never_reaches_the_server(proxy: FaultProxy, redis_server: RedisServer) -> None:
    """The same error for the client, and the opposite truth."""
    fault = proxy.lose_request(b"INCR")
    with _connect(proxy) as client, pytest.raises(redis.ConnectionError):
        client.incr("counter")

    await fault.happened()

    assert redis_server.command("GET", "counter") is None
    assert proxy.counters.lost_requests == 1


def test_latency_delays_both_ways_and_keeps_order(proxy: FaultProxy) -> None:
    """Pipelined commands are each late, not late one after the other."""
    proxy.latency(100)
    with _connect(proxy) as client:
        client.ping()
        pipeline = client.pipeline(transaction=False)
        for number in range(50):
            pipeline.echo(str(number))

        began = time.monotonic()
        replies = pipeline.execute()
        took = time.monotonic() - began

        assert replies == [str(number).encode() for number in range(50)]
        assert 0.19 < took < 5.0, "one after the other they would take ten seconds"
        proxy.latency(requests_ms=0, replies_ms=0)
        client.ping()


def test_a_stalled_connection_is_silent_and_goes_on(proxy: FaultProxy) -> None:
    """What was held back arrives; nothing is lost and nothing is closed."""
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.settimeout(0.1)
        with proxy.stalled():
            raw.sendall(b"PING\r\n")
            with pytest.raises(TimeoutError):
                raw.recv(100)

        raw.settimeout(5)
        assert raw.recv(100) == b"+PONG\r\n"


def test_stalled_replies_let_the_server_act(proxy: FaultProxy, redis_server: RedisServer) -> None:
    """The half-dead connection: commands arrive, answers do not."""
    with _connect(proxy, timeout=0.2) as client:
        client.ping()
        proxy.stall(requests=False)
        with pytest.raises(redis.TimeoutError):
            client.incr("counter")

        assert redis_server.command("GET", "counter") == b"1"
        proxy.unstall()


def test_reset_and_cut_look_different_to_the_client(proxy: FaultProxy) -> None:
    """RST is an error, FIN is an end; clients handle them in different code."""
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(b"PING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"
        assert proxy.open_connections == 1
        assert proxy.cut() == 1
        assert raw.recv(100) == b""

    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(b"PING\r\n")
        assert raw.recv(100) == b"+PONG\r\n"
        assert proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            raw.recv(100)

    assert (proxy.counters.cuts, proxy.counters.resets) == (1, 1)


def test_refusing_keeps_open_connections_and_the_port(proxy: FaultProxy) -> None:
    """A full backlog or a firewall: old clients work, new ones do not."""
    with _connect(proxy) as old, _connect(proxy) as new:
        old.ping()
        proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            new.ping()
        assert old.ping()

        proxy.accept()
        assert new.ping()


def test_refusing_for_a_while_ends_by_itself(proxy: FaultProxy) -> None:
    """A test that blocks can let the outage end without help."""
    proxy.refuse(0.05)
    deadline = time.monotonic() + 5
    with _connect(proxy) as client:
        while True:
            try:
                assert client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline


def test_an_outage_ends_everything_for_a_block(proxy: FaultProxy) -> None:
    """The server is gone, and comes back where it was."""
    with _connect(proxy) as client:
        client.ping()
        with proxy.outage(), pytest.raises(redis.ConnectionError):
            client.ping()
        assert client.ping()


def test_a_dead_server_behind_it_resets_new_connections() -> None:
    """A client must not hang on a proxy that has nothing behind it."""
    with RedisServer.start() as server, FaultProxy(server) as proxy, _connect(proxy) as client:
        client.ping()
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        with pytest.raises(redis.ConnectionError):
            client.ping()

        server.restart()

        assert client.ping()


def test_bytes_that_are_no_protocol_end_only_their_connection(proxy: FaultProxy) -> None:
    """A scanner at the port must not stop the proxy."""
    with socket.create_connection(("127.0.0.1", proxy.port)) as raw:
        raw.sendall(b"*x\r\n")
        assert raw.recv(100) == b""
    with _connect(proxy) as client:
        assert client.ping()


def test_closing_twice_is_fine(redis_server: RedisServer) -> None:
    """Fixtures and `with` blocks may both clean up."""
    proxy = FaultProxy(redis_server)
    with _connect(proxy) as client:
        client.ping()
        proxy.close()
        proxy.close()
        with pytest.raises(redis.ConnectionError):
            client.ping()


VALUES = [
    b"+OK\r\n",
    b"-ERR no\r\n",
    b":7\r\n",
    b"$-1\r\n",
    b"$0\r\n\r\n",
    b"$7\r\na\r\n*2\r\n\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
    b"*1\r\n*1\r\n*0\r\n",
    b"%1\r\n+key\r\n%0\r\n",
    b"~2\r\n:1\r\n_\r\n",
    b">2\r\n+invalidate\r\n*1\r\n$1\r\nk\r\n",
    b"|1\r\n+ttl\r\n:5\r\n$1\r\na\r\n",
    b"=5\r\ntxt:a\r\n",
    b"PING\r\n",
    b",1.5\r\n",
    b"#t\r\n",
    b"(123\r\n",
]


@given(st.lists(st.sampled_from(VALUES), max_size=20), st.lists(st.integers(1, 9), min_size=1, max_size=50))
def test_values_are_cut_apart_wherever_the_packets_end(values: list[bytes], sizes: list[int]) -> None:
    """TCP knows no messages."""
    stream, framer, found, number = b"".join(values), RespFramer(), [], 0
    while stream:
        size = sizes[number % len(sizes)]
        found += framer.feed(stream[:size])
        stream, number = stream[size:], number + 1

    assert found == values

"""Durability levels of `add`: what is true when it returns."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from bullpen.errors import DurabilityUnknown, InvalidOption
from bullpen.queue import Durability, Queue
from bullpen.redis import Connection
from bullpen.sync import Queue as BlockingQueue
from bullpen.testing import FaultProxy, RedisServer
from bullpen.testing._resp import RespFramer
from tests.queue._kit import Kit, soon

StartServer = Callable[..., RedisServer]
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")
EVERY_SECOND = ("--appendonly", "yes", "--appendfsync", "everysec")
QUICK_REPLICATION = ("--repl-diskless-sync-delay", "0")


def calls(server: RedisServer, command: str) -> int:
    stats = server.command("INFO", "commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def linked(replica: RedisServer) -> None:
    """A replica that is killed off in the middle of its first copy is empty: that is another matter."""
    async with asyncio.timeout(30):
        while replica.command("INFO", "replication")["master_link_status"] != "up":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)


@pytest.mark.requirement("Q-21")
async def test_the_default_asks_nothing_more_of_the_server(kit: Kit) -> None:
    """Level memory is what every BullMQ client promises, at its price."""
    job = await kit.queue().add("plain")

    assert job.durability == "memory"


@contextlib.asynccontextmanager
async def patient_wait(server: RedisServer) -> AsyncIterator[str]:
    """The address of a server whose WAITAOF waits for the next second, as it should on one that syncs each second."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server.port)
        serving.append(asyncio.current_task())

        async def answer() -> None:
            while data := await from_server.read(65_536):
                writer.write(data)

        answering, framer = asyncio.create_task(answer()), RespFramer()
        while data := await reader.read(65_536):
            for request in framer.feed(data):
                if b"WAITAOF" in request:
                    await asyncio.sleep(1.0 - time.monotonic() % 1.0)
                to_server.write(request)
        for one in (to_server, writer):
            one.close()
            await one.wait_closed()
        await answering

    serving: list[asyncio.Task[None] | None] = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        listener.close()
        await asyncio.gather(*(task for task in serving if task is not None))


async def test_fsync_waits_for_the_disk(start_server: StartServer, queue_name: str) -> None:
    """A server whose WAITAOF was seen to wait is believed, and asked for each call. (Four seconds: it has to wait.)"""
    server = start_server("valkey", args=EVERY_SECOND, persistent=True)
    async with patient_wait(server) as url, Queue(queue_name, connection=(connection := Connection(url))) as queue:
        first = await soon(queue.add("charge", durability="fsync"))
        before = calls(server, "waitaof")
        second = await soon(queue.add("charge", durability="fsync"))

        assert (first.durability, second.durability) == ("fsync", "fsync")
        assert calls(server, "waitaof") - before == 1
        await connection.aclose()


@pytest.mark.long
async def test_a_long_way_to_the_server_does_not_pass_for_a_disk(start_server: StartServer, queue_name: str) -> None:
    """Every answer takes long there; that proves nothing."""
    server = start_server("valkey", args=EVERY_SECOND, persistent=True)
    with FaultProxy(server) as proxy:
        proxy.latency(300)
        async with Queue(queue_name, connection=proxy.url) as queue:
            with pytest.raises(InvalidOption, match="answers WAITAOF before"):
                await queue.add("charge", durability="fsync")


async def test_a_server_that_always_syncs_needs_no_wait(start_server: StartServer, queue_name: str) -> None:
    """`appendfsync always` has synced before it answers."""
    server = start_server("valkey", args=ALWAYS, persistent=True)
    async with Queue(queue_name, connection=server.url, durability="fsync") as queue:
        jobs = await asyncio.gather(*(queue.add("charge") for _ in range(20)))

        assert {job.durability for job in jobs} == {"fsync"}
        assert calls(server, "waitaof") == 0


async def test_fsync_is_refused_where_it_cannot_be_kept(kit: Kit, start_server: StartServer, queue_name: str) -> None:
    """A promise that the server cannot keep is an error, not a comfort."""
    with pytest.raises(InvalidOption, match="appendonly yes"):
        await kit.queue().add("charge", durability="fsync")

    old = start_server("redis-7", args=EVERY_SECOND)
    async with Queue(queue_name, connection=old.url) as queue:
        with pytest.raises(InvalidOption, match="appendfsync always"):
            await queue.add("charge", durability="fsync")
        assert (await queue.counts()).waiting == 0


async def test_replicated_waits_for_the_replica(start_server: StartServer, queue_name: str) -> None:
    """The job is on the replica when `add` returns, so promoting it loses nothing."""
    primary = start_server("valkey", args=QUICK_REPLICATION)
    replica = start_server("valkey", args=("--replicaof", f"127.0.0.1 {primary.port}"))
    await linked(replica)
    async with Queue(queue_name, connection=primary.url) as queue:
        job = await soon(queue.add("charge", durability=Durability.replicated(1)))
        primary.kill()

    assert job.durability == "replicated(1)"
    assert replica.command("EXISTS", f"bull:{queue_name}:{job.id}") == 1


@pytest.mark.requirement("Q-21")
async def test_an_add_in_flight_at_a_failover_is_made_again(start_server: StartServer, queue_name: str) -> None:
    """The new primary knows earlier calls of the same queue object, and not this one: it must be sent again, not
    confirmed."""
    primary = start_server("valkey", args=QUICK_REPLICATION)
    heir = start_server("valkey", args=(*QUICK_REPLICATION, "--replicaof", f"127.0.0.1 {primary.port}"))
    await linked(heir)
    async with Queue(queue_name, connection=primary.url) as queue:
        level = Durability.replicated(1)
        first = await soon(queue.add("charge", 1, durability=level))
        heir.pause()
        primary.client().client_kill_filter(_type="replica")  # or the next job would lie in a buffer of the system
        in_flight = asyncio.create_task(queue.add("charge", 2, durability=level))
        async with asyncio.timeout(10):
            while primary.command("LLEN", f"bull:{queue_name}:wait") != 2:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

        # The primary dies with what its replica never got, and the replica takes over its address.
        await asyncio.to_thread(primary.kill)
        heir.resume()
        heir.command("REPLICAOF", "NO", "ONE")
        start_server("valkey", args=(*QUICK_REPLICATION, "--replicaof", f"127.0.0.1 {heir.port}"))
        assert heir.command("LLEN", f"bull:{queue_name}:wait") == 1
        heir.command("CONFIG", "SET", "port", primary.port)
        second = await soon(in_flight)

        assert second.durability == "replicated(1)"
        assert [heir.command("HGET", f"bull:{queue_name}:{job.id}", "data") for job in (first, second)] == [b"1", b"2"]


@pytest.mark.requirement("Q-21")
async def test_a_server_without_the_replicas_refuses_the_first_add(start_server: StartServer, queue_name: str) -> None:
    """At once and each time, with what it has; nothing is written."""
    server = start_server("valkey")
    async with Queue(queue_name, connection=server.url) as queue:
        for _ in range(2):
            with pytest.raises(InvalidOption, match=r"at least 2 connected replicas .*it has 0.*replicated\(2\)"):
                await soon(queue.add("charge", durability=Durability.replicated(2)))
        with pytest.raises(InvalidOption, match=r"it has 0"):
            await soon(queue.add_many([("charge", 1)], durability="replicated(1)"))
    with (
        BlockingQueue(queue_name, connection=server.url) as blocking,
        pytest.raises(InvalidOption, match=r"it has 0"),
    ):
        await asyncio.to_thread(blocking.add, "charge", durability="replicated(1)")

    assert server.command("KEYS", f"*{queue_name}*") == []


async def leave_alone(server: RedisServer, start_server: StartServer, queue: Queue) -> None:
    """A replica was there at the first add, and is gone then."""
    replica = start_server("valkey", args=("--replicaof", f"127.0.0.1 {server.port}"))
    await linked(replica)
    await soon(queue.add("first", durability=Durability.replicated(1), add_deadline=10_000))
    await asyncio.to_thread(replica.kill)


async def test_another_server_in_charge_is_not_judged(start_server: StartServer, queue_name: str) -> None:
    """After a failover no replica may be connected for a moment: the job is stored, and its level is unknown."""
    primary = start_server("valkey", args=QUICK_REPLICATION)
    heir = start_server("valkey", args=(*QUICK_REPLICATION, "--replicaof", f"127.0.0.1 {primary.port}"))
    await linked(heir)
    async with Queue(queue_name, connection=primary.url) as queue:
        await soon(queue.add("charge", durability=Durability.replicated(1)))
        await asyncio.to_thread(primary.kill)
        heir.command("REPLICAOF", "NO", "ONE")
        heir.command("CONFIG", "SET", "port", primary.port)
        with pytest.raises(DurabilityUnknown):
            await queue.add("charge", durability=Durability.replicated(1), add_deadline=2_000)


async def test_an_unconfirmed_level_raises_with_the_job(start_server: StartServer, queue_name: str) -> None:
    """The caller learns that the job exists and may decide; adding it again would double it."""
    server = start_server("valkey", args=QUICK_REPLICATION)
    async with Queue(queue_name, connection=server.url, add_deadline=300) as queue:
        await leave_alone(server, start_server, queue)
        with pytest.raises(DurabilityUnknown, match=r"replicated\(1\)") as caught:
            await queue.add("charge", {"n": 1}, durability=Durability.replicated(1))

        stored = await queue.get_job(caught.value.job.id)
        assert stored is not None
        assert stored.data == {"n": 1}


async def test_each_caller_of_an_unconfirmed_call_hears_of_its_own_job(
    start_server: StartServer, queue_name: str
) -> None:
    """They share one call to the server, and nothing else."""
    server = start_server("valkey", args=QUICK_REPLICATION)
    async with Queue(queue_name, connection=server.url, add_deadline=300) as queue:
        await leave_alone(server, start_server, queue)
        level = Durability.replicated(1)
        errors = await asyncio.gather(
            *(queue.add("charge", number, durability=level) for number in range(3)), return_exceptions=True
        )

        assert [error.job.data for error in errors if isinstance(error, DurabilityUnknown)] == [0, 1, 2]


async def test_one_call_holds_one_level(start_server: StartServer, queue_name: str) -> None:
    """Adds of one tick are coalesced; a plain one must not wait for somebody else's disk."""
    server = start_server("valkey", args=ALWAYS)
    async with Queue(queue_name, connection=server.url) as queue:
        levels = ("memory", "fsync", "memory", "fsync")
        jobs = await asyncio.gather(*(queue.add("mixed", durability=level) for level in levels))

        assert [job.durability for job in jobs] == list(levels)


async def test_adds_of_equal_levels_share_a_call(start_server: StartServer, queue_name: str) -> None:
    """However the level was named: a wait for the disk may cost a second, and must not be paid per job."""
    server = start_server("valkey", args=ALWAYS)
    async with Queue(queue_name, connection=server.url) as queue:
        await soon(queue.add("first", durability="fsync"))
        before = calls(server, "evalsha")

        levels: list[Durability | str] = ["fsync", Durability("fsync"), Durability("fsync"), "fsync"]
        await soon(asyncio.gather(*(queue.add("many", durability=level) for level in levels)))

        assert calls(server, "evalsha") - before == 1


@pytest.mark.parametrize("level", ["disk", 3, None])
def test_an_unknown_level_is_refused(level: object) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidOption, match="durability"):
        Queue("q", connection="redis://localhost", durability=level)  # type: ignore[arg-type]

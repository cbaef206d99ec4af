"""Durability levels of `add`: what is true when it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bullpen.errors import DurabilityUnknown, InvalidOption
from bullpen.queue import Durability, Queue
from bullpen.testing import RedisServer
from tests.queue._kit import Kit, soon

StartServer = Callable[..., RedisServer]
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")
EVERY_SECOND = ("--appendonly", "yes", "--appendfsync", "everysec")


def calls(server: RedisServer, command: str) -> int:
    stats = server.command("INFO", "commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


@pytest.mark.requirement("Q-21")
async def test_the_default_asks_nothing_more_of_the_server(kit: Kit) -> None:
    """Level memory is what every BullMQ client promises, at its price."""
    job = await kit.queue().add("plain")

    assert job.durability == "memory"


async def test_fsync_waits_for_the_disk(start_server: StartServer, queue_name: str) -> None:
    """A server that writes its file each second acknowledges only what is on disk."""
    server = start_server("valkey", args=EVERY_SECOND, persistent=True)
    async with Queue(queue_name, connection=server.url) as queue:
        job = await soon(queue.add("charge", durability="fsync"))

        assert job.durability == "fsync"
        assert calls(server, "waitaof") >= 1

        server.kill()
        server.restart()

        assert await queue.get_job(job.id) is not None


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
    primary = start_server("valkey", args=("--repl-diskless-sync-delay", "0"))
    replica = start_server("valkey", args=("--replicaof", f"127.0.0.1 {primary.port}"))
    # A replica that is killed off in the middle of its first copy is empty: that is another matter.
    async with asyncio.timeout(30):
        while replica.command("INFO", "replication")["master_link_status"] != "up":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
    async with Queue(queue_name, connection=primary.url) as queue:
        job = await soon(queue.add("charge", durability=Durability.replicated(1)))
        primary.kill()

    assert job.durability == "replicated(1)"
    assert replica.command("EXISTS", f"bull:{queue_name}:{job.id}") == 1


async def test_an_unconfirmed_level_raises_with_the_job(start_server: StartServer, queue_name: str) -> None:
    """The caller learns that the job exists and may decide; adding it again would double it."""
    server = start_server("valkey")
    async with Queue(queue_name, connection=server.url, add_deadline_ms=300) as queue:
        with pytest.raises(DurabilityUnknown, match=r"replicated\(1\)") as caught:
            await queue.add("charge", {"n": 1}, durability=Durability.replicated(1))

        stored = await queue.get_job(caught.value.job.id)
        assert stored is not None
        assert stored.data == {"n": 1}


async def test_each_caller_of_an_unconfirmed_call_hears_of_its_own_job(
    start_server: StartServer, queue_name: str
) -> None:
    """They share one call to the server, and nothing else."""
    server = start_server("valkey")
    async with Queue(queue_name, connection=server.url, add_deadline_ms=300) as queue:
        level = Durability.replicated(1)
        errors = await asyncio.gather(
            *(queue.add("charge", number, durability=level) for number in range(3)), return_exceptions=True
        )

        assert [error.job.data for error in errors if isinstance(error, DurabilityUnknown)] == [0, 1, 2]


async def test_one_call_holds_one_level(start_server: StartServer, queue_name: str) -> None:
    """Adds of one tick are coalesced; a plain one must not wait for somebody else's disk."""
    server = start_server("valkey", args=EVERY_SECOND)
    async with Queue(queue_name, connection=server.url) as queue:
        levels = ("memory", "fsync", "memory", "fsync")
        jobs = await asyncio.gather(*(queue.add("mixed", durability=level) for level in levels))

        assert [job.durability for job in jobs] == list(levels)


async def test_adds_of_equal_levels_share_a_call(start_server: StartServer, queue_name: str) -> None:
    """However the level was named: a wait for the disk costs a tenth of a second, and must not be paid per job."""
    server = start_server("valkey", args=EVERY_SECOND)
    async with Queue(queue_name, connection=server.url) as queue:
        await soon(queue.add("first", durability="fsync"))
        before = calls(server, "waitaof")

        levels: list[Durability | str] = ["fsync", Durability("fsync"), Durability("fsync"), "fsync"]
        await soon(asyncio.gather(*(queue.add("many", durability=level) for level in levels)))

        assert calls(server, "waitaof") - before == 1


@pytest.mark.parametrize("level", ["disk", 3, None])
def test_an_unknown_level_is_refused(level: object) -> None:
    """Before anything is written."""
    with pytest.raises(InvalidOption, match="durability"):
        Queue("q", connection="redis://localhost", durability=level)  # type: ignore[arg-type]

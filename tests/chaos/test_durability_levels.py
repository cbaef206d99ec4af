"""What a level promises when machines die: the file lost its tail, or the replica that took over was behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bullpen.errors import BullpenError, DurabilityUnknown
from bullpen.queue import Durability, Queue
from bullpen.testing import RedisServer
from tests.chaos.arena import note, scaled, until
from tests.conftest import StartServer


def log_files(server: RedisServer) -> list[Path]:
    """The parts of the append-only file that grow, newest last."""
    return sorted(server.directory.rglob("*.incr.aof"), key=lambda path: path.stat().st_mtime)


@pytest.mark.requirement("Q-21", "W-75")
async def test_what_was_acknowledged_at_level_fsync_survives_a_lost_tail(
    start_server: StartServer, queue_name: str
) -> None:
    """A machine that loses its power loses what was written but not synced: everything behind the last sync.

    How much was synced is read when an add returns; the worst loss cuts the file right there.
    """
    server = start_server("valkey", args=("--appendonly", "yes", "--appendfsync", "everysec"), persistent=True)
    rounds, per_round = scaled(3, 40), 20
    async with Queue(queue_name, connection=server.url) as queue:
        acknowledged: list[str] = []
        for _ in range(rounds):
            jobs = await asyncio.gather(*(queue.add("charge", durability="fsync") for _ in range(per_round)))
            acknowledged += [job.id for job in jobs]
            synced = log_files(server)[-1].stat().st_size
            # Later writes that nobody was told are safe: they are what gets lost.
            await asyncio.gather(*(queue.add("plain") for _ in range(50)))

            await asyncio.to_thread(server.kill)
            os.truncate(log_files(server)[-1], synced)
            await asyncio.to_thread(server.restart)

            found = await asyncio.gather(*(queue.get_job(job_id) for job_id in acknowledged))
            assert all(job is not None for job in found)
    note(f"fsync: {rounds} times killed with the tail cut off: 0 of {len(acknowledged)} acknowledged jobs lost")


@pytest.mark.requirement("Q-21")
async def test_what_was_acknowledged_at_level_replicated_survives_the_promotion_of_a_replica_that_lags(
    start_server: StartServer, queue_name: str
) -> None:
    """A replica that hangs acknowledges nothing: what was told to be replicated is on it, whatever else it misses."""
    primary = start_server("valkey", args=("--repl-diskless-sync-delay", "0"))
    replica = start_server("valkey", args=("--replicaof", f"127.0.0.1 {primary.port}"))
    await until(lambda: _link(replica) == "up", "the replica has its first copy")
    acknowledged: list[str] = []
    unknown = 0
    async with Queue(queue_name, connection=primary.url, add_deadline_ms=400) as queue:
        for round_number in range(scaled(4, 40)):
            if round_number % 2:
                replica.pause()  # behind from here on
            answers = await asyncio.gather(
                *(queue.add("charge", durability=Durability.replicated(1)) for _ in range(25)), return_exceptions=True
            )
            for answer in answers:
                match answer:
                    case DurabilityUnknown():
                        unknown += 1
                    case BaseException():
                        raise answer
                    case _:
                        acknowledged.append(answer.id)
            if round_number % 2:
                await queue.add("plain")
                primary.client().client_kill_filter(_type="replica")
                replica.resume()
                await until(lambda: _link(replica) == "up", "the replica is back")
        replica.pause()
        primary.client().client_kill_filter(_type="replica")  # or the rest would lie in a buffer of the system
        late = await asyncio.gather(*(queue.add("late") for _ in range(50)))
        await asyncio.to_thread(primary.kill)  # with it goes what the replica never got
    replica.resume()
    replica.command("REPLICAOF", "NO", "ONE")

    async with Queue(queue_name, connection=replica.url) as promoted:
        kept = await asyncio.gather(*(promoted.get_job(job_id) for job_id in acknowledged))
        missing = [job.id for job in late if await promoted.get_job(job.id) is None]

    assert all(job is not None for job in kept)
    assert unknown > 0
    assert missing  # or the replica did not lag, and the test showed nothing
    note(
        f"replicated: 0 of {len(acknowledged)} acknowledged jobs lost, {unknown} told as unknown, {len(missing)} of "
        f"{len(late)} that were never promised are gone"
    )


def _link(replica: RedisServer) -> str:
    try:
        return str(replica.command("INFO", "replication")["master_link_status"])
    except (OSError, KeyError, BullpenError):
        return "down"

"""Connections that are killed, cut, stalled or lose their scripts while work goes on: nobody outside notices."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from bullpen.queue import Job
from bullpen.redis import Connection
from bullpen.testing import FaultProxy
from tests.chaos.arena import Arena, note, repeating, scaled, until, within


@pytest.mark.requirement("Q-65", "W-6")
async def test_scripts_flushed_without_end_cause_no_visible_error(
    arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that restarts or fails over knows no scripts; a batch must never die of that."""
    jobs = scaled(400, 20_000)
    caplog.set_level(logging.WARNING, logger="bullpen")
    client = arena.client()
    with arena.following(), repeating(client.script_flush, 0.003) as flushes:
        async with arena.queue(attempts=3, backoff=1) as queue, arena.worker(concurrency=20, lock=1_000):
            for _ in range(jobs // 20):
                await arena.add(queue, 20, progress=True)
            await arena.all_ended()
    client.close()

    arena.audit(max_extra_runs=0)

    assert arena.told == []
    # What is remarked about the server itself (persistence, version) when it is met is no error of ours.
    about_server = f"127.0.0.1:{arena.server.port}: "
    assert [text for text in caplog.messages if not text.startswith(about_server)] == []
    note(f"{flushes[0]} SCRIPT FLUSH under {jobs} jobs: no error, no repetition")


@pytest.mark.requirement("W-6", "W-55", "Q-65", "X-124")
async def test_connections_killed_again_and_again_under_load_repeat_nothing(arena: Arena) -> None:
    """CLIENT KILL hits takes, settles, adds, renewals and the blocked read at any moment; the locks outlive it."""
    jobs = scaled(300, 20_000)
    client = arena.client()
    with arena.following():
        async with arena.queue(attempts=1) as queue, arena.worker(concurrency=20, lock=10_000) as worker:
            with repeating(lambda: client.client_kill_filter(_type="normal", skipme=True), 0.02) as kills:
                for _ in range(jobs // 20):
                    await within(20, "adds go on", arena.add(queue, 20, ms=2))
                await arena.all_ended()
            await until(lambda: worker.name.encode() in _names(arena), "the worker's connection has its name again")
    client.close()

    arena.audit(max_runs=1, max_extra_runs=0)

    assert arena.heard("error") == arena.heard("lock_lost") == []
    note(f"all connections killed {kills[0]} times under {jobs} jobs: {arena.extra_runs} extra runs")


def _names(arena: Arena) -> bytes:
    listed = arena.server.command("CLIENT", "LIST")
    return b"".join(client["name"].encode() for client in listed) if isinstance(listed, list) else bytes(listed)


@pytest.mark.requirement("W-6", "W-55")
@pytest.mark.parametrize("how", ["reset", "cut", "outage", "stall"])
async def test_a_worker_goes_on_by_itself_after_the_network_was_away(
    arena: Arena, proxy: FaultProxy, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every way in which a network fails: afterwards jobs begin at once, and the fault was told once, not per try."""
    begun: asyncio.Queue[float] = asyncio.Queue()

    async def handle(job: Job) -> None:
        arena.ledger.ran(job.id, fence=job.fence)
        begun.put_nowait(time.monotonic())

    async with arena.queue() as queue, arena.worker(handle, url=proxy.url, lock=10_000, drain_delay=500) as worker:
        with arena.following():
            await arena.add(queue, 1)
            await within(5, "the first job begins", begun.get())
            match how:
                case "reset":
                    proxy.reset()
                case "cut":
                    proxy.cut()
                case "outage":
                    with proxy.outage():
                        await arena.add(queue, 1)
                        await asyncio.sleep(1.0)  # the length of the outage
                case "stall":
                    with proxy.stalled():
                        await arena.add(queue, 1)
                        await asyncio.sleep(1.0)  # as above
            back_at = time.monotonic()

            await arena.add(queue, 1)
            begun_at = await within(5, "a job begins after the network is back", begun.get())
            await arena.all_ended()
        assert worker.is_alive

    arena.audit(max_extra_runs=0)

    assert begun_at - back_at < 1.5
    lost = [record for record in caplog.records if "lost; reconnecting" in record.getMessage()]
    assert len(lost) <= 2  # one for each of the worker's connections
    note(f"{how}: first job {begun_at - back_at:.3f} s after the network was back")


@pytest.mark.requirement("X-124")
async def test_a_connection_that_goes_silent_is_given_up_and_replaced(arena: Arena, proxy: FaultProxy) -> None:
    """A half-open connection answers nothing and breaks nothing; only a deadline of ours ends it."""
    begun = asyncio.Event()

    async def handle(job: Job) -> None:
        arena.ledger.ran(job.id, fence=job.fence)
        begun.set()

    connection = Connection(proxy.url, command_timeout_ms=500, connect_timeout_ms=500)
    async with arena.queue() as queue:
        worker = arena.worker(handle, url=connection, lock=10_000, drain_delay=300)
        async with worker:
            await until(lambda: proxy.open_connections >= 2, "the worker is connected")
            before = proxy.counters.connections
            with arena.following():
                with proxy.stalled():
                    await arena.add(queue, 1)
                    await until(lambda: proxy.counters.connections > before, "the silent connection is replaced")
                await within(5, "the job begins", begun.wait())
                await arena.all_ended()

    arena.audit(max_extra_runs=0)


@pytest.mark.requirement("Q-66", "Q-67")
async def test_a_worker_cut_off_beyond_its_lock_gives_its_job_up_to_the_other_side(
    arena: Arena, proxy: FaultProxy
) -> None:
    """A partition has two living sides. The one without the server must not have the last word, nor keep running."""
    options: dict[str, Any] = {"lock": 1_000, "stalled_interval": 100, "drain_delay": 300}
    begun, cancelled, taken_over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def cut_off(job: Job) -> str:
        arena.ledger.ran(job.id, fence=job.fence)
        begun.set()
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()
        return "from the wrong side"

    async def with_the_server(job: Job) -> str:
        arena.ledger.ran(job.id, fence=job.fence)
        taken_over.set()
        return "from the right side"

    short = Connection(proxy.url, command_timeout_ms=300, connect_timeout_ms=300)
    async with arena.queue() as queue, arena.worker(cut_off, url=short, **options):
        (job_id,) = await arena.add(queue, 1)
        await within(5, "the job begins", begun.wait())
        with arena.following():
            with proxy.stalled():
                async with arena.worker(with_the_server, **options):
                    await within(10, "the other side takes the job over", taken_over.wait())
                    await arena.all_ended()
            await within(10, "the wrong side is told", cancelled.wait())
            await until(lambda: arena.heard("lock_lost") == [("lock_lost", job_id)], "the loss is reported")

    arena.audit(max_extra_runs=1, may_overlap=True)

    assert arena.field(job_id, "returnvalue") == b'"from the right side"'
    assert arena.field(job_id, "stc") == b"1"

"""Replies that are lost after the server acted, under load and without ids of one's own."""

from __future__ import annotations

import pytest

from bullpen.testing import FaultProxy
from tests.chaos.arena import Arena, note, scaled


@pytest.mark.requirement("Q-14", "X-124")
async def test_lost_replies_of_adds_takes_and_settles_store_and_run_nothing_twice(
    arena: Arena, proxy: FaultProxy
) -> None:
    """With generated ids nothing but the number of the call tells a repeated add from a new one."""
    losses, jobs = scaled(3, 12), scaled(600, 6_000)
    async with arena.queue(url=proxy.url) as queue, arena.worker(url=proxy.url, concurrency=20, lock=10_000):
        with arena.following():
            for _ in range(losses):
                lost = proxy.lose_reply(queue.keys.call("").encode(), skip=1)  # the key of adds and of exchanges
                await arena.add(queue, jobs // losses // 2)
                await lost.happened()
                await arena.add(queue, jobs // losses // 2)
            await arena.all_ended()

    arena.audit(max_extra_runs=0, max_runs=1)

    stored = len(arena.ledger.accepted_ids)
    assert arena.count("completed") == stored == int(arena.server.command("GET", arena.base + "id"))
    note(f"{losses} replies lost under {stored} jobs with generated ids: 0 stored twice, 0 run twice")

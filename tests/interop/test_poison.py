"""A job that kills whichever worker runs it, in a fleet of ours and Node's."""

import asyncio
import contextlib

import pytest
import redis

from bullpen.queue import Queue
from bullpen.testing import Child
from tests.forks import WarmChild

from ._node import NodePeer, NodeTools
from ._peer import PeerGone
from ._sides import PeerSide

LOCK_MS, STALLED_MS, JOBS = 1_000, 500, 40
MOST_NODE_DEATHS = 3
OUR_WORKER = f"""
import asyncio, os, sys
from bullpen.worker import Worker

async def handle(job):
    await asyncio.sleep(0.02)
    if job.name == "poison":
        os._exit(1)

async def main():
    url, queue = sys.argv[1:]
    options = {{"lock": {LOCK_MS}, "stalled_interval": {STALLED_MS}, "dead_letters": True}}
    await Worker(queue, handle, connection=url, concurrency=4, **options).run()

asyncio.run(main())
"""


class Fleet:
    """A worker of each, replaced when it dies by itself; Node's only so often, or it would go on for ever."""

    def __init__(self, url: str, tools: NodeTools, most_stalled: int) -> None:
        self._url, self._tools, self._most_stalled = url, tools, most_stalled
        self.our_deaths = self.node_deaths = 0
        self._ours: Child | None = None
        self._node: NodePeer | None = None

    async def keep(self, *, with_ours: bool) -> None:
        """Replace whoever is missing."""
        if self._node is not None and not self._node.is_running:
            self.node_deaths += 1
            await self._node.close()
            self._node = None
        if self._node is None and self.node_deaths < MOST_NODE_DEATHS:
            self._node = await NodePeer(self._url, self._tools).start()
            with contextlib.suppress(PeerGone):  # dead before it could answer
                await PeerSide("theirs", self._node).start_worker(
                    *("theirs", "q", {"sleep": 20, "byName": {"poison": {"kind": "die"}}}),
                    concurrency=4,
                    lockDuration=LOCK_MS,
                    stalledInterval=STALLED_MS,
                    maxStalledCount=self._most_stalled,
                )
        if self._ours is not None and not self._ours.is_running:
            self.our_deaths += 1
            self._ours.close()
            self._ours = None
        if self._ours is None and with_ours:
            self._ours = WarmChild.code(OUR_WORKER, self._url, "q")

    async def close(self) -> None:
        if self._ours is not None:
            self._ours.close()
        if self._node is not None:
            await self._node.close()


@pytest.mark.requirement("X-13", "Q-27", "Q-67")
@pytest.mark.cuts_wakeups
@pytest.mark.parametrize("most_stalled", [1, 100], ids=["node's default", "node condemns nobody"])
async def test_a_poison_job_kills_at_most_four_of_ours_whatever_nodes_workers_do(
    most_stalled: int, node: PeerSide, node_tools: NodeTools, interop_url: str, client: redis.Redis
) -> None:
    """Deaths of Node's workers are counted apart: they neither condemn the job for us nor acquit it. With its default
    Node fails whatever stalled twice, neighbours too; without that the verdict is ours, and no neighbour suffers."""
    fleet = Fleet(interop_url, node_tools, most_stalled)
    async with Queue("q", connection=interop_url) as queue, asyncio.timeout(90):
        try:
            poison = await queue.add("poison")
            while fleet.node_deaths == 0:
                await fleet.keep(with_ours=False)
                await asyncio.sleep(0.05)
            await queue.add_many([("plain", {"n": number}) for number in range(JOBS)])
            while client.zcard("bull:q:completed") + client.zcard("bull:q:failed") < JOBS + 1:
                await fleet.keep(with_ours=True)
                await asyncio.sleep(0.05)
        finally:
            await fleet.close()

        assert fleet.node_deaths >= 1
        assert fleet.our_deaths <= 4
        assert client.zscore("bull:q:failed", poison.id) is not None
        if most_stalled > 1:
            (letter,) = await queue.dead_letters.list()
            assert (letter.job_id, letter.cause) == (poison.id, "poison")
            assert client.zcard("bull:q:completed") == JOBS

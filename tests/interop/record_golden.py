"""Record the golden vectors: run every scenario with Node on both sides and store what is then in Redis.

    python -m tests.interop.record_golden [scenario ...]

Run it after a change of the pinned bullmq version or of the scenarios, and read the diff: it is the contract.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import redis

from bullpen.testing import RedisServer

from ._dump import Dump
from ._node import NodePeer, find_node, install_packages
from ._scenarios import SCENARIOS, Run, Scenario
from ._sides import PeerSide

GOLDEN_DIR = Path(__file__).parent / "golden"


async def record(scenario: Scenario, node: PeerSide, client: redis.Redis) -> dict[str, Dump]:
    client.flushall()
    run = Run(producer=node, worker=node, node=node, client=client)
    try:
        await scenario.steps(run)
    finally:
        await node.reset()
    return run.snapshots


def golden_text(snapshots: dict[str, Dump]) -> str:
    return json.dumps(snapshots, indent=1, ensure_ascii=False) + "\n"


async def main(names: Sequence[str]) -> None:
    tools = find_node()
    install_packages(tools)
    GOLDEN_DIR.mkdir(exist_ok=True)
    with RedisServer.start("valkey") as server, redis.Redis.from_url(server.url) as client:
        async with NodePeer(server.url, tools) as peer:
            for name in names or list(SCENARIOS):
                snapshots = await record(SCENARIOS[name], PeerSide("node", peer), client)
                (GOLDEN_DIR / f"{name}.json").write_text(golden_text(snapshots))
                print(name, *snapshots, sep=" · ")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

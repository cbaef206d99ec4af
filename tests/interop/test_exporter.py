"""Queues and workers of Node are told of like ours."""

import pytest
import redis

from bullpen import Connection
from bullpen.ops.exporter import Exporter, ServerSource
from bullpen.testing import RedisServer

from ._sides import PeerSide


@pytest.mark.requirement("W-68")
async def test_a_queue_of_node_and_its_worker_are_told_of(
    node: PeerSide, client: redis.Redis, interop_server: RedisServer
) -> None:
    await node.add("parcels", "parcel")
    await node.start_worker("busy", "letters", {})
    await node.add("letters", "letter", delay=60_000)
    connection = Connection(interop_server.url)
    exporter = Exporter([ServerSource(connection, "bull")])

    seen = {
        (metric.name, *sample.labels.values()): sample.value
        for metric in await exporter.collect()
        for sample in metric.samples
    }

    await exporter.aclose()
    await connection.aclose()
    await node.close_worker("busy")
    assert seen["bullpen_queue_jobs", "parcels", "waiting"] == 1
    assert seen["bullpen_queue_jobs", "letters", "delayed"] == 1
    assert seen["bullpen_queue_workers", "parcels"] == 0
    assert seen["bullpen_queue_workers", "letters"] == 1
    assert seen["bullpen_queue_oldest_waiting_seconds", "parcels"] > 0
    assert seen["bullpen_queue_oldest_waiting_seconds", "letters"] == 0

"""The drivers themselves: a test that fails must mean the queue, not the harness."""

import pytest
import redis

from ._dump import diff, dump
from ._node import NodePeer, NodeTools
from ._peer import PeerError, PeerGone
from ._sides import PeerSide


async def test_a_failing_op_is_answered_and_the_driver_goes_on(node: PeerSide, pypi: PeerSide) -> None:
    for side in (node, pypi):
        with pytest.raises(PeerError, match="unknown op nonsense"):
            await side.peer.call("nonsense")
        with pytest.raises(PeerError, match="missing"):
            await side.peer.call("release", worker="missing")

        assert await side.peer.call("ping") == "pong"


async def test_a_killed_peer_fails_the_calls_that_wait_for_it(client: redis.Redis, node_tools: NodeTools) -> None:
    peer = NodePeer(f"redis://127.0.0.1:{client.get_connection_kwargs()['port']}", node_tools)
    await peer.start()
    await peer.call("add", queue="q", name="n", data={})

    await peer.kill()

    with pytest.raises(PeerGone):
        await peer.call("ping")
    await peer.close()


async def test_node_and_pypi_work_on_each_others_jobs(node: PeerSide, pypi: PeerSide) -> None:
    await pypi.add("from-pypi", "job", {"n": 1})
    await node.add("from-node", "job", {"n": 2})

    await node.start_worker("n", "from-pypi", {})
    await pypi.start_worker("p", "from-node", {})
    seen = [
        await side.peer.wait_event(lambda event: event.get("type") == "completed" and event["event"] == "worker")
        for side in (node, pypi)
    ]

    assert [event["value"] for event in seen] == [{"echo": {"n": 1}}, {"echo": {"n": 2}}]


@pytest.mark.leaves_queue_broken
async def test_a_difference_is_named(node: PeerSide, client: redis.Redis) -> None:
    await node.add("q", "one", {"n": 1}, priority=3)
    before = dump(client, ["q"])
    client.hset("bull:q:1", mapping={"data": '{"n":2}', "attemptsMade": "0"})
    client.hdel("bull:q:1", "name")
    client.xadd("bull:q:events", {"event": "waiting", "jobId": "9"})
    client.set("bull:q:1:extra", "leftover")

    found = diff(before, dump(client, ["q"]))

    assert found == [
        'q:1/value/attemptsMade: not expected, is "0"',
        "q:1/value/data/n: expected 1, is 2",
        'q:1/value/name: missing, expected "one"',
        'q:1:extra: not expected, is {"expires": false, "type": "string", "value": "leftover"}',
        'q:events: + {"event": "waiting", "jobId": "9"}',
    ]


async def test_our_additions_are_no_difference(node: PeerSide, client: redis.Redis) -> None:
    await node.add("q", "one", {"n": 1})
    before = dump(client, ["q"])
    client.hset("bull:q:1", mapping={"bpdl": "x", "opts": '{"attempts":3,"backoff":{"type":"fixed","delay":1}}'})
    client.set("bull:q:bp:call:abc", "1", px=1000)
    client.xadd("bull:q:events", {"event": "retry", "jobId": "1", "delay": "5", "attemptsMade": "1"})

    assert diff(before, dump(client, ["q"])) == []

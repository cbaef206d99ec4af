"""Jobs that Node links to others (flows, schedulers, deduplication), taken by our worker.

The golden vectors compare each single step; here many of them meet in one exchange, repeat, or change under our hands.
"""

import asyncio
import itertools
import json
from typing import Any

import pytest
import redis

from ._sides import OurSide, PeerSide
from ._wait import events_of, until, until_event

FAR_MS = 3_600_000


def family(children: list[dict[str, Any]], **opts: Any) -> dict[str, Any]:
    return {"name": "parent", "queueName": "parents", "opts": {"jobId": "P", **opts}, "children": children}


def child(number: int, name: str = "good", **opts: Any) -> dict[str, Any]:
    return {
        "name": name,
        "queueName": "kids",
        "data": {"n": number},
        "opts": {"jobId": f"C-{number}", "attempts": 1, **opts},
    }


@pytest.mark.requirement("W-84")
async def test_children_that_finish_in_one_exchange_release_their_parent_once(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await other.peer.call("addFlow", flow=family([child(number) for number in range(60)]))

    await ours.start_worker("kids", "kids", {}, concurrency=60)
    await until_event(client, "parents", "waiting", "P")
    await until_event(client, "kids", "completed", count=60)
    await ours.start_worker("parents", "parents", {"kind": "children"})
    await until_event(client, "parents", "completed", "P")

    released = [event for event in events_of(client, "parents") if event["event"] == "waiting"]
    assert len(released) == 1
    parent = await other.peer.call("getJob", queue="parents", jobId="P")
    assert parent["returnvalue"]["children"] == {f"bull:kids:C-{n}": {"echo": {"n": n}} for n in range(60)}


@pytest.mark.requirement("W-84")
async def test_children_with_mixed_fates_release_their_parent_when_the_last_counts(
    node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """A third completes, a third fails and is ignored, a third fails and is forgotten; all in a few exchanges."""
    kids = [
        *(child(number) for number in range(20)),
        *(child(number, "bad", ignoreDependencyOnFailure=True) for number in range(20, 40)),
        *(child(number, "bad", removeDependencyOnFailure=True) for number in range(40, 60)),
    ]
    await node.peer.call("addFlow", flow=family(kids))

    await ours.start_worker("kids", "kids", {"byName": {"bad": {"kind": "always_fail"}, "good": {}}}, concurrency=30)
    await ours.start_worker("parents", "parents", {"kind": "children"})
    await until_event(client, "parents", "completed", "P")

    parent = await node.peer.call("getJob", queue="parents", jobId="P")
    dependencies = await node.peer.call("getDependencies", queue="parents", jobId="P")
    assert len(parent["returnvalue"]["children"]) == 20
    assert parent["returnvalue"]["ignored"] == {f"bull:kids:C-{n}": "boom" for n in range(20, 40)}
    assert dependencies.get("unprocessed", []) == []


@pytest.mark.requirement("W-84")
async def test_a_parent_and_its_children_on_one_queue_run_children_first(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    flow = {
        "name": "root",
        "queueName": "q",
        "opts": {"jobId": "root"},
        "children": [
            {
                "name": "middle",
                "queueName": "q",
                "opts": {"jobId": f"m{m}"},
                "children": [
                    {"name": "leaf", "queueName": "q", "opts": {"jobId": f"m{m}-l{leaf}"}} for leaf in range(5)
                ],
            }
            for m in range(3)
        ],
    }
    await other.peer.call("addFlow", flow=flow)

    await ours.start_worker("w", "q", {"kind": "children"}, concurrency=8)
    await until_event(client, "q", "completed", "root")

    order = [event["jobId"] for event in events_of(client, "q") if event["event"] == "completed"]
    assert order[-1] == "root"
    assert len(order) == len(set(order)) == 19
    assert all(order.index(f"m{m}") > order.index(f"m{m}-l{leaf}") for m in range(3) for leaf in range(5))


@pytest.mark.requirement("W-84", "Q-37")
async def test_a_child_condemned_by_stalls_fails_its_parent_by_policy(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await other.peer.call("addFlow", flow=family([child(1, failParentOnFailure=True)]))
    client.hset("bull:kids:C-1", "defa", "job stalled more than allowable limit")

    await ours.start_worker("kids", "kids", {})
    await ours.start_worker("parents", "parents", {})
    await until_event(client, "parents", "failed", "P")

    kid = await other.peer.call("getJob", queue="kids", jobId="C-1")
    parent = await other.peer.call("getJob", queue="parents", jobId="P")
    assert kid["failedReason"] == "job stalled more than allowable limit"
    assert parent["failedReason"] == "child bull:kids:C-1 failed"


@pytest.mark.requirement("W-84")
async def test_a_parent_that_completes_with_children_pending_is_refused_and_not_lost(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """continueParentOnFailure starts a parent early; a handler that then just returns must not strand the job."""
    kids = [child(1, "bad", continueParentOnFailure=True), child(2, delay=FAR_MS)]
    await other.peer.call("addFlow", flow=family(kids, attempts=1))

    await ours.start_worker("kids", "kids", {"byName": {"bad": {"kind": "always_fail"}}})
    await ours.start_worker("parents", "parents", {"kind": "return", "value": 1})
    await until_event(client, "parents", "failed", "P")

    parent = await other.peer.call("getJob", queue="parents", jobId="P")
    assert "pending" in parent["failedReason"]
    assert client.exists("bull:parents:active", "bull:parents:P:lock") == 0


@pytest.mark.requirement("W-84")
async def test_flows_of_pypi_bullmq_work_too(pypi: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    kids = [{"name": "kid", "queueName": "kids", "data": {"n": n}, "opts": {}} for n in range(3)]
    await pypi.peer.call(
        "addFlow", flow={"name": "parent", "queueName": "parents", "data": {}, "opts": {}, "children": kids}
    )

    await ours.start_worker("kids", "kids", {}, concurrency=3)
    await ours.start_worker("parents", "parents", {"kind": "children"})
    await until_event(client, "parents", "completed")

    done = next(event for event in events_of(client, "parents") if event["event"] == "completed")
    values = json.loads(done["returnvalue"])["children"].values()
    assert sorted(value["echo"]["n"] for value in values) == [0, 1, 2]


@pytest.mark.parametrize("scheduler_by", ["node", "pypi"])
async def test_a_scheduler_goes_on_iteration_by_iteration(
    scheduler_by: str, node: PeerSide, pypi: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Each slot runs once, and there is always exactly one iteration to come."""
    side = {"node": node, "pypi": pypi}[scheduler_by]
    await side.peer.call(
        "upsertJobScheduler",
        queue="q",
        schedulerId="beat",
        repeat={"every": 40},
        template={"name": "tick", "data": {"x": 1}},
    )

    await ours.start_worker("w", "q", {}, concurrency=3)
    await until_event(client, "q", "completed", count=8)
    await ours.close_worker("w")

    slots = [event["jobId"] for event in events_of(client, "q") if event["event"] == "completed"]
    assert len(slots) == len(set(slots))
    times = [int(slot.rpartition(":")[2]) for slot in slots]
    distances = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(distance > 0 and distance % 40 == 0 for distance in distances)
    assert _iterations_to_come(client) == 1
    record: Any = client.hgetall("bull:q:repeat:beat")
    assert int(record[b"ic"]) >= 8


async def test_upserts_while_we_work_leave_one_iteration_to_come(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await ours.start_worker("w", "q", {"sleep": 1}, concurrency=5)
    for number in range(40):
        await other.peer.call(
            "upsertJobScheduler",
            queue="q",
            schedulerId="beat",
            repeat={"every": 20 + number % 3},
            template={"name": "tick", "data": {"number": number}},
        )
    await until_event(client, "q", "completed", count=5)
    await ours.close_worker("w")

    assert _iterations_to_come(client) == 1


async def test_a_cron_iteration_promoted_by_hand_does_not_end_its_scheduler(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Taken before its slot, whether promoted or by a client whose clock is ahead: the next slot is the one after."""
    await other.peer.call(
        "upsertJobScheduler",
        queue="q",
        schedulerId="cron",
        repeat={"pattern": "0 0 3 * * *"},
        template={"name": "tick"},
    )
    first: Any = client.zrange("bull:q:delayed", 0, 0)
    await other.peer.call("promote", queue="q", jobId=first[0].decode())

    await ours.start_worker("w", "q", {})
    await until_event(client, "q", "completed")

    coming: Any = client.zrange("bull:q:delayed", 0, -1)
    assert len(coming) == 1
    assert int(coming[0].rpartition(b":")[2]) - int(first[0].rpartition(b":")[2]) == 24 * 3_600_000


def _iterations_to_come(client: redis.Redis) -> int:
    coming: Any = client.zrange("bull:q:delayed", 0, -1) + client.lrange("bull:q:wait", 0, -1)
    return len(coming)


@pytest.mark.requirement("W-83")
async def test_of_many_adds_while_active_only_the_last_runs_after(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    rule = {"id": "d", "keepLastIfActive": True}
    await other.add("q", "first", {"v": 0}, deduplication=rule)
    await ours.start_worker("w", "q", {"byName": {"first": {"hold": True}, "next": {"kind": "echo"}}}, concurrency=5)
    await ours.wait_held("w", "1")

    for value in range(1, 11):
        await other.add("q", "next", {"v": value}, deduplication=rule)
    await ours.release("w")
    await until_event(client, "q", "completed", count=2)
    await until_event(client, "q", "drained")

    results = [json.loads(event["returnvalue"]) for event in events_of(client, "q") if event["event"] == "completed"]
    assert results == [{"echo": {"v": 0}}, {"echo": {"v": 10}}]
    assert client.exists("bull:q:de:d", "bull:q:dn:d") == 0


@pytest.mark.requirement("W-83")
async def test_a_deduplication_id_is_free_again_however_its_job_ended(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await ours.start_worker(
        "w", "q", {"byName": {"good": {}, "bad": {"kind": "always_fail"}, "over": {"kind": "unrecoverable"}}}
    )

    for number, name in enumerate(("good", "bad", "over", "good"), start=1):
        await other.add("q", name, {}, deduplication={"id": "d"}, removeOnComplete=number == 4, attempts=1)
        await until_event(client, "q", "drained", count=number)

    assert client.exists("bull:q:de:d") == 0
    assert [event["event"] for event in events_of(client, "q")].count("deduplicated") == 0


@pytest.mark.requirement("W-83")
async def test_concurrent_adds_with_one_deduplication_id_leave_no_key_behind(
    other: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Adds race with takes and settles; whichever wins, each stored job ends once and no key keeps the id blocked.

    Which values run is not checked: an add that meets an owner that only waits is ignored by design.
    """
    rule = {"id": "d", "keepLastIfActive": True}
    await ours.start_worker("w", "q", {"sleep": 1}, concurrency=3)

    for start in range(0, 60, 10):
        await asyncio.gather(
            *(other.add("q", "job", {"v": value}, deduplication=rule) for value in range(start, start + 10))
        )
    await until(lambda: not client.exists("bull:q:wait", "bull:q:active", "bull:q:dn:d", "bull:q:de:d"), "all done")

    ran = [json.loads(event["returnvalue"]) for event in events_of(client, "q") if event["event"] == "completed"]
    assert len(ran) == client.zcard("bull:q:completed")
    assert client.zcard("bull:q:failed") == 0

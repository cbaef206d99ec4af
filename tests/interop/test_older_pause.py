"""Clients before version 6 that pause and resume a queue on which we work: nothing loses its place.

Their resume puts the list `paused` in the place of `wait`. What may happen while a queue is paused is tried in four
orders, in which each comes directly behind each other once, with each of those clients pausing and resuming; the long
form (BULLPEN_TEST_LONG=1) tries all orders.
"""

import os
from itertools import permutations
from typing import Any

import pytest
import redis

from ._sides import OurSide, PeerSide
from ._wait import until

LONG = os.environ.get("BULLPEN_TEST_LONG") == "1"
DURING = ("our add", "their add", "retry", "due")
"""What happens while the queue is paused."""
SQUARE = ((0, 1, 2, 3), (1, 3, 0, 2), (2, 0, 3, 1), (3, 2, 1, 0))
"""Each is first once, last once, and once directly behind each other."""
ORDERS = list(permutations(DURING) if LONG else (tuple(DURING[at] for at in row) for row in SQUARE))


def _places(client: redis.Redis, queue: str, job_id: str) -> list[str]:
    """Every list and set in which a job stands."""
    lists = [name for name in ("wait", "paused", "active") if client.lpos(f"bull:{queue}:{name}", job_id) is not None]
    sets = ("delayed", "prioritized", "completed", "failed", "waiting-children")
    return lists + [name for name in sets if client.zscore(f"bull:{queue}:{name}", job_id) is not None]


async def _prepare(queue: str, older: PeerSide, ours: OurSide, client: redis.Redis) -> tuple[list[str], str, str]:
    """Two jobs in line, one that failed, one that is due much later."""
    await older.open_queue(queue)
    failed = await ours.add(queue, "failed", {})
    client.lrem(f"bull:{queue}:wait", 1, failed)
    client.hset(f"bull:{queue}:{failed}", mapping={"failedReason": "boom", "finishedOn": "1", "atm": "1", "ats": "1"})
    client.zadd(f"bull:{queue}:failed", {failed: 1})
    line = [await ours.add(queue, "before", {}), await older.add(queue, "before", {})]
    return line, failed, await ours.add(queue, "later", {}, delay=3_600_000)


async def _happen(what: str, queue: str, older: PeerSide, ours: OurSide, failed: str, delayed: str) -> str:
    match what:
        case "our add":
            return await ours.add(queue, "while paused", {})
        case "their add":
            return await older.add(queue, "while paused", {})
        case "retry":
            await ours.queue(queue).retry(failed)
            return failed
        case _:
            await ours.queue(queue).promote(delayed)
            return delayed


@pytest.mark.parametrize("pauser", ["theirs", "ours"])
@pytest.mark.parametrize("resumer", ["theirs", "ours"])
async def test_nothing_is_lost_in_any_order(
    older: PeerSide, ours: OurSide, client: redis.Redis, pauser: str, resumer: str
) -> None:
    sides: dict[str, Any] = {"theirs": older, "ours": ours}
    # Nobody can see a 2.x client before its list exists, as the page says: then somebody has to name the layout.
    is_unseen = older.name == "2.26.0" and pauser == "ours" and resumer == "theirs"
    for number, order in enumerate(ORDERS):
        queue = f"q{number}"
        ids, failed, delayed = await _prepare(queue, older, ours, client)
        if is_unseen:
            await ours.queue(queue).set_pause_layout("list")
        await sides[pauser].pause(queue)
        ids += [await _happen(what, queue, older, ours, failed, delayed) for what in order]
        await sides[resumer].resume(queue)
        assert {job_id: _places(client, queue, job_id) for job_id in ids} == {job_id: ["wait"] for job_id in ids}, order

    await ours.start_worker("w", "q0", {}, concurrency=5)
    await until(lambda: client.zcard("bull:q0:completed") == 6, "all of one queue completed")
    await ours.close_worker("w")
    client.flushall()  # 4.x resumes without a marker, since its workers need none: not what is asked here


async def test_a_job_that_becomes_due_or_stalls_meanwhile_keeps_its_place(
    older: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    """Done by our worker, which promotes and looks for stalled jobs also while the queue is paused."""
    due = await ours.add("q", "due", {}, delay=300)
    stalled = await ours.add("q", "stalled", {})
    await ours.add("q", "in line", {})
    client.lrem("bull:q:wait", 1, stalled)
    client.lpush("bull:q:active", stalled)  # of a worker that died: no lock
    client.sadd("bull:q:stalled", stalled)
    await older.open_queue("q")
    await older.pause("q")
    await ours.start_worker("w", "q", {}, stalledInterval=100, drainDelay=1)
    await until(lambda: _places(client, "q", due) == ["paused"], "the due job in the list of older clients")
    await until(lambda: _places(client, "q", stalled) == ["paused"], "the stalled job in the list of older clients")

    await older.resume("q")

    await until(lambda: client.zcard("bull:q:completed") == 3, "all completed")


@pytest.mark.parametrize("older", ["5.81.5"], indirect=True)
async def test_one_layout_can_be_forced(older: PeerSide, ours: OurSide, client: redis.Redis) -> None:
    queue = ours.queue("q")
    await queue.add("job", {})
    await queue.set_pause_layout("list")
    await queue.pause()
    assert client.llen("bull:q:paused") == 1 and not client.exists("bull:q:wait")

    await queue.resume()
    await older.open_queue("q")
    await queue.set_pause_layout("field")
    await queue.pause()
    assert client.llen("bull:q:wait") == 1 and not client.exists("bull:q:paused")

    await queue.set_pause_layout(None)  # as noticed
    await queue.add("job", {})
    assert client.llen("bull:q:paused") == 2 and not client.exists("bull:q:wait")
    await queue.resume()


async def test_beside_newer_clients_jobs_stay_where_those_count_them(
    node: PeerSide, ours: OurSide, client: redis.Redis
) -> None:
    await node.open_queue("q")
    await ours.add("q", "job", {})
    await ours.pause("q")
    await ours.add("q", "job", {})

    assert (await node.peer.call("getJobCounts", queue="q"))["waiting"] == 2
    assert not client.hexists("bull:q:meta", "bppause")
    await ours.resume("q")

"""Adding a job in the place of a finished one with the same id."""

from __future__ import annotations

import pytest

from bullpen.errors import InvalidOption
from bullpen.queue import Added, JobState, NewJob
from tests.queue._kit import Failing, Gate, Kit, echo


@pytest.mark.requirement("X-78", "X-108", "X-107")
@pytest.mark.parametrize("state", ["completed", "failed"])
async def test_a_finished_leftover_gives_its_id_to_the_new_job(kit: Kit, state: str) -> None:
    """A failed delivery keeps the id of its row, and without this every later attempt would be ignored in silence."""
    queue = kit.queue()
    await queue.add("old", {"v": 1}, job_id="row-7", attempts=1)
    await kit.drain(echo if state == "completed" else Failing(RuntimeError("boom")), 1)
    kit.redis.rpush(f"{kit.base}row-7:logs", "a line of the old one")

    job = await queue.add("new", {"v": 2}, job_id="row-7", priority=3, replace_finished=True)

    assert job.added is Added.CREATED and job.blocked_by is None
    assert kit.fields("row-7").keys() == {"name", "data", "opts", "timestamp", "delay", "priority", "bp"}
    assert kit.fields("row-7")["data"] == '{"v":2}'
    assert list(kit.zset("prioritized")) == ["row-7"] and not kit.zset(state)
    assert not kit.has("row-7:logs")
    assert kit.events(job_id="row-7")[-3:] == [
        {"event": "removed", "jobId": "row-7", "prev": state},
        {"event": "added", "jobId": "row-7", "name": "new"},
        {"event": "waiting", "jobId": "row-7"},
    ]


@pytest.mark.requirement("X-78")
async def test_a_job_that_has_not_finished_is_a_duplicate_as_ever(kit: Kit) -> None:
    queue = kit.queue()
    gate = Gate()
    await queue.add("first", {"v": 1}, job_id="row-7")

    waiting = await queue.add("second", {"v": 2}, job_id="row-7", replace_finished=True)
    await kit.work(gate)
    await gate.reached()
    running = await queue.add("third", {"v": 3}, job_id="row-7", replace_finished=True)

    for job, state in ((waiting, JobState.WAITING), (running, JobState.ACTIVE)):
        assert job.added is Added.DUPLICATE
        assert job.blocked_by is not None and job.blocked_by.state is state
        assert job.data == {"v": 1}
    gate.open()


@pytest.mark.requirement("X-78")
async def test_it_works_in_bulk_and_with_lifo(kit: Kit) -> None:
    queue = kit.queue(attempts=1)
    await queue.add_many([NewJob("old", n, {"job_id": f"row-{n}"}) for n in range(3)])
    await kit.drain(Failing(RuntimeError("boom")), 3)
    await queue.pause()

    jobs = await queue.add_many(
        [NewJob("new", n, {"job_id": f"row-{n}", "replace_finished": n != 1, "lifo": n == 2}) for n in range(3)]
    )

    assert [job.added for job in jobs] == [Added.CREATED, Added.DUPLICATE, Added.CREATED]
    assert kit.ids("wait") == ["row-2", "row-0"]


@pytest.mark.requirement("X-78")
async def test_a_failed_child_that_its_parent_waits_for_is_not_replaced(kit: Kit) -> None:
    """The new job would be nobody's child, and the parent would wait for ever."""
    kit.seed("P", to="waiting-children", score=1)
    kit.seed("C", to="failed", score=1, parentKey=f"{kit.base}P", finishedOn=1)
    kit.redis.sadd(f"{kit.base}P:dependencies", f"{kit.base}C")

    job = await kit.queue().add("new", {}, job_id="C", replace_finished=True)

    assert job.added is Added.DUPLICATE
    assert job.blocked_by is not None and job.blocked_by.state is JobState.FAILED


async def test_it_needs_an_id_and_a_plain_answer(kit: Kit) -> None:
    with pytest.raises(InvalidOption, match="replace_finished: expected together with job_id, the id"):
        await kit.queue().add("job", {}, replace_finished=True)
    with pytest.raises(InvalidOption, match="replace_finished: expected True or False, got 'yes'"):
        await kit.queue().add("job", {}, job_id="a", replace_finished="yes")  # type: ignore[arg-type]  # the mistake

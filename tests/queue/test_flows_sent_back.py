"""Parents that go back in line: each runs when the children it needs have completed, whichever was sent back first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from bullpen.ports.edits import make_edit
from bullpen.queue import Flow, FlowNode, Job, JobState, Queue
from bullpen.queue.dead_letters.failed_set import FailedSetStore
from tests.queue._kit import Kit

pytestmark = pytest.mark.requirement("W-84")

SendBack = Callable[[Queue, str], Awaitable[object]]


def member(number: int, **options: Any) -> Flow:
    return Flow("member", number, **{"job_id": f"m{number}", "on_failure": "fail_parent", **options})


def group(**options: Any) -> Flow:
    return Flow("sum", job_id="top", children=[member(number, **options) for number in (1, 2, 3)])


async def sum_up(job: Job) -> Any:
    """A member returns its number, a parent what its children did, in their order."""
    if job.name == "member":
        return job.data
    values = await job.children_values()
    return [values[key] for key in sorted(values)]


async def fail_second(job: Job) -> Any:
    if job.name == "member" and job.data == 2:
        raise OSError("away")
    return await sum_up(job)


async def fail_second_and_parent(job: Job) -> Any:
    if job.name == "sum" or job.data == 2:
        raise OSError("away")
    return job.data


async def retry(queue: Queue, job_id: str) -> None:
    await queue.retry(job_id, reset_attempts=True)


async def redrive(queue: Queue, job_id: str) -> object:
    return await queue.dead_letters.redrive(await letter_of(queue, job_id))


async def redrive_edited(queue: Queue, job_id: str) -> object:
    letter_id = await letter_of(queue, job_id)
    letter = await queue.dead_letters.get(letter_id)
    assert letter is not None
    return await queue.dead_letters.redrive_edited(letter_id, make_edit(letter.data, data=20, why="it was away"))


async def redrive_failed(queue: Queue, job_id: str) -> object:
    return await queue.failed_set.redrive(await letter_of(queue, job_id, queue.failed_set))


async def letter_of(queue: Queue, job_id: str, store: FailedSetStore | None = None) -> str:
    letters = await (store or queue.dead_letters).list()
    return next(letter.id for letter in letters if letter.entry["originalJobId"] == job_id)


async def value_of(queue: Queue, job_id: str) -> Any:
    job = await queue.get_job(job_id)
    assert job is not None
    return job.return_value


async def add_and_fail(kit: Kit, flow: Flow, *, jobs: int = 4) -> FlowNode:
    tree = await kit.queue().add_flow(flow)
    await kit.drain(fail_second, jobs, dead_letters=True)
    assert await tree.job.state() is JobState.FAILED
    return tree


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("order", [("top", "m2"), ("m2", "top")])
@pytest.mark.parametrize("send_back", [retry, redrive, redrive_edited, redrive_failed])
async def test_a_parent_waits_for_the_member_that_failed(
    kit: Kit, send_back: SendBack, order: tuple[str, str], attempts: int
) -> None:
    queue = kit.queue()
    await add_and_fail(kit, group(attempts=attempts, backoff=1))

    for job_id in order:
        await send_back(queue, job_id)
        assert job_id != "top" or await queue.state_of("top") is JobState.WAITING_CHILDREN
    told = await kit.drain(sum_up, 2)

    assert told.ids("completed") == ["m2", "top"]
    assert await value_of(queue, "top") == [1, 20 if send_back is redrive_edited else 2, 3]
    assert kit.event_names("top")[-4:] == ["waiting-children", "waiting", "active", "completed"]


@pytest.mark.parametrize("bulk", ["retry_all", "redrive_all"])
@pytest.mark.parametrize("first", ["top", "m2"])
async def test_both_go_back_in_one_call(kit: Kit, bulk: str, first: str) -> None:
    """The call takes what finished first; here either may have."""
    queue = kit.queue()
    await add_and_fail(kit, group(attempts=1))
    kit.redis.zadd(kit.base + "failed", {first: 1})
    if bulk == "retry_all":
        assert await queue.retry_all() == 2
    else:
        oldest_first = [letter.id for letter in await queue.dead_letters.list()]
        if first == "top":
            store = kit.base[:-1] + "-dlq:wait"
            kit.redis.delete(store)
            kit.redis.rpush(store, *oldest_first)
        assert (await queue.dead_letters.redrive_all()).done == 2

    assert await queue.state_of("top") is JobState.WAITING_CHILDREN
    await kit.drain(sum_up, 2)

    assert await value_of(queue, "top") == [1, 2, 3]


async def test_a_parent_waits_for_members_that_had_not_finished_when_it_failed(kit: Kit) -> None:
    queue = kit.queue()
    flow = group(attempts=1)
    flow.children[2].options["delay"] = 600_000
    await add_and_fail(kit, flow, jobs=3)

    await queue.retry("m2")
    await queue.retry("top")
    await kit.drain(sum_up, 1)
    assert await queue.state_of("top") is JobState.WAITING_CHILDREN
    await queue.promote("m3")
    await kit.drain(sum_up, 2)

    assert await value_of(queue, "top") == [1, 2, 3]


async def test_a_parent_whose_member_fails_again_fails_again(kit: Kit) -> None:
    queue = kit.queue()
    await add_and_fail(kit, group(attempts=1))

    for _ in range(2):
        await queue.retry("top")
        await queue.retry("m2")
        await kit.drain(fail_second, 2)
        assert await queue.state_of("top") is JobState.FAILED
    await queue.retry_all()
    await kit.drain(sum_up, 2)

    assert await value_of(queue, "top") == [1, 2, 3]


async def test_a_parent_sent_back_alone_is_listed_as_blocked_until_the_member_is_removed(kit: Kit) -> None:
    queue = kit.queue()
    await add_and_fail(kit, group(attempts=1))

    await queue.retry("top")
    assert [(one.job.id, one.failed) async for one in queue.blocked_parents()] == [("top", (f"{kit.base}m2",))]
    await queue.remove("m2")
    await kit.drain(sum_up, 1)

    assert await value_of(queue, "top") == [1, 3]


@pytest.mark.parametrize("order", [("top", "step", "m2"), ("m2", "step", "top"), ("step", "top", "m2")])
async def test_the_steps_of_a_chain_run_one_after_the_other(kit: Kit, order: tuple[str, ...]) -> None:
    queue = kit.queue()
    step = Flow("step", job_id="step", on_failure="fail_parent", children=[member(2, attempts=1)])
    await add_and_fail(kit, Flow("sum", job_id="top", children=[step]), jobs=3)

    for job_id in order:
        await queue.retry(job_id)
    told = await kit.drain(sum_up, 3)

    assert told.ids("completed") == ["m2", "step", "top"]
    assert await value_of(queue, "top") == [[2]]


@pytest.mark.parametrize("order", [("top", "m2"), ("m2", "top")])
async def test_a_parent_in_another_queue_waits_too(kit: Kit, order: tuple[str, str]) -> None:
    members = f"{kit.name}-members"
    queues = {"top": kit.queue(), "m2": kit.queue(members)}
    await queues["top"].add_flow(group(attempts=1, queue=members))
    await kit.drain(fail_second, 3, queue=members)
    await kit.drain(fail_second, 1)

    for job_id in order:
        await queues[job_id].retry(job_id)
    assert await queues["top"].state_of("top") is JobState.WAITING_CHILDREN
    await kit.drain(sum_up, 1, queue=members)
    await kit.drain(sum_up, 1)

    assert await value_of(queues["top"], "top") == [1, 2, 3]


@pytest.mark.parametrize(("policy", "values"), [("ignore", [1, 3]), ("remove", [1, 3]), ("continue_parent", [1, 3])])
async def test_a_parent_that_does_without_the_member_runs_at_once(kit: Kit, policy: str, values: list[int]) -> None:
    queue = kit.queue()
    await queue.add_flow(group(attempts=1, on_failure=policy))
    await kit.drain(fail_second_and_parent, 4, concurrency=1)

    await queue.retry("top")
    assert await queue.state_of("top") is JobState.WAITING
    await kit.drain(sum_up, 1)

    assert await value_of(queue, "top") == values


async def test_a_parent_that_went_on_early_does_so_again(kit: Kit) -> None:
    queue = kit.queue()
    flow = group(attempts=1, on_failure="continue_parent")
    flow.children[2].options["delay"] = 600_000
    await queue.add_flow(flow)
    await kit.drain(fail_second_and_parent, 3)

    await queue.retry("top")

    assert await queue.state_of("top") is JobState.WAITING


@pytest.mark.parametrize("first", ["top", "m2"])
async def test_an_ignored_member_that_goes_back_with_its_parent_is_waited_for(kit: Kit, first: str) -> None:
    queue = kit.queue()
    await queue.add_flow(group(attempts=1, on_failure="ignore"))
    await kit.drain(fail_second_and_parent, 4)
    kit.redis.zadd(kit.base + "failed", {first: 1})

    assert await queue.retry_all() == 2
    assert await queue.state_of("top") is JobState.WAITING_CHILDREN
    await kit.drain(sum_up, 2)

    assert await value_of(queue, "top") == [1, 2, 3]


async def test_a_member_that_is_rebuilt_is_waited_for(kit: Kit) -> None:
    """Retention took the member; its letter names the parent."""
    queue = kit.queue()
    await add_and_fail(kit, group(attempts=1, remove_on_fail=True))
    assert await queue.get_job("m2") is None

    await redrive(queue, "m2")
    await redrive(queue, "top")
    assert await queue.state_of("top") is JobState.WAITING_CHILDREN
    await kit.drain(sum_up, 2)

    assert await value_of(queue, "top") == [1, 2, 3]


async def test_the_delay_of_an_earlier_attempt_is_not_waited_for_again(kit: Kit) -> None:
    queue = kit.queue()
    await add_and_fail(kit, group(attempts=1))
    kit.redis.hset(kit.base + "top", "delay", 600_000)

    await queue.retry_all()
    await kit.drain(sum_up, 2)

    assert await value_of(queue, "top") == [1, 2, 3]


async def test_a_parent_that_has_nowhere_to_wait_is_in_line(kit: Kit) -> None:
    queue = kit.queue()
    await add_and_fail(kit, group(attempts=1))
    kit.redis.set(kit.base + "waiting-children", "not a set")

    await queue.retry("top")

    assert kit.ids("wait") == ["top"]
    kit.redis.delete(kit.base + "waiting-children")

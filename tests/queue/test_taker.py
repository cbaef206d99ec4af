"""Jobs that are taken by hand: whoever takes one says what became of it, and everything else is as with a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.outcome import Completed, Delayed, Failed, Retry
from bullpen.errors import BullpenError, InvalidOption, JobLockLost, NotJson, PermanentError, QueueClosed, QueueError
from bullpen.queue import Flow, Job, JobState
from bullpen.queue.codec import Codec
from bullpen.worker import Taker
from tests.queue._kit import Kit, nothing, soon


@asynccontextmanager
async def taker_of(kit: Kit, **options: Any) -> AsyncIterator[Taker]:
    options.setdefault("stalled_interval", 60_000)
    async with Taker(kit.name, connection=kit.url, **options) as taker:
        yield taker


async def one(taker: Taker) -> Job:
    job = await soon(taker.take())
    assert isinstance(job, Job)
    return job


@pytest.mark.requirement("Q-60")
async def test_jobs_are_taken_and_completed(kit: Kit) -> None:
    jobs = await kit.queue().add_many(("n", n) for n in range(5))

    async with taker_of(kit) as taker:
        async for job in taker:
            await taker.complete(job, {"doubled": job.data * 2})
            if job.id == jobs[-1].id:
                break

    assert [json.loads(kit.fields(job.id)["returnvalue"]) for job in jobs] == [{"doubled": 2 * n} for n in range(5)]
    assert kit.ids("active") == []


async def test_what_settle_stored_is_there_when_it_returns(kit: Kit) -> None:
    await kit.queue().add("a")
    async with taker_of(kit) as taker:
        job = await one(taker)

        await taker.settle(job, Completed(b"7"))

        assert kit.fields(job.id)["returnvalue"] == "7"
        assert kit.zset("completed") == {job.id: pytest.approx(float(kit.fields(job.id)["finishedOn"]))}


async def test_nothing_is_taken_that_nobody_asked_for(kit: Kit) -> None:
    """Another worker may run it meanwhile."""
    async with taker_of(kit, concurrency=5) as taker:
        assert await taker.take(timeout=1) is None
        first, second = await kit.queue().add_many([("a", None)] * 2)
        job = await one(taker)

        assert (job.id, kit.ids("wait")) == (first.id, [second.id])
        assert taker.is_ready
        await taker.complete(job)
        told = await kit.drain(nothing, 1)
        assert told.ids("completed") == [second.id]


async def test_ahead_takes_as_many_as_may_be_held(kit: Kit) -> None:
    jobs = await kit.queue().add_many([("a", None)] * 3)
    async with taker_of(kit, concurrency=2, ahead=True) as taker:
        await kit.until(lambda: taker.held == 2, "two wait here")

        assert kit.ids("wait") == [jobs[2].id]
        assert [(await one(taker)).id for _ in range(2)] == [job.id for job in jobs[:2]]

    assert sorted(kit.ids("wait")) == sorted(job.id for job in jobs)


async def test_several_wait_at_the_same_time(kit: Kit) -> None:
    async with taker_of(kit, concurrency=3) as taker:
        waiting = asyncio.gather(*(one(taker) for _ in range(3)))
        await asyncio.sleep(0)
        jobs = await kit.queue().add_many([("a", None)] * 3)

        assert sorted(job.id for job in await waiting) == sorted(job.id for job in jobs)


async def test_no_more_are_held_than_allowed(kit: Kit) -> None:
    await kit.queue().add_many([("a", None)] * 2)
    async with taker_of(kit, concurrency=1) as taker:
        job = await one(taker)
        assert await taker.take(timeout=50) is None

        waiting = asyncio.create_task(taker.take())
        await taker.complete(job)

        assert await soon(waiting) is not None


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_task_that_holds_all_slots_is_told_and_does_not_stand_still(kit: Kit, concurrency: int) -> None:
    """Nobody else could settle what it took: without a word, take() would wait for ever."""
    await kit.queue().add_many([("a", None)] * 4)
    async with taker_of(kit, concurrency=concurrency) as taker:
        held = [await taker.take() for _ in range(concurrency)]

        with pytest.raises(QueueError, match="settle one before the next take\\(\\), raise concurrency"):
            await taker.take()
        assert await taker.take(timeout=1) is None, "this one ends"
        elsewhere = asyncio.create_task(taker.take())
        await taker.complete(held[0])  # type: ignore[arg-type]  # it is one

        assert isinstance(await soon(elsewhere), Job)


async def test_a_loop_waits_for_those_who_settle_what_it_takes(kit: Kit) -> None:
    await kit.queue().add_many([("a", None)] * 5)
    async with taker_of(kit) as taker, asyncio.TaskGroup() as group:
        count = 0
        async for job in taker:
            group.create_task(taker.complete(job))
            if (count := count + 1) == 5:
                break

    assert len(kit.zset("completed")) == 5


async def test_a_job_that_was_cancelled_says_so(kit: Kit) -> None:
    """A longer lock would not have helped, and nobody runs it again."""
    queue = kit.queue()
    job = await queue.add("a")
    async with taker_of(kit) as taker:
        taken = await one(taker)
        await queue.cancel(job.id, "not needed")
        await kit.until(lambda: taker.held == 0, "it is taken back")

        with pytest.raises(JobLockLost, match=r"outcome not written, the job was cancelled: not needed$") as caught:
            await taker.complete(taken)

    assert caught.value.cancelled == "not needed"


async def test_a_job_that_was_settled_twice_says_so(kit: Kit) -> None:
    """Its lock was not lost, and nobody runs it again."""
    added = await kit.queue().add("a")
    async with taker_of(kit) as taker:
        job = await one(taker)
        await taker.complete(job)

        with pytest.raises(JobLockLost, match=r"outcome not written, it was settled already$"):
            await taker.complete(job)
        with pytest.raises(JobLockLost, match=r"outcome not written, it was not taken by a taker$"):
            await taker.complete(added)


async def test_a_job_that_went_back_at_close_says_so(kit: Kit) -> None:
    await kit.queue().add("a")
    async with taker_of(kit) as taker:
        job = await one(taker)

    with pytest.raises(JobLockLost, match=r"outcome not written, it went back when its taker closed, and runs again$"):
        await taker.complete(job)


async def test_closing_with_a_job_in_hand_is_no_reason_to_warn(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    job = await kit.queue().add("a")
    with caplog.at_level("INFO", "bullpen.worker"):
        async with taker_of(kit) as taker:
            await one(taker)

    assert kit.ids("wait") == [job.id]
    assert [record.levelname for record in caplog.records if "given back" in record.message] == ["INFO"]


async def test_whoever_stops_waiting_gets_no_job_and_loses_none(kit: Kit) -> None:
    """Also when it comes in that very moment."""
    queue, done = kit.queue(), 0
    async with taker_of(kit) as taker:
        for turns in range(20):
            waiting = asyncio.create_task(taker.take())
            await queue.add("a")
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            taken = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if isinstance(taken, Job):  # it was quicker
                await taker.complete(taken)
                done += 1
        for _ in range(20 - done):
            await taker.complete(await one(taker))

    assert len(kit.zset("completed")) == 20


async def test_a_failure_is_judged_by_the_jobs_own_attempts(kit: Kit) -> None:
    await kit.queue().add("a", attempts=2, backoff=Backoff.fixed(5))
    async with taker_of(kit) as taker:
        first = await taker.fail(await one(taker), "no answer")
        again = await one(taker)
        last = await taker.fail(again, ValueError("no answer again"))

    assert isinstance(first, Retry) and first.delay_ms == 5
    assert isinstance(last, Failed)
    assert kit.fields(again.id)["failedReason"] == "no answer again"
    assert kit.fields(again.id)["atm"] == "2"


async def test_a_failure_goes_to_the_dead_letters(kit: Kit) -> None:
    queue = kit.queue()
    job = await queue.add("a", attempts=5)
    async with taker_of(kit, dead_letters=True) as taker:
        await taker.fail(await one(taker), PermanentError("no such address"))

    assert [entry.job_id for entry in await queue.dead_letters.list()] == [job.id]


@pytest.mark.parametrize(
    ("move", "state"),
    [
        (lambda taker, job: taker.move_to_delayed(job, 60_000), JobState.DELAYED),
        (lambda taker, job: taker.move_to_wait(job), JobState.WAITING),
        (lambda taker, job: taker.settle(job, Delayed(60_000)), JobState.DELAYED),
    ],
    ids=["delayed", "wait", "an outcome"],
)
async def test_a_job_is_moved_and_no_attempt_is_counted(
    kit: Kit, move: Callable[[Taker, Job], Any], state: JobState
) -> None:
    job = await kit.queue().add("a", attempts=3)
    async with taker_of(kit) as taker:
        await move(taker, await one(taker))

        assert await job.state() is state
    assert kit.fields(job.id).get("atm") is None


async def test_a_parent_waits_for_its_children(kit: Kit) -> None:
    queue = kit.queue()
    async with taker_of(kit) as taker:
        parent = await queue.add("parent")
        taken = await one(taker)
        await kit.queue(f"{kit.name}-other").add("child", parent=taken, on_failure="fail_parent")

        await taker.move_to_waiting_children(taken)

        assert await parent.state() is JobState.WAITING_CHILDREN


@pytest.mark.requirement("Q-20")
async def test_locks_are_renewed_until_a_job_is_settled(kit: Kit) -> None:
    await kit.queue().add("a")
    async with taker_of(kit, lock=400) as taker:
        job = await one(taker)
        await asyncio.sleep(1.0)

        await taker.complete(job)

    assert "stc" not in kit.fields(job.id)
    assert job.id in kit.zset("completed")


async def test_a_lock_is_extended_by_hand(kit: Kit) -> None:
    await kit.queue().add("a")
    async with taker_of(kit, lock=60_000, skip_lock_renewal=True) as taker:
        job = await one(taker)

        await taker.extend_lock(job, 600_000)

        assert kit.command("PTTL", f"{kit.base}{job.id}:lock") > 60_000
        kit.redis.delete(f"{kit.base}{job.id}:lock")
        kit.redis.set(f"{kit.base}{job.id}:lock", "another")
        with pytest.raises(JobLockLost):
            await taker.extend_lock(job)
        kit.redis.delete(f"{kit.base}{job.id}:lock")


async def test_a_job_that_is_gone_is_told_and_cannot_be_settled(kit: Kit) -> None:
    lost: list[str] = []
    queue = kit.queue()
    job = await queue.add("a")
    async with taker_of(kit, on_lost=lambda job: lost.append(job.id)) as taker:
        taken = await one(taker)
        await queue.cancel(job.id, "not needed")
        await kit.until(lambda: lost == [job.id], "it is told")

        with pytest.raises(JobLockLost):
            await taker.complete(taken)

    assert taken.cancelled
    assert job.id in kit.zset("failed")


async def test_what_another_worker_has_by_now_is_not_written(kit: Kit) -> None:
    """The lock ran out unnoticed."""
    await kit.queue().add("a")
    async with taker_of(kit, lock=60_000) as taker:
        job = await one(taker)
        kit.redis.set(f"{kit.base}{job.id}:lock", "of another")

        with pytest.raises(JobLockLost):
            await taker.complete(job)

        assert taker.held == 0
        assert kit.ids("active") == [job.id]
        kit.redis.delete(f"{kit.base}{job.id}:lock")
        kit.redis.lrem(f"{kit.base}active", 0, job.id)
        kit.redis.rpush(f"{kit.base}wait", job.id)


async def test_a_job_is_settled_once(kit: Kit) -> None:
    await kit.queue().add("a")
    async with taker_of(kit) as taker:
        job = await one(taker)
        await taker.complete(job)

        with pytest.raises(JobLockLost, match="settled"):
            await taker.complete(job)


async def test_a_result_that_cannot_be_stored_changes_nothing(kit: Kit) -> None:
    await kit.queue().add("a")
    async with taker_of(kit) as taker:
        job = await one(taker)
        with pytest.raises(NotJson):
            await taker.complete(job, object())
        assert kit.ids("active") == [job.id]

        await taker.complete(job, "after all")

    assert kit.fields(job.id)["returnvalue"] == '"after all"'


async def test_what_is_not_settled_goes_back_with_close(kit: Kit) -> None:
    job = await kit.queue().add("a")
    async with taker_of(kit) as taker:
        await one(taker)

    assert kit.ids("wait") == [job.id]
    assert kit.fields(job.id).get("atm") is None
    assert not kit.has(f"{job.id}:lock")


async def test_what_goes_back_stands_in_its_old_order(kit: Kit) -> None:
    """Received or not: whoever takes one job after the other has them in the order in which they were added."""
    ids = [job.id for job in await kit.queue().add_many([("a", n) for n in range(6)])]
    async with taker_of(kit, ahead=True, concurrency=4) as taker:
        await one(taker)
        await one(taker)
        await kit.until(lambda: taker.held == 4, "all that may be held are here")

    assert kit.ids("wait") == ids


async def test_a_loop_ends_when_the_taker_is_closed(kit: Kit) -> None:
    async def loop() -> list[Job]:
        return [job async for job in taker]

    async with taker_of(kit) as taker:
        looping = asyncio.create_task(loop())
        await asyncio.sleep(0)
        await taker.close()

        assert await soon(looping) == []
        assert await loop() == []


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("within_ms", [None, 600_000])
async def test_take_says_that_the_taker_is_closed(kit: Kit, ahead: bool, within_ms: int | None) -> None:
    """None means "not yet": who asks again at once would keep the event loop from everything else, for ever."""
    async with taker_of(kit, ahead=ahead) as taker:
        waiting = asyncio.create_task(taker.take(within_ms))
        await asyncio.sleep(0)
        await taker.close()

        for call in (waiting, taker.take(within_ms)):
            with pytest.raises(QueueClosed, match=f"the taker of queue '{kit.name}' is closed; make a new Taker"):
                await soon(call)


async def test_a_loop_of_take_ends_with_its_taker(kit: Kit) -> None:
    async def loop() -> None:
        while True:
            if (job := await taker.take(1_000)) is not None:
                await taker.complete(job)

    job = await kit.queue().add("a")
    async with taker_of(kit) as taker:
        looping = asyncio.create_task(loop())
        await job.result(timeout=10_000)

    with pytest.raises(QueueClosed):
        await soon(looping)


async def test_sealed_jobs_are_opened_and_their_results_sealed(kit: Kit) -> None:
    codec = Codec(keys={"k": b"7" * 32})
    queue = kit.queue(codec=codec)
    job = await queue.add("a", {"secret": 1})
    async with taker_of(kit, codec=codec) as taker:
        taken = await one(taker)
        assert taken.data == {"secret": 1}
        await taker.complete(taken, {"secret": 2})

    assert "secret" not in kit.fields(job.id)["returnvalue"]
    assert await job.result() == {"secret": 2}


async def test_a_flow_runs_through(kit: Kit) -> None:
    await kit.queue().add_flow(Flow("parent", children=[Flow("child", on_failure="fail_parent")] * 2))
    async with taker_of(kit, concurrency=2) as taker:
        names = []
        for _ in range(3):
            job = await one(taker)
            names.append(job.name)
            await taker.complete(job)

    assert names == ["child", "child", "parent"]


@pytest.mark.parametrize("options", [{"processes": True}, {"timeout": 5}, {"ahead": 1}, {"on_lost": 7}], ids=str)
def test_nonsense_is_refused(kit: Kit, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Taker(kit.name, connection=kit.url, **options)


async def test_an_outcome_that_is_none_is_refused(kit: Kit) -> None:
    await kit.queue().add("a")
    async with taker_of(kit) as taker:
        job = await one(taker)
        with pytest.raises(InvalidOption):
            await taker.settle(job, "completed")  # type: ignore[arg-type]
        with pytest.raises(InvalidOption):
            await taker.fail(job, 5)  # type: ignore[arg-type]
        await taker.complete(job)


async def test_one_that_was_not_started_says_so(kit: Kit) -> None:
    with pytest.raises(BullpenError, match="was not started"):
        await Taker(kit.name, connection=kit.url).take()

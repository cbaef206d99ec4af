"""Chains, groups and chords: results go from one task to the next, whatever dies in between."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest

from bullpen import Bullpen, InvalidOption, Job, JobFailed, JobState, PermanentError, Queue, Worker, chain, chord, group
from tests.tasks import child_module

pytestmark = pytest.mark.requirement("W-84")

MEMBERS = 10_000 if os.environ.get("BULLPEN_TEST_LONG") == "1" else 300
PATIENCE_MS = 120_000


@pytest.fixture
def app(redis_url: str) -> Bullpen:
    return Bullpen(redis_url)


@asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await run


@dataclass
class Order:
    number: int
    day: date


async def test_each_step_of_a_chain_gets_the_result_of_the_one_before(app: Bullpen) -> None:
    """Typed: a dataclass arrives as one. Plain functions and other queues take part."""

    @app.task("load")
    async def load(number: int) -> Order:
        return Order(number, date(2030, 1, number))

    @app.task("price")
    def price(order: Order, tax: int = 0) -> int:
        assert isinstance(order, Order)
        return order.day.day * 100 + tax

    @app.task("show")
    async def show(job: Job, total: int, currency: str) -> str:
        return f"{total} {currency}"

    async with running(app):
        job = await chain(load.call(7), price.after(tax=3), show.after(currency="EUR")).add()
        assert await job.result(PATIENCE_MS) == "703 EUR"
        short = await chain(load.call(2), price).add()
        assert await short.result(PATIENCE_MS) == 200


async def test_a_failed_step_fails_those_after_it(app: Bullpen) -> None:
    @app.task("steps", attempts=1)
    async def fail(number: int) -> int:
        raise PermanentError(f"no {number}")

    @app.task("steps")
    async def double(number: int) -> int:
        return 2 * number

    async with running(app):
        job = await chain(fail.call(1), double, double).add()
        with pytest.raises(JobFailed, match=r"child .* failed"):
            await job.result(PATIENCE_MS)


async def test_a_chord_gets_the_results_in_order(app: Bullpen) -> None:
    """Ten thousand in the long run. One flow, one callback."""

    @app.task("members")
    async def square(number: int) -> int:
        return number * number

    @app.task("callback")
    async def collect(squares: list[int], label: str = "") -> list[int]:
        return squares

    app.task_queue("other", concurrency=1)
    work = chord(group(square.call(number) for number in range(MEMBERS)), collect.after(label="x"))
    async with running(app):
        job = await work.add()
        assert await job.result(PATIENCE_MS) == [number * number for number in range(MEMBERS)]
        assert await (await chord(group([]), collect).add()).result(PATIENCE_MS) == []


async def test_chains_are_members_of_groups_and_steps_after_chords(app: Bullpen) -> None:
    @app.task("nested")
    async def one(number: int) -> int:
        return number

    @app.task("nested")
    async def add(number: int, more: int = 1) -> int:
        return number + more

    @app.task("nested")
    async def total(numbers: list[int]) -> int:
        return sum(numbers)

    members = group(chain(one.call(number), add, add.after(more=10)) for number in range(3))
    async with running(app):
        job = await chain(chord(members, total), add.after(more=100)).add()
        assert await job.result(PATIENCE_MS) == 3 + 33 + 100
        jobs = await group(one.call(1), chain(one.call(1), add)).add()
        assert [await job.result(PATIENCE_MS) for job in jobs] == [1, 2]


@pytest.mark.parametrize("on_failure", ["fail_parent", "ignore", "remove", "wait"])
async def test_a_member_that_fails(app: Bullpen, on_failure: Any) -> None:
    """The callback fails, runs without it, or waits until the member was redriven."""
    is_repaired = False

    @app.task("members", attempts=1)
    async def work(number: int) -> int:
        if number == 3 and not is_repaired:
            raise PermanentError("no")
        return number

    @app.task("callback")
    async def collect(numbers: list[int]) -> list[int]:
        return numbers

    async with running(app):
        job = await chord(group(work.call(n) for n in range(5)), collect, on_failure=on_failure).add()
        members, callbacks = app.queue("members"), app.queue("callback")
        if on_failure in ("ignore", "remove"):
            assert await job.result(PATIENCE_MS) == [0, 1, 2, 4]
            return
        member = await members.get_job(f"{job.id}~3")
        assert member is not None
        with pytest.raises(JobFailed):
            await member.result(PATIENCE_MS)
        if on_failure == "fail_parent":
            with pytest.raises(JobFailed, match="child"):
                await job.result(PATIENCE_MS)
        else:
            blocked = [one.job.id async for one in callbacks.blocked_parents()]
            assert blocked == [job.id]

        is_repaired = True
        assert (await members.dead_letters.redrive_all()).done == 1
        again = await members.get_job(member.id)
        assert again is not None
        assert await again.result(PATIENCE_MS) == 3
        if on_failure == "fail_parent":
            await callbacks.retry(job.id)
        assert await job.result(PATIENCE_MS) == [0, 1, 2, 3, 4]


async def test_a_callback_that_is_retried_gets_all_results_again(app: Bullpen) -> None:
    """What the members returned is stored with the callback, not in the worker."""
    runs = 0

    @app.task("members")
    async def work(number: int) -> int:
        return number

    @app.task("callback", attempts=3, backoff=1)
    async def collect(numbers: list[int]) -> list[int]:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ConnectionError("away")
        return numbers

    async with running(app):
        job = await chord(group(work.call(n) for n in range(20)), collect).add()
        assert await job.result(PATIENCE_MS) == list(range(20))
    assert runs == 2


async def test_results_wait_for_a_worker_of_the_callback(redis_url: str) -> None:
    """All members are done and their worker has left; then one for the callback comes."""
    first, second = Bullpen(redis_url), Bullpen(redis_url)

    async def square(number: int) -> int:
        return number * number

    async def collect(numbers: list[int]) -> int:
        return sum(numbers)

    members = first.task("members")(square)
    job = await chord(group(members.call(n) for n in range(10)), second.task("callback")(collect)).add()
    async with running(first):
        kids = [await first.queue("members").get_job(f"{job.id}~{number}") for number in range(10)]
        for kid in kids:
            assert kid is not None
            await kid.result(PATIENCE_MS)
    assert await second.queue("callback").state_of(job.id) is JobState.WAITING
    async with running(second):
        assert await job.result(PATIENCE_MS) == 285


async def test_results_reach_tasks_in_child_processes(redis_url: str) -> None:
    work = chain(child_module.square.call(4), child_module.square)
    async with (
        Worker("heavy", child_module.square.handlers, connection=redis_url, processes=True),
        Queue("heavy", connection=redis_url) as queue,
    ):
        tree = await queue.add_flow(work.to_flow(), durability="memory")
        assert await tree.job.result(PATIENCE_MS) == 256


async def test_map_keeps_a_bound(app: Bullpen) -> None:
    """Never more than so many are stored and unfinished."""
    most = running_now = 0

    @app.task("bounded")
    async def work(number: int) -> int:
        nonlocal most, running_now
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0)
        running_now -= 1
        return number

    @app.task("bounded", attempts=1)
    async def fail(number: int) -> int:
        raise PermanentError("no")

    async with running(app):
        assert await work.map((work.call(n) for n in range(30)), at_once=3, timeout=PATIENCE_MS) == list(range(30))
        assert most <= 3
        with pytest.raises(JobFailed):
            await fail.map([fail.call(n) for n in range(30)], at_once=2, timeout=PATIENCE_MS)
        counts = await app.queue("bounded").counts()
    assert counts.failed + counts.pending <= 4
    with pytest.raises(InvalidOption, match="at_once"):
        await work.map([], at_once=0)


def test_what_cannot_follow_is_refused(app: Bullpen) -> None:
    @app.task("steps")
    async def one(number: int) -> int:
        return number

    @app.task("steps")
    async def two(number: int, other: int) -> None: ...

    @app.task("steps")
    async def nothing() -> None: ...

    with pytest.raises(InvalidOption, match="chain: expected at least two"):
        chain(one.call(1))  # type: ignore[call-overload]  # that is the test
    with pytest.raises(InvalidOption, match=r"chain: expected a task, or task\.after"):
        chain(one.call(1), one.call(2))  # type: ignore[call-overload]  # that is the test
    with pytest.raises(InvalidOption, match="chain: expected a call of a task first"):
        chain(one, one)  # type: ignore[call-overload]  # that is the test
    with pytest.raises(InvalidOption, match="a first parameter"):
        nothing.after()  # type: ignore[misc]  # that is the test
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        one.after(other=1)  # type: ignore[call-arg]  # that is the test
    with pytest.raises(InvalidOption, match="arguments of task 'two'"):
        two.after("b")  # type: ignore[arg-type]  # that is the test
    with pytest.raises(InvalidOption, match="group: expected calls"):
        group([one.after()])  # type: ignore[arg-type]  # that is the test
    with pytest.raises(InvalidOption, match="group: expected calls"):
        group([one])  # type: ignore[arg-type]  # that is the test
    with pytest.raises(InvalidOption, match="chord: expected group"):
        chord([one.call(1)], one)  # type: ignore[arg-type]  # that is the test


@pytest.mark.parametrize("members", [5, None])
def test_a_group_is_of_calls(members: Any) -> None:
    with pytest.raises(InvalidOption, match=r"group: expected calls of tasks: task.call\(...\)"):
        group(members)


def test_a_group_of_a_coroutine_is_told_what_it_takes(app: Bullpen) -> None:
    """Calling the function in place of `call` is a common slip."""

    @app.task()
    async def load(table: str) -> str:
        return table

    with pytest.raises(InvalidOption, match=r"group: expected calls of tasks: task.call\(...\), got <coroutine"):
        group(load("a"))  # the mistake under test

"""A task that is to end does end, and whoever waits for that does not wait for ever."""

from __future__ import annotations

import asyncio

import pytest

from bullpen._kernel.ending import end, to_its_end


class Deaf:
    """A task that misses its first cancellations, as a driver's `wait_for` can."""

    def __init__(self, misses: int) -> None:
        self.misses = misses
        self.begun = asyncio.Event()

    async def __call__(self) -> None:
        self.begun.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self.misses:
                    raise
                self.misses -= 1


async def test_a_task_that_misses_its_cancellation_is_told_again() -> None:
    deaf, good = Deaf(2), Deaf(0)
    tasks = [asyncio.create_task(each()) for each in (deaf, good)]
    await asyncio.gather(deaf.begun.wait(), good.begun.wait())

    async with asyncio.timeout(10):
        await end(*tasks, again_after_s=0.01)

    assert all(task.cancelled() for task in tasks)
    assert deaf.misses == 0


async def test_cleaning_up_is_not_cut_short() -> None:
    cleaned, begun = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.set()

    task = asyncio.create_task(work())
    await begun.wait()

    await end(task)

    assert cleaned.is_set()


async def test_what_has_ended_already_is_left_alone() -> None:
    async def fail() -> None:
        raise ValueError("mine")

    task = asyncio.create_task(fail())
    await asyncio.wait([task])

    await end(task)
    await end()

    assert isinstance(task.exception(), ValueError)


async def test_a_query_ends_before_its_caller_however_often_that_is_cancelled() -> None:
    """A connection that is torn in the middle of a query is lost; anyio cancels until it is obeyed."""
    begun, go_on, ended = asyncio.Event(), asyncio.Event(), []

    async def query() -> None:
        begun.set()
        await go_on.wait()
        ended.append(True)

    caller = asyncio.create_task(to_its_end(query()))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert not caller.done()
    go_on.set()

    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]

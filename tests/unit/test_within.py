"""Waiting for a coroutine with a limit, and without a timer where it never waits."""

from __future__ import annotations

import asyncio

import pytest

from bullpen._kernel.within import within


async def test_what_answers_at_once_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[float] = []
    monkeypatch.setattr(asyncio, "timeout", timers.append)

    async def answer() -> int:
        return 7

    assert await within(answer(), 1) == 7
    assert timers == []


async def test_what_waits_goes_on_in_the_same_task() -> None:
    task = asyncio.current_task()

    async def wait() -> list[object]:
        seen: list[object] = [asyncio.current_task()]
        async with asyncio.timeout(60):  # a library's own limit begins in the first step and ends in a later one
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(asyncio.current_task())
        return seen

    assert await within(wait(), 60) == [task] * 4


async def test_after_the_limit_it_is_cancelled() -> None:
    ended = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        await within(hang(), 0.001)
    assert ended == ["cancelled"]


async def test_it_may_answer_although_it_was_cancelled_by_somebody_else() -> None:
    begun = asyncio.Event()

    async def stubborn() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            return "tidied up"
        return "never"

    task = asyncio.create_task(within(stubborn(), 60))
    await begun.wait()
    task.cancel()
    assert await task == "tidied up"


@pytest.mark.parametrize("waits", [False, True])
async def test_its_errors_are_raised(waits: bool) -> None:
    async def fail() -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        await within(fail(), 60)

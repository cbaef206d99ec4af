"""Periodic work runs when it should, never twice at the same time, and survives its own failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen._kernel.ticker import Ticker
from bullpen.errors import InvalidOption


class Work:
    """An action that counts, and can be told what to do."""

    def __init__(self, *answers: bool | BaseException) -> None:
        self.answers = list(answers)
        self.runs = 0
        self.running = 0
        self.overlaps = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self._ran = asyncio.Event()

    async def __call__(self) -> bool | None:
        self.overlaps += self.running
        self.running += 1
        self.entered.set()
        try:
            await self.gate.wait()
            self.runs += 1
            self._ran.set()
            answer = self.answers.pop(0) if self.answers else None
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            self.running -= 1

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.runs < count:
                self._ran.clear()
                await self._ran.wait()


@pytest.mark.requirement("O-49", "X-28")
async def test_it_runs_at_once_and_then_every_so_often() -> None:
    work = Work()

    async with Ticker("t", work, every=5):
        await work.until(3)

    assert work.runs >= 3


@pytest.mark.requirement("X-93", "X-28")
async def test_a_run_never_overlaps_the_next() -> None:
    work = Work()
    work.gate.clear()
    async with Ticker("t", work, every=1) as ticker:
        for _ in range(20):
            ticker.wake()
            await asyncio.sleep(0.001)  # the interval passes many times while the first run is still under way
        work.gate.set()
        await work.until(2)

    assert work.overlaps == 0


@pytest.mark.requirement("X-93")
async def test_it_runs_again_at_once_while_more_is_waiting() -> None:
    work = Work(True, True, True, False)

    async with Ticker("t", work, every=timedelta(hours=1)):
        await work.until(4)
        await asyncio.sleep(0)

    assert work.runs == 4


async def test_waking_it_does_not_wait_for_the_interval() -> None:
    work = Work()

    async with Ticker("t", work, every=timedelta(hours=1)) as ticker:
        await work.until(1)
        ticker.wake()
        await work.until(2)


async def test_waking_it_while_it_runs_makes_it_run_once_more() -> None:
    """What woke it may have come after the run had looked."""
    work = Work()
    work.gate.clear()
    async with Ticker("t", work, every=timedelta(hours=1)) as ticker:
        await work.entered.wait()
        ticker.wake()
        ticker.wake()
        work.gate.set()
        await work.until(2)

    assert work.runs == 2


async def test_the_first_run_may_wait_too() -> None:
    work = Work()

    async with Ticker("t", work, every=timedelta(hours=1), at_once=False):
        await asyncio.sleep(0.01)

    assert work.runs == 0


async def test_a_failure_is_told_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    work = Work(ValueError("one"), ValueError("two"), False)
    events: list[tuple[str, dict[str, Any]]] = []
    forget = telemetry.subscribe(lambda event, fields: events.append((event, fields)))

    with caplog.at_level(logging.WARNING, "bullpen.ticker"):
        async with Ticker("t", work, every=1):
            await work.until(4)
    forget()

    assert [record.getMessage() for record in caplog.records] == [
        "t failed: one; it keeps trying",
        "t works again after 2 failures",
    ]
    assert [fields["failures"] for event, fields in events if event == "ticker.failed"] == [1, 2]


async def test_stopping_lets_the_run_end_and_may_be_repeated() -> None:
    work = Work()
    work.gate.clear()
    ticker = Ticker("t", work, every=1)
    await ticker.start()
    await work.entered.wait()

    stopping = asyncio.create_task(ticker.stop())
    await asyncio.sleep(0)
    still_running = work.running
    work.gate.set()
    await stopping
    await ticker.stop()

    assert still_running == 1
    assert work.runs == 1


async def test_stopping_does_not_wait_for_the_pause_after_a_failure() -> None:
    work = Work(*(ValueError("no") for _ in range(50)))
    async with Ticker("t", work, every=1) as ticker:
        await work.until(2)

        async with asyncio.timeout(1):
            await ticker.stop()


async def test_a_cancellation_that_nobody_asked_for_is_a_failure_like_others() -> None:
    """A driver may let one through; a ticker that ended by it would be missed by nobody until it is too late."""
    work = Work(asyncio.CancelledError())

    async with Ticker("t", work, every=1):
        await work.until(2)

    assert work.runs >= 2


async def test_stopping_before_the_start_is_harmless() -> None:
    ticker = Ticker("t", Work(), every=1)

    await ticker.stop()

    assert ticker.runs == 0


@pytest.mark.requirement("O-49")
async def test_a_pattern_runs_at_its_next_match_by_the_given_clock() -> None:
    """Between systems the clock of the server decides, so it can be passed in."""
    start = int(datetime(2030, 1, 1, 8, 59, 59, 950_000, tzinfo=UTC).timestamp() * 1000)
    loop = asyncio.get_running_loop()
    began = loop.time()
    work = Work()

    async with Ticker(
        "t", work, cron="0 9 * * *", at_once=False, now_ms=lambda: start + int((loop.time() - began) * 1000)
    ):
        await work.until(1)

    assert work.runs == 1
    assert loop.time() - began >= 0.04


@pytest.mark.parametrize(
    "make",
    [
        lambda work: Ticker("t", work),
        lambda work: Ticker("t", work, every=1, cron="* * * * *"),
        lambda work: Ticker("t", work, every=0),
        lambda work: Ticker("t", work, cron="nonsense"),
        lambda work: Ticker("t", work, cron="* * * * *", tz="Nowhere/Land"),
        lambda work: Ticker("t", work, every=1, tz="UTC"),
    ],
)
def test_times_that_make_no_sense_are_refused(make: Callable[[Work], Ticker]) -> None:
    async def work() -> None: ...

    with pytest.raises(InvalidOption, match=r"every|pattern|tz"):
        make(work)  # type: ignore[arg-type]  # any action will do

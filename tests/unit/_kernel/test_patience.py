"""Pauses that grow, and the moment at which to give up."""

from __future__ import annotations

import asyncio
import time

import pytest

from bullpen._kernel import patience as module
from bullpen._kernel.patience import Patience


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def longest() -> float:
    return 1.0


def shortest() -> float:
    return 0.0


def test_pauses_double_up_to_the_longest(clock: Clock) -> None:
    """What is away for long is asked rarely, and never more rarely than was said."""
    patience = Patience(first_s=1, longest_s=5, random=longest)

    assert all(patience.block() for _ in range(5))

    assert clock.slept == [1, 2, 4, 5, 5]


def test_a_pause_is_at_least_half_of_its_length(clock: Clock) -> None:
    """Callers that lost the same server come back at different moments, but none at once."""
    patience = Patience(first_s=1, longest_s=5, random=shortest)

    assert all(patience.block() for _ in range(3))

    assert clock.slept == [0.5, 1, 2]


def test_after_a_success_the_first_pause_comes_again(clock: Clock) -> None:
    patience = Patience(first_s=1, longest_s=5, random=longest)
    patience.block()
    patience.block()

    patience.reset()
    patience.block()

    assert clock.slept == [1, 2, 1]


def test_a_try_after_the_deadline_is_not_waited_for(clock: Clock) -> None:
    """Whoever waits for the answer hears the error as soon as nothing more can come of waiting."""
    patience = Patience(first_s=1, longest_s=10, within_s=4, random=longest)

    tries = [patience.block() for _ in range(3)]

    assert tries == [True, True, False]
    assert clock.slept == [1, 2]


def test_the_last_try_is_made_at_the_deadline_if_asked_for(clock: Clock) -> None:
    """A call that may take all of its time is tried once more when that time is up."""
    patience = Patience(first_s=1, longest_s=10, until=clock.now + 4, last_try=True, random=longest)

    tries = [patience.block() for _ in range(4)]

    assert tries == [True, True, True, False]
    assert clock.slept == [1, 2, 1]


def test_a_length_that_somebody_else_knows_is_taken_as_it_is(clock: Clock) -> None:
    """A connection knows when it will be tried next: the pause is that long, and nothing grows."""
    patience = Patience(first_s=1, longest_s=10, within_s=10, random=shortest)

    patience.block(3.0)
    patience.block()
    is_left = patience.block(9.0)

    assert clock.slept == [3.0, 0.5]
    assert not is_left


async def test_a_pause_of_the_loop_waits_as_well() -> None:
    patience = Patience(first_s=0.02, within_s=5, random=longest)
    before = time.monotonic()

    assert await patience.pause()

    assert time.monotonic() - before > 0.015


async def test_an_event_ends_a_pause_early() -> None:
    """Whoever closes does not wait for somebody else's pause."""
    closing = asyncio.Event()
    patience = Patience(first_s=60, longest_s=60)
    asyncio.get_running_loop().call_later(0.01, closing.set)

    async with asyncio.timeout(20):
        assert await patience.pause(unless=closing)


async def test_without_time_a_pause_of_the_loop_is_refused_at_once() -> None:
    patience = Patience(first_s=60, longest_s=60, within_s=1, random=longest)

    async with asyncio.timeout(20):
        assert not await patience.pause()

"""Start and stop, in any order and any number of times."""

from __future__ import annotations

import asyncio

import pytest

from bullpen._kernel.lifecycle import AlreadyStopped, Lifecycle, LifecycleState


class Service:
    """Counts what happens to it, and can be held at any point."""

    def __init__(self, *, hold_start: bool = False, hold_stop: bool = False, error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.error = error
        self.begun, self.ending = asyncio.Event(), asyncio.Event()
        self.may_start, self.may_stop = asyncio.Event(), asyncio.Event()
        if not hold_start:
            self.may_start.set()
        if not hold_stop:
            self.may_stop.set()
        self.life = Lifecycle("service", self._begin, self._end)

    async def _begin(self) -> None:
        self.log.append("begin")
        self.begun.set()
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            self.log.append("begin cancelled")
            raise
        if self.error is not None:
            raise self.error
        self.log.append("begun")

    async def _end(self) -> None:
        self.log.append("end")
        self.ending.set()
        await self.may_stop.wait()
        self.log.append("ended")


async def test_start_then_stop() -> None:
    """The ordinary life."""
    service = Service()

    await service.life.start()
    assert service.life.is_running
    await service.life.stop()

    assert service.log == ["begin", "begun", "end", "ended"]
    assert service.life.state is LifecycleState.STOPPED


async def test_stopping_twice_ends_once_and_both_wait() -> None:
    """When stop returns, it has stopped, also for the second caller."""
    service = Service(hold_stop=True)
    await service.life.start()

    first, second = asyncio.create_task(service.life.stop()), asyncio.create_task(service.life.stop())
    await service.ending.wait()
    assert service.life.is_stopping and not first.done() and not second.done()
    service.may_stop.set()
    await asyncio.gather(first, second)
    await service.life.stop()

    assert service.log.count("end") == 1


async def test_stopping_before_start_forbids_the_start() -> None:
    """A signal may arrive before the program got so far."""
    service = Service()

    await service.life.stop()
    with pytest.raises(AlreadyStopped, match="service was stopped and cannot be started again; make a new one"):
        await service.life.start()

    assert service.log == []


async def test_stopping_while_starting_cuts_the_start_short_and_cleans_up() -> None:
    """A start can hang on a server that does not answer."""
    service = Service(hold_start=True)
    starting = asyncio.create_task(service.life.start())
    await service.begun.wait()

    await service.life.stop()

    assert service.log == ["begin", "begin cancelled", "end", "ended"]
    assert service.life.state is LifecycleState.STOPPED
    with pytest.raises(AlreadyStopped, match="while it started"):
        await starting


async def test_a_start_that_ignores_its_cancellation_is_stopped_all_the_same() -> None:
    """User code in a start hook may swallow anything."""
    log: list[str] = []
    begun = asyncio.Event()

    async def begin() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("ignored")

    async def end() -> None:
        log.append("end")

    life = Lifecycle("service", begin, end)
    starting = asyncio.create_task(life.start())
    await begun.wait()

    await life.stop()

    assert log == ["ignored", "end"]
    with pytest.raises(AlreadyStopped, match="while it started"):
        await starting


async def test_starting_twice_begins_once_and_both_wait() -> None:
    """Two users of one object."""
    service = Service(hold_start=True)

    first, second = asyncio.create_task(service.life.start()), asyncio.create_task(service.life.start())
    await service.begun.wait()
    service.may_start.set()
    await asyncio.gather(first, second)
    await service.life.start()

    assert service.log == ["begin", "begun"]
    await service.life.stop()


async def test_a_failed_start_cleans_up_and_tells_every_caller() -> None:
    """What it had opened must not stay open."""
    service = Service(hold_start=True, error=OSError("refused"))
    first, second = asyncio.create_task(service.life.start()), asyncio.create_task(service.life.start())
    await service.begun.wait()

    service.may_start.set()
    results = await asyncio.gather(first, second, return_exceptions=True)
    await service.life.stop()

    assert [str(result) for result in results] == ["refused", "refused"]
    assert service.log == ["begin", "end", "ended"]
    assert service.life.state is LifecycleState.STOPPED


async def test_cancelling_the_first_starter_cancels_the_start_and_cleans_up() -> None:
    """Nobody would call stop: `__aexit__` does not run when `__aenter__` was cancelled."""
    service = Service(hold_start=True)
    first = asyncio.create_task(service.life.start())
    await service.begun.wait()
    second = asyncio.create_task(service.life.start())
    await asyncio.sleep(0)

    first.cancel()
    results = await asyncio.gather(first, second, return_exceptions=True)

    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], AlreadyStopped)
    assert service.log == ["begin", "begin cancelled", "end", "ended"]


async def test_a_cancelled_stopper_stops_waiting_but_the_stop_goes_on() -> None:
    """A deadline of one caller must not leave a service half open."""
    service = Service(hold_stop=True)
    await service.life.start()
    first = asyncio.create_task(service.life.stop())
    await service.ending.wait()

    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    service.may_stop.set()
    await service.life.stop()

    assert service.log == ["begin", "begun", "end", "ended"]


async def test_an_error_while_ending_reaches_the_stopper_and_the_state_is_stopped() -> None:
    """It cannot be stopped again, and hiding the error would hide a leak."""

    async def begin() -> None:
        pass

    async def end() -> None:
        raise OSError("socket gone")

    life = Lifecycle("service", begin, end)
    await life.start()

    with pytest.raises(OSError, match="socket gone"):
        await life.stop()

    assert life.state is LifecycleState.STOPPED

"""What every service shares: how it ends, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bullpen._kernel.lifecycle import AlreadyStopped
from bullpen._kernel.service import BaseService


class Recorder(BaseService):
    """Notes what happens to it. Its work ends when it may, and not before."""

    def __init__(self, *, close_timeout: int | None = None) -> None:
        super().__init__("recorder", close_timeout=close_timeout)
        self.log: list[str] = []
        self.working, self.may_end, self.fails_with = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.error: Exception = ValueError("broken")

    async def _begin(self) -> None:
        self.log.append("begin")
        await super()._begin()
        self._spawn(self._break(), "break")

    async def _break(self) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in (self.fails_with, self._closing)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        if self.fails_with.is_set():
            raise self.error

    async def _work(self) -> None:
        self.working.set()
        try:
            await self._closing.wait()
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.log.append("cut short")
            raise
        self.log.append("worked")

    async def _end(self) -> None:
        self.log.append("end")


async def running(service: Recorder) -> asyncio.Task[None]:
    task = asyncio.create_task(service.run())
    await service.working.wait()
    return task


async def test_a_close_waits_for_what_is_under_way() -> None:
    service = Recorder()
    task = await running(service)
    closing = asyncio.create_task(service.close())
    await asyncio.sleep(0.01)
    assert not closing.done()

    service.may_end.set()
    await closing

    await task
    assert service.log == ["begin", "end", "worked"]


async def test_what_takes_longer_than_the_timeout_is_cut_short() -> None:
    service = Recorder()
    task = await running(service)

    await service.close(20)

    await task
    assert service.log == ["begin", "end", "cut short"]


async def test_the_timeout_of_the_service_holds_where_close_names_none() -> None:
    service = Recorder(close_timeout=20)
    await running(service)

    await service.close()

    assert service.log[-1] == "cut short"


async def test_a_second_close_hurries_the_first() -> None:
    """Whoever presses Ctrl-C twice does not want to wait for the minute that the first asked for."""
    service = Recorder()
    task = await running(service)
    first = asyncio.create_task(service.close(60_000))
    await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        await service.close(0)
        await first
        await task

    assert service.log[-1] == "cut short"


async def test_a_task_that_fails_ends_the_service_and_run_raises_its_error() -> None:
    service = Recorder(close_timeout=0)
    task = await running(service)

    service.fails_with.set()

    with pytest.raises(ValueError, match="broken"):
        await task
    assert service.crash is service.error
    assert "end" in service.log
    assert not service.is_running


async def test_a_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A service in the background that ends by itself must not do so in silence."""
    service = Recorder(close_timeout=0)
    await service.start()

    with caplog.at_level(logging.ERROR):
        service.fails_with.set()
        await service._over.wait()

    assert [record.getMessage() for record in caplog.records] == ["recorder failed and has stopped"]


async def test_after_a_failure_start_raises_it_again() -> None:
    service = Recorder(close_timeout=0)
    await service.start()
    service.fails_with.set()
    await service._over.wait()

    with pytest.raises(ValueError, match="broken"):
        await service.start()


async def test_a_cancelled_run_leaves_nothing_behind() -> None:
    service = Recorder(close_timeout=0)
    task = await running(service)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.log[-1] == "cut short"
    with pytest.raises(AlreadyStopped, match="make a new one"):
        await service.run()


async def test_a_run_that_is_closed_while_it_starts_just_ends() -> None:
    service = Recorder(close_timeout=0)
    task = asyncio.create_task(service.run())
    await asyncio.sleep(0)

    await service.close()

    await task


async def test_what_was_opened_before_is_let_go_by_a_close_without_a_start() -> None:
    """A service may listen on a port from the moment it was made."""
    service = Recorder()

    await service.close()

    assert service.log == ["end"]


class Host(BaseService):
    """A service made of others."""

    def __init__(self, *parts: BaseService) -> None:
        super().__init__("host")
        self.parts = parts

    async def _begin(self) -> None:
        for part in self.parts:
            await self._host(part)


async def test_services_within_a_service_end_with_it() -> None:
    one, other = Recorder(), Recorder()
    host = Host(one, other)
    await host.start()
    one.may_end.set()
    other.may_end.set()

    await host.close()

    assert "worked" in one.log
    assert "worked" in other.log


async def test_hurry_reaches_the_services_within() -> None:
    part = Recorder()
    host = Host(part)
    await host.start()
    first = asyncio.create_task(host.close(60_000))
    await asyncio.sleep(0.01)

    async with asyncio.timeout(20):
        await host.close(0)
        await first

    assert part.log[-1] == "cut short"


async def test_a_service_that_fails_ends_those_beside_it() -> None:
    one, other = Recorder(close_timeout=0), Recorder(close_timeout=0)
    host = Host(one, other)
    task = asyncio.create_task(host.run())
    await one.working.wait()
    await other.working.wait()

    one.fails_with.set()

    with pytest.raises(ValueError, match="broken"):
        await task
    assert other.log[-1] == "cut short"


async def test_a_timeout_below_zero_is_refused() -> None:
    service = Recorder()

    with pytest.raises(ValueError, match="timeout"):
        await service.close(-1)
    await service.close(0)

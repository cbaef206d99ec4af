"""A service: started, run and closed in any order and any number of times.

In: what a subclass does at its begin, while it works and at its end. Out: `start`, `run` and `close` that mean the same
for every service. It may be closed twice, before it started and while it starts; when `close` returns, it has ended. A
shorter `timeout` hurries a close that is under way. A task that fails ends the service, and `run` raises its error.
Elsewhere: the states (`lifecycle`), running the services of an app together (`bullpen.wiring.running`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from bullpen._kernel.duration import to_ms
from bullpen._kernel.ending import end
from bullpen._kernel.lifecycle import AlreadyStopped, Lifecycle
from bullpen._kernel.logs import get_logger

__all__ = ["BaseService", "Service"]

_log = get_logger("bullpen.service")


class Service(Protocol):
    """Something an app runs: a worker, or any other loop that can be asked to stop."""

    async def run(self, *, signals: bool | None = None) -> None:
        """Work until closed; raise if it cannot go on. The app asks for `signals=False`: it handles them for all."""
        ...

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop gracefully; 0 hurries a close that is under way. Safe to call twice; when it returns, all has ended."""
        ...


class BaseService:
    """What all services share. A subclass overrides what it needs of `_begin`, `_work` and `_end`.

    The order of the end: nothing new (`_closing` is set), services within this one are closed, `_end` stops the rest
    and lets go of what was opened, tasks that still run get the time that is left and are then cancelled.
    """

    def __init__(self, name: str, *, close_timeout: int | timedelta | None = None) -> None:
        """`close_timeout` is for a `close` that names none; None: as long as it takes."""
        self._life = Lifecycle(name, self._begin, self._finish, ends_unstarted=True)
        self._name_in_logs = name
        self._close_timeout = close_timeout
        self._closing = asyncio.Event()
        """Set by the first `close`: time to take no new work."""
        self._over = asyncio.Event()
        self._services: list[BaseService] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing_since = 0.0
        self._limit: asyncio.Timeout | None = None
        self._runners = 0
        self.crash: BaseException | None = None
        """Why it ended by itself; None while all is well."""

    @property
    def is_running(self) -> bool:
        """Whether it has begun and nobody has asked it to stop."""
        return self._life.is_running and self.crash is None

    async def start(self) -> None:
        """Begin to work in the background. Raises what keeps it from that, and AlreadyStopped after `close`."""
        try:
            await self._life.start()
        except AlreadyStopped:
            if self.crash is not None:
                raise self.crash from None
            raise

    async def run(self, *, signals: bool | None = None) -> None:
        """Work until closed. Raises what it could not go on for, and AlreadyStopped if it was closed before.

        Signals are for the app, or whoever calls this.
        """
        was_closed = self._closing.is_set()
        self._runners += 1
        try:
            await self.start()
            await self._on_run(signals)
            await self._over.wait()
        except AlreadyStopped:
            if was_closed:  # else while it started, which is an end like any other
                raise
        finally:
            await self.close()  # also when whoever runs it is cancelled: nobody else would
            self._runners -= 1
        if self.crash is not None:
            raise self.crash

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Take nothing new, let what is under way end within `timeout`, then stop. Safe to call twice; 0 hurries."""
        self._closing.set()
        if timeout is not None:
            to_ms("timeout", timeout)
            self._close_timeout = timeout
            if self._life.is_stopping:
                if self._limit is not None:
                    self._limit.reschedule(self._end_at())
                await asyncio.gather(self._hurry(), *(service.close(timeout) for service in self._services))
        await self._life.stop()

    # ---- for subclasses -----------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Open what it needs and start; returns when it works. What this has begun when it fails, `_end` ends."""
        self._spawn(self._work())

    async def _work(self) -> None:
        """The work of a service that is one loop: until `_closing` is set."""
        await self._closing.wait()

    async def _end(self) -> None:
        """Stop, and let go of what was opened; also after a `_begin` that failed, or never ran."""

    async def _on_run(self, signals: bool | None) -> None:
        """It works, and somebody waits for its end: begin what only then makes sense."""

    async def _hurry(self) -> None:
        """The time of a close that is under way was changed: tell others whose end it waits for."""

    def _spawn(self, work: Coroutine[Any, Any, Any], what: str = "", *, is_all: bool = False) -> asyncio.Task[Any]:
        """A task of this service. What it raises, ends the service; with `is_all` its end does, too."""
        task = asyncio.create_task(work, name=f"bullpen {self._name_in_logs}{what and f': {what}'}")
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_task_done, is_all))
        return task

    async def _host(self, service: BaseService) -> None:
        """Start another service within this one: it is closed with this one, and its failure is ours."""
        if self._closing.is_set():
            return
        self._services.append(service)
        try:
            await service.start()
        except AlreadyStopped:
            if not self._closing.is_set():  # else by us
                raise
        else:
            self._spawn(service.run(signals=False), service._name_in_logs)

    async def _let_end(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Wait until all have ended, or the time of the close is up, which a second close may shorten."""
        unfinished = [task for task in tasks if not task.done()]
        if not unfinished:
            return
        try:
            async with asyncio.timeout_at(self._end_at()) as self._limit:
                await asyncio.wait(unfinished)
        except TimeoutError:
            pass
        finally:
            self._limit = None

    def _fail(self, error: BaseException) -> None:
        """It cannot go on: end it, and let `run` raise this."""
        if self.crash is None:
            self.crash = error
            if not self._runners:  # nobody waits who would hear of it
                self._report_crash(error)
        self._stop_soon()

    def _report_crash(self, error: BaseException) -> None:
        _log.error("%s failed and has stopped", self._name_in_logs, exc_info=error)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _end_at(self) -> float | None:
        if self._close_timeout is None:
            return None
        return self._closing_since + to_ms("timeout", self._close_timeout) / 1000

    def _on_task_done(self, is_all: bool, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif is_all:
            self._stop_soon()

    def _stop_soon(self) -> None:
        self._closing.set()
        self._life.begin_stop()

    async def _finish(self) -> None:
        self._closing.set()
        self._closing_since = asyncio.get_running_loop().time()
        try:
            await asyncio.gather(*(service.close(self._close_timeout) for service in self._services))
            await self._end()
            await self._let_end(self._tasks)
        finally:
            await end(*self._tasks)
            self._over.set()

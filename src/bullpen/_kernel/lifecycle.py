"""Starting and stopping, in any order and any number of times.

A service may be stopped twice, before it started and while it starts; when `stop` returns, it has stopped. In: two
coroutine functions that do the work. Out: each of them has run at most once, and never both at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum

from bullpen.errors import BullpenError


class LifecycleState(StrEnum):
    NEW = "new"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class AlreadyStopped(BullpenError):
    """Start was asked of something that has been stopped. Make a new object: a stopped one does not come back."""


class Lifecycle:
    """The state of one service. `begin` starts it; `end` stops it, and also cleans up after a `begin` that failed.

    When the caller of the first `start` is cancelled, so is the start, and `end` cleans up: nobody would stop it later.
    When a caller of `stop` is cancelled, only its waiting ends; the stop goes on: nothing may stay half open.
    `ends_unstarted`: `end` also runs where nothing was started, because something was opened before.
    """

    __slots__ = ("_begin", "_end", "_ends_unstarted", "_has_ended", "_name", "_starting", "_stopping", "state")

    def __init__(
        self,
        name: str,
        begin: Callable[[], Awaitable[None]],
        end: Callable[[], Awaitable[None]],
        *,
        ends_unstarted: bool = False,
    ) -> None:
        self._name, self._begin, self._end, self._ends_unstarted = name, begin, end, ends_unstarted
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._has_ended = False
        self.state = LifecycleState.NEW

    @property
    def is_running(self) -> bool:
        return self.state is LifecycleState.RUNNING

    @property
    def is_stopping(self) -> bool:
        """True from the first call of `stop` on: time to take no new work."""
        return self.state in (LifecycleState.STOPPING, LifecycleState.STOPPED)

    async def start(self) -> None:
        """Start, or wait for the start that is under way. Raises what `begin` raised, to every caller."""
        if self.is_stopping:
            raise AlreadyStopped(f"{self._name} was stopped and cannot be started again; make a new one")
        try:
            if self._starting is None:
                self.state = LifecycleState.STARTING
                self._starting = asyncio.create_task(self._run_begin(), name=f"{self._name}: start")
                await self._starting
            else:
                await asyncio.shield(self._starting)
        except asyncio.CancelledError:
            if is_cancelling():
                raise
            # Nobody cancelled this caller: the start itself was cut short, by stop() or with its first caller.
            raise self._stopped_meanwhile() from None
        if self.is_stopping:
            raise self._stopped_meanwhile()

    async def stop(self) -> None:
        """Stop, or wait for the stop that is under way. A start that is under way is cancelled first."""
        self.begin_stop()
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    def begin_stop(self) -> None:
        """Stop, and let others wait for it."""
        if self._stopping is not None:
            return
        if self._starting is None and not self._ends_unstarted:
            self.state = LifecycleState.STOPPED
            return
        if not self.is_stopping:
            self.state = LifecycleState.STOPPING
            if self._starting is not None:
                self._starting.cancel()  # does nothing once it is done
        self._stopping = asyncio.create_task(self._run_end(self._starting), name=f"{self._name}: stop")

    def _stopped_meanwhile(self) -> AlreadyStopped:
        return AlreadyStopped(f"{self._name} was stopped while it started")

    async def _run_begin(self) -> None:
        try:
            await self._begin()
        except BaseException:
            # Failed by itself or was cut short: close what it had opened. Whoever calls stop() meanwhile waits for us.
            self.state = LifecycleState.STOPPING
            await self._finish()
            raise
        if not self.is_stopping:  # a begin that swallows its cancellation leaves the end to stop()
            self.state = LifecycleState.RUNNING

    async def _run_end(self, starting: asyncio.Task[None] | None) -> None:
        if starting is not None:
            await asyncio.wait([starting])
        if not self._has_ended:
            await self._finish()

    async def _finish(self) -> None:
        self._has_ended = True
        try:
            await self._end()
        finally:
            self.state = LifecycleState.STOPPED


def is_cancelling() -> bool:
    """Whether somebody has asked the running task to end."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0

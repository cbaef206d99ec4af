"""Run the services of one application together, until a signal or until one of them ends.

In: services, and which parts are wanted. Out: all of them running; when one cannot go on, all stop and its error is
raised. The first SIGTERM or SIGINT stops gracefully, a second one hurries, a third one ends the process. Elsewhere:
what the services are (`bullpen.app`), several processes (`bullpen.cli.supervisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Final

from bullpen._kernel.duration import to_ms
from bullpen._kernel.lifecycle import AlreadyStopped
from bullpen._kernel.logs import get_logger
from bullpen._kernel.service import Service
from bullpen.errors import InvalidOption, NotConfigured

__all__ = ["ROLES", "Service", "Services", "role_of"]

logger = get_logger("bullpen.app")

ROLES: Final = ("worker", "outbox", "projector", "messages", "alerts")
"""Parts of an app that `run` may be told to run alone. What says nothing of itself is a worker."""
_END_WITHIN_S: Final = 30.0
"""What hooks of the end get where no worker has a `close_timeout`."""
_HINTS: Final = {
    "worker": "register a handler with @app.handler(queue)",
    "outbox": "call app.use_outbox()",
    "projector": "say app.projector(routes)",
    "messages": "call app.use_messages()",
    "alerts": "configure an alert target: BULLPEN_ALERTS_WEBHOOK_URL, _SLACK_URL, _EMAIL or _SMS",
}


def role_of(service: Service) -> str:
    """The part that a service belongs to."""
    role: str = getattr(service, "role", "worker")
    return role


def _end_within_s(services: Collection[Service]) -> float:
    """What hooks of the end get: the longest time that a worker has to close."""
    known = [getattr(getattr(service, "options", None), "close_after_s", None) for service in services]
    return max((seconds for seconds in known if seconds is not None), default=_END_WITHIN_S)


def _ends_last(service: Service) -> bool:
    """Whether it answers probes, which it does for as long as anything runs."""
    return bool(getattr(service, "ends_last", False))


class Services:
    """The services of one app. `count_running` tells how many jobs a stop waits for; they run within `started`."""

    def __init__(
        self,
        count_running: Callable[[], int],
        started: Callable[[], AbstractAsyncContextManager[None]],
        limit_end: Callable[[float], None],
    ) -> None:
        """`limit_end` says for how many seconds what `started` does at its end may take."""
        self._count_running, self._started, self._limit_end = count_running, started, limit_end
        self._starting: asyncio.Timeout | None = None
        self._all: list[Service] = []
        self._group: asyncio.TaskGroup | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = self._began_stopped = False
        self._signals_seen = 0

    @property
    def all(self) -> tuple[Service, ...]:
        return tuple(self._all)

    @property
    def is_running(self) -> bool:
        return self._group is not None

    def runs(self, role: str) -> bool:
        """Whether a part runs here and now."""
        return self.is_running and any(role_of(service) == role for service in self._all)

    def add(self, service: Service) -> None:
        """Run this too; at once if the others run already."""
        self._all.append(service)
        if self._group is not None and not self._is_stopping and self._starting is None:
            self._begin(service, self._group)

    def keep_only(self, roles: Collection[str]) -> None:
        """Forget what belongs to other parts; none named: keep all. Raises for a part that is not there."""
        for role in roles:
            if role not in ROLES:
                raise InvalidOption("only", f"one of {', '.join(ROLES)}", role)
        wanted = {*roles, "http"}  # health and numbers are served whatever runs
        chosen = [service for service in self._all if not roles or role_of(service) in wanted]
        if not any(role_of(service) != "http" for service in self._all):
            raise NotConfigured(
                "the app has nothing to run; register a handler with @app.handler(queue), or call app.use_outbox()"
            )
        if not any(role_of(service) != "http" for service in chosen):
            hints = "; ".join(_HINTS[role] for role in roles)
            raise NotConfigured(f"the app has no part of the kind {', '.join(roles)} to run: {hints}")
        self._all = chosen

    async def run(self, *, signals: bool) -> None:
        """All of them, until they have ended."""
        self._began_stopped = self._is_stopping
        try:
            async with asyncio.TaskGroup() as group:
                with self._signals(group) if signals else contextlib.nullcontext():
                    self._group = group
                    # Whoever answers probes does so from the beginning: hooks may take their time.
                    for service in self._all:
                        if _ends_last(service):
                            self._begin(service, group)
                    await self._run_within_hooks()
        except BaseExceptionGroup as errors:
            first: BaseException = errors
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]  # the others were stopped because of it
            raise first from None
        finally:
            self._group = None

    async def stop(self, timeout: int | timedelta | None = None) -> None:
        """Ask all to stop, and wait until they have. Safe to call twice, and before `run`."""
        self._is_stopping = True
        if timeout is not None:
            self._limit_end(to_ms("timeout", timeout) / 1000)
        if self._starting is not None:
            self._starting.reschedule(asyncio.get_running_loop().time())
        # Whoever answers probes ends last: a process that waits for its running jobs is alive, and must be seen.
        for is_last in (False, True):
            ending = [service for service in self._all if _ends_last(service) is is_last]
            await asyncio.gather(*(service.close(timeout) for service in ending))

    # ---- inside -------------------------------------------------------------------------------------------------

    async def _run_within_hooks(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(None) as self._starting:
                    if not self._began_stopped:
                        await stack.enter_async_context(self._started())
                        self._limit_end(_end_within_s(self._all))
            except TimeoutError:
                if not self._is_stopping:
                    raise
                return  # told to stop while they ran
            finally:
                self._starting = None
            # A group of their own: when all is cancelled, they end before the hooks of the end run.
            async with asyncio.TaskGroup() as group:
                self._group = group
                for service in self._all:
                    if not _ends_last(service):
                        self._begin(service, group)
                while any(not task.done() for task in self._tasks):  # more may be added meanwhile
                    await asyncio.wait(self._tasks)

    def _begin(self, service: Service, group: asyncio.TaskGroup) -> None:
        self._tasks.add(group.create_task(self._serve(service)))

    async def _serve(self, service: Service) -> None:
        try:
            await service.run(signals=False)
        except AlreadyStopped:
            # Told to stop while it started: that is what was asked for. An app that was stopped before does not run.
            if self._began_stopped or not self._is_stopping:
                raise
        finally:
            await self.stop()  # one part alone is no app: whoever supervises us shall see that it ended

    @contextlib.contextmanager
    def _signals(self, group: asyncio.TaskGroup) -> Iterator[None]:
        """Handle SIGTERM and SIGINT where that is possible: in the main thread, not on Windows."""
        loop, installed = asyncio.get_running_loop(), []
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                with contextlib.suppress(NotImplementedError):
                    loop.add_signal_handler(number, self._on_signal, group, number)
                    installed.append(number)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)

    def _on_signal(self, group: asyncio.TaskGroup, number: signal.Signals) -> None:
        running = self._count_running()
        self._signals_seen += 1
        if self._signals_seen > 2:
            # Whoever asks three times does not wait for a server that is away. Locks run out, nothing is lost.
            logger.warning(
                "%s again: stopped at once; the check for stalled jobs gives %d running jobs back when their locks "
                "have run out",
                number.name,
                running,
            )
            os._exit(128 + number)
        if self._is_stopping:
            logger.warning("%s again: %d running jobs are cancelled and given back", number.name, running)
            group.create_task(self.stop(0))
        else:
            logger.info("%s: no more jobs are taken, waiting for %d running ones", number.name, running)
            self._is_stopping = True
            group.create_task(self.stop())

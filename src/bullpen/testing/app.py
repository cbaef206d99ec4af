"""One app under test: its queues on a private server, its handlers run when the test says so.

In: an app, and a server that nobody else uses. Out: what was enqueued, jobs run until none is left, time that passes
when it is told to, crashes and lost replies, and whether a handler may be run twice. The handlers run as they do in
production: real server, real worker, middleware, hooks and retries; nothing is imitated.
Elsewhere: fixtures (`pytest_plugin`), servers (`servers`), faults on the way (`proxy`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from inspect import isawaitable
from typing import Any, Final, TypeVar

import msgspec
import redis

from bullpen._kernel.duration import check_texts, to_ms
from bullpen.app import Bullpen
from bullpen.errors import InvalidOption, ReturnToWait
from bullpen.queue.job import Job
from bullpen.queue.sync import Job as SyncJob
from bullpen.queue.sync import Queue as SyncQueue
from bullpen.queue.tasks import Task
from bullpen.wire.keys import QueueKeys
from bullpen.worker import Worker

__all__ = ["AppTester", "Drained"]

T = TypeVar("T")
_DRAIN_MS: Final = 30_000
_MOST_SHOWN: Final = 10
_PER_MS: Final = 4096
"""Places of delayed jobs in the order of one millisecond."""


@dataclass(slots=True)
class Drained:
    """What became of the jobs that `run_until_drained` ran, in order."""

    completed: list[Job] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)
    """Finally; `job.failed_reason` says why."""
    retrying: list[Job] = field(default_factory=list)
    """One entry for each attempt that failed and will be made again."""


class AppTester:
    """An app on a server of the test's own; the fixture `bullpen_app` gives one."""

    def __init__(self, app: Bullpen, url: str, *, direct_url: str | None = None) -> None:
        """From now on the app's queues are on the server at `url`, whatever its code and its settings say. The tester
        looks at it by `direct_url`, past a proxy that may stand in between."""
        self.app = app
        app.connection.redirect(url)
        self.url = direct_url or url
        self._queues: dict[str, SyncQueue] = {}
        self._crashes: dict[tuple[str, str | None], _Crash] = {}
        self._is_draining = False
        self._runner: asyncio.Runner | None = None
        self._client: Any = redis.Redis.from_url(self.url, protocol=2)  # untyped: its types are those of both its faces

    # ---- what was enqueued --------------------------------------------------------------------------------------

    def queue(self, name: str) -> SyncQueue:
        """A blocking queue of the app's server, for whatever a test wants to know."""
        known = self._queues.get(name)
        if known is None:
            known = self._queues[name] = SyncQueue(name, connection=self.url, prefix=self.app.prefix)
        return known

    def enqueued(
        self,
        what: Task[..., Any] | str,
        name: str | None = None,
        /,
        *,
        data: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> list[SyncJob]:
        """The stored jobs of a task, or of a queue (and with this name), whose data has these values; the oldest
        first, whatever their state. `data={...}` is for values whose names are parameters here: `data`, `count`."""
        queue, name = _place(what, name)
        wanted = msgspec.to_builtins({**(data or {}), **values}, str_keys=True)
        jobs = [job for job in self.queue(queue).iter_jobs() if name is None or job.name == name]
        return sorted(
            (job for job in jobs if _has(job.data, wanted)), key=lambda job: (job.timestamp, len(job.id), job.id)
        )

    def assert_enqueued(
        self,
        what: Task[..., Any] | str,
        name: str | None = None,
        /,
        *,
        count: int | None = None,
        data: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> list[SyncJob]:
        """Fail unless such a job is stored, or exactly `count` of them. Returns them: look at `job.delay`, `job.opts`.

        tester.assert_enqueued(send_welcome, to="ada@example.com")

        The task has a parameter `count` or `data` itself: `tester.assert_enqueued(restock, data={"count": 2})`.
        """
        return self._expect(what, name, count, {**(data or {}), **values})

    def _expect(
        self, what: Task[..., Any] | str, name: str | None, count: int | None, data: dict[str, Any]
    ) -> list[SyncJob]:
        found = self.enqueued(what, name, data=data)
        if not found if count is None else len(found) != count:
            queue, name = _place(what, name)
            wanted = f"{count if count is not None else 'a'} job(s) {name or ''} of queue {queue!r} with {data}"
            raise AssertionError(f"expected {wanted}, found {len(found)}; stored: {self._describe(queue)}")
        return found

    def assert_not_enqueued(
        self,
        what: Task[..., Any] | str,
        name: str | None = None,
        /,
        *,
        data: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> None:
        """Fail if such a job is stored."""
        self._expect(what, name, 0, {**(data or {}), **values})

    def _describe(self, queue: str) -> str:
        jobs = list(self.queue(queue).iter_jobs())
        shown = ", ".join(f"{job.name} {job.data}" for job in jobs[:_MOST_SHOWN])
        return (shown or "nothing") + (f" and {len(jobs) - _MOST_SHOWN} more" if len(jobs) > _MOST_SHOWN else "")

    # ---- running ------------------------------------------------------------------------------------------------

    async def run_until_drained(
        self, *, timeout: int | timedelta = _DRAIN_MS, elsewhere: Collection[str] = ()
    ) -> Drained:
        """Run the app's handlers until no job waits or runs, those that handlers add included. Delayed jobs are not
        waited for: see `advance`. After `timeout` (ms or timedelta) it fails and says what is left.

        It also fails for jobs that wait in a queue which no handler of the app serves, unless `elsewhere` names that
        queue: one that another program serves."""
        check_texts("elsewhere", elsewhere)
        report = await self._drain(timeout)
        served = {name for worker in self.app.workers for name in (worker.queue_name, worker.dead_letter_queue or "")}
        left = self._left(sorted(self._stored_queues() - served - {*elsewhere}))
        if left:
            raise AssertionError(
                f"jobs wait in queues that no handler of the app serves: {left}. Register a handler, or name "
                "queues that other programs serve in `elsewhere`"
            )
        return report

    async def _drain(self, timeout: int | timedelta = _DRAIN_MS) -> Drained:
        report, changed = Drained(), asyncio.Event()
        within_s = to_ms("timeout", timeout, minimum=1) / 1000
        if self._is_draining:
            raise InvalidOption(
                "run_until_drained", "one call at a time; a handler must not run others", "a second one"
            )
        self._is_draining = True
        try:
            async with self._running(partial(_listen, report, changed)) as workers:
                try:
                    async with asyncio.timeout(within_s):
                        await self._let_drain(workers, changed)
                except TimeoutError:
                    left = self._left(worker.queue_name for worker in workers)
                    await asyncio.gather(*(worker.close(0) for worker in workers))  # what hangs is not waited for
                    raise AssertionError(f"not drained within {within_s} s; {left}") from None
        finally:
            self._is_draining = False
        return report

    def run_until_drained_sync(
        self, *, timeout: int | timedelta = _DRAIN_MS, elsewhere: Collection[str] = ()
    ) -> Drained:
        """The same for tests that are plain functions."""
        return self._run(self.run_until_drained(timeout=timeout, elsewhere=elsewhere))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the app's handlers while the block lasts, for tests that wait for `job.result()`."""
        async with self._running(lambda worker: None):
            yield

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within the block, whoever adds a run of a task goes on when it and all that follow from it have run."""
        with self.app.watch_adds(self._after_add, self._after_add_sync):
            yield

    # ---- time ---------------------------------------------------------------------------------------------------

    def advance(self, by: int | timedelta) -> int:
        """Let so much time pass (ms or timedelta) for everything that is delayed: jobs that become due by that run with
        the next `run_until_drained`. Returns how many do. Nothing sleeps."""
        by_ms, due = to_ms("by", by, minimum=0), 0
        for name in self._queue_names():
            queue, keys = self.queue(name), QueueKeys(self.app.prefix, name)
            seconds, micros = self._client.time()
            now_ms = seconds * 1000 + micros // 1000
            for job_id, score in self._client.zrange(keys.delayed, 0, -1, withscores=True):
                left_ms = max(0, int(score) // _PER_MS - now_ms - by_ms)
                queue.change_delay(job_id.decode(), left_ms)
                due += left_ms == 0
        return due

    # ---- faults -------------------------------------------------------------------------------------------------

    @contextmanager
    def crashing(self, what: Task[..., Any] | str, name: str | None = None, *, times: int = 1) -> Iterator[None]:
        """Within the block, the next runs of these jobs are lost after the handler's last line: as if the process had
        died before it could store the outcome. Each job runs again, with the same idempotency key and a higher fence,
        and no attempt counted."""
        place = _place(what, name)
        self._crashes[place] = crash = _Crash(times)
        try:
            yield
        finally:
            del self._crashes[place]
        if crash.left:
            raise AssertionError(f"{crash.left} of {times} crashes did not happen: the handler ran too seldom")

    async def assert_idempotent(
        self,
        task: Task[..., Any],
        /,
        *args: Any,
        effects: Callable[[], Any | Awaitable[Any]],
        **kwargs: Any,
    ) -> None:
        """Fail unless running a task twice has the effects of running it once.

        The task runs with these arguments, its process "dies" before the outcome is stored, and the job runs again with
        the same idempotency key. `effects` returns what the task changes in the world, in a form that can be compared
        (rows, calls that a fake has seen); it is called after each run.
        """
        seen: list[Any] = []

        async def look() -> None:
            found = effects()
            seen.append(await found if isawaitable(found) else found)

        place = (task.handlers.queue, task.name)
        self._crashes[place] = crash = _Crash(1, look)
        try:
            await task.add(*args, **kwargs)
            report = await self._drain()
        finally:
            del self._crashes[place]
        await look()
        if report.failed or crash.left:
            why = report.failed[0].failed_reason if report.failed else "it did not run"
            raise AssertionError(f"task {task.name!r} could not be run twice: {why}")
        if seen[0] != seen[1]:
            raise AssertionError(
                f"task {task.name!r} is not idempotent.\nafter one run:  {seen[0]!r}\nafter two runs: {seen[1]!r}\n"
                "A run whose outcome is lost is made again: let the effect happen once per job.idempotency_key"
            )

    def assert_idempotent_sync(
        self, task: Task[..., Any], /, *args: Any, effects: Callable[[], Any | Awaitable[Any]], **kwargs: Any
    ) -> None:
        """The same for tests that are plain functions."""
        self._run(self.assert_idempotent(task, *args, effects=effects, **kwargs))

    # ---- the end ------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Let go of what belongs to the running loop."""
        await self.app.leave_loop()

    def close(self) -> None:
        """Let go of the rest. The app may be tested again."""
        if self._runner is not None:
            self._runner.run(self.aclose())
            self._runner.close()
            self._runner = None
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
        self._client.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """On one loop for all calls of this test."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(work)

    @asynccontextmanager
    async def _running(self, prepare: Callable[[Worker], None]) -> AsyncIterator[list[Worker]]:
        with self._crash_layer():
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self.app.started())
                workers = self.app.new_workers()
                for worker in workers:
                    prepare(worker)
                    await stack.enter_async_context(worker)
                yield workers

    async def _let_drain(self, workers: list[Worker], changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            if all(worker.is_ready for worker in workers) and not any(
                self._counts(worker.queue_name) for worker in workers
            ):
                return
            await changed.wait()

    def _counts(self, name: str) -> dict[str, int]:
        """Of what has to run now; nothing of a paused queue has."""
        queue = self.queue(name)
        counts = queue.counts()
        found = {"waiting": counts.waiting, "prioritized": counts.prioritized, "active": counts.active}
        if queue.is_paused():
            found = {"active": counts.active}
        return {state: number for state, number in found.items() if number}

    def _left(self, queues: Iterable[str]) -> str:
        return "; ".join(f"{name}: {left}" for name in queues if (left := self._counts(name)))

    def _stored_queues(self) -> set[str]:
        """Those of the server that have jobs which wait."""
        found: set[str] = set()
        for state in ("wait", "prioritized"):
            for key in self._client.scan_iter(f"{self.app.prefix}:*:{state}", count=1000):
                found.add(key.decode()[len(self.app.prefix) + 1 : -len(state) - 1])
        return found

    def _queue_names(self) -> list[str]:
        return [worker.queue_name for worker in self.app.workers]

    @contextmanager
    def _crash_layer(self) -> Iterator[None]:
        if not self._crashes:
            yield
            return

        @asynccontextmanager
        async def die_at_the_end(job: Any) -> AsyncIterator[None]:
            yield
            for crash in self._of(job):
                await crash.happen()

        with self.app.around.outermost(die_at_the_end):
            yield

    def _of(self, job: Any) -> list[_Crash]:
        names = ((job.queue_name, job.name), (job.queue_name, None)) if isinstance(job, Job) else ()
        return [crash for place in names if (crash := self._crashes.get(place)) is not None and crash.left]

    async def _after_add(self) -> None:
        if not self._is_draining:
            await self._drain()

    def _after_add_sync(self) -> None:
        if self._is_draining:
            return
        if not _is_on_loop() and threading.current_thread() is threading.main_thread():
            self._run(self._drain())
            return
        # In a thread of a web framework, or in plain code below a coroutine: on a loop of its own.
        thread = threading.Thread(target=lambda: asyncio.run(self._drain_and_leave()))
        thread.start()
        thread.join()

    async def _drain_and_leave(self) -> None:
        await self._drain()
        await self.aclose()


class _Crash:
    def __init__(self, times: int, look: Callable[[], Awaitable[None]] | None = None) -> None:
        self.left = times
        self._look = look

    async def happen(self) -> None:
        self.left -= 1
        if self._look is not None:
            await self._look()
        raise ReturnToWait("the test lets the process die here")


def _listen(report: Drained, changed: asyncio.Event, worker: Worker) -> None:
    def note(jobs: list[Job]) -> Callable[..., None]:
        def add(job: Job, *_: Any) -> None:
            jobs.append(job)
            changed.set()

        return add

    worker.on("completed", note(report.completed))
    worker.on("failed", note(report.failed))
    worker.on("retrying", note(report.retrying))
    for event in ("ready", "drained", "returned", "lock_lost"):
        worker.on(event, lambda *_: changed.set())


def _place(what: Task[..., Any] | str, name: str | None) -> tuple[str, str | None]:
    return (what, name) if isinstance(what, str) else (what.handlers.queue, what.name)


def _has(data: Any, wanted: Mapping[str, Any]) -> bool:
    return all(isinstance(data, dict) and name in data and data[name] == value for name, value in wanted.items())


def _is_on_loop() -> bool:
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False

"""How the jobs of a worker are run: by its handler on the loop, in a thread, or in a child process.

In: a handler. Out: a coroutine function that runs it for one job and returns what it did.
Elsewhere: calling it (`bullpen._kernel.execute`), child processes (`children`), what its result means (`runs`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol

from bullpen._kernel.execute import is_async, run_async, run_thread
from bullpen._kernel.outcome import Ended, Result
from bullpen.errors import JobLockLost
from bullpen.queue.batch import BatchHandler, BatchOptions, JobBatch
from bullpen.queue.job import Handler, Job
from bullpen.worker.around import Around, Surroundings
from bullpen.worker.batches import BatchRuns
from bullpen.worker.children.limits import ChildLimits
from bullpen.worker.children.pool import ProcessPool
from bullpen.worker.options import WorkerOptions

_MOST_THREADS: Final = 100_000


Run = Callable[[Job, float | None], Coroutine[Any, Any, Ended]]
"""Runs one job, within so many seconds (None: for as long as it takes)."""
OnEnd = Callable[[Job, JobLockLost | None], None]
"""Is told when the server has a job's outcome, or why it does not take it."""


class Runner(Protocol):
    """Runs jobs, one at a time per slot."""

    survives_jobs: bool
    """A job that dies takes nobody with it."""
    on_end: OnEnd | None
    around: Around | None
    """What runs around each job and in each child process; read at the start."""

    @property
    def batches(self) -> BatchRuns | None:
        """What runs jobs together."""

    @property
    def run(self) -> Run: ...

    async def start(self, slots: int) -> None: ...
    def resize(self, slots: int) -> None: ...
    async def aclose(self) -> None: ...


class InLoop:
    """`async def` handlers."""

    survives_jobs = False
    on_end: OnEnd | None = None
    around: Around | None = None
    batches: BatchRuns | None = None

    def __init__(self, handler: Callable[[Any], Any], queue: str) -> None:
        self._handler, self._queue = handler, queue
        self.run: Run = partial(run_async, handler)

    async def start(self, slots: int, *, batches: bool = False) -> None:
        if self.around is not None:
            surroundings = self.around.surroundings(self._handler, self._queue, batches=batches)
            self._handler = surroundings.on_loop()
            self.run = partial(run_async, self._handler)

    async def run_batch(self, batch: JobBatch, timeout_s: float | None) -> Result:
        return await run_async(self._handler, batch, timeout_s)

    def resize(self, slots: int) -> None:
        pass

    async def aclose(self) -> None:
        pass


class InThreads:
    """Plain `def` handlers. A thread is started when none is idle, and never more than there are slots: the number of
    those may change."""

    survives_jobs = False
    on_end: OnEnd | None = None
    around: Around | None = None
    batches: BatchRuns | None = None

    def __init__(self, handler: Callable[[Any], Any], queue: str) -> None:
        self._handler, self._queue = handler, queue
        self._threads: ThreadPoolExecutor | None = None
        self._surroundings: Surroundings | None = None

    async def start(self, slots: int, *, batches: bool = False) -> None:
        self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=f"bullpen-{self._queue}")
        if self.around is not None:
            self._surroundings = self.around.surroundings(self._handler, self._queue, batches=batches) or None

    async def run(self, job: Job, timeout_s: float | None) -> Ended:
        job.bind_to_running_loop()
        return await self._call(job, timeout_s)

    async def run_batch(self, batch: JobBatch, timeout_s: float | None) -> Result:
        for job in batch:
            job.bind_to_running_loop()
        return await self._call(batch, timeout_s)

    async def _call(self, subject: Job | JobBatch, timeout_s: float | None) -> Result:
        threads = self._threads
        assert threads is not None
        if self._surroundings is None:
            return await run_thread(threads, self._handler, subject, timeout_s)

        async def call(handler: Callable[[Any], Any]) -> Result:
            return await run_thread(threads, handler, subject, None)

        return await self._surroundings.run_plain(subject, call, timeout_s)

    def resize(self, slots: int) -> None:
        pass

    async def aclose(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class InProcesses:
    """Either kind, in child processes that can be killed."""

    survives_jobs = True
    on_end: OnEnd | None = None
    around: Around | None = None
    batches: BatchRuns | None = None

    def __init__(self, handler: Callable[[Any], Any], queue: str, limits: ChildLimits) -> None:
        self._handler, self._queue = handler, queue
        self.pool = ProcessPool(handler, limits)
        self.run: Run = self.pool.run
        self.run_batch = self.pool.run_batch

    async def start(self, slots: int, *, batches: bool = False) -> None:
        around = self.around
        if around is not None:
            surroundings = around.surroundings(self._handler, self._queue, batches=batches)
            if surroundings or around.has_hooks:
                self.pool.bring_app(around.owner, self._queue, batches=batches)
        await self.pool.start(slots)

    def resize(self, slots: int) -> None:
        self.pool.slots = slots

    async def aclose(self) -> None:
        await self.pool.aclose()


class InBatches:
    """Handlers that get several jobs at once, wherever they are called."""

    on_end: OnEnd | None = None
    around: Around | None = None

    def __init__(self, caller: InLoop | InThreads | InProcesses, options: BatchOptions) -> None:
        self._caller = caller
        self._slots = 1
        self.survives_jobs = caller.survives_jobs
        self.batches = BatchRuns(caller.run_batch, options, lambda: self._slots)
        self.run: Run = self.batches.run

    async def start(self, slots: int) -> None:
        self._slots = slots
        self._caller.around = self.around
        await self._caller.start(slots, batches=True)

    def resize(self, slots: int) -> None:
        self._slots = slots
        self._caller.resize(slots)
        self.batches.resized()

    async def aclose(self) -> None:
        await self._caller.aclose()


def runner_of(handler: Handler | BatchHandler, queue: str, options: WorkerOptions) -> Runner:
    """The way that fits the handler and the worker's options."""
    runs = _runner_of(handler, queue, options)
    return runs if options.batch is None else InBatches(runs, options.batch)


def _runner_of(handler: Handler | BatchHandler, queue: str, options: WorkerOptions) -> InLoop | InThreads | InProcesses:
    processes = options.processes
    if processes:
        return InProcesses(handler, queue, processes if isinstance(processes, ChildLimits) else ChildLimits())
    return InLoop(handler, queue) if is_async(handler) else InThreads(handler, queue)

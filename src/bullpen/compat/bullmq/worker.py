"""A worker with PyPI's names, over `bullpen.Worker`.

In: a processor `(job, token)` or `(job, token, signal)`, and an option dictionary. Out: events `active`, `completed`,
`failed` (each failed attempt, with the error itself), `error`, `stalled`, `paused`, `resumed`, `closed`. Without a
processor jobs are taken by hand: `getNextJob`, then `job.moveToCompleted` or `job.moveToFailed`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel.rates import RateLimit
from bullpen.compat.bullmq._connection import connection_of, prefix_of, raw_client
from bullpen.compat.bullmq._names import WORKER, check_backend, check_event, check_names
from bullpen.compat.bullmq._options import AnyStrategy, check_worker_parts, native_name, retention
from bullpen.compat.bullmq.abort_controller import AbortController
from bullpen.compat.bullmq.custom_errors import DelayedError, UnrecoverableError, WaitingChildrenError
from bullpen.compat.bullmq.event_emitter import EventEmitter
from bullpen.compat.bullmq.job import Job
from bullpen.compat.bullmq.job_scheduler import JobScheduler
from bullpen.errors import DelayJob, QueueClosed, WaitForChildren
from bullpen.queue.job import Job as NativeJob
from bullpen.queue.queue import Queue as NativeQueue
from bullpen.worker.options import WorkerArguments
from bullpen.worker.taker import Taker
from bullpen.worker.worker import Worker as NativeWorker

__all__ = ["Worker"]

_DEFAULTS: Final[dict[str, Any]] = {
    "drainDelay": 5,
    "concurrency": 1,
    "lockDuration": 30_000,
    "maxStalledCount": 1,
    "stalledInterval": 30_000,
    "runRetryDelay": 15_000,
}
_EVENTS: Final = frozenset(
    {"active", "completed", "failed", "error", "stalled", "paused", "resumed", "closed"}
    # Of their own renewal of locks; here a thread renews them, and nothing is heard of it.
    | {"locksRenewed", "lockRenewalFailed"}
)
_MOST_BY_HAND: Final = 1_000
_FOR_EVER: Final = timedelta(days=365)
"""`close` waits for running jobs, however long they take."""


class Worker(EventEmitter):
    """Runs a processor for the jobs of one queue; begins by itself unless `autorun` is False."""

    def __init__(self, name: str, processor: Callable[..., Any] | None, opts: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        given = dict(opts or {})
        check_names(given, WORKER, "an option of Worker")
        check_backend(given)
        check_worker_parts(given)
        self.name, self.processor = name, processor
        self.opts: dict[str, Any] = {**_DEFAULTS, **given}
        self.opts.setdefault("lockRenewTime", self.opts["lockDuration"] // 2)
        self.prefix = prefix_of(self.opts)
        self.qualifiedName = f"{self.prefix}:{name}"
        self.id = uuid.uuid4().hex
        self.workerName: str | None = given.get("name")
        self.running = self.paused = self.closing = self.forceClosing = self.closed = False
        self._wants_signal = processor is not None and _takes_signal(processor)
        self._connection, self._owns_connection = connection_of(self.opts)
        self.native_queue = NativeQueue(native_name(name), connection=self._connection, prefix=self.prefix, attempts=1)
        self.taker: Taker | None = None
        """Takes jobs by hand, where there is no processor."""
        self.native_worker = self._make_native()
        self._jobs: dict[NativeJob, Job] = {}
        self._controllers: dict[str, AbortController] = {}
        self._errors: dict[NativeJob, BaseException] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._scheduler: JobScheduler | None = None
        self._client: Any = None
        self._run: asyncio.Future[None] | None = None
        self._listen()
        if self.opts.get("autorun", True) and processor is not None:
            self._run = asyncio.ensure_future(self.run())

    def _make_native(self) -> NativeWorker | Taker:
        opts = self.opts
        strategy = (opts.get("settings") or {}).get("backoffStrategy")
        limiter, metrics = opts.get("limiter"), (opts.get("metrics") or {}).get("maxDataPoints")
        completed, failed = retention(opts.get("removeOnComplete")), retention(opts.get("removeOnFail"))
        arguments: WorkerArguments = {
            "name": self.workerName,
            "concurrency": opts["concurrency"] if self.processor is not None else _MOST_BY_HAND,
            "lock": opts["lockDuration"],
            "stalled_interval": opts["stalledInterval"],
            "drain_delay": max(2, round(opts["drainDelay"] * 1000)),
            "remove_on_complete": False if completed is None else completed,
            "remove_on_fail": False if failed is None else failed,
            "limit": None if limiter is None else RateLimit(limiter["max"], limiter["duration"]),
            "max_started_attempts": opts.get("maxStartedAttempts"),
            "metrics_minutes": metrics,
            "backoff": AnyStrategy(strategy, self._job) if strategy is not None else {},
            "scheduler_zone": "UTC",
        }
        if self.processor is not None:
            return NativeWorker(
                native_name(self.name), self._handle, connection=self._connection, prefix=self.prefix, **arguments
            )
        self.taker = Taker(native_name(self.name), connection=self._connection, prefix=self.prefix, **arguments)
        return self.taker

    @property
    def client(self) -> Any:
        """A redis-py client for the same server; needs redis-py."""
        if self._client is None:
            self._client = raw_client(self.opts)
        return self._client

    @property
    def jobScheduler(self) -> JobScheduler:
        """The schedulers of the queue."""
        if self._scheduler is None:
            self._scheduler = JobScheduler(self)
        return self._scheduler

    async def run(self) -> None:
        """Work until closed; for `autorun=False`."""
        if self.running:
            raise RuntimeError("Worker is already running")
        if not isinstance(self.native_worker, NativeWorker):
            raise RuntimeError("Worker has no processor: take its jobs with getNextJob")
        self.running = True
        try:
            await self.native_worker.run(signals=False)
        except Exception as error:
            self.emit("error", error)
            raise
        finally:
            self.running = False

    async def getNextJob(self, token: str) -> Job | None:
        """Take a job by hand; None when none comes within `drainDelay`. Locks are renewed until it is settled."""
        if self.taker is None:
            raise RuntimeError("getNextJob: this worker has a processor, which takes the jobs")
        if not self.taker.has_started:
            await self.taker.start()
        try:
            native = await self.taker.take(max(1, round(self.opts["drainDelay"] * 1000)))
        except QueueClosed:
            await asyncio.sleep(0)  # a loop that asks again must not keep everything else from running
            return None
        if native is None:
            return None
        job = self._job(native)
        job.token = token
        return job

    async def nextJobFromJobData(
        self,
        job_data: Mapping[str, Any] | None = None,
        job_id: str | None = None,
        limit_until: int = 0,
        delay_until: int = 0,
        token: str = "",
    ) -> Job | None:
        """The job that `moveToCompleted` or `moveToFailed` took, from their answer; None without one."""
        del job_data, limit_until, delay_until
        native = next((native for native in self._jobs if native.id == job_id), None)
        if native is None:
            return None
        job = self._job(native)
        job.token = token
        return job

    async def close(self, force: bool = False) -> None:
        """Take no more jobs and wait for those that run; with `force` they are cancelled and go back."""
        if self.closed:
            return
        self.closing = True
        if force:
            self.forceClosing = True
            self.cancelAllJobs("worker force-closed")
        await self.native_worker.close(0 if force else _FOR_EVER)
        if self._run is not None:
            await asyncio.wait([self._run])
        await self.native_queue.close()
        if self._owns_connection:
            await self._connection.aclose()
        if self._client is not None and self._client is not self.opts.get("connection"):
            await self._client.aclose()
        self.closed = True
        self.emit("closed")

    async def pause(self, do_not_wait_active: bool = False) -> None:
        """Take no more jobs, and wait until those that run have ended."""
        self.paused = True
        self.native_worker.pause()
        if not do_not_wait_active:
            await self._idle.wait()
        self.emit("paused")

    def resume(self) -> None:
        """Take jobs again."""
        if self.paused:
            self.paused = False
            self.native_worker.resume()
            self.emit("resumed")

    def cancelJob(self, job_id: str, reason: str | None = None) -> bool:
        """Set the signal of a job that runs here. False: none runs here, or its processor takes no signal."""
        controller = self._controllers.get(job_id)
        if controller is None:
            return False
        controller.abort(reason)
        return True

    def cancelAllJobs(self, reason: str | None = None) -> None:
        """Set the signals of all jobs that run here."""
        for controller in list(self._controllers.values()):
            controller.abort(reason)

    # ---- one job ----------------------------------------------------------------------------------------------

    async def _handle(self, native: NativeJob) -> Any:
        job, token, processor = self._job(native), native.token, self.processor
        assert processor is not None
        job.delayed_for = None
        try:
            if not self._wants_signal:
                return _checked(await processor(job, token))
            controller = self._controllers[native.id] = AbortController()
            try:
                return _checked(await processor(job, token, controller.signal))
            finally:
                if self._controllers.get(native.id) is controller:
                    del self._controllers[native.id]
        except DelayedError as error:
            raise DelayJob(job.delayed_for or 0, str(error)) from error
        except WaitingChildrenError as error:
            raise WaitForChildren(str(error)) from error
        except Exception as error:
            self._errors[native] = error
            raise

    def _job(self, native: NativeJob) -> Job:
        """The same object from `active` to the end, as listeners expect."""
        if native not in self._jobs:
            self._jobs[native] = Job.of(self, native)
            self._idle.clear()
        return self._jobs[native]

    def _forget(self, native: NativeJob) -> Job:
        job = self._job(native)
        del self._jobs[native]
        if not self._jobs:
            self._idle.set()
        job.show(native.record)
        return job

    # ---- events -----------------------------------------------------------------------------------------------

    def on(self, event_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Call `function` for each such event; returns it."""
        check_event(event_name, _EVENTS, "a worker")
        return super().on(event_name, function)

    def _listen(self) -> None:
        worker = self.native_worker
        worker.on("active", lambda native: self.emit("active", self._job(native), "waiting"))
        worker.on("completed", self._on_completed)
        worker.on("failed", self._on_failed)
        worker.on("retrying", lambda native, reason, _: self._on_failed(native, reason))
        worker.on("returned", self._on_returned)
        worker.on("lock_lost", self._on_lock_lost)
        worker.on("stalled", lambda job_id: self.emit("stalled", job_id))
        worker.on("error", lambda error: self.emit("error", error))

    def _on_completed(self, native: NativeJob, value: Any) -> None:
        self.emit("completed", self._forget(native), value)

    def _on_failed(self, native: NativeJob, reason: str) -> None:
        error = self._errors.pop(native, None)
        self.emit("failed", self._forget(native), UnrecoverableError(reason) if error is None else error)

    def _on_returned(self, native: NativeJob) -> None:
        self._errors.pop(native, None)
        self._forget(native)

    def _on_lock_lost(self, native: NativeJob, error: BaseException) -> None:
        self._errors.pop(native, None)
        self.emit("error", error, self._forget(native))


def _checked(value: Any) -> Any:
    """What is no JSON fails the job, in the words of the standard library."""
    if value is not None and not isinstance(value, str | bool):
        json.dumps(value, allow_nan=False)
    return value


def _takes_signal(processor: Callable[..., Any]) -> bool:
    """Whether it has a third parameter by position."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):
        return False
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        return True
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(each.kind in by_position for each in parameters) >= 3

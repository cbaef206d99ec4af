"""What `Worker` and `Taker` have in common: options, events, start, pause and close.

In: what callers write. Out: a `WorkerEngine` between `start` and `close`. Elsewhere: the work (`engine`), what
is done with a job (`worker`: a handler; `taker`: the caller).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple, Self

from bullpen._kernel.duration import to_ms
from bullpen._kernel.ids import check_queue_name, clean_name, worker_name
from bullpen._kernel.lifecycle import Lifecycle
from bullpen._kernel.logs import get_logger
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy, check_strategies
from bullpen.errors import BullpenError, JobNotFound, JobStateConflict, require
from bullpen.queue.base import id_of
from bullpen.queue.cancel import Cancelled, check_reason
from bullpen.queue.codec import check_codec
from bullpen.queue.job import Job
from bullpen.redis.client import Connection
from bullpen.redis.default import connection_for, prefix_for
from bullpen.wire.keys import QueueKeys
from bullpen.worker.adapt import Adapter
from bullpen.worker.auto import Concurrency, Governor, read_concurrency
from bullpen.worker.engine import CANCEL_GRACE_S, Setup, WorkerEngine, dead_letter_writer
from bullpen.worker.handlers import Runner
from bullpen.worker.options import WorkerArguments, WorkerOptions
from bullpen.worker.reader import SECONDS_AFTER_BLOCK
from bullpen.worker.reports import Callback, Reports, WorkerEvent
from bullpen.worker.tally import Tally

logger = get_logger("bullpen.worker")


class Activity(NamedTuple):
    """What a worker does at one moment."""

    jobs: tuple[Job, ...]
    """Those that run, the oldest first."""
    asked_s: float | None
    """How long ago it asked the server for jobs; None: not yet."""
    lag_s: float
    """For how long its loop has not answered."""


class JobConsumer:
    """Takes jobs of one queue, holds their locks, and settles them."""

    _runner: Runner

    def __init__(
        self, queue: str, connection: str | Connection | None, prefix: str | None, options: WorkerArguments
    ) -> None:
        name, policy = options.pop("name", None), options.pop("policy", None)
        self._codec = check_codec(options.pop("codec", None))
        require("name", name is None or isinstance(name, str), "text", name)
        require("policy", policy is None or isinstance(policy, RetryPolicy), "a RetryPolicy", policy)
        strategies = options.pop("backoff", {})
        check_strategies("backoff", strategies)
        own = RetryPolicy(
            permanent_errors=options.pop("permanent_errors", ()),
            dead_letters=_dead_letter_policy(options.pop("dead_letters", False)),
            strategies=strategies,
        )
        self.options = WorkerOptions.read(options, type(self).__name__)
        self.name = clean_name(name) if name else worker_name()
        """`{hostname}-{pid}-{random}` unless given; stored with each job it takes."""
        self._keys = QueueKeys(prefix_for(prefix), check_queue_name(queue))
        self._policy = own if policy is None else policy.over(own)
        self._connection = connection_for(connection, self._keys.base)
        self._dead_letters = dead_letter_writer(self._keys, self._connection, self._policy)
        self._governor: Governor | None = None
        self._adapter: Adapter | None = None
        self._concurrency = self._read_concurrency(self.options.concurrency)
        self._life = Lifecycle(f"worker of queue {queue!r}", self._begin, self._end)
        self._reports = Reports(queue, self.name)
        self._engine: WorkerEngine | None = None
        self._is_paused = self._is_closing = False
        self._close_timeout_s = self.options.close_after_s
        self._ended = asyncio.Event()
        self.tally: Tally | None = None
        """Set before it starts by whoever keeps the history of its jobs."""
        self._closing: asyncio.Future[None] | None = None
        self._crash: BaseException | None = None

    # ---- what callers use -------------------------------------------------------------------------------------

    @property
    def queue_name(self) -> str:
        return self._keys.name

    @property
    def running(self) -> int:
        """Jobs being handled now."""
        return 0 if self._engine is None else len(self._engine.runs.running)

    @property
    def concurrency(self) -> int:
        """Jobs handled at the same time. May be set while it runs: a larger number holds at once, a smaller one for
        what is taken from now on; jobs that run already go on. With `batch` it counts batches.

        With `"auto"` it is the number that holds now, and changes. A number ends that, `"auto"` begins it."""
        return self._concurrency

    @concurrency.setter
    def concurrency(self, value: Concurrency) -> None:
        self._resize(self._read_concurrency(value))
        self._adapt()

    @property
    def adapts_concurrency(self) -> bool:
        """Whether it finds its concurrency itself: `concurrency="auto"`."""
        return self._governor is not None

    @property
    def utilisation(self) -> float:
        """The share of its slots that is in use now, 0 to 1; above after the concurrency was lowered."""
        return 0.0 if self._engine is None else self._engine.driver.places_in_use / self._slots

    def _read_concurrency(self, value: Concurrency) -> int:
        """The number to begin with."""
        given = read_concurrency(value)
        if isinstance(given, int):
            self._governor = None
            return given
        self._governor = Governor(given, processes=bool(self.options.processes))
        return self._governor.size

    def _resize(self, slots: int) -> None:
        self._concurrency = slots
        self._runner.resize(slots)
        if self._engine is not None and not self._is_closing:
            self._engine.driver.resize(self._slots)

    def _adapt(self) -> None:
        """Measure as long as the number is ours to find."""
        if self._adapter is not None:
            self._adapter.close()
            self._adapter = None
        if self._governor is None or self._engine is None or self._is_closing:
            return
        driver, per_slot = self._engine.driver, self.options.jobs_per_slot
        self._adapter = Adapter(
            self.queue_name, self._governor, lambda: -(-driver.places_in_use // per_slot), self._resize
        )

    @property
    def is_paused(self) -> bool:
        """True from `pause` to `resume`. Whether the queue is paused for all is `await queue.is_paused()`."""
        return self._is_paused

    @property
    def is_alive(self) -> bool:
        """True while a restart would not help: it runs, its loop answers, and the thread that renews its locks works.

        A worker that is full, limited or paused is alive, and so is one whose server is unreachable; see `is_ready`.
        """
        return self._engine is not None and self._crash is None and self._engine.is_alive

    @property
    def has_started(self) -> bool:
        """True from the end of `start` on, also after `close`."""
        return self._engine is not None

    @property
    def is_closing(self) -> bool:
        """True from the first `close` on: it takes no more jobs."""
        return self._is_closing

    @property
    def is_ready(self) -> bool:
        """True while it is alive, its server is not known to be away, and it took or polled recently or may not: all
        its slots are taken, or it is limited or paused. An open TCP connection alone does not count."""
        engine = self._engine
        if engine is None or not self.is_alive or self._is_closing or engine.door.is_lost:
            return False
        last_exchange = engine.driver.last_exchange
        if last_exchange and (engine.driver.is_full or not engine.driver.may_take()):
            return True
        recently_s = self.options.drain_delay_ms / 1000 + 2 * SECONDS_AFTER_BLOCK
        return time.monotonic() - last_exchange < recently_s

    @property
    def connection(self) -> Connection:
        """Where its queue is."""
        return self._connection

    @property
    def keys(self) -> QueueKeys:
        return self._keys

    def activity(self) -> Activity:
        """What it does now, for people who watch."""
        engine, now = self._engine, time.monotonic()
        if engine is None:
            return Activity((), None, 0.0)
        last = engine.driver.last_exchange
        return Activity(tuple(engine.runs.running), now - last if last else None, engine.lag_s)

    def on(self, event: WorkerEvent, callback: Callback) -> Callback:
        """Call `callback` for an event of this worker.

        Of its jobs: `active(job)`, `progress(job, value)`, `completed(job, value)`, `failed(job, reason)`,
        `retrying(job, reason, delay_ms)`, `stalled(job_id)`, `suspect(job)`, `lock_lost(job, error)`, `returned(job)`.
        Of itself: `ready()` (the server answered its first poll), `drained()` (its last job ended and nothing is ready
        to run), `paused()`, `resumed()`, `locks_renewed(job_ids)`, `closing()`, `closed()`, `error(error)`.

        The job shows what is stored after the event: its attempts count the one that has just ended. `failed` is only
        given for final failures. Callbacks may be async; what they raise is logged and harms no job.
        """
        return self._reports.on(event, callback)

    def once(self, event: WorkerEvent, callback: Callback) -> Callback:
        """As `on`, for the next such event only."""
        return self._reports.on(event, callback, once=True)

    def off(self, event: WorkerEvent, callback: Callable[..., Any]) -> bool:
        """Call it no more, however often it was given to `on` or `once`. False when it was not."""
        return self._reports.off(event, callback)

    async def start(self) -> None:
        """Start taking jobs. Returns at once; waits for an unreachable server in the background."""
        # A server that cannot be started or will never let us in is the caller's to know, not the pump's.
        await self._connection.meet(self._keys.base)
        await self._life.start()

    def pause(self) -> None:
        """Stop taking jobs here; running jobs continue. Other workers are not affected."""
        was_paused, self._is_paused = self._is_paused, True
        if self._engine is not None:
            self._engine.driver.pause()
        if not was_paused:
            self._reports.tell("paused")

    def resume(self) -> None:
        was_paused, self._is_paused = self._is_paused, False
        if self._engine is not None:
            self._engine.driver.resume()
        if was_paused:
            self._reports.tell("resumed")

    async def wait_for_running(self) -> None:
        """Wait until no job runs here; after `pause`, until those that ran have ended. A handler must not call it: it
        would wait for itself."""
        while self._engine is not None and self._engine.runs.running:
            await asyncio.wait([*self._engine.runs.running.values()])

    async def cancel_job(self, job: str | Job, reason: str | None = None) -> Cancelled:
        """Cancel a job of this queue in any state; one that runs here is cancelled at once. See `Queue.cancel`."""
        job_id, engine = id_of(job), self._started()
        done = await engine.actions.cancel(job_id, reason, clock_offset_ms=self.options.clock_offset_ms)
        held = engine.runs.locked.get(job_id)
        if done is Cancelled.REQUESTED and held is not None:
            engine.runs.cancel(job_id, held.token, check_reason(reason))
        return done

    async def cancel_all_jobs(self, reason: str | None = None) -> int:
        """The same for every job that runs here now. Returns how many were told; those that ended meanwhile are not
        counted."""
        running = [] if self._engine is None else list(self._engine.runs.running)
        done = await asyncio.gather(*(self.cancel_job(job, reason) for job in running), return_exceptions=True)
        for one in done:
            if isinstance(one, BaseException) and not isinstance(one, JobNotFound | JobStateConflict):
                raise one
        return sum(one is Cancelled.REQUESTED for one in done)

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop taking, wait for running jobs, then give back what is unfinished. Safe to call twice; when it returns
        all has ended.

        After `timeout` (default: the lock duration) unfinished handlers are cancelled, get half a second to clean
        up, and their jobs return to the front of the line with no attempt counted.
        """
        if timeout is not None:
            self._close_timeout_s = to_ms("timeout", timeout) / 1000
            if self._is_closing and self._close_timeout_s == 0 and self._engine is not None:
                self._engine.hurry.set()
        if self._engine is not None and not self._is_closing:
            self._is_closing = True  # at once: a job that ends before the first step of `_end` must not bring another
            self._engine.driver.stop_taking()
        await self._life.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- starting and stopping --------------------------------------------------------------------------------

    async def _begin(self) -> None:
        await self._runner.start(self._concurrency)
        setup = Setup(
            name=self.name,
            keys=self._keys,
            connection=self._connection,
            options=self.options,
            policy=self._policy,
            codec=self._codec,
            dead_letters=self._dead_letters,
            reports=self._reports,
            runner=self._runner,
            tally=self.tally,
        )
        self._engine = WorkerEngine(setup, self._slots, self._on_bug)
        if self._is_paused:
            self._engine.driver.pause()
        self._engine.start()
        self._adapt()

    @property
    def _slots(self) -> int:
        """Jobs that may be held at the same time now."""
        return self._concurrency * self.options.jobs_per_slot

    def _started(self) -> WorkerEngine:
        if self._engine is None:
            raise BullpenError(f"the worker of queue {self.queue_name!r} was not started; call `start` first")
        return self._engine

    async def _end(self) -> None:
        if self._engine is None:  # what runs the jobs could not be started
            return
        self._is_closing = True
        self._adapt()
        self._reports.tell("closing")
        await self._engine.stop(self._close_timeout_s)
        await self._runner.aclose()
        self._reports.tell("closed")
        await self._reports.drain(CANCEL_GRACE_S)
        self._ended.set()

    def _on_bug(self, error: BaseException) -> None:
        """A bug of bullpen must be visible, and a worker that hit one takes no more jobs."""
        self._crash = error
        logger.critical("queue %r: the worker crashed; please report this", self.queue_name, exc_info=error)
        self._closing = asyncio.ensure_future(self.close(0))


def _dead_letter_policy(given: bool | DeadLetterPolicy) -> DeadLetterPolicy:
    if isinstance(given, DeadLetterPolicy):
        return given
    require("dead_letters", isinstance(given, bool), "True, False or a DeadLetterPolicy", given)
    return DeadLetterPolicy(store="queue") if given else DeadLetterPolicy()

"""Take jobs, run the handler, settle the outcomes.

Free slots and finished outcomes go into one exchange; what finishes while it is in flight goes out with the next. No
timer fills a batch: at concurrency 1 that is one round trip per job, under load batches grow by themselves. In: a
handler and options. Out: every taken job is settled exactly once, or its lock runs out and another worker has it.
Elsewhere: packing the exchange (`exchange`), running user code (`bullpen._kernel.execute`), when to look (`idle`),
locks and stalls (`keepalive`).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from enum import Enum
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, Unpack, cast

from bullpen._kernel import json, tracing
from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.execute import is_async, run_async, run_thread
from bullpen._kernel.ids import check_queue_name, clean_name, worker_name
from bullpen._kernel.keep import KeepJobs, Retention
from bullpen._kernel.lifecycle import Lifecycle
from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import (
    RETURNED_NOTHING,
    Cause,
    Completed,
    Delayed,
    Failed,
    Outcome,
    Raised,
    Result,
    Retry,
    Waiting,
    describe,
    failure_in,
    judge,
)
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy, check_strategies
from bullpen.errors import (
    BullpenError,
    ConnectionLost,
    CorruptJob,
    InvalidOption,
    JobLockLost,
    JobNotFound,
    JobStateConflict,
    NotJson,
    PermanentError,
    ServerRefused,
    require,
)
from bullpen.queue.actions import AsyncActions
from bullpen.queue.base import id_of
from bullpen.queue.cancel import Cancelled, check_reason
from bullpen.queue.codec import Codec, check_codec
from bullpen.queue.dead_letters.entry import DeadLetterWriter
from bullpen.queue.dead_letters.sweep import Sweeper
from bullpen.queue.job import Handler, Job
from bullpen.queue.late_wakeups import note_late_cancel, note_late_wakeup
from bullpen.queue.leftovers import Leftovers
from bullpen.queue.retention import Retirement
from bullpen.redis.calls import Flight
from bullpen.redis.client import Connection, Door
from bullpen.redis.default import connection_for, prefix_for
from bullpen.redis.socket import Prompt, reason_of
from bullpen.wire.cancels import CancelRequest, cancel_text, reason_in
from bullpen.wire.keys import QueueKeys, client_name
from bullpen.wire.options import resolve
from bullpen.worker import keepalive as _keepalive
from bullpen.worker import signals as _signals
from bullpen.worker.batches import BatchHandler, BatchRuns, JobBatch
from bullpen.worker.children.pool import ProcessPool
from bullpen.worker.exchange import (
    DONE,
    DONE_WITHOUT_LETTER,
    FAILED_CHILDREN,
    MOST_JOBS,
    NO_JOB,
    NO_LOCK,
    PENDING_CHILDREN,
    Exchange,
    ExchangeReply,
    Settlement,
    new_settlement,
)
from bullpen.worker.idle import SECONDS_AFTER_BLOCK, Wakeups
from bullpen.worker.options import ChildLimits, WorkerArguments, WorkerOptions
from bullpen.worker.reports import Callback, Reports, WorkerEvent
from bullpen.worker.scheduler import Back, Schedulers, Skipped
from bullpen.worker.sealed import SealedRuns, Unopened
from bullpen.worker.suspects import Suspects, Verdict, is_suspect

logger = get_logger("bullpen.worker")

_NOT_SENT: Final[tuple[None, list[Settlement]]] = (None, [])
_NULL: Final = Completed(b"null")
_CANCEL_GRACE_S: Final = 0.5
_IDLE_PATIENCE_S: Final = 0.2
"""For a take that is being repeated just now: the server may be back in this moment."""
_ENDED_CALL_TTL_MS: Final = 60_000
_OVERLOOKED_MS: Final = 20
"""A job that could run for so long, and was found without a marker, was announced to nobody."""
_TWO_PUMPS_FROM: Final = 20
"""From this concurrency on two exchanges are in flight, each for half of the slots: the server works while Python
does."""
_MOST_THREADS: Final = 100_000
_REFUSED: Final = 1
_CODE_TEXT: Final = {
    NO_LOCK: "its lock ran out and another worker may have it",
    -3: "it is no longer active",
    -6: "another worker has it",
    -20: "the server could not write it; the job comes back when its lock has ended",
}


class GivenUp(Enum):
    """Why a run ended without a result."""

    LOCK_LOST = "lock lost"
    CANCELLED = "cancelled"
    CLOSING = "closing"


class _Look:
    """An answered look behind the blocked read, and what became of the read."""

    __slots__ = ("is_plain", "is_repeated", "prompt")

    def __init__(self, prompt: Prompt, *, is_plain: bool) -> None:
        self.prompt = prompt
        self.is_plain = is_plain
        """The read can go out again without a thought: no due time, no limit, nothing to be given back."""
        self.is_repeated = False
        """It went out with the outcome of the job that the look brought."""


class Worker:
    """Runs a handler for the jobs of one queue.

    `async def` handlers run on the event loop and are cancelled when their time is up; plain `def` handlers run in
    threads; with `processes=True` either kind runs in child processes, which can be killed. What a handler returns
    becomes the job's value; what it raises decides by the job's attempts and backoff. A handler may run more than
    once for one job (a crash, a lost lock): use `job.idempotency_key` and `job.fence`.

        async with Worker("emails", handle, connection="redis://localhost:6379", concurrency=100) as worker:
            await worker.run()
    """

    def __init__(
        self,
        queue: str,
        handler: Handler | BatchHandler,
        *,
        connection: str | Connection | None = None,
        prefix: str | None = None,
        **options: Unpack[WorkerArguments],
    ) -> None:
        if not callable(handler):
            raise InvalidOption("handler", "a function that takes a Job", handler)
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
        self.options = WorkerOptions.read(options)
        self.name = clean_name(name) if name else worker_name()
        """`{hostname}-{pid}-{random}` unless given; stored with each job it takes."""
        self._keys = QueueKeys(prefix_for(prefix), check_queue_name(queue))
        self._handler = cast("Any", handler)  # a BatchHandler where there is `batch`
        self._policy = own if policy is None else policy.over(own)
        processes = self.options.processes
        limits = processes if isinstance(processes, ChildLimits) else ChildLimits()
        self._processes = ProcessPool(cast("Handler", handler), limits) if processes else None
        self._connection = connection_for(connection, self._keys.base)
        self._dead_letters = self._dead_letter_writer()
        self._jobs_per_slot = self.options.jobs_per_slot
        self._concurrency = self.options.concurrency * self._jobs_per_slot
        self._life = Lifecycle(f"worker of queue {queue!r}", self._begin, self._end)
        self._reports = Reports(queue, self.name)

        self._running: dict[Job, asyncio.Task[None]] = {}
        self._locked: dict[str, Job] = {}  # by id, every job whose lock we hold; the keepalive thread copies it
        self._unlocked: list[Settlement] = []  # their locks had run out when they were to be settled
        self._given_up: dict[Job, GivenUp] = {}
        self._gone: set[Job] = set()
        """Given up because the server has no such job any more."""
        self._settled: list[Settlement] = []
        self._noting: set[asyncio.Task[None]] = set()
        self._sleeping: list[Exchange] = []  # of pumps that have nothing to do
        self._sent: dict[Exchange, tuple[Flight, list[Settlement]]] = {}  # outcomes that were sent in a pump's place
        self._look: _Look | None = None  # the latest that was answered
        self._asked = 0  # jobs that exchanges in flight may bring
        self._paused = False
        self._limits_starts = self.options.max_started_attempts is not None
        self._has_begun = False
        self._stopping = False
        self._abandoned = False
        self._timeout_s, self._close_timeout_s = self.options.timeout_s, self.options.close_after_s
        self._timeouts_s = self.options.timeouts_s
        self._hurry = asyncio.Event()
        self._ended = asyncio.Event()
        self._closing: asyncio.Future[None] | None = None
        self._crash: BaseException | None = None
        self._last_exchange = 0.0

    # ---- what callers use -------------------------------------------------------------------------------------

    @property
    def queue_name(self) -> str:
        return self._keys.name

    @property
    def running(self) -> int:
        """Jobs being handled now."""
        return len(self._running)

    @property
    def concurrency(self) -> int:
        """Jobs handled at the same time. May be set while it runs: a larger number holds at once, a smaller one for
        what is taken from now on; jobs that run already go on. With `batch` it counts batches."""
        return self._concurrency // self._jobs_per_slot

    @concurrency.setter
    def concurrency(self, value: int) -> None:
        self._concurrency = check_int("concurrency", value, minimum=1) * self._jobs_per_slot
        if self._processes is not None:
            self._processes.slots = value
        if self._has_begun and not self._stopping:
            self._set_pumps()
            self._wakeups.look_now()

    @property
    def is_paused(self) -> bool:
        """True from `pause` to `resume`. Whether the queue is paused for all is `await queue.is_paused()`."""
        return self._paused

    @property
    def is_alive(self) -> bool:
        """True while a restart would not help: it runs, its loop answers, and the thread that renews its locks works.

        A worker that is full, limited or paused is alive, and so is one whose server is away; see `is_ready`.
        """
        return self._has_begun and self._crash is None and self._keepalive.is_working_for(self._held)

    @property
    def has_started(self) -> bool:
        """True from the end of `start` on, also after `close`."""
        return self._has_begun

    @property
    def is_closing(self) -> bool:
        """True from the first `close` on: it takes no more jobs."""
        return self._stopping

    @property
    def is_ready(self) -> bool:
        """True while it is alive, its server is not known to be away, and it took or polled recently or may not: all
        its slots are taken, or it is limited or paused. An open TCP connection is no proof."""
        if not self.is_alive or self._stopping or self._door.is_lost:
            return False
        if self._last_exchange and (len(self._running) >= self._concurrency or not self._may_take()):
            return True
        recently_s = self.options.drain_delay_ms / 1000 + 2 * SECONDS_AFTER_BLOCK
        return time.monotonic() - self._last_exchange < recently_s

    def on(self, event: WorkerEvent, callback: Callback) -> Callback:
        """Call `callback` for an event of this worker.

        Of its jobs: `active(job)`, `progress(job, value)`, `completed(job, value)`, `failed(job, reason)`,
        `retrying(job, reason, delay_ms)`, `stalled(job_id)`, `suspect(job)`, `lock_lost(job, error)`, `returned(job)`.
        Of itself: `ready()` (the server answered its first poll), `drained()` (its last job ended and nothing is ready
        to run), `paused()`, `resumed()`, `locks_renewed(job_ids)`, `closing()`, `closed()`, `error(error)`.

        The job shows what is stored after the event: its attempts count the one that has just ended. `failed` is only
        told for final failures. Callbacks may be async; what they raise is logged and harms no job.
        """
        return self._reports.on(event, callback)

    def once(self, event: WorkerEvent, callback: Callback) -> Callback:
        """As `on`, for the next such event only."""
        return self._reports.on(event, callback, once=True)

    def off(self, event: WorkerEvent, callback: Callable[..., Any]) -> bool:
        """Call it no more, however often it was given to `on` or `once`. False when it was not."""
        return self._reports.off(event, callback)

    async def start(self) -> None:
        """Begin to take jobs. Returns at once; a server that is away is waited for in the background."""
        # A server that cannot be started or will never let us in is the caller's to know, not the pump's.
        await self._connection.meet(self._keys.base)
        await self._life.start()

    async def run(self, *, signals: bool | None = None) -> None:
        """Work until closed. SIGTERM and SIGINT close gracefully, a second one hurries.

        `signals=None` installs the handlers only where the program has none of its own.
        """
        await self.start()
        remove_signals = _signals.install(self._on_signal, wanted=signals)
        try:
            await self._ended.wait()
        finally:
            remove_signals()
        await self.close()
        if self._crash is not None:
            raise self._crash

    def pause(self) -> None:
        """Take no more jobs here; running ones go on. Other workers are not affected."""
        was_paused, self._paused = self._paused, True
        if self._has_begun:
            self._wakeups.changed.set()
        if not was_paused:
            self._reports.tell("paused")

    def resume(self) -> None:
        was_paused, self._paused = self._paused, False
        if self._life.is_running:
            self._wakeups.look_now()
        if was_paused:
            self._reports.tell("resumed")

    async def cancel_job(self, job: str | Job, reason: str | None = None) -> Cancelled:
        """End a job of this queue, wherever it is; one that runs here is told at once. See `Queue.cancel`."""
        job_id = id_of(job)
        done = await self._actions.cancel(job_id, reason, clock_offset_ms=self.options.clock_offset_ms)
        held = self._locked.get(job_id)
        if done is Cancelled.REQUESTED and held is not None:
            self._on_cancelled([CancelRequest(job_id, held.token, check_reason(reason))], False)
        return done

    async def cancel_all_jobs(self, reason: str | None = None) -> int:
        """The same for every job that runs here now. Returns how many were told; those that ended meanwhile are not
        counted."""
        running = list(self._running)
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
            if self._stopping and self._close_timeout_s == 0:
                self._hurry.set()
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
        if self._processes is not None:
            await self._processes.start(self._concurrency)
        keys, options, clock = self._keys, self.options, self._connection.clock
        self._loop = asyncio.get_running_loop()
        self._door = Door(self._connection, key=keys.base, purpose="jobs")
        block_door = Door(self._connection, client_name(keys.prefix, keys.name, self.name), key=keys.base)
        self._actions = _WorkerActions(
            self._door, keys, deadline_s=60.0, codec=self._codec, on_progress=self._on_progress
        )
        self._unopened = Unopened(self._reports.tell_error)
        self._wakeups = Wakeups(
            block_door,
            keys.marker,
            keys.limits_changed,
            clock,
            commands=self._door,
            drain_delay_ms=options.drain_delay_ms,
            clock_offset_ms=options.clock_offset_ms,
            may_lend=lambda: self._free_slots() > 0,
            look_after=self._look_after,
            on_error=self._reports.tell_error,
        )
        self._call_keys: list[str] = []
        self._has_voided = False
        self._lent = self._new_exchange()
        self._suspects = Suspects(self._actions, keys, options.max_lonely_deaths)
        self._schedulers = Schedulers(
            self._actions, keys, zone=options.scheduler_zone, clock_offset_ms=options.clock_offset_ms
        )
        self._threads: ThreadPoolExecutor | None = None
        self._execute: Callable[[Job, float | None], Coroutine[Any, Any, Result]]
        if self._processes is not None:
            self._execute = self._processes.run
        elif is_async(self._handler):
            self._execute = partial(run_async, self._handler)
        else:
            # It starts a thread when none is idle, and never more than there are slots: the number of those may change.
            self._threads = ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix=f"bullpen-{keys.name}")
            self._execute = partial(self._run_in_thread, self._threads)
        if options.batch is not None:
            self._execute = BatchRuns(self._call_batch, options.batch, lambda: self.concurrency).run
        if (sealer := self._actions.sealer) is not None:
            self._execute = SealedRuns(self._execute, sealer, self._unopened).run
            self._reports.open_result = sealer.open_result
        self._held = _keepalive.Held(
            connection=self._connection,
            keys=keys,
            loop=self._loop,
            jobs=self._locked,
            lock_ms=options.lock_ms,
            stalled_interval_ms=options.stalled_interval_ms,
            max_block_ms=options.block_limit_ms,
            clock_offset_ms=options.clock_offset_ms,
            on_lost=self._on_locks_lost,
            on_stalled=self._on_stalled,
            on_renewed=self._on_renewed,
            on_cancelled=self._on_cancelled,
            skips_check=options.skip_stalled_check,
            skips_renewal=options.skip_lock_renewal,
        )
        self._keepalive = _keepalive.shared(self._connection)
        self._keepalive.register(self._held)
        self._pumps: list[asyncio.Task[None]] = []
        self._set_pumps()
        self._listener = asyncio.create_task(self._wakeups.listen(), name=f"bullpen marker {keys.name}")
        self._sweeping: list[asyncio.Task[None]] = []
        if self._dead_letters is not None:
            sweeper = Sweeper(self._actions, keys, self._dead_letters, clock_offset_ms=options.clock_offset_ms)
            self._sweeping = [asyncio.create_task(sweeper.run(), name=f"bullpen sweep {keys.name}")]
        retires_completed = options.remove_on_complete is None
        retires_failed = options.remove_on_fail is None and self._dead_letters is not None
        if retires_completed or retires_failed:
            retirement = Retirement(
                *(self._actions, keys),
                completed=retires_completed,
                failed=retires_failed,
                clock_offset_ms=options.clock_offset_ms,
            )
            self._sweeping.append(asyncio.create_task(retirement.run(), name=f"bullpen retire {keys.name}"))
        self._sweeping.append(
            asyncio.create_task(Leftovers(self._actions, keys).run(), name=f"bullpen tidy {keys.name}")
        )
        for task in (self._listener, *self._sweeping):
            task.add_done_callback(self._on_task_done)
        self._has_begun = True

    def _set_pumps(self) -> None:
        """As many as the concurrency is worth. One that is there stays: with little to do it sleeps."""
        wanted = 2 if self._concurrency >= _TWO_PUMPS_FROM else 1
        while len(self._pumps) < wanted:
            name = f"bullpen pump {len(self._pumps)} {self.queue_name}"
            pump = asyncio.create_task(self._pump(self._new_exchange()), name=name)
            pump.add_done_callback(self._on_task_done)
            self._pumps.append(pump)
        self._most_per_take = min(MOST_JOBS, max(self._jobs_per_slot, -(-self._concurrency // wanted)))

    def _new_exchange(self) -> Exchange:
        options = self.options
        exchange = Exchange(
            self._door,
            self._keys,
            self._actions,
            worker_name=self.name,
            lock_ms=options.lock_ms,
            limit=options.limit,
            keep_completed=_keep(options.remove_on_complete),
            keep_failed=_keep(options.remove_on_fail),
            dead_letters=self._dead_letters,
            metrics_minutes=options.metrics_minutes,
            clock_offset_ms=options.clock_offset_ms,
            on_dropped=self._reports.tell_dropped,
        )
        self._call_keys.append(exchange.call_key)
        return exchange

    def _dead_letter_writer(self) -> DeadLetterWriter | None:
        name = self._policy.dead_letters.queue_for(self._keys.name)
        if name is None:
            return None
        entries = QueueKeys(self._keys.prefix, name)
        self._connection.require_one_slot(self._keys.base, entries.base)
        with_cancelled = self._policy.dead_letters.cancelled
        return DeadLetterWriter(self._keys, entries, self._connection.clock, with_cancelled=with_cancelled)

    async def _end(self) -> None:
        """The order of shutdown: stop taking; stop listening, while there are pumps to pass a marker on; wait; cancel
        what is left and wait a moment; settle and give back.

        Cancel first, give back second: the other way round a second worker would run a job while ours still cleans up.
        Locks and connections go last, because everything before needs them.
        """
        if not self._has_begun:  # the handler could not be started in a child
            return
        self._stopping = True
        self._reports.tell("closing")
        # One deadline for all of it: a server that does not answer must not be waited for in each step anew.
        answer_s = max(1.0, self._connection.command_timeout_s)
        end_at = self._loop.time() + self._close_timeout_s + _CANCEL_GRACE_S + answer_s
        for sweeping in self._sweeping:
            sweeping.cancel()
        stopping = asyncio.create_task(self._stop_looking())
        await self._wait_for_running(self._close_timeout_s)
        if self._running:
            await self._cancel_running()
        await asyncio.wait([stopping], timeout=self._seconds_until(end_at) - _IDLE_PATIENCE_S)
        stopping.cancel()
        self._abandoned = True
        self._wakeups.changed.set()
        # The pumps end when everything is settled. A server that is away must not hold us for ever: the locks then
        # run out. And whoever holds no job has nothing to tell a server that is known to be away.
        is_idle = not self._held.jobs and not self._settled and not self._unlocked
        patience_s = _IDLE_PATIENCE_S if is_idle and self._door.is_lost else min(answer_s, self._seconds_until(end_at))
        _, unfinished = await asyncio.wait(self._pumps, timeout=patience_s)
        if unfinished and not is_idle:
            logger.warning(
                "queue %r: closed without the server's answer; unsettled jobs return when their locks end",
                self.queue_name,
            )
        for pump in unfinished:
            pump.cancel()
        await asyncio.gather(stopping, *self._pumps, self._listener, *self._sweeping, return_exceptions=True)
        if not unfinished and not self._has_voided and not self._lent.is_unanswered:
            await self._let_calls_go(self._seconds_until(end_at))
        unregister = partial(self._keepalive.unregister, timeout_s=self._seconds_until(end_at))
        await self._loop.run_in_executor(None, unregister, self._held)
        self._door.close()
        await self._actions.aclose()
        if self._processes is not None:
            await self._processes.aclose()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._reports.tell("closed")
        await self._reports.drain(_CANCEL_GRACE_S)
        self._ended.set()

    def _seconds_until(self, when: float) -> float:
        """At least a moment: what can be done at once shall be done."""
        return max(_IDLE_PATIENCE_S, when - self._loop.time())

    async def _stop_looking(self) -> None:
        await self._wakeups.stop(self._door, self._listener)
        await self._end_lent_look()

    async def _let_calls_go(self, within_s: float) -> None:
        """All calls were answered, so none will be repeated: their records need not stay for as long as those of a
        worker that met an outage. Another client that deletes the queue would leave them behind."""
        if self._door.open_wire is None:
            return
        try:
            async with asyncio.timeout(within_s):
                await self._door.call_many([("PEXPIRE", key, _ENDED_CALL_TTL_MS) for key in self._call_keys])
        except (TimeoutError, BullpenError) as error:
            logger.debug("queue %r: records of calls stay until they expire: %s", self.queue_name, reason_of(error))

    async def _end_lent_look(self) -> None:
        """The blocked read could not be ended in order. The look behind it may have taken a job, or may do so yet: find
        out, and see to it that no late copy does."""
        if not self._lent.is_unanswered or self._door.is_lost:
            return
        self._has_voided = True
        try:
            async with asyncio.timeout(self._connection.command_timeout_s):
                reply = await self._lent.void()
        except (TimeoutError, ConnectionLost, ServerRefused) as error:
            logger.warning(
                "queue %r: a last look has no answer (%s); a job it took returns when its lock ends",
                self.queue_name,
                reason_of(error),
            )
            return
        self._start_all(reply.taken)

    async def _wait_for_running(self, timeout_s: float) -> None:
        hurry = asyncio.ensure_future(self._hurry.wait())
        try:
            end = self._loop.time() + timeout_s
            while self._running and not self._hurry.is_set() and (left := end - self._loop.time()) > 0:
                await asyncio.wait([*self._running.values(), hurry], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()

    async def _cancel_running(self) -> None:
        tasks = list(self._running.items())
        if not self._hurry.is_set():  # of a second signal somebody has told
            logger.warning(
                "queue %r: jobs %s did not end within %.4g s (close_timeout); they are cancelled and given back, no "
                "attempt is counted",
                *(self.queue_name, ", ".join(repr(job.id) for job, _ in tasks[:10]), self._close_timeout_s),
                extra={"queue": self.queue_name, "count": len(tasks)},
            )
        for job, task in tasks:
            self._give_up(job, task, self._given_up.get(job, GivenUp.CLOSING))
        await asyncio.wait([task for _, task in tasks], timeout=_CANCEL_GRACE_S)
        for job in self._running:
            logger.warning(
                "queue %r: job %r does not stop; it is not given back while it runs, its lock will run out",
                self.queue_name,
                job.id,
            )

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping:
            logger.warning("queue %r: second %s, running jobs are given back", self.queue_name, number.name)
            self._hurry.set()
            return
        logger.info("queue %r: %s, no more jobs are taken; %d still run", self.queue_name, number.name, self.running)
        self._stopping = True
        self._closing = asyncio.ensure_future(self.close())

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Pumps and listener end only when we say so; anything else is a bug of ours and must be seen."""
        if task.cancelled() or task.exception() is None:
            return
        self._crash = task.exception()
        logger.critical("queue %r: the worker crashed; please report this", self.queue_name, exc_info=self._crash)
        self._closing = asyncio.ensure_future(self.close(0))

    # ---- the pump ---------------------------------------------------------------------------------------------

    async def _bound_events(self) -> None:
        """Write the option once there is somebody to write it to: a server that is away is waited for, like always."""
        length = self.options.events_max_len
        while length is not None and not self._door.closed:
            try:
                await self._actions.command("HSET", self._keys.meta, "opts.maxLenEvents", length)
                return
            except ServerRefused as error:
                self._reports.tell_error(error)
                return
            except ConnectionLost:
                continue  # the call has waited long enough between its own attempts

    async def _pump(self, exchange: Exchange) -> None:
        await self._bound_events()
        wakeups = self._wakeups
        while True:
            if self._unlocked:
                await self._retake_locks()
            # When nothing is known to wait, the outcome is told first of all, since somebody may wait for it, and the
            # look is left to the blocked read that follows its answer. (Sent right behind the outcome, the read kept
            # the core busy that the server needed to tell it: results on an idle queue came 9 % later.)
            must_look, take = wakeups.should_look, 0
            sent = self._sent.pop(exchange, None)  # while this pump slept
            if sent is None and (must_look or not self._settled):
                take = max(0, self._free_slots())
                if wakeups.is_lent and not self._settled and (not self._may_take() or (must_look and not take)):
                    await wakeups.release(self._door)
                    continue
                if not self._settled and not (must_look if take else wakeups.has_marker):
                    if self._abandoned:
                        return
                    wakeups.changed.clear()
                    self._sleeping.append(exchange)
                    await wakeups.wait(for_marker=take > 0)
                    if exchange not in self._sent:
                        self._sleeping.remove(exchange)
                    continue
            calls, is_fallback = wakeups.calls, wakeups.is_fallback
            if sent is None:
                settlements, self._settled = self._settled[:MOST_JOBS], self._settled[MOST_JOBS:]
                # A marker that we took but cannot use is passed on: an exchange sets it again when work is left.
                wakeups.has_marker = False
                flight = exchange.send(settlements, take)
            else:
                flight, settlements = sent
            self._asked += take
            try:
                reply = await self._answer(exchange, flight, settlements, take)
            finally:
                self._asked -= take
            if not self._last_exchange:
                self._reports.tell("ready")
            self._last_exchange = time.monotonic()
            self._on_codes(settlements, reply)
            if settlements and self._reports.wants_drained:
                self._notice_drained(reply)
            if reply.taken:
                if is_fallback:
                    self._note_late_wakeup(reply)
                if self._is_late(reply):
                    await self._give_back_late(exchange, reply)
                else:
                    self._start_all(reply.taken)
            if take:
                wakeups.is_fallback = False
                self._plan_next_look(reply, called_meanwhile=wakeups.calls != calls)
            elif reply.has_more:
                wakeups.look_now()  # the marker is set too, but another client may use it up and not take the job

    async def _look_after(self, door: Door, read: tuple[str | float, ...], within_s: float) -> Any:
        """A blocked read with a look for one job behind it, again and again as long as nothing else is to be done.
        Returns what was read last."""
        wakeups = self._wakeups
        calls = wakeups.calls
        late: list[ExchangeReply] = []

        def on_reply(reply: ExchangeReply, prompt: Prompt) -> None:
            for exchange, (flight, _) in list(self._sent.items()):
                if flight.reply.done():  # came together with this; the end of a job is told before the next begins
                    self._on_early_answer(exchange, flight)
            self._asked -= 1
            self._last_exchange = time.monotonic()
            if reply.taken:
                if prompt.first is not None and prompt.first.reply is None and not wakeups.was_unblocked:
                    self._note_late_wakeup(reply)
                if self._is_late(reply):
                    late.append(reply)
                else:
                    self._start_all(reply.taken)
            if reply.has_more:
                wakeups.should_look = True
            look = self._look = _Look(prompt, is_plain=not (late or reply.limited_ms or reply.next_due_ms))
            self._loop.call_soon(self._after_first_step, look, partial(tidy_up, look, reply))

        def tidy_up(look: _Look, reply: ExchangeReply) -> None:
            nonlocal calls
            if look.is_repeated:
                return  # while this waited for an answer, a job ended and took the read along
            look.is_plain = False  # what ends from now on does not take the read along
            self._plan_next_look(reply, called_meanwhile=wakeups.calls != calls)
            calls = wakeups.calls
            if not late and not self._settled and self._may_lend_again(look):
                self._lent.look_again(look.prompt)
                self._asked += 1
            else:
                wakeups.end_read()
                look.prompt.wake()

        self._asked += 1
        try:
            read_reply = await self._lent.run_after(door, read, take=1, within_s=within_s, on_reply=on_reply)
        finally:
            if self._lent.is_unanswered:
                self._asked -= 1
        for reply in late:
            await self._give_back_late(self._lent, reply)
        return read_reply

    def _note_late_wakeup(self, reply: ExchangeReply) -> None:
        """The blocked read has waited for nothing, and the look after it found jobs. One that was added in that very
        moment was not overlooked by anybody."""
        count = sum(reply.now_ms - job.record.due_ms > _OVERLOOKED_MS for job in reply.taken)
        if count:
            taken = [job.id for job in reply.taken]
            self._note(note_late_wakeup(self._actions, self._keys, taken, count, reply.now_ms))

    def _note(self, noting: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(noting, name="bullpen late wake-up")
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    def _after_first_step(self, look: _Look, tidy_up: Callable[[], None]) -> None:
        """Tidy up behind a look, but not before an outcome that the job's first step has sent is answered: on few
        cores the server waits until this process sleeps (results on an idle queue came 2 % later)."""
        if look.is_repeated:
            return
        for flight, _ in self._sent.values():
            if flight.wire is not None:
                flight.reply.add_done_callback(lambda _: tidy_up())
                return
        tidy_up()

    def _may_lend_again(self, look: _Look) -> bool:
        """A pump sleeps, and all that it would do if it were woken is to lend a slot to the same read as before. To
        wake it and the listener for that took longer, on few cores while whoever waits for the result of the last job
        waited for the processor too (3 % of the time until the result; 14 % if the next job is asked for at once)."""
        wakeups = self._wakeups
        is_quiet = self._sleeping and not wakeups.should_look and wakeups.is_lent
        return bool(is_quiet) and look.prompt.can_repeat() and self._free_slots() > 0

    def _may_take(self) -> bool:
        return not (self._stopping or self._paused or self._wakeups.is_limited or self._suspects.waiting)

    def _free_slots(self) -> int:
        """Below 0 where more run than a lowered concurrency allows."""
        if not self._may_take():
            return 0
        # Outcomes that wait for the next exchange have freed their slot already.
        return min(self._concurrency - len(self._running) - self._asked, self._most_per_take)

    def _notice_drained(self, reply: ExchangeReply) -> None:
        """Outcomes were stored: were they the last?"""
        if not (self._running or self._settled or reply.taken or reply.has_more or reply.limited_ms):
            self._reports.tell("drained")

    def _plan_next_look(self, reply: ExchangeReply, *, called_meanwhile: bool) -> None:
        self._wakeups.should_look = called_meanwhile or reply.has_more
        if reply.limited_ms > 0:
            self._wakeups.limit(reply.limited_ms / 1000, reply.now_ms - self.options.clock_offset_ms)
        elif reply.next_due_ms:
            self._wakeups.look_when_due(reply.next_due_ms)

    async def _answer(
        self, exchange: Exchange, flight: Flight, settlements: list[Settlement], take: int
    ) -> ExchangeReply:
        """The end of an exchange; when the script itself fails, each settlement alone, so that one bad job harms only
        itself."""
        try:
            return await exchange.answer(flight)
        except ServerRefused as error:
            self._reports.tell_error(error)
            if len(settlements) > 1:
                codes: list[int] = []
                for settlement in settlements:
                    alone = [settlement]
                    codes += (await self._answer(exchange, exchange.send(alone, 0), alone, 0)).codes
                return ExchangeReply(0, codes, [], 0, 0, True)
            for job, _ in settlements:
                logger.error(
                    "queue %r: outcome of job %r dropped, the server refused it: %s", self.queue_name, job.id, error
                )
            if take:
                self._wakeups.limit(1.0)  # a server that refuses to give jobs is not asked in a tight loop
            return ExchangeReply(0, [_REFUSED] * len(settlements), [], 0, 0, False)

    # ---- one job ----------------------------------------------------------------------------------------------

    def _is_late(self, reply: ExchangeReply) -> bool:
        """The answer lay unread while a handler blocked the loop. Nobody renewed the locks of what it brought, since
        nobody here knew of the jobs: others may run them by now."""
        clock = self._connection.clock
        age_ms = clock.now_ms() + self.options.clock_offset_ms - reply.now_ms
        # A clock that is not known well proves nothing.
        return age_ms > self.options.lock_ms / 4 and age_ms - clock.error_ms > self.options.lock_ms / 4

    async def _give_back_late(self, exchange: Exchange, reply: ExchangeReply) -> None:
        """Ask the server which of these jobs are still ours, and give them back."""
        logger.warning(
            "queue %r: an answer was read late; its %d jobs are given back", self.queue_name, len(reply.taken)
        )
        try:
            still_ours = (await exchange.void()).taken
        except ServerRefused as error:
            self._reports.tell_error(error)  # the locks run out
            return
        self._return_all(still_ours)
        self._wakeups.changed.set()

    def _start_all(self, jobs: list[Job]) -> None:
        if self._stopping or self._paused or self._suspects.is_alone:
            # They came with an exchange that was in flight; they have not begun, so they simply go back.
            self._return_all(jobs)
            return
        locked, running, create_task = self._locked, self._running, self._loop.create_task
        for job in jobs:
            if job.id in locked:
                self._lose_earlier_run(job)
            locked[job.id] = job
            running[job] = create_task(self._run_one(job))
        if self._reports.are_wanted("active"):  # asked once per batch; no task has had its first step yet
            for job in jobs:
                if job in running:
                    self._reports.tell_active(job)

    def _return_all(self, jobs: list[Job]) -> None:
        for job in jobs:
            if job.id in self._locked:
                self._lose_earlier_run(job)
            self._locked[job.id] = job
            self._settled.append(Settlement(job, Waiting()))

    def _lose_earlier_run(self, job: Job) -> None:
        """An earlier run of the same job lost its lock here and does not know yet."""
        self._on_locks_lost([(job.id, self._locked[job.id].token)])

    async def _run_one(self, job: Job) -> None:
        started = time.monotonic()
        outcome: Outcome | None
        try:
            # Nearly all: straight to the handler.
            if job.is_ordinary and not self._limits_starts and job.record.decode_data():
                timeout_s = self._timeouts_s.get(job.name, self._timeout_s) if self._timeouts_s else self._timeout_s
                result = await (self._execute(job, timeout_s) if tracing.tracer is None else self._traced(job))
                nothing_special = result is RETURNED_NOTHING and not self._given_up
                outcome = _NULL if nothing_special else self._outcome(job, result)
            else:
                outcome = self._refusal(job) or await self._run_with_care(job)
        except asyncio.CancelledError as error:
            outcome = self._given_up_outcome(job) if job in self._given_up else self._judge(job, Raised(error))
        except BaseException as error:  # noqa: BLE001 - a bug of ours must not leave the slot taken for ever
            outcome = Failed(*describe(error), Cause.PERMANENT, error)
            self._reports.tell_error(error)
        self._finish(job, outcome, started)

    def _give_up(self, job: Job, task: asyncio.Task[None], why: GivenUp) -> None:
        self._given_up[job] = why
        task.cancel()
        task.add_done_callback(lambda _: self._finish_unbegun(job))

    def _finish_unbegun(self, job: Job) -> None:
        """A task that is cancelled before its first step never runs, and so does not finish its job."""
        if job in self._running:
            self._finish(job, self._given_up_outcome(job), time.monotonic())

    def _finish(self, job: Job, outcome: Outcome | None, started: float) -> None:
        del self._running[job]
        if self._suspects.waiting:
            self._suspects.note_running(len(self._running))
        elif self._suspects.have_ended:
            self._suspects.have_ended = False
            self._wakeups.look_now()  # nothing was taken while they waited and ran
        if outcome is None:
            self._forget_lock(job)
            held_ms = int((time.monotonic() - started) * 1000)
            is_gone = job in self._gone
            self._gone.discard(job)
            self._reports.tell_lock_lost(job, JobLockLost(self.queue_name, job.id, held_ms, is_gone=is_gone))
        else:
            self._settled.append(new_settlement((job, outcome)))
        if not (self._sleeping and not self._running and self._settle_at_once()):
            self._wakeups.changed.set()

    def _settle_at_once(self) -> bool:
        """Send in the place of a pump that sleeps what it would send when it is awake, if nothing else runs that could
        come along: somebody may wait for the result. The pump is woken by the answer."""
        wakeups = self._wakeups
        if wakeups.should_look or not 0 < len(self._settled) <= MOST_JOBS:
            return False
        # The next read goes along where nothing stands against it, in the same write: then it is in place when whoever
        # gets this result asks for the next job (whose result comes 3 to 5 % sooner).
        look, carry = self._look, None
        if look is not None and look.is_plain and self._may_lend_again(look):
            carry = partial(self._lent.look_again, look.prompt)
        try:
            flight = self._sleeping[-1].send(self._settled, 0, carry)
        except Exception:
            wakeups.changed.set()  # the pump meets it again, and it is seen there
            raise
        if look is not None and carry is not None:
            look.is_repeated, look.is_plain = True, False
            self._asked += 1
        wakeups.has_marker = False
        exchange = self._sleeping.pop()
        self._sent[exchange], self._settled = (flight, self._settled), []
        is_sent = flight.wire is not None
        if is_sent:
            flight.reply.add_done_callback(lambda _: self._on_early_answer(exchange, flight))
        return is_sent

    def _on_early_answer(self, exchange: Exchange, flight: Flight) -> None:
        """The usual answer is dealt with here, and the pump sleeps on. With any other it is woken."""
        sent, settlements = self._sent.get(exchange, _NOT_SENT)
        if sent is not flight:
            return  # that is done already, or the pump is awake and waits for the same
        answer = flight.reply
        if answer.cancelled() or answer.exception() is not None:
            self._wakeups.changed.set()
            return
        try:
            reply = exchange.take_in(flight, answer.result())
        except Exception:
            self._wakeups.changed.set()  # the pump meets it again, and it is seen there
            raise
        del self._sent[exchange]
        self._sleeping.append(exchange)
        self._last_exchange = time.monotonic()
        self._on_codes(settlements, reply)
        if self._reports.wants_drained:
            self._notice_drained(reply)
        if reply.has_more:
            self._wakeups.look_now()  # the marker is set too, but another client may use it up and not take the job
        elif not self._wakeups.is_lent:
            self._wakeups.changed.set()  # nobody listens for jobs: the slot that is free now is lent by the pump

    async def _run_with_care(self, job: Job) -> Outcome | None:
        """One that stalled before, or that a scheduler made. None: the lock is lost, and nothing may be written."""
        # A child that dies takes nobody with it, so with processes a suspect runs like any other.
        if is_suspect(job) and self._processes is None:
            return await self._run_alone(job)
        return await self._run_in_schedule(job)

    async def _run_in_schedule(self, job: Job) -> Outcome | None:
        if job.record.scheduler_id is not None and (given_back := await self._advance_scheduler(job)) is not None:
            return given_back
        return await self._run_handler(job)

    async def _run_alone(self, job: Job) -> Outcome | None:
        """Run a suspect when nothing else runs. None: the lock is lost, and nothing may be written."""
        with self._suspects.watched():
            verdict, deaths = await self._suspects.judge(job)
            if verdict is Verdict.LOST:
                return None
            if verdict is Verdict.CONDEMNED:
                times = "time" if deaths == 1 else "times"
                reason = f"killed its worker {deaths} {times} while it ran alone (stalled {job.stalled_count} times)"
                return Failed(reason, reason, Cause.POISON)
            self._reports.tell_suspect(job)
            async with self._suspects.alone(job, lambda: len(self._running)) as is_ours:
                return await self._run_in_schedule(job) if is_ours else None

    async def _run_handler(self, job: Job) -> Outcome | None:
        """None: the lock is lost, and nothing may be written."""
        timeout_s = self._timeouts_s.get(job.name, self._timeout_s)
        run = self._execute(job, timeout_s) if tracing.tracer is None else self._traced(job)
        return self._outcome(job, await run)

    async def _run_in_thread(self, threads: ThreadPoolExecutor, job: Job, timeout_s: float | None) -> Result:
        job.bind_to_running_loop()
        return await run_thread(threads, self._handler, job, timeout_s)

    async def _call_batch(self, batch: JobBatch, timeout_s: float | None) -> Result:
        handler: BatchHandler = self._handler
        if self._threads is None:
            return await run_async(handler, batch, timeout_s)
        for job in batch:
            job.bind_to_running_loop()
        return await run_thread(self._threads, handler, batch, timeout_s)

    def _outcome(self, job: Job, result: Result) -> Outcome | None:
        if job in self._given_up:  # cancelled, but the handler caught it and came back
            return self._given_up_outcome(job)
        return self._judge(job, result)

    async def _traced(self, job: Job) -> Result:
        """The run as a span of the trace that the job came with, named as Node's library names it."""
        with tracing.processing(
            *("bullmq", self.queue_name, job.id),
            tracing.from_text(job.opts.tm),
            messaging__client__id=self.name,
            bullmq__queue__name=self.queue_name,
            bullmq__job__id=job.id,
            bullmq__job__name=job.name,
            bullmq__job__attempts__made=job.attempts_made,
            bullmq__worker__name=self.name,
        ) as span:
            job.traced_in = tracing.trace_id(tracing.carrier())
            result = await self._execute(job, self._timeouts_s.get(job.name, self._timeout_s))
            if (failure := failure_in(result)) is not None:
                span.fail(failure)
            return result

    def _judge(self, job: Job, result: Result) -> Outcome:
        opts = job.opts
        outcome = judge(
            result,
            attempts_made_before=job.attempts_made,
            attempts=opts.attempts,
            backoff=opts.backoff,
            policy=self._policy,
            subject=job,
        )
        most = self.options.max_started_attempts
        if isinstance(outcome, Retry) and most is not None and job.attempts_started >= most:
            error = result.error if isinstance(result, Raised) else None
            return Failed(outcome.reason, outcome.stack, Cause.EXHAUSTED, error, outcome.is_logged)
        return outcome

    def _refusal(self, job: Job) -> Failed | Delayed | None:
        """A job that must not be run: it fails, or comes back when somebody can open it."""
        deferred = job.record.deferred_failure
        if deferred is not None:
            is_cancelled = reason_in(deferred) is not None
            return Failed(deferred, deferred, Cause.CANCELLED if is_cancelled else Cause.DEFERRED)
        ttl_ms = job.opts.ttl_ms
        if ttl_ms and job.attempts_started <= 1 and (waited_ms := job.processed_on - job.record.due_ms) > ttl_ms:
            reason = f"expired: waited {waited_ms} ms, ttl is {ttl_ms} ms"
            return Failed(reason, reason, Cause.EXPIRED)
        most = self.options.max_started_attempts
        if most is not None and job.attempts_started > most:
            reason = f"was started {job.attempts_started} times, this worker allows {most}"
            return Failed(reason, reason, Cause.EXHAUSTED)
        stalls = job.stalled_count if self.options.count_stalls_as_attempts else 0
        if stalls and job.attempts_made + stalls >= job.opts.attempts:
            reason = f"stalled {stalls} times and failed {job.attempts_made} times of {job.opts.attempts} attempts"
            return Failed(reason, reason, Cause.EXHAUSTED)
        try:
            _ = job.data
        except NotJson as error:
            # Not the error's own text, which shows the data: payloads are never logged.
            reason = f"data cannot be read: {error.option}: expected {error.expected}"
            corrupt = CorruptJob(reason, queue=self.queue_name, job_id=job.id)
            return Failed(*describe(corrupt), Cause.BAD_DATA, corrupt)
        return self._unopened.refuse(job) if self._codec is None and job.record.is_sealed else None

    async def _advance_scheduler(self, job: Job) -> Waiting | Delayed | Completed | None:
        """Store the scheduler's next job before this one runs. If that cannot be done the job does not run here, or its
        schedule would end: somebody shall take it again."""
        try:
            answer = await self._schedulers.advance(job)
        except ConnectionLost as error:
            self._reports.tell_error(error)
            return Waiting()
        match answer:
            case Back(delay_ms):
                return Delayed(delay_ms)
            case Skipped(why):
                return Completed(json.encode({"skipped": why}))
        return None

    def _given_up_outcome(self, job: Job) -> Outcome | None:
        match self._given_up.pop(job):
            case GivenUp.CLOSING:
                return Waiting()
            case GivenUp.CANCELLED:
                text = cancel_text(job.cancel_reason or "")
                return Failed(text, text, Cause.CANCELLED)
            case GivenUp.LOCK_LOST:
                return None

    def _forget_lock(self, job: Job) -> None:
        if self._locked.get(job.id) is job:  # a later run of the same job may have its own by now
            del self._locked[job.id]

    def _on_codes(self, settlements: list[Settlement], reply: ExchangeReply) -> None:
        is_told, locked = self._reports.are_wanted("completed"), self._locked
        for settlement, code in zip(settlements, reply.codes, strict=True):
            job, outcome = settlement
            if code != DONE or type(outcome) is not Completed:
                self._on_code(job, outcome, code, reply.now_ms)
                continue
            # Nearly all of them: straight through, without a call per job.
            if locked.get(job.id) is job:
                del locked[job.id]
            if is_told:
                self._reports.tell_completed(job, outcome, reply.now_ms)

    def _on_code(self, job: Job, outcome: Outcome, code: int, now_ms: int) -> None:
        if code in (PENDING_CHILDREN, FAILED_CHILDREN):
            self._refuse_completion(job, code)
            return
        if code == NO_LOCK and self._locked.get(job.id) is job:
            self._unlocked.append(new_settlement((job, outcome)))
            self._wakeups.changed.set()
            return
        self._forget_lock(job)
        if code == DONE_WITHOUT_LETTER:
            code = DONE
            reason = "its queue cannot be written; a later sweep tries again"
            logger.error(
                "Failed to send job to DLQ: %s (queue %r, job %r)",
                *(reason, self.queue_name, job.id),
                extra=job.log_fields(),
            )
        elif (
            code == DONE
            and self._dead_letters is not None
            and isinstance(outcome, Failed)
            and self._dead_letters.wants(outcome)
        ):
            logger.warning(
                "Job sent to DLQ: job %r of queue %r is in %r",
                *(job.id, self.queue_name, self._dead_letters.name),
                extra=job.log_fields(),
            )
        if code not in (DONE, _REFUSED):
            self._drop(job, code)
        elif code == _REFUSED:
            self._reports.forget(job)
        else:
            self._reports.tell_outcome(job, outcome, now_ms)

    async def _retake_locks(self) -> None:
        """The locks of finished jobs had run out: nobody could renew them for too long. While nothing has happened to
        such a job meanwhile its lock is taken again, and the outcome counts; else it is dropped."""
        settlements, self._unlocked = self._unlocked, []
        args = _keepalive.renew_arguments(self._keys, self.options.lock_ms, (job for job, _ in settlements))
        try:
            lost, retaken, gone, _ = await self._actions.evaluate("renew", [self._keys.stalled], args)
        except ServerRefused as error:
            self._reports.tell_error(error)
            lost, retaken, gone = [job.id.encode("utf-8", "surrogateescape") for job, _ in settlements], [], []
        except ConnectionLost:
            if self._door.closed:
                raise
            self._unlocked += settlements  # the call has waited long enough between its own attempts
            return
        if retaken:
            _keepalive.tell_retaken(self.queue_name, len(retaken))
        for settlement in settlements:
            if (raw_id := settlement.job.id.encode("utf-8", "surrogateescape")) in lost:
                self._forget_lock(settlement.job)
                self._drop(settlement.job, NO_JOB if raw_id in gone else NO_LOCK)
            else:
                self._settled.append(settlement)

    def _drop(self, job: Job, code: int) -> None:
        why = _CODE_TEXT.get(code, f"code {code}")
        self._reports.tell_lock_lost(job, JobLockLost(self.queue_name, job.id, 0, why, is_gone=code == NO_JOB))

    def _refuse_completion(self, job: Job, code: int) -> None:
        """The script would not complete a parent. Pending children: the handler should have waited; failed ones: it
        must fail."""
        error: Exception = PermanentError("has failed children")
        if code == PENDING_CHILDREN:
            error = RuntimeError("has pending children; raise WaitForChildren to wait for them")
        self._settled.append(Settlement(job, self._judge(job, Raised(error))))
        self._wakeups.changed.set()

    # ---- reports of the keepalive thread, in the loop ---------------------------------------------------------

    def _on_locks_lost(self, lost: list[tuple[str, str]], gone: frozenset[str] = frozenset()) -> None:
        for job, task in list(self._running.items()):
            if (job.id, job.token) in lost:
                job.cancelled = True
                if job.id in gone:
                    self._gone.add(job)
                self._give_up(job, task, GivenUp.LOCK_LOST)

    def _on_cancelled(self, requests: list[CancelRequest], is_late: bool) -> None:
        """Somebody wants these runs to end. One whose outcome is on its way has ended by itself."""
        for job_id, token, reason in requests:
            job = self._locked.get(job_id)
            task = None if job is None or job.token != token else self._running.get(job)
            if job is None or task is None or self._given_up.get(job) is not None:
                continue
            if is_late:
                self._note(note_late_cancel(self._actions, self._keys, job_id))
            job.note_cancelled(reason)
            self._give_up(job, task, GivenUp.CANCELLED)

    def _on_renewed(self, job_ids: list[str]) -> None:
        if self._reports.are_wanted("locks_renewed"):
            self._reports.tell("locks_renewed", job_ids)

    def _on_progress(self, job_id: str, progress: bytes) -> None:
        job = self._locked.get(job_id)
        if job is not None and self._reports.are_wanted("progress"):
            self._reports.tell("progress", job, json.decode(progress))

    def _on_stalled(self, stalled: list[tuple[str, str]]) -> None:
        for job_id, name in stalled:
            self._reports.tell_stalled(job_id, name)
        self._wakeups.look_now()


class _WorkerActions(AsyncActions):
    """What a running job can do; whoever listens to the worker hears of its progress."""

    def __init__(
        self,
        door: Door,
        keys: QueueKeys,
        *,
        deadline_s: float,
        codec: Codec | None,
        on_progress: Callable[[str, bytes], None],
    ) -> None:
        super().__init__(door, keys, deadline_s=deadline_s, codec=codec)
        self._on_progress = on_progress

    async def update_progress(self, job_id: str, progress: bytes) -> None:
        await super().update_progress(job_id, progress)
        self._on_progress(job_id, progress)


def _keep(value: Retention) -> KeepJobs | None:
    return None if value is None else resolve(value)


def _dead_letter_policy(given: bool | DeadLetterPolicy) -> DeadLetterPolicy:
    if isinstance(given, DeadLetterPolicy):
        return given
    require("dead_letters", isinstance(given, bool), "True, False or a DeadLetterPolicy", given)
    return DeadLetterPolicy(store="queue") if given else DeadLetterPolicy()

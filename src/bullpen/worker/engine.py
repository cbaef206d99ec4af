"""A worker at work: its parts put together, and the order in which they stop.

In: options, and what runs a job. Out: every taken job is settled exactly once, or its lock runs out and another worker
has it. Elsewhere: the public faces (`worker`, `taker`), each part in a file of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from bullpen._kernel import json
from bullpen._kernel.keep import KeepJobs, Retention
from bullpen._kernel.logs import get_logger
from bullpen._kernel.policy import RetryPolicy
from bullpen.errors import BullpenError
from bullpen.queue.actions import AsyncActions
from bullpen.queue.codec import Codec
from bullpen.queue.dead_letters.entry import DeadLetterWriter
from bullpen.queue.dead_letters.sweep import Sweeper
from bullpen.queue.late_wakeups import note_late_cancel
from bullpen.queue.leftovers import Leftovers
from bullpen.queue.retention import Retirement
from bullpen.redis.client import Connection, Door
from bullpen.redis.socket import reason_of
from bullpen.wire.cancels import CancelRequest
from bullpen.wire.keys import QueueKeys, client_name
from bullpen.wire.options import resolve
from bullpen.worker import keepalive
from bullpen.worker.driver import Parts, PumpDriver
from bullpen.worker.exchange import Exchange
from bullpen.worker.handlers import Runner
from bullpen.worker.options import WorkerOptions
from bullpen.worker.reports import Reports
from bullpen.worker.runs import JobRuns
from bullpen.worker.scheduler import Schedulers
from bullpen.worker.sealed import SealedRuns, Unopened
from bullpen.worker.settling import JobSettling
from bullpen.worker.suspects import Suspects
from bullpen.worker.tally import Tally

logger = get_logger("bullpen.worker")

CANCEL_GRACE_S: Final = 0.5
IDLE_PATIENCE_S: Final = 0.2
"""For a take that is being repeated just now: the server may be back in this moment."""
_ENDED_CALL_TTL_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker was told when it was made."""

    name: str
    keys: QueueKeys
    connection: Connection
    options: WorkerOptions
    policy: RetryPolicy
    codec: Codec | None
    dead_letters: DeadLetterWriter | None
    reports: Reports
    runner: Runner
    tally: Tally | None = None
    """Counts what its jobs do, where somebody keeps the history."""


def dead_letter_writer(keys: QueueKeys, connection: Connection, policy: RetryPolicy) -> DeadLetterWriter | None:
    """What writes dead letters, where a policy wants them in a queue."""
    name = policy.dead_letters.queue_for(keys.name)
    if name is None:
        return None
    entries = QueueKeys(keys.prefix, name)
    connection.require_one_slot(keys.base, entries.base)
    return DeadLetterWriter(keys, entries, connection.clock, with_cancelled=policy.dead_letters.cancelled)


class WorkerEngine:
    """From start to end, once, on one loop."""

    def __init__(self, setup: Setup, concurrency: int, on_bug: Callable[[BaseException], None]) -> None:
        self._setup = setup
        self._loop = asyncio.get_running_loop()
        keys, options, connection = setup.keys, setup.options, setup.connection
        self._reports = setup.reports
        self.door = connection.lease_door(keys.base)
        self.actions = _RunActions(self.door, keys, deadline_s=60.0, codec=setup.codec, on_progress=self._on_progress)
        run, sealer = setup.runner.run, self.actions.sealer
        if sealer is not None:
            run = SealedRuns(run, sealer, Unopened(self._reports.tell_error)).run
            self._reports.open_result = sealer.open_result
        suspects = Suspects(self.actions, keys, options.max_lonely_deaths)
        schedulers = Schedulers(
            self.actions, keys, zone=options.scheduler_zone, clock_offset_ms=options.clock_offset_ms
        )
        self.runs = JobRuns(
            *(keys.name, setup.name, options, setup.policy, self._reports, run, suspects, schedulers),
            opens_sealed=sealer is not None,
            survives_jobs=setup.runner.survives_jobs,
        )
        self._settling = JobSettling(
            *(keys, options.lock_ms, self.actions, self.door, setup.dead_letters, self._reports, self.runs),
            on_end=setup.runner.on_end,
            tally=setup.tally,
        )
        read_door = Door(connection, client_name(keys.prefix, keys.name, setup.name), key=keys.base)
        self.driver = PumpDriver(
            Parts(
                *(self.door, read_door, keys, connection.clock, self.actions),
                *(self._new_exchange, self.runs, self._settling, self._reports, setup.runner.batches),
            ),
            *(options, concurrency, on_bug),
        )
        self.runs.on_settled = self.driver.on_settled
        self.runs.wake = self._settling.wake = self.driver.wake
        self.runs.call = self.driver.call
        self.hurry = asyncio.Event()
        self._held = keepalive.Held(
            connection=connection,
            keys=keys,
            loop=self._loop,
            jobs=self.runs.locked,
            lock_ms=options.lock_ms,
            stalled_interval_ms=options.stalled_interval_ms,
            max_block_ms=options.block_limit_ms,
            clock_offset_ms=options.clock_offset_ms,
            on_lost=self.runs.lose,
            on_stalled=self._on_stalled,
            on_renewed=self._on_renewed,
            on_cancelled=self._on_cancelled,
            skips_check=options.skip_stalled_check,
            skips_renewal=options.skip_lock_renewal,
        )
        self._keepalive = keepalive.shared(connection)
        self._on_bug = on_bug
        self._tidying: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._keepalive.register(self._held)
        self.driver.start()
        self._start_tidying()

    @property
    def is_alive(self) -> bool:
        return self._keepalive.is_working_for(self._held)

    @property
    def lag_s(self) -> float:
        """For how long its loop has not answered; 0 when it does."""
        return self._held.lag_s

    def _new_exchange(self) -> Exchange:
        setup, options = self._setup, self._setup.options
        return Exchange(
            self.door,
            setup.keys,
            self.actions,
            worker_name=setup.name,
            lock_ms=options.lock_ms,
            limit=options.limit,
            keep_completed=_keep(options.remove_on_complete),
            keep_failed=_keep(options.remove_on_fail),
            dead_letters=setup.dead_letters,
            metrics_minutes=options.metrics_minutes,
            clock_offset_ms=options.clock_offset_ms,
            on_dropped=self._reports.tell_dropped,
        )

    def _start_tidying(self) -> None:
        """What keeps the queue in order and hurries nobody."""
        actions, keys, options = self.actions, self._setup.keys, self._setup.options
        dead_letters, offset_ms = self._setup.dead_letters, options.clock_offset_ms

        def settled() -> int:
            return self._settling.rounds

        work = {"tidy": Leftovers(actions, keys, settled).run()}
        if dead_letters is not None:
            work["sweep"] = Sweeper(actions, keys, dead_letters, clock_offset_ms=offset_ms).run()
        completed = options.remove_on_complete is None
        failed = options.remove_on_fail is None and dead_letters is not None
        if completed or failed:
            retirement = Retirement(
                *(actions, keys), completed=completed, failed=failed, clock_offset_ms=offset_ms, settled=settled
            )
            work["retire"] = retirement.run()
        for name, coroutine in work.items():
            task = asyncio.create_task(coroutine, name=f"bullpen {name} {keys.name}")
            task.add_done_callback(self.driver.on_task_done)
            self._tidying.append(task)

    # ---- stopping ---------------------------------------------------------------------------------------------

    async def stop(self, timeout_s: float) -> None:
        """The order of shutdown: stop taking; stop listening, while there is a pump to pass a marker on; wait; cancel
        what is left and wait a moment; settle and give back.

        Cancel first, give back second: the other way round a second worker would run a job while ours still cleans up.
        Locks and connections go last, because everything before needs them.
        """
        # One deadline for all of it: a server that does not answer must not be waited for in each step anew.
        answer_s = max(1.0, self.door.connection.command_timeout_s)
        end_at = self._loop.time() + timeout_s + CANCEL_GRACE_S + answer_s
        self.driver.stop_taking()
        for task in self._tidying:
            task.cancel()
        stopping = asyncio.create_task(self.driver.stop_reading())
        await self._wait_for_runs(timeout_s)
        if self.runs.running:
            await self._cancel_runs(timeout_s)
        await asyncio.wait([stopping], timeout=self._seconds_until(end_at) - IDLE_PATIENCE_S)
        stopping.cancel()
        # A server that is away must not hold us for ever: the locks then run out. And whoever holds no job has nothing
        # to tell a server that is known to be away.
        is_idle = not (self.runs.locked or self.driver.settled or self._settling.unlocked)
        is_in_vain = is_idle and self.door.is_lost
        patience_s = IDLE_PATIENCE_S if is_in_vain else min(answer_s, self._seconds_until(end_at))
        if not await self.driver.end(patience_s) and not is_idle:
            logger.warning(
                "queue %r: closed without the server's answer; unsettled jobs return when their locks expire",
                self._setup.keys.name,
            )
        await asyncio.gather(stopping, *self._tidying, return_exceptions=True)
        if self.driver.knows_all_answers:
            await self._let_calls_go(self._seconds_until(end_at))
        unregister = partial(self._keepalive.unregister, timeout_s=self._seconds_until(end_at))
        await self._loop.run_in_executor(None, unregister, self._held)
        self.door.close()
        await self.actions.aclose()

    def _seconds_until(self, when: float) -> float:
        """At least a moment: what can be done at once shall be done."""
        return max(IDLE_PATIENCE_S, when - self._loop.time())

    async def _let_calls_go(self, within_s: float) -> None:
        """All calls were answered, so none will be repeated: their records need not stay for as long as those of a
        worker that met an outage. Another client that deletes the queue would leave them behind."""
        if self.door.open_wire is None:
            return
        try:
            async with asyncio.timeout(within_s):
                await self.door.call_many([("PEXPIRE", key, _ENDED_CALL_TTL_MS) for key in self.driver.call_keys])
        except (TimeoutError, BullpenError) as error:
            logger.debug(
                "queue %r: records of calls stay until they expire: %s", self._setup.keys.name, reason_of(error)
            )

    async def _wait_for_runs(self, timeout_s: float) -> None:
        running, hurry = self.runs.running, asyncio.ensure_future(self.hurry.wait())
        try:
            end = self._loop.time() + timeout_s
            while running and not self.hurry.is_set() and (left := end - self._loop.time()) > 0:
                await asyncio.wait([*running.values(), hurry], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurry.cancel()

    async def _cancel_runs(self, timeout_s: float) -> None:
        queue, running = self._setup.keys.name, self.runs.running
        if timeout_s == 0:  # asked for: nobody wanted to wait
            logger.info("queue %r: %d jobs are given back, no attempt is counted", queue, len(running))
        elif not self.hurry.is_set():  # of a second signal somebody has told
            logger.warning(
                "queue %r: jobs %s did not end within %.4g s (close_timeout); they are cancelled and given back, no "
                "attempt is counted",
                *(queue, ", ".join(repr(job.id) for job in list(running)[:10]), timeout_s),
                extra={"queue": queue, "count": len(running)},
            )
        await asyncio.wait(self.runs.cancel_for_closing(), timeout=CANCEL_GRACE_S)
        for job in running:
            logger.warning(
                "queue %r: job %r does not stop; it is not given back while it runs; its lock will expire",
                queue,
                job.id,
            )

    # ---- what the keepalive thread tells, in the loop ---------------------------------------------------------

    def _on_cancelled(self, requests: list[CancelRequest], is_late: bool) -> None:
        for job_id, token, reason in requests:
            if self.runs.cancel(job_id, token, reason) and is_late:
                self.driver.note(note_late_cancel(self.actions, self._setup.keys, job_id))

    def _on_renewed(self, job_ids: list[str]) -> None:
        if self._reports.are_wanted("locks_renewed"):
            self._reports.tell("locks_renewed", job_ids)

    def _on_progress(self, job_id: str, progress: bytes) -> None:
        job = self.runs.locked.get(job_id)
        if job is not None and self._reports.are_wanted("progress"):
            self._reports.tell("progress", job, json.decode(progress))

    def _on_stalled(self, stalled: list[tuple[str, str]]) -> None:
        for job_id, name in stalled:
            self._reports.tell_stalled(job_id, name)
        self.driver.call()


class _RunActions(AsyncActions):
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

"""A queue and a worker against a model of forty lines: any sequence of operations and faults ends in the same state.

The model knows order, places and attempts, and nothing of Redis, batches or connections. Faults (lost messages,
forgotten scripts, reset connections) are operations that change nothing in it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from bullpen._kernel.backoff import Backoff
from bullpen.errors import DelayJob, PermanentError, ReturnToWait
from bullpen.queue import Added, Job, Queue
from bullpen.testing import FaultProxy, RedisServer, check_queue
from bullpen.wire.scripts import SCRIPTS
from bullpen.worker import Worker
from tests.chaos.arena import LONG, scaled

SLOTS = 3
LATER_MS = 600_000  # what is put off does not come back during a test


class Addition(NamedTuple):
    size: int
    priority: int
    lifo: bool
    attempts: int
    own_id: str | None
    later: bool


class Ending(NamedTuple):
    which: int
    how: str


ADDS = st.builds(
    Addition,
    size=st.integers(1, 3),
    priority=st.sampled_from([0, 0, 0, 1, 7]),
    lifo=st.booleans(),
    attempts=st.integers(1, 2),
    own_id=st.sampled_from([None, None, None, "order-a", "order-b"]),
    later=st.sampled_from([False, False, False, True]),
)
ENDS = st.builds(
    Ending, which=st.integers(0, SLOTS - 1), how=st.sampled_from(["return", "raise", "permanent", "delay", "give back"])
)


@dataclass
class ModelJob:
    id: str
    priority: int
    lifo: bool
    attempts: int
    made: int = 0
    started: int = 0


@dataclass
class Model:
    """Where every job is. `wait` and `prioritized` are in the order in which they run."""

    jobs: dict[str, ModelJob] = field(default_factory=dict)
    wait: list[str] = field(default_factory=list)
    prioritized: list[tuple[int, int, str]] = field(default_factory=list)
    delayed: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    completed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    paused: bool = False
    turn: int = 0

    def ready(self, job: ModelJob, *, keeps_turn: bool = False) -> None:
        if job.priority:
            self.turn += 1
            self.prioritized.append((job.priority, 0 if keeps_turn else self.turn, job.id))
            self.prioritized.sort()
        elif job.lifo or keeps_turn:
            self.wait.insert(0, job.id)
        else:
            self.wait.append(job.id)

    def take(self) -> None:
        while not self.paused and len(self.running) < SLOTS and (self.wait or self.prioritized):
            job_id = self.wait.pop(0) if self.wait else self.prioritized.pop(0)[2]
            self.jobs[job_id].started += 1
            self.running.add(job_id)

    def end(self, job_id: str, how: str) -> None:
        job = self.jobs[job_id]
        self.running.remove(job_id)
        job.made += how not in ("delay", "give back")
        if how == "return":
            self.completed.add(job_id)
        elif how == "give back":
            self.ready(job, keeps_turn=True)
        elif how == "delay" or (how == "raise" and job.made < job.attempts):
            self.delayed.add(job_id)
        else:
            self.failed.add(job_id)


class QueueMachine(RuleBasedStateMachine):
    """Hypothesis calls the rules in any order; after each one the server's state must be the model's."""

    server: ClassVar[RedisServer]
    proxy: ClassVar[FaultProxy]

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.name = f"q-{uuid.uuid4().hex[:12]}"
        self.base = f"bull:{self.name}:"
        self.handlers: dict[str, asyncio.Future[str]] = {}
        self.runner = self._open_runner()
        self.runner.run(self._begin())

    def _open_runner(self) -> asyncio.Runner:
        return asyncio.Runner()

    async def _begin(self) -> None:
        self.queue = Queue(self.name, connection=self.proxy.url, backoff=Backoff.fixed(LATER_MS), add_deadline=60_000)
        self.worker = Worker(self.name, self._handle, connection=self.proxy.url, concurrency=SLOTS)
        await self.worker.start()

    async def _handle(self, job: Job) -> str:
        ordered = self.handlers[job.id] = asyncio.get_running_loop().create_future()
        try:
            how: str = await ordered
        finally:
            del self.handlers[job.id]
        match how:
            case "raise":
                raise ValueError("as ordered")
            case "permanent":
                raise PermanentError("as ordered")
            case "delay":
                raise DelayJob(LATER_MS)
            case "give back":
                raise ReturnToWait
        return how

    def teardown(self) -> None:
        self.runner.run(self._finish())
        self._close_runner()

    def _close_runner(self) -> None:
        self.runner.close()

    async def _finish(self) -> None:
        await self.worker.close(0)
        await self.queue.close()
        violations = check_queue(self.server.client(), "bull", self.name, at_rest=True)
        assert violations == []

    # ---- operations -------------------------------------------------------------------------------------------

    # Many steps in one rule: Hypothesis chooses rules evenly, and most of what happens to a queue is work, not faults.
    @rule(steps=st.lists(st.one_of(ADDS, ENDS), min_size=4, max_size=12))
    def work(self, steps: list[Addition | Ending]) -> None:
        for step in steps:
            self.runner.run(self._add(step) if isinstance(step, Addition) else self._end(step))

    async def _add(self, new: Addition) -> None:
        options: dict[str, Any] = {"priority": new.priority, "attempts": new.attempts}
        if new.own_id:
            options["job_id"] = new.own_id
        if new.later:
            options["delay"] = LATER_MS
        lifo = new.lifo and not new.priority
        adds = (self.queue.add("work", lifo=lifo, **options) for _ in range(1 if new.own_id else new.size))
        for stored in await asyncio.gather(*adds):
            known = stored.id in self.model.jobs
            assert stored.added is (Added.DUPLICATE if known else Added.CREATED)
            if known:
                continue
            job = self.model.jobs[stored.id] = ModelJob(stored.id, new.priority, lifo, new.attempts)
            if new.later:
                self.model.delayed.add(job.id)
            else:
                self.model.ready(job)
        self.model.take()
        await self._compare()

    async def _end(self, ending: Ending) -> None:
        running = sorted(self.model.running)
        if not running:
            return
        job_id = running[ending.which % len(running)]
        self.handlers[job_id].set_result(ending.how)
        self.model.end(job_id, ending.how)
        self.model.take()
        await self._compare()

    @rule(paused=st.booleans())
    def pause_or_resume(self, paused: bool) -> None:
        self.model.paused = paused
        self.model.take()
        self.runner.run(self._do(self.queue.pause if paused else self.queue.resume))

    # ---- faults: nothing changes in the model -----------------------------------------------------------------

    @rule(
        script=st.sampled_from(["add", "exchange", "exchange", "pause", "resume"]),
        times=st.integers(1, 2),
        how=st.sampled_from(["reply", "torn reply", "request"]),
    )
    def lose(self, script: str, times: int, how: str) -> None:
        if how == "request":
            self.proxy.lose_request(SCRIPTS[script].sha1, times=times)
        else:
            self.proxy.lose_reply(SCRIPTS[script].sha1, times=times, torn=how == "torn reply")

    @rule(forget_scripts=st.booleans())
    def disturb(self, forget_scripts: bool) -> None:
        if forget_scripts:
            self.server.command("SCRIPT", "FLUSH")
        else:
            self.proxy.reset()

    async def _do(self, operation: Callable[[], Awaitable[None]]) -> None:
        await operation()
        await self._compare()

    # ---- comparing --------------------------------------------------------------------------------------------

    async def _compare(self) -> None:
        expected = self._expected()
        deadline = time.monotonic() + 30
        while (found := self._found()) != expected:
            assert time.monotonic() < deadline, f"the queue and the model differ\nfound    {found}\nexpected {expected}"
            await asyncio.sleep(0.002)

    def _expected(self) -> dict[str, object]:
        model = self.model
        return {
            "wait": model.wait,
            "prioritized": [job_id for _, _, job_id in model.prioritized],
            "delayed": model.delayed,
            "active": model.running,
            "handlers": model.running,
            "completed": model.completed,
            "failed": model.failed,
            "starts": {job.id: job.started for job in model.jobs.values()},
            "attempts": {job.id: job.made for job in model.jobs.values()},
        }

    def _found(self) -> dict[str, object]:
        transaction = self.server.client().pipeline(transaction=True)
        for key in ("wait", "active"):
            transaction.lrange(self.base + key, 0, -1)
        for key in ("prioritized", "delayed", "completed", "failed"):
            transaction.zrange(self.base + key, 0, -1)
        for job_id in self.model.jobs:
            transaction.hmget(self.base + job_id, ["ats", "atm"])
        wait, active, prioritized, delayed, completed, failed, *counts = transaction.execute()
        return {
            "wait": [raw.decode() for raw in reversed(wait)],
            "prioritized": [raw.decode() for raw in prioritized],
            "delayed": {raw.decode() for raw in delayed},
            "active": {raw.decode() for raw in active},
            "handlers": set(self.handlers),
            "completed": {raw.decode() for raw in completed},
            "failed": {raw.decode() for raw in failed},
            "starts": {job_id: int(pair[0] or 0) for job_id, pair in zip(self.model.jobs, counts, strict=True)},
            "attempts": {job_id: int(pair[1] or 0) for job_id, pair in zip(self.model.jobs, counts, strict=True)},
        }


@pytest.mark.requirement("Q-14", "Q-25", "Q-26", "Q-31", "Q-65", "X-31")
def test_any_sequence_of_operations_and_faults_matches_the_model(server: RedisServer, proxy: FaultProxy) -> None:
    """Nobody thinks of the sequence that breaks it; Hypothesis tries hundreds and shrinks the one it finds."""
    QueueMachine.server, QueueMachine.proxy = server, proxy
    run_machine(QueueMachine, examples=scaled(10, 1_000))


def run_machine(machine: type[QueueMachine], *, examples: int) -> None:
    """Try so many sequences of rules."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=12,
            deadline=None,
            derandomize=not LONG,
            # Shrinking waits for the same failure again and again; in the short form the first one found is told.
            phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
            report_multiple_bugs=False,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

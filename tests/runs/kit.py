"""Runs of one test: a service with its queue, workers that come and go, providers that remember what they were paid."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from bullpen.ledger import Ledger, RunRow, RunStatus
from bullpen.outbox import DispatcherOptions, Outbox
from bullpen.plugins.channels.queue import QueueChannel
from bullpen.queue import Job
from bullpen.redis import Connection
from bullpen.runs import Run, RunOptions, RunPayload, Runs
from bullpen.wire.records import JobRecord

PATIENCE_S = 20.0
ALICE, BOB = "alice", "bob"

# Short, so that what a crash leaves behind comes round within a test.
QUICK = {"lock": 1_000, "stalled_interval": 200, "heartbeat_ms": 100, "idle_ms": 0, "sweep_every_ms": 100}


def payload(tenant_id: str = ALICE, run_id: str | None = None, **fields: Any) -> RunPayload:
    given: dict[str, Any] = {
        "run_id": run_id or str(uuid.uuid4()),
        "tenant_id": tenant_id,
        "version_id": "v1",
        "definition": {"steps": ["a", "b"]},
        **fields,
    }
    return RunPayload(**given)


class FakeActions:
    """The queue behind a job that is in none; nothing of it is reached in these tests."""

    name = "workflow-execution"

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the processor reached for the queue: {name}")


def fake_job(
    data: Any, *, job_id: str | None = None, attempts_made: int = 0, fence: int = 1, attempts: int = 3, **fields: str
) -> Job:
    """A job as a worker would have taken it."""
    import json

    given = data.to_data() if isinstance(data, RunPayload) else data
    known = given.get("runId", "x") if isinstance(given, dict) else "x"
    stored = {
        "name": "workflow-run",
        "data": given if isinstance(given, str) else json.dumps(given),
        "opts": json.dumps({"attempts": attempts, "backoff": {"type": "exponential", "delay": 5000}}),
        "timestamp": "1700000000000",
        "atm": str(attempts_made),
        "ats": str(fence),
        **fields,
    }
    return Job(FakeActions(), JobRecord.parse(job_id or known, stored))


class Bank:
    """A provider that takes idempotency keys: a key is charged once, however often it is presented."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.charged: dict[str, int] = {}

    async def charge(self, key: str, amount: int = 1) -> dict[str, Any]:
        self.note(key, amount)
        return {"receipt": key}

    def note(self, key: str, amount: int = 1) -> None:
        self.calls[key] += 1
        self.charged.setdefault(key, amount)


class Stage:
    """Everything that a test of runs needs in one process."""

    def __init__(self, ledger: Ledger, connection: Connection, **options: Any) -> None:
        self.ledger, self.connection = ledger, connection
        self.runs = Runs(ledger, connection, options=RunOptions(**{**QUICK, **options}))
        self.service = self.runs.service
        self.outbox = Outbox(
            ledger,
            {"bullmq:*": QueueChannel(connection)},
            connection=connection,
            options=DispatcherOptions(tick_interval_ms=50),
        )

    async def dispatch(self) -> None:
        """Let the outbox add what was submitted so far."""
        async with self.outbox.dispatcher() as dispatcher:
            while await self.ledger.outbox.due_types():
                await dispatcher.tick()
                await dispatcher.idle()

    @contextlib.asynccontextmanager
    async def working(
        self,
        handler: Callable[[Run], Awaitable[Any]] | None = None,
        *,
        name: str | None = None,
        dispatch: bool = True,
        **further: Any,
    ) -> AsyncIterator[Any]:
        """Dispatcher and worker until the block ends; with `name` the worker of that handler."""
        if handler is not None:
            self.runs.handler(handler)
        worker = self.runs.worker(name, **further)
        async with contextlib.AsyncExitStack() as stack:
            if dispatch:
                dispatcher = self.outbox.dispatcher()
                await dispatcher.start()
                stack.push_async_callback(dispatcher.close)
            await worker.start()
            stack.push_async_callback(worker.close, 2_000)
            yield worker

    async def until(self, run_id: str, *statuses: RunStatus, tenant_id: str = ALICE) -> RunRow:
        """Wait until a run has one of these statuses; the database tells nobody, so it is asked."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (row := await self.service.get(tenant_id, run_id)).status not in statuses:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            job = await self.runs.queue.get_job(run_id)
            where = None if job is None else await job.state()
            raise AssertionError(f"run {run_id} is {row.status} within {PATIENCE_S} s, its job {where}") from None
        return row

    async def until_job(self, run_id: str, *states: str) -> Job:
        async with asyncio.timeout(PATIENCE_S):
            while await self.runs.queue.state_of(run_id) not in states:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.02)
        job = await self.runs.queue.get_job(run_id)
        assert job is not None
        return job

    async def aclose(self) -> None:
        await self.outbox.aclose()
        await self.runs.aclose()


class Records(logging.Handler):
    """Log records of runs, as they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record)

    def texts(self, level: int | None = None) -> list[str]:
        return [record.getMessage() for record in self.all if level is None or record.levelno == level]

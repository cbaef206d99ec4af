"""Runs and Node on the same queues: Node reads our jobs and dead letters, and what it fails ends as a failed run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis

from bullpen.errors import PermanentError
from bullpen.ledger import Ledger, RunStatus
from bullpen.queue import JobState
from bullpen.redis import Connection
from bullpen.runs import Run
from tests.runs.kit import ALICE, Stage, payload

from ._sides import PeerSide


@pytest_asyncio.fixture(loop_scope="session")
async def runs(interop_url: str, client: redis.Redis, tmp_path: Path) -> AsyncIterator[Stage]:
    connection = Connection(interop_url)
    async with Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as ledger:
        await ledger.migrate()
        stage = Stage(ledger, connection)
        yield stage
        await stage.aclose()
    await connection.aclose()


@pytest.mark.requirement("R-2", "R-4", "R-11", "R-20", "R-32")
async def test_node_reads_the_job_of_a_run_and_its_dead_letter(runs: Stage, node: PeerSide) -> None:
    async def refuse(run: Run) -> None:
        raise PermanentError("no")

    wanted = payload(context_inputs={"city": "Wien"})
    await runs.service.submit(wanted)
    await runs.dispatch()

    waiting = await node.peer.call("getJob", queue="workflow-execution", jobId=wanted.run_id)
    async with runs.working(refuse, dispatch=False):
        await runs.until(wanted.run_id, RunStatus.FAILED)
    (letter,) = await runs.runs.queue.dead_letters.list()
    entry = await node.peer.call("getJob", queue="workflow-execution-dlq", jobId=letter.id)

    assert (waiting["state"], waiting["data"]) == ("prioritized", wanted.to_data())  # in the lane of its tenant
    options = waiting["opts"]
    assert (options["attempts"], options["backoff"]) == (3, {"type": "exponential", "delay": 5000})
    assert options["removeOnComplete"] in (100, {"count": 100})
    assert options.get("removeOnFail", False) is False
    assert entry["state"] == "waiting"
    expected = {"originalJobId": wanted.run_id, "runId": wanted.run_id, "tenantId": ALICE, "attemptsMade": 1}
    assert {**entry["data"], **expected, "errorMessage": "no"} == entry["data"]
    assert entry["data"]["originalData"] == wanted.to_data()
    assert entry["data"]["failedAt"].endswith("Z")


@pytest.mark.requirement("X-105", "X-106")
async def test_a_run_that_a_node_worker_gave_up_ends_failed_with_a_dead_letter(
    runs: Stage, node: PeerSide, client: redis.Redis
) -> None:
    """Node ends it after 1 of 3 attempts and tells no `retries-exhausted`: counting attempts would wait for ever."""
    wanted = payload()
    await runs.service.submit(wanted)
    await runs.dispatch()
    await node.start_worker("w", "workflow-execution", {"kind": "unrecoverable", "message": "gave up"})
    await runs.until_job(wanted.run_id, JobState.FAILED)
    await node.close_worker("w")

    entries: Any = client.xrange("bull:workflow-execution:events")
    told = {fields[b"event"] for _, fields in entries}
    await runs.runs.queue.dead_letters.sweep()
    swept = await runs.runs.maintenance().sweep()

    row = await runs.service.get(ALICE, wanted.run_id)
    assert b"retries-exhausted" not in told
    assert swept.failed == 1
    assert (row.status, row.error_message) == (
        RunStatus.FAILED,
        "Workflow execution failed after 1 attempts: gave up",
    )
    assert await runs.service.dead_letter_depth() == 1

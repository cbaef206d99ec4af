"""Batches in child processes: one call for several jobs, with an outcome of each, in a process that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from bullpen.queue.batch import JobBatch
from bullpen.worker import BatchOptions, ChildLimits
from tests.queue import _process_handlers as handlers
from tests.queue._kit import Kit

pytestmark = pytest.mark.measures_children
FOUR = BatchOptions(size=4)


@pytest.mark.parametrize("handler", [handlers.together, handlers.together_async])
async def test_each_job_has_its_own_outcome(kit: Kit, handler: Any) -> None:
    jobs = await kit.queue(attempts=1).add_many([("a", {"n": n}) for n in range(4)])

    told = await kit.work(handler, batch=FOUR, processes=True)
    await told.finished(4)

    stored = [kit.fields(job.id) for job in jobs]
    assert int(stored[0]["returnvalue"]) != os.getpid()
    assert json.loads(stored[3]["returnvalue"]) == {"n": 3}
    assert stored[1]["failedReason"] == "no such row"
    assert "object" in stored[2]["failedReason"], "what JSON cannot carry fails that job alone"
    assert set(kit.zset("completed")) == {jobs[0].id, jobs[3].id}
    assert (await jobs[1].logs(), json.loads(stored[2]["data"])) == (["seen"], {"changed": 2})


async def test_a_handler_that_returns_nothing_completes_all(kit: Kit) -> None:
    await kit.queue().add_many([("a", n) for n in range(9)])

    told = await kit.work(handlers.nothing_together, batch=FOUR, processes=True)
    await told.finished(9)

    assert [value for _, value in told.of("completed")] == [None] * 9


async def test_a_list_of_another_length_is_the_handlers_mistake(kit: Kit) -> None:
    jobs = await kit.queue(attempts=1).add_many([("a", n) for n in range(2)])

    told = await kit.work(handlers.too_few, batch=FOUR, processes=True)
    await told.wait("failed", 2)

    assert "expected a list of 2 values, one per job, or None" in kit.fields(jobs[0].id)["failedReason"]


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("handler", [handlers.deciding, handlers.deciding_async])
async def test_what_was_decided_before_stands(kit: Kit, handler: Any, dies: bool) -> None:
    """Whether the handler raises later or its process is gone: only the others fail, and the worker lives on."""
    jobs = await kit.queue(attempts=1).add_many([("a", {"dies": dies}) for _ in range(4)])

    told = await kit.work(handler, batch=FOUR, processes=True)
    await told.wait("failed", 2)
    await told.wait("returned")
    await told.wait("completed")

    assert kit.fields(jobs[0].id)["returnvalue"] == '"done"'
    assert set(kit.zset("delayed")) == {jobs[1].id}
    reason = "the child process died in the middle of the job (exit code -9)" if dies else "the rest is lost"
    assert [kit.fields(job.id)["failedReason"] for job in jobs[2:]] == [reason] * 2
    assert await jobs[2].logs() == ["InvalidOption"]


@pytest.mark.parametrize("handler", [handlers.watching_one, handlers.watching_one_async])
async def test_one_cancelled_job_leaves_the_others_alone(kit: Kit, handler: Any) -> None:
    """The handler sees it; a plain function with the next answer that it gets."""
    jobs = await kit.queue().add_many([("a", n) for n in range(3)])
    told = await kit.work(handler, batch=FOUR, processes=True)
    started = asyncio.Event()
    told.worker.on("progress", lambda job, value: started.set())
    await asyncio.wait_for(started.wait(), 60)

    await told.worker.cancel_job(jobs[1].id, "not wanted")
    await told.wait("completed", 2)

    assert [json.loads(kit.fields(job.id)["returnvalue"]) for job in (jobs[0], jobs[2])] == ["False None"] * 2
    assert kit.fields(jobs[1].id)["failedReason"] == "cancelled: not wanted"


async def test_when_all_are_cancelled_the_handler_may_clean_up(kit: Kit, tmp_path: Path) -> None:
    """SIGTERM first, as for a single job; the child comes back and is used again."""
    marker = tmp_path / "cleaned"
    await kit.queue().add_many([("a", {"file": str(marker)}) for _ in range(3)])
    told = await kit.work(handlers.cleaning_up_together, batch=FOUR, processes=True)
    await kit.until((tmp_path / "cleaned.started").exists, "the handler runs")

    await told.worker.cancel_all_jobs("enough")
    await told.finished(3)

    assert {reason for _, reason in told.of("failed")} == {"cancelled: enough"}
    await kit.until(marker.exists, "the handler has cleaned up")
    assert marker.read_text() == "CancelledError True enough"


async def test_time_that_is_up_kills_the_child_and_fails_all(kit: Kit, tmp_path: Path) -> None:
    marker = tmp_path / "cleaned"
    jobs = await kit.queue(attempts=1).add_many([("a", {"file": str(marker)}) for _ in range(2)])

    told = await kit.work(handlers.cleaning_up_together, batch=FOUR, processes=ChildLimits(), timeout=500)
    await told.finished(2)

    expected = "timed out after 500 ms, its process was killed"
    assert {kit.fields(job.id)["failedReason"] for job in jobs} == {expected}
    assert not marker.exists()


async def test_a_handler_that_no_child_can_import_is_refused(kit: Kit) -> None:
    async def local(batch: JobBatch) -> None: ...

    with pytest.raises(Exception, match="top level of a module"):
        kit.worker(local, batch=FOUR, processes=True)

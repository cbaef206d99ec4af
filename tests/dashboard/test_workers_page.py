"""The page of workers: processes that tell of themselves, those that are gone, and other clients."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bullpen import Bullpen, Worker
from bullpen.dashboard import Visitor
from bullpen.queue.beats import Beat, BeatJob, BeatWorker, write_beat
from tests.dashboard._kit import settings, visit
from tests.ops.test_history import until

VIEWER = Visitor("v")


def beat(process: str, ago_ms: int, **changes: Any) -> Beat:
    now_ms = int(time.time() * 1000)
    worker = BeatWorker(f"{process}-w", 8, 2, 1_000, locks_lost=1, jobs=(BeatJob("j-9", "send", now_ms),))
    told = {"lag_ms": 1_500, "workers": (worker,), **changes}
    return Beat(process, "web-1", 411, "Python 3.12.1", "bullpen 9.9", now_ms - 90_000, now_ms - ago_ms, **told)


@pytest.mark.requirement("D-75")
async def test_a_process_is_shown_with_what_it_told(redis_url: str, queue_name: str) -> None:
    """And its workers are not listed a second time as connections."""
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.add("a", {})
        await write_beat(app.connection, queue.keys, beat("p1", 0))
        (answer,) = await visit(app, VIEWER, "/api/v1/workers")
        (row,) = answer.json()["processes"]
        assert (row["host"], row["pid"], row["language"], row["library"]) == (
            "web-1", 411, "Python 3.12.1", "bullpen 9.9",
        )  # fmt: skip
        assert (row["queues"], row["slots"], row["used"]) == ([queue_name], 8, 2)
        assert (row["lagMs"], row["locksLost"], row["gone"]) == (1_500, 1, False)
        assert [job["id"] for job in row["jobs"]] == ["j-9"]
        (page, other) = await visit(app, VIEWER, "/workers", "/workers?queue=other")
        assert "2 of 8" in page.text and "▲ 1.5 s" in page.text
        assert "web-1" not in other.text


@pytest.mark.requirement("D-76")
async def test_a_process_that_ended_without_a_word_is_gone_and_then_forgotten(redis_url: str, queue_name: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.add("a", {})
        await write_beat(app.connection, queue.keys, beat("p1", 40_000))
        await write_beat(app.connection, queue.keys, beat("p2", 61_000))
        (answer, page) = await visit(app, VIEWER, "/api/v1/workers", "/workers")
        assert [(row["process"], row["gone"]) for row in answer.json()["processes"]] == [("p1", True)]
        assert "gone" in page.text and "with 1 unfinished job" in page.text and "j-9" in page.text


@pytest.mark.requirement("D-75")
async def test_workers_that_tell_nothing_are_listed_by_their_connection(redis_url: str, queue_name: str) -> None:
    """As those of other clients are."""
    async with (
        Bullpen(settings=settings(redis_url)) as app,
        Worker(queue_name, _nothing, connection=redis_url, name="node-like"),
    ):
        await app.queue(queue_name).add("a", {})

        async def connected() -> bool:
            (answer,) = await visit(app, VIEWER, "/api/v1/workers")
            return [row["name"] for row in answer.json()["workers"] if row["queue"] == queue_name] == ["node-like"]

        await until(connected)


@pytest.mark.requirement("D-75")
async def test_an_app_that_runs_shows_itself(redis_url: str, queue_name: str) -> None:
    """From `run` on, without anything to configure."""
    async with Bullpen(settings=settings(redis_url)) as app:
        app.worker(queue_name, _nothing, concurrency=7)
        await app.queue(queue_name).add("a", {})
        running = asyncio.create_task(app.run(signals=False))

        async def told() -> bool:
            (answer,) = await visit(app, VIEWER, "/api/v1/workers")
            return [(row["slots"], row["queues"]) for row in answer.json()["processes"]] == [(7, [queue_name])]

        await until(told)
        (answer,) = await visit(app, VIEWER, "/api/v1/workers")
        assert answer.json()["workers"] == []
        await app.stop()
        await running


async def _nothing(job: Any) -> None: ...

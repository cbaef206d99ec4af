"""What failed is told with the type of its error: `'email'` alone says nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from bullpen import Job, Queue, Worker
from bullpen._kernel.scrub import with_type
from bullpen.errors import JobFailed
from tests.dashboard._kit import opened
from tests.dashboard.test_pages import fail_one
from tests.flows._cli import cli


async def test_every_place_that_tells_why_names_the_type(redis_url: str, queue_name: str) -> None:
    async def handle(job: Job) -> None:
        job.data["email"]

    async with Queue(queue_name, connection=redis_url) as queue:
        job = await queue.add("send", {}, attempts=1)
        async with Worker(queue_name, handle, connection=redis_url, dead_letters=True) as worker:
            task = asyncio.create_task(worker.run(signals=False))
            with pytest.raises(JobFailed):
                await job.result(30_000)
            await worker.close()
            await task
        async with opened(redis_url) as (http, _):
            assert await _told(http, queue_name, job.id) == ["KeyError: 'email'"] * 4


async def _told(http: httpx.AsyncClient, queue: str, job_id: str) -> list[str]:
    (group,) = (await http.get("/api/v1/dead-letters", params={"store": f"{queue}-dlq"})).json()["groups"]
    listed = (await http.get(f"/api/v1/dead-letters/{queue}-dlq/groups/{group['fingerprint']}")).json()["letters"][0]
    letter = (await http.get(f"/api/v1/dead-letters/{queue}-dlq/{listed['id']}")).json()
    job = (await http.get(f"/api/v1/queues/{queue}/jobs/{job_id}")).json()
    return [group["error"], listed["error"], letter["error"], job["error"]]


@pytest.mark.parametrize(
    ("text", "stack", "told"),
    [
        ("'email'", "Traceback (most recent call last):\n  ...\nKeyError: 'email'", "KeyError: 'email'"),
        ("no", "Traceback (most recent call last):\nshop.errors.NoCard: no", "NoCard: no"),
        ("a\nb", "Traceback (most recent call last):\nValueError: a\nb", "ValueError: a\nb"),
        ("x is null", "TypeError: x is null\n    at a.js:1", "TypeError: x is null"),
        ("boom", "Error: boom\n    at a.js:1", "boom"),
        ("ValueError: a", "ValueError: ValueError: a", "ValueError: a"),
        ("other", "KeyError: 'email'", "other"),
        ("'email'", None, "'email'"),
    ],
)
def test_the_type_comes_from_the_stack(text: str, stack: str | None, told: str) -> None:
    assert with_type(text, stack) == told


def test_the_list_of_the_command_names_the_type(redis_url: str, queue_name: str, tmp_path: Path) -> None:
    async def fill() -> None:
        async with Queue(queue_name, connection=redis_url) as queue:
            await fail_one(redis_url, queue, error="no such address")

    asyncio.run(fill())

    found = cli("dead-letters", "list", queue_name, cwd=tmp_path, env={"BULLPEN_REDIS_URL": redis_url})

    assert "ValueError: no such address" in found.out

"""What a handler, a callback and a reader of events see of a job is what is stored about it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bullpen.queue import Job
from tests.queue._kit import Kit


async def test_a_handler_sees_who_runs_the_job_and_since_when(kit: Kit) -> None:
    seen: list[tuple[int, str | None]] = []

    async def look(job: Job) -> None:
        seen.append((job.processed_on, job.worker_id))

    job = await kit.queue().add("job")
    told = await kit.drain(look, 1, name="worker-7")

    stored = int(kit.redis.hget(kit.base + job.id, "processedOn") or 0)
    assert seen == [(stored, "worker-7")]
    assert told.of("active")[0][0].worker_id == "worker-7"


@pytest.mark.parametrize("processes", [False, True], ids=["here", "in a child process"])
async def test_a_later_attempt_sees_the_error_of_the_one_before(kit: Kit, processes: bool) -> None:
    await kit.queue().add("job", attempts=2, backoff=1)

    told = await kit.drain(fail_then_tell, 1, processes=processes)

    assert told.of("completed")[0][1] == ["first try", 1, "RuntimeError: first try"]


async def fail_then_tell(job: Job) -> Any:
    if job.attempts_made == 0:
        assert job.failed_reason is None and job.stacktrace == ()
        raise RuntimeError("first try")
    return [job.failed_reason, len(job.stacktrace), job.stacktrace[0].strip().splitlines()[-1]]


async def test_a_handler_sees_parent_and_deduplication_id(kit: Kit) -> None:
    seen: list[Any] = []

    async def look(job: Job) -> None:
        seen.append((job.parent, job.deduplication_id))

    queue = kit.queue()
    await queue.pause()
    job = await queue.add("child")
    opts = {"parent": {"id": "p", "queue": "bull:other"}, "fpof": True, "de": {"id": "only one"}, "attempts": 1}
    kit.redis.hset(
        kit.base + job.id,
        mapping={
            "opts": json.dumps(opts),
            "parentKey": "bull:other:p",
            "parent": json.dumps({"id": "p", "queueKey": "bull:other", "fpof": True}),
            "deid": "only one",
        },
    )
    await queue.resume()
    await kit.drain(look, 1)

    assert seen == [({"id": "p", "queueKey": "bull:other", "fpof": True}, "only one")]


async def test_the_end_of_an_attempt_is_told_with_what_it_stored(kit: Kit) -> None:
    ends: list[Any] = []

    async def handle(job: Job) -> Any:
        if job.name == "bad" or job.attempts_made == 0:
            raise ValueError(job.name)
        return {"n": 1}

    worker = kit.worker(handle)
    worker.on("completed", lambda job, value: ends.append((job.name, job.attempts_made, value, job.return_value)))
    worker.on("retrying", lambda job, reason, _: ends.append((job.name, job.attempts_made, reason, job.failed_reason)))
    worker.on("failed", lambda job, reason: ends.append((job.name, job.attempts_made, reason, len(job.stacktrace))))
    queue = kit.queue()
    good = await queue.add("good", attempts=2, backoff=1)
    await worker.start()
    assert await good.result(timeout=10_000) == {"n": 1}
    bad = await queue.add("bad", attempts=1)
    with pytest.raises(Exception, match="bad"):
        await bad.result(timeout=10_000)
    await worker.close()

    assert ends == [
        ("good", 1, "good", "good"),
        ("good", 2, {"n": 1}, {"n": 1}),
        ("bad", 1, "bad", 1),
    ]


async def test_events_name_the_worker_and_carry_the_stack(kit: Kit) -> None:
    async def fail(_: Job) -> None:
        raise ValueError("x" * 10_000 + " boom")

    await kit.queue().add("job", attempts=1)
    await kit.drain(fail, 1, name="worker-7")

    entries: Any = kit.redis.xrange(kit.base + "events")
    by_name = {fields[b"event"]: fields for _, fields in entries}
    assert by_name[b"active"][b"workerId"] == b"worker-7"
    stack = by_name[b"failed"][b"stacktrace"].decode()
    assert stack.endswith("boom") and len(stack) <= 5_000

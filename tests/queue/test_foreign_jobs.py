"""Anything may stand in a queue: a worker settles what it can read and survives the rest."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from bullpen import sync
from bullpen.errors import WaitForChildren
from bullpen.ops.doctor import Level, examine
from bullpen.queue import Job, JobState
from bullpen.redis import Connection
from tests.queue._kit import Kit, nothing

JOBS = 250
_NUMBERS = ("0", "-1", "1", "", "NaN", "1e309", "9" * 30, "-0", " 7", "0x10", "null", "1.5", "\x00")
_TEXTS = (
    "",
    "{}",
    "[]",
    "null",
    "{",
    "\xff\xfe",
    '"',
    "true",
    "{" * 500,
    '{"a":NaN}',
    "[[[[",
    "💥",
    "\x00\x01",
    "a" * 5_000,
)
_OPTS: tuple[Any, ...] = (
    {},
    {"attempts": -3},
    {"attempts": "many", "backoff": "soon"},
    {"attempts": 2, "backoff": {"type": "custom"}},
    {"attempts": 2, "backoff": {"type": "fixed", "delay": -5}},
    {"attempts": 1e300, "removeOnComplete": {"age": "x", "count": None}},
    {"removeOnComplete": True, "removeOnFail": -4},
    {"removeOnFail": {"count": 0}},
    {"kl": "x", "stackTraceLimit": -1, "lifo": "yes", "priority": [1]},
    {"de": {"id": 7}, "repeat": 3, "parent": "x", "tm": {}},
    [1, 2, 3],
    None,
)


def foreign_fields(source: random.Random) -> dict[str, Any]:
    """A job hash as a careless or hostile producer might write it; `name` is what makes it a job at all."""
    fields: dict[str, Any] = {"name": source.choice(("job", "", "x" * 300, "né\x00"))}
    for field in ("timestamp", "delay", "priority", "atm", "ats", "stc", "attemptsMade", "processedOn", "finishedOn"):
        if source.random() < 0.5:
            fields[field] = source.choice(_NUMBERS)
    for field in ("data", "progress", "stacktrace", "returnvalue", "parent", "failedReason", "defa", "deid", "rjk"):
        if source.random() < 0.4:
            fields[field] = source.choice(_TEXTS)
    if source.random() < 0.2:
        fields["parentKey"] = source.choice(("", "nowhere", "bull:other:1", ":::", "bull:other:"))
    if source.random() < 0.9:
        opts = source.choice(_OPTS)
        fields["opts"] = source.choice((json.dumps(opts), source.choice(_TEXTS)))
    return fields


@pytest.mark.many
@pytest.mark.requirement("X-101", "X-11", "Q-9")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.leaves_queue_broken  # parents and deduplication ids that nobody made are left as they were found
async def test_a_worker_ends_every_foreign_job_and_lives(kit: Kit, seed: int) -> None:
    """Nothing in a queue is trusted because it is there; one bad job harms only itself."""
    source = random.Random(seed)
    for number in range(JOBS):
        kit.seed(f"foreign-{seed}-{number}", only=foreign_fields(source))
    good = await kit.queue().add("good")

    async def handle(job: Job) -> Any:
        if source.random() < 0.3:
            raise ValueError("as it happens")
        return source.choice((None, 1, "text", {"a": [1]}))

    told = await kit.work(handle, concurrency=20, dead_letters=True)

    def is_over() -> bool:
        kit.command("ZREMRANGEBYSCORE", kit.base + "delayed", "(9e15", "+inf")  # retries in a distant future
        return not any(kit.has(place) for place in ("wait", "active", "prioritized", "delayed"))

    await kit.until(is_over, "every job has ended", within_s=40)
    assert await good.state() in ("completed", "failed")
    assert told.worker.is_alive
    assert told.of("error") == []


@pytest.mark.requirement("X-101")
async def test_a_reader_survives_foreign_jobs(kit: Kit) -> None:
    """Whoever looks at the queue must see the broken job, not a traceback."""
    source = random.Random(7)
    for number in range(60):
        kit.seed(f"odd-{number}", only=foreign_fields(source))
    queue = kit.queue()

    for number in range(60):
        job = await queue.get_job(f"odd-{number}")
        assert job is not None
        assert job.to_json()["id"] == f"odd-{number}"
        assert job.attempts_made >= 0

    await kit.drain(nothing, 1)


@pytest.mark.requirement("Q-65")
@pytest.mark.leaves_queue_broken  # `waiting-children` is a key of the wrong type, and a job stays active
async def test_a_settle_that_raises_leaves_the_others_of_its_batch_alone(kit: Kit) -> None:
    """Redis does not roll back: half a batch in no list at all would be lost work."""
    queue = kit.queue()
    kit.command("SET", kit.base + "waiting-children", "not a set")
    kit.seed("parent")
    kit.command("SADD", kit.base + "parent:dependencies", "bull:somewhere:1")
    good = await queue.add_many([("good", number) for number in range(30)])

    async def handle(job: Job) -> None:
        if job.id == "parent":
            raise WaitForChildren

    told = await kit.work(handle, concurrency=31)
    await told.finished(30)
    await told.wait("lock_lost")

    assert {await job.state() for job in good} == {"completed"}
    assert kit.ids("active") == ["parent"]
    assert kit.lock("parent") is not None  # until it ends; then the stalled check takes the job back


@pytest.mark.requirement("Q-65")
@pytest.mark.leaves_queue_broken  # `completed` is a key of the wrong type
async def test_jobs_stay_active_when_their_set_cannot_be_written(kit: Kit) -> None:
    """A job in no list at all would be lost; one that is active comes back when its lock has ended."""
    await kit.queue().add("a")
    kit.command("SET", kit.base + "completed", "not a set")

    told = await kit.work(nothing)
    await told.wait("lock_lost")

    assert kit.ids("active") == ["1"]
    assert kit.lock("1") is not None


def put_in_line_without_a_job(kit: Kit) -> None:
    """What other programs leave behind: an id of a deleted hash, of a hash without a name, of a key of another type."""
    kit.seed("nameless", only={"data": "{}", "opts": "{}", "timestamp": "1"})
    kit.seed("gone", only={})
    kit.command("LPUSH", kit.base + "list", "not a job")
    kit.command("LPUSH", kit.base + "wait", "list")


@pytest.mark.requirement("X-101")
@pytest.mark.leaves_queue_broken  # a hash without a name and a list are left as they were found
async def test_an_id_without_a_job_is_dropped_with_a_line(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever put it there waits for it; nothing else would say where it went."""
    put_in_line_without_a_job(kit)
    good = await kit.queue().add("good")

    await kit.drain(nothing, 1)

    assert await good.state() == "completed"
    lines = {str(vars(line)["jobId"]): line.getMessage() for line in caplog.records if "dropped" in line.getMessage()}
    assert set(lines) == {"nameless", "gone", "list"}
    assert "has no name" in lines["nameless"]
    assert "no job has this id" in lines["gone"]
    assert "is not a hash" in lines["list"]


@pytest.mark.requirement("X-101")
@pytest.mark.leaves_queue_broken  # a hash without a name and a list are left as they were found
@pytest.mark.parametrize("how", ["delayed", "promoted", "prioritized"])
async def test_an_id_without_a_job_is_dropped_from_every_set_with_a_line(
    kit: Kit, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    put_in_line_without_a_job(kit)
    kit.command("DEL", kit.base + "wait")
    name = "prioritized" if how == "prioritized" else "delayed"
    score = kit.server_ms() * 4096 if how == "delayed" else 2**52
    kit.redis.zadd(kit.base + name, dict.fromkeys(("nameless", "gone", "list"), score))
    queue = kit.queue()
    good = await queue.add("good")
    if how == "promoted":
        await queue.promote_all()

    told = await kit.work(nothing)
    await told.finished()
    await kit.until(lambda: not kit.redis.exists(kit.base + name), "nothing is left")

    assert await good.state() == "completed"
    lines = {str(vars(line)["jobId"]): line.getMessage() for line in caplog.records if "dropped" in line.getMessage()}
    assert set(lines) == {"nameless", "gone", "list"}
    assert "has no name" in lines["nameless"]
    assert "no job has this id" in lines["gone"]
    assert "is not a hash" in lines["list"]


async def test_lines_about_thousands_of_due_ids_without_a_job_are_bounded(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    kit.redis.zadd(kit.base + "delayed", {f"gone-{number}": number for number in range(2_500)})
    good = await kit.queue().add("good")

    told = await kit.work(nothing)
    await told.finished()
    await kit.until(lambda: not kit.redis.exists(kit.base + "delayed"), "nothing is left")

    assert await good.state() == "completed"
    lines = [line.getMessage() for line in caplog.records if "dropped" in line.getMessage()]
    assert len(lines) == 10
    assert "are not logged" in lines[-1]


async def test_lines_about_ids_without_a_job_are_bounded(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(60):
        kit.command("LPUSH", kit.base + "wait", f"gone-{number}")
    await kit.queue().add("good")

    await kit.drain(nothing, 1, concurrency=7)

    lines = [line.getMessage() for line in caplog.records if "dropped" in line.getMessage()]
    assert len(lines) == 10
    assert "are not logged" in lines[-1]


async def test_markers_of_old_clients_are_no_jobs_and_no_news(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    kit.command("LPUSH", kit.base + "wait", "0:1767225600000")
    await kit.queue().add("good")

    await kit.drain(nothing, 1)

    assert [line.getMessage() for line in caplog.records if "dropped" in line.getMessage()] == []


@pytest.mark.requirement("X-101")
@pytest.mark.leaves_queue_broken
async def test_a_key_of_another_type_hides_no_other_job(kit: Kit, redis_url: str) -> None:
    queue = kit.queue()
    first = await queue.add("good")
    put_in_line_without_a_job(kit)
    last = await queue.add("good")

    assert [job.id for job in await queue.jobs(JobState.WAITING)] == [first.id, "nameless", last.id]
    assert [job.id async for job in queue.iter_jobs(JobState.WAITING)] == [first.id, "nameless", last.id]
    assert await queue.get_job("list") is None
    assert await queue.state_of("list") == "unknown"
    with sync.Queue(kit.name, connection=redis_url) as blocking:
        assert blocking.get_job("list") is None
    assert await queue.ids_without_job() == {
        "nameless": "its hash has no name",
        "gone": "no hash",
        "list": "its key is not a hash",
    }


@pytest.mark.leaves_queue_broken
async def test_the_doctor_says_what_such_keys_are(kit: Kit, redis_url: str) -> None:
    """ "Let this user run the command" helps nobody whose key has the wrong type."""
    await kit.queue().add("good")
    put_in_line_without_a_job(kit)
    connection = Connection(redis_url)

    found = {
        advice.check: advice for advice in await examine(connection, "bull") if advice.subject == f"queue {kit.name}"
    }
    kit.command("SET", kit.base + "failed", "not a set")
    broken = [advice for advice in await examine(connection, "bull") if advice.subject == f"queue {kit.name}"]
    await connection.aclose()

    assert "list: its key is not a hash" in found["ids without a job"].message
    assert not any("WRONGTYPE" in advice.message for advice in found.values())
    wrong = [advice for advice in broken if "WRONGTYPE" in advice.message]
    assert wrong
    assert {advice.level for advice in wrong} == {Level.BROKEN}
    assert not any("allow this user" in advice.fix for advice in broken)


@pytest.mark.requirement("X-101")
async def test_a_dead_letter_with_fields_of_any_type_keeps_no_other_from_going_back(kit: Kit) -> None:
    """Anybody may put jobs into that queue."""
    base = kit.base[:-1] + "-dlq:"
    odd: list[Any] = [None, {}, [], {"a": 1}, 1e300, -5, True, "x" * 300, 10**30]
    for number, value in enumerate(odd):
        entry = dict.fromkeys(("originalTimestamp", "originalPriority", "originalJobName", "attemptsStarted"), value)
        stored = {"originalJobId": f"odd-{number}", "originalOpts": value, "redriven": value, "error": value, **entry}
        fields = {"name": "x", "data": json.dumps(stored), "opts": "{}", "timestamp": 1, "delay": 0, "priority": 0}
        kit.redis.hset(f"{base}dl-odd-{number}-1", mapping=fields)  # type: ignore[arg-type]  # numbers are fields too
        kit.redis.lpush(base + "wait", f"dl-odd-{number}-1")
    last = {"originalJobId": "good", "originalJobName": "good", "originalData": {"n": 1}}
    kit.redis.hset(f"{base}dl-good-1", mapping={"name": "x", "data": json.dumps(last), "opts": "{}", "timestamp": 1})
    kit.redis.lpush(base + "wait", "dl-good-1")
    kit.redis.hset(base + "meta", "opts.maxLenEvents", 10_000)

    report = await kit.queue().dead_letters.redrive_all()

    assert report.examined == len(odd) + 1
    assert kit.fields("good")["data"] == '{"n": 1}'
    await kit.drain(nothing, report.done)

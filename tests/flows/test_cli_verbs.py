"""Verbs that change many jobs at once, and schedules: previews, limits, questions, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bullpen.queue import Job, JobState, Queue
from bullpen.testing import RedisServer
from bullpen.worker import Worker
from tests.flows._cli import Answer, cli
from tests.flows._warm import Warm

T = TypeVar("T")
Type = Callable[..., Answer]

pytestmark = pytest.mark.requirement("X-40")


@pytest.fixture
def type_(redis_url: str, tmp_path: Path) -> Type:
    def typed(*words: str) -> Answer:
        return cli(*words, cwd=tmp_path, env={"BULLPEN_REDIS_URL": redis_url})

    return typed


def on(url: str, action: Callable[[Queue], Awaitable[T]], queue: str = "emails") -> T:
    async def run() -> T:
        async with Queue(queue, connection=url) as opened:
            return await action(opened)

    return asyncio.run(run())


def finish(url: str, good: int = 0, bad: int = 0) -> None:
    """Jobs that have ended."""

    async def handle(job: Job) -> None:
        if job.name == "bad":
            raise ValueError("no")

    async def run() -> None:
        async with Queue("emails", connection=url, attempts=1) as queue, Worker("emails", handle, connection=url):
            jobs = [await queue.add(name) for name in ["good"] * good + ["bad"] * bad]
            await asyncio.gather(*(job.result(20_000) for job in jobs), return_exceptions=True)

    asyncio.run(run())


def counts(url: str) -> dict[str, int]:
    found = on(url, lambda queue: queue.counts())
    return {name: getattr(found, name) for name in ("waiting", "prioritized", "delayed", "completed", "failed")}


# Many jobs ----------------------------------------------------------------------------------------------------------


def test_all_failed_jobs_are_counted_limited_and_retried(redis_url: str, type_: Type) -> None:
    finish(redis_url, bad=5)

    preview = type_("jobs", "retry", "emails", "--all", "--dry-run")
    assert (preview.code, preview.out, counts(redis_url)["failed"]) == (0, "would be retried: 5\n", 5)
    assert json.loads(type_("jobs", "retry", "emails", "--all", "--dry-run", "--limit", "3", "--json").out) == {
        "matched": 3,
        "dryRun": True,
    }
    assert type_("jobs", "retry", "emails", "--all", "--limit", "2").out == "retried: 2\n"
    assert type_("jobs", "retry", "emails", "--all", "--rate", "10").out == "retried: 3\n"
    assert counts(redis_url)["waiting"] == 5


def test_a_rate_is_kept(redis_url: str, type_: Type) -> None:
    finish(redis_url, bad=3)
    began = time.monotonic()

    answer = type_("jobs", "retry", "emails", "--all", "--rate", "2.5", "--json")

    assert json.loads(answer.out) == {"retried": 3, "dryRun": False}
    assert time.monotonic() - began >= 0.8, "two at once, then a pause of two such jobs"


@pytest.mark.parametrize("options", [["--limit", "1"], ["--rate", "5"], ["--dry-run"]])
def test_options_for_all_are_refused_for_some(options: list[str], type_: Type) -> None:
    answer = type_("jobs", "retry", "emails", "7", *options)

    assert (answer.code, answer.err) == (2, "bullpen: --limit, --rate and --dry-run go with --all\n")


def test_jobs_are_cancelled_with_a_reason(redis_url: str, type_: Type) -> None:
    on(redis_url, lambda queue: queue.add_many([("mail", None)] * 2))
    on(redis_url, lambda queue: queue.add("mail", delay=3_600_000))

    assert type_("jobs", "cancel", "emails", "1", "3", "--reason", "not needed").out == "cancelled: 2\n"
    again = type_("jobs", "cancel", "emails", "2", "77", "--json")
    assert (again.code, json.loads(again.out)["cancelled"]) == (1, ["2"])

    async def reasons(queue: Queue) -> dict[str, str | None]:
        return {job.id: job.failed_reason for job in await queue.jobs(JobState.FAILED)}

    texts = {"1": "cancelled: not needed", "2": "cancelled", "3": "cancelled: not needed"}
    assert on(redis_url, reasons) == texts


def test_all_delayed_jobs_are_promoted(redis_url: str, type_: Type) -> None:
    for _ in range(3):
        on(redis_url, lambda queue: queue.add("later", delay=60_000))

    assert type_("jobs", "promote", "emails", "--all", "--dry-run").out == "would be promoted: 3\n"
    assert counts(redis_url)["delayed"] == 3
    assert json.loads(type_("jobs", "promote", "emails", "--all", "--json").out) == {"promoted": 3, "dryRun": False}
    assert (counts(redis_url)["delayed"], counts(redis_url)["waiting"]) == (0, 3)
    assert type_("jobs", "promote", "emails").code == 2
    assert type_("jobs", "promote", "emails", "1", "--all").code == 2
    assert type_("jobs", "promote", "emails", "1", "--dry-run").code == 2


def test_delay_and_priority_are_changed(redis_url: str, type_: Type) -> None:
    job = on(redis_url, lambda queue: queue.add("later", delay=60_000))
    other = on(redis_url, lambda queue: queue.add("now"))

    assert type_("jobs", "change", "emails", job.id, "--delay", "2h").out == "changed: 1\n"
    assert json.loads(type_("jobs", "change", "emails", other.id, "--priority", "7", "--json").out)["changed"] == ["2"]
    changed = type_("jobs", "change", "emails", other.id, "99", "--delay", "1s")

    delayed = on(redis_url, lambda queue: queue.get_job(job.id))
    prioritized = on(redis_url, lambda queue: queue.get_job(other.id))
    assert delayed is not None and prioritized is not None
    assert delayed.delay == 7_200_000
    assert prioritized.priority == 7
    assert (changed.code, changed.out) == (1, "changed: 0\n")
    assert "is not delayed" in changed.err
    assert type_("jobs", "change", "emails", job.id).err == "bullpen: pass --delay, --priority or both\n"


# Deleting many ------------------------------------------------------------------------------------------------------


def test_a_state_is_cleaned(redis_url: str, type_: Type) -> None:
    finish(redis_url, good=3, bad=2)

    assert type_("queues", "clean", "emails", "--dry-run").out == "would be cleaned: 3\n"
    assert type_("queues", "clean", "emails", "--older", "1h", "--yes").out == "cleaned: 0\n"
    assert counts(redis_url)["completed"] == 3
    assert type_("queues", "clean", "emails", "--limit", "1", "--yes").out == "cleaned: 1\n"
    assert json.loads(type_("queues", "clean", "emails", "--yes", "--json").out) == {"cleaned": 2, "dryRun": False}
    assert counts(redis_url)["failed"] == 2
    assert type_("queues", "clean", "emails", "--state", "failed", "-y").out == "cleaned: 2\n"
    assert type_("queues", "clean", "emails", "--state", "unknown", "--yes").code == 2
    assert counts(redis_url)["failed"] == 0


def test_a_job_without_a_place_is_restored(redis_url: str, redis_server: RedisServer, type_: Type) -> None:
    on(redis_url, lambda queue: queue.add_many([("a", {})] * 2))
    redis_server.client().lpop("bull:emails:wait")

    assert type_("queues", "restore", "emails").out == "restored: 1\n"
    assert counts(redis_url)["waiting"] == 2
    assert json.loads(type_("queues", "restore", "emails", "--json").out) == {"queue": "emails", "restored": 0}


def test_what_waits_is_drained(redis_url: str, type_: Type) -> None:
    on(redis_url, lambda queue: queue.add_many([("a", {})] * 2))
    on(redis_url, lambda queue: queue.add("b", priority=1))
    on(redis_url, lambda queue: queue.add("c", delay=60_000))

    assert type_("queues", "drain", "emails", "--dry-run").out == "would be drained: 3\n"
    assert type_("queues", "drain", "emails", "--delayed", "--dry-run").out == "would be drained: 4\n"
    assert type_("queues", "drain", "emails", "--yes").out == "drained: 3\n"
    assert counts(redis_url)["delayed"] == 1
    assert json.loads(type_("queues", "drain", "emails", "--delayed", "--yes", "--json").out)["drained"] == 1
    assert sum(counts(redis_url).values()) == 0


@pytest.mark.leaves_jobs_active
def test_a_queue_is_obliterated(redis_url: str, redis_server: RedisServer, type_: Type) -> None:
    on(redis_url, lambda queue: queue.add_many([("a", {})] * 2))
    client: Any = redis_server.client()
    client.rpoplpush("bull:emails:wait", "bull:emails:active")

    assert type_("queues", "obliterate", "emails", "--dry-run").out == "would be obliterated: 2\n"
    running = type_("queues", "obliterate", "emails", "--yes")
    assert (running.code, "has running jobs" in running.err) == (1, True)
    assert type_("queues", "obliterate", "emails", "--force", "--yes").out == "obliterated: 2\n"
    assert type_("queues", "show", "emails").code == 1
    assert client.keys("bull:emails:*") == [b"bull:emails:bp:audit:log"], "only who did it is kept"


@pytest.mark.parametrize("verb", ["clean", "drain", "obliterate"])
def test_deleting_many_asks_first(verb: str, redis_url: str, type_: Type, tmp_path: Path, warm: Warm) -> None:
    finish(redis_url, good=2)
    on(redis_url, lambda queue: queue.add("waits"))
    before = counts(redis_url)

    nobody = type_("queues", verb, "emails")
    no = warm.run("queues", verb, "emails", "--redis", redis_url, cwd=tmp_path, typed="n\n")
    unchanged = counts(redis_url)
    yes = warm.run("queues", verb, "emails", "--redis", redis_url, cwd=tmp_path, typed="y\n")

    assert (nobody.code, nobody.err) == (
        2,
        "bullpen: this deletes for good and needs --yes without a terminal to confirm on\n",
    )
    assert no.code == 130
    assert "for good? [y/N]" in no.err
    assert unchanged == before
    assert yes.code == 0
    assert counts(redis_url) != before
    assert type_("queues", verb, "emials", "--yes").code == 1


# Schedules ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def daily(redis_url: str, redis_server: RedisServer) -> int:
    """A queue with two schedulers, as Node stores them; returns when the first fires."""
    on(redis_url, lambda queue: queue.add("plain"))
    client: Any = redis_server.client()
    due = int(time.time() * 1000) + 3_600_000
    client.hset("bull:emails:repeat:daily", mapping={"name": "report", "ic": 4, "pattern": "0 9 * * *",
                "tz": "Europe/Berlin", "data": '{"a":1}'})  # fmt: skip
    client.hset("bull:emails:repeat:beat", mapping={"name": "beat", "ic": 1, "every": 60_000, "limit": 3})
    client.zadd("bull:emails:repeat", {"daily": due + 5, "beat": due})
    client.hset(f"bull:emails:repeat:beat:{due}", mapping={"name": "beat", "data": "{}", "opts": "{}", "rjk": "beat",
                "timestamp": due - 60_000, "delay": 60_000, "priority": 0})  # fmt: skip
    client.zadd("bull:emails:delayed", {f"repeat:beat:{due}": due * 0x1000})
    return due


@pytest.mark.leaves_queue_broken
def test_schedules_are_listed_shown_and_fired(daily: int, redis_url: str, type_: Type) -> None:
    listed = json.loads(type_("schedules", "list", "emails", "--json").out)
    assert [(each["id"], each["iterations"]) for each in listed] == [("beat", 1), ("daily", 4)]
    table = type_("schedules", "list", "emails", "--limit", "1").out
    assert "every 60000 ms" in table
    assert "daily" not in table

    beat = json.loads(type_("schedules", "show", "emails", "beat", "--json").out)
    assert len(beat["instants"]) == 3, "its limit"
    shown = type_("schedules", "show", "emails", "daily", "--count", "2").out
    assert "0 9 * * *" in shown
    assert shown.split("fires at:\n")[1].count("\n") == 2
    assert type_("schedules", "show", "emails", "nope").code == 1

    job_id = f"repeat:beat:{daily}"
    assert type_("schedules", "run", "emails", "beat", "--early").out == f"runs now: {job_id}\n"
    assert counts(redis_url)["waiting"] == 2
    again = type_("schedules", "run", "emails", "beat", "--early")
    assert (again.code, again.err) == (1, f"bullpen: the job '{job_id}' of this scheduler is due already\n")
    cut = type_("schedules", "run", "emails", "daily", "--early", "--json")
    assert (cut.code, "has no next job" in cut.err) == (1, True)
    assert type_("schedules", "run", "emails", "nope").code == 1


@pytest.mark.leaves_queue_broken
@pytest.mark.parametrize(
    ("bound", "why"), [({"limit": 2}, "limit of 2 reached"), ({"endDate": 1_000}, "its end date has passed")]
)
def test_a_scheduler_that_has_ended_says_so(
    bound: dict[str, int], why: str, redis_url: str, redis_server: RedisServer, type_: Type
) -> None:
    """The time of its last job stays in its record; that is not when it fires next."""
    on(redis_url, lambda queue: queue.add("plain", delay=3_600_000))
    client: Any = redis_server.client()
    due = int(time.time() * 1000) - 1
    client.hset("bull:emails:repeat:beat", mapping={"name": "beat", "ic": 1, "every": 20, **bound})
    client.zadd("bull:emails:repeat", {"beat": due})
    client.hset(f"bull:emails:repeat:beat:{due}", mapping={"name": "beat", "data": "{}", "opts": "{}", "rjk": "beat",
                "timestamp": due, "delay": 0, "priority": 0})  # fmt: skip
    client.zadd("bull:emails:delayed", {f"repeat:beat:{due}": due * 0x1000})

    async def work(queue: Queue) -> None:
        left = asyncio.Semaphore(0)

        async def beat(job: Job) -> None:
            left.release()

        async with Worker("emails", beat, connection=redis_url):
            for _ in range(2 if "limit" in bound else 1):
                await asyncio.wait_for(left.acquire(), 20)

    on(redis_url, work)

    assert f"ended: {why}" in type_("schedules", "list", "emails").out
    (listed,) = json.loads(type_("schedules", "list", "emails", "--json").out)
    assert (listed["ended"], "next" in listed) == (why, False)
    shown = json.loads(type_("schedules", "show", "emails", "beat", "--json").out)
    assert (shown["ended"], shown["instants"]) == (why, [])
    assert f"fires no more: {why}" in type_("schedules", "show", "emails", "beat").out
    again = type_("schedules", "run", "emails", "beat", "--early")
    assert (again.code, f"the scheduler 'beat' has ended ({why})" in again.err) == (1, True)


def test_a_pattern_is_previewed_without_a_server(tmp_path: Path) -> None:
    def preview(*words: str) -> Answer:
        return cli("schedules", "preview", *words, cwd=tmp_path, env={"BULLPEN_REDIS_URL": "redis://127.0.0.1:1"})

    nine = json.loads(preview("0 9 * * *", "--tz", "Asia/Tokyo", "--count", "3", "--json").out)
    assert [instant[11:19] for instant in nine] == ["00:00:00"] * 3
    assert len(preview("*/5 * * * *").out.splitlines()) == 5
    assert len(preview("--every", "90s", "--count", "2").out.splitlines()) == 2
    assert (preview("61 * * * *").code, preview("61 * * * *").err.count("\n")) == (2, 1)
    assert preview("0 9 * * *", "--tz", "Mars/Olympus").code == 2
    assert preview().code == preview("0 9 * * *", "--every", "1s").code == 2
    assert preview("--every", "0").code == 2


def test_a_schedule_is_added_paused_resumed_and_removed(redis_url: str, type_: Type) -> None:
    added = type_(
        *("schedules", "add", "emails", "digest", "--cron", "0 9 * * 1-5", "--tz", "Europe/Berlin", "--name", "send"),
        *("--data", '{"a":1}', "--limit", "9", "--overlap", "skip", "--catch-up", "3", "--jitter", "5s"),
        *("--start", "2030-01-01T00:00:00Z", "--end", "2031-01-01T00:00:00Z", "--priority", "2", "--attempts", "4"),
        "--json",
    )
    shown = json.loads(added.out)
    assert {name: shown[name] for name in ("id", "name", "pattern", "tz", "limit", "overlap", "catchUp", "jitter")} == {
        "id": "digest",
        "name": "send",
        "pattern": "0 9 * * 1-5",
        "tz": "Europe/Berlin",
        "limit": 9,
        "overlap": "skip",
        "catchUp": 3,
        "jitter": 5_000,
    }
    assert (shown["startDate"], shown["endDate"]) == ("2030-01-01 00:00:00.000Z", "2031-01-01 00:00:00.000Z")
    assert shown["next"] == "2030-01-01 08:00:00.000Z"

    def job(queue: Queue) -> Any:
        return queue.get_job("repeat:digest:1893484800000")

    stored = on(redis_url, job)
    assert (stored.data, stored.opts.attempts, stored.record.priority) == ({"a": 1}, 4, 2)
    assert type_("schedules", "add", "emails", "beat", "--every", "2h", "--offset", "5m").out.startswith(
        "beat fires next"
    )
    assert [each["id"] for each in json.loads(type_("schedules", "list", "emails", "--last-first", "--json").out)] == [
        "digest",
        "beat",
    ]

    assert type_("schedules", "pause", "emails", "beat").out == "paused: beat\n"
    assert "paused" in type_("schedules", "list", "emails").out
    assert "is paused; `bullpen schedules resume emails beat`" in type_("schedules", "show", "emails", "beat").out
    again = type_("schedules", "add", "emails", "beat", "--every", "3h", "--offset", "5m")
    assert again.out == "beat is stored, and paused as before\n"
    assert type_("schedules", "run", "emails", "beat", "--early").code == 1
    assert json.loads(type_("schedules", "resume", "emails", "beat", "--json").out) == {"resumed": "beat"}
    assert json.loads(type_("schedules", "show", "emails", "beat", "--json").out)["every"] == 10_800_000

    assert type_("schedules", "remove", "emails", "beat").out == "removed: beat\n"
    assert (type_("schedules", "remove", "emails", "beat").code, counts(redis_url)["delayed"]) == (1, 1)
    assert json.loads(type_("schedules", "remove", "emails", "digest", "--json").out) == {"removed": "digest"}


def test_a_wrong_schedule_is_refused_with_one_line(redis_url: str, type_: Type) -> None:
    for words in (
        [],
        ["--every", "1m", "--cron", "@daily"],
        ["--every", "0"],
        ["--cron", "61 * * * *"],
        ["--cron", "@daily", "--tz", "Mars/Olympus"],
        ["--every", "1m", "--start", "tomorrow"],
        ["--every", "1m", "--end", "2020-01-01T00:00:00Z"],
        ["--every", "1m", "--catch-up", "all"],
        ["--every", "1m", "--grace", "5s"],
        ["--every", "1m", "--immediately", "--offset", "1s"],
    ):
        answer = type_("schedules", "add", "emails", "x", *words)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1), words
    assert type_("schedules", "preview", "--every", "1h", "--offset", "5m", "--limit", "2").out.count("\n") == 2
    assert type_("schedules", "preview", "@daily", "--start", "2030-05-01T00:00:00Z", "--count", "1").out.startswith(
        "2030-05-02"
    )
    now = type_(
        "schedules", "add", "emails", "x", "--cron", "@yearly", "--immediately", "--catch-up", "skip", "--grace", "5s"
    )
    assert now.code == 0 and counts(redis_url)["waiting"] == 1


def test_a_queue_without_schedules_says_so(redis_url: str, type_: Type) -> None:
    on(redis_url, lambda queue: queue.add("a"))

    assert type_("schedules", "list", "emails").err.startswith(
        "no schedules in 'emails'; `bullpen schedules add emails ID"
    )
    assert type_("schedules", "list", "emails", "--json").out == "[]\n"
    assert type_("schedules", "list", "emials").code == 1


def test_lanes_are_set_listed_paused_and_removed(type_: Type, redis_url: str) -> None:
    on(redis_url, lambda queue: queue.add("welcome", lane="acme"))

    assert "weight 3" in type_("queues", "lanes", "set", "emails", "acme", "--weight", "3", "--rate", "10/1m").out
    assert "size 500" in type_("queues", "lanes", "set", "emails", "acme", "--size", "500").out
    assert json.loads(type_("queues", "lanes", "set", "emails", "-", "--concurrency", "2", "--json").out) == {
        "name": "-",
        "weight": None,
        "concurrency": 2,
        "rate": None,
        "size": None,
        "paused": False,
    }
    assert json.loads(type_("queues", "lanes", "pause", "emails", "acme", "--json").out)["paused"] is True
    (listed,) = json.loads(type_("queues", "lanes", "list", "emails", "--json").out)
    assert listed == {
        "name": "acme",
        "waiting": 1,
        "held": 0,
        "delayed": 0,
        "active": 0,
        "weight": 3,
        "concurrency": None,
        "size": 500,
        "paused": True,
        "pausedUntil": None,
        "rate": {"max": 10, "durationMs": 60_000},
    }
    table = type_("queues", "lanes", "list", "emails").out
    assert "acme" in table
    assert "paused" in table
    type_("queues", "lanes", "pause", "emails", "acme", "--for", "1h")
    (listed,) = json.loads(type_("queues", "lanes", "list", "emails", "--json").out)
    assert datetime.now(UTC) < datetime.fromisoformat(listed["pausedUntil"]) < datetime.now(UTC) + timedelta(hours=2)
    type_("queues", "lanes", "resume", "emails", "acme")
    type_("queues", "lanes", "set", "emails", "acme", "--weight", "none")
    settings = on(redis_url, lambda queue: queue.lanes.get("acme"))
    assert (settings.weight, settings.paused) == (None, False)
    assert settings.rate is not None
    assert "as all others" in type_("queues", "lanes", "remove", "emails", "acme").out


@pytest.mark.parametrize(
    "wrong", [("--weight", "much"), ("--rate", "10"), ("--rate", "ten/1m"), ("--concurrency", "0")]
)
def test_a_setting_of_a_lane_that_makes_no_sense_is_told(type_: Type, redis_url: str, wrong: tuple[str, str]) -> None:
    on(redis_url, lambda queue: queue.add("welcome"))

    answer = type_("queues", "lanes", "set", "emails", "acme", *wrong)

    assert answer.code == 2

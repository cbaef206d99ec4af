"""Following events and logs: who is shown, from when, until when, and with which exit code."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from bullpen.errors import JobFailed, JobNotFound
from bullpen.queue import Job, Queue
from bullpen.testing import RedisServer
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.flows._cli import cli
from tests.flows._warm import Warm

T = TypeVar("T")

pytestmark = pytest.mark.requirement("X-40")


def on(url: str, action: Callable[[Queue], Awaitable[T]], queue: str = "emails") -> T:
    async def run() -> T:
        async with Queue(queue, connection=url) as opened:
            return await action(opened)

    return asyncio.run(run())


async def handle(job: Job) -> Any:
    await job.log(f"first line of {job.name}")
    await job.progress(50)
    if job.name == "bad":
        raise ValueError("no stamp \x1b[2J")
    return {"sent": job.name}


def work(url: str, *names: str, queue: str = "emails", **options: Any) -> list[str]:
    """Add jobs of these names and let them end; returns their ids."""

    async def run() -> list[str]:
        async with Queue(queue, connection=url) as opened, Worker(queue, handle, connection=url):
            jobs = [await opened.add(name, attempts=1, **options) for name in names]
            for job in jobs:
                with contextlib.suppress(JobFailed, JobNotFound):  # those that remove themselves may be gone by now
                    await job.result(20_000)
            return [job.id for job in jobs]

    return asyncio.run(run())


def past(url: str, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """What `follow` tells of what has happened already."""
    answer = cli(*arguments, "--since", "1h", "--timeout", "300", "--json", "--redis", url, cwd=tmp_path)
    assert (answer.code, answer.err) == (0, "")
    return [json.loads(line) for line in answer.out.splitlines()]


def test_the_past_is_told_with_names_and_can_be_filtered(redis_url: str, tmp_path: Path) -> None:
    good, bad = work(redis_url, "good", "bad")

    everything = past(redis_url, tmp_path, "jobs", "follow", "emails")
    kinds = [each["event"] for each in everything if each.get("jobId") == good]

    assert kinds == ["added", "waiting", "active", "progress", "completed"]
    assert {each["name"] for each in everything if each.get("jobId") == bad} == {"bad"}
    assert all(each["queue"] == "emails" for each in everything)
    completed = past(redis_url, tmp_path, "jobs", "follow", "emails", "--event", "completed", "--event", "failed")
    assert [(each["event"], each["jobId"]) for each in completed] == [("completed", good), ("failed", bad)]
    assert completed[0]["data"] == {"returnvalue": {"sent": "good"}, "prev": "active"}
    named = past(redis_url, tmp_path, "jobs", "follow", "emails", "--name", "bad")
    assert {each["jobId"] for each in named} == {bad}
    single = past(redis_url, tmp_path, "jobs", "follow", "emails", good)
    assert {each["jobId"] for each in single} == {good}


def test_an_instant_can_be_named_to_begin_with(redis_url: str, tmp_path: Path) -> None:
    work(redis_url, "good")

    def since(time: str) -> str:
        options = ("--since", time, "--timeout", "200", "--json", "--redis", redis_url)
        return cli("jobs", "follow", "emails", *options, cwd=tmp_path).out

    assert '"completed"' in since("2020-01-01T00:00")
    assert since("2100-01-01T00:00+02:00") == ""


def test_names_of_jobs_that_are_gone_are_remembered_from_their_first_event(redis_url: str, tmp_path: Path) -> None:
    work(redis_url, "good", remove_on_complete=True)

    told = past(redis_url, tmp_path, "jobs", "follow", "emails", "--name", "good", "--event", "completed")

    assert [each["name"] for each in told] == ["good"]


def test_several_queues_are_followed_at_once(redis_url: str, tmp_path: Path) -> None:
    work(redis_url, "good", queue="emails")
    work(redis_url, "good", queue="reports")
    work(redis_url, "good", queue="other")

    both = past(redis_url, tmp_path, "queues", "follow", "emails", "reports", "--event", "completed")
    all_of_them = past(redis_url, tmp_path, "queues", "follow", "--event", "completed", "--name", "good")
    nobody = past(redis_url, tmp_path, "queues", "follow", "--name", "somebody-else")

    assert {each["queue"] for each in both} == {"emails", "reports"}
    assert {each["queue"] for each in all_of_them} == {"emails", "reports", "other"}
    assert nobody == []


def test_people_see_what_happens_while_it_happens_until_ctrl_c(redis_url: str, tmp_path: Path, warm: Warm) -> None:
    on(redis_url, lambda queue: queue.add("early"))
    terminal = warm.start("jobs", "follow", "emails", "--redis", redis_url, cwd=tmp_path)
    terminal.wait_for_error("following emails")

    (bad,) = work(redis_url, "bad")
    text = terminal.wait_for(rf"failed +{bad} +bad +no stamp")
    terminal.type("\x03")

    assert terminal.end() == 130
    assert "added              1 " not in text, "that was before"
    assert b"\x1b[2J" not in terminal.raw, "what a job failed with cannot command the terminal"


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 1)])
def test_the_exit_code_tells_how_a_job_ended(name: str, code: int, redis_url: str, tmp_path: Path) -> None:
    (job_id,) = work(redis_url, name)

    answer = cli("jobs", "follow", "emails", job_id, "--wait", "--redis", redis_url, cwd=tmp_path)
    lines = cli("jobs", "follow", "emails", job_id, "--wait", "--json", "--redis", redis_url, cwd=tmp_path)

    assert (answer.code, lines.code) == (code, code)
    assert f"job {job_id} is {'completed' if code == 0 else 'failed'}: " in answer.out
    assert json.loads(lines.out)["state"] == ("completed" if code == 0 else "failed")
    assert lines.err == ""
    assert ("failed: no stamp" in answer.err) == bool(code)


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 1)])
@pytest.mark.parametrize("stays", [True, False])
def test_a_job_is_waited_for_also_when_it_does_not_stay(
    name: str, code: int, stays: bool, redis_url: str, tmp_path: Path, warm: Warm
) -> None:
    kept: dict[str, Any] = {} if stays else {"remove_on_complete": True, "remove_on_fail": True}
    job = on(redis_url, lambda queue: queue.add(name, attempts=1, **kept))
    options = ("--wait", "--event", "active", "--redis", redis_url)
    terminal = warm.start("jobs", "follow", "emails", job.id, *options, cwd=tmp_path)
    terminal.wait_for_error("following emails")

    work(redis_url, "another")

    assert terminal.end() == code
    assert "active" in terminal.text
    assert "completed" not in terminal.text
    gone = cli("jobs", "follow", "emails", job.id, "--wait", "--redis", redis_url, cwd=tmp_path)
    assert gone.code == code, "its last event is still there"


def test_waiting_ends_in_time_and_says_what_is_missing(redis_url: str, tmp_path: Path) -> None:
    job = on(redis_url, lambda queue: queue.add("late"))

    late = cli("jobs", "follow", "emails", job.id, "--wait", "--timeout", "200", "--redis", redis_url, cwd=tmp_path)
    nobody = cli("jobs", "follow", "emails", "99", "--wait", "--redis", redis_url, cwd=tmp_path)
    no_id = cli("jobs", "follow", "emails", "--wait", cwd=tmp_path)
    no_time = cli("jobs", "follow", "emails", "--since", "yesterday", cwd=tmp_path)
    no_queue = cli("jobs", "follow", "emials", "--redis", redis_url, cwd=tmp_path)

    assert (late.code, late.err) == (4, f"bullpen: still not done: {job.id} after 0.2 s\n")
    assert (nobody.code, nobody.err.count("\n")) == (1, 1)
    assert "99" in nobody.err
    assert (no_id.code, no_id.err) == (2, "bullpen: --wait needs the ids of the jobs to wait for\n")
    assert no_time.code == 2
    assert "'yesterday' is no time" in no_time.err
    assert no_queue.code == 1


def test_a_server_that_goes_away_is_told_and_waited_for(start_server: StartServer, tmp_path: Path, warm: Warm) -> None:
    server = start_server(persistent=True)
    job = on(server.url, lambda queue: queue.add("good"))
    terminal = warm.start("jobs", "follow", "emails", job.id, "--wait", "--redis", server.url, cwd=tmp_path)
    terminal.wait_for_error("following emails")

    server.kill()
    terminal.wait_for_error("is unreachable; waiting for it")
    server.restart()
    terminal.wait_for_error("is back\n")
    work(server.url, "another")

    assert terminal.end() == 0
    assert "completed" in terminal.text
    assert terminal.error.count("is unreachable") == 1


def test_trimmed_events_are_told_and_a_job_is_not_missed_by_them(
    redis_url: str, redis_server: RedisServer, tmp_path: Path, warm: Warm
) -> None:
    """A stream keeps so many events; a reader that is slower must learn that it missed some."""
    job = on(redis_url, lambda queue: queue.add("good"))
    terminal = warm.start("jobs", "follow", "emails", job.id, "--wait", "--redis", redis_url, cwd=tmp_path)
    terminal.wait_for_error("following emails")
    terminal.freeze()

    work(redis_url, "another")
    client: Any = redis_server.client()
    client.xtrim("bull:emails:events", maxlen=0, approximate=False)
    on(redis_url, lambda queue: queue.add("noise"))
    terminal.thaw()

    assert terminal.end() == 0
    assert f"job {job.id} is completed" in terminal.text
    assert "events of emails were trimmed" in terminal.error


# Logs ---------------------------------------------------------------------------------------------------------------


def test_the_log_of_a_job_is_printed(redis_url: str, tmp_path: Path) -> None:
    (job_id,) = work(redis_url, "good")

    plain = cli("jobs", "logs", "emails", job_id, "--redis", redis_url, cwd=tmp_path)
    lines = cli("jobs", "logs", "emails", job_id, "--json", "--redis", redis_url, cwd=tmp_path)
    missing = cli("jobs", "logs", "emails", "99", "--redis", redis_url, cwd=tmp_path)

    assert (plain.code, plain.out) == (0, "first line of good\n")
    assert json.loads(lines.out) == {"line": "first line of good"}
    assert (missing.code, missing.out) == (1, "")


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 1)])
def test_a_log_is_followed_until_its_job_ends(name: str, code: int, redis_url: str, tmp_path: Path, warm: Warm) -> None:
    job = on(redis_url, lambda queue: queue.add(name, attempts=1, keep_logs=2))

    async def write(queue: Queue, *lines: str) -> None:
        found = await queue.get_job(job.id)
        assert found is not None
        for line in lines:
            await found.log(line)

    on(redis_url, lambda queue: write(queue, "one"))
    terminal = warm.start("jobs", "logs", "emails", job.id, "--follow", "--redis", redis_url, cwd=tmp_path)
    terminal.wait_for("one\n")
    on(redis_url, lambda queue: write(queue, "two", "three"))  # of which the log keeps the last two
    terminal.wait_for("two\nthree\n")
    work(redis_url, "another")

    assert terminal.end() == code
    assert terminal.text == f"one\ntwo\nthree\nfirst line of {name}\n"


def test_following_a_log_ends_in_time(redis_url: str, tmp_path: Path) -> None:
    job = on(redis_url, lambda queue: queue.add("late"))

    late = cli("jobs", "logs", "emails", job.id, "-f", "--timeout", "100", "--redis", redis_url, cwd=tmp_path)
    missing = cli("jobs", "logs", "emails", "99", "-f", "--redis", redis_url, cwd=tmp_path)

    assert (late.code, late.err) == (4, f"bullpen: job {job.id} has not ended after 0.1 s\n")
    assert missing.code == 1

"""A Node service adds jobs, a Python worker does them: on time, and visible for both."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest

from bullpen.testing import Child, RedisServer
from tests.first_hour._user import (
    LATE_MS,
    PATIENCE_S,
    STOPS_WITHIN_S,
    Environment,
    ask,
    clean,
    free_port,
    late_wakeups,
    log_lines,
    metrics,
    stop,
    takes_of_due_jobs,
    until,
    value,
)
from tests.interop._node import NODE_DIR, NodeMissing, NodeTools, find_node, install_packages

QUEUES = 30
"""Idle queues, so that no job comes on time because of another one."""

WORKER = f"""
import logging

import uvloop
from bullpen import Bullpen, Job


class EarlyLoop(uvloop.Loop):
    # uvloop counts whole milliseconds, so a timer may fire a little before its time: here always, and by more, because
    # a busy machine would hide it.
    def call_at(self, when, callback, *args, context=None):
        return super().call_at(when - 0.005, callback, *args, context=context)


uvloop.new_event_loop = EarlyLoop

log = logging.getLogger("mailer")
app = Bullpen()


class MailboxFull(Exception):
    pass


async def send(job: Job):
    log.info("sending %s", job.data["to"])
    if job.data.get("failures", 0) > job.attempts_made:
        raise MailboxFull(f"no room for {{job.data['to']}}")
    return {{"sent": job.data["to"]}}


# A minute: a job that nobody is woken for is not found by chance.
for number in range({QUEUES}):
    app.worker(f"mails-{{number}}", send, drain_delay=60_000)
"""

PRODUCER = """
const { Queue } = require("bullmq");

async function main() {
  const [host, port, count] = process.argv.slice(2);
  const connection = { host, port: Number(port) };
  const queues = Array.from({ length: Number(count) }, (_, n) => new Queue(`mails-${n}`, { connection }));
  const jobs = [];
  for (const [n, queue] of queues.entries()) {
    for (const round of [1, 2, 3])
      jobs.push(await queue.add("later", { to: "ada", failures: round === 2 ? 1 : 0 },
        { delay: round * 500 + n * 7, attempts: 2, backoff: { type: "fixed", delay: 170 } }));
  }
  jobs.push(await queues[0].add("doomed", { to: "bob", failures: 9 }, { attempts: 2, backoff: 50 }));
  console.log(JSON.stringify({ workers: await queues[0].getWorkersCount() }));
  const ended = [], giveUpAt = Date.now() + 30_000;
  for (const job of jobs) {
    for (;;) {
      const state = await job.getState();
      if (state === "completed" || state === "failed" || Date.now() > giveUpAt) break;
      await new Promise((resolve) => setTimeout(resolve, 20));
    }
    const queue = queues.find((each) => each.name === job.queueName);
    const { id, name, returnvalue, failedReason, attemptsMade, stacktrace } = await queue.getJob(job.id);
    ended.push({ queue: queue.name, id, name, returnvalue, failedReason, attemptsMade, stacktrace });
  }
  console.log(JSON.stringify(ended));
  await Promise.all(queues.map((queue) => queue.close()));
}

main().catch((error) => { console.error(error); process.exit(1); });
"""


@dataclass
class Mailer:
    server: RedisServer
    worker: Child
    url: str
    workers: int
    """As Node counts them."""
    ended: list[dict[str, Any]]
    """Jobs as Node reads them."""


@pytest.fixture(scope="module")
def node() -> NodeTools:
    try:
        tools = find_node()
    except NodeMissing as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))
    install_packages(tools)
    return tools


@pytest.fixture(scope="module")
def mailer(
    installed: Environment, node: NodeTools, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mailer]:
    place = tmp_path_factory.mktemp("mailer")
    (place / "mailer.py").write_text(WORKER)
    (place / "producer.cjs").write_text(PRODUCER)
    redis_server.flush()
    url = f"http://127.0.0.1:{free_port()}"
    command = (installed.bullpen, "run", "mailer:app", "--http", url.removeprefix("http://"), "--log-format", "json")
    with installed.start(*command, cwd=place, env={"BULLPEN_REDIS_URL": redis_server.url}) as worker:
        worker.wait_for("taking jobs", PATIENCE_S)
        until(lambda: ask(f"{url}/readyz")[0] == 200, "the worker is ready")
        address = urlsplit(redis_server.url)
        answer = subprocess.run(
            [*node.node, "producer.cjs", str(address.hostname), str(address.port), str(QUEUES)],
            cwd=place,
            env=clean({"NODE_PATH": str(NODE_DIR / "node_modules")}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert answer.returncode == 0, answer.stderr
        first, second = map(json.loads, answer.stdout.splitlines())
        yield Mailer(redis_server, worker, url, first["workers"], second)
    redis_server.flush()


def test_node_sees_the_worker_and_what_became_of_its_jobs(mailer: Mailer) -> None:
    assert mailer.workers == 1
    good = [job for job in mailer.ended if job["name"] == "later"]
    (doomed,) = [job for job in mailer.ended if job["name"] == "doomed"]

    assert len(good) == 3 * QUEUES
    assert all(job["returnvalue"] == {"sent": "ada"} for job in good)
    assert sorted({job["attemptsMade"] for job in good}) == [1, 2]
    assert (doomed["failedReason"], doomed["attemptsMade"]) == ("no room for bob", 2)
    assert "MailboxFull" in doomed["stacktrace"][-1]


def test_delayed_jobs_and_retries_come_when_they_are_due(mailer: Mailer) -> None:
    """A loop whose timers fire a little early made a worker sleep until its drain delay had passed."""
    takes = [take for number in range(QUEUES) for take in takes_of_due_jobs(mailer.server, f"mails-{number}")]

    assert len(takes) >= 4 * QUEUES  # three delayed jobs, one of them with a retry
    assert [take for take in takes if not 0 <= take.late_ms < LATE_MS] == []


def test_no_work_was_found_by_a_fallback(mailer: Mailer) -> None:
    found = metrics(f"{mailer.url}/metrics")

    assert late_wakeups(found) == {}
    assert sum(value(found, "bullpen_jobs_completed_total", queue=f"mails-{n}") for n in range(QUEUES)) == 3 * QUEUES
    assert value(found, "bullpen_jobs_failed_total", queue="mails-0") == 1
    assert value(found, "bullpen_jobs_retried_total", queue="mails-0") == 2


def test_each_failed_attempt_of_a_job_that_node_added_is_in_the_log(mailer: Mailer) -> None:
    (doomed,) = [job for job in mailer.ended if job["name"] == "doomed"]

    lines = [line for line in log_lines(mailer.worker) if line.get("queue") == "mails-0"]
    lines = [line for line in lines if line.get("jobId") == doomed["id"] and line["level"] != "info"]

    assert [(line["level"], line["attempt"]) for line in lines] == [("warning", 1), ("error", 2)]
    assert "no room for bob" in lines[0]["message"]
    assert "MailboxFull" in lines[1]["stack"]


def test_thirty_workers_stop_as_quickly_as_one(mailer: Mailer) -> None:
    took_s = stop(mailer.worker)

    assert took_s < STOPS_WITHIN_S
    assert log_lines(mailer.worker)[-1]["message"] == "stopped"

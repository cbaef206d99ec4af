"""A Django site on SQLite: stores with its transactions, adds with the blocking API, and reads a console log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bullpen.testing import Child, RedisServer
from tests.first_hour._user import PATIENCE_S, STOPS_WITHIN_S, Answer, Environment, ask, free_port, stop, until

SITE = """
import sys

import django
from django.conf import settings

if not settings.configured:
    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.sqlite3"}},
        ROOT_URLCONF="mysite",
        ALLOWED_HOSTS=["127.0.0.1"],
        SECRET_KEY="of this test",
    )
    django.setup()

from django.db import connection, transaction
from django.http import HttpRequest, JsonResponse
from django.urls import path

from bullpen import sync
from bullpen.errors import BullpenError
from bullpen.outbox import Outbox

outbox, reports = Outbox(), sync.Queue("reports")


def execute(statement, *values):
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()


def order(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        execute("INSERT INTO orders (email) VALUES (%s)", request.GET["email"])
        stored = outbox.add_in_transaction_sync(connection, "receipts", "receipt", {"to": request.GET["email"]})
    return JsonResponse({"job": stored.id})


def careless(request: HttpRequest) -> JsonResponse:
    try:
        outbox.add_in_transaction_sync(connection, "receipts", "receipt", {"to": "x"})
    except BullpenError as error:
        return JsonResponse({"error": str(error)}, status=409)
    return JsonResponse({})


def report(request: HttpRequest) -> JsonResponse:
    job = reports.add("report", {"pages": int(request.GET["pages"])}, attempts=2, backoff=100)
    return JsonResponse({"job": job.id})


def state(request: HttpRequest) -> JsonResponse:
    receipts = [email for (email,) in execute("SELECT email FROM receipts")]
    counts = reports.counts()
    return JsonResponse({"receipts": receipts, "completed": counts.completed, "failed": counts.failed})


urlpatterns = [path("order", order), path("careless", careless), path("report", report), path("state", state)]

if __name__ == "__main__":
    from django.core.management import execute_from_command_line

    for table in ("orders", "receipts"):
        execute(f"CREATE TABLE IF NOT EXISTS {table} (email text)")
    execute_from_command_line(sys.argv)
"""

JOBS = """
import logging

import mysite  # sets Django up

from bullpen import Bullpen, Job

log = logging.getLogger("mysite")
app = Bullpen()
app.use_outbox()  # named, so that `run` delivers


@app.handler("receipts")
def receipt(job: Job):
    mysite.execute("INSERT INTO receipts (email) VALUES (%s)", job.data["to"])


@app.handler("reports", dead_letters=True)
def report(job: Job):
    log.warning("a report of %d pages", job.data["pages"])
    if job.data["pages"] > 1000:
        raise ValueError("too many pages")
"""


@dataclass
class Site:
    installed: Environment
    place: Path
    env: dict[str, str]
    url: str
    stack: ExitStack
    workers: list[Child] = field(default_factory=list)

    def command(self, *words: str) -> Answer:
        return self.installed.run(*words, cwd=self.place, env=self.env)

    def get(self, path: str) -> tuple[int, Any]:
        status, body = ask(f"{self.url}{path}")
        return status, json.loads(body)


@pytest.fixture(scope="module")
def site(installed: Environment, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = tmp_path_factory.mktemp("site")
    (place / "mysite.py").write_text(SITE)
    (place / "jobs.py").write_text(JOBS)
    redis_server.flush()
    address = f"127.0.0.1:{free_port()}"
    env = {"BULLPEN_REDIS_URL": redis_server.url, "BULLPEN_DATABASE_URL": "sqlite:///site.sqlite3"}
    with ExitStack() as stack:
        stack.callback(redis_server.flush)
        words = (installed.python, "mysite.py", "runserver", "--noreload", "--skip-checks", address)
        stack.enter_context(installed.start(*words, cwd=place, env=env))
        until(lambda: ask(f"http://{address}/nothing")[0] == 404, "the site answers")
        yield Site(installed, place, env, f"http://{address}", stack)


def test_without_tables_a_worker_says_what_to_do(site: Site) -> None:
    answer = site.command("run", "jobs:app")

    assert answer.code == 1
    assert "bullpen migrate" in answer.err
    assert "Traceback" not in answer.err
    assert site.command("migrate").code == 0


def test_a_mistake_is_one_line_that_says_what_is_wrong(site: Site) -> None:
    answer = site.command("run", "jobs:nothing")

    assert (answer.code, answer.err.count("\n")) == (2, 1), answer.err
    assert "'jobs' has no Bullpen object named 'nothing'; it has jobs:app" in answer.err


def test_what_a_view_stores_outside_of_a_transaction_is_refused(site: Site) -> None:
    status, told = site.get("/careless")

    assert status == 409
    assert "transaction" in told["error"]


def test_jobs_without_a_worker_are_a_problem(site: Site) -> None:
    """Whoever deploys and forgets the worker wants a red line, not a warning an hour later."""
    assert site.get("/order?email=ada@example.com")[0] == 200
    assert site.get("/report?pages=3")[0] == 200
    answer = site.command("doctor")

    assert answer.code == 1
    assert "queue reports: workers: 1 job waits and no worker is connected" in re.sub(r"\s+", " ", answer.out)


def test_a_worker_does_what_has_waited_and_fails_in_sight(site: Site) -> None:
    assert site.get("/report?pages=9999")[0] == 200
    words = (site.installed.bullpen, "run", "jobs:app")
    worker = site.stack.enter_context(site.installed.start(*words, cwd=site.place, env=site.env))
    site.workers.append(worker)
    worker.wait_for("taking jobs from receipts, reports", PATIENCE_S)
    wanted = {"receipts": ["ada@example.com"], "completed": 1, "failed": 1}
    until(lambda: site.get("/state")[1] == wanted, "all have ended")

    lines = worker.output.splitlines()
    failures = [line for line in lines if "of queue 'reports' failed" in line]
    assert "attempt 1 of 2" in failures[0]
    assert "in 0.1 s: ValueError: too many pages" in failures[0]
    assert "failed finally in attempt 2 of 2" in failures[1]
    assert len(failures) == 2
    assert "ValueError: too many pages" in worker.output, "the traceback"
    own = [line for line in lines if "a report of 9999 pages" in line]
    assert len(own) == 2
    assert all("reports" in line for line in own), "the line of a handler says which job it is about"


def test_with_a_worker_nothing_is_broken(site: Site) -> None:
    answer = site.command("doctor")

    assert answer.code == 0, answer.out
    assert "queue reports-dlq: dead letters: 1 dead letter needs attention" in answer.out, "a warning"


def test_the_end_is_quick(site: Site) -> None:
    (worker,) = site.workers

    assert stop(worker) < STOPS_WITHIN_S
    assert worker.output.splitlines()[-1].endswith("stopped")

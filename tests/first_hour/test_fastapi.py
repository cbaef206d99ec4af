"""A web service that stores orders in PostgreSQL and sends receipts by tasks that leave with the transaction."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bullpen.testing import Child, FaultProxy, RedisServer
from bullpen.testing.postgres import PostgresServer
from tests.databases import OWNER
from tests.first_hour._user import (
    LATE_MS,
    STOPS_WITHIN_S,
    Environment,
    ask,
    free_port,
    late_wakeups,
    log_lines,
    metrics,
    stop,
    takes_of_due_jobs,
    until,
    value,
)

JOBS = """
import asyncio
import logging
from pathlib import Path

from bullpen import Backoff, Bullpen, Job

log = logging.getLogger("shop")
app = Bullpen()
app.use_outbox()  # named, so that `run` delivers
app.task_queue("receipts", drain_delay=60_000)


class NoMailbox(Exception):
    pass


@app.task("receipts", attempts=3, backoff=Backoff.fixed(200))
async def send_receipt(order: int, to: str) -> str:
    log.info("sending a receipt to %s", to)
    if to.startswith("nobody"):
        raise NoMailbox(f"password=hunter2 did not open the mailbox of order {order}")
    return f"receipt {order}"


@app.handler("exports", concurrency=1, drain_delay=5)
async def export(job: Job):
    while not Path("exported").exists():
        await asyncio.sleep(0.02)
"""

API = """
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from bullpen.http.ops import OpsApp
from jobs import app

engine = create_async_engine(os.environ["BULLPEN_DATABASE_URL"].replace("postgresql:", "postgresql+psycopg:"))


@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE orders (id serial PRIMARY KEY, email text NOT NULL)"))
    yield
    await engine.dispose()
    await app.aclose()


async def transaction() -> AsyncIterator[AsyncSession]:
    async with AsyncSession(engine) as session, session.begin():
        yield session


api = FastAPI(lifespan=lifespan)
api.mount("/ops", OpsApp(app.health.report, app.metrics))


@api.post("/orders")
async def place_order(email: str, session: Annotated[AsyncSession, Depends(transaction, scope="function")]) -> Any:
    insert = text("INSERT INTO orders (email) VALUES (:email) RETURNING id")
    order = (await session.execute(insert, {"email": email})).scalar_one()
    data, options = {"order": order, "to": email}, {"attempts": 3, "backoff": {"type": "fixed", "delay": 200}}
    stored = await app.use_outbox().add_in_transaction(session, "receipts", "send_receipt", data, **options)
    if "@" not in email:
        raise HTTPException(422, "no address")
    return {"order": order, "job": stored.id}


@api.post("/exports")
async def export() -> Any:
    return {"job": (await app.queue("exports").add("export")).id}


@api.get("/jobs/{queue}/{job_id}")
async def job(queue: str, job_id: str) -> Any:
    state = await app.queue(queue).state_of(job_id)  # first: what is read afterwards is at least as new
    found = await app.queue(queue).get_job(job_id)
    return None if found is None else {"state": state, "value": found.return_value}
"""


@dataclass
class Shop:
    installed: Environment
    place: Path
    env: dict[str, str]
    server: RedisServer
    proxy: FaultProxy
    worker: Child
    api_process: Child
    api: str
    ops: str
    long_job: str = ""
    active_since: float = 0.0

    def counted(self, name: str, wanted: int) -> None:
        """Wait for a count of the queue `receipts`: what is shown may be a second old."""
        page = f"{self.ops}/metrics"
        until(lambda: value(metrics(page), name, queue="receipts") == wanted, f"{name} is {wanted}")

    def post(self, path: str) -> tuple[int, Any]:
        status, body = ask(f"{self.api}{path}", "POST")
        return status, json.loads(body)

    def wait_for(self, queue: str, job_id: str, state: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found: dict[str, Any] | None = json.loads(ask(f"{self.api}/jobs/{queue}/{job_id}")[1])
            return found if found is not None and found["state"] == state else None

        found = until(look, f"job {job_id} of {queue} is {state}")
        assert found is not None
        return found


def _is_good(page: str) -> bool:
    return ask(page)[0] == 200


@pytest.fixture(scope="module")
def shop(
    installed: Environment,
    postgres_server: PostgresServer,
    redis_server: RedisServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Shop]:
    place = tmp_path_factory.mktemp("shop")
    (place / "jobs.py").write_text(JOBS)
    (place / "api.py").write_text(API)
    redis_server.flush()
    database = postgres_server.create_database(owner=OWNER)
    api, ops = (f"127.0.0.1:{free_port()}" for _ in range(2))
    with ExitStack() as stack:
        stack.callback(redis_server.flush)
        stack.callback(postgres_server.drop_database, database)
        proxy = stack.enter_context(FaultProxy(redis_server))
        env = {"BULLPEN_REDIS_URL": proxy.url, "BULLPEN_DATABASE_URL": postgres_server.url(database, role=OWNER)}
        migrated = installed.run("migrate", cwd=place, env=env)
        assert migrated.code == 0, migrated.err
        serve = (installed.python, "-m", "uvicorn", "api:api", "--port", api.split(":")[1], "--log-level", "warning")
        api_process = stack.enter_context(installed.start(*serve, cwd=place, env=env))
        run = (installed.bullpen, "run", "jobs:app", "--http", ops, "--log-format", "json")
        worker = stack.enter_context(installed.start(*run, cwd=place, env=env))
        for page in (f"http://{ops}/readyz", f"http://{api}/ops/readyz"):
            until(partial(_is_good, page), f"{page} is good")
        yield Shop(installed, place, env, redis_server, proxy, worker, api_process, f"http://{api}", f"http://{ops}")


def test_the_services_run_what_the_wheel_holds(shop: Shop) -> None:
    """Not what the checkout holds: a file that the wheel lacks would be missed by nobody else."""
    command = (shop.installed.python, "-c", "import bullpen; print(bullpen.__file__)")
    with shop.installed.start(*command, cwd=shop.place, env={}) as where:
        assert Path(where.wait_for("bullpen")).is_relative_to(shop.installed.path)


def test_series_that_alarms_read_are_there_from_the_first_scrape(shop: Shop) -> None:
    """A counter that begins with its first event has no increase, and the first failure raises no alarm."""
    found = metrics(f"{shop.ops}/metrics")

    for queue in ("receipts", "exports"):
        assert value(found, "bullpen_worker_ready", queue=queue) == 1
        assert value(found, "bullpen_redis_up", queue=queue) == 1
        for name in ("completed", "failed", "retried", "stalled", "lock_lost"):
            assert value(found, f"bullpen_jobs_{name}_total", queue=queue) == 0
    for where in ("worker", "dispatcher"):
        assert value(found, "bullpen_late_wakeups_total", where=where) == 0


def test_a_long_job_does_not_make_its_process_look_dead(shop: Shop) -> None:
    """A probe that restarts the process would end the job again and again. The other tests give it time to be long."""
    status, export = shop.post("/exports")
    assert status == 200
    shop.wait_for("exports", export["job"], "active")
    shop.long_job, shop.active_since = export["job"], time.monotonic()


def test_a_receipt_leaves_if_and_only_if_the_order_is_stored(shop: Shop) -> None:
    refused = shop.post("/orders?email=nonsense")
    status, stored = shop.post("/orders?email=ada@example.com")

    assert (refused, status) == ((422, {"detail": "no address"}), 200)
    done = shop.wait_for("receipts", stored["job"], "completed")
    assert done["value"] == f"receipt {stored['order']}"
    shop.counted("bullpen_jobs_completed_total", 1)


def test_every_failed_attempt_is_in_the_log_with_its_job(shop: Shop) -> None:
    """A handler that raised left no line at any level."""
    _, stored = shop.post("/orders?email=nobody@example.com")
    shop.wait_for("receipts", stored["job"], "failed")

    def mine() -> list[dict[str, Any]]:
        return [line for line in log_lines(shop.worker) if line.get("jobId") == stored["job"]]

    def failed() -> list[dict[str, Any]]:
        return [line for line in mine() if line["level"] in ("warning", "error") and "attempt " in line["message"]]

    until(lambda: len(failed()) >= 3, "the last failure is in the log")  # a moment after the state has changed
    failures = failed()
    own = [line for line in mine() if line["logger"] == "shop"]

    assert [(line["level"], line["attempt"]) for line in failures] == [("warning", 1), ("warning", 2), ("error", 3)]
    assert "in 0.2 s" in failures[0]["message"]
    assert "NoMailbox" in failures[2]["stack"]
    assert "jobs.py" in failures[2]["stack"]
    assert "hunter2" not in shop.worker.output, "secrets are hidden, also in tracebacks"
    # What the handler logs itself has the fields of its job.
    assert [(line["queue"], line["jobName"], line["attempt"]) for line in own] == [
        ("receipts", "send_receipt", number) for number in (1, 2, 3)
    ]


def test_a_failure_is_counted_and_waits_as_a_dead_letter(shop: Shop) -> None:
    shop.counted("bullpen_jobs_failed_total", 1)
    found = metrics(f"{shop.ops}/metrics")
    listed = shop.installed.run("dead-letters", "list", "receipts", "--json", cwd=shop.place, env=shop.env)

    assert value(found, "bullpen_jobs_retried_total", queue="receipts") == 2
    assert value(found, "bullpen_queue_dead_letters", queue="receipts") == 1
    assert listed.code == 0, listed.err
    assert "NoMailbox" in listed.out or "mailbox of order" in listed.out


def test_retries_come_when_they_are_due(shop: Shop) -> None:
    takes = takes_of_due_jobs(shop.server, "receipts")

    assert late_wakeups(metrics(f"{shop.ops}/metrics")) == {}, "of worker and dispatcher"
    assert len(takes) == 2
    assert [take for take in takes if not 0 <= take.late_ms < LATE_MS] == []


@pytest.mark.requirement("W-77")
def test_without_its_server_the_process_is_alive_and_not_ready(shop: Shop) -> None:
    with shop.proxy.outage():
        status, body = ask(f"{shop.ops}/readyz")
        live = ask(f"{shop.ops}/livez")
        refused, _ = ask(f"{shop.api}/ops/readyz")

    assert status == refused == 503
    assert "does not answer" in json.loads(body)["checks"]["redis"]
    assert (live[0], json.loads(live[1])["live"]) == (200, True)
    until(lambda: ask(f"{shop.ops}/readyz")[0] == 200, "it is ready again")
    _, stored = shop.post("/orders?email=eve@example.com")
    shop.wait_for("receipts", stored["job"], "completed")


@pytest.mark.requirement("W-77")
def test_the_long_job_has_not_been_taken_for_a_hang(shop: Shop) -> None:
    time.sleep(max(0.0, shop.active_since + 5 - time.monotonic()))  # 4 s without a look used to be the end
    live = ask(f"{shop.ops}/livez")
    until(lambda: ask(f"{shop.ops}/readyz")[0] == 200, "it is ready")  # one probe may come when all stands still
    found = metrics(f"{shop.ops}/metrics")
    (shop.place / "exported").touch()
    shop.wait_for("exports", shop.long_job, "completed")

    assert live[0] == 200, live[1]
    assert value(found, "bullpen_worker_alive", queue="exports") == 1


def test_the_end_is_quick_and_quiet(shop: Shop) -> None:
    """Serving HTTP made every stop five seconds longer."""
    took_s = stop(shop.worker)
    stop(shop.api_process, code=-signal.SIGTERM)  # uvicorn ends as if it had not handled the signal
    lines = log_lines(shop.worker)

    assert took_s < STOPS_WITHIN_S
    assert lines[-1]["message"] == "stopped"
    # The job that was to fail, and the answer to the readiness probe while the server was away.
    errors = [line["message"] for line in lines if line["level"] in ("error", "critical")]
    assert [text for text in errors if "failed finally" not in text and "health check failed" not in text] == []

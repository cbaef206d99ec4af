"""Every line that is logged while a job is handled says which job that is, whoever writes it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bullpen import Job, JobFailed, Queue, Worker
from bullpen.ops import logs
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.ports.transport import Delivery
from tests.queue import _process_handlers

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DATA = {"tenantId": "acme", "correlationId": "c-1", "amount": 3}
own = logging.getLogger("shop")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    logs.configure(io.StringIO(), level=level, as_json=False)  # children of later tests are told nothing
    root.handlers[:] = before
    root.setLevel(level)


async def plainly(job: Job) -> None:
    own.warning("charging")


async def in_a_task(job: Job) -> None:
    async def charge() -> None:
        own.warning("charging")

    await asyncio.create_task(charge())


def in_a_thread(job: Job) -> None:
    own.warning("charging")


async def run_one(redis_url: str, handler: Callable[[Job], Any], **options: Any) -> Job:
    async with (
        Queue("cards", connection=redis_url) as queue,
        Worker("cards", handler, connection=redis_url, **options),
    ):
        job = await queue.add("charge", DATA, tm=json.dumps({"traceparent": PARENT}))
        await job.result(timeout=20_000)
        return job


def expected(job: Job) -> dict[str, Any]:
    return {
        "jobId": job.id,
        "jobName": "charge",
        "queue": "cards",
        "attempt": 1,
        "tenantId": "acme",
        "correlationId": "c-1",
        "traceId": PARENT.split("-")[1],
    }


@pytest.mark.parametrize("handler", [plainly, in_a_task, in_a_thread])
async def test_the_lines_of_a_handler_have_the_fields_of_its_job(redis_url: str, handler: Callable[[Job], Any]) -> None:
    stream = io.StringIO()
    logs.configure(stream, level=logging.WARNING, as_json=True)

    job = await run_one(redis_url, handler)

    (line,) = [each for each in map(json.loads, stream.getvalue().splitlines()) if each["logger"] == "shop"]
    assert {name: line[name] for name in expected(job)} == expected(job)


async def test_the_text_form_has_them_too(redis_url: str) -> None:
    stream = io.StringIO()
    logs.configure(stream, level=logging.WARNING, as_json=False)

    job = await run_one(redis_url, plainly)

    (line,) = [each for each in stream.getvalue().splitlines() if "shop: charging" in each]
    for name, value in expected(job).items():
        assert f" {name}={value}" in line


@pytest.mark.parametrize("handler", [_process_handlers.logging_plain, _process_handlers.logging_async])
async def test_a_child_process_logs_as_its_parent_does(
    redis_url: str, handler: Callable[[Job], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """The child is another program: without being told it writes bare texts, and none below warning."""
    logs.configure(sys.stderr, level=logging.WARNING, as_json=True)

    job = await run_one(redis_url, handler, processes=True)

    (line,) = [line for line in map(json.loads, capfd.readouterr().err.splitlines()) if line["logger"] == "shop"]
    assert {name: line[name] for name in expected(job)} == expected(job)


async def test_the_filter_gives_them_to_a_programs_own_logging(redis_url: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(logs.JobFilter())
    handler.setFormatter(
        logging.Formatter("%(jobId)s %(tenantId)s %(message)s", defaults={"jobId": "-", "tenantId": "-"})
    )
    own.addHandler(handler)
    try:
        job = await run_one(redis_url, plainly)
        own.warning("afterwards")
    finally:
        own.removeHandler(handler)

    assert stream.getvalue() == f"{job.id} acme charging\n- - afterwards\n"


async def test_the_filter_hides_secrets_in_errors_that_the_program_logs() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(logs.JobFilter())
    own.addHandler(handler)
    try:
        raise ValueError("password=hunter2 at postgresql://bob:s3cret@db")
    except ValueError:
        own.exception("failed")
    finally:
        own.removeHandler(handler)

    assert "hunter2" not in stream.getvalue()
    assert "s3cret" not in stream.getvalue()
    assert "ValueError: password=*** at postgresql://***@db" in stream.getvalue()


async def test_the_page_names_every_field_of_lines_about_jobs(redis_url: str) -> None:
    """Whoever sets up a log shipper reads it there."""
    stream = io.StringIO()
    logs.configure(stream, level=logging.DEBUG, as_json=True)

    async def handle(job: Job) -> None:
        raise ValueError("no")

    async with (
        Queue("cards", connection=redis_url, attempts=2) as queue,
        Worker("cards", handle, connection=redis_url, dead_letters=True),
    ):
        job = await queue.add("charge", DATA, tm=json.dumps({"traceparent": PARENT}), backoff=1)
        with pytest.raises(JobFailed):
            await job.result(timeout=20_000)

    lines = [each for each in map(json.loads, stream.getvalue().splitlines()) if each["logger"] == "bullpen.worker"]
    fields = {name for line in lines for name in line}
    page = (Path(__file__).parents[2] / "docs/operate/monitoring.md").read_text()
    assert {"cause", "retryInMs", "stack", "durationMs"} <= fields
    assert [name for name in sorted(fields) if f"`{name}`" not in page.split("## Logs")[1]] == []


async def test_what_the_line_says_itself_stays(redis_url: str) -> None:
    stream = io.StringIO()
    logs.configure(stream, level=logging.WARNING, as_json=True)

    async def handle(job: Job) -> None:
        own.warning("about another", extra={"jobId": "another"})

    await run_one(redis_url, handle)

    (line,) = [each for each in map(json.loads, stream.getvalue().splitlines()) if each["logger"] == "shop"]
    assert (line["jobId"], line["queue"]) == ("another", "cards")


async def test_data_that_hold_no_ids_harm_nothing(redis_url: str) -> None:
    """Data are whatever a producer likes; a line must never fail because of them."""
    stream = io.StringIO()
    logs.configure(stream, level=logging.WARNING, as_json=True)
    async with Queue("cards", connection=redis_url) as queue, Worker("cards", plainly, connection=redis_url):
        for data in (None, [1], "text", {"tenantId": 7, "correlationId": "x" * 5_000}):
            await (await queue.add("charge", data)).result(timeout=20_000)

    lines = [each for each in map(json.loads, stream.getvalue().splitlines()) if each["logger"] == "shop"]
    assert len(lines) == 4
    assert [line for line in lines if "tenantId" in line or "correlationId" in line] == []


async def test_a_delivery_of_a_broker_has_them_too() -> None:
    stream = io.StringIO()
    logs.configure(stream, level=logging.WARNING, as_json=True)
    handled = asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        own.warning("charging")
        handled.set()

    client = MemoryClient()
    await client.consume("cards", handle)
    await client.produce(
        "cards", "charge", {"urn": "card:1", "payload": {}}, headers={"tenantId": "acme", "correlationId": "c-1"}
    )
    await asyncio.wait_for(handled.wait(), 10)
    await client.close()

    (line,) = [each for each in map(json.loads, stream.getvalue().splitlines()) if each["logger"] == "shop"]
    assert (line["jobName"], line["queue"], line["urn"], line["attempt"]) == ("charge", "cards", "card:1", 1)
    assert (line["tenantId"], line["correlationId"]) == ("acme", "c-1")

"""Right programs: functions as jobs."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, assert_type

from bullpen import BatchOptions, Bullpen, Job, JobBatch, Task, TaskArguments, TaskJob
from bullpen.sync import Job as BlockingJob

app = Bullpen()


@dataclass
class Invoice:
    number: int
    due: date


@app.task("mails", attempts=5)
async def send_welcome(to: str, greeting: str = "Hello") -> str:
    return f"{greeting} {to}"


@app.task()
def count_words(text: str) -> int:
    return len(text.split())


@app.task("billing", name="bill", strict=True, backoff=timedelta(seconds=1), durability="fsync")
async def bill(job: Job[object], invoice: Invoice) -> Invoice:
    await job.log("begun")
    return invoice


@app.task("orders", replace_finished=True, add_deadline=500)
async def ship(job: Job, order: int) -> None: ...


OPTIONS: TaskArguments = {"attempts": 3, "remove_on_complete": True}


@app.task("reports", **OPTIONS)
async def report(day: date) -> list[str]:
    return [day.isoformat()]


@app.task("rows", batch=BatchOptions(size=50))
async def store(rows: list[Invoice]) -> list[int]:
    return [row.number for row in rows]


@app.task("rows", batch=BatchOptions(size=50))
def drop(batch: JobBatch, rows: list[Invoice]) -> None:
    batch.complete(batch[0])


async def runs_of_lists_are_added_one_by_one(invoice: Invoice) -> None:
    assert_type(store, Task[[Invoice], int])
    assert_type(drop, Task[[Invoice], None])
    assert_type(await (await store.add(invoice)).result(), int)
    assert_type(await store.map([store.call(invoice)]), list[int])


app.task_queue("slow", concurrency=1, timeout=timedelta(minutes=10))


def any_task(task: Task[..., str]) -> str:
    return task.name


def a_task_is_handed_on() -> str:
    return any_task(send_welcome)


async def one_run() -> str:
    job = await send_welcome.add(to="ada")
    assert_type(job, TaskJob[str])
    return await job.result(timeout=10_000)


async def one_run_by_position() -> int:
    return await (await count_words.add("one two")).result()


async def without_the_job() -> Invoice:
    return await (await bill.add(invoice=Invoice(1, date(2026, 1, 1)))).result()


async def with_other_options() -> None:
    await send_welcome.options(delay=timedelta(minutes=5), job_id="ada", priority=2).add(to="ada")


async def many_runs() -> list[str]:
    jobs = await send_welcome.add_many([send_welcome.call(to="ada"), {"to": "bob"}])
    assert_type(jobs, list[TaskJob[str]])
    return await send_welcome.map([send_welcome.call("ada")], timeout=5_000)


def a_blocking_run() -> object:
    job = send_welcome.add_sync(to="ada")
    assert_type(job, BlockingJob)
    return job.result(timeout=1_000)


async def in_a_transaction(session: object) -> bool:
    return (await send_welcome.add_in_transaction(session, to="ada")).created


def in_a_blocking_transaction(connection: object) -> str | None:
    return ship.add_in_transaction_sync(connection, order=7).id


def here_and_now() -> Coroutine[Any, Any, str]:
    made: Coroutine[Any, Any, str] = send_welcome("ada")
    return made


def lane_of(tenant: str, **_: object) -> str | None:
    return tenant or None


@app.task("mails", lane=lane_of)
async def of_a_tenant(tenant: str, to: str) -> None: ...


@app.task("mails", lane="reports")
async def of_a_kind() -> None: ...


async def in_a_lane() -> None:
    await of_a_tenant.options(lane="own").add("acme", to="ada")
    await of_a_kind.add()

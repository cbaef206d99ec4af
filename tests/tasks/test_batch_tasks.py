"""Tasks whose function gets many runs as a list: each run has its own arguments, attempts and result."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, TypedDict

import pytest

from bullpen import BatchOptions, Bullpen, InvalidOption, Job, JobBatch, JobFailed, JobState, PermanentError, Worker
from bullpen.queue.tasks import Task
from tests.tasks import child_module

FIVE = BatchOptions(size=5)


@dataclass(frozen=True)
class Row:
    name: str
    born: date


ADA, GRACE = Row("Ada", date(1815, 12, 10)), Row("Grace", date(1906, 12, 9))


@pytest.fixture
def app(redis_url: str) -> Bullpen:
    return Bullpen(redis_url)


@asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await run


async def test_the_function_gets_items_and_each_run_its_own_result(app: Bullpen) -> None:
    got: list[list[Row]] = []

    @app.task("rows", batch=FIVE)
    async def store(rows: list[Row]) -> list[date]:
        got.append(rows)
        return [row.born + timedelta(days=1) for row in rows]

    jobs = await store.add_many([store.call(ADA), {"name": "Grace", "born": "1906-12-09"}])
    assert [job.data for job in jobs] == [
        {"name": "Ada", "born": "1815-12-10"},
        {"name": "Grace", "born": "1906-12-09"},
    ]

    async with running(app):
        results = [await job.result(timeout=20_000) for job in jobs]

    assert got == [[ADA, GRACE]]
    assert results == [date(1815, 12, 11), date(1906, 12, 10)]


async def test_a_plain_function_gets_them_in_a_thread_with_the_batch(app: Bullpen) -> None:
    @app.task("rows", batch=FIVE)
    def store(batch: JobBatch, rows: list[Row]) -> list[int | ValueError]:
        batch[0].sync.log("seen")
        batch.complete(batch[1], "early")
        return [len(row.name) if row.name != "Ada" else ValueError("not her") for row in rows]

    jobs = await store.options(attempts=1).add_many([store.call(row) for row in (ADA, GRACE, Row("Joan", ADA.born))])

    async with running(app):
        with pytest.raises(JobFailed, match="not her"):
            await jobs[0].result(timeout=20_000)
        # The value that was given first stands; it is no number, and whoever asks is told.
        with pytest.raises(InvalidOption, match="result of task 'store'"):
            await jobs[1].result(timeout=20_000)
        assert await jobs[2].result(timeout=20_000) == 4
        assert await jobs[0].logs() == ["seen"]


async def test_data_that_does_not_fit_fails_that_run_alone(app: Bullpen) -> None:
    got: list[list[Row]] = []

    @app.task("rows", batch=FIVE)
    async def store(rows: list[Row]) -> None:
        got.append(rows)

    good = await store.add(ADA)
    bad = await app.queue("rows").add("store", {"name": "Ada", "born": "yesterday"})
    strange = await app.queue("rows").add("shop", {})
    last = await store.add(GRACE)

    async with running(app):
        with pytest.raises(JobFailed, match=r"cannot be called with this job's data: .*born"):
            await bad.result(timeout=20_000)
        with pytest.raises(JobFailed, match="has no task 'shop' here; there is store"):
            await strange.result(timeout=20_000)
        await asyncio.gather(*(job.result(timeout=20_000) for job in (good, last)))

    assert got == [[ADA, GRACE]]


async def test_tasks_of_one_queue_get_their_own_runs(app: Bullpen) -> None:
    """One worker takes the jobs of both; what one raises does not touch the other."""

    @app.task("rows", batch=FIVE)
    async def store(rows: list[Row]) -> list[str]:
        return [row.name for row in rows]

    @app.task("rows", batch=FIVE, attempts=1)
    def drop(rows: list[dict[str, int]]) -> None:
        raise PermanentError(f"{len(rows)} rows are gone already")

    stored, dropped = [await store.add(ADA)], [await drop.add({"id": 1})]
    stored.append(await store.add(GRACE))
    dropped.append(await drop.add({"id": 2}))

    async with running(app):
        assert [await job.result(timeout=20_000) for job in stored] == ["Ada", "Grace"]
        for job in dropped:
            with pytest.raises(JobFailed, match="2 rows are gone already"):
                await job.result(timeout=20_000)


async def test_a_value_that_json_cannot_carry_fails_that_run_alone(app: Bullpen) -> None:
    @app.task("rows", batch=FIVE, attempts=1)
    async def store(rows: list[Row]) -> list[Any]:
        return [object(), "fine"]

    jobs = await store.add_many([store.call(ADA), store.call(GRACE)])

    async with running(app):
        with pytest.raises(JobFailed, match="returned what JSON cannot carry"):
            await jobs[0].result(timeout=20_000)
        assert await jobs[1].result(timeout=20_000) == "fine"


async def test_child_processes_get_batches_too(redis_url: str) -> None:
    rows = [child_module.Row(number) for number in range(4)]
    app = Bullpen(redis_url)
    queue = app.queue("rows")
    jobs = await queue.add_many([("squares", {"number": row.number}) for row in rows])
    handlers: Any = child_module.squares.handlers
    async with Worker("rows", handlers, connection=redis_url, batch=BatchOptions(size=4), processes=True):
        results = [await job.result(timeout=30_000) for job in jobs]
    await app.aclose()

    assert [value for _, value in results] == [0, 1, 4, 9]
    assert {pid for pid, _ in results} != {os.getpid()}
    assert len({pid for pid, _ in results}) == 1


async def test_keys_and_lanes_are_made_of_the_item(app: Bullpen) -> None:
    @app.task(
        "rows",
        batch=FIVE,
        unique="pending",
        unique_key=lambda row: row.name,
        lane=lambda row: str(row.born.year),
    )
    async def store(rows: list[Row]) -> None: ...

    first = await store.add(ADA)
    second = await store.add(Row("Ada", date(2000, 1, 1)))
    plain = await store.options(unique=timedelta(hours=1)).add(GRACE)

    assert (first.lane, plain.lane) == ("1815", "1906")
    assert second.id == first.id
    assert [first.deduplication_id, plain.deduplication_id] == ["store:Ada", "store:Grace"]
    await app.aclose()


async def test_the_first_of_a_chain_may_take_a_list(app: Bullpen) -> None:
    @app.task("rows", batch=FIVE)
    async def measure(rows: list[Row]) -> list[int]:
        return [len(row.name) for row in rows]

    @app.task("after")
    async def double(number: int) -> int:
        return 2 * number

    from bullpen import chain

    last = await chain(measure.call(GRACE), double.after()).add()

    async with running(app):
        assert await last.result(timeout=20_000) == 10


class Shape(TypedDict):
    sides: int


def no_list(rows: Row) -> None: ...
def two(rows: list[Row], more: list[Row]) -> None: ...
def untyped(rows: list) -> None: ...  # type: ignore[type-arg]
def numbers(rows: list[int]) -> None: ...
def of_jobs(rows: list[Job]) -> None: ...


@pytest.mark.parametrize("function", [no_list, two, untyped, numbers])
def test_a_function_of_something_else_is_refused_where_it_stands(app: Bullpen, function: Any) -> None:
    with pytest.raises(InvalidOption, match="batch task"):
        app.task("rows", batch=FIVE)(function)


def test_wrong_arguments_are_refused_before_anything_is_sent(app: Bullpen) -> None:
    @app.task("shapes", batch=FIVE)
    async def draw(shapes: list[Shape]) -> None: ...

    with pytest.raises(InvalidOption, match="arguments of task 'draw'"):
        draw.call({"sides": "many"})  # type: ignore[typeddict-item]
    assert draw.call({"sides": 3}).data == {"sides": 3}


@pytest.mark.parametrize("options", [{"every": "5m"}, {"strict": True}, {"batch": 5}])
def test_options_that_make_no_sense_with_a_list_are_refused(app: Bullpen, options: dict[str, Any]) -> None:
    async def store(rows: list[Row]) -> None: ...

    with pytest.raises(InvalidOption):
        app.task("rows", **{"batch": FIVE, **options})(store)


def test_a_queue_has_one_kind_of_tasks_and_one_size(app: Bullpen) -> None:
    """Its worker forms batches of one size, or none."""

    async def store(rows: list[Row]) -> None: ...
    async def other(rows: list[Row]) -> None: ...
    async def single(row: Row) -> None: ...

    app.task("rows", batch=FIVE)(store)
    app.task("plain")(single)

    with pytest.raises(InvalidOption, match="as the other tasks of queue 'rows' have"):
        app.task("rows", batch=BatchOptions(size=6))(other)
    with pytest.raises(InvalidOption, match="as the other tasks of queue 'rows' have"):
        app.task("rows")(single)
    with pytest.raises(InvalidOption, match="as the other tasks of queue 'plain' have"):
        app.task("plain", batch=FIVE)(store)
    with pytest.raises(InvalidOption, match="an option of the task"):
        app.task_queue("fresh", batch=FIVE)
    assert [worker.options.batch for worker in app.workers] == [FIVE, None]


async def test_failed_runs_are_tried_again_alone(app: Bullpen, caplog: pytest.LogCaptureFixture) -> None:
    """The next try comes in another batch, with others or without."""
    caplog.set_level(logging.CRITICAL)
    tries: list[list[str]] = []

    @app.task("rows", batch=FIVE, attempts=2, backoff=timedelta(milliseconds=1))
    async def store(rows: list[Row]) -> list[str | ValueError]:
        tries.append([row.name for row in rows])
        return [ValueError("again") if row == ADA and len(tries) == 1 else row.name for row in rows]

    jobs = await store.add_many([store.call(ADA), store.call(GRACE)])
    async with running(app):
        assert [await job.result(timeout=20_000) for job in jobs] == ["Ada", "Grace"]
        assert [await job.state() for job in jobs] == [JobState.COMPLETED] * 2

    assert tries == [["Ada", "Grace"], ["Ada"]]


def test_a_task_of_lists_is_a_task(app: Bullpen) -> None:
    @app.task("rows", batch=FIVE)
    async def store(rows: list[Row]) -> None:
        """Stores rows."""

    assert isinstance(store, Task)
    assert (store.name, store.__doc__, app.tasks) == ("store", "Stores rows.", {"rows": ("store",)})

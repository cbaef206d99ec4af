"""Functions as jobs: what travels, what comes back, what is refused, and who may call whom."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from bullpen import Added, Backoff, Bullpen, InvalidOption, Job, JobFailed, JobState, Queue, Worker
from bullpen.queue import Durability
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from tests.tasks import child_module


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


@dataclass
class Parcel:
    number: int
    sizes: list[Size]


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


async def test_a_task_runs_with_its_arguments_and_returns_its_result(app: Bullpen) -> None:
    @app.task("emails")
    async def greet(to: str, greeting: str = "Hello") -> str:
        return f"{greeting}, {to}"

    async with running(app):
        by_name = await greet.add(to="Ada")
        by_place = await greet.add("Bob", "Good day")

        assert await by_name.result(timeout=20_000) == "Hello, Ada"
        assert await by_place.result(timeout=20_000) == "Good day, Bob"
    assert by_name.added is Added.CREATED
    assert by_name.data == {"to": "Ada"}
    assert await greet("Eve") == "Hello, Eve"


async def test_values_travel_as_json_and_arrive_as_what_they_were(app: Bullpen) -> None:
    seen: list[Any] = []

    @app.task("shop")
    async def ship(parcel: Parcel, price: Decimal, at: datetime, key: UUID, raw: bytes, by: dict[int, str]) -> Parcel:
        seen.append((parcel, price, at, key, raw, by))
        return parcel

    parcel = Parcel(7, [Size.SMALL, Size.LARGE])
    at = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    async with running(app):
        job = await ship.add(parcel, Decimal("1.10"), at, UUID(int=5), b"\x00\xff", {1: "one"})
        assert await job.result(timeout=20_000) == parcel
    assert seen == [(parcel, Decimal("1.10"), at, UUID(int=5), b"\x00\xff", {1: "one"})]
    assert job.data == {
        "parcel": {"number": 7, "sizes": ["s", "l"]},
        "price": "1.10",
        "at": "2030-01-02T03:04:05Z",
        "key": "00000000-0000-0000-0000-000000000005",
        "raw": "AP8=",
        "by": {"1": "one"},
    }


async def test_several_tasks_share_a_queue_and_plain_functions_run_in_threads(app: Bullpen) -> None:
    @app.task("mixed")
    async def on_loop() -> str:
        return threading.current_thread().name

    @app.task("mixed")
    def in_thread(job: Job, lines: int) -> str:
        for number in range(lines):
            job.sync.log(f"line {number}")
        return threading.current_thread().name

    async with running(app):
        loop_job, thread_job = await on_loop.add(), await in_thread.add(lines=2)
        assert await loop_job.result(timeout=20_000) == threading.current_thread().name
        assert (await thread_job.result(timeout=20_000)).startswith("bullpen-mixed")
        assert await thread_job.logs() == ["line 0", "line 1"]
    assert app.tasks == {"mixed": ("on_loop", "in_thread")}


async def test_a_plain_function_that_raises_is_retried_as_a_job(app: Bullpen) -> None:
    runs: list[int] = []

    @app.task("mixed", attempts=2, backoff=1)
    def unsure(job: Job) -> int:
        runs.append(job.attempts_made)
        if len(runs) == 1:
            raise OSError("away")
        return 5

    async with running(app):
        assert await (await unsure.add()).result(timeout=20_000) == 5
    assert runs == [0, 1]


async def test_many_are_added_at_once_and_mapped(app: Bullpen) -> None:
    @app.task("numbers")
    async def double(number: int) -> int:
        return number * 2

    async with running(app):
        assert await double.map([double.call(1), {"number": 2}, double.call(number=3)], timeout=20_000) == [2, 4, 6]
        jobs = await double.add_many({"number": n} for n in range(300))
        assert [await job.result(timeout=20_000) for job in jobs] == [2 * n for n in range(300)]


async def test_options_of_the_task_and_of_one_job(app: Bullpen) -> None:
    @app.task("emails", attempts=7, name="send-mail")
    async def send(to: str) -> None: ...

    plain = await send.add("a")
    special = await send.options(delay=60_000, job_id="only-one", attempts=2).add("b")
    again = await send.options(job_id="only-one").add("c")

    assert (plain.name, plain.opts.attempts) == ("send-mail", 7)
    assert (special.id, special.opts.attempts, special.delay) == ("only-one", 2, 60_000)
    assert await special.state() is JobState.DELAYED
    assert again.added is Added.DUPLICATE
    assert again.blocked_by is not None
    await app.aclose()


async def test_wrong_arguments_raise_where_they_are_given(app: Bullpen) -> None:
    @app.task("emails")
    async def send(to: str, copies: int = 1) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'to'"):
        await send.add()  # type: ignore[call-arg]  # that is the point
    with pytest.raises(InvalidOption, match=r"expected `int`, got `str` - at `\$.copies`"):
        await send.add("a", copies="two")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InvalidOption, match="expected `int`"):
        await send.add_many([{"to": "a"}, {"to": "b", "copies": "two"}])
    with pytest.raises(InvalidOption, match=r"send.call\(...\) or the parameters by name"):
        await send.add_many(["a"])  # type: ignore[list-item]  # that is the point
    assert (await app.queue("emails").counts()).pending == 0
    await app.aclose()


async def test_data_that_does_not_fit_fails_for_good_and_is_a_dead_letter(app: Bullpen) -> None:
    @app.task("emails")
    async def send(to: str) -> None: ...

    queue = app.queue("emails")
    async with running(app):
        wrong = await queue.add("send", {"to": 5})
        with pytest.raises(JobFailed, match=r"cannot be called with this job's data: Expected `str`, got `int`"):
            await wrong.result(timeout=20_000)
        missing = await queue.add("send")
        with pytest.raises(JobFailed, match="missing required field `to`"):
            await missing.result(timeout=20_000)
        unknown = await queue.add("sned", {"to": "a"})
        with pytest.raises(JobFailed, match="queue 'emails' has no task 'sned' here; there is send"):
            await unknown.result(timeout=20_000)
        letters = await queue.dead_letters.list()
        assert {letter.job_id for letter in letters} == {wrong.id, missing.id, unknown.id}
        assert {letter.attempts_made for letter in letters} == {1}


async def test_unknown_fields_are_ignored_unless_strict(app: Bullpen) -> None:
    @app.task("open")
    async def loose(to: str) -> str:
        return to

    @app.task("open", strict=True)
    async def exact(to: str) -> str:
        return to

    queue = app.queue("open")
    async with running(app):
        assert await (await queue.add("loose", {"to": "a", "cc": "b"})).result(timeout=20_000) == "a"
        refused = await queue.add("exact", {"to": "a", "cc": "b"})
        with pytest.raises(JobFailed, match="unknown field `cc`"):
            await refused.result(timeout=20_000)


async def test_a_result_that_json_cannot_carry_is_a_failure_that_says_so(app: Bullpen) -> None:
    @app.task("odd")
    async def strange() -> Any:
        return object()

    async with running(app):
        job = await strange.add()
        with pytest.raises(JobFailed, match="returned what JSON cannot carry"):
            await job.result(timeout=20_000)


async def test_a_task_of_another_language_can_be_called_and_its_answer_is_checked(app: Bullpen, redis_url: str) -> None:
    """The declaration is enough: whoever works on the queue may run it, and its answer is read by our annotation."""

    @app.task("elsewhere")
    async def count(words: list[str]) -> int:
        raise AssertionError("it runs in another process")

    async def other(job: Job) -> Any:
        return len(job.data["words"]) if job.data["words"] else "none"

    async with Worker("elsewhere", other, connection=redis_url):
        assert await (await count.add(words=["a", "b"])).result(timeout=20_000) == 2
        empty = await count.add(words=[])
        with pytest.raises(InvalidOption, match="result of task 'count'"):
            await empty.result(timeout=20_000)
    await app.aclose()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def task(*names): ...", "parameter 'names' of task: expected a parameter with a name"),
        ("def task(**names): ...", "parameter 'names' of task: expected a parameter with a name"),
        ("def task(name, /): ...", "parameter 'name' of task: expected a parameter with a name"),
    ],
)
def test_parameters_without_a_name_are_refused(app: Bullpen, source: str, message: str) -> None:
    scope: dict[str, Any] = {}
    exec(source, scope)
    with pytest.raises(InvalidOption, match=message.replace("*", r"\*")):
        app.task("q")(scope["task"])


def test_mistakes_at_registration_are_told_there(app: Bullpen) -> None:
    async def send(to: str) -> None: ...

    with pytest.raises(InvalidOption, match="attempts"):
        app.task("q", attempts=0)(send)
    with pytest.raises(InvalidOption, match=r"use task.options\(job_id=...\)"):
        app.task("q", job_id="a")(send)  # type: ignore[call-overload]  # that is the point
    with pytest.raises(InvalidOption, match="a function"):
        app.task("q")(5)  # type: ignore[call-overload]  # that is the point
    app.task("q")(send)
    with pytest.raises(InvalidOption, match="no other task of queue 'q' has"):
        app.task("q")(send)
    with pytest.raises(InvalidOption, match="a queue without a worker"):
        app.worker("q", send)
    with pytest.raises(InvalidOption, match="before the first task"):
        app.task_queue("q", concurrency=5)


async def test_the_worker_of_a_task_queue_takes_its_options(app: Bullpen) -> None:
    app.task_queue("q", concurrency=3, timeout=50)
    never = asyncio.Event()

    @app.task("q", attempts=1)
    async def slow() -> None:
        await never.wait()

    async with running(app):
        assert app.workers[0].options.concurrency == 3
        with pytest.raises(JobFailed, match="timed out after 50 ms"):
            await (await slow.add()).result(timeout=20_000)


async def test_tasks_run_in_child_processes(redis_url: str) -> None:
    async with (
        Worker("heavy", child_module.square.handlers, connection=redis_url, processes=True),
        Queue("heavy", connection=redis_url) as queue,
    ):
        squared, other = await queue.add("square", {"number": 7}), await queue.add("pid")
        assert await squared.result(timeout=40_000) == 49
        assert await other.result(timeout=40_000) != os.getpid()


OPTIONS: dict[str, Any] = {"attempts": 5, "backoff": Backoff.fixed(700), "priority": 3}


def told(job: Any) -> tuple[Any, ...]:
    return job.name, job.data, job.opts.attempts, job.opts.backoff, job.opts.priority


async def test_every_way_to_add_keeps_the_options_of_the_task(redis_url: str, sqlite_url: str) -> None:
    app = Bullpen(settings=Settings.load(environ={}, redis_url=redis_url, ledger_url=sqlite_url))
    app.use_outbox()
    arrived: asyncio.Queue[Job] = asyncio.Queue()

    @app.task("emails", **OPTIONS)  # type: ignore[untyped-decorator]  # what the options are is not known
    async def send(job: Job, to: str) -> None:
        arrived.put_nowait(job)

    expected = ("send", {"to": "ada"}, 5, Backoff.fixed(700), 3)
    assert told(await send.add(to="ada")) == expected
    assert told(await asyncio.to_thread(send.add_sync, to="ada")) == expected
    call = send.call(to="ada")
    assert (call.queue, call.task, call.data) == ("emails", "send", {"to": "ada"})
    assert told(await app.queue(call.queue).add(call.task, call.data, **call.options)) == expected

    engine = create_async_engine(app.ledger.database.url)
    async with engine.connect() as connection:
        await connection.begin()
        await send.add_in_transaction(connection, to="nobody")
        await connection.rollback()
    async with engine.begin() as connection:
        assert (await send.add_in_transaction(connection, to="ada")).created
    await engine.dispose()
    blocking = create_engine(sqlite_url)
    with blocking.begin() as transaction:
        assert send.options(attempts=7).add_in_transaction_sync(transaction, to="ada").created
    blocking.dispose()

    async with running(app):
        jobs = [await asyncio.wait_for(arrived.get(), 20) for _ in range(5)]
    assert sorted(map(told, jobs), key=lambda each: each[2]) == [expected] * 4 + [(*expected[:2], 7, *expected[3:])]
    await app.aclose()


async def test_options_of_a_call_hold_for_it_alone(app: Bullpen) -> None:
    @app.task("emails", attempts=5)
    async def send(to: str) -> None: ...

    calls: list[Any] = [send.call("a"), send.options(delay=60_000).call("b"), {"to": "c"}]
    jobs = await send.options(attempts=2).add_many(calls)

    assert [(job.opts.attempts, job.delay) for job in jobs] == [(2, 0), (2, 60_000), (2, 0)]

    @app.task("letters", name="send")
    async def other(to: str) -> None: ...

    with pytest.raises(InvalidOption, match="calls of task 'send' of queue 'letters'"):
        await other.add_many([send.call("a")])
    with pytest.raises(InvalidOption, match="arguments of task 'send'"):
        send.add_sync(to=1)  # type: ignore[arg-type]  # what a type checker would find
    await app.aclose()


@pytest.mark.requirement("Q-21")
async def test_every_way_to_add_takes_replace_finished_and_durability(
    start_server: Callable[..., RedisServer], sqlite_url: str
) -> None:
    """An id that a finished run still holds is given to the new one, and the level is asked of the server."""
    server = start_server("valkey", args=("--appendonly", "yes", "--appendfsync", "always"), persistent=True)
    app = Bullpen(settings=Settings.load(environ={}, redis_url=server.url, ledger_url=sqlite_url))
    app.use_outbox()
    arrived: asyncio.Queue[str] = asyncio.Queue()

    @app.task("emails", replace_finished=True, durability="fsync")
    async def send(job: Job, to: str) -> None:
        arrived.put_nowait(to)

    one = send.options(job_id="ada")
    engine = create_async_engine(app.ledger.database.url)
    async with running(app):

        async def ran(to: str) -> None:
            assert await asyncio.wait_for(arrived.get(), 20) == to
            async with asyncio.timeout(20):
                while await app.queue("emails").state_of("ada") is not JobState.COMPLETED:  # noqa: ASYNC110 - of one run
                    await asyncio.sleep(0.01)

        first = await one.add(to="1")
        assert (first.added, first.durability) == (Added.CREATED, "fsync")
        await ran("1")
        again = await asyncio.to_thread(one.add_sync, to="2")
        assert (again.added, again.durability) == (Added.CREATED, "fsync")
        await ran("2")
        [many] = await one.add_many([{"to": "3"}])
        assert (many.added, many.durability) == (Added.CREATED, "fsync")
        await ran("3")
        call = one.call(to="4")
        called = await app.queue(call.queue).add(call.task, call.data, **call.options)
        assert (called.added, called.durability) == (Added.CREATED, "fsync")
        await ran("4")
        async with engine.begin() as connection:
            await one.add_in_transaction(connection, to="5")
        await ran("5")
        assert (await one.options(replace_finished=False).add(to="7")).added is Added.DUPLICATE
        with pytest.raises(InvalidOption, match="job_id"):
            await send.add(to="nobody")
        with pytest.raises(InvalidOption, match=r"replicated\(1\)"):
            one.options(durability=Durability.replicated(1), job_id="far", add_deadline=100).add_sync(to="8")
    await engine.dispose()
    with pytest.raises(InvalidOption, match="durability"):
        send.options(durability="disk")
    wrong: Any = {"replace_finished": "yes"}
    with pytest.raises(InvalidOption, match="replace_finished"):
        app.task("emails", name="other", **wrong)(lambda: None)
    await app.aclose()


@pytest.mark.requirement("W-83")
async def test_a_task_that_is_unique_while_pending_runs_once_per_key(app: Bullpen) -> None:
    """By all its arguments, or by what the key function makes of them."""

    @app.task("sync", unique="pending")
    async def refresh(shop: str, full: bool = False) -> str:
        return shop

    @app.task("sync", unique="pending", unique_key=lambda shop, **_: shop)
    async def rebuild(shop: str, full: bool = False) -> str:
        return shop

    same = [await refresh.add("a"), await refresh.add(shop="a", full=False)]
    other = await refresh.add("a", full=True)
    by_key = [await rebuild.add("a"), await rebuild.add("a", full=True), await rebuild.add("b")]
    many = await refresh.add_many([refresh.call("a"), {"shop": "a"}, refresh.call("c")])

    assert [job.added for job in same] == [Added.CREATED, Added.DEDUPLICATED]
    assert other.added is Added.CREATED
    assert [job.added for job in by_key] == [Added.CREATED, Added.DEDUPLICATED, Added.CREATED]
    assert by_key[0].deduplication_id == "rebuild:a"
    assert [job.added for job in many] == [Added.DEDUPLICATED, Added.DEDUPLICATED, Added.CREATED]
    async with running(app):
        assert await same[1].result(timeout=20_000) == "a"  # of the job that was there first
        again = await refresh.add("a")
    assert again.added is Added.CREATED


@pytest.mark.requirement("W-83")
async def test_a_task_that_is_unique_for_a_time_runs_once_in_it(app: Bullpen) -> None:
    @app.task("sync", unique=timedelta(hours=1))
    async def report(day: date) -> str:
        return day.isoformat()

    async with running(app):
        first = await report.add(date(2030, 1, 1))
        await first.result(timeout=20_000)
        second = await report.add(date(2030, 1, 1))
        third = await report.options(unique=False).add(date(2030, 1, 1))

    assert (second.added, second.id) == (Added.DEDUPLICATED, first.id)
    assert third.added is Added.CREATED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unique": "always"}, "unique: expected 'pending' .*, or how long"),
        ({"unique": timedelta(0)}, "unique: expected whole milliseconds"),
        ({"unique_key": str}, "unique_key: expected none without unique"),
        ({"unique": "pending", "unique_key": "shop"}, "unique_key: expected a function"),
        ({"unique": "pending", "deduplication": "d"}, "unique: expected not together with deduplication"),
    ],
)
def test_a_wrong_unique_is_told_at_registration(app: Bullpen, options: dict[str, Any], message: str) -> None:
    async def refresh(shop: str) -> None: ...

    with pytest.raises(InvalidOption, match=message):
        app.task("sync", **options)(refresh)


async def test_a_function_of_the_arguments_names_the_lane(app: Bullpen) -> None:
    @app.task("emails", lane=lambda tenant, **_: tenant)
    async def send(tenant: str, to: str = "all") -> None: ...

    one = await send.add("acme", to="ada")
    many = await send.add_many([send.call("globex"), {"tenant": "initech"}])
    named = await send.options(lane="own").add("acme")

    assert [job.lane for job in (one, *many, named)] == ["acme", "globex", "initech", "own"]
    await app.aclose()


async def test_the_lane_of_a_task_may_be_none_or_fixed(app: Bullpen) -> None:
    @app.task("emails", lane=lambda tenant: tenant or None)
    async def send(tenant: str) -> None: ...

    @app.task("emails", lane="reports")
    async def report() -> None: ...

    assert (await send.add("")).lane is None
    assert (await report.add()).lane == "reports"
    assert (await asyncio.to_thread(send.add_sync, "acme")).record.lane == "acme"
    await app.aclose()


async def test_a_lane_that_is_none_is_refused_where_the_run_is_added(app: Bullpen) -> None:
    @app.task("emails", lane=lambda number: number)
    async def send(number: int) -> None: ...

    with pytest.raises(InvalidOption, match="lane"):
        await send.add(5)
    await app.aclose()


async def test_the_function_of_the_lane_gets_defaults_too(app: Bullpen) -> None:
    @app.task("emails", lane=lambda tenant: tenant, every="1h")
    async def send(tenant: str = "acme") -> None: ...

    assert (await send.add()).lane == "acme"
    assert send.schedule is not None and send.schedule.options["lane"] == "acme"
    await app.aclose()


async def test_wrong_arguments_name_the_task(app: Bullpen) -> None:
    @app.task()
    async def refresh(shop: int) -> None: ...

    with pytest.raises(TypeError, match=r"^task 'refresh' takes \(shop: .*\): .*'shop'"):
        await refresh.add(shp=7)  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(InvalidOption, match=r"^arguments of task 'refresh': expected `int`, got `str` - at"):
        await refresh.add(shop="x")  # type: ignore[arg-type]  # as above

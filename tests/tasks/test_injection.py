"""Parameters that the worker fills in: what is found, how long it lives, where it runs, and what is refused when."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from bullpen import (
    BatchOptions,
    Bullpen,
    Depends,
    InvalidOption,
    Job,
    JobBatch,
    JobFailed,
    NotConfigured,
    Queue,
    RateLimit,
    Worker,
)
from tests.tasks import injected_module

PATIENCE = 60_000


class Pool:
    """Made once per process."""


class Session:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.thread = threading.get_ident()


class Cursor:
    def __init__(self, pool: Pool) -> None:
        self.thread = threading.get_ident()


@pytest.fixture
async def app(redis_url: str) -> AsyncIterator[Bullpen]:
    async with Bullpen(redis_url) as made:
        yield made


@pytest.fixture
def told(app: Bullpen) -> list[str]:
    """What happens, in order. Providers: a pool per process, a session per job."""
    lines: list[str] = []

    @app.provide
    async def pool() -> AsyncIterator[Pool]:
        lines.append("pool opens")
        yield Pool()
        lines.append("pool closes")

    @app.provide(scope="job")
    async def session(pool: Pool, job: Job) -> AsyncIterator[Session]:
        lines.append(f"session of {job.name}")
        try:
            yield Session(pool)
        except BaseException as error:
            lines.append(f"rolled back: {error}")
            raise
        lines.append("committed")

    return lines


@asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await run


async def test_what_is_made_per_job_ends_with_the_job_and_what_is_made_per_process_with_the_process(
    app: Bullpen, told: list[str]
) -> None:
    pools: set[Pool] = set()

    @app.task("work", attempts=1)
    async def charge(amount: int, session: Session = Depends()) -> int:
        pools.add(session.pool)
        if amount < 0:
            raise ValueError("below zero")
        return amount

    async with running(app):
        assert await (await charge.add(5)).result(timeout=PATIENCE) == 5
        with pytest.raises(JobFailed, match="below zero"):
            await (await charge.add(amount=-1)).result(timeout=PATIENCE)

    assert len(pools) == 1
    assert told == [
        *("pool opens", "session of charge", "committed"),
        *("session of charge", "rolled back: below zero", "pool closes"),
    ]


async def test_the_data_of_a_job_has_nothing_of_what_is_found(app: Bullpen, told: list[str]) -> None:
    @app.task("work", strict=True)
    async def charge(amount: int, session: Session = Depends()) -> int:
        return amount

    assert (await charge.add(5)).data == {"amount": 5}
    assert charge.call(5).data == {"amount": 5}
    with pytest.raises(TypeError, match="session"):
        await charge.add(5, session=Session(Pool()))


async def test_handlers_middleware_and_batches_share_what_one_job_has(app: Bullpen, told: list[str]) -> None:
    sessions: list[Session] = []

    @app.middleware(queues=["work"])
    async def audit(job: Job, session: Annotated[Session, Depends()]) -> AsyncIterator[None]:
        sessions.append(session)
        yield

    @app.handler("work")
    async def handle(job: Job, session: Annotated[Session, Depends()]) -> None:
        sessions.append(session)

    @app.handler("many", batch=BatchOptions(size=3))
    async def handle_many(batch: JobBatch, pool: Pool = Depends()) -> None:
        told.append(f"batch of {len(batch)}: {type(pool).__name__}")

    async with running(app):
        await (await app.queue("work").add("job")).result(timeout=PATIENCE)
        await (await app.queue("many").add("job")).result(timeout=PATIENCE)

    assert len(sessions) == 2
    assert sessions[0] is sessions[1]
    assert "batch of 1: Pool" in told


async def test_a_function_may_be_asked_for_and_runs_once_per_job(app: Bullpen) -> None:
    calls: list[str] = []

    def tenant(job: Job) -> str:
        calls.append(job.name)
        return str(job.data["tenant"])

    async def prefix(tenant: str = Depends(tenant)) -> str:
        return f"{tenant}:"

    @app.handler("work")
    async def handle(job: Job, prefix: str = Depends(prefix), tenant: str = Depends(tenant)) -> list[str]:
        return [prefix, tenant]

    async with running(app):
        job = await app.queue("work").add("job", {"tenant": "acme"})
        assert await job.result(timeout=PATIENCE) == ["acme:", "acme"]
    assert calls == ["job"]


async def test_plain_providers_run_in_the_thread_of_a_plain_handler(app: Bullpen, told: list[str]) -> None:
    closed_in: list[int] = []

    @app.provide(scope="job")
    def cursor(pool: Pool) -> Iterator[Cursor]:
        yield Cursor(pool)
        closed_in.append(threading.get_ident())

    @app.handler("handled")
    def handle(job: Job, cursor: Cursor = Depends(), session: Session = Depends()) -> bool:
        return cursor.thread == threading.get_ident() != session.thread

    @app.task("asked")
    def ask(times: int, cursor: Cursor = Depends()) -> bool:
        return cursor.thread == threading.get_ident()

    async with running(app):
        assert await (await app.queue("handled").add("job")).result(timeout=PATIENCE) is True
        assert await (await ask.add(times=1)).result(timeout=PATIENCE) is True

    assert threading.get_ident() not in closed_in
    assert len(closed_in) == 2


async def test_plain_middleware_runs_in_the_thread_of_a_plain_task(app: Bullpen) -> None:
    threads: list[int] = []

    @app.middleware
    def watch(job: Job) -> Iterator[None]:
        threads.append(threading.get_ident())
        yield

    @app.task("asked")
    def plain() -> int:
        return threading.get_ident()

    @app.task("asked")
    async def on_loop() -> int:
        return threading.get_ident()

    async with running(app):
        in_thread = await (await plain.add()).result(timeout=PATIENCE)
        here = await (await on_loop.add()).result(timeout=PATIENCE)

    assert threads == [in_thread, here]
    assert here == threading.get_ident() != in_thread


async def test_many_jobs_that_ask_at_once_get_one_pool(app: Bullpen) -> None:
    made: list[Pool] = []
    may_go_on = asyncio.Event()

    @app.provide
    async def pool() -> Pool:
        await may_go_on.wait()
        made.append(Pool())
        return made[-1]

    waiting: list[str] = []

    @app.middleware
    async def count(job: Job) -> AsyncIterator[None]:
        waiting.append(job.id)
        if len(waiting) == 5:
            may_go_on.set()
        yield

    @app.task("work")
    async def ask(pool: Pool = Depends()) -> bool:
        return pool is made[0]

    async with running(app):
        assert await ask.map([{}] * 5, timeout=PATIENCE) == [True] * 5
    assert len(made) == 1


async def test_a_provider_that_fails_fails_the_job_and_is_tried_again(app: Bullpen) -> None:
    tries: list[int] = []

    @app.provide
    async def pool() -> Pool:
        tries.append(len(tries))
        if len(tries) == 1:
            raise ConnectionError("database is starting")
        return Pool()

    @app.task("work", attempts=2, backoff=1)
    async def ask(pool: Pool = Depends()) -> str:
        return "done"

    async with running(app):
        assert await (await ask.add()).result(timeout=PATIENCE) == "done"
    assert len(tries) == 2


async def test_tests_put_something_else_in_the_place_of_a_provider(app: Bullpen, told: list[str]) -> None:
    class Fake:
        pool = "no pool"

    @app.task("work")
    async def ask(session: Session = Depends()) -> str:
        return str(session.pool)

    def made(job: Job) -> Any:
        fake = Fake()
        fake.pool = f"for {job.name}"
        return fake

    async with running(app):
        with app.override(Session, Fake()):
            assert await (await ask.add()).result(timeout=PATIENCE) == "no pool"
        with app.override(Session, made):
            assert await (await ask.add()).result(timeout=PATIENCE) == "for ask"
        assert "Pool object" in await (await ask.add()).result(timeout=PATIENCE)


async def test_a_direct_call_gives_what_a_worker_would_find(app: Bullpen, told: list[str]) -> None:
    @app.task("work")
    async def charge(amount: int, session: Session = Depends()) -> int:
        return amount

    assert await charge(5, session=Session(Pool())) == 5
    with pytest.raises(InvalidOption, match=r"session.*given to charge here: only a worker finds it"):
        await charge(5)


# ---- what is refused --------------------------------------------------------------------------------------------


async def fails_to_start(app: Bullpen, match: str) -> None:
    with pytest.raises(NotConfigured, match=match):
        await app.run(signals=False)


async def test_what_nothing_provides_is_told_before_the_first_job(app: Bullpen) -> None:
    @app.provide(scope="job")
    def session(pool: Pool) -> Session:
        return Session(pool)

    @app.task("work")
    async def charge(session: Session = Depends()) -> None: ...

    await fails_to_start(app, r"nothing provides Pool: charge -> Session -> Pool; see app\.provide")


async def test_what_lives_longer_cannot_need_what_ends_earlier(app: Bullpen) -> None:
    app.provide(Session, lambda pool=Depends(lambda: Pool()): Session(pool), scope="job")

    @app.provide
    async def pool(session: Session) -> Pool:
        return session.pool

    @app.handler("work")
    async def handle(job: Job, pool: Pool = Depends()) -> None: ...

    await fails_to_start(app, "made once per process needs what is made for each job: .*handle -> Pool -> Session")


async def test_a_process_has_no_job(app: Bullpen) -> None:
    @app.provide
    async def pool(job: Job) -> Pool:
        return Pool()

    @app.handler("work")
    async def handle(job: Job, pool: Pool = Depends()) -> None: ...

    await fails_to_start(app, "nothing provides Job")


async def test_a_circle_is_told_before_the_first_job(app: Bullpen) -> None:
    @app.provide(scope="job")
    async def pool(session: Session) -> Pool:
        return session.pool

    @app.provide(scope="job")
    async def session(pool: Pool) -> Session:
        return Session(pool)

    @app.middleware
    async def watch(job: Job, session: Session = Depends()) -> AsyncIterator[None]:
        yield

    @app.handler("work")
    async def handle(job: Job) -> None: ...

    await fails_to_start(app, "watch -> Session -> Pool -> Session")


async def test_a_worker_whose_process_was_not_started_says_so(app: Bullpen, told: list[str]) -> None:
    @app.task("work", attempts=1)
    async def charge(session: Session = Depends()) -> None: ...

    job = await charge.add()
    async with app.workers[0]:
        with pytest.raises(JobFailed, match="this one has not started"):
            await job.result(timeout=PATIENCE)
    again = await charge.add()
    worker = Worker("work", charge.handlers, connection=app.connection)
    worker.surround(app.around)
    async with app.started(), worker:
        await again.result(timeout=PATIENCE)


def test_wrong_providers_are_refused_where_they_stand(app: Bullpen) -> None:
    def without_type() -> Any: ...
    def asks_for_anything(thing) -> Session: ...  # type: ignore[no-untyped-def,empty-body]

    with pytest.raises(InvalidOption, match="its return annotation"):
        app.provide(without_type)
    with pytest.raises(InvalidOption, match="'job' or 'process'"):
        app.provide(Pool, Pool, scope="request")  # type: ignore[call-overload]  # that it is refused is the point
    with pytest.raises(InvalidOption, match=r"parameter 'thing' of .*asks_for_anything"):
        app.provide(scope="job")(asks_for_anything)
    with pytest.raises(InvalidOption, match="a function that makes what is wanted"):
        Depends(5)  # type: ignore[arg-type]  # that it is refused is the point
    with pytest.raises(InvalidOption, match="a type on the top level of a module"):

        @app.task("work")
        async def charge(thing: Annotated[list[int], Depends()]) -> None: ...

    with pytest.raises(NotConfigured, match="is not a Pool and does not make one"):
        app.provide(Pool, "pool")  # type: ignore[arg-type]  # that it is refused is the point


async def test_a_task_that_comes_after_the_start_of_its_worker_is_refused_what_it_asks_for(app: Bullpen) -> None:
    app.provide(Pool, Pool())

    @app.task("work")
    async def early() -> None: ...

    async with running(app):
        await (await early.add()).result(timeout=PATIENCE)

        @app.task("work", attempts=1)
        async def late(pool: Pool = Depends()) -> None: ...

        with pytest.raises(JobFailed, match="registered after its worker started"):
            await (await late.add()).result(timeout=PATIENCE)


def test_classes_and_objects_are_found_by_get_as_before(app: Bullpen) -> None:
    app.provide(Pool)
    app.provide(Session, Session)

    assert app.get(Session).pool is app.get(Pool)


# ---- child processes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue", "handler"), [("handled", injected_module.handled), ("asked", injected_module.asked.handlers)]
)
async def test_child_processes_find_what_is_asked_for(queue: str, handler: Callable[..., Any], redis_url: str) -> None:
    worker = Worker(queue, handler, connection=redis_url, processes=True)
    worker.surround(injected_module.app.around)

    async with Queue(queue, connection=redis_url) as jobs, worker:
        first = await (await jobs.add("asked", {})).result(timeout=PATIENCE)
        second = await (await jobs.add("asked", {})).result(timeout=PATIENCE)

    assert first[1] == second[1] == 1
    assert os.getpid() not in (first[0], second[0])


# ---- batches ----------------------------------------------------------------------------------------------------


@dataclass
class Row:
    number: int


async def test_tasks_of_lists_ask_too_once_per_batch(app: Bullpen, told: list[str]) -> None:
    @app.provide(scope="job")
    def cursor(pool: Pool) -> Iterator[Cursor]:
        yield Cursor(pool)

    @app.task("rows", batch=BatchOptions(size=10))
    async def store(rows: list[Row], pool: Pool = Depends()) -> list[str]:
        return [f"{row.number} in {type(pool).__name__}" for row in rows]

    @app.task("lines", batch=BatchOptions(size=10))
    def store_plainly(rows: list[Row], cursor: Cursor = Depends()) -> list[bool]:
        return [cursor.thread == threading.get_ident() for row in rows]

    async with running(app):
        assert await (await store.add(Row(7))).result(timeout=PATIENCE) == "7 in Pool"
        assert await (await store_plainly.add(Row(7))).result(timeout=PATIENCE) is True
    assert store.call(Row(7)).data == {"number": 7}


@pytest.mark.parametrize("option", [{"timeout": 5}, {"rate_limit": RateLimit(1, 1)}])
def test_options_of_one_run_are_refused_where_runs_start_together(app: Bullpen, option: dict[str, Any]) -> None:
    name = next(iter(option))
    with pytest.raises(InvalidOption, match=f"{name}: expected none with batch"):
        app.task("rows", batch=BatchOptions(size=10), **option)

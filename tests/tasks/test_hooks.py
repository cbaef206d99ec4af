"""Hooks of processes and middleware around jobs: what runs where, in which order, and what errors become."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

from bullpen import BatchOptions, Bullpen, Depends, InvalidOption, Job, JobBatch, JobFailed, Queue, Worker
from bullpen.worker import Taker
from tests.tasks import hooked_module

PATIENCE = 60_000


@pytest.fixture
async def app(redis_url: str) -> AsyncIterator[Bullpen]:
    async with Bullpen(redis_url) as made:
        yield made


@asynccontextmanager
async def running(app: Bullpen) -> AsyncIterator[None]:
    run = asyncio.create_task(app.run(signals=False))
    try:
        yield
    finally:
        await app.stop()
        await run


async def add_and_wait(app: Bullpen, queue: str, name: str = "job") -> Any:
    job = await app.queue(queue).add(name, {}, attempts=1)
    return await job.result(timeout=PATIENCE)


# ---- hooks ------------------------------------------------------------------------------------------------------


async def test_hooks_run_once_per_process_around_all_jobs_and_end_in_the_opposite_order(app: Bullpen) -> None:
    told: list[str] = []

    @app.on_startup
    async def first() -> None:
        told.append("first")

    @app.on_shutdown
    def last(given: Bullpen) -> None:
        assert given is app
        told.append("last")

    @app.lifespan
    async def whole() -> AsyncIterator[None]:
        told.append("whole begins")
        yield
        told.append("whole ends")

    @app.lifespan
    @contextmanager
    def plain(given: Bullpen) -> Iterator[None]:
        told.append("plain begins")
        yield
        told.append("plain ends")

    @app.on_shutdown
    async def adds_a_job() -> None:
        told.append((await app.queue("later").add("left behind")).name)

    @app.handler("work")
    async def handle(job: Job) -> None:
        told.append("job")

    async with running(app):
        await add_and_wait(app, "work")
        await add_and_wait(app, "work")

    begin = ["first", "whole begins", "plain begins"]
    assert told == [*begin, "job", "job", "left behind", "plain ends", "whole ends", "last"]


async def test_no_job_is_taken_before_the_hooks_are_done(app: Bullpen) -> None:
    may_go_on, waits = asyncio.Event(), asyncio.Event()
    told: list[str] = []

    @app.on_startup
    async def slow() -> None:
        waits.set()
        await may_go_on.wait()
        told.append("ready")

    @app.handler("work")
    async def handle(job: Job) -> None:
        told.append("job")

    job = await app.queue("work").add("job")
    async with running(app):
        await waits.wait()
        assert not app.workers[0].has_started
        may_go_on.set()
        await job.result(timeout=PATIENCE)

    assert told == ["ready", "job"]


async def test_a_hook_that_fails_ends_the_process_and_undoes_what_was_begun(app: Bullpen) -> None:
    told: list[str] = []

    @app.lifespan
    async def opened() -> AsyncIterator[None]:
        yield
        told.append("closed")

    @app.on_startup
    def fails() -> None:
        raise RuntimeError("no such database")

    @app.on_shutdown
    def never() -> None:
        told.append("never")

    @app.handler("work")
    async def handle(job: Job) -> None: ...

    with pytest.raises(RuntimeError, match="no such database"):
        await app.run(signals=False)

    assert told == []  # the error went through the lifespan, which did not catch it
    assert not app.workers[0].has_started


async def test_a_stop_while_hooks_run_cancels_them(app: Bullpen) -> None:
    waits, told = asyncio.Event(), list[str]()

    @app.lifespan
    async def hangs() -> AsyncIterator[None]:
        try:
            waits.set()
            await asyncio.Event().wait()
            yield
        finally:
            told.append("undone")

    @app.handler("work")
    async def handle(job: Job) -> None: ...

    run = asyncio.create_task(app.run(signals=False))
    await waits.wait()
    await app.stop()
    await run

    assert told == ["undone"]
    assert not app.workers[0].has_started


async def test_a_run_that_is_cancelled_ends_its_workers_before_the_hooks_of_the_end(app: Bullpen) -> None:
    begun, told = asyncio.Event(), list[str]()

    @app.on_shutdown
    def last() -> None:
        told.append("end")

    @app.handler("work", close_timeout=0)
    async def handle(job: Job) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            told.append("job")

    await app.queue("work").add("job")
    run = asyncio.create_task(app.run(signals=False))
    await begun.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert told == ["job", "end"]


@pytest.mark.parametrize("how", ["close_timeout", "a second stop"])
async def test_hooks_of_the_end_that_hang_are_cancelled_one_after_the_other(app: Bullpen, how: str) -> None:
    told, hangs = list[str](), asyncio.Event()

    @app.on_shutdown
    async def still_runs() -> None:
        told.append("still runs")

    @app.lifespan
    async def first() -> AsyncIterator[None]:
        yield
        try:
            await asyncio.Event().wait()
        finally:
            told.append("first")

    @app.on_shutdown
    async def second() -> None:
        try:
            hangs.set()
            await asyncio.Event().wait()
        finally:
            told.append("second")

    begun = asyncio.Event()
    app.on_startup(begun.set)

    @app.handler("work", close_timeout=100 if how == "close_timeout" else 3_600_000)
    async def handle(job: Job) -> None: ...

    async with asyncio.timeout(60):
        run = asyncio.create_task(app.run(signals=False))
        await begun.wait()
        await add_and_wait(app, "work")
        await app.stop()
        await hangs.wait()
        if how == "a second stop":
            await app.stop(0)
        await run

    assert told == ["second", "first", "still runs"]


async def test_a_program_that_only_adds_may_start_the_hooks_itself(app: Bullpen) -> None:
    told: list[str] = []

    @app.lifespan
    def whole() -> Iterator[None]:
        told.append("begins")
        yield
        told.append("ends")

    async with app.started(), app.started():
        assert told == ["begins"]
    assert told == ["begins", "ends"]


async def test_a_service_that_a_hook_adds_runs_once(app: Bullpen) -> None:
    class Extra:
        runs = 0

        def __init__(self) -> None:
            self.closed = asyncio.Event()

        async def run(self, *, signals: bool | None = None) -> None:
            self.runs += 1
            await self.closed.wait()

        async def close(self, timeout: object = None) -> None:
            self.closed.set()

    extra = Extra()

    @app.on_startup
    def add_service() -> None:
        app.add(extra)

    @app.handler("work")
    async def handle(job: Job) -> None: ...

    async with running(app):
        await add_and_wait(app, "work")

    assert extra.runs == 1


def test_hooks_that_cannot_be_called_are_refused_where_they_stand(app: Bullpen) -> None:
    with pytest.raises(InvalidOption, match="without parameters, or with one for the app"):
        app.on_startup(lambda one, two: None)
    with pytest.raises(InvalidOption, match="one that yields is a lifespan"):

        @app.on_startup
        def yields() -> Iterator[None]:
            yield

    with pytest.raises(InvalidOption, match="a function that yields once"):

        @app.lifespan
        async def returns() -> None: ...


# ---- middleware -------------------------------------------------------------------------------------------------


async def test_the_first_middleware_is_the_outermost_and_sees_what_the_handler_raises(app: Bullpen) -> None:
    told: list[str] = []

    @app.middleware
    async def outer(job: Job) -> AsyncIterator[None]:
        told.append(f"outer {job.name}")
        try:
            yield
        except ValueError as error:
            told.append(f"outer sees {error}")
            raise RuntimeError("translated") from error

    class Inner:
        def __init__(self, job: Job) -> None: ...

        async def __aenter__(self) -> None:
            told.append("inner")

        async def __aexit__(self, kind: object, error: object, trace: object) -> None:
            told.append(f"inner sees {error}")

    app.middleware(Inner)

    @app.handler("work")
    async def handle(job: Job) -> str:
        if job.name == "fails":
            raise ValueError("no")
        return "done"

    async with running(app):
        assert await add_and_wait(app, "work") == "done"
        with pytest.raises(JobFailed, match="translated"):
            await add_and_wait(app, "work", "fails")

    assert told == [
        *("outer job", "inner", "inner sees None"),
        *("outer fails", "inner", "inner sees no", "outer sees no"),
    ]


async def test_middleware_that_does_not_raise_the_error_on_completes_the_job(app: Bullpen) -> None:
    @app.middleware
    async def forgives(job: Job) -> AsyncIterator[None]:
        try:
            yield
        except KeyError:
            return

    @app.handler("loop")
    async def on_loop(job: Job) -> str:
        raise KeyError

    @app.handler("threads")
    def in_thread(job: Job) -> str:
        raise KeyError

    async with running(app):
        assert await add_and_wait(app, "loop") is None
        assert await add_and_wait(app, "threads") is None


async def test_around_a_plain_handler_plain_middleware_runs_in_its_thread(app: Bullpen) -> None:
    name: ContextVar[str] = ContextVar("name")
    threads: dict[str, int] = {}

    @app.middleware
    async def on_loop(job: Job) -> AsyncIterator[None]:
        name.set("set on the loop")
        threads["async"] = threading.get_ident()
        yield

    @app.middleware
    def in_place(job: Job) -> Iterator[None]:
        threads["plain"] = threading.get_ident()
        yield
        threads["plain end"] = threading.get_ident()

    @app.handler("threads")
    def handle(job: Job) -> str:
        threads["handler"] = threading.get_ident()
        return name.get()

    async with running(app):
        assert await add_and_wait(app, "threads") == "set on the loop"

    assert threads["async"] == threading.get_ident()
    assert threads["plain"] == threads["plain end"] == threads["handler"] != threading.get_ident()


async def test_middleware_is_around_tasks_and_only_for_its_queues(app: Bullpen) -> None:
    told: list[str] = []

    @app.middleware(queues=["one"])
    async def watch(job: Job) -> AsyncIterator[None]:
        told.append(job.queue_name)
        yield

    @app.task("one")
    async def first() -> None: ...

    @app.task("two")
    async def second() -> None: ...

    async with running(app):
        await (await second.add()).result(timeout=PATIENCE)
        await (await first.add()).result(timeout=PATIENCE)

    assert told == ["one"]


async def test_time_of_a_job_counts_its_middleware(app: Bullpen) -> None:
    @app.middleware
    async def hangs(job: Job) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    @app.handler("loop", timeout=50)
    async def on_loop(job: Job) -> None: ...

    @app.handler("threads", timeout=50)
    def in_thread(job: Job) -> None: ...

    async with running(app):
        for queue in ("loop", "threads"):
            with pytest.raises(JobFailed, match="timed out after"):
                await add_and_wait(app, queue)


async def test_batches_get_middleware_that_can_take_them(app: Bullpen) -> None:
    sizes: list[int] = []

    @app.middleware(batches=True)
    async def watch(batch: Job | JobBatch) -> AsyncIterator[None]:
        assert isinstance(batch, JobBatch)
        sizes.append(len(batch))
        yield

    @app.handler("loop", batch=BatchOptions(size=5))
    async def on_loop(batch: JobBatch) -> None: ...

    @app.handler("threads", batch=BatchOptions(size=5))
    def in_thread(batch: JobBatch) -> None: ...

    async with running(app):
        await add_and_wait(app, "loop")
        await add_and_wait(app, "threads")

    assert sizes == [1, 1]


async def test_middleware_for_jobs_is_refused_where_a_handler_takes_batches(app: Bullpen) -> None:
    @app.middleware
    async def tenant_of(job: Job) -> AsyncIterator[None]:
        yield

    @app.handler("many", batch=BatchOptions(size=5))
    async def handle(batch: JobBatch) -> None: ...

    with pytest.raises(InvalidOption, match=r"(?s)'many'.*batches=True.*tenant_of.*queues="):
        await app.run(signals=False)


@pytest.mark.parametrize("wrong", [lambda: None, 5, "text"])
def test_middleware_that_takes_no_job_is_refused(app: Bullpen, wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="a function of the job"):
        app.middleware(wrong)


def test_a_coroutine_is_no_middleware(app: Bullpen) -> None:
    async def forgot_to_yield(job: Job) -> None: ...

    with pytest.raises(InvalidOption, match="yields once"):
        app.middleware(forgot_to_yield)  # type: ignore[type-var]  # that it is refused is the point
    with pytest.raises(InvalidOption, match="queues"):

        @app.middleware(queues="one")
        async def watch(job: Job) -> AsyncIterator[None]:
            yield


# ---- child processes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", ["plain", "loop"])
async def test_child_processes_run_hooks_and_middleware(
    queue: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("HOOKED_NOTES", str(notes))
    handler = {"plain": hooked_module.plain, "loop": hooked_module.on_a_loop}[queue]
    worker = Worker(queue, handler, connection=redis_url, processes=True)
    worker.surround(hooked_module.app.around)

    async with Queue(queue, connection=redis_url) as jobs, worker:
        done = await jobs.add("job")
        failed = await jobs.add("fails", attempts=1)
        *seen, pid = await done.result(timeout=PATIENCE)
        with pytest.raises(JobFailed, match="translated"):
            await failed.result(timeout=PATIENCE)

    assert seen == ["on loop", "in place"]
    assert pid != str(os.getpid())
    assert notes.read_text().splitlines() == [f"{pid} start", f"{pid} end"]


@pytest.mark.parametrize("queue", ["plain", "loop"])
async def test_a_hook_that_fails_in_a_child_process_is_told_at_the_start(
    queue: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOKED_FAILS", "1")
    handler = {"plain": hooked_module.plain, "loop": hooked_module.on_a_loop}[queue]
    worker = Worker(queue, handler, connection=redis_url, processes=True)
    worker.surround(hooked_module.app.around)

    with pytest.raises(InvalidOption, match="RuntimeError: no pool"):
        await worker.start()


async def test_child_processes_need_an_app_that_they_can_import(app: Bullpen) -> None:
    app.on_startup(lambda: None)
    app.worker("plain", hooked_module.plain, processes=True)

    with pytest.raises(InvalidOption, match="an app on the top level of a module"):
        await app.run(signals=False)


def test_whoever_takes_jobs_by_hand_has_no_middleware(redis_url: str) -> None:
    assert not hasattr(Taker("work", connection=redis_url), "surround")


@pytest.mark.parametrize("kind", ["task", "handler"])
async def test_a_provider_of_a_plain_function_that_ended_late_sees_the_timeout(app: Bullpen, kind: str) -> None:
    seen: list[str] = []

    def session() -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            seen.append("rollback")
            raise
        seen.append("commit")

    def charge(job: Job, given: Any = Depends(session)) -> None:
        while not job.cancelled:
            threading.Event().wait(0.01)

    if kind == "task":
        app.task("work", name="job", timeout=50)(charge)
    else:
        app.handler("work", timeout=50)(charge)

    async with running(app):
        with pytest.raises(JobFailed, match="timed out"):
            await add_and_wait(app, "work")

    assert seen == ["rollback"]

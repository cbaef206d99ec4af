"""Handlers in child processes: they can be killed, and only their own job suffers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bullpen.errors import BullpenError, InvalidOption
from bullpen.queue import Job
from bullpen.testing import Child
from bullpen.testing.killer import wait_until_gone
from bullpen.worker import ChildLimits, Worker
from bullpen.worker.children.child import run_plainly
from tests.queue import _process_handlers as handlers
from tests.queue._kit import Kit

pytestmark = pytest.mark.measures_children

WORKER_SCRIPT = """
import asyncio, sys
from bullpen.worker import Worker
from tests.queue._process_handlers import endless

async def main():
    await Worker(sys.argv[2], endless, connection=sys.argv[1], processes=True).run()

asyncio.run(main())
"""


class TestResults:
    @pytest.mark.requirement("W-86", "X-103")
    async def test_the_handler_runs_in_another_process(self, kit: Kit) -> None:
        """Code that holds the GIL or crashes must not share the process that renews the locks."""
        job = await kit.queue().add("where", {"n": 1})

        told = await kit.drain(handlers.where, 1, processes=True)

        (result,) = told.of("completed")
        stored = (await kit.queue().get_job(job.id)) or pytest.fail("job is gone")
        assert stored.return_value["pid"] != os.getpid()
        assert stored.return_value["data"] == {"n": 1}
        assert stored.return_value["key"] == job.idempotency_key
        assert stored.return_value["fence"] == 1
        assert result[0].id == job.id

    @pytest.mark.requirement("W-86")
    async def test_a_child_is_used_again(self, kit: Kit) -> None:
        """Starting a process per job would cost more than most jobs."""
        queue = kit.queue()
        jobs = [await queue.add("where") for _ in range(3)]

        await kit.drain(handlers.where_async, 3, processes=True)

        stored = [await queue.get_job(job.id) for job in jobs]
        assert len({job.return_value for job in stored if job}) == 1
        assert all(job.reported_progress == 40 for job in stored if job)

    @pytest.mark.requirement("W-86")
    async def test_progress_logs_and_data_reach_the_queue(self, kit: Kit) -> None:
        """A job in a child can do what a job elsewhere can do."""
        job = await kit.queue().add("report", {"changed": False})

        await kit.drain(handlers.reporting, 1, processes=True)

        stored = await kit.queue().get_job(job.id)
        assert stored is not None
        assert stored.reported_progress == {"message": "half way"}
        assert await stored.logs() == ["first", "second"]
        assert stored.data == {"changed": True}


class TestPlainFunctions:
    """A `def` handler runs in the child's main thread, and no loop serves it."""

    async def _results(self, kit: Kit, handler: Callable[[Job], Any], data: Sequence[Any]) -> list[Any]:
        """The value of each job, run one after the other in one child."""
        jobs = [await kit.queue().add("plain", item, attempts=1) for item in data]
        await kit.drain(handler, len(data), processes=True)
        stored = [await kit.queue().get_job(job.id) for job in jobs]
        assert [job.failed_reason for job in stored if job] == [None] * len(data)
        return [job.return_value for job in stored if job]

    @pytest.mark.requirement("W-86")
    async def test_it_has_the_main_thread_and_a_context_of_its_own(self, kit: Kit) -> None:
        results = await self._results(kit, handlers.environment, [None, None])

        assert results == [{"is_main": True, "left": ""}] * 2

    @pytest.mark.requirement("W-86")
    async def test_threads_that_it_starts_may_use_the_job(self, kit: Kit) -> None:
        job = await kit.queue().add("report")

        await kit.drain(handlers.reporting_from_threads, 1, processes=True)

        stored = await kit.queue().get_job(job.id)
        assert stored is not None
        assert sorted(await stored.logs()) == sorted(f"line {number}" for number in range(20))

    @pytest.mark.requirement("W-86")
    async def test_a_thread_that_outlives_the_job_is_refused(self, kit: Kit) -> None:
        """Its question would take the answer for the next job's."""
        results = await self._results(
            kit, handlers.leaving_a_thread, [{"is_first": True}, {"is_first": False}, {"is_first": False}]
        )

        assert results[0] == []
        assert results[1] == results[2] == ["the job has ended; its handler left a thread that still uses the job"]

    def test_what_would_wait_for_a_loop_is_refused(self) -> None:
        """There is none, and the handler would stand still for ever."""

        async def sleep() -> None:
            await asyncio.sleep(0)

        with pytest.raises(BullpenError, match="needs an event loop"):
            run_plainly(sleep())

    @pytest.mark.requirement("W-86")
    async def test_data_and_values_of_any_size_pass(self, kit: Kit) -> None:
        """Also what does not come in one piece."""
        data = [{"text": "x" * size} for size in (0, 65_000, 3_000_000)]

        assert await self._results(kit, handlers.echoing, data) == data

    @pytest.mark.requirement("W-86", "X-29")
    @pytest.mark.parametrize(
        ("handler", "value"), [(handlers.interrupted, "False"), (handlers.interrupted_async, "went on")]
    )
    async def test_signals_for_the_group_are_left_to_the_parent(
        self, kit: Kit, handler: Callable[[Job], Any], value: str
    ) -> None:
        """Ctrl-C reaches all processes of a terminal; a graceful close must not cost the running jobs an attempt."""
        assert await self._results(kit, handler, [None]) == [value]

    @pytest.mark.requirement("W-86")
    async def test_what_a_handler_forks_can_be_stopped(self, kit: Kit) -> None:
        """A pool of processes ends with SIGTERM; one that does nothing then would never end."""
        assert await self._results(kit, handlers.stopping_a_fork, [None]) == [-15]


class TestFailures:
    async def _fail(self, kit: Kit, how: str, **options: object) -> Job:
        job = await kit.queue().add("fail", {"how": how}, attempts=2, backoff=1)
        await kit.drain(handlers.failing, 1, processes=True, **options)
        stored = await kit.queue().get_job(job.id)
        assert stored is not None
        return stored

    @pytest.mark.requirement("W-86")
    async def test_an_error_keeps_its_text_and_its_stack(self, kit: Kit) -> None:
        """The operator reads where it happened, not that "something in a child" failed."""
        stored = await self._fail(kit, "plain")

        assert stored.failed_reason == "no such account"
        assert "_process_handlers.py" in stored.stacktrace[0]
        assert stored.attempts_made == 2

    @pytest.mark.requirement("W-86", "X-37")
    async def test_permanent_errors_are_known_by_class_across_processes(self, kit: Kit) -> None:
        """The class itself cannot travel; its name must do."""
        stored = await self._fail(kit, "own", permanent_errors=(handlers.Overdrawn,))

        assert (stored.failed_reason, stored.attempts_made) == ("balance is 3", 1)

    @pytest.mark.requirement("W-86")
    async def test_signals_work_across_processes(self, kit: Kit) -> None:
        """PermanentError ends it at once, DelayJob counts no attempt."""
        stopped = await self._fail(kit, "permanent")
        delayed = await self._fail(kit, "delay")

        assert (stopped.failed_reason, stopped.attempts_made) == ("never again", 1)
        assert (delayed.attempts_made, delayed.attempts_started) == (1, 2)

    @pytest.mark.requirement("W-86", "X-127")
    async def test_a_value_that_cannot_be_stored_fails_the_job(self, kit: Kit) -> None:
        """Running it again would end here again."""
        stored = await self._fail(kit, "unstorable")

        assert "return value" in (stored.failed_reason or "")
        assert stored.attempts_made == 1

    @pytest.mark.requirement("W-86")
    @pytest.mark.parametrize(("how", "code"), [("crash", "-11"), ("exit", "7")])
    async def test_a_crash_fails_only_that_job(self, kit: Kit, how: str, code: str) -> None:
        """A segmentation fault in an extension must not take the worker and its other jobs down."""
        queue = kit.queue()
        bad = await queue.add("fail", {"how": how}, attempts=1)
        good = await queue.add("fail", {"how": "nothing"})

        await kit.drain(handlers.failing, 2, processes=True, concurrency=2)

        stored = await queue.get_job(bad.id)
        assert stored is not None
        assert f"exit code {code}" in (stored.failed_reason or "")
        assert await good.state() == "completed"

    @pytest.mark.requirement("W-86")
    async def test_a_child_is_killed_when_time_is_up(self, kit: Kit) -> None:
        """A thread could not be stopped; a process can."""
        job = await kit.queue().add("endless", attempts=1)

        await kit.drain(handlers.endless, 1, processes=True, timeout=300)

        stored = await kit.queue().get_job(job.id)
        assert stored is not None
        assert "timed out after 300 ms" in (stored.failed_reason or "")

    @pytest.mark.requirement("W-86", "X-29")
    async def test_closing_kills_the_child_and_gives_the_job_back(self, kit: Kit) -> None:
        """What is unfinished at the end of `close` goes to the front of the line with no attempt counted."""
        job = await kit.queue().add("endless")
        told = await kit.work(handlers.endless, processes=True)
        await told.wait("active")

        await told.worker.close(0)

        assert kit.ids("wait") == [job.id]
        assert "atm" not in kit.fields(job.id)

    @pytest.mark.requirement("W-86")
    @pytest.mark.leaves_jobs_active
    async def test_children_die_with_their_parent(self, kit: Kit) -> None:
        """A killed worker must not leave a process behind that goes on charging cards."""
        await kit.queue().add("endless")
        with Child.code(WORKER_SCRIPT, kit.url, kit.name) as worker:
            line = await worker.seen(r"running (\d+)")
            child_pid = int(line.split()[-1])

            worker.kill()

            wait_until_gone(child_pid)


class TestBorders:
    """What a handler starts, and what is left of a child, has no say in the worker."""

    @pytest.mark.requirement("W-86")
    @pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the files of a process are told by /proc")
    async def test_what_a_handler_starts_or_forks_cannot_speak_to_the_worker(self, kit: Kit) -> None:
        """A converter that an uploaded file took over would give orders to the server with the worker's rights."""
        job = await kit.queue().add("start")

        await kit.drain(handlers.starting_programs, 1, processes=True)

        stored = (await kit.queue().get_job(job.id)) or pytest.fail("job is gone")
        assert stored.return_value == {"started": [], "forked": []}

    @pytest.mark.requirement("W-86")
    async def test_a_dead_child_is_noticed_although_somebody_holds_its_socket_open(self, kit: Kit) -> None:
        """The process is watched, not the socket."""
        job = await kit.queue().add("die", attempts=1)
        told = await kit.work(handlers.leaving_a_heir, processes=True)

        await told.wait("failed", within_s=10)

        stored = (await kit.queue().get_job(job.id)) or pytest.fail("job is gone")
        assert "exit code 3" in (stored.failed_reason or "")

    @pytest.mark.requirement("W-86")
    async def test_a_child_that_died_while_idle_is_replaced_before_the_next_job(self, kit: Kit) -> None:
        """The job that came next failed without having run."""
        told = await kit.work(handlers.where, processes=True)
        before = children()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await kit.until(lambda: len(children()) == 1 and children() != before, "another child")

        job = await kit.queue().add("where", attempts=1)
        await told.finished(1)

        assert await job.state() == "completed"

    @pytest.mark.requirement("W-86")
    @pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells whether a message was read")
    @pytest.mark.parametrize("size", [1, 1_000_000])
    async def test_a_child_that_dies_before_it_reads_the_job_does_not_fail_it(self, kit: Kit, size: int) -> None:
        """It was alive when it got the job, and gone before it looked: nothing of the handler has run."""
        told = await kit.work(handlers.where, processes=True, concurrency=1)
        before = children()
        for pid in before:
            os.kill(pid, signal.SIGSTOP)
        job = await kit.queue().add("where", {"text": "x" * size}, attempts=1)
        await kit.until(lambda: kit.redis.llen(f"{kit.base}active") == 1, "the job is taken")
        await asyncio.sleep(0.1)  # until it has been sent to a child that cannot read it
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await told.finished(1)

        assert await job.state() == "completed"
        assert ((await kit.queue().get_job(job.id)) or job).attempts_made == 1

    @pytest.mark.requirement("W-86")
    @pytest.mark.parametrize(
        "how",
        [
            *("action", "attribute", "other job", "arguments", "garbage", "no message", "unknown kind", "wrong types"),
            "no json",
        ],
    )
    async def test_a_child_that_misbehaves_ends_and_nobody_else(self, kit: Kit, how: str) -> None:
        """It may ask for six things, and only for the job that it runs."""
        queue = kit.queue()
        other = await queue.add("other", {"how": "well"}, delay=3_600_000)
        bad = await queue.add("bad", {"how": how, "other": other.id}, attempts=1)
        good = await queue.add("good", {"how": "well"})

        await kit.drain(handlers.misbehaving, 2, processes=True)

        stored = (await queue.get_job(bad.id)) or pytest.fail("job is gone")
        assert "because it sent" in (stored.failed_reason or "")
        assert await good.state() == "completed"
        assert await other.logs() == []


class TestLimits:
    """What one job may use of the machine; the jobs beside and after it are none the wiser."""

    LIMITS = ChildLimits(memory_mb=256, cpu_ms=1_000, open_files=64)

    @pytest.mark.parametrize(
        ("handler", "too_much", "told"),
        [
            (handlers.using, {"megabytes": 400}, "MemoryError"),
            (handlers.using_on_a_loop, {"megabytes": 400}, "MemoryError"),
            (handlers.using, {"seconds": 30}, "it used more than 1 s of processor time"),
            (handlers.using, {"files": 100}, "Too many open files"),
        ],
        ids=["memory", "memory on a loop", "processor", "files"],
    )
    async def test_a_job_that_uses_too_much_fails_and_nobody_else(
        self, kit: Kit, handler: Callable[[Job], Any], too_much: dict[str, int], told: str
    ) -> None:
        queue = kit.queue()
        greedy = await queue.add("greedy", too_much, attempts=1)
        modest = await queue.add("modest", {"megabytes": 20, "files": 10})

        heard = await kit.drain(handler, 2, processes=self.LIMITS)

        ((failed, error),) = heard.of("failed")
        assert (failed.id, told in f"{type(error).__name__} {error} {failed.failed_reason}") == (greedy.id, True)
        ((completed, *_),) = heard.of("completed")
        assert completed.id == modest.id

    async def test_processor_time_is_counted_per_job_and_not_per_child(self, kit: Kit) -> None:
        """Together they use more than one may. (The system counts in ticks: on a busy machine more than was used.)"""
        queue = kit.queue()
        for _ in range(4):
            await queue.add("work", {"seconds": 0.8})

        heard = await kit.drain(handlers.using, 4, processes=ChildLimits(cpu_ms=2_000))

        assert len(heard.of("completed")) == 4

    async def test_what_is_not_limited_is_not(self, kit: Kit) -> None:
        job = await kit.queue().add("large", {"megabytes": 400})

        await kit.drain(handlers.using, 1, processes=ChildLimits(cpu_ms=10_000))

        stored = (await kit.queue().get_job(job.id)) or pytest.fail("job is gone")
        assert stored.return_value == 400

    @pytest.mark.parametrize("wrong", [{"memory_mb": 1}, {"cpu_ms": 0}, {"open_files": 3}, {"memory_mb": "much"}])
    def test_limits_with_which_no_child_can_live_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(InvalidOption):
            ChildLimits(**wrong)


class TestStart:
    @pytest.mark.requirement("W-86", "X-48")
    @pytest.mark.parametrize(
        "handler",
        [lambda job: None, partial(handlers.where), Worker("q", handlers.where, connection="redis://x").close],
    )
    def test_a_handler_that_no_child_can_import_is_refused(self, handler: object) -> None:
        """Found out when the worker is made, not at the first job."""
        with pytest.raises(InvalidOption, match="top level of a module"):
            Worker("q", handler, connection="redis://localhost", processes=True)  # type: ignore[arg-type]

    @pytest.mark.requirement("W-86")
    async def test_a_module_that_does_not_import_is_told_at_start(self, kit: Kit) -> None:
        """The reason stands in the message; the worker does not start."""

        def moved(job: Job) -> None: ...

        moved.__qualname__ = "moved_away"
        worker = kit.worker(moved, processes=True)

        with pytest.raises(InvalidOption, match="moved_away"):
            await worker.start()

    @pytest.mark.requirement("W-86")
    async def test_as_many_children_as_can_run_are_ready_before_the_first_job(self, kit: Kit) -> None:
        """The first jobs of a burst must not wait for a process to start; and more processes than cores help nobody."""
        await kit.work(handlers.where, processes=True, concurrency=64)

        assert len(children()) == os.cpu_count()


def children() -> list[int]:
    """Processes that run handlers for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"bullpen.worker.children.child" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found

"""Starting, stopping and watching a worker: in any order, any number of times, with nothing left behind."""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
import os
import re
import signal
import socket
import threading
import time
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen._kernel.lifecycle import AlreadyStopped
from bullpen.queue import Job, Queue, RateLimit
from bullpen.redis import Connection
from bullpen.testing import Child, free_port
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.forks import WarmChild
from tests.queue._kit import PATIENCE_S, Gate, Kit, Told, echo, engine_of, nothing, soon
from tests.queue.test_locks_and_stalls import check_stalled


class TestClose:
    @pytest.mark.requirement("X-121")
    async def test_close_waits_for_running_jobs_and_takes_no_more(self, kit: Kit) -> None:
        """When it returns, what ran is settled and what waited still waits."""
        gate = Gate("done")
        jobs = await kit.queue().add_many([("a", None), ("b", None)])
        told = await kit.work(gate)
        await gate.reached()

        closing = asyncio.ensure_future(told.worker.close())
        await asyncio.sleep(0)
        assert not closing.done()
        gate.open()
        await soon(closing)

        assert told.ids("completed") == [jobs[0].id]
        assert kit.ids("wait") == [jobs[1].id]
        assert (kit.ids("active"), kit.lock(jobs[0].id)) == ([], None)

    @pytest.mark.requirement("X-121")
    async def test_after_its_time_a_job_is_given_back_to_the_front(
        self, kit: Kit, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Cancelled first, given back second, with no attempt counted: another worker starts where nobody runs it."""
        events: list[str] = []
        jobs = await kit.queue().add_many([("a", None), ("b", None)])

        async def slow(job: Job) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)  # cleaning up takes a moment
                events.append(f"cleaned up, active is {kit.ids('active')}")

        told = await kit.work(slow)
        await told.wait("active")
        await soon(told.worker.close(timeout=20))

        assert f"jobs '{jobs[0].id}' did not end within 0.02 s (close_timeout); they are cancelled" in caplog.text
        assert events == [f"cleaned up, active is {[jobs[0].id]}"]
        assert kit.ids("wait") == [jobs[0].id, jobs[1].id]
        assert (kit.ids("active"), kit.lock(jobs[0].id)) == ([], None)
        stored = kit.fields(jobs[0].id)
        assert (stored["ats"], "atm" in stored, "failedReason" in stored) == ("1", False, False)
        assert [job.id for (job,) in told.of("returned")] == [jobs[0].id]
        assert kit.event_names(jobs[0].id)[-1] == "waiting"
        assert kit.marker() == {"0": 0}

    async def test_what_is_given_back_stands_in_its_old_order(self, kit: Kit) -> None:
        """Each goes to the front, before those that went back already."""
        jobs = await kit.queue().add_many([("a", n) for n in range(6)])
        gate = Gate()
        told = await kit.work(gate, concurrency=4)
        await gate.reached(4)

        await soon(told.worker.close(timeout=0))

        assert kit.ids("wait") == [job.id for job in jobs]

    async def test_the_time_may_be_an_option(self, kit: Kit) -> None:
        """Deployments know how long their platform waits before it kills."""
        gate = Gate()
        job = await kit.queue().add("a")
        told = await kit.work(gate, close_timeout=30)
        await gate.reached()

        await soon(told.worker.close(), within_s=5)

        assert gate.cancelled
        assert kit.ids("wait") == [job.id]

    async def test_a_second_close_may_be_in_a_hurry(self, kit: Kit) -> None:
        """The first waits patiently; the second, with no time at all, ends the wait for both."""
        gate = Gate()
        job = await kit.queue().add("a")
        told = await kit.work(gate)
        await gate.reached()
        patient = asyncio.ensure_future(told.worker.close(timeout=60_000))
        await asyncio.sleep(0)

        await soon(told.worker.close(timeout=0), within_s=5)

        assert patient.done() or await soon(patient, within_s=1) is None
        assert kit.ids("wait") == [job.id]

    async def test_a_handler_that_swallows_the_cancellation_is_given_back_too(self, kit: Kit) -> None:
        """Cancelled, but it returned a value: the job is given back, because nobody can tell what was done."""
        job = await kit.queue().add("a")

        async def stubborn(job: Job) -> str:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                return "finished anyway"
            return ""

        told = await kit.work(stubborn)
        await told.wait("active")
        await soon(told.worker.close(timeout=0))

        assert kit.ids("wait") == [job.id]
        assert "returnvalue" not in kit.fields(job.id)

    async def test_a_thread_that_still_runs_is_not_given_back(self, kit: Kit) -> None:
        """Nobody can stop it; giving its job away would make two runs overlap. Its lock runs out by itself."""
        release, ended = threading.Event(), threading.Event()

        def stuck(job: Job) -> None:
            release.wait(20)
            ended.set()

        job = await kit.queue().add("a")
        told = await kit.work(stuck, lock=400)
        await told.wait("active")

        await soon(told.worker.close(timeout=0))  # the thread waits longer than we do
        left_behind = kit.ids("active"), kit.ids("wait")
        release.set()
        await asyncio.to_thread(ended.wait, 10)
        await kit.until(lambda: told.worker.running == 0, "the thread's task has ended")

        assert left_behind == ([job.id], [])
        assert told.of("completed") == []
        await kit.until(lambda: kit.lock(job.id) is None, "the lock runs out")
        # Twice: one marks it, unless the worker's own first check has done so, the other finds it marked.
        assert check_stalled(kit)[1] + check_stalled(kit)[1] == [job.id]

    @pytest.mark.many
    async def test_closed_at_any_moment_nothing_stays_active(self, kit: Kit) -> None:
        """Whichever step a close meets (connecting, taking, starting a handler), the job is done or back in line."""
        queue = kit.queue()
        job = await queue.add("a", attempts=1)
        moments = [*range(40), *range(40, 400, 12)]

        for ticks in moments:
            worker = kit.worker(Gate())
            await worker.start()
            for _ in range(ticks):
                await asyncio.sleep(0)
            await soon(worker.close(timeout=0))
            assert (kit.ids("active"), kit.ids("wait"), kit.lock(job.id)) == ([], [job.id], None), (
                f"after {ticks} ticks"
            )

        assert "atm" not in kit.fields(job.id)

    async def test_a_take_in_flight_when_closing_is_not_lost(self, kit: Kit) -> None:
        """The server had given the job away already; it must come back although nobody ever ran it."""
        told = await kit.work(nothing)
        await kit.until(lambda: engine_of(told).driver.last_exchange, "the worker is idle")
        told.worker.pause()
        job = await kit.queue().add("a")
        await kit.until(lambda: kit.marker() == {"0": 0}, "the worker has passed the marker on")
        kit.command("CLIENT", "PAUSE", 150)

        told.worker.resume()
        for _ in range(20):
            await asyncio.sleep(0)
        await soon(told.worker.close())

        assert (kit.ids("active"), kit.lock(job.id)) == ([], None)
        assert kit.ids("wait") == [job.id] or list(kit.zset("completed")) == [job.id]


class TestOrder:
    async def test_stopping_twice_is_harmless(self, kit: Kit) -> None:
        """One after the other and at the same time."""
        told = await kit.work(nothing)

        await soon(asyncio.gather(told.worker.close(), told.worker.close()))
        await soon(told.worker.close())

    async def test_stopping_before_the_start_means_it_never_starts(self, kit: Kit) -> None:
        """A program that is told to stop while it builds its workers."""
        await kit.queue().add("a")
        worker = kit.worker(nothing)

        await worker.close()
        with pytest.raises(AlreadyStopped, match="make a new one"):
            await worker.start()

        assert len(kit.ids("wait")) == 1

    async def test_starting_while_stopping_is_refused(self, kit: Kit) -> None:
        """A stopped worker does not come back; a new one is cheap."""
        gate = Gate()
        await kit.queue().add("a")
        told = await kit.work(gate)
        await gate.reached()
        closing = asyncio.ensure_future(told.worker.close())
        await asyncio.sleep(0)

        with pytest.raises(AlreadyStopped):
            await told.worker.start()

        gate.open()
        await soon(closing)

    @pytest.mark.parametrize("ticks", range(8))
    async def test_stopping_while_starting_stops(self, kit: Kit, ticks: int) -> None:
        """Whichever step the start has reached."""
        worker = kit.worker(nothing)
        starting = asyncio.ensure_future(worker.start())
        for _ in range(ticks):
            await asyncio.sleep(0)

        await soon(worker.close())
        await asyncio.wait([starting])

        assert starting.exception() is None or isinstance(starting.exception(), AlreadyStopped)
        assert not worker.is_alive
        await kit.queue().add("a")
        assert kit.ids("wait") == ["1"]

    async def test_two_callers_of_start_share_one(self, kit: Kit) -> None:
        """`start` beside `async with` is no mistake worth an error."""
        worker = kit.worker(echo)

        await asyncio.gather(worker.start(), worker.start())
        async with worker:
            job = await kit.queue().add("a", 5)
            assert await soon(job.result()) == 5

    async def test_the_context_manager_starts_and_closes(self, kit: Kit) -> None:
        """And waits for running jobs on the way out."""
        job = await kit.queue().add("a")
        gate = Gate("done")

        async with kit.worker(gate):
            await gate.reached()
            gate.open()

        assert kit.fields(job.id)["returnvalue"] == '"done"'

    async def test_run_works_until_closed(self, kit: Kit) -> None:
        """The last line of most programs."""
        worker = kit.worker(echo)
        running = asyncio.ensure_future(worker.run(signals=False))
        job = await kit.queue().add("a", 5)
        assert await soon(job.result()) == 5

        await worker.close()

        await soon(running)


PROGRAM = """
import asyncio, logging, sys
from bullpen.worker import Worker

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")

async def handle(job):
    print("started", job.id, flush=True)
    await asyncio.sleep(job.data["seconds"])
    print("done", job.id, flush=True)

async def main():
    worker = Worker({queue!r}, handle, connection={url!r}, close_timeout=30_000)
    await worker.run({signals})
    print("ended", flush=True)

asyncio.run(main())
"""


class TestSignals:
    def program(self, kit: Kit, signals: str = "") -> Child:
        return WarmChild.code(PROGRAM.format(queue=kit.name, url=kit.url, signals=signals))

    @pytest.mark.requirement("X-121")
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    async def test_the_first_signal_lets_running_jobs_finish(self, kit: Kit, number: signal.Signals) -> None:
        """A rolling deployment sends one; nothing is repeated and nothing new is begun."""
        queue = kit.queue()
        first, second = await queue.add("a", {"seconds": 0.3}), await queue.add("b", {"seconds": 0.3})
        # Whoever measures coverage handles SIGTERM in children: the worker must be asked to. SIGINT shows the default.
        with self.program(kit, "signals=True" if number == signal.SIGTERM else "") as program:
            await program.seen(f"started {first.id}")
            os.kill(program.pid, number)

            code = await program.ended()

            assert code == 0, program.errors
            assert f"done {first.id}" in program.output
            assert "ended" in program.output
            assert f"{number.name}, no more jobs are taken; 1 still run" in program.output
        assert list(kit.zset("completed")) == [first.id]
        assert kit.ids("wait") == [second.id]

    @pytest.mark.requirement("X-121")
    async def test_the_second_signal_gives_running_jobs_back(self, kit: Kit) -> None:
        """The operator is in a hurry: handlers are cancelled and their jobs are free for others at once."""
        job = await kit.queue().add("a", {"seconds": 60})
        with self.program(kit, "signals=True") as program:
            await program.seen(f"started {job.id}")
            program.terminate()
            await program.seen("no more jobs are taken")

            program.terminate()
            code = await program.ended()

            assert code == 0, program.errors
        assert kit.ids("wait") == [job.id]
        assert (kit.ids("active"), kit.lock(job.id)) == ([], None)
        assert "atm" not in kit.fields(job.id)

    async def test_a_program_may_keep_its_own_handlers(self, kit: Kit) -> None:
        """`signals=False`: the worker is a guest in somebody's process."""
        job = await kit.queue().add("a", {"seconds": 60})
        with self.program(kit, "signals=False") as program:
            await program.seen(f"started {job.id}")

            program.terminate()

            assert await program.ended() == -signal.SIGTERM
        kit.redis.delete(f"{kit.base}{job.id}:lock")
        check_stalled(kit)


class TestCallbacks:
    async def test_callbacks_may_be_plain_or_async_and_get_the_details(self, kit: Kit) -> None:
        """Each event has its documented arguments; `close` waits for what async ones still do."""
        seen: list[Any] = []
        worker = kit.worker(echo)

        async def slow(job: Job, value: bytes) -> None:
            await asyncio.sleep(0.01)
            seen.append(("async", job.id, value))

        worker.on("completed", slow)
        worker.on("completed", lambda job, value: seen.append(("plain", job.id, value)))
        worker.on("active", lambda job: seen.append(("active", job.id)))
        job = await kit.queue().add("a", 5)
        await worker.start()
        await soon(job.result())
        await worker.close()

        assert seen == [("active", job.id), ("plain", job.id, 5), ("async", job.id, 5)]

    async def test_on_may_be_used_as_a_decorator(self, kit: Kit) -> None:
        """It returns what it was given."""
        worker = kit.worker(nothing)

        def callback(job: Job) -> None: ...

        assert worker.on("active", callback) is callback

    async def test_a_failing_callback_harms_no_job(self, kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
        """It is logged; the job is settled as if nobody had listened."""

        async def broken_async(*_: Any) -> None:
            raise RuntimeError("async callback")

        def broken(*_: Any) -> None:
            raise RuntimeError("plain callback")

        worker = kit.worker(nothing)
        told = Told(worker)
        for callback in (broken, broken_async):
            worker.on("active", callback)
            worker.on("completed", callback)
        jobs = await kit.queue().add_many([("a", None), ("b", None)])
        with caplog.at_level(logging.ERROR, logger="bullpen.worker"):
            await worker.start()
            await told.finished(2)
            await worker.close()

        assert list(kit.zset("completed")) == [job.id for job in jobs]
        assert sum("callback" in record.message for record in caplog.records) == 8

    async def test_telemetry_tells_the_same(self, kit: Kit) -> None:
        """Logs, counters and spans are listeners of one place; ids and names, never payloads."""
        seen: list[tuple[str, Any, Any]] = []
        end = telemetry.subscribe(lambda event, fields: seen.append((event, fields.get("queue"), fields.get("job_id"))))
        try:
            job = await kit.queue().add("a", {"secret": 1})
            worker = kit.worker(nothing)
            await worker.start()
            await soon(job.result())
            await kit.until(lambda: any(name == "job.completed" for name, _, _ in seen), "it is told")
        finally:
            end()

        assert ("job.active", kit.name, job.id) in seen
        assert ("job.completed", kit.name, job.id) in seen


class TestIdentity:
    @pytest.mark.requirement("Q-11")
    async def test_a_worker_is_named_after_host_and_process(self, kit: Kit) -> None:
        """Whoever reads `workerId` finds the machine and the process."""
        worker = kit.worker(nothing)
        host = re.sub(r"[^!-9;-~]", "", socket.gethostname())

        assert re.fullmatch(rf"{re.escape(host)}-{os.getpid()}-[0-9a-f]+", worker.name)
        assert worker.name != kit.worker(nothing).name

    async def test_a_name_may_be_given_and_is_cleaned(self, kit: Kit) -> None:
        """Connection names hold neither spaces nor colons."""
        assert kit.worker(nothing, name="mail worker:1").name == "mailworker1"

    async def test_workers_are_found_in_the_client_list_also_after_a_reconnect(self, kit: Kit) -> None:
        """That list is BullMQ's registry of workers: prefix, base64 of the queue's name, `:w:`, worker's name."""
        expected = f"name=bull:{base64.b64encode(kit.name.encode()).decode()}:w:w1 "
        await kit.work(nothing, name="w1")

        def named() -> list[str]:
            return [line for line in kit.clients() if expected in line]

        [line] = await kit.until(named, "the worker is listed")
        first = re.search(r"\bid=(\d+)", line)
        assert first is not None
        kit.command("CLIENT", "KILL", "ID", first[1])

        await kit.until(lambda: named() and f"id={first[1]} " not in named()[0], "it is listed again")

    async def test_ready_means_that_it_looked_recently(self, kit: Kit) -> None:
        """An open connection is no proof; a worker that has not looked for jobs for long gets none."""
        worker = kit.worker(nothing)
        before = (worker.is_alive, worker.is_ready)
        await worker.start()
        await kit.until(lambda: worker.is_ready, "it has looked")

        engine_of(worker).driver.last_exchange = time.monotonic() - 3_600
        silent = (worker.is_alive, worker.is_ready)
        await kit.queue().add("a")
        await kit.until(lambda: worker.is_ready, "it has looked again")
        await worker.close()

        after = (worker.is_alive, worker.is_ready)
        assert (before, silent, after) == ((False, False), (True, False), (False, False))

    @pytest.mark.parametrize("why", ["full", "paused", "limited"])
    async def test_a_worker_that_may_not_take_is_alive_and_ready(self, kit: Kit, why: str) -> None:
        """A probe that restarts it would end the very job that keeps it busy, again and again."""
        gate = Gate()
        limit = RateLimit(1, 3_600_000) if why == "limited" else None
        told = await kit.work(gate if why == "full" else nothing, limit=limit, drain_delay=5)
        worker = told.worker
        await kit.until(lambda: worker.is_ready, "it has looked")
        if why == "paused":
            worker.pause()
        else:
            await kit.queue().add_many(("n", n) for n in range(2))
            await kit.until(lambda: told.ids("active" if why == "full" else "completed"), "the first was taken")
            await kit.until(
                lambda: worker.running == 1 or engine_of(told).driver.state.limited_until, "no more may be taken"
            )

        engine_of(told).driver.last_exchange = time.monotonic() - 3_600  # an hour without a look
        states = (worker.is_alive, worker.is_ready)
        gate.open()
        await worker.close()

        assert states == (True, True)

    async def test_a_worker_is_alive_while_its_loop_answers_and_its_locks_are_renewed(self, kit: Kit) -> None:
        """What only a restart mends: asked from another thread while a handler holds the loop."""
        told = await kit.work(nothing, max_block=200)
        worker = told.worker
        release = threading.Event()
        await kit.until(lambda: worker.is_alive, "it runs")

        async def watch() -> bool:
            def blocked() -> bool:
                while worker.is_alive:
                    time.sleep(0.01)
                release.set()
                return True

            return await asyncio.to_thread(blocked)

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        release.wait(30)  # the loop does not answer

        assert await watching
        await kit.until(lambda: worker.is_alive, "the loop answers again")


class Callable:
    async def __call__(self, job: Job) -> str:
        return "called"

    async def method(self, job: Job) -> str:
        return "called"

    def plain(self, job: Job) -> str:
        return "called"


async def with_more(extra: str, job: Job) -> str:
    return extra


class TestHandlers:
    @pytest.mark.parametrize(
        "handler",
        [Callable(), Callable().method, Callable().plain, functools.partial(with_more, "called"), lambda job: "called"],
        ids=["object", "method", "plain method", "partial", "lambda"],
    )
    async def test_anything_that_can_be_called_is_a_handler(self, kit: Kit, handler: Any) -> None:
        """Async or not is found out once, when the worker is made."""
        await kit.queue().add("a")

        told = await kit.drain(handler, 1)

        assert told.of("completed")[0][1] == "called"

    async def test_several_workers_share_a_queue(self, kit: Kit) -> None:
        """Each job once, whoever takes it."""
        await kit.queue().add_many(("n", n) for n in range(100))

        workers = [await kit.work(nothing, concurrency=3) for _ in range(3)]
        await kit.until(lambda: len(kit.zset("completed")) == 100, "all are done")
        await asyncio.gather(*(told.worker.close() for told in workers))

        done = [job_id for told in workers for job_id in told.ids("completed")]
        assert sorted(done, key=int) == [str(n) for n in range(1, 101)]

    async def test_a_worker_of_another_prefix_sees_nothing(self, kit: Kit) -> None:
        """The prefix is part of the queue's identity."""
        job = await kit.queue(prefix="shop").add("a", 5)
        told = await kit.work(nothing)
        await kit.until(lambda: engine_of(told).driver.last_exchange, "it has looked")

        async with kit.worker(echo, prefix="shop"):
            assert await soon(job.result()) == 5

        assert told.all == []

    async def test_a_worker_without_a_server_waits_and_can_be_closed(self, kit: Kit) -> None:
        """Start order of containers is nobody's to know; the worker is alive and not ready, and stops when told."""
        nowhere = Connection(f"redis://127.0.0.1:{free_port()}", command_timeout_ms=200)
        worker = Worker(kit.name, nothing, connection=nowhere)
        await soon(worker.start())

        assert (worker.is_alive, worker.is_ready) == (True, False)
        await soon(worker.close())

    async def test_a_server_that_refuses_ends_no_worker(self, kit: Kit) -> None:
        """Somebody's key stands where meta belongs: told once, tried again, and on when it is gone."""
        kit.redis.set(kit.base + "meta", "in the way")
        told = await kit.work(nothing, events_max_len=50)
        (error,) = await told.wait("error")

        kit.redis.delete(kit.base + "meta")
        job = await kit.queue().add("a")
        await told.finished()

        assert "WRONGTYPE" in str(error)
        assert told.ids("completed") == [job.id]


@pytest.mark.requirement("X-29", "X-121")
async def test_a_worker_without_jobs_does_not_wait_for_a_server_that_is_away(start_server: StartServer) -> None:
    """Nothing is left to tell; a deployment that stops during an outage must not hang for a command's timeout."""
    server = start_server()
    connection = Connection(server.url, command_timeout_ms=600_000)
    worker = Worker("idle", nothing, connection=connection)
    await worker.start()
    server.kill()
    async with asyncio.timeout(PATIENCE_S):
        while not engine_of(worker).door.is_lost:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)

    await soon(worker.close())

    await connection.aclose()


@pytest.mark.requirement("X-128")
async def test_a_worker_of_a_queue_that_never_had_a_job_leaves_only_what_goes_by_itself(kit: Kit) -> None:
    told = await kit.work(nothing)
    await kit.until(lambda: engine_of(told).driver.last_exchange, "the worker has looked in vain")
    await told.worker.close()

    keys: list[bytes] = list(kit.redis.scan_iter(f"{kit.base}*"))
    assert keys
    assert all(0 < kit.redis.pttl(key) <= 60_000 for key in keys)


async def test_a_worker_that_waited_for_its_server_runs_what_it_takes(
    start_server: StartServer, queue_name: str
) -> None:
    """What it learned of the server's clock from a call that waited for a connection would make fresh answers look
    late, and their jobs would go back unrun."""
    server = start_server("valkey", persistent=True)
    async with Queue(queue_name, connection=server.url) as queue:
        await queue.add_many([("early", number) for number in range(20)])
    server.stop()
    ran: list[int] = []
    returned: list[str] = []
    done = asyncio.Event()

    async def handle(job: Job) -> None:
        ran.append(job.data)
        if len(ran) == 20:
            done.set()

    async with Worker(queue_name, handle, connection=server.url, lock=1_000) as worker:
        worker.on("returned", lambda job: returned.append(job.id))
        await asyncio.sleep(1.5)
        await asyncio.to_thread(server.restart)
        await asyncio.wait_for(done.wait(), 20)

    assert sorted(ran) == list(range(20))
    assert returned == []


@pytest.mark.parametrize("close_timeout_ms", [0, 1_000])
async def test_closing_beside_a_frozen_server_has_one_deadline(
    start_server: StartServer, queue_name: str, close_timeout_ms: int
) -> None:
    """The time for running jobs, half a second for those that are cancelled, and one command: not that of each step."""
    server = start_server("valkey")
    connection = Connection(server.url, command_timeout_ms=2_000)
    gate = Gate()
    worker = Worker(queue_name, gate, connection=connection, concurrency=3, lock=1_000)
    async with Queue(queue_name, connection=server.url) as queue:
        await queue.add("a")
        await worker.start()
        await queue.add("later", delay=60_000)
        await gate.reached()
        await asyncio.sleep(0.5)  # the free slots are lent to a blocked read
        server.pause()
        await asyncio.sleep(0.4)  # the lock keeper waits for an answer too
        began = time.monotonic()
        await worker.close(close_timeout_ms)
        took_s = time.monotonic() - began
        server.resume()

    assert took_s < close_timeout_ms / 1000 + 0.5 + 2.0 + 0.5
    assert gate.cancelled

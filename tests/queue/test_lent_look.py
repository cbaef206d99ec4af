"""An idle worker's look waits at the server, behind the blocked read: a job that is added starts a round trip earlier.

The slot that is lent must come back whenever it is needed elsewhere, and nothing may be lost or doubled with the read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bullpen import sync
from bullpen.queue import Job
from bullpen.testing import FaultProxy, RedisServer
from bullpen.wire.scripts import SCRIPTS
from tests.queue._kit import Gate, Kit, Told, engine_of, nothing, soon
from tests.queue.test_wakeups import SLEEP_MS, idle

EXCHANGE = SCRIPTS["exchange"].sha1


@pytest.fixture
def proxy(redis_server: RedisServer, kit: Kit) -> Iterator[FaultProxy]:
    for script in SCRIPTS.values():
        kit.command("SCRIPT", "LOAD", script.body)
    with FaultProxy(redis_server) as opened:
        yield opened


@pytest.mark.requirement("Q-60")
async def test_the_server_begins_the_look_by_itself(kit: Kit, proxy: FaultProxy) -> None:
    """With the way to the server closed, a look that is sent only after the marker came could not be run."""
    gate = Gate()
    told = await idle(kit, gate, connection=proxy.url)
    queue = kit.queue()

    with proxy.stalled(requests=True, replies=False):
        await queue.add("a")
        await gate.reached(1)

    gate.open()
    await told.finished()


@pytest.mark.requirement("Q-60")
@pytest.mark.parametrize(("callers", "concurrency"), [(3, 3), (3, 50), (10, 10)])
async def test_handlers_that_pause_and_callers_that_wait_meet_no_foreign_lock(
    kit: Kit, callers: int, concurrency: int
) -> None:
    """Some jobs end while the outcome of another is on its way. The read went out twice then: the jobs of the first one
    ran with the token of the second, lost their outcomes and came back when their locks had ended, half a minute
    later."""

    async def pause(job: Job) -> Any:
        await asyncio.sleep(0)
        return job.data

    queue = kit.queue()
    told = await kit.work(pause, concurrency=concurrency)

    async def ask(caller: int) -> None:
        for number in range(100):
            job = await queue.add("n", [caller, number])
            assert await job.result(20_000) == [caller, number]

    await asyncio.gather(*(ask(caller) for caller in range(callers)))

    assert told.of("lock_lost") == []
    assert len(told.of("active")) == callers * 100


async def test_the_slot_is_lent_once_whatever_the_concurrency(kit: Kit) -> None:
    """The look behind the read and those of the pumps together never take more than there are slots."""
    gate = Gate()
    told = await idle(kit, gate, concurrency=3)

    await kit.queue().add_many(("n", n) for n in range(10))
    await gate.reached(3)
    await asyncio.sleep(0.1)

    assert told.worker.running == 3
    assert len(kit.ids("active")) == 3
    gate.open()
    await told.finished(10)


@pytest.mark.parametrize("concurrency", [1, 2])
async def test_a_due_job_starts_although_the_last_slot_is_lent(kit: Kit, concurrency: int) -> None:
    """The marker that told of it is used up; our own timer gets the slot back from the read."""
    queue = kit.queue()
    told = await idle(kit, concurrency=concurrency)

    await queue.add("later", delay=300)

    await told.finished()
    started_ms = int(kit.fields(told.ids("completed")[0])["processedOn"])
    due_ms = int(kit.fields(told.ids("completed")[0])["timestamp"]) + 300
    assert started_ms >= due_ms


@pytest.mark.parametrize("torn", [False, True], ids=["dropped", "torn in half"])
async def test_a_lost_reply_of_the_look_loses_no_job_and_runs_none_twice(
    kit: Kit, proxy: FaultProxy, torn: bool
) -> None:
    """The server took the job for us; the call is repeated with its number and brings the same job."""
    told = await idle(kit, connection=proxy.url)
    queue = kit.queue()
    # The look that waits now was sent before this order. The next call settles the first job, and the one after it is
    # the look that waits again.
    lost = proxy.lose_reply(EXCHANGE, skip=1, torn=torn)
    await queue.add("first")
    await told.finished(1)
    await kit.until(lambda: any("bzpopmin" in line for line in kit.clients()), "armed again")
    assert lost.count == 0

    await queue.add("second")
    await told.finished(2)

    assert lost.count == 1
    assert [kit.fields(job_id)["ats"] for job_id in told.ids("completed")] == ["1", "1"]
    assert told.of("stalled") == []


async def test_a_cut_connection_costs_no_wake_up(kit: Kit) -> None:
    """What was lent with the connection is looked for through the other one, and the read is armed anew."""
    told = await idle(kit)
    queue = kit.queue()

    for number in range(5):
        for line in kit.clients():
            if "bzpopmin" in line and told.worker.name in line:
                kit.command("CLIENT", "KILL", "ID", line.split()[0].removeprefix("id="))
        await queue.add("a")
        await told.finished(number + 1)


class TestOutcome:
    """Of a job that ends alone: somebody may wait for its result, so it is sent where the handler ends."""

    @pytest.mark.parametrize("concurrency", [1, 30], ids=["one pump", "two pumps"])
    async def test_it_is_sent_before_anything_else_is_done(self, kit: Kit, concurrency: int) -> None:
        """The loop is blocked right behind the handler's last step."""
        blocked_until: list[bool] = []

        async def handle(job: Job) -> None:
            asyncio.get_running_loop().call_soon(block, job.id)

        def block(job_id: str) -> None:
            wait_until(lambda: job_id in kit.zset("completed"))
            blocked_until.append(True)

        told = await idle(kit, handle, concurrency=concurrency)

        await kit.queue().add("a")

        await told.finished()
        assert blocked_until == [True]

    @pytest.mark.parametrize("concurrency", [1, 30], ids=["one pump", "two pumps"])
    async def test_without_a_connection_it_waits_for_one(self, kit: Kit, concurrency: int) -> None:
        told: Told

        async def handle(job: Job) -> None:
            if job.name == "first":
                door = engine_of(told).door
                kit.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await kit.until(lambda: door.open_wire is None, "the connection is cut")

        told = await idle(kit, handle, concurrency=concurrency)
        queue = kit.queue()

        await queue.add("first")
        await told.finished()
        await idle_again(kit, told)
        await queue.add("second")
        await told.finished(2)

        assert [kit.fields(job_id)["ats"] for job_id in told.ids("completed")] == ["1", "1"]

    async def test_a_connection_that_goes_in_the_first_step_is_no_end_of_listening(self, kit: Kit) -> None:
        told: Told

        async def handle(job: Job) -> None:
            if job.name == "first":
                engine_of(told).door.break_wire("cut by the test")

        told = await idle(kit, handle)
        queue = kit.queue()

        await queue.add("first")
        await told.finished()
        await idle_again(kit, told)
        await queue.add("second")
        await told.finished(2)

    async def test_one_that_comes_while_another_is_in_flight_waits_for_its_answer(
        self, kit: Kit, proxy: FaultProxy
    ) -> None:
        """Calls are numbered and one at a time: sent at once, it would take the place of the one whose answer is lost
        here."""
        gates = {"slow": Gate(), "fast": Gate()}

        async def handle(job: Job) -> None:
            await gates[job.name](job)

        told = await idle(kit, handle, concurrency=2, connection=proxy.url)
        slow, fast = await kit.queue().add_many([("slow", None), ("fast", None)])
        await gates["slow"].reached()
        await gates["fast"].reached()

        proxy.stall(requests=False)
        gates["fast"].open()
        await kit.until(lambda: fast.id in kit.zset("completed"), "the server has settled it")
        proxy.stall()
        gates["slow"].open()
        await kit.until(lambda: told.worker.running == 0, "both have ended")
        proxy.reset()
        proxy.unstall()
        await told.finished(2)

        assert sorted(told.ids("completed")) == sorted([slow.id, fast.id])
        assert told.of("lock_lost") == []

    async def test_a_connection_that_is_cut_with_it_loses_nothing(self, kit: Kit, proxy: FaultProxy) -> None:
        """The reply is lost; the call is repeated with its number, and the worker goes on to listen."""
        told = await idle(kit, connection=proxy.url)
        queue = kit.queue()
        lost = proxy.lose_reply(EXCHANGE)

        await queue.add("first")
        await told.finished()
        await idle_again(kit, told)
        await queue.add("second")
        await told.finished(2)

        assert lost.count == 1
        assert [kit.fields(job_id)["ats"] for job_id in told.ids("completed")] == ["1", "1"]

    async def test_what_is_left_is_asked_for_with_it(self, kit: Kit) -> None:
        """Of a burst the look brings one job and says that there are more: then one call settles and takes."""
        told = await idle(kit)
        queue = kit.queue()
        await queue.add("first")
        await told.finished()
        await idle_again(kit, told)
        kit.command("CONFIG", "RESETSTAT")

        await queue.add_many(("n", n) for n in range(10))
        await told.finished(11)

        stats: Any = kit.redis.info("commandstats")
        # The add, the poll behind the read, nine that settle and take, and one that settles the last; perhaps the next
        # poll, for the marker that was set for others is still there.
        assert stats["cmdstat_evalsha"]["calls"] in (12, 13)


async def idle_again(kit: Kit, told: Told) -> None:
    await kit.until(
        lambda: any("bzpopmin" in line and told.worker.name in line for line in kit.clients()), "it is idle again"
    )


class TestSentAgain:
    """Behind a job that came and went alone the read is sent again by whoever reads the answer to its outcome: what
    holds for the first read holds for that one."""

    @pytest.fixture(params=[1, 2, 30], ids=["one slot", "two slots", "two pumps"])
    async def told(self, kit: Kit, proxy: FaultProxy, request: pytest.FixtureRequest) -> Told:
        async def handle(job: Job) -> None:
            if job.name == "fails once" and job.attempts_made == 0:
                raise ValueError("once")
            if job.name == "adds one":
                with sync.Queue(kit.name, connection=kit.url) as queue:
                    queue.add("next")

        told = await idle(kit, handle, concurrency=request.param, connection=proxy.url)
        for number in range(3):
            await kit.queue().add("before")
            await told.finished(number + 1)
            await idle_again(kit, told)
        return told

    async def test_each_job_costs_three_calls_and_one_read(self, kit: Kit, told: Told) -> None:
        """The add, the look behind the read, the outcome. The read that waits now was counted when it began."""
        queue = kit.queue()
        kit.command("CONFIG", "RESETSTAT")

        for number in range(5):
            await queue.add("a")
            await told.finished(4 + number)
            await idle_again(kit, told)

        stats: Any = kit.redis.info("commandstats")
        assert stats["cmdstat_evalsha"]["calls"] == 15
        assert stats["cmdstat_bzpopmin"]["calls"] == 5

    async def test_a_cut_connection_costs_no_wake_up(self, kit: Kit, told: Told) -> None:
        for line in kit.clients():
            if "bzpopmin" in line:
                kit.command("CLIENT", "KILL", "ID", line.split()[0].removeprefix("id="))

        await kit.queue().add("a")

        await told.finished(4)

    async def test_a_lost_answer_to_the_outcome_loses_nothing(self, kit: Kit, proxy: FaultProxy, told: Told) -> None:
        lost = proxy.lose_reply(EXCHANGE)

        for number in range(2):
            await kit.queue().add("a")
            await told.finished(4 + number)

        assert lost.count == 1
        assert {kit.fields(job_id)["ats"] for job_id in told.ids("completed")} == {"1"}

    async def test_a_pause_gets_the_slot_back(self, kit: Kit, told: Told) -> None:
        told.worker.pause()
        await kit.until(lambda: not any("bzpopmin" in line for line in kit.clients()), "the read has ended")

        job = await kit.queue().add("a")
        await asyncio.sleep(0.1)

        assert kit.ids("wait") == [job.id]
        told.worker.resume()
        await told.finished(4)

    async def test_a_close_gives_back_what_it_took(self, kit: Kit, proxy: FaultProxy, told: Told) -> None:
        with proxy.stalled(requests=False, replies=True):
            job = await kit.queue().add("a")
            await kit.until(lambda: kit.ids("active") == [job.id], "the server took it for us")
            closing = asyncio.create_task(told.worker.close())
            await asyncio.sleep(0.1)
        await soon(closing)

        assert kit.ids("wait") == [job.id]
        assert not kit.has(f"{job.id}:lock")

    async def test_a_due_job_is_started_in_time(self, kit: Kit, told: Told) -> None:
        """Its time comes with the look, and must be kept although the pump sleeps on."""
        job = await kit.queue().add("later", delay=200)

        await told.finished(4)

        fields = kit.fields(job.id)
        assert int(fields["processedOn"]) - int(fields["timestamp"]) >= 200

    async def test_a_retry_is_started_in_time(self, kit: Kit, told: Told) -> None:
        """The answer to its outcome says nothing of it: the marker that the script set does."""
        await kit.queue().add("fails once", attempts=2, backoff=50)

        await told.finished(4)

    async def test_the_end_of_a_job_is_told_before_the_next_begins(self, kit: Kit, told: Told) -> None:
        """The next is there when the outcome comes, so both answers come in one piece."""
        await kit.queue().add("adds one")

        await told.finished(5)

        assert [event for event, _ in told.all][-4:] == ["active", "completed", "active", "completed"]

    async def test_a_limit_is_kept(self, kit: Kit, told: Told) -> None:
        kit.command("HSET", kit.base + "meta", "max", 1, "duration", 300)
        queue = kit.queue()

        jobs = [await queue.add("a") for _ in range(2)]
        await told.finished(5)

        first, second = sorted(int(kit.fields(job.id)["processedOn"]) for job in jobs)
        assert second - first >= 290

    async def test_a_due_time_that_comes_with_a_job_is_kept(self, kit: Kit, told: Told) -> None:
        """Another client stored the delayed job and used up the marker that told of it."""
        seconds, micros = kit.command("TIME")
        due_ms = int(seconds) * 1000 + int(micros) // 1000 + 300
        kit.command("HSET", kit.base + "foreign", "name", "later", "data", "{}", "opts", "{}")
        kit.command("HSET", kit.base + "foreign", "timestamp", due_ms - 300, "delay", 300, "priority", 0)
        kit.command("ZADD", kit.base + "delayed", due_ms * 4096, "foreign")

        await kit.queue().add("a")

        await told.finished(5)
        assert int(kit.fields("foreign")["processedOn"]) >= due_ms


async def test_a_running_job_leaves_no_slot_to_lend(kit: Kit) -> None:
    gate = Gate()
    told = await idle(kit, gate)
    queue = kit.queue()
    first = await queue.add("a")
    await gate.reached()

    second = await queue.add("a")
    await asyncio.sleep(0.1)

    assert (kit.ids("active"), kit.ids("wait")) == ([first.id], [second.id])
    gate.open()
    await told.finished(2)


async def test_a_burst_is_not_taken_one_by_one(kit: Kit) -> None:
    """The look brings the first of many and says so; the pump fetches the others together."""
    gate = Gate()
    told = await idle(kit, gate, concurrency=10)
    kit.command("CONFIG", "RESETSTAT")

    await kit.queue().add_many(("n", n) for n in range(10))
    await gate.reached(10)

    stats: Any = kit.redis.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 3  # the add, the look, and one for the rest
    gate.open()
    await told.finished(10)


async def test_a_lost_answer_to_an_outcome_without_a_read_is_asked_for_again(kit: Kit, proxy: FaultProxy) -> None:
    """The only slot is in use, so nobody listens, and nothing else would wake the pump."""
    gate = Gate()
    await kit.queue().add("a")
    told = await kit.work(gate, connection=proxy.url, drain_delay=SLEEP_MS)
    await gate.reached()
    await kit.until(lambda: engine_of(told).driver.state.in_flight == 0, "the pump sleeps")
    lost = proxy.lose_reply(EXCHANGE)

    gate.open()

    await told.finished()
    assert lost.count == 1


async def test_reads_that_end_without_a_job_are_sent_again(kit: Kit) -> None:
    kit.command("CONFIG", "RESETSTAT")
    told = await kit.work(nothing, drain_delay=20, concurrency=2)
    await kit.until(lambda: reads(kit) > 3, "three have ended")

    await kit.queue().add("a")

    await told.finished()


async def test_a_read_that_is_refused_is_told_and_not_sent_again_at_once(kit: Kit) -> None:
    """Somebody stored something else under the name of the marker."""
    told = await idle(kit)
    kit.command("CONFIG", "RESETSTAT")
    began = time.monotonic()
    kit.command("SET", kit.base + "marker", "foreign")

    worker = await kit.work(nothing)
    await worker.wait("error")
    await asyncio.sleep(0.3)

    assert reads(kit) <= 2 * (1 + time.monotonic() - began)  # each of the two once, and again a second later
    kit.command("DEL", kit.base + "marker")
    await kit.queue().add("a")
    await kit.until(lambda: len(told.of("completed") + worker.of("completed")) == 1, "one of them runs it")


def reads(kit: Kit) -> int:
    stats: Any = kit.redis.info("commandstats")
    return int(stats.get("cmdstat_bzpopmin", {}).get("calls", 0))


async def test_a_paused_worker_takes_its_slot_back(kit: Kit) -> None:
    """A job that is added later stays for others, and is not even touched."""
    told = await idle(kit)
    told.worker.pause()
    await kit.until(lambda: not any("bzpopmin" in line for line in kit.clients()), "the read has ended")

    job = await kit.queue().add("a")
    await asyncio.sleep(0.1)

    assert kit.ids("wait") == [job.id]
    assert "ats" not in kit.fields(job.id)
    told.worker.resume()
    await told.finished()


async def test_a_look_that_took_a_job_for_a_worker_that_closes_gives_it_back(kit: Kit, proxy: FaultProxy) -> None:
    """Its answer is on the way when we close; the job has not begun and keeps its turn."""
    told = await idle(kit, connection=proxy.url)
    queue = kit.queue()

    with proxy.stalled(requests=False, replies=True):
        job = await queue.add("a")
        await kit.until(lambda: kit.ids("active") == [job.id], "the server took it for us")
        closing = asyncio.create_task(told.worker.close())
        await asyncio.sleep(0.1)
    await soon(closing)

    assert told.of("active") == []
    assert kit.ids("wait") == [job.id]
    assert not kit.has(f"{job.id}:lock")
    other = await kit.work(nothing)
    await other.finished()


async def test_who_may_not_unblock_lends_nothing_and_is_woken_all_the_same(kit: Kit, redis_server: RedisServer) -> None:
    """Without the right to end a blocked read the slot could not be had back."""
    kit.command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all", "-client|unblock")
    try:
        gate = Gate()
        url = redis_server.url.replace("redis://", "redis://narrow:secret@")
        told = await idle(kit, gate, connection=url)

        await kit.queue().add("a", delay=200)
        await gate.reached(1)
        gate.open()
        await told.finished()
        await soon(told.worker.close())
    finally:
        kit.command("ACL", "DELUSER", "narrow")


async def test_a_close_without_the_right_to_unblock_any_more_leaves_no_job_behind(
    kit: Kit, redis_server: RedisServer
) -> None:
    """The right was taken away after the slot was lent: the call behind the read is made void."""
    kit.command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all")
    try:
        url = redis_server.url.replace("redis://", "redis://narrow:secret@")
        told = await idle(kit, connection=url)
        kit.command("ACL", "SETUSER", "narrow", "-client|unblock")

        await soon(told.worker.close())

        job = await kit.queue().add("a")
        assert kit.ids("wait") == [job.id]
        other = await kit.work(nothing, drain_delay=SLEEP_MS)
        await other.finished()
    finally:
        kit.command("ACL", "DELUSER", "narrow")


async def test_who_may_no_longer_unblock_does_not_ask_again_and_again(kit: Kit, redis_server: RedisServer) -> None:
    """A paused worker wants its slot back; told that it may not, it waits for the read to end by itself."""
    kit.command("ACL", "SETUSER", "narrow", "on", ">secret", "~*", "&*", "+@all")
    try:
        url = redis_server.url.replace("redis://", "redis://narrow:secret@")
        told = await idle(kit, connection=url)
        kit.command("ACL", "SETUSER", "narrow", "-client|unblock")
        kit.command("CONFIG", "RESETSTAT")
        told.worker.pause()
        await kit.until(lambda: refused(kit), "it has asked")

        job = await kit.queue().add("a")  # taken by the look that could not be ended, and given back
        await kit.until(lambda: kit.ids("wait") == [job.id] and kit.fields(job.id).get("ats"), "it is back")

        assert refused(kit) == 1
        assert told.of("active") == []
    finally:
        kit.command("ACL", "DELUSER", "narrow")


def refused(kit: Kit) -> int:
    stats: Any = kit.redis.info("commandstats")
    return int(stats.get("cmdstat_client|unblock", {}).get("rejected_calls", 0))


class TestBlockedLoop:
    """A handler blocks the loop while the server takes a job for the slot that is lent: nobody renews that lock."""

    async def block(self, kit: Kit, lock_ms: int, meanwhile: Callable[[str], None]) -> tuple[Told, str]:
        """Block the loop of a worker until a second job was taken for it and `meanwhile` is through; its id."""
        is_blocked, taken_and_done, second = threading.Event(), threading.Event(), f"second-{lock_ms}"

        async def handle(job: Job) -> None:
            if job.id == "first":
                await kit.until(lambda: any("bzpopmin" in line for line in kit.clients()), "another slot is lent")
                is_blocked.set()
                assert taken_and_done.wait(10)

        def interfere() -> None:
            assert is_blocked.wait(10)
            with sync.Queue(kit.name, connection=kit.url) as queue:
                queue.add("second", job_id=second)
            wait_until(lambda: second in kit.ids("active"))
            meanwhile(second)
            taken_and_done.set()

        told = await kit.work(handle, concurrency=3, lock=lock_ms, drain_delay=SLEEP_MS)
        interfering = asyncio.get_running_loop().run_in_executor(None, interfere)
        await kit.queue().add("first", job_id="first")
        await interfering
        return told, second

    async def test_a_job_that_others_took_over_is_not_run_here(self, kit: Kit) -> None:
        def take_over(job_id: str) -> None:
            lock = f"{kit.base}{job_id}:lock"
            wait_until(lambda: not kit.command("EXISTS", lock))
            kit.command("SET", lock, "somebody else", "PX", 60_000)

        told, second = await self.block(kit, 400, take_over)
        await told.wait("completed")
        await (await kit.queue().add("third")).result(10_000)  # a whole turn later

        assert second not in told.ids("active")
        assert kit.command("GET", f"{kit.base}{second}:lock") == b"somebody else"
        kit.command("DEL", f"{kit.base}{second}:lock")
        kit.command("LREM", kit.base + "active", 0, second)
        kit.command("LPUSH", kit.base + "wait", second)

    async def test_a_job_that_is_still_ours_goes_back_and_is_run_once(self, kit: Kit) -> None:
        told, second = await self.block(kit, 2_000, lambda _: time.sleep(0.7))

        await told.finished(2)

        assert sorted(told.ids("completed")) == ["first", second]
        assert kit.fields(second)["ats"] == "2"
        assert told.of("stalled") == []


def wait_until(is_so: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)

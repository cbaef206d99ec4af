"""Waiting for a job's value, without polling and without hanging for ever."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from bullpen.errors import InvalidOption, JobFailed, JobNotFound, PermanentError, QueueClosed, ResultTimeout
from bullpen.queue import Added, Job, JobState, Queue
from bullpen.testing import FaultProxy, RedisServer
from tests.queue._kit import Failing, Gate, Kit, echo, nothing, soon


class TestValues:
    @pytest.mark.every_loop
    async def test_the_value_arrives_when_the_job_is_done(self, kit: Kit) -> None:
        """A request handler may await its job like a function."""
        job = await kit.queue().add("a", {"n": [1, None, "ü"]})
        waiting = asyncio.ensure_future(job.result())
        await kit.work(echo)

        assert await soon(waiting) == {"n": [1, None, "ü"]}

    async def test_a_finished_job_answers_at_once(self, kit: Kit) -> None:
        """Its event was long ago; the value is stored."""
        queue = kit.queue()
        job = await queue.add("a", 7)
        await kit.drain(echo, 1)

        again = await queue.get_job(job.id)

        assert again is not None
        assert [await soon(job.result()), await soon(again.result(timeout=1_000))] == [7, 7]

    async def test_a_job_that_is_removed_on_completion_still_tells_its_value(self, kit: Kit) -> None:
        """The event carries it, so whoever waits before the end gets it although nothing is stored."""
        gate = Gate("done")
        job = await kit.queue().add("a", remove_on_complete=True)
        told = await kit.work(gate)
        await gate.reached()
        waiting = asyncio.ensure_future(job.result())
        await kit.until(lambda: any("xread" in line for line in kit.clients()), "it waits")

        gate.open()

        assert await soon(waiting) == "done"
        await told.finished()
        assert not kit.has(job.id)

    @pytest.mark.parametrize("succeeds", [True, False])
    async def test_a_job_that_goes_while_we_ask_for_it_still_tells_its_end(self, kit: Kit, succeeds: bool) -> None:
        """It ended, and was removed, between fixing the position and asking for the stored result."""
        gate = Gate("done")

        async def handle(job: Job) -> Any:
            value = await gate(job)
            if not succeeds:
                raise PermanentError("no")
            return value

        job = await kit.queue().add("a", remove_on_complete=True, remove_on_fail=True)
        told = await kit.work(handle)
        await gate.reached()
        actions: Any = job._actions
        ask = actions.read_result

        async def ask_too_late(job_id: str) -> Any:
            gate.open()
            await told.finished()
            return await ask(job_id)

        actions.read_result = ask_too_late

        if succeeds:
            assert await soon(job.result()) == "done"
        else:
            with pytest.raises(JobFailed, match="no"):
                await soon(job.result())

    async def test_no_value_is_none(self, kit: Kit) -> None:
        """`null` on the wire."""
        job = await kit.queue().add("a")
        waiting = asyncio.ensure_future(job.result())
        await kit.work(nothing)

        assert await soon(waiting) is None

    @pytest.mark.every_loop
    async def test_many_waiters_of_one_job_and_of_many(self, kit: Kit) -> None:
        """One stream serves them all: a thousand waits are not a thousand connections."""
        queue = kit.queue()
        jobs = await queue.add_many(("n", n) for n in range(60))
        waiting = [asyncio.ensure_future(job.result()) for job in jobs for _ in range(3)]
        await asyncio.sleep(0)

        await kit.work(echo, concurrency=10)
        values = await soon(asyncio.gather(*waiting))

        assert values == [n for n in range(60) for _ in range(3)]
        assert len([line for line in kit.clients() if ":qe " in line]) == 1

    @pytest.mark.every_loop
    async def test_a_retry_is_waited_for(self, kit: Kit) -> None:
        """Only the end counts: a failed attempt is not a failed job."""
        job = await kit.queue().add("a", attempts=3, backoff={"type": "fixed", "delay": 1})
        waiting = asyncio.ensure_future(job.result())
        await kit.work(Failing(RuntimeError("one"), RuntimeError("two"), value="third time"))

        assert await soon(waiting) == "third time"


class TestFailures:
    async def test_a_failed_job_raises_its_reason(self, kit: Kit) -> None:
        """With queue, id and reason as fields, so that nobody parses text."""
        job = await kit.queue().add("a")
        waiting = asyncio.ensure_future(job.result())
        await kit.work(Failing(PermanentError("card declined")))

        with pytest.raises(JobFailed, match=f"job '{job.id}' of queue '{kit.name}' failed: card declined") as failed:
            await soon(waiting)

        assert (failed.value.queue, failed.value.job_id, failed.value.reason) == (kit.name, job.id, "card declined")

    async def test_a_job_that_failed_earlier_raises_too(self, kit: Kit) -> None:
        """The stored reason, not a wait for an event that came long ago."""
        job = await kit.queue().add("a")
        await kit.drain(Failing(PermanentError("no")), 1)

        with pytest.raises(JobFailed, match="failed: no"):
            await soon(job.result())

    async def test_a_job_that_is_gone_raises(self, kit: Kit) -> None:
        """Its retention removed it before anybody asked."""
        job = await kit.queue().add("a", remove_on_complete=True)
        await kit.drain(nothing, 1)

        with pytest.raises(JobNotFound, match="may have been removed by its retention"):
            await soon(job.result())

    @pytest.mark.parametrize("timeout", [30, timedelta(milliseconds=30)])
    async def test_a_timeout_leaves_the_job_alone(self, kit: Kit, timeout: int | timedelta) -> None:
        """Waiting is one thing, the work another."""
        queue = kit.queue()
        job = await queue.add("a")

        with pytest.raises(
            ResultTimeout, match="within 30 ms: it is waiting, and no worker is connected to this queue; start"
        ) as late:
            await soon(job.result(timeout=timeout))

        assert isinstance(late.value, TimeoutError)
        assert await queue.state_of(job.id) is JobState.WAITING

    async def test_a_timeout_says_that_a_worker_is_at_it(self, kit: Kit) -> None:
        """Then waiting longer helps."""
        job = await kit.queue().add("a")
        gate = Gate()
        await kit.work(gate)
        await gate.reached()

        with pytest.raises(ResultTimeout, match="it is active, and a worker is connected; the job continues") as late:
            await job.result(timeout=1)

        assert (late.value.state, late.value.has_worker, late.value.is_paused) == ("active", True, False)

    async def test_a_timeout_says_that_the_queue_is_paused(self, kit: Kit) -> None:
        """Then no waiting helps."""
        queue = kit.queue()
        job = await queue.add("a")
        await queue.pause()
        await kit.work(nothing)

        with pytest.raises(ResultTimeout, match="it is waiting, and the queue is paused, resume it") as late:
            await job.result(timeout=1)

        assert late.value.is_paused

    async def test_a_timeout_while_the_server_is_away_says_so(self, start_server: Callable[..., RedisServer]) -> None:
        """And comes soon all the same."""
        server = start_server()
        async with Queue("jobs", connection=server.url) as queue:
            job = await queue.add("a")
            server.kill()
            started = time.monotonic()
            with pytest.raises(ResultTimeout, match="the server does not answer, so its state is unknown") as late:
                await job.result(timeout=10)

        assert late.value.state is None
        assert time.monotonic() - started < 10

    async def test_after_a_timeout_one_may_wait_again(self, kit: Kit) -> None:
        """The listener outlives its waiters."""
        job = await kit.queue().add("a", 5)
        with pytest.raises(ResultTimeout):
            await job.result(timeout=1)

        waiting = asyncio.ensure_future(job.result())
        await kit.work(echo)

        assert await soon(waiting) == 5

    async def test_a_cancelled_waiter_harms_no_other(self, kit: Kit) -> None:
        """A client that hangs up must not take the answer from its neighbour."""
        job = await kit.queue().add("a", 5)
        one, other = asyncio.ensure_future(job.result()), asyncio.ensure_future(job.result())
        await asyncio.sleep(0)

        one.cancel()
        await kit.work(echo)

        assert await soon(other) == 5
        assert one.cancelled()

    @pytest.mark.parametrize("timeout", [-1, 1.5, True])
    async def test_a_wrong_timeout_is_named(self, kit: Kit, timeout: int) -> None:
        """Seconds as floats are the usual mistake."""
        job = await kit.queue().add("a")

        with pytest.raises(InvalidOption, match="timeout: expected whole milliseconds"):
            await job.result(timeout=timeout)

    async def test_closing_the_queue_ends_the_wait_with_a_reason(self, kit: Kit) -> None:
        """A waiter that nobody cancelled must not see a cancellation."""
        queue = kit.queue()
        job = await queue.add("a")
        waiting = asyncio.ensure_future(job.result())
        await kit.until(lambda: any("xread" in line for line in kit.clients()), "it waits")

        await queue.close()

        with pytest.raises(QueueClosed, match="closed before"):
            await soon(waiting)

    async def test_events_trimmed_meanwhile_cost_no_answer(self, kit: Kit) -> None:
        """The reader was cut off and the stream trimmed: each job that is still waited for is asked for again."""
        queue = kit.queue()
        jobs = await queue.add_many([("a", 1), ("b", 2)])
        waiting = [asyncio.ensure_future(job.result()) for job in jobs]
        await kit.until(lambda: any("xread" in line for line in kit.clients()), "they wait")

        # All in one step of ours: when the reader is back, the jobs are done and their events are gone.
        kit.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        for job in jobs:
            kit.redis.lrem(kit.base + "wait", 0, job.id)
            kit.redis.hset(kit.base + job.id, mapping={"returnvalue": job.data, "finishedOn": 1, "atm": 1})
            kit.redis.zadd(kit.base + "completed", {job.id: 1})
            kit.redis.xadd(kit.base + "events", {"event": "completed", "jobId": job.id, "returnvalue": job.data})
        kit.redis.xadd(kit.base + "events", {"event": "drained"})
        kit.redis.xtrim(kit.base + "events", maxlen=1, approximate=False)

        assert await soon(asyncio.gather(*waiting)) == [1, 2]

    async def test_all_that_are_still_waited_for_are_asked_for_together(
        self, kit: Kit, redis_server: RedisServer
    ) -> None:
        """One after another they would cost as many round trips, and nothing else is read meanwhile."""
        count = 100
        with FaultProxy(redis_server) as proxy:
            async with Queue(kit.name, connection=proxy.url) as queue:
                jobs = await queue.add_many([("a", number) for number in range(count)])
                waiting = [asyncio.ensure_future(job.result()) for job in jobs]
                await kit.until(lambda: any("xread" in line for line in kit.clients()), "they wait")
                proxy.latency(40)
                proxy.cut()
                for job in jobs:
                    kit.redis.hset(kit.base + job.id, mapping={"returnvalue": job.data, "finishedOn": 1, "atm": 1})
                    kit.redis.xadd(kit.base + "events", {"event": "completed", "jobId": job.id})
                kit.redis.lpop(kit.base + "wait", count)
                kit.redis.zadd(kit.base + "completed", {job.id: 1 for job in jobs})
                kit.redis.xadd(kit.base + "events", {"event": "drained"})
                kit.redis.xtrim(kit.base + "events", maxlen=1, approximate=False)

                await soon(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))
                began = time.monotonic()
                assert await soon(asyncio.gather(*waiting)) == list(range(count))

        assert time.monotonic() - began < 3  # one after another they would take at least four seconds


class TestWithoutAsking:
    """A job that was added while results are listened to, with nothing heard since: its end is still to come."""

    async def listening(self, kit: Kit) -> Queue:
        queue = kit.queue()
        await kit.work(nothing)
        await (await queue.add("first")).result(5_000)
        return queue

    async def test_the_result_is_not_asked_for(self, kit: Kit) -> None:
        queue = await self.listening(kit)
        asked = "cmdstat_evalsha"
        kit.command("CONFIG", "RESETSTAT")

        for _ in range(10):
            await (await queue.add("a")).result(5_000)

        # An add, a take and a settle each; the question for the result would be the fourth.
        assert kit.redis.info("commandstats")[asked]["calls"] <= 35  # a look of the idle worker may come between

    async def test_an_end_that_was_heard_before_the_wait_is_asked_for(self, kit: Kit) -> None:
        """The event has passed, and nobody waited for it."""
        queue = await self.listening(kit)
        job = await queue.add("a")
        await kit.until(lambda: job.id in kit.zset("completed"), "it is done")
        await (await queue.add("b")).result(5_000)  # its event comes later, so ours was heard of

        assert await job.result(5_000) is None

    async def test_a_job_that_was_taken_away_in_silence_is_missed_after_a_while(self, kit: Kit) -> None:
        """Whoever drains a queue tells of no single job."""
        queue = await self.listening(kit)
        await queue.pause()
        job = await queue.add("a")
        kit.command("DEL", f"{kit.base}{job.id}", f"{kit.base}wait")

        with pytest.raises(JobNotFound):
            await job.result(10_000)

    async def test_each_wait_has_its_own_patience(self, kit: Kit) -> None:
        """One timer serves all of them; those that began later must not be left behind by it."""
        queue = await self.listening(kit)
        await queue.pause()
        waits = []
        for name in ("a", "b", "c"):
            job = await queue.add(name)
            kit.command("DEL", f"{kit.base}{job.id}", f"{kit.base}wait")
            waits.append(asyncio.ensure_future(job.result(10_000)))
            await asyncio.sleep(0.2)

        ends = await soon(asyncio.gather(*waits, return_exceptions=True))

        assert [type(end) for end in ends] == [JobNotFound] * 3

    async def test_a_cancelled_wait_is_not_read_for_any_more(self, kit: Kit) -> None:
        """Else a listener would read all events for ever, for nobody."""
        queue = await self.listening(kit)
        await queue.pause()
        job = await queue.add("a")
        waiting = asyncio.ensure_future(job.result())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        kit.command("DEL", f"{kit.base}{job.id}", f"{kit.base}wait")  # no event will tell of its end
        await queue.resume()
        await (await queue.add("b")).result(5_000)
        kit.reset_statistics()

        job = await queue.add("c")
        await kit.until(lambda: job.id in kit.zset("completed"), "it is done")
        job = await queue.add("d")
        await kit.until(lambda: job.id in kit.zset("completed"), "it is done")

        # One read was begun with the first add, because the last result was asked for; it ended and there was no other.
        assert kit.redis.info("commandstats").get("cmdstat_xread", {"calls": 0})["calls"] <= 2

    async def test_a_wait_that_is_answered_in_spite_of_trimmed_events_is_forgotten(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As above: it was told by the stored result, not by an event."""
        monkeypatch.setattr("bullpen.queue.results._ASK_AFTER_S", 3_600.0)  # nor by a look of its own
        queue = await self.listening(kit)
        await queue.pause()
        job = await queue.add("a")
        waiting = asyncio.ensure_future(job.result())
        await asyncio.sleep(0)
        listener = queue._actions.results
        assert listener is not None
        kit.redis.lrem(kit.base + "wait", 0, job.id)
        kit.redis.hset(kit.base + job.id, mapping={"returnvalue": 5, "finishedOn": 1, "atm": 1})
        kit.redis.zadd(kit.base + "completed", {job.id: 1})

        await listener._ask_again()

        assert await soon(waiting) == 5
        assert listener._waits == {}

    async def test_a_failure_that_is_told_twice_is_no_news(self, kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
        """It comes as the stored result and as an event, in any order. asyncio complains of errors that nobody saw."""
        queue = kit.queue()
        await kit.work(Failing(ValueError("no")))
        job_id = (await queue.add("a", attempts=1)).id
        await kit.until(lambda: job_id in kit.zset("failed"), "it has failed")
        job = await queue.get_job(job_id)
        assert job is not None
        await self.ignore_failure(job)  # from now on somebody listens
        listener = queue._actions.results
        assert listener is not None

        asking = asyncio.ensure_future(self.ignore_failure(job))
        await asyncio.sleep(0)
        assert job_id in listener._waits
        listener._resolve([b"event", b"failed", b"jobId", job_id.encode(), b"failedReason", b"no"])
        await asking
        gc.collect()

        assert "never retrieved" not in caplog.text

    async def ignore_failure(self, job: Job) -> None:
        with pytest.raises(JobFailed):
            await job.result(5_000)

    async def test_between_two_waits_no_event_is_read(self, kit: Kit) -> None:
        """A producer that asks for a result now and then is not woken by all that happens in between."""
        queue = await self.listening(kit)
        await (await queue.add("second")).result(5_000)  # the first one was asked for, with a read still under way
        kit.reset_statistics()

        jobs = await queue.add_many([("a", number) for number in range(30)])
        await kit.until(lambda: jobs[-1].id in kit.zset("completed"), "they are done")
        assert "cmdstat_xread" not in kit.redis.info("commandstats")

        assert await (await queue.add("b")).result(5_000) is None
        assert kit.redis.info("commandstats")["cmdstat_xread"]["calls"] >= 1

    async def test_waits_for_many_jobs_of_one_call_all_end(self, kit: Kit) -> None:
        """The first wait goes to where the call's events stand; the others find that nothing was missed, or ask."""
        queue = await self.listening(kit)

        for count in (2, 30, 450):
            jobs = await queue.add_many([("a", number) for number in range(count)])
            assert await soon(asyncio.gather(*(job.result(30_000) for job in jobs))) == [None] * count

    async def test_an_end_that_comes_as_the_patience_ends_is_heard_and_nobody_asks(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A busy loop comes to the page of events and to the timer in one turn: the page is as good as before. Asking
        for each job would make the loop busier still, and an end that was told must not count as one that nobody told.
        """
        monkeypatch.setattr("bullpen.queue.results._EVENT_WITHIN_S", 0.2)
        queue = kit.queue()
        first = await queue.add("first")
        waiting = asyncio.ensure_future(first.result(5_000))
        await kit.until(lambda: any("cmd=xread" in line for line in kit.clients()), "it listens")
        self.end(kit, [first])
        await soon(waiting)
        jobs = await queue.add_many([("a", number) for number in range(100)])
        waits = [asyncio.ensure_future(job.result(5_000)) for job in jobs]
        await asyncio.sleep(0)
        kit.reset_statistics()
        await queue.add("b")  # ends the first read; the next one is looked for
        await kit.until(lambda: kit.redis.info("commandstats").get("cmdstat_xrange", {}).get("calls") == 1, "it reads")
        kit.reset_statistics()

        self.end(kit, jobs)
        time.sleep(1.2)  # noqa: ASYNC251 - the loop is busy, until after the patience of all

        assert await soon(asyncio.gather(*waits)) == [5] * 100
        assert "cmdstat_evalsha" not in kit.redis.info("commandstats")
        await asyncio.sleep(0.4)  # an event that is missing would be noted by now; the fixture of all tests looks

    def end(self, kit: Kit, jobs: list[Job]) -> None:
        """What a worker writes."""
        with kit.redis.pipeline() as pipe:
            for job in jobs:
                pipe.lrem(kit.base + "wait", 0, job.id)
                pipe.hset(kit.base + job.id, mapping={"returnvalue": 5, "finishedOn": 1, "atm": 1})
                pipe.zadd(kit.base + "completed", {job.id: 1})
                pipe.xadd(kit.base + "events", {"event": "completed", "jobId": job.id, "returnvalue": "5"})
            pipe.execute()

    async def test_a_duplicate_of_a_finished_job_answers_at_once(
        self, kit: Kit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its end came long before the add that found the id taken, so nobody will tell of it."""
        monkeypatch.setattr("bullpen.queue.results._ASK_AFTER_S", 3_600.0)
        queue = await self.listening(kit)
        await (await queue.add("a", job_id="mine")).result(5_000)

        again = await queue.add("a", job_id="mine")

        assert again.added is Added.DUPLICATE
        assert await again.result(5_000) is None

    async def test_an_add_whose_event_was_trimmed_already_is_answered_after_a_while(self, kit: Kit) -> None:
        """A stream that is far too short: its reader starts from an event that is gone, with all that followed."""
        queue = await self.listening(kit)
        job = await queue.add("a")
        await kit.until(lambda: job.id in kit.zset("completed"), "it is done")
        kit.redis.xtrim(kit.base + "events", maxlen=0, approximate=False)

        assert await job.result(5_000) is None


class TestForeseen:
    """Whoever asked for the result of each job so far will ask again: its events are read from the add on."""

    @pytest.fixture(autouse=True)
    def never_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The question that follows when nothing is heard would hide that nothing is."""
        monkeypatch.setattr("bullpen.queue.results._ASK_AFTER_S", 3_600.0)

    async def asking(self, kit: Kit) -> Queue:
        queue = kit.queue()
        await kit.work(echo)
        for number in range(12):
            assert await (await queue.add("a", number)).result(5_000) == number
        return queue

    def is_done(self, kit: Kit, job: Job) -> bool:
        return job.id in kit.zset("completed")

    async def test_the_reading_begins_with_the_add(self, kit: Kit) -> None:
        queue = await self.asking(kit)
        await queue.pause()

        job = await queue.add("a", "later")
        await kit.until(
            lambda: any("cmd=xread" in line for line in kit.clients()), "it reads although nobody asked yet"
        )

        await queue.resume()
        assert await job.result(5_000) == "later"

    async def test_who_does_not_ask_any_more_is_read_for_once(self, kit: Kit) -> None:
        queue = await self.asking(kit)
        kit.reset_statistics()

        for number in range(20):
            job = await queue.add("a", number)
            await kit.until(partial(self.is_done, kit, job), "it is done")

        assert kit.redis.info("commandstats")["cmdstat_xread"]["calls"] == 1

    async def test_a_job_that_ended_before_it_was_asked_for_answers(self, kit: Kit) -> None:
        """Its event was read with nobody waiting for it."""
        queue = await self.asking(kit)
        job = await queue.add("a", "early")
        await kit.until(lambda: job.id in kit.zset("completed"), "it is done")

        assert await job.result(5_000) == "early"

    async def test_results_come_in_any_order(self, kit: Kit) -> None:
        queue = await self.asking(kit)
        jobs = [await queue.add("a", number) for number in range(5)]

        assert [await job.result(5_000) for job in reversed(jobs)] == [4, 3, 2, 1, 0]

    async def test_a_connection_that_is_cut_costs_no_answer(self, kit: Kit) -> None:
        queue = await self.asking(kit)
        await queue.pause()
        job = await queue.add("a", "once more")
        await kit.until(lambda: any("cmd=xread" in line for line in kit.clients()), "it reads")

        kit.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        await queue.resume()
        assert await job.result(5_000) == "once more"

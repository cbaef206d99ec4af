"""Adding jobs: what is stored, in which order, and in how many calls."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.errors import BullpenError, ConnectionLost, InvalidOption, QueueClosed, QueueFull, ServerRefused
from bullpen.queue import Added, JobState, NewJob, Queue
from bullpen.redis import Connection
from bullpen.sync import Queue as SyncQueue
from bullpen.testing import RedisServer, free_port
from bullpen.wire.options import JobMeta
from tests.queue._kit import Gate, Kit, echo, ids_of, nothing, soon

MAX_PRIORITY = 2_097_151
SPAN = 2**32


class TestStandard:
    @pytest.mark.requirement("Q-2", "Q-5", "Q-8", "Q-21", "Q-22", "Q-28", "Q-29", "Q-31", "Q-41", "X-97", "X-11")
    async def test_a_job_is_a_hash_and_one_place_in_wait(self, kit: Kit) -> None:
        """Node reads exactly these fields; a zero for "not yet" makes it retry for ever or clean a fresh job."""
        before = kit.server_ms()

        job = await kit.queue().add("send-email", {"to": "ada@example.com"})

        stored = kit.fields(job.id)
        assert set(stored) == {"name", "data", "opts", "timestamp", "delay", "priority", "bp"}
        assert (stored["name"], stored["data"]) == ("send-email", '{"to":"ada@example.com"}')
        assert (stored["delay"], stored["priority"]) == ("0", "0")
        assert before <= int(stored["timestamp"]) <= kit.server_ms()
        assert kit.ids("wait") == [job.id] == ["1"]
        assert kit.marker() == {"0": 0}
        assert kit.events() == [
            {"event": "added", "jobId": "1", "name": "send-email"},
            {"event": "waiting", "jobId": "1"},
        ]

    @pytest.mark.requirement("Q-1", "Q-64", "X-123")
    async def test_the_returned_job_shows_what_is_stored(self, kit: Kit) -> None:
        """A producer must not need a second read to know the id, and the stored job has no time to live."""
        job = await kit.queue().add("greet", {"n": 1})

        assert job.added is Added.CREATED
        assert job.blocked_by is None
        assert (job.id, job.name, job.data, job.attempts_made, job.processed_on) == ("1", "greet", {"n": 1}, 0, 0)
        assert job.timestamp == int(kit.fields("1")["timestamp"])
        assert job.idempotency_key == f"{kit.name}/1/{job.timestamp}"
        assert kit.redis.ttl(kit.base + "1") == -1

    @pytest.mark.requirement("X-33", "Q-15")
    async def test_no_data_is_an_empty_object(self, kit: Kit) -> None:
        """Node stores `{}` for absent data, and every reader counts on JSON being there."""
        queue = kit.queue()

        jobs = [await queue.add("a"), await queue.add("b", None), await queue.add("c", {})]

        assert [kit.fields(job.id)["data"] for job in jobs] == ["{}", "{}", "{}"]

    @pytest.mark.requirement("Q-4")
    @pytest.mark.parametrize(
        "data",
        ['text with "quotes" and \u2028', 0, -1.5, True, [1, [2, None]], {"ключ": "дані", "e": 1e-7}, (1, 2)],
        ids=str,
    )
    async def test_any_json_value_reaches_the_handler_unchanged(self, kit: Kit, data: object) -> None:
        """The library gives data no meaning, so it may not bend it either."""
        job = await kit.queue().add("any", data)

        told = await kit.drain(echo, 1)

        [(done, value)] = told.of("completed")
        expected = list(data) if isinstance(data, tuple) else data
        assert done.data == value == expected
        assert job.data == expected

    @pytest.mark.requirement("X-3", "X-32", "Q-43", "Q-44")
    async def test_attempts_and_backoff_are_always_written(self, kit: Kit) -> None:
        """Absent means one attempt to Node, so our default of three must stand in the job itself."""
        job = await kit.queue().add("plain")

        assert json.loads(kit.fields(job.id)["opts"]) == {
            "attempts": 3,
            "backoff": {"type": "exponential", "delay": 1000},
        }

    async def test_options_are_written_under_bullmqs_names(self, kit: Kit) -> None:
        """A Node worker obeys the options of our jobs only if it finds them where it looks."""
        created = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

        job = await kit.queue().add(
            "full",
            {},
            job_id="own-1",
            attempts=7,
            backoff=Backoff.fixed(250),
            lifo=True,
            remove_on_complete=10,
            remove_on_fail=False,
            keep_logs=5,
            stack_trace_limit=2,
            timestamp=created,
            tm='{"traceparent":"00-1"}',
        )

        assert json.loads(kit.fields("own-1")["opts"]) == {
            "attempts": 7,
            "backoff": {"type": "fixed", "delay": 250},
            "lifo": True,
            "jobId": "own-1",
            "removeOnComplete": 10,
            "removeOnFail": False,
            "kl": 5,
            "stackTraceLimit": 2,
            "timestamp": int(created.timestamp() * 1000),
            "tm": '{"traceparent":"00-1"}',
        }
        assert kit.fields("own-1")["timestamp"] == str(int(created.timestamp() * 1000))
        assert job.timestamp == int(created.timestamp() * 1000)

    @pytest.mark.requirement("Q-30")
    async def test_ids_and_headers_travel_beside_the_data(self, kit: Kit) -> None:
        given = JobMeta(tenant_id="acme", correlation_id="c-1", headers={"region": "eu"})
        job = await kit.queue().add("mail", {"to": "ada"}, meta=given)

        stored = await kit.queue().get_job(job.id)

        assert stored is not None
        assert (stored.data, stored.meta, job.meta) == ({"to": "ada"}, given, given)

    @pytest.mark.parametrize("stored", ["7", "[]", '{"tenantId": 7, "headers": "x"}', "null"])
    async def test_strange_ids_of_others_read_as_none(self, kit: Kit, stored: str) -> None:
        job = await kit.queue().add("mail")
        kit.redis.hset(kit.base + job.id, "opts", f'{{"attempts": 1, "bpmeta": {stored}}}')

        read = await kit.queue().get_job(job.id)

        assert read is not None
        assert read.meta == JobMeta()

    @pytest.mark.parametrize(
        ("meta", "option"),
        [
            ({"tenantId": "acme"}, "meta"),
            (JobMeta(tenant_id=7), "meta.tenant_id"),  # type: ignore[arg-type]  # what users try
            (JobMeta(headers="x"), "meta.headers"),  # type: ignore[arg-type]  # as above
        ],
    )
    async def test_what_is_no_meta_is_refused(self, kit: Kit, meta: Any, option: str) -> None:
        with pytest.raises(InvalidOption) as refused:
            await kit.queue().add("mail", meta=meta)

        assert refused.value.option == option

    async def test_the_two_example_jobs_round_trip(self, kit: Kit) -> None:
        """What was promised as an example must work as printed."""
        queue = kit.queue()
        email = {"to": "user@example.com", "subject": "Welcome", "body": "Hello"}
        payment = {"orderId": "order-456", "amount": 99.99, "currency": "USD"}

        first = await queue.add("send-email", email, priority=5, attempts=3, backoff=Backoff.exponential(1000))
        await queue.add(
            "process-payment", payment, job_id="payment-789", priority=10, attempts=5, backoff=Backoff.exponential(2000)
        )

        read = await queue.get_job(first.id), await queue.get_job("payment-789")
        assert [(job.name, job.data, job.priority, job.opts.attempts) for job in read if job] == [
            ("send-email", email, 5, 3),
            ("process-payment", payment, 10, 5),
        ]
        assert [job.opts.backoff for job in read if job] == [Backoff.exponential(1000), Backoff.exponential(2000)]

    @pytest.mark.requirement("Q-31")
    async def test_first_in_is_first_out_and_lifo_goes_before_all(self, kit: Kit) -> None:
        """Order is the promise of a queue; `lifo` is the one way past it."""
        queue = kit.queue()
        for name in "abc":
            await queue.add(name)
        await queue.add("urgent", lifo=True)

        told = await kit.drain(nothing, 4)

        assert [job.name for (job,) in told.of("active")] == ["urgent", "a", "b", "c"]

    async def test_meta_names_us_once_and_keeps_what_others_wrote(self, kit: Kit) -> None:
        """A Node deployment's own version and stream bound must survive our producers."""
        kit.redis.hset(kit.base + "meta", mapping={"version": "bullmq:6.7.0", "opts.maxLenEvents": "77"})
        await kit.queue().add("a")

        await kit.queue("other").add("a")

        assert kit.redis.hgetall(kit.base + "meta") == {b"version": b"bullmq:6.7.0", b"opts.maxLenEvents": b"77"}
        fresh: Any = kit.redis.hgetall("bull:other:meta")
        assert fresh[b"opts.maxLenEvents"] == b"10000"
        assert fresh[b"version"].startswith(b"bullpen:")

    async def test_a_prefix_keeps_two_applications_apart(self, kit: Kit) -> None:
        """Two deployments may share a server and a queue name."""
        await kit.queue(prefix="shop").add("a", job_id="same")

        await kit.queue().add("b", job_id="same")

        assert kit.redis.hget(f"shop:{kit.name}:same", "name") == b"a"
        assert kit.fields("same")["name"] == "b"

    async def test_the_counter_is_consumed_by_every_add(self, kit: Kit) -> None:
        """Node does so too; a number that was skipped is never given to two jobs."""
        queue = kit.queue()
        await queue.add("a", job_id="own")
        await queue.add("a", job_id="own")

        job = await queue.add("b")

        assert job.id == "3"


class TestDelayed:
    @pytest.mark.requirement("Q-7", "Q-33", "Q-42")
    async def test_a_delay_counts_from_the_servers_now(self, kit: Kit) -> None:
        """The producer's clock may be wrong; the score is due ms × 4096 so that equal times keep their order."""
        before = kit.server_ms()

        job = await kit.queue().add("later", delay=60_000)

        due = kit.zset("delayed")[job.id] / 4096
        assert before + 60_000 <= due <= kit.server_ms() + 60_000
        assert (kit.fields(job.id)["delay"], job.delay) == ("60000", 60_000)
        assert json.loads(kit.fields(job.id)["opts"])["delay"] == 60_000
        assert kit.ids("wait") == []
        assert kit.marker() == {"1": due}
        assert kit.events() == [
            {"event": "added", "jobId": job.id, "name": "later"},
            {"event": "delayed", "jobId": job.id, "delay": str(int(due))},
        ]

    async def test_a_delay_may_be_a_timedelta(self, kit: Kit) -> None:
        """Milliseconds on the wire, but nobody should have to count zeros."""
        job = await kit.queue().add("later", delay=timedelta(hours=2))

        assert kit.fields(job.id)["delay"] == "7200000"

    @pytest.mark.requirement("Q-42")
    async def test_a_delay_of_zero_is_now(self, kit: Kit) -> None:
        """0 is the documented default, not a delayed job that is due."""
        job = await kit.queue().add("now", delay=0)

        assert kit.ids("wait") == [job.id]

    async def test_a_delay_is_not_shortened_by_an_old_timestamp(self, kit: Kit) -> None:
        """An imported job keeps its creation time; its delay still means "not before"."""
        old = datetime(2020, 1, 1, tzinfo=UTC)

        job = await kit.queue().add("imported", delay=60_000, timestamp=old)

        assert kit.zset("delayed")[job.id] / 4096 > kit.server_ms() + 50_000

    async def test_an_instant_is_exact(self, kit: Kit) -> None:
        """`at` promises that instant, not "so many ms after some script ran"."""
        at = datetime.fromtimestamp((kit.server_ms() + 3_600_000) / 1000, UTC)

        job = await kit.queue().add("at", at=at)

        due = round(at.timestamp() * 1000)
        assert kit.zset("delayed") == {job.id: due * 4096}
        assert abs(job.delay - 3_600_000) < 5_000
        assert int(kit.fields(job.id)["timestamp"]) + int(kit.fields(job.id)["delay"]) == due

    async def test_an_instant_in_the_past_is_now(self, kit: Kit) -> None:
        """A reminder whose time has passed must not wait for ever, nor raise."""
        job = await kit.queue().add("late", at=datetime(2020, 1, 1, tzinfo=UTC))

        assert kit.ids("wait") == [job.id]
        assert kit.fields(job.id)["delay"] == "0"

    async def test_jobs_due_in_the_same_millisecond_keep_their_order(self, kit: Kit) -> None:
        """Twelve bits of sequence below the millisecond: a bulk of reminders for nine o'clock runs as it was added."""
        at = datetime.fromtimestamp((kit.server_ms() + 60_000) / 1000, UTC)

        jobs = await kit.queue().add_many(NewJob("at", n, {"at": at}) for n in range(50))

        assert list(kit.zset("delayed")) == ids_of(jobs)

    async def test_the_marker_tells_the_earliest_due_time(self, kit: Kit) -> None:
        """A blocked worker sleeps until then; a later time would make it oversleep."""
        queue = kit.queue()
        await queue.add("late", delay=90_000)
        early = await queue.add("early", delay=30_000)
        await queue.add("later still", delay=120_000)

        assert kit.marker() == {"1": kit.zset("delayed")[early.id] / 4096}

    async def test_a_queue_with_a_moved_clock_stores_moved_times(self, kit: Kit) -> None:
        """`clock_offset_ms` moves everything a test looks at, so that nobody has to sleep."""
        job = await kit.queue(clock_offset_ms=86_400_000).add("tomorrow", delay=1_000)

        assert int(kit.fields(job.id)["timestamp"]) >= kit.server_ms() + 86_000_000
        assert kit.zset("delayed")[job.id] / 4096 >= kit.server_ms() + 86_000_000


class TestPriority:
    @pytest.mark.requirement("Q-32", "Q-41", "X-9", "X-10")
    async def test_a_priority_is_a_score_with_a_counter(self, kit: Kit) -> None:
        """priority × 2^32 + counter: the lowest number first, equals in the order they came."""
        queue = kit.queue()

        jobs = [await queue.add("p", priority=priority) for priority in (5, 1, 5)]

        assert kit.zset("prioritized") == {
            jobs[1].id: 1 * SPAN + 2,
            jobs[0].id: 5 * SPAN + 1,
            jobs[2].id: 5 * SPAN + 3,
        }
        assert kit.fields(jobs[0].id)["priority"] == "5"
        assert kit.marker() == {"0": 0}
        assert kit.event_names(jobs[0].id) == ["added", "waiting"]

    @pytest.mark.requirement("X-9", "Q-40")
    async def test_the_measured_order_is_0_1_5_5_10(self, kit: Kit) -> None:
        """Priority 0 runs before all others, as in Node."""
        queue = kit.queue()
        for name, priority in (("e", 10), ("c", 5), ("b", 1), ("d", 5), ("a", 0)):
            await queue.add(name, priority=priority)

        told = await kit.drain(nothing, 5)

        assert [job.name for (job,) in told.of("active")] == ["a", "b", "c", "d", "e"]

    @pytest.mark.requirement("X-9", "Q-40")
    async def test_urgency_is_priority_from_the_other_end(self, kit: Kit) -> None:
        """Higher runs earlier for callers; on the wire it is BullMQ's order."""
        queue = kit.queue()
        for urgency in (1, 10, 5, MAX_PRIORITY):
            await queue.add(f"u{urgency}", urgency=urgency)

        told = await kit.drain(nothing, 4)

        assert [job.name for (job,) in told.of("active")] == [f"u{MAX_PRIORITY}", "u10", "u5", "u1"]
        assert [job.priority for (job,) in told.of("active")] == [1, MAX_PRIORITY - 9, MAX_PRIORITY - 4, MAX_PRIORITY]

    async def test_the_extreme_priority_keeps_its_order_when_the_counter_wraps(self, kit: Kit) -> None:
        """2^21 − 1 classes times 2^32 is just below 2^53; one more bit and equals would lose their order."""
        kit.redis.set(kit.base + "pc", SPAN - 3)
        queue = kit.queue()

        jobs = [await queue.add("last", priority=MAX_PRIORITY) for _ in range(2)]

        assert list(kit.zset("prioritized").values()) == [
            MAX_PRIORITY * SPAN + SPAN - 2,
            MAX_PRIORITY * SPAN + SPAN - 1,
        ]
        assert list(kit.zset("prioritized")) == ids_of(jobs)

    async def test_a_delayed_job_keeps_its_priority_for_later(self, kit: Kit) -> None:
        """It waits in `delayed` and takes its class when it is due."""
        queue = kit.queue(clock_offset_ms=-60_000)
        await queue.add("low", delay=1, priority=9)
        await queue.add("high", delay=2, priority=2)

        told = await kit.drain(nothing, 2)

        assert [job.name for (job,) in told.of("active")] == ["high", "low"]


class TestOwnIds:
    @pytest.mark.requirement("Q-2", "Q-14", "X-102", "X-18")
    async def test_a_second_add_changes_nothing_and_shows_the_stored_job(self, kit: Kit) -> None:
        """Node's client shows the new data here, although the old one will run."""
        queue = kit.queue()
        await queue.add("first", {"v": 1}, job_id="order-1", attempts=5)
        before = kit.fields("order-1")

        again = await queue.add("second", {"v": 2}, job_id="order-1")

        assert again.added is Added.DUPLICATE
        assert (again.name, again.data, again.opts.attempts) == ("first", {"v": 1}, 5)
        assert again.blocked_by is not None
        assert (again.blocked_by.job_id, again.blocked_by.state) == ("order-1", JobState.WAITING)
        assert repr(again.blocked_by) == "BlockedBy(job_id='order-1', state='waiting')"
        assert kit.fields("order-1") == before
        assert kit.ids("wait") == ["order-1"]
        assert kit.event_names("order-1") == ["added", "waiting", "duplicated"]

    @pytest.mark.requirement("X-102")
    async def test_blocked_by_names_the_state_the_job_is_in(self, kit: Kit) -> None:
        """A dispatcher must tell "still at work" from "failed and in the way"."""
        queue = kit.queue()
        gate = Gate()
        await queue.add("runs", job_id="active-1", priority=1)
        await kit.work(gate)
        await gate.reached()
        await queue.add("later", job_id="delayed-1", delay=60_000)
        await queue.add("next", job_id="prioritized-1", priority=3)

        states = {}
        for job_id in ("active-1", "delayed-1", "prioritized-1"):
            duplicate = await queue.add("again", job_id=job_id)
            assert duplicate.blocked_by is not None
            states[job_id] = duplicate.blocked_by.state

        assert states == {
            "active-1": JobState.ACTIVE,
            "delayed-1": JobState.DELAYED,
            "prioritized-1": JobState.PRIORITIZED,
        }

    @pytest.mark.requirement("X-102")
    async def test_a_kept_result_blocks_its_id_and_a_removed_one_frees_it(self, kit: Kit) -> None:
        """Idempotency by id lasts exactly as long as the job is kept."""
        queue = kit.queue()
        await queue.add("kept", job_id="kept-1")
        await queue.add("gone", job_id="gone-1", remove_on_complete=True)
        await kit.drain(echo, 2)

        kept, gone = await queue.add("kept", job_id="kept-1"), await queue.add("gone", job_id="gone-1")

        assert kept.added is Added.DUPLICATE
        assert kept.blocked_by is not None and kept.blocked_by.state is JobState.COMPLETED
        assert kept.return_value == {}
        assert gone.added is Added.CREATED

    @pytest.mark.requirement("Q-14")
    async def test_two_of_one_batch_with_the_same_id_are_one_job(self, kit: Kit) -> None:
        """The check is inside the script, so the first of the batch is already there for the second."""
        jobs = await kit.queue().add_many(
            [NewJob("a", {"v": 1}, {"job_id": "x"}), NewJob("b", {"v": 2}, {"job_id": "x"}), NewJob("c", {"v": 3})]
        )

        assert [job.added for job in jobs] == [Added.CREATED, Added.DUPLICATE, Added.CREATED]
        assert [job.data for job in jobs] == [{"v": 1}, {"v": 1}, {"v": 3}]
        assert jobs[1].blocked_by is not None and jobs[1].blocked_by.state is JobState.WAITING
        assert kit.ids("wait") == ["x", jobs[2].id]

    @pytest.mark.requirement("Q-14", "X-44")
    async def test_many_producers_of_one_id_make_one_job(self, kit: Kit) -> None:
        """Uniqueness is decided by the server, not by whoever looked first."""
        queues = [kit.queue(connection=Connection(kit.url)) for _ in range(8)]

        jobs = await asyncio.gather(*(queue.add("x", {"by": n}, job_id="one") for n, queue in enumerate(queues)))

        created = [job for job in jobs if job.added is Added.CREATED]
        assert len(created) == 1
        assert {job.data["by"] for job in jobs} == {created[0].data["by"]}
        assert kit.ids("wait") == ["one"]
        for queue in queues:
            await queue._connection.aclose()

    @pytest.mark.requirement("X-45")
    @pytest.mark.parametrize("job_id", ["a:b:c", "order 1", "ключ", "a-b_c.d", "x" * 500, "12a", "wait2", "%"])
    async def test_ids_that_bullmq_allows_are_stored_as_they_are(self, kit: Kit, job_id: str) -> None:
        """Three colon parts are allowed by Node; the rest is anybody's own scheme."""
        queue = kit.queue()
        await queue.add("a", job_id=job_id)

        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == [job_id]
        assert await queue.state_of(job_id) is JobState.COMPLETED


class TestMany:
    async def test_the_answer_is_in_the_order_of_the_question(self, kit: Kit) -> None:
        """Whoever adds a list wants the n-th job at the n-th place, over several calls too."""
        jobs = await kit.queue().add_many(("n", n) for n in range(450))

        assert [job.data for job in jobs] == list(range(450))
        assert ids_of(jobs) == [str(n) for n in range(1, 451)]
        assert kit.ids("wait") == ids_of(jobs)

    async def test_all_kinds_mix_in_one_call(self, kit: Kit) -> None:
        """One batch may hold delayed, prioritised, front and plain jobs; each goes to its own place."""
        kit.reset_statistics()

        jobs = await kit.queue().add_many(
            [
                NewJob("plain-1"),
                NewJob("delayed", None, {"delay": 60_000}),
                NewJob("prioritised", None, {"priority": 4}),
                NewJob("front", None, {"lifo": True}),
                ("plain-2", None),
                NewJob("front-2", None, {"lifo": True}),
            ]
        )

        names = {job.id: job.name for job in jobs}
        assert [names[job_id] for job_id in kit.ids("wait")] == ["front-2", "front", "plain-1", "plain-2"]
        assert list(kit.zset("prioritized")) == [jobs[2].id]
        assert list(kit.zset("delayed")) == [jobs[1].id]
        assert set(kit.marker()) == {"0", "1"}

    async def test_nothing_is_sent_when_one_of_them_is_wrong(self, kit: Kit) -> None:
        """All are checked before the first leaves, so a mistake in the last leaves no half of a list behind."""
        queue = kit.queue()

        with pytest.raises(InvalidOption, match="attempts"):
            await queue.add_many([NewJob("good"), NewJob("bad", None, {"attempts": 0})])
        with pytest.raises(InvalidOption, match="NewJob or"):
            await queue.add_many([("good", 1), "bad"])  # type: ignore[list-item]  # the mistake under test

        assert kit.redis.dbsize() == 0

    async def test_no_jobs_are_no_call(self, kit: Kit) -> None:
        """An empty list is an ordinary result of a query, not an error."""
        assert await kit.queue().add_many([]) == []
        assert kit.redis.dbsize() == 0


class TestCoalescing:
    async def test_adds_of_one_tick_share_one_call(self, kit: Kit) -> None:
        """The fixed cost of a script call is paid once for all who add at the same time."""
        queue = kit.queue()
        await queue.add("warm")
        kit.reset_statistics()

        jobs = await asyncio.gather(*(queue.add("n", n) for n in range(150)))

        assert kit.script_calls() == 1
        assert [job.data for job in jobs] == list(range(150))
        assert kit.ids("wait")[1:] == ids_of(jobs)

    async def test_a_call_holds_at_most_two_hundred_jobs(self, kit: Kit) -> None:
        """A bound on server time per call: other clients of the server are served in between."""
        queue = kit.queue()
        await queue.add("warm")
        kit.reset_statistics()

        await asyncio.gather(*(queue.add("n", n) for n in range(450)))

        assert kit.script_calls() == 3

    async def test_a_call_holds_at_most_one_mebibyte(self, kit: Kit) -> None:
        """Large payloads are not heaped into one command; one larger than the bound goes alone."""
        queue = kit.queue()
        await queue.add("warm")
        kit.reset_statistics()

        await asyncio.gather(*(queue.add("big", "x" * 300_000) for _ in range(5)), queue.add("huge", "x" * 2_000_000))

        assert kit.script_calls() == 3

    async def test_adds_behind_a_call_in_flight_share_the_next(self, kit: Kit) -> None:
        """Group commit without a timer: nobody waits for company, company comes by itself."""
        queue = kit.queue()
        await queue.add("warm")
        kit.reset_statistics()

        first = asyncio.ensure_future(queue.add("first"))
        adder = queue._adder
        while not adder._in_flight:  # noqa: ASYNC110 - a few ticks, until the call is under way
            await asyncio.sleep(0)
        rest = [asyncio.ensure_future(queue.add("rest")) for _ in range(50)]
        await asyncio.gather(first, *rest)

        assert kit.script_calls() == 2

    async def test_who_has_long_been_alone_is_sent_at_once(self, kit: Kit) -> None:
        """It need not wait a turn of the loop for company that does not come."""
        queue = kit.queue()

        async def is_sent_at_once() -> bool:
            adding = asyncio.ensure_future(queue.add("n"))
            await asyncio.sleep(0)  # its first step, and nothing else
            at_once = queue._adder._in_flight == 1
            await adding
            return at_once

        assert [await is_sent_at_once() for _ in range(10)] == [False] * 8 + [True] * 2

    async def test_a_crowd_after_one_alone_shares_the_next_call(self, kit: Kit) -> None:
        """The first of them may go alone, once; then all wait for each other again."""
        queue = kit.queue()
        await kit.add_alone(queue)
        kit.reset_statistics()

        await asyncio.gather(*(queue.add("n", n) for n in range(150)))
        assert kit.script_calls() == 2
        await asyncio.gather(*(queue.add("n", n) for n in range(150)))
        assert kit.script_calls() == 3

    async def test_one_alone_is_told_of_a_duplicate(self, kit: Kit) -> None:
        """As in any other call."""
        queue = kit.queue()
        await kit.add_alone(queue)
        first = await queue.add("n", job_id="mine")
        second = await queue.add("n", job_id="mine")

        assert (first.added, first.id, second.added) == (Added.CREATED, "mine", Added.DUPLICATE)
        assert second.blocked_by is not None
        assert (second.blocked_by.job_id, second.blocked_by.state) == ("mine", JobState.WAITING)

    async def test_one_alone_meets_a_server_that_forgot_the_script(self, kit: Kit) -> None:
        queue = kit.queue()
        before = await kit.add_alone(queue)
        kit.command("SCRIPT", "FLUSH")

        await queue.add("n")
        await queue.add("n")

        assert len(kit.ids("wait")) == before + 2

    async def test_one_alone_whose_connection_is_cut_is_stored_once(self, kit: Kit) -> None:
        """Cut before it sends, and with the call on its way."""
        queue = kit.queue()
        before = await kit.add_alone(queue)
        kit.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await queue.add("n")
        await kit.add_alone(queue)

        adding = asyncio.ensure_future(queue.add("n"))
        await asyncio.sleep(0)  # its first step
        assert queue._adder._in_flight == 1
        kit.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await adding

        assert len(kit.ids("wait")) == 2 * before + 2

    async def test_one_alone_that_the_server_refuses_is_told_so(self, kit: Kit) -> None:
        queue = kit.queue()
        await kit.add_alone(queue)
        kit.command("DEL", kit.base + "id")
        kit.command("LPUSH", kit.base + "id", "not a number")

        with pytest.raises(ServerRefused, match="WRONGTYPE"):
            await queue.add("n")
        kit.command("DEL", kit.base + "id")

        assert (await queue.add("n", job_id="next")).added is Added.CREATED

    async def test_one_alone_that_cannot_be_sent_is_told_so(self, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
        """And leaves nothing behind that holds up the next."""
        queue = kit.queue()
        before = await kit.add_alone(queue)

        def fail(command: Any) -> bytes:
            raise MemoryError("no room to pack it")

        with monkeypatch.context() as patch:
            patch.setattr("bullpen.redis.socket._pack", fail)
            with pytest.raises(MemoryError):
                await queue.add("n")

        await asyncio.gather(*(queue.add("n") for _ in range(5)))
        assert len(kit.ids("wait")) == before + 5

    async def test_options_of_the_queue_are_written_although_first_adds_were_refused_one_by_one(self, kit: Kit) -> None:
        """Calls that wrote them in vain do not make their caller one who may be sent at once, past them."""
        queue = kit.queue(events_max_len=5)
        kit.command("SET", kit.base + "meta", "no hash")
        for _ in range(10):
            with pytest.raises(ServerRefused):
                await queue.add("n")
        kit.command("DEL", kit.base + "meta")

        await queue.add("n")

        assert kit.redis.hget(kit.base + "meta", "opts.maxLenEvents") == b"5"

    async def test_one_alone_that_must_be_durable_is_not_sent_past_the_promise(self, kit: Kit) -> None:
        """This server has no append-only file, so the promise cannot be given, and nothing may be stored."""
        queue = kit.queue()
        before = await kit.add_alone(queue)

        with pytest.raises(BullpenError):
            await queue.add("n", durability="fsync")

        assert len(kit.ids("wait")) == before

    async def test_closing_waits_for_one_alone(self, kit: Kit) -> None:
        queue = kit.queue()
        before = await kit.add_alone(queue)

        adding = asyncio.ensure_future(queue.add("last"))
        await asyncio.sleep(0)  # its first step
        assert queue._adder._in_flight == 1
        await queue.close()

        assert (await adding).id
        assert len(kit.ids("wait")) == before + 1

    async def test_jobs_that_share_their_options_travel_like_those_that_do_not(self, kit: Kit) -> None:
        """What all jobs of a call have in common is sent once; what is stored is the same."""
        queue = kit.queue(attempts=7, lifo=True)
        alike = await queue.add_many([("same", 1), ("same", 2)])
        mixed = await queue.add_many([("same", 1), NewJob("other", 2), NewJob("same", 3, {"attempts": 2})])

        stored = [kit.fields(job.id) for job in (*alike, *mixed)]
        assert [(fields["name"], fields["data"]) for fields in stored] == [
            *[("same", "1"), ("same", "2")],
            *[("same", "1"), ("other", "2"), ("same", "3")],
        ]
        assert [json.loads(fields["opts"])["attempts"] for fields in stored] == [7, 7, 7, 7, 2]
        assert kit.ids("wait") == ids_of([*alike, *mixed])[::-1]

    async def test_cancelling_a_caller_leaves_its_batch_alone(self, kit: Kit) -> None:
        """A web request that goes away must not take the jobs of others with it; what was sent stays sent."""
        queue = kit.queue()
        tasks = [asyncio.create_task(queue.add("n", n)) for n in range(3)]
        await asyncio.sleep(0)

        tasks[1].cancel()
        others = await asyncio.gather(tasks[0], tasks[2])

        assert tasks[1].cancelled()
        assert [job.data for job in others] == [0, 2]
        assert [kit.fields(job_id)["data"] for job_id in kit.ids("wait")] == ["0", "1", "2"]

    async def test_cancelling_add_many_leaves_the_queue_usable(self, kit: Kit) -> None:
        """The next caller must not meet the remains of a cancelled one."""
        queue = kit.queue()
        bulk = asyncio.create_task(queue.add_many(("n", n) for n in range(500)))
        await asyncio.sleep(0)

        bulk.cancel()
        job = await queue.add("after")

        assert job.name == "after"
        with pytest.raises(asyncio.CancelledError):
            await bulk
        assert kit.redis.llen(kit.base + "wait") == 501

    async def test_a_full_buffer_refuses_with_a_typed_error(self, kit: Kit) -> None:
        """Backpressure instead of memory without end; what was accepted is still written."""
        queue = kit.queue(max_buffered=10)

        results = await asyncio.gather(*(queue.add("n", n) for n in range(15)), return_exceptions=True)

        refused = [result for result in results if isinstance(result, QueueFull)]
        assert len(refused) == 5
        assert refused[0].queue == kit.name
        assert "10 adds already wait for the server" in str(refused[0])
        assert kit.redis.llen(kit.base + "wait") == 10

    async def test_close_sends_what_still_waits(self, kit: Kit) -> None:
        """A script that adds and closes at once loses nothing."""
        queue = kit.queue()
        tasks = [asyncio.create_task(queue.add("n", n)) for n in range(300)]
        await asyncio.sleep(0)

        await queue.close()

        assert kit.redis.llen(kit.base + "wait") == 300
        assert len(await asyncio.gather(*tasks)) == 300

    async def test_a_closed_queue_says_so(self, kit: Kit) -> None:
        """An add after close would wait for ever; the message names the queue."""
        queue = kit.queue()
        await queue.add("a")
        await queue.close()
        await queue.close()

        with pytest.raises(QueueClosed, match=f"queue '{kit.name}' was closed"):
            await queue.add("b")
        with pytest.raises(QueueClosed):
            await queue.add_many([("b", 1)])
        with pytest.raises(QueueClosed):
            await queue.counts()
        assert kit.redis.llen(kit.base + "wait") == 1

    async def test_without_a_server_the_deadline_ends_the_wait(self, kit: Kit) -> None:
        """Nothing was ever sent, so the error can promise that nothing was written."""
        queue = kit.queue(connection=f"redis://127.0.0.1:{free_port()}", add_deadline=100)

        with pytest.raises(ConnectionLost, match="nothing was written"):
            await soon(queue.add("a"), within_s=5)


class TestDefaults:
    @pytest.mark.requirement("W-21", "W-22", "W-23", "X-32")
    async def test_a_queues_defaults_hold_for_every_add_and_yield_to_the_call(self, kit: Kit) -> None:
        """One place for the policy of a queue, one word to leave it."""
        queue = kit.queue(attempts=5, backoff=Backoff.exponential(30_000), remove_on_complete=1000, remove_on_fail=5000)

        usual, special = await queue.add("usual"), await queue.add("special", attempts=2, remove_on_complete=True)

        assert json.loads(kit.fields(usual.id)["opts"]) == {
            "attempts": 5,
            "backoff": {"type": "exponential", "delay": 30_000},
            "removeOnComplete": 1000,
            "removeOnFail": 5000,
        }
        assert (special.opts.attempts, special.opts.remove_on_complete) == (2, True)

    async def test_a_default_delay_and_priority_place_the_job(self, kit: Kit) -> None:
        """Defaults are not only written, they act."""
        await kit.queue(delay=60_000).add("later")
        await kit.queue(priority=3).add("ranked")

        assert len(kit.zset("delayed")) == 1
        assert len(kit.zset("prioritized")) == 1

    async def test_an_id_cannot_be_a_default(self, kit: Kit) -> None:
        """Every job after the first would be a duplicate, in silence."""
        with pytest.raises(InvalidOption, match="job_id: expected an option of one job"):
            Queue(kit.name, connection=kit.url, job_id="same")  # type: ignore[call-arg]  # that is the point


class TestLoops:
    def test_one_queue_object_serves_one_loop_after_another(self, redis_server: RedisServer, redis_url: str) -> None:
        """A module-level queue in a script or a test run meets a new loop with every asyncio.run."""
        connection = Connection(redis_url)
        queue = Queue("loops", connection=connection)

        async def add() -> str:
            job = await queue.add("x")
            await connection.aclose()
            return job.id

        assert [asyncio.run(add()), asyncio.run(add())] == ["1", "2"]


@pytest.mark.parametrize(
    ("add_deadline", "stays_ms"), [(None, 60_000), (20_000, 60_000), (90_000, 180_000)], ids=["default", "20s", "90s"]
)
@pytest.mark.parametrize("how", ["queue", "call", "many", "blocking"])
async def test_the_record_of_an_add_stays_as_long_as_it_may_be_repeated_and_a_minute_at_least(
    kit: Kit, how: str, add_deadline: int | None, stays_ms: int
) -> None:
    """Another client that deletes the queue leaves it behind: it does not know the key."""
    if how == "queue":
        await kit.queue(add_deadline=5_000 if add_deadline is None else add_deadline).add("a")
    elif how == "call":
        await kit.queue().add("a", add_deadline=add_deadline)
    elif how == "many":
        await kit.queue().add_many([("a", 1), ("a", 2)], add_deadline=add_deadline)
    else:
        with SyncQueue(kit.name, connection=kit.url) as queue:
            queue.add("a", add_deadline=add_deadline)
            queue.add_many([("a", 1), ("a", 2)], add_deadline=add_deadline)

    [key] = kit.redis.scan_iter(f"{kit.base}bp:call:*")
    assert stays_ms - 5_000 < kit.redis.pttl(key) <= stays_ms

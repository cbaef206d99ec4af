"""Dead letters: every final failure leaves one entry with all it takes to understand and to repeat the job."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.errors import CorruptJob, DeadLetterNotFound, InvalidOption, JobStateConflict, PermanentError
from bullpen.queue import Job, JobState, Queue
from bullpen.wire.options import DEFAULT_OPTIONS, make_options
from bullpen.worker import Worker
from tests.queue._kit import Failing, Gate, Kit, engine_of, nothing


async def fail(job: Job) -> None:
    raise PermanentError("no\nsecond line")


def dlq(kit: Kit, rest: str) -> str:
    return f"bull:{kit.name}-dlq:{rest}"


def entry_of(kit: Kit, entry_id: str) -> Any:
    return json.loads(kit.fields(entry_id, queue=f"{kit.name}-dlq")["data"])


class TestEntry:
    @pytest.mark.requirement("W-39", "X-5", "X-6", "X-7", "X-8", "X-125", "X-42")
    async def test_an_entry_holds_the_union_of_all_fields(self, kit: Kit) -> None:
        """Error, payload, options, origin and time: nothing else must be looked up, and nothing else is there."""
        queue = kit.queue()
        data = {"to": "ada", "runId": "run-1", "tenantId": "t-9"}
        job = await queue.add("charge", data, job_id="order-1", attempts=1, backoff=Backoff.fixed(5), priority=4)
        before = kit.server_ms()

        await kit.drain(fail, 1, dead_letters=True)

        entry = entry_of(kit, "dl-order-1-1")
        stack, failed_at = entry["error"].pop("stack"), entry.pop("failedAt")
        assert entry == {
            "originalJobId": "order-1",
            "originalJobName": "charge",
            "originalQueue": kit.name,
            "originalData": data,
            "originalOpts": json.loads(kit.fields("order-1")["opts"]),
            "originalTimestamp": job.timestamp,
            "originalPriority": 4,
            "attemptsStarted": 1,
            "error": {"message": "no\nsecond line"},
            "errorMessage": "no",
            "cause": "permanent",
            "attemptsMade": 1,
            "runId": "run-1",
            "tenantId": "t-9",
        }
        assert stack.rstrip().endswith("second line")
        told_ms = datetime.fromisoformat(failed_at).astimezone(UTC).timestamp() * 1000
        # A machine's clock may be set back a little meanwhile.
        assert before - 1_000 <= told_ms <= kit.server_ms() + 1_000
        assert failed_at.endswith("Z")

    @pytest.mark.requirement("X-42", "X-5", "X-7")
    async def test_an_entry_is_an_ordinary_waiting_job_of_the_dead_letter_queue(self, kit: Kit) -> None:
        """Any BullMQ client or dashboard can show it; nobody processes it, so depth is the length of `wait`."""
        queue = kit.queue()
        job = await queue.add("charge", {"n": 1})

        await kit.drain(fail, 1, dead_letters=True)

        entry_id = f"dl-{job.id}-1"
        stored = kit.fields(entry_id, queue=f"{kit.name}-dlq")
        assert set(stored) >= {"name", "data", "opts", "timestamp", "delay", "priority"}
        assert (stored["name"], stored["delay"], stored["priority"]) == ("charge-failed", "0", "0")
        assert json.loads(stored["opts"])["jobId"] == entry_id
        assert kit.redis.lrange(dlq(kit, "wait"), 0, -1) == [entry_id.encode()]
        assert kit.redis.get(dlq(kit, "id")) == b"1"
        assert kit.redis.zrange(dlq(kit, "marker"), 0, -1) == [b"0"]
        assert kit.events(queue=f"{kit.name}-dlq") == [
            {"event": "added", "jobId": entry_id, "name": "charge-failed"},
            {"event": "waiting", "jobId": entry_id},
        ]
        assert kit.fields(job.id)["bpdl"] == entry_id
        assert await kit.queue(f"{kit.name}-dlq").state_of(entry_id) is JobState.WAITING

    @pytest.mark.requirement("X-6", "X-125")
    @pytest.mark.parametrize(
        "raw",
        [
            '{"a" : 1.0, "b":[ ],"c":1e-7}',
            '{"text":"Zoë ☃ \\u2028 \\/"}',
            '{"z":1,"a":9007199254740993}',
            "[]",
            "null",
            '"text"',
            json.dumps({"big": "x" * 3_000_000}),
        ],
        ids=lambda raw: raw[:20],
    )
    async def test_the_payload_is_kept_byte_for_byte(self, kit: Kit, raw: str) -> None:
        """Not parsed and written again: numbers, order and escapes stay as the producer wrote them."""
        kit.seed("job", data=raw)

        await kit.drain(fail, 1, dead_letters=True)

        stored = kit.fields("dl-job-1", queue=f"{kit.name}-dlq")["data"]
        assert f'"originalData":{raw}' in stored
        assert entry_of(kit, "dl-job-1")["originalData"] == json.loads(raw)

    @pytest.mark.parametrize("raw", [b"{broken", b"\xff\xfe\x00", b'{"nan":NaN}', b'{"a":"\\ud800"}', b""])
    async def test_a_payload_that_is_no_json_spoils_no_entry(self, kit: Kit, raw: bytes) -> None:
        """It travels as text or base64; the entry itself is JSON, and redriving brings the very bytes back."""
        kit.seed("job", data=raw, opts='{"removeOnFail": true}')

        await kit.drain(fail, 1, dead_letters=True)
        letters = kit.queue().dead_letters
        [letter] = await letters.list()
        await letters.redrive(letter.id)

        assert letter.job_id == "job"
        assert kit.redis.hget(kit.base + "job", "data") in (raw, raw or b"{}")

    async def test_a_colon_in_an_id_is_encoded(self, kit: Kit) -> None:
        """Entry ids obey the rules for ids: a colon would make them look like keys of the queue."""
        await kit.queue().add("a", job_id="a:b:c")

        await kit.drain(fail, 1, dead_letters=True)

        [letter] = await kit.queue().dead_letters.list()
        assert (letter.id, letter.job_id) == ("dl-a%3Ab%3Ac-1", "a:b:c")


class TestWhen:
    @pytest.mark.requirement("X-43", "W-61", "Q-26", "W-39")
    @pytest.mark.parametrize("attempts", [1, 3])
    async def test_exactly_the_last_attempt_leaves_one_entry(self, kit: Kit, attempts: int) -> None:
        """The naive test `attemptsMade >= attempts` inside the handler never fires; the settle decides."""
        depths = []
        queue = kit.queue()

        async def look(job: Job) -> None:
            depths.append(await queue.dead_letters.depth())
            raise RuntimeError("boom")

        await queue.add("a", attempts=attempts, backoff=Backoff.fixed(1))
        await kit.drain(look, 1, dead_letters=True)

        assert depths == [0] * attempts
        [letter] = await queue.dead_letters.list()
        assert (letter.attempts_made, letter.cause) == (attempts, "exhausted")

    @pytest.mark.requirement("X-50", "Q-65")
    async def test_entry_and_failure_appear_together(self, kit: Kit) -> None:
        """One script: no moment with a failed job and no entry, nor with an entry for a job that may succeed."""
        job = await kit.queue().add("a")
        worker = kit.worker(fail, dead_letters=True)
        with kit.redis.monitor() as monitor:  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
            await worker.start()
            await kit.until(lambda: kit.zset("failed"), "it failed")
            await worker.close()
            kit.command("ECHO", "the end")
            commands = []
            for line in monitor.listen():
                commands.append(str(line["command"]))
                if "the end" in commands[-1]:
                    break

        [failed] = [at for at, text in enumerate(commands) if re.match(rf"ZADD {kit.base}failed \d+ {job.id}$", text)]
        [written] = [at for at, text in enumerate(commands) if text == f"LPUSH {dlq(kit, 'wait')} dl-{job.id}-1"]
        between = commands[min(failed, written) : max(failed, written)]
        assert not [text for text in between if text.startswith("EVAL")]

    @pytest.mark.parametrize(
        ("fields", "options", "cause", "reason"),
        [
            ({"defa": "child bull:kids:1 failed"}, {}, "deferred", "child bull:kids:1 failed"),
            ({"data": "{broken"}, {}, "bad_data", "data cannot be read"),
            (
                {"stc": 2, "opts": '{"attempts": 2}'},
                {"count_stalls_as_attempts": True},
                "exhausted",
                "stalled 2 times and failed 0 times",
            ),
            (
                {"opts": '{"attempts": 3, "backoff": {"type": "own"}}'},
                {"value": RuntimeError("enough"), "backoff": {"own": lambda failures, error, job: -1}},
                "permanent",
                "enough",
            ),
        ],
        ids=["deferred", "data", "stalls", "backoff"],
    )
    async def test_failures_without_a_run_leave_one_too(
        self, kit: Kit, fields: dict[str, Any], options: dict[str, Any], cause: str, reason: str
    ) -> None:
        """A stall limit, a failed child, unreadable data: these are the ones people lose."""
        kit.seed("job", **fields)
        error = options.pop("value", None)

        await kit.drain(Failing(*([error] if error else [])), 1, dead_letters=True, **options)

        [letter] = await kit.queue().dead_letters.list()
        assert (letter.job_id, letter.cause) == ("job", cause)
        assert reason in letter.error_message

    async def test_a_value_that_cannot_be_stored_leaves_one(self, kit: Kit) -> None:
        """The work is done but its answer is lost: somebody must know."""
        await kit.queue().add("a")

        await kit.drain(Failing(value=b"bytes"), 1, dead_letters=True)

        [letter] = await kit.queue().dead_letters.list()
        assert letter.cause == "bad_result"

    async def test_without_the_option_there_is_no_dead_letter_queue(self, kit: Kit) -> None:
        """The failed set is the protocol's own; nobody gets a second queue unasked."""
        await kit.queue().add("a")

        await kit.drain(fail, 1)

        assert list(kit.redis.scan_iter(dlq(kit, "*"))) == []
        assert len(kit.zset("failed")) == 1

    async def test_the_failure_is_written_even_if_the_entry_cannot_be(self, kit: Kit) -> None:
        """A foreign key in the way must not keep the job active for ever."""
        job = await kit.queue().add("a")
        kit.redis.set(dlq(kit, "wait"), "in the way")

        told = await kit.drain(fail, 1, dead_letters=True)

        assert told.ids("failed") == [job.id]
        assert list(kit.zset("failed")) == [job.id]
        assert "bpdl" not in kit.fields(job.id)
        kit.redis.delete(dlq(kit, "wait"))


class TestNames:
    @pytest.mark.requirement("W-24", "X-7")
    async def test_the_suffix_can_be_chosen_on_both_sides(self, kit: Kit) -> None:
        """Worker and queue must speak of the same place."""
        await kit.queue().add("a")

        await kit.drain(fail, 1, dead_letters=DeadLetterPolicy(store="queue", suffix="-dead"))

        letters = kit.queue(dead_letter_suffix="-dead").dead_letters
        assert letters.name == f"{kit.name}-dead"
        assert await letters.depth() == 1
        assert await kit.queue().dead_letters.depth() == 0

    @pytest.mark.requirement("X-7")
    async def test_a_policy_may_name_the_queue(self, kit: Kit) -> None:
        """One dead-letter queue for several queues is a common wish."""
        await kit.queue().add("a")

        await kit.drain(fail, 1, policy=RetryPolicy(dead_letters=DeadLetterPolicy(store="queue", name="all-dead")))

        assert kit.redis.llen("bull:all-dead:wait") == 1

    async def test_a_policy_changes_only_what_it_names(self, kit: Kit) -> None:
        """Dead letters and final errors that the worker was told stay, whatever else a policy says."""
        await kit.queue().add("a", attempts=5)
        handler = Failing(KeyError("gone"))

        await kit.drain(handler, 1, dead_letters=True, permanent_errors=(KeyError,), policy=RetryPolicy(attempts=2))

        assert (handler.runs, await kit.queue().dead_letters.depth()) == (1, 1)

    def test_another_cluster_slot_is_refused_when_the_worker_is_made(self) -> None:
        """One script writes both queues, so they must live on one node; found at start, not at the first failure."""
        with pytest.raises(InvalidOption, match=r"dead_letters: expected a dead-letter queue in the cluster slot"):
            Worker(
                "{orders}",
                nothing,
                connection="redis://localhost",
                dead_letters=DeadLetterPolicy(store="queue", name="other"),
            )
        Worker("{orders}", nothing, connection="redis://localhost", dead_letters=True)
        Worker("orders", nothing, connection="redis://localhost", prefix="{bull}", dead_letters=True)


class TestReading:
    async def test_entries_are_listed_oldest_first_in_pages(self, kit: Kit) -> None:
        """As they failed; a page that begins beyond the end is empty."""
        await kit.queue().add_many(("n", n) for n in range(7))
        await kit.drain(fail, 7, dead_letters=True)
        letters = kit.queue().dead_letters

        pages = [await letters.list(start=start, count=3) for start in (0, 3, 6, 9)]

        assert [[letter.data for letter in page] for page in pages] == [[0, 1, 2], [3, 4, 5], [6], []]
        assert [letter.data async for letter in letters] == list(range(7))
        assert await letters.depth() == 7

    async def test_one_entry_is_read_by_its_id(self, kit: Kit) -> None:
        """All the fields an operator needs, as attributes; None when there is no such entry."""
        job = await kit.queue().add("charge", {"n": 1}, attempts=1)
        await kit.drain(fail, 1, dead_letters=True)
        letters = kit.queue().dead_letters

        letter = await letters.get(f"dl-{job.id}-1")

        assert letter is not None
        assert (letter.job_id, letter.job_name, letter.queue, letter.data) == (job.id, "charge", kit.name, {"n": 1})
        assert (letter.error_message, letter.attempts_made) == ("no\nsecond line", 1)
        assert letter.error_stack is not None and "PermanentError" in letter.error_stack
        assert letter.entry["originalJobId"] == job.id
        assert await letters.get("dl-nothing-1") is None

    @pytest.mark.requirement("X-22")
    async def test_the_largest_job_has_room_for_its_letter(self, kit: Kit) -> None:
        """The limit is for jobs; an entry holds the payload and all the context around it."""
        queue = kit.queue()
        room = 10 * 1024 * 1024 - len(make_options(DEFAULT_OPTIONS, attempts=1).wire_json) - 2
        await queue.add("big", "x" * room, attempts=1)
        await kit.drain(fail, 1, dead_letters=True)

        (letter,) = await queue.dead_letters.list()

        assert len(letter.data) == room
        assert kit.redis.hstrlen(f"bull:{kit.name}-dlq:{letter.id}", "data") > 10 * 1024 * 1024
        assert await queue.dead_letters.redrive(letter.id) == "1"
        await kit.drain(nothing, 1)

    async def test_foreign_jobs_in_the_queue_hide_no_entry(self, kit: Kit) -> None:
        """Anybody may add there; what is no entry is shown empty and cannot be redriven."""
        other = kit.queue(f"{kit.name}-dlq")
        for data in ([1], "text", {"error": "text"}, {"originalJobId": 5}):
            await other.add("strange", data)
        job = await kit.queue().add("a")
        await kit.drain(fail, 1, dead_letters=True)
        letters = kit.queue().dead_letters

        listed = await letters.list()

        assert [letter.job_id for letter in listed][-1] == job.id
        assert len(listed) == 5
        for letter in listed[:4]:
            with pytest.raises(CorruptJob, match="names no job"):
                await letters.redrive(letter.id)
        assert await letters.depth() == 5

    async def test_discard_deletes_an_entry_and_leaves_the_failed_job(self, kit: Kit) -> None:
        """ "We looked at it" is a decision too; repeating it is harmless."""
        job = await kit.queue().add("a")
        await kit.drain(fail, 1, dead_letters=True)
        letters = kit.queue().dead_letters

        first, second = await letters.discard(f"dl-{job.id}-1"), await letters.discard(f"dl-{job.id}-1")

        assert (first, second) == (True, False)
        assert await letters.depth() == 0
        assert not kit.redis.exists(dlq(kit, f"dl-{job.id}-1"))
        assert list(kit.zset("failed")) == [job.id]
        removed = kit.events(queue=f"{kit.name}-dlq")[-1]
        assert (removed["event"], removed["jobId"], removed["prev"]) == ("removed", f"dl-{job.id}-1", "wait")


class TestRedrive:
    async def failed_once(self, kit: Kit, **options: Any) -> Job:
        job = await kit.queue().add("charge", {"amount": 1.50}, job_id="order-1", attempts=2, **options)
        await kit.drain(Failing(RuntimeError("one"), RuntimeError("two")), 1, dead_letters=True)
        return job

    @pytest.mark.requirement("X-5", "X-123")
    async def test_a_redriven_job_keeps_its_identity_and_gets_new_attempts(self, kit: Kit) -> None:
        """Same id, data, creation time and idempotency key; `ats` still grows, so the fence holds."""
        job = await self.failed_once(kit, backoff=Backoff.fixed(1))
        queue = kit.queue()

        answer = await queue.dead_letters.redrive("dl-order-1-2")

        assert answer == "order-1"
        stored = kit.fields("order-1")
        assert kit.ids("wait") == ["order-1"]
        assert not {"finishedOn", "failedReason", "atm", "bpdl", "returnvalue"} & set(stored)
        assert stored["ats"] == "2"
        assert (kit.zset("failed"), await queue.dead_letters.depth()) == ({}, 0)
        assert "0" in kit.marker()
        assert kit.events(job_id="order-1")[-1] == {"event": "waiting", "jobId": "order-1", "prev": "failed"}
        assert kit.events(queue=f"{kit.name}-dlq")[-1]["event"] == "removed"
        seen: list[Job] = []

        async def record(job: Job) -> None:
            seen.append(job)

        await kit.drain(record, 1)
        [again] = seen
        # Of attempts before the redrive nothing is left: the one is that of the run that has ended by now.
        assert (again.data, again.attempts_made, again.fence) == ({"amount": 1.50}, 1, 3)
        assert again.idempotency_key == job.idempotency_key

    async def test_a_redriven_job_wakes_an_idle_worker(self, kit: Kit) -> None:
        """The operator who pressed the button waits for it."""
        await self.failed_once(kit, backoff=Backoff.fixed(1))
        told = await kit.work(nothing, drain_delay=60_000)
        await kit.until(lambda: engine_of(told).driver.last_exchange, "the worker is idle")

        await kit.queue().dead_letters.redrive("dl-order-1-2")

        await told.finished()
        assert told.ids("completed") == ["order-1"]

    async def test_a_redriven_job_that_fails_again_leaves_a_new_entry(self, kit: Kit) -> None:
        """Each failure has its own entry id, derived from the take it happened in."""
        await self.failed_once(kit, backoff=Backoff.fixed(1))
        letters = kit.queue().dead_letters
        await letters.redrive("dl-order-1-2")

        await kit.drain(fail, 1, dead_letters=True)

        assert [letter.id for letter in await letters.list()] == ["dl-order-1-3"]

    @pytest.mark.requirement("X-125")
    async def test_a_job_that_was_removed_is_rebuilt_from_its_entry(self, kit: Kit) -> None:
        """Retention or eviction took it; options, data and creation time come back from the entry."""
        job = await self.failed_once(
            kit, backoff=Backoff.fixed(1), remove_on_fail=True, priority=6, lane="a", keep_logs=7, stack_trace_limit=3
        )
        assert not kit.has("order-1")

        await kit.queue().dead_letters.redrive("dl-order-1-2")

        stored = kit.fields("order-1")
        assert (stored["name"], stored["data"], stored["priority"]) == ("charge", '{"amount":1.5}', "6")
        assert (stored["bplane"], stored["timestamp"]) == ("a", str(job.timestamp))
        assert json.loads(stored["opts"]) == json.loads(job.record.raw_opts)
        assert list(kit.zset("prioritized")) == ["order-1"]
        assert kit.event_names("order-1")[-2:] == ["added", "waiting"]
        read = await kit.queue().get_job("order-1")
        assert read is not None and read.idempotency_key == job.idempotency_key
        told = await kit.drain(nothing, 1)
        assert told.ids("completed") == ["order-1"]

    async def test_a_lifo_job_goes_to_the_front_again(self, kit: Kit) -> None:
        """Its options still hold."""
        await kit.queue().add("front", job_id="front", lifo=True)
        await kit.drain(fail, 1, dead_letters=True)
        await kit.queue().add("waiting")

        await kit.queue().dead_letters.redrive("dl-front-1")

        assert kit.ids("wait")[0] == "front"

    async def test_redriving_twice_makes_one_run(self, kit: Kit) -> None:
        """Two operators, one button each."""
        await self.failed_once(kit, backoff=Backoff.fixed(1))
        letters = kit.queue().dead_letters
        await letters.redrive("dl-order-1-2")

        with pytest.raises(DeadLetterNotFound, match=r"'dl-order-1-2' is not in .* redriven or discarded already"):
            await letters.redrive("dl-order-1-2")

        assert kit.ids("wait") == ["order-1"]

    @pytest.mark.parametrize("state", ["waiting", "active"])
    async def test_an_id_in_use_is_refused_and_the_entry_stays(self, kit: Kit, state: str) -> None:
        """A newer job has taken the id; overwriting it would lose that one."""
        await self.failed_once(kit, backoff=Backoff.fixed(1), remove_on_fail=True)
        queue = kit.queue()
        await queue.add("newer", {"v": 2}, job_id="order-1")
        gate = Gate()
        if state == "active":
            await kit.work(gate)
            await gate.reached()

        with pytest.raises(JobStateConflict, match=f"job 'order-1' of queue '{kit.name}' is {state}") as refused:
            await queue.dead_letters.redrive("dl-order-1-2")

        assert (refused.value.queue, refused.value.job_id) == (kit.name, "order-1")
        assert await queue.dead_letters.depth() == 1
        assert kit.fields("order-1")["data"] == '{"v":2}'
        gate.open()

    async def test_an_entry_that_somebody_processed_is_taken_out_of_its_state(self, kit: Kit) -> None:
        """A worker on the dead-letter queue may have completed the entry; redriving leaves no ghost there."""
        await self.failed_once(kit, backoff=Backoff.fixed(1))
        await kit.drain(nothing, 1, queue=f"{kit.name}-dlq")

        await kit.queue().dead_letters.redrive("dl-order-1-2")

        assert not kit.redis.exists(dlq(kit, "dl-order-1-2"))
        assert kit.redis.zcard(dlq(kit, "completed")) == 0
        assert kit.ids("wait") == ["order-1"]

    async def test_redrive_of_a_child_makes_it_pending_again(self, kit: Kit) -> None:
        """Its parent counted the failure; with the child back in line it must wait for it once more."""
        kit.seed("parent", to="waiting-children", score=1)
        parent_key = f"{kit.base}parent"
        parent = json.dumps({"id": "parent", "queueKey": kit.base[:-1], "idof": True})
        kit.seed("other")
        kit.seed("child", parentKey=parent_key, parent=parent)
        kit.redis.sadd(f"{parent_key}:dependencies", f"{kit.base}child", f"{kit.base}other")
        kit.redis.lrem(kit.base + "wait", 0, "other")
        kit.redis.zadd(kit.base + "delayed", {"other": 9e15})
        await kit.drain(fail, 1, dead_letters=True)
        assert kit.redis.hkeys(f"{parent_key}:failed") == [f"{kit.base}child".encode()]

        await kit.queue().dead_letters.redrive("dl-child-1")

        assert kit.redis.sismember(f"{parent_key}:dependencies", f"{kit.base}child")
        assert not kit.redis.exists(f"{parent_key}:failed")

    async def test_the_queue_may_be_used_without_a_worker(self, kit: Kit) -> None:
        """An operator's script has only a Queue."""
        async with Queue(kit.name, connection=kit.url) as queue:
            assert await queue.dead_letters.depth() == 0
            assert await queue.dead_letters.list() == []
            with pytest.raises(DeadLetterNotFound):
                await queue.dead_letters.redrive("dl-none-1")
        assert kit.redis.dbsize() == 0


@pytest.mark.parametrize("member", ["originalData", "redriven", "other"])
async def test_letters_that_nobody_can_read_stop_no_redrive(kit: Kit, member: str) -> None:
    """Anybody who may write the store may nest a letter as deep as he likes; the others go back all the same."""
    queue = kit.queue()
    for depth in (300, 900, 5_000):
        data = f'{{"originalJobId":"j","{member}":{"[" * depth}{"]" * depth},"failedAt":"2026-01-01T00:00:00Z"}}'
        kit.redis.hset(dlq(kit, f"dl-{depth}-1"), mapping={"name": "x", "data": data, "opts": "{}", "timestamp": "1"})
        kit.redis.lpush(dlq(kit, "wait"), f"dl-{depth}-1")
    await queue.add("charge", job_id="good")
    told = await kit.work(fail, dead_letters=True)
    await told.wait("failed")
    await told.worker.close()

    report = await queue.dead_letters.redrive_all()

    assert (report.examined, report.matched) == (4, 4)
    assert "dl-good-1" not in dict(report.skipped)
    assert "good" in kit.ids("wait")
    for letter in await queue.dead_letters.list():
        await queue.dead_letters.discard(letter.id)

"""The server acted and its reply was lost: every call may be repeated, and none acts twice.

The proxy lets a call through, drops its answer and resets the connection: what a network does at its worst moment.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from bullpen.errors import ConnectionLost, OutcomeUnknown
from bullpen.ports.edits import make_edit
from bullpen.queue import Added, Job, JobState, NewJob
from bullpen.testing import FaultProxy, RedisServer, free_port
from bullpen.wire.keys import QueueKeys
from bullpen.wire.scripts import SCRIPTS
from tests.queue._kit import Gate, Kit, ids_of, nothing, soon


@pytest.fixture
def proxy(redis_server: RedisServer, kit: Kit) -> Iterator[FaultProxy]:
    """Faults on the way to the shared server, which knows our scripts already: each call is one EVALSHA."""
    for script in SCRIPTS.values():
        kit.command("SCRIPT", "LOAD", script.body)
    with FaultProxy(redis_server) as opened:
        yield opened


def call(name: str) -> bytes:
    """What the calls of one script contain, and no others."""
    return SCRIPTS[name].sha1


# ---- adding ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("Q-14", "Q-65")
@pytest.mark.parametrize("torn", [False, True], ids=["dropped", "torn in half"])
@pytest.mark.parametrize(
    "options",
    [{}, {"delay": 60_000}, {"priority": 3}, {"job_id": "order-1"}, {"lifo": True}],
    ids=["plain", "delayed", "prioritized", "own id", "lifo"],
)
async def test_an_add_whose_reply_is_lost_stores_one_job(
    kit: Kit, proxy: FaultProxy, options: dict[str, Any], torn: bool
) -> None:
    """A producer that repeats must not send two emails; and it is told CREATED, since its own call created it."""
    queue = kit.queue(connection=proxy.url)
    lost = proxy.lose_reply(call("add"), times=2, torn=torn)

    job = await soon(queue.add("mail", {"to": "ada"}, **options))

    assert lost.count == 2
    assert job.added is Added.CREATED
    counts = await queue.counts()
    assert counts.pending == 1
    assert kit.fields(job.id)["data"] == '{"to":"ada"}'
    assert [event["event"] for event in kit.events()].count("added") == 1
    assert kit.command("GET", kit.base + "id") == b"1"


@pytest.mark.requirement("W-83")
async def test_a_deduplicated_add_whose_reply_is_lost_is_told_the_same_owner(kit: Kit, proxy: FaultProxy) -> None:
    """The record of the call keeps who stood in the way, and the repetition changes nothing."""
    queue = kit.queue(connection=proxy.url)
    first = await queue.add("mail", deduplication="d", job_id='a "quoted", id')
    lost = proxy.lose_reply(call("add"), times=2)

    jobs = await soon(queue.add_many([NewJob("mail", 1, {"deduplication": "d"}), ("mail", 2)]))

    assert lost.count == 2
    assert [(job.id, job.added) for job in jobs] == [(first.id, Added.DEDUPLICATED), ("3", Added.CREATED)]
    assert [event["event"] for event in kit.events()].count("deduplicated") == 1


@pytest.mark.requirement("W-83")
async def test_an_owner_whose_reply_is_lost_is_not_deduplicated_by_itself(kit: Kit, proxy: FaultProxy) -> None:
    queue = kit.queue(connection=proxy.url)
    lost = proxy.lose_reply(call("add"), times=2)

    job = await soon(queue.add("mail", deduplication="d"))

    assert lost.count == 2
    assert job.added is Added.CREATED
    assert await queue.deduplication_owner("d") == job.id


@pytest.mark.requirement("Q-14", "Q-65")
async def test_adds_that_share_a_call_are_repeated_together_and_stored_once(kit: Kit, proxy: FaultProxy) -> None:
    """Each caller of a coalesced add gets its own job, also from the repeated answer."""
    queue = kit.queue(connection=proxy.url)
    lost = proxy.lose_reply(call("add"), times=1)

    jobs = await soon(asyncio.gather(*(queue.add("mail", {"number": number}) for number in range(150))))

    assert lost.count == 1
    assert ids_of(jobs) == [str(number) for number in range(1, 151)]
    assert [kit.fields(job.id)["data"] for job in jobs] == [f'{{"number":{number}}}' for number in range(150)]
    assert (await queue.counts()).waiting == 150


@pytest.mark.requirement("Q-14", "Q-65")
@pytest.mark.parametrize("skip", [0, 1, 2], ids=["first call", "second call", "last call"])
async def test_a_bulk_add_that_loses_one_of_its_replies_stores_each_job_once_and_in_order(
    kit: Kit, proxy: FaultProxy, skip: int
) -> None:
    """A bulk add is several calls; whichever is hit, the others do not care."""
    queue = kit.queue(connection=proxy.url)
    lost = proxy.lose_reply(call("add"), times=1, skip=skip)

    jobs = await soon(queue.add_many([("mail", {"number": number}) for number in range(450)]))

    assert lost.count == 1
    assert kit.ids("wait") == ids_of(jobs) == [str(number) for number in range(1, 451)]


@pytest.mark.requirement("X-102", "Q-14")
async def test_a_repeated_add_still_tells_duplicates_apart(kit: Kit, proxy: FaultProxy) -> None:
    """The repeated answer says of each job what the first one said: stored by us, or there before."""
    queue = kit.queue(connection=proxy.url)
    await queue.add("mail", {"version": 1}, job_id="old")
    lost = proxy.lose_reply(call("add"), times=1)

    new, old = await soon(
        queue.add_many(
            [NewJob("mail", {"version": 2}, {"job_id": "new"}), NewJob("mail", {"version": 2}, {"job_id": "old"})]
        )
    )

    assert lost.count == 1
    assert (new.added, old.added) == (Added.CREATED, Added.DUPLICATE)
    assert old.data == {"version": 1}
    assert old.blocked_by is not None and old.blocked_by.state is JobState.WAITING
    assert [event["event"] for event in kit.events()].count("duplicated") == 1


@pytest.mark.requirement("Q-14")
async def test_an_add_that_never_reached_the_server_is_sent_again(kit: Kit, proxy: FaultProxy) -> None:
    """The other half of "unknown": nothing had happened, so the repetition is the only one."""
    queue = kit.queue(connection=proxy.url)
    lost = proxy.lose_request(call("add"), times=2)

    job = await soon(queue.add("mail"))

    assert lost.count == 2
    assert kit.ids("wait") == [job.id]


async def test_an_add_without_any_answer_says_that_its_outcome_is_unknown(kit: Kit, proxy: FaultProxy) -> None:
    """After the deadline the caller must decide, so it is told the truth: the job may be there."""
    queue = kit.queue(connection=proxy.url, add_deadline=300)
    proxy.lose_reply(call("add"), times=1_000)
    begun = time.monotonic()

    with pytest.raises(OutcomeUnknown, match="the outcome is unknown") as raised:
        await soon(queue.add("mail"))

    assert time.monotonic() - begun < 15
    assert raised.value.queue == kit.name
    assert kit.ids("wait") == ["1"]  # this time it was


async def test_an_add_that_could_not_be_sent_says_that_nothing_was_written(kit: Kit) -> None:
    """Where nobody answers the phone nothing can have happened: the caller may simply try again."""
    queue = kit.queue(connection=f"redis://127.0.0.1:{free_port()}", add_deadline=300)

    with pytest.raises(ConnectionLost, match="nothing was written"):
        await soon(queue.add("mail"))


async def test_the_deadline_counts_for_each_add_and_not_for_each_call(kit: Kit) -> None:
    """With thousands of adds in the buffer the last one must not wait for the deadlines of all calls before it."""
    queue = kit.queue(connection=f"redis://127.0.0.1:{free_port()}", add_deadline=300)
    begun = time.monotonic()

    errors = await soon(
        asyncio.gather(*(queue.add("mail", {"number": number}) for number in range(2_000)), return_exceptions=True)
    )

    assert {type(error) for error in errors} == {ConnectionLost}
    assert time.monotonic() - begun < 15


# ---- working --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-124", "Q-23", "Q-66")
@pytest.mark.parametrize("torn", [False, True], ids=["dropped", "torn in half"])
async def test_jobs_of_a_take_whose_reply_is_lost_are_handed_over_again(
    kit: Kit, proxy: FaultProxy, torn: bool
) -> None:
    """Else a whole batch sits locked with nobody working on it until the locks run out (here 30 s)."""
    queue = kit.queue()
    jobs = await queue.add_many([("mail", {"number": number}) for number in range(20)])
    lost = proxy.lose_reply(call("exchange"), times=3, torn=torn)

    told = await kit.drain(nothing, 20, connection=proxy.url, concurrency=20)

    assert lost.count >= 1  # two calls may share the connection that is reset
    assert sorted(told.ids("active"), key=int) == ids_of(jobs)
    assert [kit.fields(job.id)["ats"] for job in jobs] == ["1"] * 20
    assert told.of("lock_lost") == told.of("error") == []


@pytest.mark.requirement("Q-65", "Q-66")
async def test_outcomes_whose_reply_is_lost_are_written_once(kit: Kit, proxy: FaultProxy) -> None:
    """The repetition finds the job settled by ourselves: that is success, not a lost lock."""
    gate = Gate("done")
    queue = kit.queue(connection=kit.url)
    jobs = await queue.add_many([("mail", {})] * 10)
    told = await kit.work(gate, connection=proxy.url, concurrency=10)
    await gate.reached(10)
    lost = proxy.lose_reply(call("exchange"), times=2)

    gate.open()
    await told.finished(10)

    await lost.happened()
    assert sorted(told.ids("completed"), key=int) == ids_of(jobs)
    assert told.of("lock_lost") == told.of("error") == []
    for job in jobs:
        assert kit.event_names(job.id).count("completed") == 1
        assert kit.fields(job.id)["atm"] == "1"


@pytest.mark.requirement("X-50", "X-119")
async def test_a_dead_letter_whose_reply_is_lost_is_written_once(kit: Kit, proxy: FaultProxy) -> None:
    """One failure, one entry, however often the call is repeated."""

    async def fail(job: Job) -> None:
        raise ValueError("no such address")

    queue = kit.queue(attempts=1)
    await queue.add("mail", {"to": "nobody"})
    lost = proxy.lose_reply(call("exchange"), times=2, skip=1)

    told = await kit.drain(fail, 1, connection=proxy.url, dead_letters=True)

    assert lost.count == 2
    assert told.ids("failed") == ["1"]
    assert await queue.dead_letters.depth() == 1
    assert kit.fields("1")["bpdl"] == (await queue.dead_letters.list())[0].id


@pytest.mark.requirement("Q-25", "Q-65")
async def test_a_retry_whose_reply_is_lost_counts_one_attempt(kit: Kit, proxy: FaultProxy) -> None:
    """Counting twice would cost the job one of its attempts."""
    attempts: list[int] = []

    async def fail_twice(job: Job) -> None:
        attempts.append(job.attempts_made)
        if len(attempts) < 3:
            raise ValueError("not yet")

    await kit.queue(attempts=5, backoff=1).add("mail")
    lost = proxy.lose_reply(call("exchange"), times=3, skip=1)

    await kit.drain(fail_twice, 1, connection=proxy.url)

    assert lost.count == 3
    assert attempts == [0, 1, 2]
    assert kit.event_names("1").count("retry") == 2


@pytest.mark.many
@pytest.mark.requirement("Q-65", "X-124")
async def test_any_mixture_of_lost_messages_under_load_runs_each_job_once(kit: Kit, proxy: FaultProxy) -> None:
    """Requests and replies of every script are lost at random; nothing is stored twice, run twice, lost or late."""
    runs: list[str] = []

    async def handle(job: Job) -> None:
        runs.append(job.id)
        if random.random() < 0.2:
            await job.progress(random.randrange(101))
        await asyncio.sleep(random.random() / 100)

    queue = kit.queue(connection=proxy.url)
    told = await kit.work(handle, connection=proxy.url, concurrency=20)
    faults = []
    jobs: list[Job] = []
    for _ in range(30):
        lose = random.choice((proxy.lose_reply, proxy.lose_request))
        name = random.choice(("add", "exchange", "exchange", "update_progress"))
        faults.append(lose(call(name), times=random.randrange(1, 3), skip=random.randrange(4)))
        jobs += await soon(asyncio.gather(*(queue.add("mail") for _ in range(random.randrange(1, 30)))))
    await told.finished(len(jobs))
    for fault in faults:
        fault.cancel()
    await told.worker.close()

    assert sum(fault.count for fault in faults) > 10
    assert sorted(runs, key=int) == sorted(ids_of(jobs), key=int)
    assert len(set(ids_of(jobs))) == len(jobs)
    assert (await kit.queue().counts()).completed == len(jobs)
    assert told.of("lock_lost") == told.of("error") == []


@pytest.mark.requirement("Q-23", "X-103")
async def test_renewals_whose_reply_is_lost_cost_no_lock(kit: Kit, proxy: FaultProxy) -> None:
    """A lock is renewed four times in its life, so that some may fail."""
    gate = Gate()
    await kit.queue().add("mail")
    told = await kit.work(gate, connection=proxy.url, lock=2_000)
    await gate.reached()
    lost = proxy.lose_reply(call("renew"), times=3)
    await lost.happened()
    renewed = proxy.lose_reply(
        call("renew"), times=1, skip=3
    )  # passes three, so the lock is older than its first length
    await renewed.happened()

    gate.open()
    await told.finished()

    assert told.of("lock_lost") == []
    assert kit.fields("1")["ats"] == "1"


@pytest.mark.requirement("Q-67")
async def test_a_stalled_check_whose_reply_is_lost_still_returns_the_job(kit: Kit, proxy: FaultProxy) -> None:
    """What was recovered stands in wait with its marker, whoever was to be told."""
    kit.seed("left", to="active")
    kit.redis.sadd(kit.base + "stalled", "left")  # marked by an earlier check; its worker is dead
    lost = proxy.lose_reply(call("check_stalled"), times=1)

    told = await kit.drain(nothing, 1, connection=proxy.url, stalled_interval=100)

    assert lost.count == 1
    assert told.ids("completed") == ["left"]
    assert kit.fields("left")["stc"] == "1"


@pytest.mark.requirement("Q-65")
async def test_what_a_handler_tells_about_its_job_survives_lost_replies(kit: Kit, proxy: FaultProxy) -> None:
    """Progress and new data are the same when written twice; a log line is not, so it is not repeated."""
    log_error: list[BaseException] = []

    async def handle(job: Job) -> str:
        await job.progress(42)
        await job.update_data({"step": 2})
        try:
            await job.log("one line")
        except ConnectionLost as error:
            log_error.append(error)
        return "done"

    faults = [proxy.lose_reply(call(name), times=1) for name in ("update_progress", "update_data", "add_log")]
    queue = kit.queue()
    job = await queue.add("mail", {"step": 1})

    await kit.drain(handle, 1, connection=proxy.url)

    assert [fault.count for fault in faults] == [1, 1, 1]
    assert (kit.fields(job.id)["progress"], kit.fields(job.id)["data"]) == ("42", '{"step":2}')
    assert await job.logs() == ["one line"]
    assert len(log_error) == 1


async def test_pause_and_resume_survive_lost_replies(kit: Kit, proxy: FaultProxy) -> None:
    """An operator who asked for a pause has one, and after a resume none."""
    queue = kit.queue(connection=proxy.url)
    await queue.add("mail")
    for name in ("pause", "resume"):
        proxy.lose_reply(call(name), times=2)

    await soon(queue.pause())
    assert await queue.is_paused()
    await soon(queue.resume())

    assert not await queue.is_paused()
    assert kit.marker() == {"0": 0}
    assert proxy.counters.lost_replies == 4


@pytest.mark.requirement("X-40")
async def test_a_redrive_whose_reply_is_lost_sends_the_job_back_once(kit: Kit, proxy: FaultProxy) -> None:
    """The second call finds the entry gone, which for us means that the first one did it."""

    async def fail(job: Job) -> None:
        raise ValueError("no")

    queue = kit.queue(connection=proxy.url, attempts=1)
    await queue.add("mail", job_id="order-7")
    await kit.drain(fail, 1, dead_letters=True)
    (letter,) = await queue.dead_letters.list()
    lost = proxy.lose_reply(call("redrive"), times=1)

    assert await soon(queue.dead_letters.redrive(letter.id)) == "order-7"

    assert lost.count == 1
    assert kit.ids("wait") == ["order-7"]
    assert await queue.dead_letters.depth() == 0


@pytest.mark.requirement("X-40")
@pytest.mark.parametrize("dead_letters", [True, False], ids=["queue", "failed set"])
async def test_an_edited_redrive_whose_reply_is_lost_sends_the_edited_job_once(
    kit: Kit, proxy: FaultProxy, dead_letters: bool
) -> None:
    async def fail(job: Job) -> None:
        raise ValueError("no")

    queue = kit.queue(connection=proxy.url, attempts=1)
    await queue.add("mail", {"to": "Ada"}, job_id="order-7")
    await kit.drain(fail, 1, dead_letters=dead_letters)
    store = queue.dead_letters if dead_letters else queue.failed_set
    (letter,) = await store.list()
    lost = proxy.lose_reply(call("redrive" if dead_letters else "redrive_failed"), times=1)

    edit = make_edit(letter.data, data={"to": "Grace"})
    assert await soon(store.redrive_edited(letter.id, edit)) == "order-7"

    assert lost.count == 1
    assert kit.ids("wait") == ["order-7"]
    job = await queue.get_job("order-7")
    assert job is not None
    assert job.data == {"to": "Grace"}


async def test_a_result_is_not_missed_over_lost_connections(kit: Kit, proxy: FaultProxy) -> None:
    """Whoever waits for a result gets it, also when the reading of events was cut right then."""
    gate = Gate({"sent": True})
    queue = kit.queue(connection=proxy.url)
    job = await queue.add("mail")
    waiting = asyncio.ensure_future(job.result())
    told = await kit.work(gate)
    await gate.reached()
    lost = proxy.lose_reply(b"XREAD", times=1)

    gate.open()
    await told.finished()

    assert await soon(waiting) == {"sent": True}
    assert lost.count <= 1


@pytest.mark.requirement("Q-65")
async def test_a_wait_for_a_job_whose_add_was_repeated_asks_for_its_result(kit: Kit, proxy: FaultProxy) -> None:
    """An add that is answered from its record does not know its event any more, from which others go on listening."""
    queue = kit.queue(connection=proxy.url)
    await kit.work(nothing)
    await (await queue.add("first")).result(5_000)
    lost = proxy.lose_reply(call("add"), times=1)

    job = await soon(queue.add("a"))

    await lost.happened()
    assert await soon(job.result(5_000)) is None


@pytest.mark.requirement("Q-14", "Q-65")
async def test_the_pieces_of_a_bulk_add_come_back_in_order_although_one_was_repeated(
    kit: Kit, proxy: FaultProxy
) -> None:
    """A lost reply holds up its own piece only, and the caller gets the jobs as it gave them."""
    queue = kit.queue(connection=proxy.url)
    await queue.add("warm")
    lost = proxy.lose_reply(call("add"), times=1)

    jobs = await soon(queue.add_many([("mail", number) for number in range(450)]))

    await lost.happened()
    assert [job.data for job in jobs] == list(range(450))
    assert sorted(int(job.id) for job in jobs) == list(range(2, 452))
    assert {job.id: job.data for job in jobs} == {
        job_id: int(kit.fields(job_id)["data"]) for job_id in kit.ids("wait") if job_id != "1"
    }


# ---- late copies ----------------------------------------------------------------------------------------------------


class RawCaller:
    """Sends numbered script calls as a worker or queue would, in any order one likes."""

    def __init__(self, kit: Kit, identity: str = "caller-1") -> None:
        self._kit, self._identity = kit, identity
        self._keys = QueueKeys("bull", kit.name)

    def send(self, script: str, number: int, *rest: str | int, **given: str | int) -> Any:
        known = SCRIPTS[script]
        keys = [self._keys.call(self._identity) if name == "call" else getattr(self._keys, name) for name in known.keys]
        usual: dict[str, str | int] = {
            "base": self._keys.base,
            "call_number": number,
            "call_ttl_ms": 60_000,
            "clock_and_version": "0 bullpen:test",
            **dict.fromkeys(("name", "opts", "place"), ""),
            "token": f"{self._identity}:{number}",
            "lock_ms": 30_000,
            "take": 0,
            "worker_name": self._identity,
            "extras": "",
            **given,
        }
        return self._kit.command("EVAL", known.body, len(keys), *keys, *(usual[name] for name in known.args), *rest)


JOB = ("", "mail", "{}", "{}", "")


def _first_number(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def _everything(kit: Kit) -> dict[bytes, bytes]:
    return {key: kit.command("DUMP", key) for key in kit.command("KEYS", "*")}


@pytest.mark.requirement("Q-14", "Q-65")
def test_a_late_copy_of_an_old_add_is_refused(kit: Kit) -> None:
    """A call that hung in the network for a minute must not add its job again after we have moved on."""
    caller = RawCaller(kit)
    caller.send("add", 1, *JOB)
    caller.send("add", 2, *JOB)

    with pytest.raises(redis.ResponseError, match="BPSTALE"):
        caller.send("add", 1, *JOB)

    assert kit.ids("wait") == ["1", "2"]
    assert _first_number(caller.send("add", 3, *JOB)) == 3


@pytest.mark.requirement("Q-14", "Q-65")
def test_a_copy_of_the_last_add_gets_its_answer_and_changes_nothing(kit: Kit) -> None:
    """The first copy may come after its repetition: it lay in a connection that the caller had given up."""
    caller = RawCaller(kit)
    own = ("mine", *JOB[1:])
    caller.send("add", 1, *own)
    first = caller.send("add", 2, *JOB, *own, *JOB)
    stored = _everything(kit)

    for _ in range(2):
        again = caller.send("add", 2, *JOB, *own, *JOB)
        assert again[0] == first[0].rpartition(b" ")[0] + b" "  # all but its last event
        assert again[1] == first[1]
    assert _everything(kit) == stored

    assert _first_number(caller.send("add", 3, *JOB)) == _first_number(first[0]) + 3


@pytest.mark.requirement("Q-14", "Q-65")
def test_a_repeated_add_is_answered_although_memory_is_full(kit: Kit) -> None:
    """Else a job that is stored would be reported as refused, and added once more by a caller that tries again."""
    caller = RawCaller(kit)
    first = caller.send("add", 1, *JOB)
    kit.command("CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(redis.ResponseError, match="maxmemory"):
            caller.send("add", 2, *JOB)
        assert caller.send("add", 1, *JOB).split(b" ")[:2] == first.split(b" ")[:2]
    finally:
        kit.command("CONFIG", "SET", "maxmemory", 0)
    assert kit.ids("wait") == ["1"]


@pytest.mark.requirement("X-124", "Q-65")
def test_a_late_copy_of_an_old_exchange_is_refused(kit: Kit) -> None:
    """It would take jobs for a worker that does not wait for them any more."""
    caller = RawCaller(kit)
    for number in range(3):
        RawCaller(kit, "producer").send("add", number + 1, *JOB)
    caller.send("exchange", 1, take=1)
    caller.send("exchange", 2, take=1)

    with pytest.raises(redis.ResponseError, match="BPSTALE"):
        caller.send("exchange", 1, take=1)

    assert kit.ids("wait") == ["3"]
    assert kit.lock("1") == "caller-1:1"


@pytest.mark.requirement("X-124")
def test_a_late_copy_of_a_take_that_found_nothing_takes_nothing(kit: Kit) -> None:
    """A frozen server works off the calls of connections that are long gone: what was answered as empty stays empty."""
    caller = RawCaller(kit)
    assert caller.send("exchange", 7, take=5)[1] == []
    RawCaller(kit, "producer").send("add", 1, *JOB)

    late = caller.send("exchange", 7, take=5)

    assert late[1] == []
    assert kit.ids("wait") == ["1"]


@pytest.mark.requirement("X-124", "Q-66")
def test_a_repeated_take_returns_only_jobs_whose_lock_is_still_its_own(kit: Kit) -> None:
    """What another worker has taken over meanwhile must not be run here as well."""
    caller = RawCaller(kit)
    for number in range(2):
        RawCaller(kit, "producer").send("add", number + 1, *JOB)
    first = caller.send("exchange", 1, take=2)
    kit.command("SET", f"{kit.base}1:lock", "another-worker")

    again = caller.send("exchange", 1, take=2)

    assert [fields[-1] for fields in first[1]] == [b"1", b"2"]
    assert [fields[-1] for fields in again[1]] == [b"2"]
    assert kit.fields("2")["ats"] == "1"


@pytest.mark.requirement("Q-14", "Q-65")
async def test_a_script_sent_as_text_may_lose_its_reply_too(kit: Kit, proxy: FaultProxy) -> None:
    """After a restart the server knows no scripts: the call goes out twice, by name and as text, and acts once."""
    queue = kit.queue(connection=proxy.url)
    by_text = b"\r\nEVAL\r\n"
    for _ in range(3):
        kit.command("SCRIPT", "FLUSH")
        proxy.lose_reply(by_text, times=1)
        await soon(queue.add_many([("mail", {})] * 3))
    kit.command("SCRIPT", "FLUSH")
    lost = proxy.lose_reply(by_text, times=2)

    told = await kit.work(nothing, connection=proxy.url, concurrency=4)
    await told.finished(9)

    await lost.happened()  # the exchange, and the first look for stalled jobs, which a thread makes in its own time
    assert sorted(told.ids("completed"), key=int) == [str(number) for number in range(1, 10)]
    assert told.of("error") == told.of("lock_lost") == []

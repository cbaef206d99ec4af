"""What a queue promises, in a short form, on every server that we support."""

from __future__ import annotations

import asyncio

import pytest

from bullpen import Backoff
from bullpen.queue import Added, Job, JobState, NewJob
from bullpen.redis import Connection
from bullpen.redis.checks import ServerVerdict
from bullpen.redis.inspection import inspect_server
from bullpen.redis.socket import pack
from tests.matrix._places import PlaceKit
from tests.queue._kit import Failing, Gate, echo, engine_of, nothing, soon

pytestmark = pytest.mark.requirement("W-66", "W-65")


async def test_every_way_to_add_puts_a_job_where_it_belongs(kit: PlaceKit) -> None:
    queue = kit.queue()

    plain = await queue.add("mail", {"to": "ada"})
    delayed = await queue.add("mail", delay=60_000)
    urgent = await queue.add("mail", priority=5)
    lifo = await queue.add("mail", lifo=True)
    named = await queue.add("mail", job_id="order-1")
    again = await queue.add("mail", job_id="order-1")
    many = await queue.add_many(NewJob("mail", number) for number in range(300))

    assert kit.ids("wait")[:3] == [lifo.id, plain.id, named.id]
    assert (again.added, again.id) == (Added.DUPLICATE, "order-1")
    assert await queue.state_of(delayed.id) is JobState.DELAYED
    assert await queue.state_of(urgent.id) is JobState.PRIORITIZED
    assert [job.data for job in many] == list(range(300))
    counts = await queue.counts()
    assert (counts.waiting, counts.delayed, counts.prioritized) == (303, 1, 1)


async def test_jobs_are_taken_settled_and_their_results_seen(kit: PlaceKit) -> None:
    queue = kit.queue()
    await kit.work(echo, concurrency=20)

    jobs = await queue.add_many([("mail", {"number": number}) for number in range(100)])
    results = await soon(asyncio.gather(*(job.result(timeout=10_000) for job in jobs)))

    assert results == [{"number": number} for number in range(100)]
    assert (await queue.counts()).completed == 100


async def test_a_failed_attempt_is_repeated_after_its_pause(kit: PlaceKit) -> None:
    queue = kit.queue(attempts=3, backoff=Backoff.fixed(20))
    told = await kit.work(Failing(OSError("busy"), OSError("busy"), value="sent"))

    job = await queue.add("mail")

    assert await job.result(timeout=10_000) == "sent"
    assert (kit.fields(job.id)["atm"], len(told.of("retrying"))) == ("3", 2)


async def test_a_delayed_job_runs_when_it_is_due_and_not_before(kit: PlaceKit) -> None:
    queue = kit.queue()
    told = await kit.work(nothing)
    before = kit.server_ms()

    await queue.add("mail", delay=150)
    await told.finished()

    assert 150 <= kit.server_ms() - before < 5_000


async def test_jobs_run_in_the_order_of_their_priorities(kit: PlaceKit) -> None:
    queue = kit.queue()
    for priority in (3, 1, 2, 1, 0):
        await queue.add("mail", {"priority": priority}, priority=priority)

    told = await kit.drain(nothing, 5)

    assert [job.data["priority"] for (job, *_) in told.of("completed")] == [0, 1, 1, 2, 3]


async def test_a_job_of_a_dead_worker_is_given_to_another(kit: PlaceKit) -> None:
    kit.seed("7", to="active", ats=1, processedOn=1, pb="dead")
    kit.redis.delete(kit.base + "marker")

    told = await kit.work(nothing, stalled_interval=50)
    await told.finished()

    await kit.until(lambda: told.ids("stalled") == ["7"], "the thread that found it has told so")
    assert kit.fields("7")["stc"] == "1"


async def test_locks_are_renewed_while_a_handler_runs(kit: PlaceKit) -> None:
    """The renewing thread must have found the same server."""
    gate = Gate()
    job = await kit.queue().add("mail")
    told = await kit.work(gate, lock=400, stalled_interval=50)
    await gate.reached()

    def left_ms() -> int:
        return int(kit.command("PTTL", f"{kit.base}{job.id}:lock"))

    for _ in range(3):
        await kit.until(lambda: left_ms() < 350, "time passes")
        await kit.until(lambda: left_ms() > 350, "the lock is renewed")
    gate.open()
    await told.finished()

    assert told.of("stalled") == told.of("lock_lost") == []


async def test_a_finally_failed_job_is_a_dead_letter_and_can_be_redriven(kit: PlaceKit) -> None:
    queue = kit.queue(attempts=1)
    told = await kit.work(Failing(ValueError("no such address"), value="sent"), dead_letters=True)
    job = await queue.add("mail", {"to": "ada"})
    await told.wait("failed")

    (letter,) = [letter async for letter in queue.dead_letters]
    await queue.dead_letters.redrive(letter.id)

    assert (letter.job_id, letter.data, letter.error_message) == (job.id, {"to": "ada"}, "no such address")
    assert await job.result(timeout=10_000) == "sent"
    assert await queue.dead_letters.depth() == 0


async def test_events_tell_the_life_of_a_job(kit: PlaceKit) -> None:
    reader = await kit.reader()
    await kit.queue().add("mail", {"to": "ada"})

    await kit.drain(echo, 1)
    seen = [await soon(anext(reader)) for _ in range(4)]

    assert [event.event for event in seen] == ["added", "waiting", "active", "completed"]
    assert seen[3].data["returnvalue"] == {"to": "ada"}


async def test_a_paused_queue_gives_no_job(kit: PlaceKit) -> None:
    queue = kit.queue()
    told = await kit.work(nothing)
    await queue.pause()
    job = await queue.add("mail")

    await asyncio.sleep(0.1)  # the worker looks in this time, and takes nothing
    paused, state = await queue.is_paused(), await job.state()
    await queue.resume()
    await told.finished()

    assert (paused, state) == (True, JobState.WAITING)


async def test_an_add_whose_reply_was_lost_stores_one_job(kit: PlaceKit) -> None:
    """The server does as it is told and does not answer; the call is repeated over another connection."""
    connection = Connection(kit.url, command_timeout_ms=200)
    queue = kit.queue(connection=connection)
    await queue.add("mail")
    wire = await connection.shared_door(queue.keys.base).wire()
    unanswered = wire.send(pack(("CLIENT", "REPLY", "OFF")), within_s=0.2)

    job = await soon(queue.add("mail"))

    await asyncio.wait([unanswered])
    unanswered.exception()
    assert (job.added, job.id) == (Added.CREATED, "2")
    assert (await queue.counts()).waiting == 2
    await connection.aclose()


async def test_a_settlement_whose_reply_was_lost_is_settled_once(kit: PlaceKit) -> None:
    """The worker's calls are repeated too: a job ends once, and the next one is not taken twice."""
    connection = Connection(kit.url, command_timeout_ms=200)
    gate = Gate()
    await kit.queue().add_many([("mail", 1), ("mail", 2)])
    told = await kit.work(gate, connection=connection)
    await gate.reached()
    wire = await engine_of(told).door.wire()
    unanswered = wire.send(pack(("CLIENT", "REPLY", "OFF")), within_s=0.2)

    gate.open()
    await told.finished(2)

    await asyncio.wait([unanswered])
    unanswered.exception()
    assert told.ids("completed") == ["1", "2"]
    assert [kit.fields(job_id)["ats"] for job_id in ("1", "2")] == ["1", "1"]


async def test_forgotten_scripts_are_sent_again(kit: PlaceKit) -> None:
    queue = kit.queue()
    told = await kit.work(nothing, concurrency=2)

    for _ in range(5):
        for node in kit.place.nodes:
            node.command("SCRIPT", "FLUSH")
        await queue.add("mail")
    await told.finished(5)

    assert told.of("error") == []


async def test_cut_connections_are_opened_again(kit: PlaceKit) -> None:
    queue = kit.queue()
    told = await kit.work(nothing)

    for _ in range(3):
        kit.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await soon(queue.add("mail"))
    await told.finished(3)

    assert told.of("error") == []


async def test_jobs_can_report_and_change_while_they_run(kit: PlaceKit) -> None:
    async def handle(job: Job) -> str:
        await job.progress(50)
        await job.log("half way")
        await job.update_data({"to": "grace"})
        return "sent"

    job = await kit.queue().add("mail", {"to": "ada"})
    await kit.drain(handle, 1)

    assert (kit.fields(job.id)["progress"], kit.fields(job.id)["data"]) == ("50", '{"to":"grace"}')
    assert await job.logs() == ["half way"]


async def test_administration_reaches_all_keys(kit: PlaceKit) -> None:
    queue = kit.queue()
    jobs = await queue.add_many([("mail", number) for number in range(20)])
    await queue.add("mail", delay=60_000)
    await queue.remove(jobs[0])
    await kit.drain(nothing, 19)
    workers = await queue.workers()

    cleaned = await queue.clean(state=JobState.COMPLETED)
    await queue.obliterate(force=True)

    assert len(cleaned) == 19
    assert workers == []
    assert [key for _, key in kit.place.stored()] == []


async def test_the_server_is_healthy_and_inspected(kit: PlaceKit) -> None:
    queue = kit.queue()

    async with asyncio.timeout(60):
        while not (healthy := await queue.is_healthy(timeout_ms=20_000)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.1)  # a place may have to settle first
    findings = await inspect_server(queue._connection)

    assert healthy
    asked = [finding for finding in findings if finding.check != "replicas"]  # only of servers that have some
    assert len(asked) == 5 * (3 if kit.place.is_cluster else 1)
    assert {finding.verdict for finding in findings if finding.check == "version"} == {ServerVerdict.GOOD}

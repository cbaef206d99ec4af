"""The blocking queue: the same jobs, errors and promises without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from bullpen import Added, InvalidOption, Job, JobFailed, JobNotFound, JobState, NewJob, ResultTimeout, Worker, sync
from bullpen.errors import ConnectionLost, OutcomeUnknown, PayloadTooLarge, QueueClosed, ServerRefused
from bullpen.testing import FaultProxy, RedisServer


@pytest.fixture
def queue(redis_url: str, queue_name: str) -> Iterator[sync.Queue]:
    with sync.Queue(queue_name, connection=redis_url) as made:
        yield made


async def in_thread(function: Any, *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


async def test_a_job_is_added_run_and_its_result_read(queue: sync.Queue, redis_url: str) -> None:
    async def handle(job: Job) -> int:
        if job.name == "bad":
            raise ValueError("no such address")
        return int(job.data["number"]) * 2

    async with Worker(queue.name, handle, connection=redis_url):
        job = await in_thread(queue.add, "good", {"number": 4})
        assert await in_thread(job.result, timedelta(seconds=20)) == 8
        assert await in_thread(job.result) == 8
        assert await in_thread(job.state) is JobState.COMPLETED
        bad = await in_thread(lambda: queue.add("bad", attempts=1))
        with pytest.raises(JobFailed, match="no such address"):
            await in_thread(bad.result, 20_000)
        later = await in_thread(lambda: queue.add("good", {"number": 5}, delay=100))
        assert await in_thread(later.result, 20_000) == 10
    assert (job.name, job.data, job.added) == ("good", {"number": 4}, Added.CREATED)
    assert job.idempotency_key.startswith(f"{queue.name}/{job.id}/")


async def test_a_waiting_thread_is_woken_by_the_event(queue: sync.Queue, redis_url: str) -> None:
    """It listens before it looks for the second time, so no end is missed, and others may use the queue meanwhile."""
    job = queue.add("mail")
    listening = threading.Event()

    def wait() -> Any:
        listening.set()
        return job.result(timeout=20_000)

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(wait)
        listening.wait(10)
        assert queue.counts().waiting == 1

        async def handle(job: Job) -> str:
            return "sent"

        async with Worker(queue.name, handle, connection=redis_url):
            assert await asyncio.wrap_future(result) == "sent"


def test_options_and_duplicates(queue: sync.Queue) -> None:
    first = queue.add("mail", {"to": "a"}, job_id="only", delay=60_000, attempts=7)
    second = queue.add("mail", {"to": "b"}, job_id="only")

    assert (first.opts.attempts, first.state()) == (7, JobState.DELAYED)
    assert (second.added, second.data) == (Added.DUPLICATE, {"to": "a"})
    assert second.blocked_by is not None
    assert second.blocked_by.state is JobState.DELAYED
    stored = queue.get_job("only")
    assert stored is not None
    assert stored.data == {"to": "a"}
    assert queue.get_job("none") is None
    assert queue.state_of("none") is JobState.UNKNOWN
    assert queue.remove("only")
    with pytest.raises(JobNotFound):
        stored.result()


async def test_a_finished_job_can_be_replaced(queue: sync.Queue, redis_url: str) -> None:
    async def handle(job: Job) -> None: ...

    async with Worker(queue.name, handle, connection=redis_url):
        job = await in_thread(lambda: queue.add("mail", {"n": 1}, job_id="a"))
        await in_thread(job.result, 20_000)
    again = queue.add("mail", {"n": 2}, job_id="a", replace_finished=True)
    assert (again.added, again.state()) == (Added.CREATED, JobState.WAITING)


def test_many_are_stored_in_order_by_few_calls(queue: sync.Queue, redis_server: RedisServer) -> None:
    client: Any = redis_server.client()
    client.config_resetstat()
    jobs = queue.add_many([("mail", {"n": n}) for n in range(450)] + [NewJob("late", None, {"delay": 60_000})])

    assert [job.data for job in jobs[:-1]] == [{"n": n} for n in range(450)]
    counts = queue.counts()
    assert (counts.waiting, counts.delayed, counts.pending) == (450, 1, 451)
    assert queue.add_many([]) == []
    stats = client.info("commandstats")
    assert sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha")) <= 10


def test_mistakes_are_told_before_anything_is_written(queue: sync.Queue, redis_url: str) -> None:
    with pytest.raises(InvalidOption, match="attempts"):
        queue.add("mail", attempts=0)
    with pytest.raises(InvalidOption, match="NewJob or"):
        queue.add_many([("good", 1), "bad"])  # type: ignore[list-item]  # that is the point
    with pytest.raises(PayloadTooLarge):
        queue.add("mail", "x" * 11_000_000)
    with pytest.raises(InvalidOption, match="an option of one job"):
        sync.Queue("q", connection=redis_url, job_id="a")  # type: ignore[call-arg]  # that is the point
    with pytest.raises(InvalidOption, match="add_deadline"):
        sync.Queue("q", connection=redis_url, add_deadline=0)
    assert queue.counts().pending == 0


def test_defaults_of_the_queue_hold_for_its_jobs(redis_url: str, queue_name: str) -> None:
    with sync.Queue(queue_name, connection=redis_url, prefix="shop", attempts=9) as queue:
        assert queue.add("mail").opts.attempts == 9
        assert queue.add("mail", attempts=2).opts.attempts == 2


async def test_a_paused_queue_hands_out_nothing(queue: sync.Queue, redis_url: str) -> None:
    async def handle(job: Job) -> None: ...

    queue.pause()
    job = queue.add("mail")
    async with Worker(queue.name, handle, connection=redis_url):
        with pytest.raises(ResultTimeout, match="within 200 ms: it is waiting, and the queue is paused, resume it"):
            await in_thread(job.result, 200)
        await in_thread(queue.resume)
        await in_thread(job.result, 20_000)


@pytest.mark.requirement("Q-65")
def test_a_lost_reply_stores_nothing_twice(redis_server: RedisServer, redis_url: str, queue_name: str) -> None:
    with (
        FaultProxy(redis_server) as proxy,
        sync.Queue(queue_name, connection=proxy.url) as queue,
    ):
        queue.add("mail", {"n": 0})
        lost = proxy.lose_reply()
        job = queue.add("mail", {"n": 1})
        lost.wait()
        assert (job.id, job.added) == ("2", Added.CREATED)
        assert queue.counts().waiting == 2


def test_a_server_that_is_away_is_waited_for_and_told_of(
    redis_server: RedisServer, redis_url: str, queue_name: str
) -> None:
    with (
        FaultProxy(redis_server) as proxy,
        sync.Queue(queue_name, connection=proxy.url, add_deadline=300) as queue,
    ):
        queue.add("mail")
        assert queue.is_healthy()
        with proxy.outage():
            assert not queue.is_healthy()
            with pytest.raises((ConnectionLost, OutcomeUnknown)):
                queue.add("mail")
        assert queue.add("mail").added is Added.CREATED


@pytest.mark.leaves_queue_broken
def test_what_the_server_refuses_is_told_at_once(redis_server: RedisServer, redis_url: str, queue_name: str) -> None:
    client: Any = redis_server.client()
    with sync.Queue(queue_name, connection=redis_url) as queue:
        client.set(f"bull:{queue_name}:wait", "not a list")
        with pytest.raises(ServerRefused, match="WRONGTYPE"):
            queue.add("mail")
        client.delete(f"bull:{queue_name}:wait")


def test_threads_share_a_queue(queue: sync.Queue) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = {job.id for job in pool.map(lambda n: queue.add("mail", {"n": n}), range(200))}
    assert len(ids) == 200
    assert queue.counts().waiting == 200


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_each_process_has_its_own_connection(queue: sync.Queue) -> None:
    """With the parent's call numbers the child's adds would be answered from the parent's, and lost."""
    queue.add("mail", {"by": "parent"})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if queue.add("mail", {"by": "child"}).data == {"by": "child"} else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    queue.add("mail", {"by": "parent again"})
    assert queue.counts().waiting == 3


def test_a_fork_in_the_middle_of_a_call_does_not_lock_the_child(queue: sync.Queue, redis_server: RedisServer) -> None:
    """Another thread of the parent holds the queue's lock then, and in the child nobody would ever release it."""
    queue.add("mail")
    redis_server.pause()
    adding = threading.Thread(target=queue.add, args=("mail",))
    adding.start()
    while not queue._inner.line.lock.locked():
        pass
    child = os.fork()
    if child == 0:
        code = 1
        try:
            queue.close()
            code = 0
        finally:
            os._exit(code)
    redis_server.resume()
    adding.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert queue.counts().waiting == 2


def test_the_bound_of_the_events_is_written_with_the_first_add(redis_url: str, queue_name: str) -> None:
    with sync.Queue(queue_name, connection=redis_url, events_max_len=123) as queue:
        assert "opts.maxLenEvents" not in queue.meta()
        queue.add("mail")
        assert queue.meta()["opts.maxLenEvents"] == "123"


def test_an_iterator_reads_only_what_is_asked_for(queue: sync.Queue, redis_server: RedisServer) -> None:
    """However many jobs there are, and wherever the loop over them ends."""
    queue.add_many([("mail", number) for number in range(500)])
    found = queue.iter_jobs(JobState.WAITING)
    assert [next(found).data for _ in range(3)] == [0, 1, 2]
    redis_server.client().config_resetstat()
    assert [next(found).data for _ in range(3)] == [3, 4, 5]
    reads = redis_server.client().info("commandstats")
    assert "cmdstat_hgetall" not in reads
    assert len(list(found)) == 494


def test_a_closed_queue_says_so(redis_url: str, queue_name: str) -> None:
    queue = sync.Queue(queue_name, connection=redis_url)
    queue.close()
    queue.close()
    with pytest.raises(QueueClosed):
        queue.add("mail")


def test_without_a_connection_the_embedded_server_is_used(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BULLPEN_REDIS_URL", raising=False)
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))
    with sync.Queue("emails") as queue:
        assert queue.add("mail").state() is JobState.WAITING


def test_lanes_are_looked_after_without_a_loop(queue: sync.Queue) -> None:
    job = queue.add("work", lane="acme")
    queue.lanes.set("acme", weight=3, concurrency=2)
    queue.lanes.set(None, rate=(5, timedelta(seconds=1)))
    queue.lanes.pause("acme")

    (lane,) = queue.lanes.list()

    assert job.record.lane == "acme"
    assert (lane.name, lane.waiting, lane.settings.weight, lane.settings.paused) == ("acme", 1, 3, True)
    queue.lanes.resume("acme")
    assert not queue.lanes.get("acme").paused
    queue.lanes.remove("acme")
    assert queue.lanes.get("acme").weight is None
    common = queue.lanes.get(None)
    assert common.rate is not None
    assert common.rate.max == 5

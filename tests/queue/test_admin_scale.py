"""No call holds up the server, however many jobs are stored; and all of it works on a cluster.

The usual run has twenty thousand jobs and asks for the processor time that the server spent per call, which other
work on the machine does not change. BULLPEN_TEST_LONG=1 has a million, and looks at the slowest single call as well:
it wants a machine of its own, or a server that goes before all else on it. BULLPEN_TEST_SERVER chooses the server.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from bullpen._kernel.keep import KeepJobs
from bullpen.errors import PermanentError
from bullpen.queue import Added, Job, JobState, NewJob, Queue
from bullpen.queue.arguments import NewJobArguments
from bullpen.queue.dead_letters.operations import DeadLetters
from bullpen.testing import RedisServer
from bullpen.testing.topologies import ClusterServers
from bullpen.wire.keys import slot
from bullpen.worker import Worker
from tests.queue._kit import Told

IS_LONG = os.environ.get("BULLPEN_TEST_LONG") == "1"
JOBS = 1_000_000 if IS_LONG else 20_000
ORPHANS = 450
MOST_MS = 50.0
"""Longest call allowed."""
pytestmark = pytest.mark.timeout(900 if IS_LONG else 120)

_SEED = """
local base, state, first, count, is_list = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == "1"
for number = first, first + count - 1 do
  local id = string.format("%.0f", number)
  local created_ms = 1700000000000 + math.floor(number / 100)
  redis.call("HSET", base .. id, "name", "job", "data", "{}", "opts", "{}", "timestamp", created_ms, "delay", 0,
    "priority", 0)
  local score = number
  if state == "prioritized" then score = (number % 10 + 1) * 4294967296 + number end
  if is_list then redis.call("LPUSH", base .. state, id) else redis.call("ZADD", base .. state, score, id) end
end
redis.call("HSET", base .. "meta", "opts.maxLenEvents", 10000)
"""


@dataclass
class Large:
    """A queue with very many jobs in one state, and what the server spent since they were stored."""

    queue: Queue
    client: redis.Redis
    _began_s: float = 0.0

    def fill(self, state: str, *, fresh: bool) -> None:
        """Storing them takes longer than most operations, so what changes a few is followed by others. `fresh` asks for
        all jobs, and for nothing after it."""
        kept: Any = self.client.get("kept")
        if fresh or kept != state.encode():
            self.client.flushall()
            seed = self.client.register_script(_SEED)
            for first in range(1, JOBS + 1, 1_000):
                seed(args=[self.queue.keys.base, state, first, 1_000, "1" if state in ("wait", "paused") else ""])
        self.client.set("kept", "" if fresh else state)
        if state == "wait":
            self.misplace()
        self.client.config_resetstat()
        self.client.slowlog_reset()
        self._began_s = self._processor_s()

    def misplace(self) -> None:
        """A job that stands in no order of creation, as if it had been retried, where it costs most: far from the
        running end, and not so near to the other that it is seen there."""
        self.client.lrem(self.queue.keys.wait, 0, "odd")
        self.client.zrem(self.queue.keys.prioritized, "odd")
        self.client.hset(f"{self.queue.keys.base}odd", mapping={"name": "job", "data": "{}", "timestamp": 1})
        self.client.linsert(self.queue.keys.wait, "BEFORE", str(JOBS - 7_000), "odd")

    def ms_per_call(self) -> float:
        """Processor time of the server per script call since the jobs were stored. The steps of one operation are
        alike."""
        stats: Any = self.client.info("commandstats")
        calls = sum(stats.get(name, {"calls": 0})["calls"] for name in ("cmdstat_eval", "cmdstat_evalsha"))
        return (self._processor_s() - self._began_s) * 1_000 / max(1, int(calls))

    def slowest_ms(self) -> float:
        """The slowest call of any kind, by the clock on the wall."""
        entries: Any = self.client.slowlog_get(1_000)
        return max((int(entry["duration"]) for entry in entries), default=0) / 1_000

    def _processor_s(self) -> float:
        spent: Any = self.client.info("cpu")
        return float(spent["used_cpu_user_main_thread"]) + float(spent["used_cpu_sys_main_thread"])


@pytest.fixture(scope="module")
def large_server() -> Iterator[RedisServer]:
    with RedisServer.start(os.environ.get("BULLPEN_TEST_SERVER", "valkey")) as server:
        yield server


@pytest.fixture
async def large(large_server: RedisServer) -> AsyncIterator[Large]:
    client = large_server.client()
    client.config_set("slowlog-log-slower-than", 2_000)
    client.config_set("slowlog-max-len", 1_000)
    async with Queue("large", connection=large_server.url) as queue:
        yield Large(queue, client)


async def _count(jobs: AsyncIterator[Job]) -> int:
    return len([1 async for _ in jobs])


async def _work(queue: Queue) -> int:
    """Add, take and settle beside all of them, with retention that has very much to remove."""

    async def handle(job: Job) -> None:
        if job.data["n"] % 2:
            raise PermanentError("odd")

    kept = KeepJobs(count=10)
    worker = Worker(queue.name, handle, connection=queue.connection, concurrency=20, dead_letters=True)
    told = Told(worker)
    rules: NewJobArguments = {"remove_on_complete": kept, "remove_on_fail": kept, "priority": 1}
    jobs = [NewJob("job", {"n": n}, {**rules, "job_id": f"own-{n}"}) for n in range(100)]
    async with worker:
        await queue.add_many(jobs)
        await told.finished(100)
    return len(told.of("completed"))


Operation = Callable[[Queue], Awaitable[Any]]


async def _orphans(queue: Queue) -> int:
    """More than one step of them, all without a place in the line."""
    actions = queue._ready()
    for number in range(ORPHANS):
        await actions.command("HSET", queue.keys.job(f"orphan-{number}"), "name", "job")
    return await queue.remove_orphans(restorable=True)


async def _duplicates(queue: Queue) -> int:
    jobs = await queue.add_many([NewJob("job", None, {"job_id": "odd"}) for _ in range(200)])
    return len([job for job in jobs if job.added is Added.DUPLICATE])


async def _letters(queue: Queue) -> list[Any]:
    """Of the queue whose dead letters these jobs could be."""
    letters = DeadLetters(queue._ready(), queue.keys, queue.keys)
    return [await letters.discard(str(MIDDLE + 2)), await letters.discard("odd"), await letters.discard("none")]


MIDDLE = JOBS // 2
CASES: dict[str, tuple[str, Operation, Any]] = {
    "a page in the middle": ("wait", lambda queue: queue.jobs(JobState.WAITING, start=MIDDLE, count=1), None),
    "a state": ("wait", lambda queue: queue.state_of(str(MIDDLE)), JobState.WAITING),
    "a state, out of order": ("wait", lambda queue: queue.state_of("odd"), JobState.WAITING),
    "add what is there already": ("wait", _duplicates, 200),
    "look for orphans": ("wait", _orphans, ORPHANS),
    "counts": ("wait", lambda queue: queue.counts_per_priority(), {0: JOBS + 1}),
    "remove the oldest": ("wait", lambda queue: queue.remove("1"), True),
    "remove one": ("wait", lambda queue: queue.remove(str(MIDDLE + 1)), True),
    "remove one, out of order": ("wait", lambda queue: queue.remove("odd"), True),
    "remove the newest": ("wait", lambda queue: queue.remove(str(JOBS)), True),
    "remove one that is not there": ("wait", lambda queue: queue.remove("none"), False),
    "discard dead letters": ("wait", _letters, [True, True, False]),
    "change a priority": ("wait", lambda queue: queue.change_priority(str(MIDDLE + 3), 5), None),
    "change a priority, out of order": ("wait", lambda queue: queue.change_priority("odd", 5), None),
    "counts of classes": (
        "prioritized",
        lambda queue: queue.counts_per_priority(),
        dict.fromkeys(range(1, 11), JOBS // 10),
    ),
    "change a class": ("prioritized", lambda queue: queue.change_priority(str(MIDDLE), 3), None),
    "remove one of a class": ("prioritized", lambda queue: queue.remove(str(MIDDLE + 1)), True),
    "promote one": ("delayed", lambda queue: queue.promote(str(MIDDLE)), None),
    "change a delay": ("delayed", lambda queue: queue.change_delay(str(MIDDLE + 1), 1), None),
    "retry one": ("failed", lambda queue: queue.retry(str(MIDDLE)), None),
    "redrive one of the failed set": (
        "failed",
        lambda queue: queue.failed_set.redrive(f"dl-{MIDDLE + 1}-0"),
        str(MIDDLE + 1),
    ),
    "discard one of the failed set": ("failed", lambda queue: queue.failed_set.discard(f"dl-{MIDDLE + 2}-0"), True),
}
"""State in which the jobs are, operation, answer. They change little, each something else."""
FRESH: dict[str, tuple[str, Operation, Any]] = {
    "clean some": ("wait", lambda queue: queue.clean(state=JobState.WAITING, limit=2_000), None),
    "drain": ("wait", lambda queue: queue.drain(), JOBS + 1),
    "resume what an older client paused": ("paused", lambda queue: queue.resume(), None),
    "clean a class": ("prioritized", lambda queue: queue.clean(state=JobState.PRIORITIZED, limit=2_000), None),
    "promote all": ("delayed", lambda queue: queue.promote_all(), JOBS),
    "retry all": ("failed", lambda queue: queue.retry_all(), JOBS),
    "sweep": ("failed", lambda queue: queue.dead_letters.sweep(), None),
    "work beside completed ones": ("completed", _work, 50),
    "work beside failed ones": ("failed", _work, 50),
    "obliterate": ("completed", lambda queue: queue.obliterate(), JOBS),
}
if IS_LONG:
    FRESH |= {
        "walk through all": ("wait", lambda queue: _count(queue.iter_jobs(JobState.WAITING)), JOBS + 1),
        "clean all": ("completed", lambda queue: queue.clean(), None),
    }


@pytest.mark.requirement("Q-65", "W-64")
@pytest.mark.parametrize(("state", "operation", "answer"), (CASES | FRESH).values(), ids=CASES | FRESH)
async def test_no_call_is_long_with_very_many_jobs(
    large: Large, state: str, operation: Operation, answer: Any, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    large.fill(state, fresh=name in FRESH)

    assert await operation(large.queue) == answer or answer is None

    assert large.ms_per_call() < MOST_MS
    if IS_LONG:
        slowest, mean = large.slowest_ms(), large.ms_per_call()
        print(f"[scale] {name}: slowest call {slowest:.1f} ms, mean {mean:.2f} ms")
        assert large.slowest_ms() < MOST_MS


@pytest.mark.requirement("W-66", "X-5")
async def test_administration_works_on_a_cluster() -> None:
    """Scans must be made where the queue is, and dead letters lie in the slot of their queue."""

    async def handle(job: Job) -> None:
        raise RuntimeError("boom")

    with ClusterServers.start() as cluster:
        async with Queue("{orders}", connection=cluster.url, attempts=1) as queue:
            await queue.add_many(
                [NewJob("job", None, {"priority": n % 3, "delay": 60_000 * (n % 2)}) for n in range(12)]
            )
            assert await queue.promote_all() == 6
            assert (await queue.counts_per_priority()) == {0: 4, 1: 4, 2: 4}
            await queue.change_priority("1", 7)
            worker = Worker("{orders}", handle, connection=cluster.url, dead_letters=True, concurrency=5)
            told = Told(worker)
            async with worker:
                await told.finished(12)
                assert [one.name for one in await queue.workers() or ()] == [worker.name]
            assert (await queue.dead_letters.redrive_all(limit=4)).done == 4
            assert await queue.retry_all(count=2) == 2
            assert await queue.dead_letters.depth() == 6
            assert len([job async for job in queue.iter_jobs()]) == 12
            await queue.remove((await queue.jobs(JobState.FAILED))[0])
            node = cluster.node_of(slot(queue.keys.base)).client()
            node.hset(f"{queue.keys.base}orphan", "name", "x")
            assert await queue.remove_orphans(restorable=True) == 1
            assert await queue.drain() == 6
            assert await queue.obliterate() == 5
            assert not list(node.scan_iter("bull:{orders}:*"))
            [letter, *_] = await queue.dead_letters.list()
            assert await queue.dead_letters.redrive(letter.id) == letter.job_id  # rebuilt from the entry

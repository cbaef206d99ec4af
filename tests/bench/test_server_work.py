"""What the server does for a job, counted and not timed: a command more per job shows here on any machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from bullpen._kernel.outcome import Cause, Completed, Failed, Outcome, Retry
from bullpen.queue import Job, Queue
from bullpen.queue.job import NewJob
from bullpen.wire.scripts import SCRIPTS
from bullpen.worker.exchange import Exchange, JobSettlement
from bullpen.worker.pump import MOST_JOBS
from tests.bench._exchange import exchange_of
from tests.queue._kit import Kit

JOBS = 50
DATA = {"p": "x" * 92}
DONE = Completed(b"null")

# Commands that the scripts run: per job, and once per call. The protocol itself demands 3 per added job, 4 per taken
# and 4 per completed one. Exact, not only bounds: who saves a command writes it down here, so that it stays saved.
COMMANDS = {
    "add": (3, 7),
    "take": (4, 8),
    "complete": (4, 9),
    "complete and take": (8, 11),
    "retry": (6, 9),
    "fail": (4, 10),
}
# The same of jobs in lanes, each job of a call in another lane; and, for each command that a limit adds, all of a call.
IN_LANES = {
    "add": (3, 13),
    "complete and take": (8, 17),
    "complete and take, with limits": (13, 16),
}
# The same for calls about one job, as most calls are on a queue that is not under load: jobs settled, jobs that wait,
# jobs asked for, and the commands of the call.
SMALL = {
    "look at an empty queue": (0, 0, 10, 6),
    "take the only job": (0, 1, 1, 10),
    "complete the last job": (1, 0, 0, 13),
    "complete the last job, look for others": (1, 0, 10, 14),
    "complete one, take the only other": (1, 1, 10, 17),
    "complete one, take one of many": (1, 3, 1, 19),
}


class Counted:
    """Calls of commands on the server between two looks, without those that we make ourselves to look."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        client.config_resetstat()

    def calls(self) -> dict[str, int]:
        stats: Any = self._client.info("commandstats")
        ours = {"cmdstat_info", "cmdstat_config|resetstat", "cmdstat_config"}
        return {
            name.removeprefix("cmdstat_").partition("|")[0]: figures["calls"]
            for name, figures in stats.items()
            if name not in ours
        }


async def take(exchange: Exchange, count: int) -> list[Job]:
    return (await exchange.run([], count)).taken


async def settle(exchange: Exchange, jobs: list[Job], outcome: Outcome, *, then_take: int = 0) -> None:
    reply = await exchange.run([JobSettlement(job, outcome) for job in jobs], then_take)
    assert reply.codes == [0] * len(jobs)
    assert len(reply.taken) == then_take


def assert_as_recorded(
    counted: Counted, what: str, *, jobs: int = JOBS, recorded: dict[str, tuple[int, int]] = COMMANDS
) -> None:
    calls = counted.calls()
    per_job, per_call = recorded[what]
    assert calls.pop("evalsha", 0) + calls.pop("eval", 0) == 1, "not one script call"
    assert sum(calls.values()) == per_job * jobs + per_call, f"{what}: other commands than recorded: {calls}"


@pytest.fixture
async def queue(kit: Kit) -> Queue:
    queue = kit.queue()
    # The first call of each kind sends the text of the script and writes meta; what follows is the rule.
    await queue.add_many([("bench", DATA)] * (4 * JOBS))
    return queue


async def test_adding_costs_three_commands_per_job(kit: Kit, queue: Queue) -> None:
    """Hash, two events; list, counter, marker and record once for all."""
    counted = Counted(kit.redis)

    await queue.add_many([("bench", DATA)] * JOBS)

    assert_as_recorded(counted, "add")


@pytest.mark.requirement("Q-60")
async def test_taking_costs_four_commands_per_job(kit: Kit, queue: Queue) -> None:
    """Read, lock, stamp, event: one script takes the locks of a whole batch."""
    async with exchange_of(queue, kit.url) as exchange:
        await settle(exchange, await take(exchange, 1), DONE)
        counted = Counted(kit.redis)

        taken = await take(exchange, JOBS)

        assert_as_recorded(counted, "take")
        await settle(exchange, taken, DONE)


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        ("complete", DONE),
        ("retry", Retry("boom", "boom", 0)),
        ("fail", Failed("boom", "boom", Cause.EXHAUSTED)),
    ],
)
async def test_settling_has_a_bound(kit: Kit, queue: Queue, what: str, outcome: Outcome) -> None:
    async with exchange_of(queue, kit.url) as exchange:
        await settle(exchange, await take(exchange, 1), outcome)
        taken = await take(exchange, JOBS)
        counted = Counted(kit.redis)

        await settle(exchange, taken, outcome)

        assert_as_recorded(counted, what)


async def test_an_exchange_costs_less_than_its_halves(kit: Kit, queue: Queue) -> None:
    """Settling and taking share one call, one clock, one read of meta."""
    async with exchange_of(queue, kit.url) as exchange:
        taken = await take(exchange, JOBS)
        counted = Counted(kit.redis)

        await settle(exchange, taken, DONE, then_take=JOBS)

        assert_as_recorded(counted, "complete and take")
        assert sum(COMMANDS["complete and take"]) < sum(COMMANDS["complete"]) + sum(COMMANDS["take"])
        await settle(exchange, await active_jobs(queue, kit), DONE)


async def test_adding_to_lanes_costs_no_command_more_per_job(kit: Kit) -> None:
    """What is set for lanes, and whose turn it is, is asked for once per call; a priority alone costs two per job."""
    queue = kit.queue()
    jobs = [NewJob("bench", DATA, {"lane": f"lane {number}"}) for number in range(JOBS)]
    await queue.add_many(jobs)
    counted = Counted(kit.redis)

    await queue.add_many(jobs)

    assert_as_recorded(counted, "add", recorded=IN_LANES)


@pytest.mark.parametrize(("what", "most"), [("complete and take", None), ("complete and take, with limits", 10)])
async def test_working_in_lanes_has_a_bound(kit: Kit, what: str, most: int | None) -> None:
    """Without limits a call writes where the class has got to, and that is all. A limit costs what makes it exact:
    which lane it is, how many of it run, that this one runs, for how long that is known, and that it has ended."""
    queue = kit.queue()
    await queue.add_many([NewJob("bench", DATA, {"lane": f"lane {n % JOBS}"}) for n in range(4 * JOBS)])
    if most is not None:
        await queue.lanes.set(None, concurrency=most)
    async with exchange_of(queue, kit.url) as exchange:
        await settle(exchange, await take(exchange, 1), DONE)
        taken = await take(exchange, JOBS)
        counted = Counted(kit.redis)

        await settle(exchange, taken, DONE, then_take=JOBS)

        assert_as_recorded(counted, what, recorded=IN_LANES)
        await settle(exchange, await active_jobs(queue, kit), DONE)


@pytest.mark.parametrize(("held", "waiting", "asked", "commands"), SMALL.values(), ids=SMALL)
async def test_a_call_about_one_job_costs_few_commands(
    kit: Kit, held: int, waiting: int, asked: int, commands: int
) -> None:
    """What is seldom there (delayed and prioritized jobs, children, stalled jobs) is asked for in one command."""
    queue = kit.queue()
    async with exchange_of(queue, kit.url) as exchange:
        await queue.add_many([("bench", DATA)] * (1 + held))
        await settle(exchange, await take(exchange, 1), DONE)
        finished = await take(exchange, 10)
        await queue.add_many([("bench", DATA)] * waiting)
        counted = Counted(kit.redis)

        reply = await exchange.run([JobSettlement(job, DONE) for job in finished], asked)

        calls = counted.calls()
        assert calls.pop("evalsha") == 1
        assert sum(calls.values()) == commands, f"other commands than recorded: {calls}"
        await settle(exchange, reply.taken, DONE)


async def test_an_idle_worker_asks_the_server_for_no_more_than_nodes_does(kit: Kit) -> None:
    """npm bullmq 6.7.0: a blocked read and a script of six commands each 5 s. Ours asks for as many, as often."""
    await kit.work(lambda job: None, drain_delay=10)
    counted = Counted(kit.redis)
    await kit.until(lambda: counted.calls().get("bzpopmin", 0) >= 5, "it has read in vain")
    before = counted.calls()

    await kit.until(lambda: counted.calls()["bzpopmin"] >= before["bzpopmin"] + 20, "it goes on")

    after = counted.calls()
    reads = after["bzpopmin"] - before["bzpopmin"]
    more = {name: calls - before.get(name, 0) for name, calls in after.items()}
    assert sum(more.values()) <= 8 * (reads + 1) + 10, more  # 10: what is looked at once, a second after the start


async def test_checking_an_idle_queue_costs_six_commands(kit: Kit) -> None:
    """Hundreds of queues in which nothing runs are checked all day."""
    keys = [kit.base + name for name in ("meta", "wait", "active", "stalled", "stalled-check", "events")]
    counted = Counted(kit.redis)

    kit.command("EVAL", SCRIPTS["check_stalled"].body, 6, *keys, kit.base, 0, 10_000, "", 30_000, "", 30_000)

    calls = counted.calls()
    assert calls.pop("eval") == 1
    assert sum(calls.values()) == 6, calls


async def active_jobs(queue: Queue, kit: Kit) -> list[Job]:
    """The jobs that are active now, with the token of their lock."""
    jobs = []
    client: Any = kit.redis
    for raw in client.lrange(kit.base + "active", 0, -1):
        job = await queue.get_job(raw.decode())
        assert job is not None
        job.token = client.get(f"{kit.base}{job.id}:lock").decode()
        jobs.append(job)
    return jobs


async def test_a_worker_needs_few_calls_for_many_jobs(kit: Kit, queue: Queue) -> None:
    """Batches grow by themselves: with 50 slots a call carries tens of jobs."""

    async def handle(job: Job) -> None: ...

    counted = Counted(kit.redis)

    await kit.drain(handle, 4 * JOBS, concurrency=JOBS)

    # Two pumps of 25 slots: eight calls to take all, as many to settle, and a few that found nothing.
    assert counted.calls()["evalsha"] <= 40


@pytest.mark.requirement("W-63")
async def test_all_slots_of_a_worker_are_used_at_once(kit: Kit) -> None:
    """What the benchmark of I/O-bound handlers rests on: 200 slots hold 200 jobs, not one more."""
    running, most, all_run = 0, 0, asyncio.Event()

    async def handle(job: Job) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 200:
            all_run.set()
        await all_run.wait()
        running -= 1

    await kit.queue().add_many([("bench", DATA)] * 600)

    await kit.drain(handle, 600, concurrency=200)

    assert most == 200


async def test_an_exchange_takes_at_most_a_hundred_jobs(kit: Kit) -> None:
    """Server time per call stays near a millisecond, however many slots a worker has."""

    async def handle(job: Job) -> None: ...

    await kit.queue().add_many([("bench", DATA)] * 500)
    client: Any = kit.redis
    with client.monitor() as monitor:
        await kit.drain(handle, 500, concurrency=1_000)
        client.echo("end")
        asked = [int(words[2]) for words in commands_until_echo(monitor) if words[0].upper() == "RPOP"]

    assert max(asked) == MOST_JOBS == 100


@pytest.mark.parametrize("older", [0, 300, 700])
async def test_settled_jobs_are_sought_from_the_end_where_they_stand(kit: Kit, older: int) -> None:
    """Beside 10 000 jobs that run for minutes a drain was ten times slower: each removal walked past all of them."""
    queue = kit.queue()
    await queue.add_many([("bench", DATA)] * (older + 20))
    async with exchange_of(queue, kit.url) as exchange:
        long_running: list[Job] = []
        while len(long_running) < older:
            long_running += await take(exchange, min(MOST_JOBS, older - len(long_running)))
        short = await take(exchange, 20)

        client: Any = kit.redis
        with client.monitor() as monitor:
            await settle(exchange, short, DONE)
            client.echo("end")
            ends = [words[2] for words in commands_until_echo(monitor) if words[0].upper() == "LREM"]

        assert ends == ["1" if older > 500 else "-1"] * 20
        assert kit.redis.llen(kit.base + "active") == older
        for first in range(0, older, MOST_JOBS):
            await settle(exchange, long_running[first : first + MOST_JOBS], DONE)
        assert kit.redis.exists(kit.base + "active") == 0


def commands_until_echo(monitor: Any) -> Iterator[list[str]]:
    for entry in monitor.listen():
        words = entry["command"].split(" ")
        if words == ["ECHO", "end"]:
            return
        yield words


async def test_old_and_new_jobs_of_one_batch_are_settled_from_either_end(kit: Kit) -> None:
    """The end is chosen once for a batch; who stands at the other one is found all the same."""
    queue = kit.queue()
    await queue.add_many([("bench", DATA)] * 600)
    async with exchange_of(queue, kit.url) as exchange:
        held: list[Job] = []
        while len(held) < 600:
            held += await take(exchange, MOST_JOBS)

        for first in range(300):  # always one of the oldest and one of the newest
            await settle(exchange, [held[first], held[599 - first]], DONE)

    assert kit.redis.zcard(kit.base + "completed") == 600
    assert kit.redis.exists(kit.base + "active") == 0


@pytest.mark.requirement("Q-59", "Q-61", "X-104")
@pytest.mark.parametrize("kind", ["read", "event"])
async def test_reading_and_telling_cost_the_same_beside_many_jobs(kit: Kit, kind: str) -> None:
    """Their latency has a limit under load because what they do does not grow with the queue."""

    async def commands() -> int:
        queue = kit.queue()
        job = await queue.add("bench", DATA)

        async def act() -> None:
            if kind == "read":
                assert await queue.get_job(job.id) is not None
            else:
                await job.progress(50)

        await act()
        counted = Counted(kit.redis)
        await act()
        return sum(counted.calls().values())

    alone = await commands()
    queue = kit.queue()
    await queue.add_many([("bench", DATA)] * 11_000)
    async with exchange_of(queue, kit.url) as exchange:
        held: list[Job] = []
        while len(held) < 1_000:
            held += await take(exchange, MOST_JOBS)

        crowded = await commands()

        for first in range(0, 1_000, MOST_JOBS):
            await settle(exchange, held[first : first + MOST_JOBS], DONE)
    # A line that is long is looked at from both ends: one command more, however long it is.
    assert crowded - alone == (1 if kind == "read" else 0)
    assert crowded <= 12


class TestMemory:
    async def test_a_small_job_is_stored_compactly(self, kit: Kit) -> None:
        """The default options must not push a hash into the form that takes twice the memory."""
        job = await kit.queue().add("welcome", {"to": "ada@example.com"})

        assert kit.redis.object("encoding", kit.base + job.id) in (b"listpack", b"ziplist")

    @pytest.mark.requirement("W-64")
    async def test_steady_load_leaves_no_more_behind_than_it_may(self, kit: Kit) -> None:
        """With retention the server holds as much after the third thousand jobs as after the first."""
        queue = kit.queue(remove_on_complete=100, events_max_len=200)

        async def handle(job: Job) -> None: ...

        keys, events = [], []
        for _ in range(3):
            await queue.add_many([("bench", DATA)] * 1_000)
            await kit.drain(handle, 1_000, concurrency=50)
            keys.append(sum(not raw.startswith(f"{kit.base}bp:".encode()) for raw in kit.redis.scan_iter(count=1_000)))
            events.append(kit.redis.xlen(kit.base + "events"))

        assert max(keys) - min(keys) <= 10  # lists that are empty have no key
        assert max(keys) <= 120
        assert max(events) <= 1_000  # trimmed before a batch of 200 is told, whole nodes of 100 at a time

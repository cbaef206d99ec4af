"""A primary that dies, hangs or is replaced, while a queue is at work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import pytest

from bullpen import sync
from bullpen.errors import ConnectionLost, DurabilityUnknown, OutcomeUnknown, ServerRefused
from bullpen.queue import Durability, Job, Queue, QueueEvents
from bullpen.redis import Connection
from bullpen.testing import RedisServer, SentinelServers, check_queue, need
from bullpen.worker import Worker
from tests.queue._kit import Gate, nothing, soon

pytestmark = pytest.mark.requirement("W-65")

REPLICATION_WINDOW_S = 1.0
"""What was acknowledged in this time before a crash may not have reached a replica: replication is asynchronous."""


@pytest.fixture
def servers() -> Iterator[SentinelServers]:
    need("valkey")
    with SentinelServers.start() as started:
        yield started


@pytest.fixture(scope="module")
def calm_servers() -> Iterator[SentinelServers]:
    """For tests that break nothing."""
    need("valkey")
    with SentinelServers.start(down_after_ms=30_000) as started:
        yield started


@dataclass
class Load:
    """A producer and a worker that go on whatever happens, and what became of their jobs."""

    queue: Queue
    acknowledged: dict[int, float] = field(default_factory=dict)
    """When each number was acknowledged."""
    ran: dict[int, float] = field(default_factory=dict)
    """When each number was last handled."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stop: bool = False

    async def produce(self) -> None:
        number = 0
        while not self.stop:
            await self.queue.add("mail", number)
            self.acknowledged[number] = time.monotonic()
            number += 1
            self.changed.set()
            await asyncio.sleep(0.005)

    async def handle(self, job: Job) -> None:
        self.ran[job.data] = time.monotonic()
        self.changed.set()

    async def until(self, has_come: Callable[[], bool], what: str, *, within_s: float = 20.0) -> None:
        try:
            async with asyncio.timeout(within_s):
                while not has_come():
                    self.changed.clear()
                    with contextlib.suppress(TimeoutError):  # some of what is waited for tells nobody
                        await asyncio.wait_for(self.changed.wait(), 0.05)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {within_s} s") from None


@pytest.fixture
async def load(servers: SentinelServers) -> AsyncIterator[Load]:
    """Producer and worker under way."""
    connection = Connection(servers.url, command_timeout_ms=500)
    queue = Queue("mail", connection=connection, add_deadline=60_000)
    running = Load(queue)
    worker = Worker("mail", running.handle, connection=connection, concurrency=5, lock=2_000, stalled_interval=200)
    await worker.start()
    producing = asyncio.ensure_future(running.produce())
    await running.until(lambda: len(running.ran) > 50, "jobs run")

    yield running

    running.stop = True
    await producing
    await worker.close()
    await queue.close()
    await connection.aclose()


def replicated_numbers(load: Load, primary: RedisServer) -> set[int]:
    """Numbers that both replicas have for sure."""
    numbers = set(load.acknowledged)
    assert primary.command("WAIT", 2, 5_000) == 2
    return numbers


async def judge(load: Load, safe: set[int], old: RedisServer, fault_at: float, servers: SentinelServers) -> None:
    """Producer and worker resumed by themselves, and what was lost was acknowledged by the old primary, within the
    replication window."""
    door = load.queue._connection.shared_door()
    await load.until(lambda: door.endpoint is not None and door.endpoint.port != old.port, "the new primary is found")
    moved_at = time.monotonic()
    await load.until(lambda: any(at > moved_at for at in load.acknowledged.values()), "adding goes on")
    await load.until(lambda: any(at > moved_at for at in load.ran.values()), "work goes on")
    load.stop = True
    after = {number for number, at in load.acknowledged.items() if at > moved_at}
    await load.until(lambda: after <= load.ran.keys(), "everything that was added afterwards has run")
    await load.until(lambda: safe <= load.ran.keys(), "everything that was replicated has run")

    lost = load.acknowledged.keys() - load.ran.keys()
    assert [number for number in lost if load.acknowledged[number] < fault_at - REPLICATION_WINDOW_S] == []
    violations = check_queue(servers.primary.client(), "bull", "mail", in_flight=True)
    assert violations == []


@pytest.mark.requirement("W-65", "Q-65")
async def test_nothing_that_was_replicated_is_lost_when_the_primary_is_killed(
    servers: SentinelServers, load: Load
) -> None:
    """kill -9 in full run; producer, worker, lock keeper and event reader find the new primary by themselves."""
    async with QueueEvents("mail", connection=servers.url) as events:
        safe = await asyncio.to_thread(replicated_numbers, load, servers.primary)
        fault_at = time.monotonic()
        old = await asyncio.to_thread(servers.kill_primary)

        await judge(load, safe, old, fault_at, servers)

        seen = await soon(anext(events))
        assert seen.event in ("added", "waiting", "active", "completed")
    assert servers.primary is not old


async def test_a_primary_that_hangs_is_left(servers: SentinelServers, load: Load) -> None:
    """Its connections stay open and nothing answers: the worst way to fail. When it wakes up again it is a replica,
    and nobody writes there any more."""
    primary = servers.primary
    safe = await asyncio.to_thread(replicated_numbers, load, primary)
    fault_at = time.monotonic()
    primary.pause()

    await judge(load, safe, primary, fault_at, servers)

    primary.resume()
    assert servers.primary is not primary


async def test_a_planned_failover_only_costs_a_moment(servers: SentinelServers, load: Load) -> None:
    """As for an upgrade."""
    primary = servers.primary
    safe = await asyncio.to_thread(replicated_numbers, load, primary)
    fault_at = time.monotonic()
    servers.sentinels[0].command("SENTINEL", "FAILOVER", servers.service)
    await asyncio.to_thread(servers.wait_for_failover, primary)

    await judge(load, safe, primary, fault_at, servers)


async def test_a_planned_failover_loses_nothing_that_was_acknowledged(servers: SentinelServers) -> None:
    """The old primary goes on to take writes for seconds, all of which it will throw away when it is made a replica:
    whoever believed it would lose them. The sentinel that leads tells before it begins."""
    primary, acknowledged, is_over = servers.primary, list[str](), False

    async def produce() -> None:
        while not is_over:
            acknowledged.append((await queue.add("mail")).id)
            await asyncio.sleep(0.005)

    async with Queue("planned", connection=servers.url) as queue:
        producing = asyncio.create_task(produce())
        await soon(queue.add("first"))
        await asyncio.sleep(0.3)
        servers.sentinels[2].command("SENTINEL", "FAILOVER", servers.service)
        heir = await asyncio.to_thread(servers.wait_for_failover, primary)
        begun = len(acknowledged)
        async with asyncio.timeout(20):
            while len(acknowledged) < begun + 100:  # noqa: ASYNC110 - a list tells nobody
                await asyncio.sleep(0.05)
        is_over = True
        await producing

    kept = {job_id.decode() for job_id in heir.command("LRANGE", "bull:planned:wait", 0, -1)}
    lost = [job_id for job_id in acknowledged if job_id not in kept]
    assert (len(lost), len(acknowledged)) == (0, len(acknowledged))


@pytest.mark.long
@pytest.mark.requirement("W-65", "Q-65")
async def test_no_add_that_both_replicas_have_is_lost_by_failovers(servers: SentinelServers) -> None:
    """Ids are the caller's, so each that was acknowledged is looked for. Under load: a planned failover, and then the
    death of the heir, when whichever of the two others is chosen has it. With one replica left nothing is acknowledged;
    adding goes on when the dead one is back."""
    acknowledged, unknown, is_over = list[str](), list[str](), False

    async def produce(name: str, queue: Queue) -> None:
        for number in itertools.count():
            if is_over:
                return
            job_id = f"{name}-{number}"
            try:
                await queue.add("mail", job_id=job_id, durability=Durability.replicated(2), add_deadline=2_000)
                acknowledged.append(job_id)
            except (ConnectionLost, OutcomeUnknown, DurabilityUnknown):
                unknown.append(job_id)  # not promised

    async def more() -> None:
        begun = len(acknowledged)
        async with asyncio.timeout(40):
            while len(acknowledged) < begun + 200:  # noqa: ASYNC110 - a list tells nobody
                await asyncio.sleep(0.05)

    async with contextlib.AsyncExitStack() as stack:
        opened = [Queue("known", connection=servers.url) for _ in range(4)]
        queues = [await stack.enter_async_context(queue) for queue in opened]
        producing = [asyncio.create_task(produce(f"p{at}", queue)) for at, queue in enumerate(queues)]
        await more()
        first = servers.primary
        servers.sentinels[1].command("SENTINEL", "FAILOVER", servers.service)
        await asyncio.to_thread(servers.wait_for_failover, first)
        await more()
        killed = await asyncio.to_thread(servers.kill_primary)
        await asyncio.to_thread(servers.wait_for_failover, killed)
        promised = len(acknowledged)
        await asyncio.to_thread(killed.restart)  # a sentinel makes it a replica
        await more()
        is_over = True
        await asyncio.gather(*producing)

    kept = {raw.decode() for raw in servers.primary.command("LRANGE", "bull:known:wait", 0, -1)}
    lost = [job_id for job_id in acknowledged if job_id not in kept]
    assert (lost, promised >= 400, len(acknowledged) >= 600) == ([], True, True)


class TestFinding:
    async def test_a_service_that_nobody_knows_is_told_at_once(self, calm_servers: SentinelServers) -> None:
        url = calm_servers.url.replace("/orders", "/order")
        worker = Worker("mail", nothing, connection=url)

        with pytest.raises(ServerRefused, match=r"service 'order' of sentinels .* No such master with that name"):
            await soon(worker.start())
        await worker.close()

    async def test_one_sentinel_that_answers_is_enough(self, calm_servers: SentinelServers) -> None:
        dead = "redis+sentinel://127.0.0.1:1,127.0.0.1:2,"
        url = calm_servers.url.replace("redis+sentinel://", dead)

        async with Queue("found", connection=url) as queue:
            assert await queue.is_healthy()
            job = await soon(queue.add("mail"))
            await queue.remove(job)
            await queue.obliterate()

    async def test_without_any_sentinel_the_deadline_ends_the_waiting(self) -> None:
        """The error names everybody who was asked."""
        url = "redis+sentinel://127.0.0.1:1,127.0.0.1:2/orders"
        async with Queue("mail", connection=url, add_deadline=100) as queue:
            with pytest.raises(ConnectionLost, match=r"nothing was written.*127\.0\.0\.1:1.*127\.0\.0\.1:2"):
                await soon(queue.add("mail"))

    @pytest.mark.requirement("W-71")
    async def test_sentinels_and_servers_have_users_of_their_own(self, calm_servers: SentinelServers) -> None:
        for node in calm_servers.nodes:
            node.command("ACL", "SETUSER", "ada", "on", ">s/cret", "~*", "+@all")
        for sentinel in calm_servers.sentinels:
            sentinel.command("ACL", "SETUSER", "watch", "on", ">eye", "-@all", "+sentinel|master", "+ping")
        hosts = calm_servers.url.removeprefix("redis+sentinel://")
        url = f"redis+sentinel://ada:s%2Fcret@{hosts}?sentinel_username=watch&sentinel_password="

        gate = Gate("done")
        async with Queue("login", connection=f"{url}eye") as queue, Worker("login", gate, connection=f"{url}eye"):
            job = await queue.add("mail")
            await gate.reached()
            users = {client["user"] for client in calm_servers.primary.client().client_list()}
            gate.open()
            assert await job.result(timeout=10_000) == "done"
        async with Queue("login", connection=f"{url}wrong") as queue:
            with pytest.raises(ServerRefused, match="WRONGPASS"):
                await soon(queue.add("mail"))

        assert "ada" in users


class TestBlocking:
    """The same without an event loop: nobody listens between two calls, so each call has to look first."""

    def test_a_planned_failover_loses_nothing_that_was_acknowledged(self, servers: SentinelServers) -> None:
        """Of the adds every 5 ms that the old primary took after the failover began it would keep none."""
        primary, acknowledged, is_over = servers.primary, list[str](), threading.Event()

        def produce() -> None:
            with sync.Queue("planned", connection=servers.url, add_deadline=20_000) as queue:
                while not is_over.is_set():
                    acknowledged.append(queue.add("mail").id)
                    time.sleep(0.005)

        producer = threading.Thread(target=produce)
        producer.start()
        wait_until(lambda: len(acknowledged) > 20)
        servers.sentinels[2].command("SENTINEL", "FAILOVER", servers.service)
        heir = servers.wait_for_failover(primary)
        begun = len(acknowledged)
        wait_until(lambda: len(acknowledged) > begun + 100)
        is_over.set()
        producer.join()

        kept = {job_id.decode() for job_id in heir.command("LRANGE", "bull:planned:wait", 0, -1)}
        lost = [job_id for job_id in acknowledged if job_id not in kept]
        assert (len(lost), len(acknowledged)) == (0, len(acknowledged))


def wait_until(is_so: Callable[[], bool], *, within_s: float = 20.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)

"""A cluster: one slot per queue, slots that move, primaries that die."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import operator
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

import pytest

from bullpen import DeadLetterPolicy
from bullpen.errors import ConnectionLost, DurabilityUnknown, InvalidOption, OutcomeUnknown, ServerRefused
from bullpen.queue import Durability, Job, Queue, QueueEvents
from bullpen.queue.browse import find_queues
from bullpen.redis import Connection
from bullpen.redis.client import Door
from bullpen.redis.discovery import ServerUnavailable
from bullpen.redis.socket import FOREIGN_KEY, ReplyError
from bullpen.testing import ClusterServers, RedisServer, check_queue, need
from bullpen.wire.keys import slot
from bullpen.wire.scripts import SCRIPTS
from bullpen.worker import Worker
from tests.queue._kit import Gate, Told, echo, nothing, soon

pytestmark = pytest.mark.requirement("W-66")

PREFIX = "{bull}"


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    """Three primaries."""
    need("valkey")
    with ClusterServers.start() as started:
        yield started


@pytest.fixture
async def connection(cluster: ClusterServers) -> AsyncIterator[Connection]:
    """To an empty cluster."""
    for node in cluster.nodes:
        node.flush()
    opened = Connection(cluster.url)
    yield opened
    await opened.aclose()


class TestOneSlot:
    @pytest.mark.requirement("X-97")
    @pytest.mark.parametrize("make", [Queue, QueueEvents, lambda name, **given: Worker(name, nothing, **given)])
    def test_a_queue_without_a_tag_is_told_which_prefix_helps(self, make: Any) -> None:
        """When it is made, not when the server answers CROSSSLOT to the first job."""
        with pytest.raises(InvalidOption) as refused:
            make("orders", connection="redis+cluster://127.0.0.1:7000")

        assert 'prefix="{bull}"' in str(refused.value)
        assert "bull:orders:" in str(refused.value)

    @pytest.mark.requirement("X-97")
    @pytest.mark.parametrize(("prefix", "name"), [("{bull}", "orders"), ("bull", "{orders}"), ("bull", "eu-{orders}")])
    async def test_a_tag_in_prefix_or_name_keeps_all_keys_together(
        self, connection: Connection, cluster: ClusterServers, prefix: str, name: str
    ) -> None:
        """Dead letters too: their queue keeps the tag of the name."""
        given: dict[str, Any] = {"connection": connection, "prefix": prefix}

        async def fail(job: Job) -> None:
            raise ValueError("no")

        async with Queue(name, attempts=1, **given) as queue:
            async with Worker(name, fail, dead_letters=True, **given) as worker:
                told = Told(worker)
                await queue.add("mail", {"to": "ada"})
                await queue.add("mail", delay=60_000)
                await queue.add("mail", priority=3, job_id="order-1")
                await told.finished(2)
            assert await queue.dead_letters.depth() == 2

        stored = [(node, raw.decode()) for node in cluster.nodes for raw in node.client().scan_iter()]
        assert {slot(key) for _, key in stored} == {slot(f"{prefix}:{name}:wait")}
        assert {node for node, _ in stored} == {cluster.node_of(slot(f"{prefix}:{name}:wait"))}

    def test_dead_letters_in_another_slot_are_refused(self) -> None:
        """The script that fails a job writes both queues; it could not."""
        graves = DeadLetterPolicy(store="queue", name="{graves}")

        with pytest.raises(InvalidOption, match=r"the same hash tag as 'bull:\{orders\}:'"):
            Worker("{orders}", nothing, connection="redis+cluster://127.0.0.1:7000", dead_letters=graves)

    async def test_a_plain_address_of_a_node_is_told_what_is_wrong(self, cluster: ClusterServers) -> None:
        home = cluster.node_of(slot(PREFIX))
        untagged, elsewhere = (home, "bull"), (cluster.other_primary(home), PREFIX)

        for (node, prefix), message in ((untagged, r'prefix="\{bull\}"'), (elsewhere, r"redis\+cluster://")):
            async with Queue("orders", connection=node.url, prefix=prefix) as queue:
                with pytest.raises(ServerRefused, match=message):
                    await soon(queue.add("mail"))

    async def test_queues_of_different_slots_share_a_connection(
        self, connection: Connection, cluster: ClusterServers
    ) -> None:
        """Each talks to its own server; whoever lists queues sees all of them."""
        names = ["{a}", "{b}", "{c}", "{d}"]
        async with contextlib.AsyncExitStack() as stack:
            queues = [await stack.enter_async_context(Queue(name, connection=connection)) for name in names]
            for name in names:
                await stack.enter_async_context(Worker(name, echo, connection=connection))
            jobs = await asyncio.gather(*(queue.add("mail", queue.name) for queue in queues))
            results = await asyncio.gather(*(job.result(timeout=10_000) for job in jobs))
            healthy = await connection.is_healthy()

        homes = {cluster.node_of(slot(name)) for name in names}
        assert len(homes) == 3
        assert results == names
        assert healthy
        assert await find_queues(connection, "bull") == names

    async def test_a_seed_that_is_gone_does_not_matter(self, cluster: ClusterServers) -> None:
        url = cluster.url.replace("redis+cluster://", "redis+cluster://127.0.0.1:1,")

        async with Queue("orders", connection=url, prefix=PREFIX) as queue:
            assert await queue.is_healthy()


class Clients:
    """The connections of this process to the nodes of a cluster, by what their names say they are for."""

    def __init__(self, cluster: ClusterServers) -> None:
        self._nodes = cluster.nodes
        self._before = {(node.port, one["id"]) for node in self._nodes for one in self._listed(node)}

    @staticmethod
    def _listed(node: RedisServer) -> list[dict[str, str]]:
        lines = node.command("CLIENT", "LIST", "TYPE", "normal").decode().splitlines()
        listed = [dict(pair.split("=", 1) for pair in line.split(" ")) for line in lines]
        return [one for one in listed if not one["cmd"].startswith("restore")]  # a node that moved keys here

    def named(self, purpose: Callable[[str], bool]) -> list[list[str]]:
        """For each node, the ids of those that were opened since and have such a name."""
        return [
            [
                one["id"]
                for one in self._listed(node)
                if (node.port, one["id"]) not in self._before and purpose(one["name"])
            ]
            for node in self._nodes
        ]

    def for_calls(self) -> list[list[str]]:
        """Those for short calls have no name."""
        return self.named(lambda name: not name)

    async def become(self, counts: list[int], purpose: Callable[[str], bool] = bool) -> None:
        """A server lists a connection for a moment after its end."""
        async with asyncio.timeout(10):
            while [len(ids) for ids in self.named(purpose)] != counts:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.02)


def _any(name: str) -> bool:
    return True


class TestSharing:
    MANY = tuple(f"{{q{number}}}" for number in range(60))

    @pytest.mark.parametrize("by", ["connection", "address"])
    async def test_queues_share_a_connection_to_each_node(
        self, connection: Connection, cluster: ClusterServers, by: str
    ) -> None:
        """Each queue is in a slot of its own. Whether they were given one `Connection` or the same address."""
        clients = Clients(cluster)
        given = connection if by == "connection" else cluster.url
        async with contextlib.AsyncExitStack() as stack:
            queues = [await stack.enter_async_context(Queue(name, connection=given)) for name in self.MANY]
            await asyncio.gather(*(queue.add("mail", queue.name) for queue in queues))
            counts = await asyncio.gather(*(queue.counts() for queue in queues))
            await clients.become([1, 1, 1], _any)
            used = clients.for_calls()
            await asyncio.gather(*(queue.add("mail", queue.name) for queue in queues))
            assert clients.for_calls() == used
            await connection.aclose()

        assert [count.waiting for count in counts] == [1] * len(self.MANY)
        await clients.become([0, 0, 0], _any)

    async def test_workers_share_those_for_jobs_and_locks(self, cluster: ClusterServers) -> None:
        """Beside the one that queues share. A connection on which somebody waits cannot be shared: each worker has one
        of those, and each queue whose results are waited for."""
        names = self.MANY[:20]
        clients = Clients(cluster)
        # An address that no other test uses: the thread that renews locks keeps its connections for a while.
        connection = Connection(f"redis+cluster://127.0.0.1:{cluster.nodes[2].port}")
        async with contextlib.AsyncExitStack() as stack:
            queues = [await stack.enter_async_context(Queue(name, connection=connection)) for name in names]
            for name in names:
                await stack.enter_async_context(Worker(name, echo, connection=connection))
            jobs = await asyncio.gather(*(queue.add("mail", queue.name) for queue in queues))
            results = await asyncio.gather(*(job.result(timeout=10_000) for job in jobs))
            await clients.become([3, 3, 3], operator.not_)
            waiting = clients.named(bool)
        await connection.aclose()

        assert results == list(names)
        assert sum(map(len, waiting)) == 2 * len(names)

    async def test_a_queue_that_is_closed_ends_its_own_calls_only(
        self, connection: Connection, cluster: ClusterServers
    ) -> None:
        """Both wait for the same frozen server on one connection."""
        home = cluster.node_of(slot("{q0}"))
        name = next(name for name in self.MANY[1:] if cluster.node_of(slot(name)) is home)
        clients = Clients(cluster)
        async with (
            Queue("{q0}", connection=cluster.url) as goes,
            Queue(name, connection=cluster.url) as stays,
        ):
            await goes.add("mail")
            await stays.add("mail")
            (used,) = [ids for ids in clients.for_calls() if ids]
            with home.paused():
                reads = [asyncio.ensure_future(queue.counts()) for queue in (goes, stays)]
                await asyncio.sleep(0.05)  # both are sent
                await soon(goes.close(), within_s=2)
                with pytest.raises(ConnectionLost):
                    await soon(reads[0], within_s=2)
            count = await soon(reads[1])

            assert count.waiting == 1
            assert [ids for ids in clients.for_calls() if ids] == [used]

    async def test_a_connection_that_is_cut_is_opened_once_for_all(
        self, connection: Connection, cluster: ClusterServers
    ) -> None:
        clients = Clients(cluster)
        async with contextlib.AsyncExitStack() as stack:
            queues = [await stack.enter_async_context(Queue(name, connection=connection)) for name in self.MANY]
            await asyncio.gather(*(queue.add("mail") for queue in queues))
            for _ in range(3):
                adding = asyncio.gather(*(queue.add("mail") for queue in queues))
                for node, ids in zip(cluster.nodes, clients.for_calls(), strict=True):
                    for client_id in ids:
                        node.command("CLIENT", "KILL", "ID", client_id)
                await soon(adding)
            await clients.become([1, 1, 1], _any)
            counts = await asyncio.gather(*(queue.counts() for queue in queues))
            await connection.aclose()

        assert [count.waiting for count in counts] == [4] * len(self.MANY)

    async def test_a_slot_that_moves_takes_nobody_else_with_it(
        self, connection: Connection, cluster: ClusterServers
    ) -> None:
        """The queue whose slot it is goes on over the connection to its new node; the others keep theirs."""
        clients = Clients(cluster)
        moved = slot("{q0}")
        async with contextlib.AsyncExitStack() as stack:
            queues = [await stack.enter_async_context(Queue(name, connection=connection)) for name in self.MANY]
            await asyncio.gather(*(queue.add("mail") for queue in queues))
            used = clients.for_calls()
            target = cluster.other_primary(cluster.node_of(moved))
            await asyncio.to_thread(cluster.move_slot, moved, target)
            await soon(asyncio.gather(*(queue.add("mail") for queue in queues)))
            await clients.become([1, 1, 1], _any)

            assert clients.for_calls() == used
            assert target.command("LLEN", queues[0].keys.wait) == 2
            await connection.aclose()


class Traffic:
    """A producer and a worker on one queue, and a way to see that nothing was lost or refused."""

    def __init__(self, connection: Connection) -> None:
        self.queue = Queue("orders", connection=connection, prefix=PREFIX, add_deadline=60_000)
        self.ran: list[int] = []
        self.acknowledged: list[int] = []
        self.worker = Worker(
            "orders", self._handle, connection=connection, prefix=PREFIX, concurrency=5, stalled_interval=200
        )
        self.told = Told(self.worker)
        self._producing: asyncio.Task[None] | None = None
        self._stop = False

    async def __aenter__(self) -> Self:
        await self.worker.start()
        self._producing = asyncio.create_task(self._produce())
        await self.told.finished(20)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        if self._producing is not None:
            await self._producing
        await self.worker.close()
        await self.queue.close()

    async def _handle(self, job: Job) -> None:
        self.ran.append(job.data)

    async def _produce(self) -> None:
        while not self._stop:
            number = len(self.acknowledged)
            await self.queue.add("mail", number)
            self.acknowledged.append(number)
            await asyncio.sleep(0.005)

    async def goes_on(self, within_s: float = 60.0) -> None:
        """Jobs that are added from now on run."""
        await self.told.finished(len(self.told.of("completed")) + 30, within_s=within_s)

    async def ends_complete(self, node: RedisServer) -> None:
        """Everything acknowledged ran, once, without an error; the queue is sound on its new server."""
        self._stop = True
        assert self._producing is not None
        await soon(self._producing)
        await self.told.finished(len(self.acknowledged))
        assert sorted(self.ran) == self.acknowledged
        assert self.told.of("error") == self.told.of("lock_lost") == self.told.of("stalled") == []
        assert check_queue(node.client(), PREFIX, "orders", in_flight=True) == []


class TestMovingSlots:
    async def test_a_moved_slot_is_followed(self, connection: Connection, cluster: ClusterServers) -> None:
        """MOVED: the wire is opened at the new home, and the same call is sent there."""
        home = slot(PREFIX)
        async with Traffic(connection) as traffic:
            for _ in range(2):
                target = cluster.other_primary(cluster.node_of(home))
                await asyncio.to_thread(cluster.move_slot, home, target)
                await traffic.goes_on()
            await traffic.ends_complete(target)

    async def test_a_slot_that_is_half_way_is_waited_for(self, connection: Connection, cluster: ClusterServers) -> None:
        """Job hashes are at the new home, lists at the old one: scripts fail in the middle, and nothing is settled,
        dropped or added until the rest has arrived."""
        home = slot(PREFIX)
        source = cluster.node_of(home)
        target = cluster.other_primary(source)
        gate = Gate("done")
        async with Queue("orders", connection=connection, prefix=PREFIX, add_deadline=60_000) as queue:
            worker = Worker("orders", gate, connection=connection, prefix=PREFIX, concurrency=2)
            told = Told(worker)
            await worker.start()
            jobs = await queue.add_many([("mail", number) for number in range(5)])
            await gate.reached(2)

            hashes = {queue.keys.job(job.id).encode() for job in jobs}
            await asyncio.to_thread(cluster.begin_move, home, target)
            await asyncio.to_thread(cluster.move_keys, home, target, only=hashes.__contains__)
            gate.open()
            adding = asyncio.ensure_future(queue.add("mail"))
            await asyncio.sleep(0.3)  # both are refused several times in this time
            finished_half_way, added_half_way = list(told.of("completed")), adding.done()
            await asyncio.to_thread(cluster.move_keys, home, target)
            await asyncio.to_thread(cluster.finish_move, home, target)
            await soon(adding)
            await told.finished(6)
            await worker.close()

        assert (finished_half_way, added_half_way) == ([], False)
        assert told.of("error") == told.of("lock_lost") == []
        assert check_queue(target.client(), PREFIX, "orders", at_rest=True) == []

    @pytest.mark.parametrize("take", [1, 5])
    async def test_a_look_at_a_slot_that_is_half_way_takes_nothing(
        self, connection: Connection, cluster: ClusterServers, take: int
    ) -> None:
        """It is refused as a whole. Once a job was popped, the next key that is not there would stop the script, and
        the job would be in no list."""
        home = slot(PREFIX)
        source = cluster.node_of(home)
        async with Queue("orders", connection=connection, prefix=PREFIX, add_deadline=60_000) as queue:
            await queue.add_many([("mail", number) for number in range(3)])
            keys = queue.keys
        door = Door(connection, key=keys.base)

        async def look(number: int, take: int) -> None:
            args: list[str | int] = [keys.base, number, 60_000, f"token:{number}", 30_000, take, "worker", ""]
            await soon(door.evaluate(SCRIPTS["exchange"], [keys.call("caller")], args))

        with contextlib.closing(door):
            await look(1, take=0)
            source.command("SET", keys.limiter, 1, "PX", 60_000)  # with these, all it reads first is there
            source.command("SET", keys.pc, 1)
            target = cluster.other_primary(source)
            await asyncio.to_thread(cluster.begin_move, home, target)
            try:
                with pytest.raises(ServerUnavailable, match="being moved"):
                    await look(2, take)
            finally:
                for node in (source, target):
                    node.command("CLUSTER", "SETSLOT", home, "STABLE")

        assert source.command("LRANGE", keys.wait, 0, -1) == [b"3", b"2", b"1"]

    async def test_a_connection_that_is_lost_before_it_can_tell_why_is_waited_for(
        self, connection: Connection, cluster: ClusterServers
    ) -> None:
        """A script met a key that is not there, and the wire ended before it was asked whether the slot moves. A worker
        must not end by that."""
        door = Door(connection, key=f"{PREFIX}:orders:")
        with contextlib.closing(door):
            wire = await soon(door.wire())
            wire.close()
            refusal = await soon(door.script_refusal(ReplyError(FOREIGN_KEY), wire))

        assert isinstance(refusal, ServerUnavailable)

    async def test_a_key_that_is_elsewhere_for_good_is_an_error(
        self, connection: Connection, cluster: ClusterServers
    ) -> None:
        """Waiting would never end: a job whose parent lies on another server cannot be settled by anybody."""
        home = cluster.node_of(slot(PREFIX))
        tag = next(tag for tag in ("{a}", "{b}", "{c}", "{d}") if cluster.node_of(slot(tag)) is not home)
        door = Door(connection, key=f"{PREFIX}:orders:")
        home.command("HSET", f"{PREFIX}:orders:1", "name", "mail")

        with contextlib.closing(door), pytest.raises(ServerRefused, match="share a slot"):
            await soon(door.evaluate(SCRIPTS["read_job"], [f"{PREFIX}:orders:1"], [f"{tag}:orders:", "1"]))

    async def test_a_slot_that_moves_at_once_is_followed(self, connection: Connection, cluster: ClusterServers) -> None:
        """Valkey 9 can move a slot in one step; nobody sees it half way."""
        home = slot(PREFIX)
        source = cluster.node_of(home)
        target = cluster.other_primary(source)
        async with Traffic(connection) as traffic:
            source.command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", home, home, "NODE", cluster.node_id(target))
            async with asyncio.timeout(20):
                while await asyncio.to_thread(cluster.node_of, home) is not target:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.02)
            await traffic.goes_on()
            await traffic.ends_complete(target)


async def test_work_goes_on_when_a_primary_dies() -> None:
    """Its replica takes over; what was replicated before is all there."""
    need("valkey")
    home = slot(PREFIX)
    with ClusterServers.start(replicas=1) as servers:
        connection = Connection(servers.url)
        async with Traffic(connection) as traffic:
            # On the node that dies and on others, in other slots, over the same connections.
            beside = [Queue(f"{{beside-{number}}}", connection=connection, add_deadline=60_000) for number in range(12)]
            await asyncio.gather(*(queue.add("mail") for queue in beside))
            primary = servers.node_of(home)
            assert primary in {servers.node_of(slot(queue.name)) for queue in beside}
            before = list(traffic.acknowledged)
            assert await asyncio.to_thread(primary.command, "WAIT", 1, 5_000) == 1
            await asyncio.to_thread(primary.kill)
            await soon(asyncio.gather(*(queue.add("mail") for queue in beside)))
            await traffic.goes_on()
            async with asyncio.timeout(20):
                while not set(before) <= set(traffic.ran):
                    await traffic.goes_on()
            assert servers.node_of(home) is not primary
        await connection.aclose()


@pytest.mark.long
@pytest.mark.requirement("Q-65")
async def test_no_add_that_a_replica_has_is_lost_by_failovers_and_moves() -> None:
    """Ids are the caller's, so each that was acknowledged is looked for. Under load: a slot goes away and comes back,
    its primary hands over as planned, and the heir is killed while its replica lags behind."""
    need("valkey")
    acknowledged, unknown, is_over = list[str](), list[str](), False

    async def produce(name: str, queue: Queue) -> None:
        for number in itertools.count():
            if is_over:
                return
            job_id = f"{name}-{number}"
            try:
                await queue.add("mail", job_id=job_id, durability=Durability.replicated(1))
                acknowledged.append(job_id)
            except (ConnectionLost, OutcomeUnknown, DurabilityUnknown):
                unknown.append(job_id)  # not promised

    async def more() -> None:
        begun = len(acknowledged)
        async with asyncio.timeout(30):
            while len(acknowledged) < begun + 100:  # noqa: ASYNC110 - a list tells nobody
                await asyncio.sleep(0.05)

    with ClusterServers.start(replicas=1) as cluster:
        async with contextlib.AsyncExitStack() as stack:
            opened = [Queue("known", connection=cluster.url, prefix=PREFIX) for _ in range(4)]
            queues = [await stack.enter_async_context(queue) for queue in opened]
            producing = [asyncio.create_task(produce(f"p{at}", queue)) for at, queue in enumerate(queues)]
            await more()
            place = slot(PREFIX)
            home = cluster.node_of(place)
            for target in (cluster.other_primary(home), home):
                await asyncio.to_thread(cluster.move_slot, place, target)
                await more()
            heir = next(node for node in cluster.nodes[3:] if _follows(node, home))
            heir.command("CLUSTER", "FAILOVER")
            await _until_served_by_another(cluster, place, home)
            await more()
            killed = cluster.node_of(place)
            with home.paused():  # and does not get what comes now
                killed.command("CLIENT", "KILL", "TYPE", "replica")
                await asyncio.sleep(0.3)
                await asyncio.to_thread(killed.kill)
            await _until_served_by_another(cluster, place, killed)
            is_over = True  # no replica is left: from now on nothing is promised
            await asyncio.gather(*producing)
        kept = {raw.decode() for raw in cluster.node_of(place).command("LRANGE", f"{PREFIX}:known:wait", 0, -1)}

    lost = [job_id for job_id in acknowledged if job_id not in kept]
    assert (lost, len(acknowledged) >= 400) == ([], True)


def _follows(node: RedisServer, primary: RedisServer) -> bool:
    told = node.command("INFO", "replication")
    return told["role"] == "slave" and int(told["master_port"]) == primary.port


async def _until_served_by_another(cluster: ClusterServers, place: int, than: RedisServer) -> None:
    async with asyncio.timeout(30):
        while cluster.node_of(place) is than:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)

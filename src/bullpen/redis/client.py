"""The door to Redis: where a server is, and a wire to it that is opened again after it broke.

In: commands and scripts. Out: replies, or one of our errors. `Connection` says where the server is and what was found
out about it; `Door` is one wire to the server that is in charge now. No call is repeated here: the caller must know
whether that is safe (`calls` makes it so).
Elsewhere: the socket itself (`socket`), what a URL says (`address`), where primaries are (`discovery`), what is said
about a server (`checks`), clients for threads (`blocking`).

Classes of our own instead of a client library on the hot path: measured client CPU per job at concurrency 1 was
120-155 µs with redis-py's client, 57-83 µs with this shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from bullpen._kernel import telemetry
from bullpen._kernel.clock import ServerClock
from bullpen._kernel.logs import get_logger
from bullpen._kernel.reminder import Reminder
from bullpen.errors import (
    ConnectionLost,
    ServerRefused,
    require,
)
from bullpen.redis.address import (
    Address,
    ClusterAddress,
    Command,
    Login,
    NodeAddress,
    SentinelAddress,
    parse_url,
    verified_tls,
)
from bullpen.redis.checks import Facts, ServerVerdict, judge_facts
from bullpen.redis.discovery import Directory, DiscoveryAnswer, FailoverUnderWay, ServerUnavailable, Shard, pick
from bullpen.redis.outages import forget, note_back, note_lost, note_refused
from bullpen.redis.sentinels import ASK_SENTINELS_EVERY_S, SENTINEL_EVENTS
from bullpen.redis.shared import SharedWire, take_share
from bullpen.redis.socket import (
    FOREIGN_KEY,
    NOT_YET,
    ONE_SLOT,
    UNREADABLE,
    Moved,
    Receiver,
    ReplyError,
    Wire,
    new_reader,
    pack,
    reason_of,
    translate,
)
from bullpen.redis.tls import HANDSHAKE_SHARE, diagnose, is_worth_asking, untrusted
from bullpen.wire.keys import DEFAULT_PREFIX, hash_tag, slot
from bullpen.wire.scripts import Script

logger = get_logger("bullpen.redis")

_SECOND_GREETING_S: Final = 0.25
_LATE_SENTINELS_S: Final = 0.1
AnyWire = TypeVar("AnyWire", bound=Wire)
LONGEST_RECONNECT_WAIT_S: Final = 0.5
"""After a server returned, work must go on within 1.5 s; so the pause between two attempts stays well below that."""


class Connection:
    """Where a server is, shared by any number of queues and workers.

    Give a URL, or host and port; user, password, database and TLS may also stand beside a URL. A function in place of a
    password is asked, in a thread, each time a connection is opened, so a password may change while we run. A function
    that returns the URL is called on first use, in a thread: it may start the server. `revive` is called in a thread
    before each attempt to connect again. The embedded server uses both.
    """

    def __init__(
        self,
        url: str | Callable[[], str] | None = None,
        *,
        host: str | None = None,
        port: int | None = None,
        db: int | None = None,
        username: str | None = None,
        password: str | Callable[[], str] | None = None,
        sentinel_username: str | None = None,
        sentinel_password: str | Callable[[], str] | None = None,
        tls: bool | ssl.SSLContext = False,
        connect_timeout_ms: int = 2_000,
        command_timeout_ms: int = 5_000,
        idle_ping_ms: int | None = 30_000,
        revive: Callable[[], None] | None = None,
    ) -> None:
        require("connect_timeout_ms", connect_timeout_ms >= 1, "at least 1", connect_timeout_ms)
        require("command_timeout_ms", command_timeout_ms >= 1, "at least 1", command_timeout_ms)
        require("idle_ping_ms", idle_ping_ms is None or idle_ping_ms >= 1, "at least 1, or None", idle_ping_ms)
        require("host", url is None or (host is None and port is None), "a URL or host and port, not both", host)
        context = verified_tls() if tls is True else (tls or None)
        self._login = Login(
            db=db,
            username=username,
            password=password,
            tls=context,
            sentinel_username=sentinel_username,
            sentinel_password=sentinel_password,
        )
        self._find_url = url if callable(url) else None
        self._finding = threading.Lock()
        self._address: Address | None = None
        if url is None:
            plain = NodeAddress(host="localhost" if host is None else host, port=6379 if port is None else port)
            self._address = self._login.applied_to(plain)
        elif not callable(url):
            self._address = self._login.applied_to(parse_url(url))
        self._directory: Directory | None = None
        self.connect_timeout_s = connect_timeout_ms / 1000
        self.command_timeout_s = command_timeout_ms / 1000
        self.idle_ping_s = None if idle_ping_ms is None else idle_ping_ms / 1000
        self.revive = revive
        self.clock = ServerClock()
        self.true_waits: set[str] = set()
        """Run ids of servers whose WAITAOF was seen to wait for the disk."""
        self.replicas_promised = 0
        """The greatest level `replicated(n)` that was found possible here."""
        self._met: set[NodeAddress] = set()
        self.let_us_in: set[NodeAddress] = set()
        """Servers that answered our greeting once: how they are to be spoken to is right."""
        self._watches: dict[asyncio.AbstractEventLoop, _PrimaryWatch] = {}
        self.generation = 0
        """Grows when the sentinels chose another primary while ours still answered: whoever is connected must leave."""
        self._shared: dict[tuple[asyncio.AbstractEventLoop, object], Door] = {}
        self._illness = Reminder()
        self._shards: list[Shard] = []
        """Where the primaries of a cluster were when somebody asked last. A server that is opened by this must prove
        itself, so what grew stale is found out."""

    def __repr__(self) -> str:
        return f"Connection({self._address or 'not used yet'})"

    # ---- where it is ------------------------------------------------------------------------------------------

    @property
    def address(self) -> Address:
        """What was given. Blocks while a server that is started on first use starts; on a loop use `locate` first."""
        if self._address is None:
            with self._finding:
                if self._address is None:
                    assert self._find_url is not None
                    self._address = self._login.applied_to(parse_url(self._find_url()))
        return self._address

    @property
    def directory(self) -> Directory | None:
        """Who knows where the primary is; None when the address names the server itself."""
        if self._directory is None and not isinstance(self.address, NodeAddress):
            self._directory = Directory(self.address)
        return self._directory

    @property
    def is_cluster(self) -> bool:
        return isinstance(self._address, ClusterAddress)  # a server that we start is never one, so no need to wait

    def place(self, key: str | None) -> object:
        """Equal for keys that one connection can serve."""
        return (self.address, slot(key)) if self.is_cluster and key is not None else self.address

    def require_one_slot(self, *keys: str) -> None:
        """Refuse keys that the scripts could not reach together, before anything was written."""
        if self.is_cluster:
            for key in keys:
                require("prefix", hash_tag(key) is not None, ONE_SLOT, key)
                require("prefix", slot(key) == slot(keys[0]), f"the same hash tag as {keys[0]!r}", key)

    async def locate(self, key: str | None = None) -> NodeAddress:
        """The server that holds `key` now, without blocking the loop. Raises what starting or finding it raises."""
        if self._address is None:
            await asyncio.get_running_loop().run_in_executor(None, lambda: self.address)
        address = self.address
        return address if isinstance(address, NodeAddress) else pick(await self.discover(), key)

    def remembered(self, key: str | None) -> NodeAddress | None:
        """The node that held `key` when somebody asked the cluster last."""
        try:
            return pick(self._shards, key) if self._shards else None
        except ServerUnavailable:
            return None

    async def discover(self) -> list[Shard]:
        """Ask sentinels or the cluster where the primaries are now."""
        directory = self.directory
        assert directory is not None
        reasons: list[tuple[NodeAddress, Exception]] = []
        if directory.asks_all:
            answers = await self._ask_all(directory, reasons)
            if answers:
                return directory.decide(answers)
            raise directory.nobody(reasons)
        for asked in directory.candidates():
            try:
                self._shards = directory.decide([await self._ask(directory, asked)])
                return self._shards
            except (ConnectionLost, ServerRefused) as error:
                reasons.append((asked, error))
        raise directory.nobody(reasons)

    async def _ask(self, directory: Directory, asked: NodeAddress) -> DiscoveryAnswer:
        wire = await self._dial(asked, None, Wire)
        try:
            replies = await wire.converse(directory.questions, within_s=self.connect_timeout_s)
        finally:
            wire.close()
        return directory.read(asked, [translate(one) if isinstance(one, ReplyError) else one for one in replies])

    async def _ask_all(
        self, directory: Directory, reasons: list[tuple[NodeAddress, Exception]]
    ) -> list[DiscoveryAnswer]:
        """What all say who answer: the one that leads a failover may be the last. Once most have answered, the others
        have only a moment more, or a sentinel that is off would cost each time as long as connecting may take."""
        asking = {asyncio.create_task(self._ask(directory, asked)): asked for asked in directory.candidates()}
        answers: list[DiscoveryAnswer] = []
        left = set(asking)
        try:
            while left:
                patience_s = _LATE_SENTINELS_S if directory.is_enough(len(answers)) else None
                done, left = await asyncio.wait(left, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for task in done:
                    error = task.exception()
                    if error is None:
                        answers.append(task.result())
                    elif isinstance(error, (ConnectionLost, ServerRefused)):
                        reasons.append((asking[task], error))
                    else:
                        raise error
        finally:
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
        order = list(asking.values())
        reasons.sort(key=lambda reason: order.index(reason[0]))
        return answers

    # ---- opening ----------------------------------------------------------------------------------------------

    async def open(
        self,
        client_name: str | None = None,
        *,
        key: str | None = None,
        at: NodeAddress | None = None,
        in_doubt: bool = False,
        purpose: str | None = None,
    ) -> Wire:
        """Connect to the server that holds `key`, introduce ourselves, and look at a server that we meet first.

        `at` is where it is known to be. `in_doubt`: it must prove that it takes writes. `purpose`: on a cluster, all
        who open a wire to the same node for it share one. Raises ConnectionLost or ServerRefused.
        """
        endpoint = at or await self.locate(key)
        if purpose is not None and self.is_cluster:
            return await self._open_share(purpose, endpoint, key)
        must_prove = in_doubt or self.directory is not None
        wire = await self._first_to_answer(lambda: self._greet(endpoint, client_name, key, must_prove))
        if isinstance(self.address, SentinelAddress):
            self._watch(wire)
        return wire

    async def _open_share(self, purpose: str, endpoint: NodeAddress, key: str | None) -> Wire:
        limits = (self.connect_timeout_s, self.command_timeout_s, self.idle_ping_s)
        share = await take_share(
            (self.address, endpoint, purpose, limits),
            lambda: self._first_to_answer(lambda: self._dial(endpoint, None, SharedWire)),
        )
        try:
            # With the time that other calls have there: one that is out of time ends those of all.
            await self.probe(share, key, within_s=self.command_timeout_s)
            if endpoint not in self._met:
                await self._meet(share, key, within_s=self.command_timeout_s)
        except BaseException:
            share.close()
            raise
        return share

    async def _first_to_answer(self, greet: Callable[[], Coroutine[Any, Any, AnyWire]]) -> AnyWire:
        """A second connection is tried while the first has no answer: one packet that is lost would cost as long as
        connecting may take."""
        trying = [asyncio.create_task(greet(), name="bullpen greeting")]
        try:
            done, _ = await asyncio.wait(trying, timeout=min(_SECOND_GREETING_S, self.connect_timeout_s / 4))
            if not done:
                trying.append(asyncio.create_task(greet(), name="bullpen greeting"))
                done, _ = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
            chosen = next(iter(done))
            trying.remove(chosen)
            return chosen.result()
        finally:
            for task in trying:
                task.cancel()
                task.add_done_callback(_close_unused)

    async def _greet(self, endpoint: NodeAddress, client_name: str | None, key: str | None, must_prove: bool) -> Wire:
        wire = await self._dial(endpoint, client_name, Wire)
        try:
            if must_prove:
                await self.probe(wire, key)
            if wire.endpoint not in self._met:
                await self._meet(wire, key)
        except BaseException:
            wire.close()
            raise
        return wire

    def _watch(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        watch = self._watches.get(loop)
        if watch is None:
            self._watches = {known: one for known, one in self._watches.items() if not known.is_closed()}
            watch = self._watches[loop] = _PrimaryWatch(self)
        watch.add(wire)

    async def meet(self, key: str | None = None) -> None:
        """Tell now what waiting will not cure: a wrong password, certificate or version, a service nobody knows.

        A server that is away is no error.
        """
        if not self._met:
            with contextlib.suppress(ConnectionLost):
                (await self.open(key=key)).close()

    async def probe(self, wire: Wire, key: str | None, *, within_s: float | None = None) -> None:
        """Raise ServerUnavailable unless this server may write `key` now. It deletes a key that never is."""
        if key is None and self.is_cluster:
            return  # no slot was asked for
        try:
            await wire.send(pack(("DEL", probe_key(key))), within_s=within_s or self.connect_timeout_s)
        except ReplyError as error:
            if self.is_cluster and str(error).startswith("MOVED "):
                raise Moved(str(error)) from None
            translated = translate(error)
            if isinstance(translated, ServerUnavailable):
                raise translated from None
            # Not allowed to us: then the first real command has to show it.

    async def _dial(self, endpoint: NodeAddress, client_name: str | None, kind: type[AnyWire]) -> AnyWire:
        try:
            wire = await self._dial_once(endpoint, client_name, kind)
        except ConnectionLost as error:
            if endpoint not in self.let_us_in and is_worth_asking(endpoint, error):
                left_s = self.connect_timeout_s * (1 - HANDSHAKE_SHARE)
                reason = await asyncio.get_running_loop().run_in_executor(None, diagnose, endpoint, left_s)
                if reason is not None:
                    raise reason from error
            raise
        self.let_us_in.add(endpoint)
        return wire

    async def _dial_once(self, endpoint: NodeAddress, client_name: str | None, kind: type[AnyWire]) -> AnyWire:
        loop = asyncio.get_running_loop()
        wire: AnyWire | None = None
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                make = partial(kind, endpoint, ping_every_s=self.idle_ping_s, ping_within_s=self.command_timeout_s)
                if endpoint.path:
                    _, wire = await loop.create_unix_connection(make, endpoint.path)
                else:
                    is_new = endpoint.tls is not None and endpoint not in self.let_us_in
                    handshake_s = HANDSHAKE_SHARE * self.connect_timeout_s if is_new else None
                    _, wire = await loop.create_connection(
                        make, endpoint.host, endpoint.port, ssl=endpoint.tls, ssl_handshake_timeout=handshake_s
                    )
                # A server that has no room for us says so before it is asked, and a password may take its time.
                with wire.unread():
                    greeting = (*await _greeting(endpoint, client_name), ("PING",))
                replies = await wire.converse(greeting, within_s=self.connect_timeout_s)
            for command, reply in zip(greeting, replies, strict=True):
                # A name is for people who look at CLIENT LIST; where it may not be set, work goes on.
                if isinstance(reply, ReplyError) and command[0] != "CLIENT":
                    raise translate(reply)
        except ssl.SSLCertVerificationError as error:
            raise untrusted(endpoint, error) from error
        except (ConnectionLost, ServerRefused):
            if wire is not None:
                wire.close()
            raise
        except (OSError, TimeoutError) as error:
            if wire is not None:
                wire.close()
            raise ConnectionLost(f"cannot connect to {endpoint}: {reason_of(error)}") from error
        except BaseException:
            if wire is not None:
                wire.close()
            raise
        return wire

    async def _meet(self, wire: Wire, key: str | None, *, within_s: float | None = None) -> None:
        """Look at a server once: refuse it when our scripts cannot be right there, log what its operator should
        know."""
        asked_at, within_s, began = time.time(), within_s or self.connect_timeout_s, time.monotonic()
        info, server_time = await wire.converse((("INFO",), ("TIME",)), within_s=within_s)
        answered_at = time.time()
        if isinstance(server_time, list):  # before the first job: whether an answer came late is judged by this clock
            seconds, micros = map(int, server_time)
            self.clock.observe(seconds * 1000 + micros / 1000, began, time.monotonic())
        save = None
        if isinstance(info, bytes) and b"aof_enabled:0" in info:
            (save,) = await wire.converse((("CONFIG", "GET", "save"),), within_s=within_s)
        facts = Facts.read(str(wire.endpoint), info, save, server_time, asked_at, answered_at)
        findings = judge_facts(facts)
        for finding in findings:
            if finding.verdict is ServerVerdict.REFUSED:
                raise ServerRefused(str(finding))
        if (facts.info or {}).get("redis_version", "6.").startswith("6."):
            # From 7.0 on effects are always replicated. Before, a server may forbid writes after TIME in a script.
            script = "redis.call('TIME') redis.call('DEL', KEYS[1]) return 1"
            (answer,) = await wire.converse((("EVAL", script, 1, probe_key(key)),), within_s=within_s)
            # Another server's slot, or a key that is not ours: then it was the wrong question, and proves nothing.
            if isinstance(answer, ReplyError) and not str(answer).startswith(("MOVED ", "NOPERM")):
                raise translate(answer)
        if wire.endpoint in self._met:
            return  # another wire was opened at the same time and has told
        self._met.add(wire.endpoint)
        for finding in findings:
            if finding.verdict is ServerVerdict.WARNING:
                logger.warning("%s", finding)
                telemetry.emit("server.finding", server=finding.server, check=finding.check, message=finding.message)

    # ---- sharing ----------------------------------------------------------------------------------------------

    def shared_door(self, key: str | None = None) -> Door:
        """The one door for short commands that all queues of this connection use in the running loop; on a cluster,
        all queues in the slot of `key`. There all doors to one node share a wire."""
        door = self._common_door(key)
        door.is_kept = True
        return door

    def lease_door(self, key: str) -> Door:
        """A door for the short commands of one worker, for it to close. All workers and queues of this connection share
        its wire; on a cluster, where a queue moves by itself, those of one node do."""
        if self.is_cluster:
            return Door(self, key=key, purpose="jobs")
        return LeasedDoor(self._common_door(key))

    def _common_door(self, key: str | None) -> Door:
        loop = asyncio.get_running_loop()
        for stale in [known for known in self._shared if known[0].is_closed()]:
            del self._shared[stale]
        where = (loop, slot(key) if self.is_cluster and key is not None else None)
        door = self._shared.get(where)
        if door is None or door.closed:
            door = self._shared[where] = Door(self, key=key, purpose="calls")
        return door

    @contextlib.asynccontextmanager
    async def every_primary(self) -> AsyncIterator[list[Door]]:
        """A door to each server that holds a part of the keys: one, or all primaries of a cluster."""
        if not self.is_cluster:
            yield [self.shared_door()]
            return
        doors = [
            Door(self, at=endpoint, purpose="calls")
            for endpoint in dict.fromkeys(shard.primary for shard in await self.discover())
        ]
        try:
            yield doors
        finally:
            for door in doors:
                door.close()

    async def is_healthy(self, *, timeout_ms: int = 2_000, key: str | None = None) -> bool:
        """Whether the server answers PING in time, over the connection that queues use. Never raises, writes
        nothing; the reason of a False is logged when it begins, once a minute while it lasts, and when it is over."""
        reason = await self.why_unhealthy(timeout_ms=timeout_ms, key=key)
        if reason is None:
            if self._illness.is_over():
                logger.warning("BullMQ health check is good again: %s", self._address)
        elif self._illness.begins_or_lasts():
            logger.error("BullMQ health check failed: %s", reason)
        return reason is None

    async def why_unhealthy(self, *, timeout_ms: int = 2_000, key: str | None = None) -> str | None:
        """As `is_healthy`, for who tells it: what is wrong, or None. Nothing is logged."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self.shared_door(key).call("PING")
        except TimeoutError:
            return f"{self._address} did not answer within {timeout_ms} ms"
        except Exception as error:  # noqa: BLE001 - whoever asks for health wants an answer, not an exception
            return reason_of(error)
        return None

    def redirect(self, url: str) -> None:
        """Go to another server from now on, without the log-in that was given. For tests: whoever shares this
        connection is led to a server of the test's own, and never to the one that the program names."""
        self._address, self._find_url, self._directory, self.revive = parse_url(url), None, None, None
        self._shards, self.clock = [], ServerClock()
        for known in (self._met, self.let_us_in, self.true_waits):
            known.clear()

    async def aclose(self) -> None:
        """Close the shared doors of the running loop, those that workers use when the last of them closes."""
        loop = asyncio.get_running_loop()
        for where in [known for known in self._shared if known[0] is loop]:
            door = self._shared.pop(where)
            door.is_kept = False
            if not door.leases:
                door.close()
        if loop in self._watches:
            await self._watches.pop(loop).aclose()


class _PrimaryWatch:
    """Cuts wires to a server that the sentinels no longer call primary.

    After a planned failover, or when it was cut off from the others, an old primary goes on for seconds to take writes
    that it will throw away when it becomes a replica. So the wires are cut when a sentinel tells that it begins one,
    which is a moment before a replica is made primary. Sentinels that may not tell, or whose word is lost, are asked
    twice a second. The tasks live as long as there is a wire to watch.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._wires: list[Wire] = []
        self._task: asyncio.Task[None] | None = None
        self._told = asyncio.Event()

    def add(self, wire: Wire) -> None:
        self._wires.append(wire)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="bullpen primary watch")

    async def aclose(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        address = self._connection.address
        assert isinstance(address, SentinelAddress)
        listening = [asyncio.create_task(self._listen(seed, address.service)) for seed in address.seeds]
        try:
            while True:
                self._told.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._told.wait(), ASK_SENTINELS_EVERY_S)
                self._wires = [wire for wire in self._wires if not wire.broken]
                if not self._wires:
                    return
                await self._cut_stale()
        finally:
            for task in listening:
                task.cancel()
            await asyncio.wait(listening)

    async def _cut_stale(self) -> None:
        try:
            primary = pick(await self._connection.discover(), None)
        except FailoverUnderWay as error:
            stale, why = self._wires, str(error)
        except (ConnectionLost, ServerRefused):
            return  # nobody knows better than we do
        else:
            stale = [wire for wire in self._wires if wire.endpoint != primary]
            why = f"the sentinels chose {primary}"
        if stale:
            self._connection.generation += 1
        for wire in stale:
            wire.close(f"{why}, not {wire.endpoint}")

    async def _listen(self, sentinel: NodeAddress, service: str) -> None:
        """Hear what a sentinel tells of failovers, again and again: it may be away, or forbid it to this user."""
        while True:
            with contextlib.suppress(OSError, TimeoutError, UNREADABLE, ConnectionLost):
                async with asyncio.timeout(self._connection.connect_timeout_s):
                    reader, writer = await asyncio.open_connection(sentinel.host, sentinel.port, ssl=sentinel.tls)
                try:
                    commands = (*await _greeting(sentinel, None), ("SUBSCRIBE", *SENTINEL_EVENTS))
                    writer.write(b"".join(map(pack, commands)))
                    await self._hear(reader, service.encode())
                finally:
                    writer.close()
            await asyncio.sleep(1.0)

    async def _hear(self, reader: asyncio.StreamReader, service: bytes) -> None:
        parser = new_reader()
        while data := await reader.read(65_536):
            parser.feed(data)
            while (push := parser.gets()) is not NOT_YET:
                if isinstance(push, list) and push[0] == b"message" and service in push[2].split(b" "):
                    self._told.set()


async def _greeting(endpoint: NodeAddress, client_name: str | None) -> list[Command]:
    if callable(endpoint.password):
        return await asyncio.get_running_loop().run_in_executor(None, endpoint.greeting, client_name)
    return endpoint.greeting(client_name)


def _close_unused(greeting: asyncio.Task[AnyWire]) -> None:
    if not greeting.cancelled() and greeting.exception() is None:
        greeting.result().close()


def probe_key(key: str | None) -> str:
    """A key beside `key` that never exists."""
    return f"{key or DEFAULT_PREFIX + ':'}bp:probe"


class Door:
    """A wire that is opened again after it broke, to the server that holds `key` then. Calls are not repeated here."""

    def __init__(
        self,
        connection: Connection,
        client_name: str | None = None,
        *,
        key: str | None = None,
        at: NodeAddress | None = None,
        purpose: str | None = None,
    ) -> None:
        """`key` is any key of the queue this door is for: on a cluster it says which server. `at`: always there.
        `purpose`: on a cluster, the doors of one purpose to one node share a wire, so nothing that blocks may be
        sent. They have no name there."""
        self.connection = connection
        self.closed = False
        self.leases = 0
        """Workers that use it."""
        self.is_kept = False
        """It stays open without them, for the queues of its connection."""
        self._client_name = client_name
        self._key = key
        self._always_at = at
        self._purpose = purpose
        self._moved_to: NodeAddress | None = None
        self._in_doubt = False
        self._wire: Wire | None = None
        self._retired: list[Wire] = []
        self._opening: asyncio.Lock = asyncio.Lock()
        self._failures = 0
        self._lost_at: str | None = None
        self._was_in = False

    @property
    def endpoint(self) -> NodeAddress | None:
        """The server that the present wire leads to."""
        return self._always_at if self._wire is None else self._wire.endpoint

    @property
    def is_lost(self) -> bool:
        """Whether the server was there, is away, and is being tried again."""
        return self._lost_at is not None

    async def wire(self) -> Wire:
        """The open wire, connecting if need be. Raises ConnectionLost at once when that fails."""
        if self.closed:
            raise ConnectionLost("this connection was closed by this process")
        if self._wire is not None and not self._wire.broken:
            return self._wire
        async with self._opening:
            if self._wire is not None and not self._wire.broken:
                return self._wire
            if self._wire is not None and self._lost_at is None:
                self._note_lost(self._wire.why_broken, self._wire.broken_at, self._wire.silent_since)
            began = time.monotonic()
            if self.connection.revive is not None:
                await self.connection.locate()  # outside of what counts as lost: nobody is there yet to be lost
            try:
                if self._failures and self.connection.revive is not None:
                    await self._revive(self.connection.revive)
                wire = await self.connection.open(
                    self._client_name,
                    key=self._key,
                    at=self._moved_to or self._always_at or self._remembered(),
                    in_doubt=self._in_doubt,
                    purpose=self._purpose,
                )
            except Exception as error:
                self._failures += 1
                self._moved_to = self._new_home(error, None)
                was_lost = self._lost_at is not None
                self._note_lost(error, since=began)
                if was_lost and isinstance(error, ServerRefused):
                    assert self._lost_at is not None
                    note_refused(self._lost_at, error)
                if self._was_in and isinstance(error, ServerRefused):
                    # A password that is being changed, a certificate: whoever was let in once may be again.
                    raise ConnectionLost(str(error)) from error
                raise
            if self.closed:
                wire.close()
                raise ConnectionLost("this connection was closed by this process")
            self._wire = wire
            self._was_in = True
            self._failures = 0
            self._moved_to, self._in_doubt = None, False
            self._note_back(wire, began)
            return wire

    def _remembered(self) -> NodeAddress | None:
        """For the first opening. Later there is a reason to ask anew."""
        is_first = self._wire is None and not self._failures and not self._in_doubt
        return self.connection.remembered(self._key) if is_first else None

    async def _revive(self, revive: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(None, revive)
        except Exception as error:
            # It may work the next time (a full disk, a port in use): a server that is away is no reason to crash.
            raise ConnectionLost(f"the server could not be started again: {reason_of(error)}") from error

    async def call(self, *command: str | bytes | int | float, within_s: float | None = None) -> Any:
        """One command, once."""
        wire = await self.wire()
        packed, seconds = pack(command), within_s or self.connection.command_timeout_s
        try:
            return await wire.send(packed, within_s=seconds)
        except ReplyError as error:
            refusal = self.refusal(error, wire)
            if not isinstance(refusal, Moved):
                raise refusal from None
        wire = await self.wire()
        try:
            return await wire.send(packed, within_s=seconds)
        except ReplyError as error:
            raise self.refusal(error, wire) from None

    async def call_many(
        self, commands: Iterable[Sequence[str | bytes | int]], *, within_s: float | None = None
    ) -> list[Any]:
        """Several commands in one write. Error replies are returned in place, translated; a server that cannot serve
        now is raised."""
        wire = await self.wire()
        seconds = within_s or self.connection.command_timeout_s
        replies = await wire.converse(map(tuple, commands), within_s=seconds)
        for at, reply in enumerate(replies):
            if isinstance(reply, ReplyError):
                replies[at] = refusal = self.refusal(reply, wire)
                if isinstance(refusal, ServerUnavailable):
                    raise refusal
        return replies

    async def evaluate(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[str | bytes | int],
        *,
        within_s: float | None = None,
    ) -> Any:
        """One script call. A server that has forgotten the script (restart, SCRIPT FLUSH), or the new home of the
        slot, gets its text; it then ran exactly once."""
        wire = await self.wire()
        seconds = within_s or self.connection.command_timeout_s
        try:
            return await wire.send(pack(("EVALSHA", script.sha1, len(keys), *keys, *args)), within_s=seconds)
        except ReplyError as error:
            if not str(error).startswith("NOSCRIPT"):
                refusal = await self.script_refusal(error, wire)
                if not isinstance(refusal, Moved):
                    raise refusal from None
                wire = await self.wire()
        try:
            return await wire.send(pack(("EVAL", script.body, len(keys), *keys, *args)), within_s=seconds)
        except ReplyError as error:
            raise await self.script_refusal(error, wire) from None

    @property
    def open_wire(self) -> Wire | None:
        """The wire, if it is open at this moment."""
        wire = self._wire
        return None if self.closed or wire is None or wire.broken else wire

    def evaluate_soon(
        self,
        wire: Wire,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[str | bytes | int],
        receiver: Receiver,
    ) -> None:
        """One script call, once, on an open wire; the receiver gets the reply as it came, or ConnectionLost."""
        packed = pack(("EVALSHA", script.sha1, len(keys), *keys, *args))
        wire.send_to(receiver, packed, within_s=self.connection.command_timeout_s)

    async def call_two(
        self,
        command: Sequence[str | bytes | int | float],
        behind: Sequence[str | bytes | int | float],
        *,
        within_s: float,
    ) -> tuple[Any, Any]:
        """Two commands in one write, both answered in time. Error replies are returned in place, translated. Faster
        than `call_many`, where latency counts: one task waits, for the second reply."""
        wire = await self.wire()
        first, second = wire.send_two(pack(tuple(command)), pack(tuple(behind)), within_s=within_s)
        try:
            reply = await second
        except ReplyError as error:
            reply = self.refusal(error, wire)
        return self.refusal(first.reply, wire) if isinstance(first.reply, ReplyError) else first.reply, reply

    def reconnect_wait_s(self) -> float:
        """How long to wait before the next attempt: short first, so that a brief cut costs little."""
        return min(LONGEST_RECONNECT_WAIT_S, 0.02 * 2.0 ** min(self._failures, 8))

    def break_wire(self, why: str) -> None:
        """Give up the present wire; the next call opens a new one."""
        if self._wire is not None:
            self._wire.close(why)

    def close(self) -> None:
        self.closed = True
        self.break_wire("closed by us")
        if self._lost_at is not None:
            forget(self, self._lost_at)
        for wire in self._retired:
            wire.close()

    def refusal(self, error: BaseException, wire: Wire) -> Exception:
        """Our error for an error reply. When the server cannot serve now, the next call asks again who can."""
        refusal = translate(error)
        if self.connection.is_cluster and str(error).startswith("MOVED "):
            refusal = Moved(str(error))
            self._moved_to = self._new_home(refusal, wire)
        if isinstance(refusal, ServerUnavailable):
            self._leave(wire, refusal)
        return refusal

    async def script_refusal(self, error: BaseException, wire: Wire) -> Exception:
        """Our error for the error reply to a script."""
        if FOREIGN_KEY in str(error) and self.connection.is_cluster:
            # Either a part of the queue is on its way to another server, which waiting cures; or the script was led
            # to a key that lies in another slot for good.
            try:
                await self.connection.probe(wire, self._key)
            except ServerUnavailable as reason:
                self._leave(wire, reason)
                return ServerUnavailable(f"the slot is being moved: {error}")
            except ConnectionLost as lost:  # nobody can tell any more: the same call on the next wire will
                return ServerUnavailable(f"{error}; {lost}")
        return self.refusal(error, wire)

    def _new_home(self, error: Exception, wire: Wire | None) -> NodeAddress | None:
        if not isinstance(error, Moved):
            return None
        host, _, port = error.target.rpartition(":")
        node = self.connection.address
        assert isinstance(node, ClusterAddress)
        known = wire.endpoint.host if wire is not None else node.node.host
        return node.node.at(host or known, int(port))

    def _leave(self, wire: Wire, reason: Exception) -> None:
        """Open another wire for the next call. What is under way on this one still gets its answers."""
        if wire is not self._wire:
            return
        self._in_doubt = True
        self._wire = None
        self._retired = [old for old in self._retired if not old.is_over]
        self._retired.append(wire)
        wire.retire()
        if self._lost_at is None and not isinstance(reason, Moved):
            self._note_lost(reason)

    # A lasting fault is told when it begins and when it ends, not on every attempt, and once for all doors.
    def _note_lost(self, reason: object, at: float | None = None, since: float | None = None) -> None:
        if self._lost_at is None:
            # On a cluster each node comes and goes by itself.
            is_node = self.connection.is_cluster and self._wire is not None
            self._lost_at = str(self._wire.endpoint if is_node and self._wire else self.connection.address)
        note_lost(self, self._lost_at, reason, time.monotonic() if at is None else at, since)

    def _note_back(self, wire: Wire, asked_at: float) -> None:
        if self._lost_at is not None:
            note_back(self._lost_at, str(wire.endpoint), asked_at)
            self._lost_at = None


class LeasedDoor(Door):
    """A door that others use too: whoever closes it ends what he sends, and the last who does closes the wire. Two
    hundred workers of a process need two hundred wires for their blocked reads, but one for everything else."""

    def __init__(self, door: Door) -> None:  # no other state than this: the door's own is shared
        self.connection, self.closed = door.connection, False
        self._shared = door
        door.leases += 1

    @property
    def endpoint(self) -> NodeAddress | None:
        return self._shared.endpoint

    @property
    def is_lost(self) -> bool:
        return self._shared.is_lost

    @property
    def open_wire(self) -> Wire | None:
        wire = self._shared._wire
        return None if self.closed or wire is None or wire.broken else wire

    async def wire(self) -> Wire:
        if self.closed:
            raise ConnectionLost("this connection was closed by us")
        return await self._shared.wire()

    def reconnect_wait_s(self) -> float:
        return self._shared.reconnect_wait_s()

    def break_wire(self, why: str) -> None:
        self._shared.break_wire(why)

    def refusal(self, error: BaseException, wire: Wire) -> Exception:
        return self._shared.refusal(error, wire)

    async def script_refusal(self, error: BaseException, wire: Wire) -> Exception:
        return await self._shared.script_refusal(error, wire)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._shared.leases -= 1
        if not (self._shared.leases or self._shared.is_kept):
            self._shared.close()

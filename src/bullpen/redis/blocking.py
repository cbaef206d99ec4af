"""One socket to a server for threads that have no event loop.

In: a Connection, commands. Out: replies, or one of our errors. The same servers that the event loop's doors find, the
same greeting, the same translation of error replies; nothing is repeated here. A class of our own instead of a client
library: an add in a plain thread took 1.4 times as long through redis-py, and a process that only adds needs no more.
Elsewhere: the doors of a loop (`client`), how answers about primaries are read (`discovery`), leaving a server that is
replaced (`sentinels`).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.redis.address import Command, NodeAddress, SentinelAddress
from bullpen.redis.client import Connection, probe_key
from bullpen.redis.discovery import Directory, DiscoveryAnswer, ServerUnavailable, Shard, pick
from bullpen.redis.sentinels import PrimaryWatch
from bullpen.redis.socket import NOT_YET, ReplyError, keep_alive, new_reader, pack, reason_of, translate
from bullpen.redis.spin import NEVER
from bullpen.redis.tls import HANDSHAKE_SHARE, diagnose, is_worth_asking, untrusted
from bullpen.wire.scripts import Script

_SHORT: Final = 960
"""Room for the usual reply, from the memory that the C library has at hand."""
_CHUNK: Final = 65_536
_LATE_SENTINEL_S: Final = 0.3
_SILENT_FOR_S: Final = 5.0
_FIRST_GREETING_S: Final = 0.5
_watches: WeakKeyDictionary[Connection, tuple[int, PrimaryWatch]] = WeakKeyDictionary()
"""With the process that they belong to."""


class BlockingWire:
    """One open socket, for one thread at a time. Whatever goes wrong in the middle of a call closes it: an answer that
    comes late would pass for the next one's."""

    def __init__(self, endpoint: NodeAddress, *, connect_timeout_s: float, command_timeout_s: float) -> None:
        """Connect and introduce ourselves. Raises ConnectionLost or ServerRefused."""
        self.endpoint = endpoint
        self.changed_at = -math.inf
        """When the server last did something here that changes data, noted by who wants to know."""
        self._sentinels: PrimaryWatch | None = None
        self._reader = new_reader()
        self._socket = _connect(endpoint, connect_timeout_s)
        self._may_watch = _has_limit_by_kernel(self._socket) and hasattr(socket, "MSG_DONTWAIT")
        try:
            _limit(self._socket, connect_timeout_s)
            for reply in self._converse((*endpoint.greeting(None), ("PING",))):
                if isinstance(reply, ReplyError):
                    raise translate(reply)
            _limit(self._socket, command_timeout_s)
        except BaseException:
            self.close()
            raise

    def call(self, *command: str | bytes | int | float) -> Any:
        """One command, once."""
        reply = self._ask(pack(command))
        if isinstance(reply, ReplyError):
            raise self._refusal(reply)
        return reply

    def call_many(self, commands: Iterable[Command]) -> list[Any]:
        """Several commands in one write. Raises the first error among their replies."""
        replies = self._converse(commands)
        for reply in replies:
            if isinstance(reply, ReplyError):
                raise self._refusal(reply)
        return replies

    def converse(self, commands: Iterable[Command]) -> list[Any]:
        """Several commands in one write. Error replies are returned in place, translated."""
        return [self._refusal(one) if isinstance(one, ReplyError) else one for one in self._converse(commands)]

    def evaluate(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        """One script call. A server that has forgotten the script gets its text; it then ran exactly once."""
        return self.run_script(script, ("EVALSHA", script.sha1, len(keys), *keys, *args))

    def run_script(self, script: Script, command: tuple[Any, ...], *, watch_until: float = NEVER) -> Any:
        """The same with the whole command, an EVALSHA of this script. The answer is watched for until then, before we
        sleep until it comes."""
        reply = self._ask(pack(command), watch_until)
        if type(reply) is ReplyError:
            if str(reply).startswith("NOSCRIPT"):
                return self.call("EVAL", script.body, *command[2:])
            raise self._refusal(reply)
        return reply

    def wait_at_most(self, seconds: float) -> None:
        """Give the calls from now on so much time; a command that blocks needs more than others."""
        _limit(self._socket, seconds)

    def obey(self, sentinels: PrimaryWatch) -> None:
        """From now on raise ServerUnavailable, or ConnectionLost where something was sent, as soon as these replace our
        server."""
        sentinels.join(self)
        self._sentinels = sentinels

    def subscribe(self, *channels: str) -> None:
        """From now on nothing is sent any more, and reading does not wait."""
        self.call_many([("SUBSCRIBE", channel) for channel in channels])
        self._socket.settimeout(0)

    def pushed(self) -> list[Any]:
        """What came meanwhile. Raises ConnectionLost."""
        found: list[Any] = []
        try:
            while data := self._socket.recv(_CHUNK):
                self._reader.feed(data)
                while (push := self._reader.gets()) is not NOT_YET:
                    found.append(push)
        except (BlockingIOError, ssl.SSLWantReadError):
            return found
        except OSError as error:
            raise ConnectionLost(f"{self.endpoint}: {reason_of(error)}") from error
        raise ConnectionLost(f"{self.endpoint}: closed by the server")

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        sentinels, self._sentinels = self._sentinels, None
        if sentinels is not None:
            sentinels.leave(self)
        with contextlib.suppress(OSError):
            self._socket.close()

    def _converse(self, commands: Iterable[Command]) -> list[Any]:
        packed = [pack(tuple(command)) for command in commands]
        return [self._ask(b"" if at else b"".join(packed)) for at in range(len(packed))]

    def _ask(self, packed: bytes, watch_until: float = NEVER) -> Any:
        """Write this, if anything, and read the next reply."""
        reader = self._reader
        try:
            if packed:
                if self._sentinels is not None:
                    self._sentinels.check(self.endpoint)
                self._socket.sendall(packed)
            reply = reader.gets()
            room = _SHORT
            while reply is NOT_YET:
                data = None
                if watch_until != NEVER and self._may_watch:
                    data = self._watch(room, watch_until)
                if data is None:
                    data = self._socket.recv(room)
                if not data:
                    raise ConnectionLost(f"{self.endpoint}: closed by the server")
                reader.feed(data)
                reply = reader.gets()
                room = _CHUNK
            if self._sentinels is not None:
                self._sentinels.confirm(self.endpoint)
            return reply
        except ConnectionLost:
            self.close()
            raise
        except (BlockingIOError, TimeoutError) as error:  # how a limit of the socket shows itself, plain and with TLS
            self.close()
            raise ConnectionLost(f"{self.endpoint} did not answer in time") from error
        except OSError as error:
            self.close()
            raise ConnectionLost(f"{self.endpoint}: {reason_of(error)}") from error
        except BaseException:
            self.close()
            raise

    def _watch(self, room: int, until: float) -> bytes | None:
        """What comes until then; None: nothing did."""
        receive = self._socket.recv
        while True:
            try:
                return receive(room, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if monotonic() >= until:
                    return None

    @staticmethod
    def _refusal(error: ReplyError) -> Exception:
        if str(error).startswith("MOVED "):
            return ServerUnavailable(f"the cluster moved the slot: {error}")  # who asks again finds its new home
        return translate(error)


def open_wire(
    connection: Connection, key: str | None = None, *, at: NodeAddress | None = None, within_s: float | None = None
) -> BlockingWire:
    """A wire to the server that holds `key` now, or `at` the one that is known to. Raises ConnectionLost or
    ServerRefused, after `within_s` at most."""
    sentinels = _watch_of(connection)
    if sentinels is None:
        return _open(connection, at or find(connection, key), within_s)
    try:
        wire = _open(connection, at or sentinels.locate(), within_s)
        wire.obey(sentinels)
    finally:
        sentinels.rest()
    with contextlib.suppress(ServerRefused):  # not allowed to us: then the first real command has to show it
        wire.call("DEL", probe_key(key))  # a replica would refuse it
    return wire


def _open(connection: Connection, endpoint: NodeAddress, within_s: float | None) -> BlockingWire:
    connect_s = connection.connect_timeout_s
    connect_s = connect_s if within_s is None else min(connect_s, within_s)
    is_known = endpoint in connection.let_us_in
    if not is_known and endpoint.tls is not None:
        connect_s *= HANDSHAKE_SHARE
    try:
        wire = _dial(endpoint, connect_s, connection.command_timeout_s)
    except ConnectionLost as error:
        if not is_known and is_worth_asking(endpoint, error):
            reason = diagnose(endpoint, connect_s)
            if reason is not None:
                raise reason from error
        raise
    connection.let_us_in.add(endpoint)
    return wire


def _watch_of(connection: Connection) -> PrimaryWatch | None:
    address, directory = connection.address, connection.directory
    if not isinstance(address, SentinelAddress):
        return None
    assert directory is not None
    pid, watch = _watches.get(connection, (0, None))
    if watch is None or pid != os.getpid():  # sockets of a parent are not ours to use
        timeout_s = connection.connect_timeout_s
        short_s = min(timeout_s, _LATE_SENTINEL_S)
        watch = PrimaryWatch(
            address,
            lambda seed: BlockingWire(seed, connect_timeout_s=short_s, command_timeout_s=short_s),
            lambda: pick(_ask(directory, timeout_s), None),
        )
        _watches[connection] = os.getpid(), watch
    return watch


def _dial(endpoint: NodeAddress, connect_s: float, command_s: float) -> BlockingWire:
    # One packet that is lost would cost as long as connecting may take: the first attempt has a part of that.
    first_s, began = min(_FIRST_GREETING_S, connect_s / 2), monotonic()
    try:
        return BlockingWire(endpoint, connect_timeout_s=first_s, command_timeout_s=command_s)
    except ConnectionLost:
        if monotonic() - began < first_s:
            raise  # not for want of an answer
    return BlockingWire(endpoint, connect_timeout_s=connect_s - first_s, command_timeout_s=command_s)


def find(connection: Connection, key: str | None = None) -> NodeAddress:
    """Where the server is; asks sentinels or the cluster. Raises ConnectionLost or ServerRefused."""
    address, directory = connection.address, connection.directory
    if directory is None:
        assert isinstance(address, NodeAddress)
        return address
    return pick(_ask(directory, connection.connect_timeout_s), key)


def _ask(directory: Directory, timeout_s: float) -> list[Shard]:
    reasons: list[tuple[NodeAddress, Exception]] = []
    answers: list[DiscoveryAnswer] = []
    silent = directory.silent_until
    for asked in sorted(directory.candidates(), key=lambda one: silent.get(one, 0.0)):
        began = monotonic()
        if answers and began < silent.get(asked, 0.0):
            break
        if directory.is_enough(len(answers)):
            if not directory.asks_all:
                break
            timeout_s = min(timeout_s, _LATE_SENTINEL_S)  # it may lead a failover; if it is off, it must not cost much
        try:
            wire = BlockingWire(asked, connect_timeout_s=timeout_s, command_timeout_s=timeout_s)
            with contextlib.closing(wire):
                replies = wire.converse(directory.questions)
            answers.append(directory.read(asked, replies))
            silent.pop(asked, None)
        except (ConnectionLost, ServerRefused) as error:
            reasons.append((asked, error))
            if monotonic() - began >= timeout_s:
                silent[asked] = began + _SILENT_FOR_S
    if answers:
        return directory.decide(answers)
    raise directory.nobody(reasons)


def _connect(endpoint: NodeAddress, timeout_s: float) -> socket.socket:
    try:
        if endpoint.path:
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(timeout_s)
            try:
                plain.connect(endpoint.path)
            except BaseException:
                plain.close()
                raise
            return plain
        plain = socket.create_connection((endpoint.host, endpoint.port), timeout_s)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(plain, math.inf)
        if endpoint.tls is None:
            return plain
        try:
            return endpoint.tls.wrap_socket(plain, server_hostname=endpoint.host)
        except BaseException:
            plain.close()
            raise
    except ssl.SSLCertVerificationError as error:
        raise untrusted(endpoint, error) from error
    except OSError as error:
        raise ConnectionLost(f"cannot connect to {endpoint}: {reason_of(error)}") from error


def _limit(open_socket: socket.socket, seconds: float) -> None:
    """Let reads and writes fail after so long.

    By the kernel where that is possible: with Python's own limit each read costs a second system call, which asks
    whether there is something to read.
    """
    if not _has_limit_by_kernel(open_socket):
        open_socket.settimeout(seconds)
        return
    open_socket.settimeout(None)
    whole = int(seconds)
    limit = struct.pack("@ll", whole, max(1, int((seconds - whole) * 1_000_000)))
    open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    open_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _has_limit_by_kernel(open_socket: socket.socket) -> bool:
    return not isinstance(open_socket, ssl.SSLSocket) and hasattr(socket, "SO_RCVTIMEO")

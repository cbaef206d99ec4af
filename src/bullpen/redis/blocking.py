"""One socket to a server for threads that have no event loop.

In: a Connection, commands. Out: replies, or one of our errors. The same servers that the event loop's doors find, the
same greeting, the same translation of error replies; nothing is repeated here. A class of our own instead of a client
library: an add in a plain thread took 1.4 times as long through redis-py, and a process that only adds needs no more.
Elsewhere: the doors of a loop (`client`), how answers about primaries are read (`discovery`).
"""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import struct
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any, Final

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.redis.address import Command, Endpoint
from bullpen.redis.client import Connection
from bullpen.redis.discovery import Answer, Directory, ServerUnavailable, Shard, pick
from bullpen.redis.socket import NOT_YET, ReplyError, keep_alive, new_reader, pack, reason_of, translate
from bullpen.redis.spin import NEVER
from bullpen.redis.tls import HANDSHAKE_SHARE, diagnose, is_worth_asking, untrusted
from bullpen.wire.scripts import Script

_SHORT: Final = 960
"""Room for the usual reply, from the memory that the C library has at hand."""
_CHUNK: Final = 65_536
_LATE_SENTINEL_S: Final = 0.3
_FIRST_GREETING_S: Final = 0.5


class BlockingWire:
    """One open socket, for one thread at a time. Whatever goes wrong in the middle of a call closes it: an answer that
    comes late would pass for the next one's."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout_s: float, command_timeout_s: float) -> None:
        """Connect and introduce ourselves. Raises ConnectionLost or ServerRefused."""
        self.endpoint = endpoint
        self._timeout_s = command_timeout_s
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

    def evaluate(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
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

    def close(self) -> None:
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
    connection: Connection, key: str | None = None, *, at: Endpoint | None = None, within_s: float | None = None
) -> BlockingWire:
    """A wire to the server that holds `key` now, or `at` the one that is known to. Raises ConnectionLost or
    ServerRefused, after `within_s` at most."""
    connect_s = connection.connect_timeout_s
    connect_s = connect_s if within_s is None else min(connect_s, within_s)
    endpoint = at or find(connection, key)
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


def _dial(endpoint: Endpoint, connect_s: float, command_s: float) -> BlockingWire:
    # One packet that is lost would cost as long as connecting may take: the first attempt has a part of that.
    first_s, began = min(_FIRST_GREETING_S, connect_s / 2), monotonic()
    try:
        return BlockingWire(endpoint, connect_timeout_s=first_s, command_timeout_s=command_s)
    except ConnectionLost:
        if monotonic() - began < first_s:
            raise  # not for want of an answer
    return BlockingWire(endpoint, connect_timeout_s=connect_s - first_s, command_timeout_s=command_s)


def find(connection: Connection, key: str | None = None) -> Endpoint:
    """Where the server is; asks sentinels or the cluster. Raises ConnectionLost or ServerRefused."""
    address, directory = connection.address, connection.directory
    if directory is None:
        assert isinstance(address, Endpoint)
        return address
    return pick(_ask(directory, connection.connect_timeout_s), key)


def _ask(directory: Directory, timeout_s: float) -> list[Shard]:
    reasons: list[tuple[Endpoint, Exception]] = []
    answers: list[Answer] = []
    for asked in directory.candidates():
        if directory.is_enough(len(answers)):
            if not directory.asks_all:
                break
            timeout_s = min(timeout_s, _LATE_SENTINEL_S)  # it may lead a failover; if it is off, it must not cost much
        try:
            wire = BlockingWire(asked, connect_timeout_s=timeout_s, command_timeout_s=timeout_s)
            with contextlib.closing(wire):
                replies = wire.converse(directory.questions)
            answers.append(directory.read(asked, replies))
        except (ConnectionLost, ServerRefused) as error:
            reasons.append((asked, error))
    if answers:
        return directory.decide(answers)
    raise directory.nobody(reasons)


def _connect(endpoint: Endpoint, timeout_s: float) -> socket.socket:
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

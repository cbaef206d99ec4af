"""One use of the bundled server of a directory: join, find it again, let go."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from bullpen.embedded.directory import announce, data_directory, prepare, refuse_if_forbidden, warn_of_nearby
from bullpen.embedded.locks import TURN_DEADLINE_S, holds_file, lock_file, my_turn, turns
from bullpen.embedded.stamp import ELSEWHERE, SYNCS, Stamp, Sync, Tcp
from bullpen.embedded.starting import find_or_start, is_supervised, runs, sync_always
from bullpen.errors import EmbeddedError, require


def acquire(
    directory: Path | None = None,
    *,
    tcp_port: int | None = None,
    password: str | None = None,
    appendfsync: Sync | None = None,
) -> EmbeddedServer:
    """Become a user of the server of `directory`, starting it if nobody has; blocks until it answers.

    Without a directory, `data_directory()` is used. `tcp_port` with `password` opens 127.0.0.1 too, so that programs
    that need TCP can join; all processes that ask for it must ask for the same. `appendfsync="always"` lets the server
    bring each write to the disk before it answers, which level `fsync` of an add needs; the directory remembers it, and
    a server that runs changes at once. The server ends after the last user released it or died, and its data stays.

    Raises NotConfigured without a directory if `BULLPEN_EMBEDDED=never`, which forbids this server where none was
    named; MissingExtra if no server is installed; EmbeddedError if the directory belongs to something or somebody else,
    was written by a newer server, or the server does not start.
    """
    refuse_if_forbidden(is_named=directory is not None)
    wish = Tcp.check(tcp_port, password)
    require("appendfsync", appendfsync is None or appendfsync in SYNCS, "'everysec' or 'always'", appendfsync)
    place = Path(os.path.realpath(data_directory() if directory is None else Path(directory).expanduser()))
    is_first = announce(place)
    server = EmbeddedServer(place, wish, appendfsync)
    if is_first:
        warn_of_nearby(place)
    return server


def is_running(directory: Path) -> bool:
    """Whether somebody's server serves this directory now. Starts none, waits for none."""
    return is_supervised(directory)


class EmbeddedServer:
    """One use of a shared server; made by `acquire`.

    The server lives at least until `release`, or until this process ends. After `os.fork` the child is a user of its
    own. All methods may be called from any thread; those that start a server block.
    """

    def __init__(self, directory: Path, tcp: Tcp | None, appendfsync: Sync | None) -> None:
        self._directory, self._tcp, self._appendfsync = directory, tcp, appendfsync
        self._lock = threading.RLock()
        self._users = -1
        self._stamp: Stamp
        try:
            self._join(tcp, insist=True)
        except BaseException:
            self.release()
            raise
        _in_use.add(self)

    @property
    def url(self) -> str:
        """`unix://<socket path>`; with a password in it if the server has one, which then holds for the socket too."""
        return f"unix://{self._stamp.credentials}{quote(self._stamp.socket)}"

    @property
    def tcp_url(self) -> str | None:
        """`redis://:<password>@127.0.0.1:<port>`, or None if the server listens on its socket only."""
        if self._stamp.tcp_port is None:
            return None
        return f"redis://{self._stamp.credentials}127.0.0.1:{self._stamp.tcp_port}"

    @property
    def directory(self) -> Path:
        """The data directory, with symbolic links resolved."""
        return self._directory

    @property
    def socket_path(self) -> Path:
        """The unix socket: in the directory, or in a private temporary one if the directory's path is too long."""
        return Path(self._stamp.socket)

    @property
    def name(self) -> str:
        """`valkey` or `redis`."""
        return self._stamp.name

    @property
    def version(self) -> str:
        """Version of the server that runs."""
        return self._stamp.version

    def ensure_running(self) -> None:
        """Start the server again if it is gone, in this process or any other; quick when it runs.

        A client that lost its connection calls this before it connects again. Raises as `acquire`, and EmbeddedError
        after `release`.
        """
        with self._lock:
            if self._users < 0:
                raise EmbeddedError(f"the embedded server in {self._directory} was released; acquire it again")
            stamp = Stamp.read(self._directory)
            if stamp is not None and self._is_used() and runs(self._directory, stamp):
                self._stamp = stamp
                return
            # What others rely on stays: a server that had a TCP port gets it again. If somebody else was faster and
            # started one without, that is no reason to fail: we need the socket.
            self._join(self._tcp or self._stamp.tcp, insist=False)

    def release(self) -> None:
        """Stop using the server; it ends when nobody uses it any more. May be called twice."""
        with self._lock:
            descriptor, self._users = self._users, -1
            _in_use.discard(self)
            if descriptor >= 0:
                # Closed, not unlocked: unlocking would also take the lock from a forked child that still has the copy.
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._users < 0 else f"{self.name} {self.version}"
        return f"<EmbeddedServer {self._directory}, {state}>"

    def _is_used(self) -> bool:
        return self._users >= 0 and holds_file(self._users, self._directory / "users.lock")

    def _join(self, tcp: Tcp | None, *, insist: bool) -> None:
        try:
            self._use(tcp, insist=insist)
        except OSError as error:  # read-only by now, no room, not ours any more
            reason = error.strerror or error
            raise EmbeddedError(f"{self._directory} cannot be used ({reason}); {ELSEWHERE}") from error

    def _use(self, tcp: Tcp | None, *, insist: bool) -> None:
        prepare(self._directory)
        with my_turn(self._directory):
            if not self._is_used():
                # While the supervisor of a server that nobody used any more ends it, this waits.
                new = lock_file(self._directory / "users.lock", shared=True, deadline_s=TURN_DEADLINE_S)
                if self._users >= 0:
                    os.close(self._users)
                self._users = new
            stamp = find_or_start(self._directory, tcp, self._appendfsync)
            if insist:
                _refuse_other_tcp(self._directory, stamp, tcp)
                _refuse_rarer_syncs(self._directory, stamp, self._appendfsync)
            if self._appendfsync == "always" and stamp.appendfsync != "always":
                stamp = sync_always(self._directory, stamp)
            self._stamp = stamp

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # a thread that does not exist here may have held the old one
        inherited = self._users
        if inherited < 0:
            return
        try:
            # Cannot fail to get the lock: the inherited one, still open, keeps everybody from holding it exclusively.
            self._users = lock_file(self._directory / "users.lock", shared=True, deadline_s=0)
        except (EmbeddedError, OSError):
            return  # the directory is gone; the inherited lock is as good as any
        os.close(inherited)


def _refuse_other_tcp(directory: Path, stamp: Stamp, tcp: Tcp | None) -> None:
    if tcp is not None and tcp != stamp.tcp:
        listens = f"on port {stamp.tcp_port}" if stamp.tcp_port is not None else "without a TCP port"
        same = ", but with another password" if stamp.tcp_port == tcp.port else ""
        raise EmbeddedError(
            f"the embedded server in {directory} already runs {listens}{same}; give every process the same tcp_port "
            "and password, or stop the others first"
        )


def _refuse_rarer_syncs(directory: Path, stamp: Stamp, appendfsync: Sync | None) -> None:
    if appendfsync == "everysec" and stamp.appendfsync == "always":
        raise EmbeddedError(
            f"the embedded server in {directory} runs with appendfsync 'always', and others may rely on it; stop them "
            "before you ask for 'everysec'"
        )


_in_use: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for descriptor in list(turns):
        os.close(descriptor)
    turns.clear()
    for server in list(_in_use):
        server._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

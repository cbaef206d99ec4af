"""Start a private RabbitMQ broker for tests: one node, or a cluster on loopback.

In: how many nodes. Out: running nodes with ports, names and a directory of their own; nothing of them is left when the
test process ends. Neither a system broker nor its port mapper is touched. Elsewhere: other servers (`servers`), faults
on the way (`proxy`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bullpen.testing import _reaper
from bullpen.testing.servers import ComponentMissing, free_port

__all__ = ["RabbitServer", "need_rabbitmq"]

# The programs in /usr/sbin switch user and directory; these run as whoever starts them.
_BIN: Final = Path("/usr/lib/rabbitmq/bin")
_READY_DEADLINE_S: Final = 150.0
_EPMD_DEADLINE_S: Final = 10.0
_STOP_DEADLINE_S: Final = 30.0
DEAD_LETTER_TIMEOUT_MS: Final = 1_000
"""As the guide tells people to run their cluster: a delay queue that met a target without a leader tries again soon."""


def _find_broker() -> Path:
    server = _BIN / "rabbitmq-server"
    if not server.exists() or shutil.which("epmd") is None:
        raise ComponentMissing("rabbitmq", "apt package rabbitmq-server")
    return server


def need_rabbitmq() -> Path:
    """The broker's program, for a test that cannot do without: skips at home, fails when `CI=true`."""
    import pytest

    try:
        return _find_broker()
    except ComponentMissing as missing:
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


class _BrokerNode:
    """One node: its ports stay the same over kill and start."""

    def __init__(self, name: str, directory: Path, environment: dict[str, str]) -> None:
        self.name, self.directory = name, directory
        self.port = free_port()
        directory.mkdir()
        (directory / "plugins").write_text("[].\n")
        self._environment = {
            **environment,
            "ERL_CRASH_DUMP": str(directory / "crash.dump"),
            "RABBITMQ_NODENAME": name,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(directory / "data"),
            "RABBITMQ_LOG_BASE": str(directory / "log"),
            "RABBITMQ_LOGS": str(directory / "log" / "node.log"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "config"),
            "RABBITMQ_SCHEMA_DIR": str(directory / "schema"),
            "RABBITMQ_PID_FILE": str(directory / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(directory.parent / "rabbit.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory.parent / "advanced.config"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        with (self.directory / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                [str(_find_broker())],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                start_new_session=True,
            )
        _reaper.watch_process(self._process.pid)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _READY_DEADLINE_S
        while not self._answers():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"RabbitMQ node {self.name} did not start:\n{self.last_words()}")
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _reaper.forget_process(process.pid)

    def last_words(self) -> str:
        """The first errors of each log, which tell the cause, and its end."""
        told: list[str] = []
        for path in sorted(self.directory.rglob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            told += [line for line in lines[:-10] if "[error]" in line][:20] + lines[-10:]
        return "\n".join(told)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(2)
            try:
                probe.connect(("127.0.0.1", self.port))
                probe.sendall(b"AMQP\0\0\x09\x01")
                return probe.recv(1) == b"\x01"
            except OSError:
                return False


class RabbitServer:
    """A private broker: started by `RabbitServer.start`, gone with the test process at the latest."""

    def __init__(self, directory: Path, nodes: int, dead_letter_timeout_ms: int | None) -> None:
        self._directory, self._owner = directory, os.getpid()
        self._epmd_port = free_port()
        cookie = directory / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(16))
        cookie.chmod(0o400)
        names = [f"r{number}_{self._epmd_port}@localhost" for number in range(nodes)]
        self._write_configuration(names, dead_letter_timeout_ms)
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": str(directory),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_CONF_ENV_FILE": os.devnull,
            # One scheduler that sleeps when idle: several nodes share two cores with the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none +A 8"
            ),
        }
        self._epmd: subprocess.Popen[bytes] | None = None
        self._nodes = [_BrokerNode(name, directory / f"node{at}", self._environment) for at, name in enumerate(names)]

    @classmethod
    def start(cls, nodes: int = 1, *, dead_letter_timeout_ms: int | None = DEAD_LETTER_TIMEOUT_MS) -> Self:
        """Start so many nodes and return when all of them speak AMQP. One takes about 5 s, three about 17 s.

        `dead_letter_timeout_ms`: how long a quorum queue waits before it dead-letters a message again that its target
        refused; None leaves the broker's own 180 s.
        """
        _find_broker()
        directory = Path(tempfile.mkdtemp(prefix="bullpen-rabbit-"))
        _reaper.watch_directory(directory)
        server = cls(directory, nodes, dead_letter_timeout_ms)
        _open_servers.append(server)
        try:
            server._launch_epmd()
            for node in server._nodes:
                node.launch()
            for node in server._nodes:
                node.wait_until_ready()
            server._wait_for_cluster()
        except BaseException:
            server.close()
            raise
        return server

    @property
    def urls(self) -> list[str]:
        """`amqp://guest:guest@127.0.0.1:<port>/` of every node."""
        return [node.url for node in self._nodes]

    @property
    def url(self) -> str:
        """Address of the first node."""
        return self._nodes[0].url

    def port(self, node: int = 0) -> int:
        return self._nodes[node].port

    def stop(self, node: int = 0) -> None:
        """End a node politely and wait for it. Its data stays for `restart`."""
        self._nodes[node].stop()

    def kill(self, node: int = 0) -> None:
        """End a node at once (SIGKILL). Its data stays for `restart`.

        A single node that is killed within half a second after a quorum queue was made forgets the queue's log: the
        index of logs is written that seldom. Only a cluster stands that.
        """
        self._nodes[node].kill()

    def restart(self, node: int = 0) -> None:
        """Start a node again with its data, and wait until it speaks AMQP; a running one is killed first."""
        self._nodes[node].kill()
        self._nodes[node].launch()
        self._nodes[node].wait_until_ready()

    def pause(self, node: int = 0) -> None:
        """Freeze a node: connections stay open and nothing answers."""
        self._nodes[node].signal(signal.SIGSTOP)

    def resume(self, node: int = 0) -> None:
        self._nodes[node].signal(signal.SIGCONT)

    @contextlib.contextmanager
    def paused(self, node: int = 0) -> Iterator[None]:
        """Freeze a node for the length of a block."""
        self.pause(node)
        try:
            yield
        finally:
            self.resume(node)

    def control(self, *arguments: str, node: int = 0) -> str:
        """Run `rabbitmqctl` against a node and return what it prints. Takes about a second: it starts a VM."""
        command = [str(_BIN / "rabbitmqctl"), "--quiet", "--node", self._nodes[node].name, *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"rabbitmqctl {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def close(self) -> None:
        """Kill all nodes and remove their directory. May be called twice."""
        if os.getpid() != self._owner:
            return
        for node in self._nodes:
            node.kill()
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
            _reaper.forget_process(self._epmd.pid)
            self._epmd = None
        shutil.rmtree(self._directory, ignore_errors=True)
        _reaper.forget_directory(self._directory)
        with contextlib.suppress(ValueError):
            _open_servers.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_configuration(self, names: list[str], dead_letter_timeout_ms: int | None) -> None:
        lines = [
            "log.console = false",
            "vm_memory_high_watermark.absolute = 1GB",
            "disk_free_limit.absolute = 50MB",
        ]
        if len(names) > 1:
            lines.append("cluster_formation.peer_discovery_backend = classic_config")
            lines += [f"cluster_formation.classic_config.nodes.{at} = {name}" for at, name in enumerate(names, 1)]
            lines += [f"cluster_formation.randomized_startup_delay_range.{end}" for end in ("min = 0", "max = 1")]
        (self._directory / "rabbit.conf").write_text("\n".join(lines) + "\n")
        if dead_letter_timeout_ms is not None:
            setting = f"{{dead_letter_worker_publisher_confirm_timeout, {dead_letter_timeout_ms}}}"
            (self._directory / "advanced.config").write_text(f"[{{rabbit, [{setting}]}}].\n")

    def _launch_epmd(self) -> None:
        """A port mapper of our own: without it the first node would start one that outlives us."""
        program = shutil.which("epmd")
        assert program is not None
        self._epmd = subprocess.Popen(
            [program, "-port", str(self._epmd_port), "-address", "127.0.0.1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _reaper.watch_process(self._epmd.pid)
        deadline = time.monotonic() + _EPMD_DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._epmd_port), 1):
                return
            time.sleep(0.02)
        raise RuntimeError("epmd did not start")

    def _wait_for_cluster(self) -> None:
        if len(self._nodes) == 1:
            return
        deadline = time.monotonic() + _READY_DEADLINE_S
        while time.monotonic() < deadline:
            running = self.control("eval", "length(rabbit_nodes:all_running()).").strip()
            if running == str(len(self._nodes)):
                return
            time.sleep(0.2)
        raise RuntimeError("the nodes did not form a cluster")


_open_servers: list[RabbitServer] = []
_closing = threading.Lock()


def _close_all() -> None:
    with _closing:
        while _open_servers:
            _open_servers[-1].close()


atexit.register(_close_all)

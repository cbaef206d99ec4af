"""Start real Kafka brokers for tests: one node, or three that replicate, on loopback and free ports.

In: how many nodes. Out: running brokers (KRaft, no ZooKeeper) with a directory of their own; nothing of them is left
when the test process ends. The jars come from Maven Central by name, once, into the caches of the account. The mock
cluster of `bullpen.testing.kafka` starts in milliseconds and stays for what does not depend on the broker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bullpen.testing import _reaper
from bullpen.testing.servers import ComponentMissing, free_port

VERSION: Final = "4.1.0"
LOG4J_BRIDGE: Final = "2.24.3"
"""Carries the broker's log to the log4j that it brings: its list of libraries leaves that to whoever starts it."""
_READY_DEADLINE_S: Final = 90.0
_STOP_DEADLINE_S: Final = 30.0
_FETCH_DEADLINE_S: Final = 600.0
# As small and as quick to start as a broker for tests can be: it lives for minutes.
_JAVA: Final = ("java", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
GUARDED_KEY: Final = "ssl.keystore.location"
_LOGIN: Final = "org.apache.kafka.common.security.plain.PlainLoginModule required"
_POM: Final = f"""<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>bullpen.tests</groupId>
  <artifactId>kafka</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>{LOG4J_BRIDGE}</version>
    </dependency>
  </dependencies>
</project>
"""
_LOGGING: Final = """status = warn
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d{ISO8601} %p %m (%c)%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
"""


def _jars() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "bullpen-tests" / f"kafka-{VERSION}"


def fetch_kafka() -> None:
    """Bring the broker's jars into the cache; does nothing when they are there."""
    target = _jars()
    if (target / "complete").exists():
        return
    for program, package in (("java", "openjdk-17-jre-headless"), ("mvn", "maven")):
        if shutil.which(program) is None:
            raise ComponentMissing(program, f"apt package {package}")
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (target / "complete").exists():
            return
        (target / "pom.xml").write_text(_POM)
        command = ["mvn", "--quiet", "--batch-mode", "dependency:copy-dependencies", f"-DoutputDirectory={target}"]
        done = subprocess.run(command, cwd=target, capture_output=True, timeout=_FETCH_DEADLINE_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"mvn could not fetch Kafka {VERSION}:\n{done.stdout.decode(errors='replace')}")
        (target / "complete").touch()


def need_real_kafka() -> None:
    """For a test that cannot do without a real broker: skips at home, fails when `CI=true`."""
    import pytest

    try:
        if shutil.which("java") is None:
            raise ComponentMissing("java", "apt package openjdk-17-jre-headless")
        if not (_jars() / "complete").exists():
            raise ComponentMissing("Kafka", "`make test`, which fetches it with mvn (apt package maven)")
    except ComponentMissing as missing:
        if os.environ.get("CI", "").lower() in {"1", "true"}:
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))


def self_signed(directory: Path) -> Path:
    """A PEM file with a key and the certificate of 127.0.0.1, which is its own authority."""
    from bullpen.testing.servers import need

    key, path = directory / "broker.key", directory / "broker.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    names = ("-subj", "/CN=broker", "-addext", "subjectAltName=IP:127.0.0.1")
    command = [str(need("openssl")), "req", "-x509", *curve, *names, "-keyout", str(key), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(key.read_text() + path.read_text())
    return path


def guarded(key_and_certificate: Path, users: Mapping[str, str]) -> dict[str, object]:
    """Settings of brokers that have one more listener: TLS with this PEM file, and a password for each user."""
    logins = " ".join(f'user_{name}="{password}"' for name, password in users.items())
    return {
        GUARDED_KEY: key_and_certificate,
        "ssl.keystore.type": "PEM",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{_LOGIN} {logins};",
    }


class _Node:
    """One broker, which is a controller too: its ports and data stay the same over kill and start."""

    def __init__(self, number: int, directory: Path) -> None:
        self.number, self.directory = number, directory
        self.port, self.guarded_port, self.controller_port = free_port(), free_port(), free_port()
        directory.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def write_settings(self, settings: Mapping[str, object]) -> None:
        (self.directory / "logging.properties").write_text(_LOGGING)
        listeners = {"PLAINTEXT": self.port, "SASL_SSL": self.guarded_port}
        if GUARDED_KEY not in settings:
            del listeners["SASL_SSL"]
        opened = ",".join(f"{name}://127.0.0.1:{port}" for name, port in listeners.items())
        own = {
            "process.roles": "broker,controller",
            "node.id": self.number,
            "listeners": f"{opened},CONTROLLER://127.0.0.1:{self.controller_port}",
            "advertised.listeners": opened,
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL",
            "log.dirs": self.directory / "data",
        }
        lines = [f"{name}={value}" for name, value in {**own, **settings}.items()]
        self._settings.write_text("\n".join(lines) + "\n")

    def format(self, cluster_id: str) -> None:
        """Write the cluster's id into the data directory, without which a broker refuses to start."""
        command = self._command("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(self._settings))
        done = subprocess.run(command, capture_output=True, text=True, timeout=_READY_DEADLINE_S, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"Kafka could not format its directory:\n{done.stdout}{done.stderr}")

    def launch(self) -> None:
        with (self.directory / "output.log").open("ab") as output:
            self._process = subprocess.Popen(
                self._command("kafka.Kafka", str(self._settings)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
                start_new_session=True,
            )
        _reaper.watch_process(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """Let it hand over its partitions and end."""
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

    def accepts(self) -> bool:
        """A broker opens its port when the controller has let it in."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def last_words(self) -> str:
        log = self.directory / "output.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-30:]) if log.exists() else ""

    @property
    def _settings(self) -> Path:
        return self.directory / "server.properties"

    def _command(self, *words: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self.directory / 'logging.properties'}"
        return [*_JAVA, logging, "-cp", f"{_jars()}/*", *words]


class PortTaken(RuntimeError):
    """Somebody else has a port that was free when it was chosen."""


class KafkaServer:
    """Real brokers with the face of the mock cluster, so that the same suites run on both."""

    def __init__(self, directory: Path, nodes: int, settings: Mapping[str, object]) -> None:
        self._directory, self._owner = directory, os.getpid()
        self._nodes = [_Node(number, directory / f"node{number}") for number in range(1, nodes + 1)]
        copies = min(nodes, 3)
        common: dict[str, object] = {
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.quorum.voters": ",".join(f"{n.number}@127.0.0.1:{n.controller_port}" for n in self._nodes),
            "num.partitions": 4,
            "default.replication.factor": copies,
            "min.insync.replicas": 2 if nodes > 1 else 1,
            "offsets.topic.num.partitions": 4,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.num.partitions": 4,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": 1,
            # A killed broker may come back after two seconds instead of nine.
            "broker.session.timeout.ms": 2_000,
            "broker.heartbeat.interval.ms": 500,
            # A group need not wait for more members, and a dead one is noticed as soon as it asks for.
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 1_000,
            **settings,
        }
        for node in self._nodes:
            node.write_settings(common)
        self._admin: Any = None

    @classmethod
    def start(cls, nodes: int = 1, *, settings: Mapping[str, object] | None = None) -> Self:
        """Start so many brokers and return when all are members of the cluster. One takes about 3 s."""
        for is_last in (False, False, True):
            try:
                return cls._start(nodes, settings or {})
            except PortTaken:  # its ports were free when they were chosen
                if is_last:
                    raise
        raise AssertionError("not reached")

    @classmethod
    def _start(cls, nodes: int, settings: Mapping[str, object]) -> Self:
        directory = Path(tempfile.mkdtemp(prefix="bullpen-kafka-"))
        _reaper.watch_directory(directory)
        server = cls(directory, nodes, settings)
        cluster_id = uuid.uuid4().hex[:22]  # as long as the ids that Kafka makes
        try:
            for node in server._nodes:
                node.format(cluster_id)
            for node in server._nodes:
                node.launch()
            server.wait_until_ready()
        except BaseException:
            server.close()
            raise
        return server

    @property
    def address(self) -> str:
        """Comma-separated `host:port` of all brokers."""
        return ",".join(f"127.0.0.1:{node.port}" for node in self._nodes)

    @property
    def guarded_address(self) -> str:
        """The same for listeners with TLS and passwords, where `guarded` is among the settings."""
        return ",".join(f"127.0.0.1:{node.guarded_port}" for node in self._nodes)

    def create_topic(self, name: str, *, partitions: int = 4, settings: Mapping[str, str] | None = None) -> None:
        from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # a name of its C part

        copies = min(len(self._nodes), 3)
        topic = NewTopic(name, num_partitions=partitions, replication_factor=copies, config=dict(settings or {}))
        for made in self._client().create_topics([topic]).values():
            made.result(_READY_DEADLINE_S)

    def leader_of(self, topic: str, partition: int = 0) -> int:
        """The index of the node that leads a partition."""
        described = self._client().list_topics(topic, timeout=_READY_DEADLINE_S).topics[topic]
        return int(described.partitions[partition].leader) - 1

    def stop(self, node: int = 0) -> None:
        self._nodes[node].stop()

    def kill(self, node: int = 0) -> None:
        """End a broker at once (SIGKILL). Its data stays for `restart`."""
        self._nodes[node].kill()

    def restart(self, node: int = 0) -> None:
        """Start a broker again with its data, and wait until it is a member of the cluster."""
        self._nodes[node].kill()
        self._nodes[node].launch()
        self.wait_until_ready()

    def pause(self, node: int = 0) -> None:
        """Freeze a broker: connections stay open and nothing answers."""
        self._nodes[node].signal(signal.SIGSTOP)

    def resume(self, node: int = 0) -> None:
        self._nodes[node].signal(signal.SIGCONT)

    def take_down(self) -> None:
        for node in self._nodes:
            node.kill()

    def bring_up(self) -> None:
        for node in self._nodes:
            node.launch()
        self.wait_until_ready()

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        """All brokers are dead for the length of a block."""
        self.take_down()
        try:
            yield
        finally:
            self.bring_up()

    def wait_until_ready(self) -> None:
        """Return when all running brokers are members and answer."""
        from confluent_kafka import KafkaException

        running = [node for node in self._nodes if node.is_running]
        deadline = time.monotonic() + _READY_DEADLINE_S
        known: set[int] = set()
        # The cluster may still name a broker that has just been killed: its port tells that it is back.
        while known != {node.number for node in running} or not all(node.accepts() for node in running):
            dead = [node for node in running if not node.is_running]
            if dead or time.monotonic() > deadline:
                words = "\n".join(node.last_words() for node in dead or running)
                error = PortTaken if "Address already in use" in words else RuntimeError
                raise error(f"Kafka did not start ({sorted(known)} of {len(running)} answer):\n{words}")
            self._admin = None
            with contextlib.suppress(KafkaException):
                known = set(self._client().list_topics(timeout=2).brokers)
            time.sleep(0.05)

    def close(self) -> None:
        """Kill all brokers and remove their directory. May be called twice."""
        if os.getpid() != self._owner:
            return
        self._admin = None
        for node in self._nodes:
            node.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        _reaper.forget_directory(self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _client(self) -> Any:
        if self._admin is None:
            from confluent_kafka.admin import AdminClient

            running = ",".join(f"127.0.0.1:{node.port}" for node in self._nodes if node.is_running)
            quiet = {"log_level": 0, "reconnect.backoff.max.ms": 100, "socket.connection.setup.timeout.ms": 2_000}
            self._admin = AdminClient({"bootstrap.servers": running or self.address, **quiet})
        return self._admin

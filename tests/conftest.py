"""Fixtures for all suites: one private server per session, flushed before each test and inspected after it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from bullpen._kernel import telemetry
from bullpen.testing import RedisServer, check_server, need

if TYPE_CHECKING:
    from tests.flows._warm import Warm

# gRPC stops its own threads around every fork, and tests start servers all the time.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

pytest_plugins = [
    "tests.brokers",
    "tests.collecting",
    "tests.databases",
    "tests.loops",
    "tests.measured",
    "tests.spread",
]

StartServer = Callable[..., RedisServer]

# A slow machine is no failure: generating examples beside other tests may take its time.
# The long form of the tests tries twenty times as many examples.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    max_examples=1_000 if os.environ.get("BULLPEN_CHAOS") == "long" else 50,
)
hypothesis.settings.load_profile("patient")


def _forget_the_settings_of_the_developer() -> None:
    """What a shell exports for programs of its own must not lead a test to another server, prefix or width."""
    ours = re.compile(r"BULLPEN_(?!TEST|CHAOS)|(REDIS|RABBITMQ|KAFKA|QUEUE|OUTBOX|WORKER|WORKFLOW)_|PG[A-Z]")
    for name in list(os.environ):
        if ours.match(name) or name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "DATABASE_URL"):
            del os.environ[name]


def _give_children_default_signals() -> None:
    """Undo what a shell or `nohup` has ignored: an ignored signal stays ignored in every program we start.

    A handler does not, so SIGHUP gets one that does nothing: programs start with the default, and the run itself still
    outlives its terminal.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, lambda *_: None),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


_forget_the_settings_of_the_developer()
_give_children_default_signals()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "leaves_jobs_active: the test kills a worker on purpose, so an active job may be left without its lock",
    )
    config.addinivalue_line(
        "markers",
        "cuts_wakeups: the test cuts a wake-up on purpose (takes a marker away, kills its reader, cuts a connection), "
        "so work may be found by a fallback poll",
    )
    # One file for this process and all that tests start; read after each test.
    directory = tempfile.mkdtemp(prefix="bullpen-late-wakeups-")
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    os.environ[telemetry.LATE_WAKEUPS_FILE] = f"{directory}/late"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A command that ran in this process has set up logging for itself; the next test must hear everything again."""
    root = logging.getLogger()
    level = root.level
    yield
    logging.disable(logging.NOTSET)
    root.setLevel(level)  # not the attribute: loggers remember what was switched off until they are told
    logging.getLogger("bullpen.embedded").setLevel(logging.NOTSET)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler:  # made by basicConfig, on a stream that is closed by now
            root.removeHandler(handler)


def _server_kind() -> str:
    return os.environ.get("BULLPEN_TEST_SERVER", "valkey")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """The server that most tests share. BULLPEN_TEST_SERVER chooses it: valkey (default), redis-6.2, redis-7."""
    need(_server_kind())
    with RedisServer.start(_server_kind()) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of the shared server, which holds nothing when the test begins.

    After the test every queue found there must be sound, and no key may be left that belongs to no queue. A test that
    breaks a queue on purpose is marked `leaves_queue_broken`; one that kills a worker, `leaves_jobs_active`.
    """
    if not redis_server.is_running:
        redis_server.restart()
    redis_server.flush()

    yield redis_server.url

    if request.node.get_closest_marker("leaves_queue_broken") is not None:
        return
    in_flight = request.node.get_closest_marker("leaves_jobs_active") is not None
    violations = check_server(redis_server.client(), in_flight=in_flight)
    if violations:
        pytest.fail("\n".join(["the test left broken queues behind:", *map(str, violations)]), pytrace=False)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers for one test, with the arguments of `RedisServer.start`; for tests that kill or configure one."""
    started: list[RedisServer] = []

    def start(kind: str | None = None, **options: object) -> RedisServer:
        kind = kind or _server_kind()
        need(kind)
        server = RedisServer.start(kind, **options)  # type: ignore[arg-type]  # passed through as given
        started.append(server)
        return server

    yield start

    for server in started:
        server.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """One process that has imported everything, for all commands that are tried on a terminal."""
    from tests.flows._warm import Warm  # the whole command line, which most tests do without

    process = Warm()
    yield process
    process.close()


@pytest.fixture
def queue_name() -> str:
    """A queue name that no other test uses."""
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def no_late_wakeups(request: pytest.FixtureRequest) -> Iterator[None]:
    """No work may be found by a fallback poll alone, in this process or in one that the test starts.

    A test that cuts a wake-up on purpose (it takes a marker away, kills a worker that has one, cuts a connection) is
    marked `cuts_wakeups`.
    """
    path = Path(os.environ[telemetry.LATE_WAKEUPS_FILE])
    seen = path.stat().st_size if path.exists() else 0
    yield
    if not path.exists() or request.node.get_closest_marker("cuts_wakeups") is not None:
        return
    with path.open(encoding="utf-8") as file:
        file.seek(seen)
        late = file.read()
    if late:
        pytest.fail(f"late wake-ups (process, where, how many, what):\n{late}", pytrace=False)

"""What a user has at hand: commands, HTTP, log lines, and a clock for how long things take."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from bullpen.testing import Child, RedisServer

T = TypeVar("T")

PATIENCE_S: Final = 50.0
"""For what comes within milliseconds on an idle machine."""
STOPS_WITHIN_S: Final = 4.0
"""An idle process waits tenths of a second; something that never comes is waited for 5 s and more."""
LATE_MS: Final = 2_000
"""Of a job, behind its due time by the server's clock. Work that nobody was woken for waits for the drain delay of the
services here, which is a minute; a busy machine costs tenths of a second."""

_OURS = re.compile(r"BULLPEN_|REDIS_|RABBITMQ_|PYTHON|COVERAGE")


def clean(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of the machine, without what configures us or points at the checkout."""
    return {name: value for name, value in os.environ.items() if not _OURS.match(name)} | dict(given or {})


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that has bullpen from the wheel."""

    path: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    @property
    def bullpen(self) -> str:
        return str(self.path / "bin" / "bullpen")

    def run(self, *arguments: str, cwd: Path, env: Mapping[str, str]) -> Answer:
        """`bullpen …`, to its end."""
        done = subprocess.run(
            [self.bullpen, *arguments],
            cwd=cwd,
            env=clean(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def start(self, *command: str, cwd: Path, env: Mapping[str, str]) -> Child:
        """A command that goes on; stdout and stderr are read as one. Signals are as a terminal has them."""
        words = [f"{name}={value}" for name, value in clean(env).items()]
        shell = 'exec "$@" 2>&1'
        return Child(["env", "-i", *words, "PYTHONUNBUFFERED=1", "sh", "-c", shell, "sh", *command], cwd=cwd)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, method: str = "GET") -> tuple[int, str]:
    """Status and body. A connection that is refused raises OSError."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=PATIENCE_S) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def until(look: Callable[[], T], what: str, within_s: float = PATIENCE_S) -> T:
    """Ask again and again until the answer is true."""
    give_up = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):  # nobody listens yet
            if found := look():
                return found
        assert time.monotonic() < give_up, f"not within {within_s} s: {what}"
        time.sleep(0.02)


def stop(child: Child, *, code: int = 0) -> float:
    """SIGTERM; returns for how many seconds its main thread only waited until the process ended.

    Neither working nor queueing for a processor counts: beside other load both take many times longer, while a wait for
    something that does not come takes as long as always.
    """
    began, busy_before = time.monotonic(), _busy_s(child.pid)
    child.terminate()
    watchdog = threading.Timer(PATIENCE_S, child.kill)
    watchdog.start()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its numbers can still be read
    watchdog.cancel()
    waited_s = time.monotonic() - began - (_busy_s(child.pid) - busy_before)
    assert child.wait() == code, child.output
    return waited_s


def _busy_s(pid: int) -> float:
    """For how long the main thread has run or queued for a processor; 0 where the machine does not tell."""
    try:
        running, queued, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except FileNotFoundError:
        return 0.0
    return (int(running) + int(queued)) / 1e9


def log_lines(child: Child) -> list[dict[str, Any]]:
    """The lines of `--log-format json`. One that is not a JSON object fails here."""
    return [json.loads(line) for line in child.output.splitlines()]


def metrics(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples by name."""
    status, text = ask(url)
    assert status == 200
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def value(found: Mapping[str, list[tuple[dict[str, str], float]]], name: str, **labels: str) -> float:
    """One sample."""
    (only,) = [number for given, number in found[name] if labels.items() <= given.items()]
    return only


def late_wakeups(found: Mapping[str, list[tuple[dict[str, str], float]]]) -> dict[str, float]:
    """Where work was found only by a fallback. The series are there from the first scrape."""
    return {labels["where"]: count for labels, count in found["bullpen_late_wakeups_total"] if count}


@dataclass(frozen=True, slots=True)
class Take:
    """A job that was taken, by the events that the server has numbered with its own clock."""

    job_id: str
    late_ms: int
    """Behind the due time of a delayed job or a retry."""


def takes_of_due_jobs(server: RedisServer, queue: str) -> list[Take]:
    """Every take of a job that had a due time."""
    due: dict[str, int] = {}
    found: list[Take] = []
    client: Any = server.client()
    for entry, fields in client.xrange(f"bull:{queue}:events"):
        event, job_id = fields[b"event"].decode(), fields.get(b"jobId", b"").decode()
        if event == "delayed":
            due[job_id] = int(fields[b"delay"])
        elif event == "active" and job_id in due:
            found.append(Take(job_id, int(entry.split(b"-")[0]) - due.pop(job_id)))
    return found

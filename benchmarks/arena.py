"""Measure one contestant at one workload: start its processes, let them go together, take the times, check the books.

In: a contestant, a workload, a private server that is emptied first. Out: the metrics of the workload, and the CPU time
per job of client and server. A contestant that loses a job has no time. Elsewhere: what the processes do
(`contestants`), in which order all are measured (`__main__`).
"""

import json
import math
import os
import queue
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import redis

from benchmarks.contestants import OURS, Contestant
from benchmarks.workloads import Workload
from bullpen.testing import RedisServer, check_server

BASE = "bull:bench:"
_PATIENCE_S = 240.0
_READY_WITHIN_S = 240.0
_FEWEST_JOBS = 200
_MARGIN_S = 8.0


class Failed(Exception):
    """A measurement that gives no number: a process died, was too slow, or jobs are missing."""


@dataclass
class Outcome:
    """What one run gave. `metrics` by name; CPU in microseconds per job, where that means something."""

    metrics: dict[str, float] = field(default_factory=dict)
    client_us: float | None = None
    server_us: float | None = None


class Servers:
    """Private servers, started when first needed: plain, everysec and always (append-only file), replica."""

    def __init__(self) -> None:
        self._started: dict[str, RedisServer] = {}
        self._stack = ExitStack()

    def get(self, kind: str) -> RedisServer:
        if kind not in self._started:
            self._started[kind] = self._stack.enter_context(self._start(kind))
            if kind == "replica":
                args = ("--replicaof", f"127.0.0.1 {self._started[kind].port}")
                self._stack.enter_context(RedisServer.start("valkey", args=args))
        return self._started[kind]

    def _start(self, kind: str) -> RedisServer:
        if kind == "always":
            return RedisServer.start("valkey", persistent=True, args=("--appendfsync", "always"))
        return RedisServer.start("valkey", persistent=kind == "everysec")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class Player:
    """One process of a contestant, from `ready` to its end."""

    def __init__(self, contestant: Contestant, task: dict[str, Any]) -> None:
        self.name = f"{contestant.name} ({task['role']})"
        self.latest: dict[str, Any] = {"count": 0}
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [*contestant.command, json.dumps(task)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # some libraries start children of their own, which must end too
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def hear(self, within_s: float = _PATIENCE_S) -> dict[str, Any]:
        """The next line. Raises Failed when the process ended instead."""
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise Failed(f"{self.name} said nothing for {within_s:.0f} s") from None
        if line is None:
            raise Failed(f"{self.name} ended early: {self._last_words()}")
        return line

    def catch_up(self) -> None:
        """Read what was said without waiting; `latest` is the newest count."""
        while not self._lines.empty():
            self.latest = self.hear(0.1)

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def end(self) -> list[dict[str, Any]]:
        """Close its input and return what it says last."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._kill_all()
        rest = []
        while (line := self._lines.get(timeout=10)) is not None:
            rest.append(line)
        return rest

    def kill(self) -> None:
        """End it, if it has not ended, and let go of its pipes."""
        self._kill_all()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it did not read any more
                    pipe.close()

    def _kill_all(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _last_words(self) -> str:
        self._process.wait(10)
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]


class Run:
    """One measurement. Its processes are gone when it ends, whatever happens."""

    def __init__(self, contestant: Contestant, workload: Workload, server: RedisServer) -> None:
        self.contestant, self.workload, self.server = contestant, workload, server
        self.client: redis.Redis = server.client()
        self.jobs = self._job_count()
        self._players: list[Player] = []

    def measure(self) -> Outcome:
        self.server.flush()
        kinds = {
            "add": self._add,
            "drain": self._drain,
            "latency": self._latency,
            "delayed": self._delayed,
            "memory": self._memory,
        }
        try:
            outcome = kinds[self.workload.kind]()
        finally:
            for player in self._players:
                player.kill()
        outcome.metrics = {
            name: value for name, value in outcome.metrics.items() if name not in self.contestant.leaves_out
        }
        return outcome

    # ---- kinds of workload ----------------------------------------------------------------------------------

    def _add(self) -> Outcome:
        player = self._start("add", how=self.workload.how)
        server_before = self._server_cpu_s()
        player.go()
        said = player.hear()
        server_s = self._server_cpu_s() - server_before
        self._check_books(waiting=said["ids"])
        return Outcome(
            {self._metric: self.jobs / said["seconds"]},
            client_us=said["cpu_s"] / self.jobs * 1e6,
            server_us=server_s / self.jobs * 1e6,
        )

    def _drain(self) -> Outcome:
        workload = self.workload
        held = self._hold(workload.held_active) if workload.held_active else []
        ids = self._fill(self.jobs + workload.left_waiting)
        workers = [self._start("work") for _ in range(workload.processes)]
        server_before = self._server_cpu_s()
        for worker in workers:
            worker.go()
        self._wait_for_count(workers, self.jobs)
        server_s = self._server_cpu_s() - server_before
        latest = [worker.latest for worker in workers if worker.latest["count"]]  # one may have come too late for any
        done = sum(line["count"] for line in latest)
        ended = latest[0]["goal_at"] if len(workers) == 1 else max(line["last_ended"] for line in latest)
        seconds = ended - min(line["first_began"] for line in latest)
        for worker in workers:
            worker.end()
        self._check_books(finished=ids, active=held, done=done)
        burns = workload.handler == "burn"  # what the handlers use says nothing about the library
        return Outcome(
            {self._metric: self.jobs / seconds},
            client_us=None if burns else sum(line["cpu_s"] for line in latest) / done * 1e6,
            server_us=None if burns else server_s / done * 1e6,
        )

    def _latency(self) -> Outcome:
        worker = self._start("work")
        worker.go()
        asker = self._start("ask")
        asker.go()
        asked = asker.hear()["asked"]
        began = dict(worker.end()[-1]["began_by_index"])
        to_start = [1000 * (began[index] - added) for index, (added, _) in enumerate(asked)]
        to_result = [1000 * (seen - added) for added, seen in asked]
        self._check_books()
        return Outcome(
            {
                "latency_start_p50": statistics.median(to_start),
                "latency_start_p99": quantile(to_start, 0.99),
                "latency_result_p50": statistics.median(to_result),
                "latency_result_p99": quantile(to_result, 0.99),
            }
        )

    def _delayed(self) -> Outcome:
        worker = self._start("work")
        worker.go()
        # A busy machine fills a queue slowly, and jobs that are due before all are there would be measured wrongly.
        due_at = time.time() + _MARGIN_S + 2 * self.jobs / self.contestant.adds_per_s
        producer = self._start("add", due_at=due_at)
        due = time.monotonic() + due_at - time.time()
        producer.go()
        ids = producer.hear()["ids"]
        if time.monotonic() > due:
            raise Failed(f"{self.contestant.name}: the queue was not filled before its jobs were due")
        self._wait_for_count([worker], self.jobs)
        worker.end()
        self._check_books(finished=ids, done=worker.latest["count"])
        return Outcome({self._metric: worker.latest["last_began"] - due})

    def _memory(self) -> Outcome:
        producer = self._start("add")
        empty = self._used_memory()
        producer.go()
        ids = producer.hear()["ids"]
        producer.end()
        metrics = {"memory_waiting": (self._used_memory() - empty) / self.jobs}
        if self.contestant.speaks_bullmq:
            worker = self._start("work")
            worker.go()
            self._wait_for_count([worker], self.jobs)
            worker.end()
            self._check_books(finished=ids, done=worker.latest["count"])
            metrics["memory_completed"] = (self._used_memory() - empty) / self.jobs
        return Outcome(metrics)

    # ---- steps ----------------------------------------------------------------------------------------------

    @property
    def _metric(self) -> str:
        return self.workload.metrics[0].name

    def _job_count(self) -> int:
        if self.workload.kind in ("latency", "delayed") or self.workload.handler == "burn":
            return self.workload.jobs  # the number is part of what is measured, or small already
        return min(self.workload.jobs, max(_FEWEST_JOBS, int(self.workload.jobs * self.contestant.share)))

    @property
    def _concurrency(self) -> int:
        wanted = self.workload.concurrency or self.contestant.concurrency
        return min(wanted, self.contestant.most_concurrency or wanted)

    def _start(self, role: str, **changes: Any) -> Player:
        """Start a process and wait until it is ready."""
        task: dict[str, Any] = {
            "url": self.server.url,
            "role": role,
            "jobs": self.jobs,
            "handler": self.workload.handler,
            "concurrency": self._concurrency,
            "attempts": self.workload.attempts,
            "variant": [*self.contestant.variant, *self.workload.variant],
            **changes,
        }
        player = Player(self.contestant, task)
        self._players.append(player)
        player.hear(_READY_WITHIN_S)
        return player

    def _fill(self, jobs: int) -> list[str]:
        producer = self._start("add", jobs=jobs)
        producer.go()
        ids: list[str] = producer.hear()["ids"]
        producer.end()
        return ids

    def _hold(self, jobs: int) -> list[str]:
        """Let a worker of its own take jobs that do not end."""
        ids = self._fill(jobs)
        self._start("work", handler="hang", concurrency=jobs).go()
        give_up_at = time.monotonic() + _PATIENCE_S
        while self.client.llen(f"{BASE}active") != jobs:
            if time.monotonic() > give_up_at:
                raise Failed(f"{self.contestant.name}: {jobs} jobs are not active after {_PATIENCE_S:.0f} s")
            time.sleep(0.05)
        return ids

    def _wait_for_count(self, workers: Sequence[Player], jobs: int) -> None:
        give_up_at = time.monotonic() + _PATIENCE_S
        while True:
            for worker in workers:
                worker.catch_up()
            done = sum(worker.latest["count"] for worker in workers)
            if done >= jobs:
                return
            if time.monotonic() > give_up_at:
                raise Failed(f"{self.contestant.name}: {done} of {jobs} jobs after {_PATIENCE_S:.0f} s")
            time.sleep(0.02)

    def _server_cpu_s(self) -> float:
        info: Any = self.client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

    def _used_memory(self) -> int:
        """Without what contestants left behind when they warmed up, and without the buffers of connections."""
        for key in self.client.scan_iter(match="*warm*", count=1000):
            self.client.delete(key)
        info: Any = self.client.info("memory")
        return int(info["used_memory"]) - int(info["mem_clients_normal"])

    # ---- the books ------------------------------------------------------------------------------------------

    def _check_books(
        self,
        *,
        waiting: Sequence[str] | None = None,
        finished: Sequence[str] | None = None,
        active: Sequence[str] = (),
        done: int | None = None,
    ) -> None:
        """What was added must be there, once, where it belongs; and nothing else."""
        name, left = self.contestant.name, self.workload.left_waiting
        if done is not None and not (self.jobs <= done <= self.jobs + left):
            raise Failed(f"{name}: {self.jobs} of {self.jobs + left} jobs should be done, {done} are")
        if self.contestant.speaks_bullmq:
            client: Any = self.client
            if waiting is not None:
                self._compare("wait", waiting, client.lrange(f"{BASE}wait", 0, -1))
            if finished is not None:
                state = "failed" if self.workload.handler == "fail" else "completed"
                stored = client.zrange(f"{BASE}{state}", 0, -1)
                done = len(stored)
                if left:  # the process was stopped in the middle: what it held is active, the rest still waits
                    stored += client.lrange(f"{BASE}wait", 0, -1) + client.lrange(f"{BASE}active", 0, -1)
                self._compare(state, finished, stored)
            if active:
                self._compare("active", active, client.lrange(f"{BASE}active", 0, -1))
        if self.contestant.camp == OURS:
            if finished is not None:
                self._check_events(len(finished) + len(active), len(active), done or 0)
            violations = check_server(self.client, in_flight=bool(left))
            if violations:
                raise Failed(f"{name} left broken queues: {violations[:5]}")

    def _check_events(self, added: int, held: int, done: int) -> None:
        """Every step of every job was told. The stream counts what was added to it, also what it has trimmed since."""
        info: Any = self.client.xinfo_stream(f"{BASE}events")
        told = info["entries-added"]
        begun = 2 * added + held  # added, and waiting or delayed; active
        steps = {"fail": 3, "fail_once": 5}.get(self.workload.handler, 2)  # active and the end, retries in between
        wanted = begun + (steps + (self.workload.kind == "delayed")) * done
        # Above that come `drained`, and `active` of the jobs that a stopped process held.
        if not wanted <= told <= wanted + 2_000:
            raise Failed(f"{self.contestant.name}: {told} events were told of {added} jobs, {wanted} were expected")

    def _compare(self, state: str, expected: Sequence[str], stored: Any) -> None:
        there = [raw.decode() for raw in stored]
        if len(there) != len(set(there)) or set(there) != set(expected) or len(expected) != len(set(expected)):
            raise Failed(
                f"{self.contestant.name}: {len(expected)} ids were added, {len(set(there))} are in {state}, "
                f"{len(set(expected) - set(there))} are missing there"
            )


def quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.floor(len(ordered) * fraction))]

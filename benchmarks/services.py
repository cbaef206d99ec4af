"""What services see beside plain jobs: options of each job's own, many idle queues, large payloads, the start.

    python -m benchmarks.services [--rounds 4] [--queues 200] [--store]

bullpen (asyncio) and npm bullmq take turns on one private server. Medians; of CPU times the least, which other work on
the machine falsifies less. `--store` puts the table into `docs/performance.json` and writes the page anew.
Elsewhere: plain jobs (`python -m benchmarks`), what a test can count (`tests/bench`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.__main__ import STORED, write_page
from benchmarks.results import Results
from bullpen.queue import Queue
from bullpen.testing import RedisServer
from tests.interop._node import NODE_DIR, find_node, install_packages

PROGRAMS = Path(__file__).parent / "contestants"
ADDED = 20_000
LARGE = ((1, 150, 2.0), (9, 24, 1.3))
"""Megabytes, how many jobs, and how many times npm's rate is wanted."""
IDLE_S = 30.0
SIDES = ("bullpen", "node")
Row = list[str]


class Bench:
    """Both sides, and the server between them."""

    def __init__(self, server: RedisServer, node: tuple[str, ...], rounds: int) -> None:
        self.server, self._node, self._rounds = server, node, rounds

    def each_in_turn(self, measure: Callable[[str], dict[str, float]]) -> dict[str, dict[str, list[float]]]:
        """All values of all rounds, by side and name."""
        found: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
        for turn in range(self._rounds):
            for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                self.server.flush()
                for name, value in measure(side).items():
                    found[side].setdefault(name, []).append(value)
        return found

    def server_cpu_s(self) -> float:
        return int(Path(f"/proc/{self.server.pid}/schedstat").read_text().split()[0]) / 1e9

    @contextmanager
    def player(self, side: str, task: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
        own = (sys.executable, str(PROGRAMS / "bullpen_bench.py"))
        program = own if side == "bullpen" else (*self._node, str(PROGRAMS / "node_bench.mjs"), str(NODE_DIR))
        task = {"url": self.server.url, "queue": "bench", **task}
        with started([*program, json.dumps(task)]) as process:
            hear(process)
            yield process

    def add(self, how: str) -> Callable[[str], dict[str, float]]:
        def measure(side: str) -> dict[str, float]:
            with self.player(side, {"role": "add", "jobs": ADDED, "how": how, "variant": ["own_options"]}) as producer:
                used = self.server_cpu_s()
                go(producer)
                done = json.loads(hear(producer))
                used = self.server_cpu_s() - used
            return {
                "rate": ADDED / done["seconds"],
                "client": done["cpu_s"] / ADDED * 1e6,
                "server": used / ADDED * 1e6,
            }

        return measure

    def drain(self, megabytes: int, jobs: int) -> Callable[[str], dict[str, float]]:
        def measure(side: str) -> dict[str, float]:
            asyncio.run(fill(self.server.url, megabytes << 20, jobs))
            with self.player(side, {"role": "work", "jobs": jobs, "concurrency": 10}) as worker:
                go(worker)
                while (line := json.loads(hear(worker))).get("count") != jobs:
                    pass
            return {"rate": jobs / (line["last_ended"] - line["first_began"]), "client": line["cpu_s"] / jobs * 1e3}

        return measure

    def idle(self, queues: int) -> Callable[[str], dict[str, float]]:
        def measure(side: str) -> dict[str, float]:
            own = (sys.executable, str(PROGRAMS / "idle_bench.py"))
            program = own if side == "bullpen" else (*self._node, str(PROGRAMS / "idle_bench.mjs"), str(NODE_DIR))
            with started([*program, self.server.url, str(queues), str(IDLE_S)]) as process:
                hear(process)
                client: Any = self.server.client()
                connections = len(client.client_list()) - 1
                client.config_resetstat()
                used = self.server_cpu_s()
                client_s = float(hear(process))
                used = self.server_cpu_s() - used
                stats = client.info("commandstats")
            calls = sum(
                each["calls"] for name, each in stats.items() if not name.startswith(("cmdstat_c", "cmdstat_i"))
            )
            return {
                "connections": connections,
                "commands": calls / IDLE_S,
                "client": client_s / IDLE_S * 100,
                "server": used / IDLE_S * 100,
            }

        return measure


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended early")
    return line


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


async def fill(url: str, size: int, jobs: int) -> None:
    async with Queue("bench", connection=url) as queue:
        for _ in range(jobs):
            await queue.add("bench", {"p": "x" * size})


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"


def row(title: str, unit: str, found: dict[str, dict[str, list[float]]], name: str, wanted: str = "–") -> Row:
    """A line of the table. Of times the least counts, of anything else the median."""
    choose = min if name in ("client", "server") else statistics.median
    ours, theirs = (choose(found[side][name]) for side in SIDES)
    return [title, unit, shown(ours), shown(theirs), f"{ours / theirs:.2f}x" if theirs else "–", wanted]


def measure(bench: Bench, queues: int) -> list[Row]:
    table = [["", "unit", "bullpen", "Node", "against Node", "wanted"]]
    for how, title, wanted in (("in_flight", "100 adds in flight", 1.8), ("bulk", "bulk add", 3.5)):
        found = bench.each_in_turn(bench.add(how))
        table.append(row(f"{title}, own options", "jobs/s", found, "rate", f"{wanted}x"))
        table.append(row(f"{title}, own options: client CPU", "µs", found, "client"))
        table.append(row(f"{title}, own options: server CPU", "µs", found, "server"))
    for megabytes, jobs, wanted in LARGE:
        found = bench.each_in_turn(bench.drain(megabytes, jobs))
        table.append(row(f"drain jobs of {megabytes} MB", "jobs/s", found, "rate", f"{wanted}x"))
        table.append(row(f"drain jobs of {megabytes} MB: client CPU", "ms", found, "client"))
    found = Bench(bench.server, bench._node, 1).each_in_turn(bench.idle(queues))
    idle = f"{queues} idle queues"
    table.append(row(f"{idle}: connections", "", found, "connections", f"{queues + 2}"))
    table.append(row(f"{idle}: commands", "1/s", found, "commands", "1x"))
    table.append(row(f"{idle}: client CPU", "%", found, "client", "1x"))
    table.append(row(f"{idle}: server CPU", "%", found, "server", "1x"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.services")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--queues", type=int, default=200)
    parser.add_argument("--store", action="store_true")
    given = parser.parse_args()
    tools = find_node()
    install_packages(tools)
    with RedisServer.start() as server:
        table = measure(Bench(server, tools.node, given.rounds), given.queues)
    for line in table:
        print("  ".join(cell.ljust(44) if at == 0 else cell.rjust(12) for at, cell in enumerate(line)))
    when = f"{time.strftime('%Y-%m-%d')}, load average {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores"
    print(when)
    if given.store:
        results = Results.from_json(json.loads(STORED.read_text()))
        results.services, results.services_when = table, when
        STORED.write_text(json.dumps(results.to_json(), indent=1, ensure_ascii=False) + "\n")
        write_page(results)


if __name__ == "__main__":
    main()

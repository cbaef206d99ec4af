"""Compare bullpen with npm and PyPI `bullmq` on this machine.

    python -m benchmarks.run [--quick] [--only drain latency] [--contestants bullpen node] [--json FILE]

Each contestant runs each workload in a process of its own against one private Valkey server that is emptied before. The
rounds are interleaved, so that a busy minute of the machine hits everybody; medians are compared. Times are good for
ratios on one machine, not for absolute claims.
"""

import argparse
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from bullpen.testing import RedisServer
from tests.interop._node import NODE_DIR, find_node, install_packages
from tests.interop._pypi import ensure_environment

PEERS = Path(__file__).parent / "peers"
RUN_TIMEOUT_S = 300


@dataclass(frozen=True)
class Contestant:
    """A program that takes url, workload, n, concurrency and payload bytes, and prints one JSON line."""

    name: str
    command: tuple[str, ...]
    arguments_after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """What is measured, at one size."""

    kind: str
    jobs: int
    concurrency: int = 1
    payload_bytes: int = 100

    @property
    def name(self) -> str:
        return f"{self.kind} c={self.concurrency}" if self.kind == "drain" else self.kind


def workloads(*, quick: bool) -> list[Workload]:
    scale = 1 if quick else 5
    return [
        Workload("add_one_by_one", 2_000 * scale),
        Workload("add_in_flight", 4_000 * scale),
        Workload("bulk_add", 10_000 * scale),
        Workload("drain", 2_000 * scale, concurrency=1),
        # Node is at its best at one of these two; the table shows both, and the ratio takes the better one.
        Workload("drain", 6_000 * scale, concurrency=50),
        Workload("drain", 6_000 * scale, concurrency=200),
        Workload("latency", 200 * scale),
    ]


def contestants() -> list[Contestant]:
    tools = find_node()
    install_packages(tools)
    pypi = (str(ensure_environment()), str(PEERS / "pypi_bullmq.py"))
    found = [
        Contestant("node", (*tools.node, str(PEERS / "node" / "bench.mjs"), str(NODE_DIR))),
        Contestant("pypi", pypi),
        Contestant("pypi+pool", pypi, ("pool",)),
    ]
    ours = (sys.executable, str(PEERS / "bullpen_bench.py"))
    found.insert(0, Contestant("bullpen", ours))
    if importlib.util.find_spec("uvloop") is not None:
        found.insert(1, Contestant("bullpen+uvloop", ours, ("uvloop",)))
    return found


def measure(contestant: Contestant, workload: Workload, server: RedisServer) -> dict[str, Any]:
    server.flush()
    numbers = (workload.kind, workload.jobs, workload.concurrency, workload.payload_bytes)
    finished = subprocess.run(
        [*contestant.command, server.url, *map(str, numbers), *contestant.arguments_after],
        check=False,  # the message below says more
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    if finished.returncode != 0:
        raise SystemExit(f"{contestant.name}, {workload.name}: {finished.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    if result["jobs"] != workload.jobs:
        raise SystemExit(
            f"{contestant.name}, {workload.name}: {workload.jobs} jobs went in, {result['jobs']} are there"
        )
    return result


def median_of(results: Sequence[dict[str, Any]], workload: Workload) -> dict[str, Any]:
    def median(*path: str) -> float:
        values = []
        for result in results:
            value: Any = result
            for part in path:
                value = value[part]
            values.append(float(value))
        return statistics.median(values)

    shown: dict[str, Any] = {
        "jobs_per_s": round(median("jobs_per_s")),
        "client_us_per_job": round(median("cpu_s") / workload.jobs * 1e6, 1),
        "server_us_per_job": round(median("server_cpu_s") / workload.jobs * 1e6, 1),
    }
    for latency in ("add_ms", "to_handler_ms", "to_result_ms"):
        if latency in results[0]:
            shown[latency] = {part: round(median(latency, part), 3) for part in ("p50", "p99")}
    return shown


def rows(medians: dict[str, dict[str, dict[str, Any]]]) -> Iterator[list[str]]:
    for workload, by_contestant in medians.items():
        reference = by_contestant.get("node", {}).get("jobs_per_s")
        for contestant, shown in by_contestant.items():
            latencies = [
                f"{name.removesuffix('_ms')} {shown[name]['p50']:.2f}/{shown[name]['p99']:.2f} ms"
                for name in ("add_ms", "to_handler_ms", "to_result_ms")
                if name in shown
            ]
            yield [
                workload,
                contestant,
                f"{shown['jobs_per_s']:,}",
                f"{shown['jobs_per_s'] / reference:.2f}x" if reference else "",
                f"{shown['client_us_per_job']:.0f}",
                f"{shown['server_us_per_job']:.0f}",
                ", ".join(latencies),
            ]


def best_drain_ratios(medians: dict[str, dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Each contestant at its best concurrency against Node at its best."""
    best: dict[str, int] = {}
    for workload, by_contestant in medians.items():
        if workload.startswith("drain"):
            for contestant, shown in by_contestant.items():
                best[contestant] = max(best.get(contestant, 0), shown["jobs_per_s"])
    return {name: round(rate / best["node"], 2) for name, rate in best.items()} if "node" in best else {}


def print_table(medians: dict[str, dict[str, dict[str, Any]]]) -> None:
    table = [["workload", "contestant", "jobs/s", "vs node", "client µs", "server µs", "p50/p99"], *rows(medians)]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            cell.ljust(w) if i in (0, 1, 6) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    for name, ratio in best_drain_ratios(medians).items():
        print(f"best drain, {name}: {ratio:.2f}x node")


def describe_machine(client: redis.Redis) -> dict[str, str]:
    info: Any = client.info("server")
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "server": f"valkey {info['valkey_version']}" if "valkey_version" in info else f"redis {info['redis_version']}",
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the jobs, one round")
    parser.add_argument("--rounds", type=int, help="how often each pair is measured (default 5, quick 1)")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="kinds of workload, such as drain latency")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="such as bullpen node")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, medians and all rounds there")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    chosen = [one for one in contestants() if not arguments.contestants or one.name in arguments.contestants]
    planned = [one for one in workloads(quick=arguments.quick) if not arguments.only or one.kind in arguments.only]
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with RedisServer.start("valkey") as server, redis.Redis.from_url(server.url) as client:
        machine = describe_machine(client)
        for number in range(rounds):
            for workload in planned:
                # Another one begins each round: the first to run finds the coldest machine.
                turn = number % len(chosen)
                for contestant in chosen[turn:] + chosen[:turn]:
                    print(f"round {number + 1}/{rounds}: {workload.name}, {contestant.name}", file=sys.stderr)
                    result = measure(contestant, workload, server)
                    results.setdefault((workload.name, contestant.name), []).append(result)
    medians: dict[str, dict[str, dict[str, Any]]] = {
        workload.name: {one.name: median_of(results[workload.name, one.name], workload) for one in chosen}
        for workload in planned
    }
    print_table(medians)
    if arguments.json:
        every = {f"{workload}, {contestant}": runs for (workload, contestant), runs in results.items()}
        ratios = best_drain_ratios(medians)
        document = {"machine": machine, "medians": medians, "best_drain_ratios": ratios, "rounds": every}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure bullpen and its peers on this machine, print the tables, and write the page of the documentation.

    python -m benchmarks [--quick] [--only drain_one latency] [--contestants bullpen node]

Each contestant runs each workload in processes of its own against a private server that is emptied before. The rounds
are interleaved, so that a busy minute of the machine hits everybody. `--only` knows the names of workloads and the
sections growth, costs, floor, loaded and audit.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import floor, loaded, page, plot, targets, workloads
from benchmarks.arena import Failed, Outcome, Run, Servers
from benchmarks.audit import audit
from benchmarks.contestants import OURS, Contestant, all_contestants
from benchmarks.quiet import undisturbed
from benchmarks.results import Entrant, Results, medians_of
from benchmarks.workloads import Workload
from tests.interop._node import NodeMissing, find_node

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STORED = DOCS / "performance.json"


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Benchmark:
    """All measurements of one call, and what they found."""

    def __init__(self, arguments: argparse.Namespace, servers: Servers) -> None:
        self._only: list[str] | None = arguments.only
        self._rounds: int = arguments.rounds or (1 if arguments.quick else 3)
        self._sizes = workloads.QUICK if arguments.quick else workloads.FULL
        self.is_whole = not (arguments.quick or arguments.only or arguments.contestants)
        self._servers = servers
        self._contestants = all_contestants(arguments.contestants, tell)
        self._ours = [one for one in self._contestants if one.camp == OURS and not one.blocks]
        self.results = Results(
            date=datetime.now(UTC).date().isoformat(),
            machine=describe_machine(servers),
            form="quick" if arguments.quick else "full",
            rounds=self._rounds,
            jobs=self._sizes.many,
            entrants=[Entrant(one.name, one.camp, one.version, one.blocks) for one in self._contestants],
        )

    def run(self) -> None:
        self._contest(workloads.contest(self._sizes), self._contestants)
        # Growth and costs compare us with ourselves: our fastest form is enough.
        self._contest(self._section("growth", workloads.growth(self._sizes)), self._ours[-1:])
        self._contest(self._section("costs", workloads.costs(self._sizes)), self._ours[-1:])
        if self._ours and self._wants("floor"):
            self._floor()
        if self._ours and self._wants("loaded"):
            self._loaded()
        if self._ours and self._wants("audit"):
            tell("audit: two processes, all events kept")
            self._note(lambda: audit(self._ours[-1], self._servers.get("plain"), self._sizes.many // 2))

    def _wants(self, name: str) -> bool:
        return not self._only or name in self._only

    def _section(self, name: str, planned: list[Workload]) -> list[Workload]:
        """A section that was named as a whole is planned as a whole."""
        if self._only and name in self._only:
            self._only = [*self._only, *(workload.name for workload in planned)]
        return planned

    def _contest(self, planned: Sequence[Workload], contestants: Sequence[Contestant]) -> None:
        outcomes: dict[tuple[str, str], list[Outcome]] = {}
        wanted = [workload for workload in planned if self._wants(workload.name)]
        try:
            for number in range(self._rounds):
                for workload, contestant in self._order(number, wanted, contestants):
                    run = Run(contestant, workload, self._servers.get(workload.server))
                    outcome = undisturbed(partial(self._note, run.measure), tell)
                    if outcome is not None:
                        outcomes.setdefault((workload.name, contestant.name), []).append(outcome)
                        where = f"round {number + 1}/{self._rounds}, {workload.name}, {contestant.name}"
                        tell(f"{where}: {', '.join(map(_brief, outcome.metrics.values()))}")
        finally:  # also when somebody has seen enough
            for (workload_name, contestant_name), rounds in outcomes.items():
                self.results.add(workload_name, contestant_name, rounds)

    def _order(
        self, number: int, planned: Sequence[Workload], contestants: Sequence[Contestant]
    ) -> Iterator[tuple[Workload, Contestant]]:
        for workload in planned:
            turn = number % max(1, len(contestants))  # another one begins each round
            for contestant in [*contestants[turn:], *contestants[:turn]]:
                if workload.name not in contestant.leaves_out:
                    yield workload, contestant

    def _note(self, measure: Callable[[], T]) -> T | None:
        try:
            return measure()
        except Failed as failed:
            tell(f"failed: {failed}")
            self.results.failures.append(str(failed))
            return None

    def _floor(self) -> None:
        server = self._servers.get("plain")
        found: dict[str, list[dict[str, float]]] = {"minimal": [], "ours": []}
        for _ in range(self._rounds):
            found["minimal"].append(floor.minimal(server, self._sizes.many))
            found["ours"].append(floor.ours(server, self._sizes.many))
        self.results.floor = {name: medians_of(rounds) for name, rounds in found.items()}
        tell(f"floor: {self.results.floor}")

    def _loaded(self) -> None:
        server = self._servers.get("plain")
        rounds = []
        for _ in range(self._rounds):
            server.flush()
            rounds.append(loaded.measure(server.url, samples=self._sizes.asks))
        self.results.loaded = {
            name: medians_of({"p50": each[name].p50, "p99": each[name].p99} for each in rounds) for name in rounds[0]
        }
        tell(f"loaded: {self.results.loaded}")


def _brief(value: float) -> str:
    return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


def describe_machine(servers: Servers) -> dict[str, str]:
    """In general words: which machine it was is nobody's business."""
    info: Any = servers.get("plain").client().info("server")
    try:
        answer = subprocess.run([*find_node().node, "--version"], capture_output=True, text=True, check=True)
        node = answer.stdout.strip().removeprefix("v")
    except (NodeMissing, subprocess.SubprocessError):
        node = "not installed"
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()}, {platform.machine()}",
        "load": f"{os.getloadavg()[2]:.0f}",
        "python": platform.python_version(),
        "node": node,
        "server": f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}",
    }


def publish(results: Results) -> None:
    """Write the page, its picture and what both were made from."""
    STORED.write_text(json.dumps(results.to_json(), indent=1, ensure_ascii=False) + "\n")
    write_page(Results.from_json(json.loads(STORED.read_text())))
    tell(f"wrote {DOCS.relative_to(ROOT)}/performance.md, .svg and .json")


def write_page(results: Results) -> None:
    (DOCS / "performance.md").write_text(page.markdown(results))
    (DOCS / "performance.svg").write_text(plot.draw(results, page.PLOTTED))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few jobs, one round: minutes instead of hours")
    parser.add_argument("--rounds", type=int, help="how often each pair is measured (default 3, quick 1)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="workloads or sections, such as drain_one floor")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", help="such as bullpen node pypi dramatiq")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything that was found there")
    parser.add_argument("--publish", action="store_true", help="write the documentation although this is a partial run")
    parser.add_argument(
        "--update", action="store_true", help="put what is measured now into the documentation, beside what is stored"
    )
    parser.add_argument("--page", action="store_true", help="only write the page again, from what is stored")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.page:
        write_page(Results.from_json(json.loads(STORED.read_text())))
        return 0
    with Servers() as servers:
        benchmark = Benchmark(arguments, servers)
        try:
            benchmark.run()
        except KeyboardInterrupt:
            tell("stopped; this was found so far")
            benchmark.is_whole = False
    results = benchmark.results
    print(page.terminal(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results.to_json(), indent=1, ensure_ascii=False) + "\n")
    if arguments.update:
        stored = Results.from_json(json.loads(STORED.read_text()))
        stored.replace_with(results)
        publish(stored)
    elif benchmark.is_whole or arguments.publish:
        publish(results)
    missed = [verdict for verdict in targets.judge(results) if verdict.holds is False]
    print(f"\n{len(missed)} targets do not hold" if missed else "\nall measured targets hold")
    for failure in results.failures:
        print(f"no number: {failure}", file=sys.stderr)
    ours = tuple(entrant.name for entrant in results.entrants if entrant.camp == OURS)
    # A missed target is a finding; a lost job of ours is a defect.
    return int(any(failure.startswith(ours) for failure in results.failures)) if ours else 0


if __name__ == "__main__":
    sys.exit(main())

"""Run checks and tests, and print how long each took. Exits with 1 when one failed; the others run all the same.

The checks of the code run beside the tests: many tests wait for something, and the type checker never does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TEST_REPORT = ROOT / "build" / "tests.xml"
SLOWEST = 20


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the table: commands that run until one fails."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    program: str | None = None
    """A program from outside the virtual environment that the stage needs."""
    quiet: bool = False
    """What it prints is of use only when it fails."""


def _tool(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(BIN / name), *arguments)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


RUFF = (
    Stage("ruff check", (_tool("ruff", "check", "--quiet", "--output-format=concise"),)),
    Stage("ruff format", (_tool("ruff", "format", "--check", "--quiet"),)),
)
LUA = Stage("luacheck", (_module("tools.check_lua"),), program="luacheck")
# Two that tests/static runs as well: only `make lint` has them as stages.
IN_TESTS = (
    Stage("import contracts", (_tool("lint-imports", "--no-logo", "--no-cache"),)),
    Stage("requirements table", (_module("tools.requirements_table", "--check"),)),
)
TYPES = Stage("mypy --strict", (_tool("mypy", "--strict", "--no-error-summary"),))

# Many tests wait for servers, so two more of them than there are cores run at a time. Each process begins with a part
# of its own and takes over from another when it has finished: no core waits for the one that has the longest file.
_PARALLEL = ("-n", str((os.cpu_count() or 1) + 2), "--dist", "worksteal")
_PYTEST = ("-q", *_PARALLEL, f"--junitxml={TEST_REPORT}")
# The processes of the tests all compile the same files at their start; compiled once, they find them.
COLLECT = Stage("collect", (_module("pytest", "--collect-only", "-qqq"),), quiet=True)
TESTS = Stage(
    "tests",
    (_module("coverage", "erase"), _module("coverage", "run", "-m", "pytest", "-m", "not long", *_PYTEST)),
)
COVERAGE = Stage(
    "coverage",
    (
        _module("coverage", "combine", "--quiet"),
        _module("coverage", "json", "--quiet"),
        _module("tools.coverage_gate"),
    ),
)
QUICK_FOLDERS = ("tests/unit", "tests/static", "tests/queue")
QUICK_TESTS = Stage("tests", (_module("pytest", "-m", "not long", *_PYTEST, *QUICK_FOLDERS),))
QUICK_TYPES = Stage("mypy --strict src", (_tool("mypy", "--strict", "--no-error-summary", "src"),))
LONG_TESTS = Stage("tests", (_module("pytest", "-m", "long", "-q", f"--junitxml={TEST_REPORT}"),))


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    verdict: str
    seconds: float


def environment() -> dict[str, str]:
    """Compiled code is kept whatever the caller wants elsewhere: hundreds of processes import the same files."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(stage: Stage, *, beside: bool = False) -> Result:
    """Run one stage; one that runs beside another says everything at its end."""
    if not beside:
        print(f"\n=== {stage.name}", flush=True)
    said = b""
    captured = beside or stage.quiet
    started = time.monotonic()
    if stage.program is not None and shutil.which(stage.program) is None:
        # A stage that cannot run is skipped at home and a failure in CI, as with tests.
        verdict = "FAILED" if os.environ.get("CI") == "true" else "skipped"
        said = f"{stage.program} is not installed\n".encode()
    else:
        verdict = "ok"
        for command in stage.commands:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment(),
                stdout=subprocess.PIPE if captured else None,
                stderr=subprocess.STDOUT if captured else None,
                check=False,
            )
            said += done.stdout or b""
            if done.returncode != 0:
                verdict = "FAILED"
                break
    seconds = time.monotonic() - started
    if stage.quiet and verdict == "ok":
        said = b""
    if beside:
        print(f"\n=== {stage.name}: {verdict}\n{said.decode(errors='replace')}", end="", flush=True)
    elif said:
        print(said.decode(errors="replace"), end="", flush=True)
    return Result(stage.name, verdict, seconds)


def run_both(beside: Sequence[Stage], stages: Sequence[Stage]) -> list[Result]:
    """Run stages one after the other, and beside them others, also one after the other."""
    with ThreadPoolExecutor(1) as lane:
        others = [lane.submit(run, stage, beside=True) for stage in beside]
        results = [run(stage) for stage in stages]
        return [*(other.result() for other in others), *results]


def seconds_per_folder(report: Path) -> Iterator[tuple[str, float]]:
    """Where the time of the test run went; fixtures count for the test that asked first."""
    if not report.exists():
        return
    seconds: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        folder = ".".join(case.get("classname", "").split(".")[:2])
        seconds[folder.replace(".", "/")] += float(case.get("time", 0))  # type: ignore[assignment]  # a Counter of floats
    yield from seconds.most_common()


def slowest(report: Path, count: int = SLOWEST) -> Iterator[tuple[str, float]]:
    """The tests that took longest, with their fixtures."""
    if not report.exists():
        return
    cases = [
        (f"{case.get('classname', '')}::{case.get('name', '')}", float(case.get("time", 0)))
        for case in ET.parse(report).iter("testcase")
    ]
    yield from sorted(cases, key=lambda case: -case[1])[:count]


def print_table(results: list[Result], wall: float) -> None:
    if TEST_REPORT.exists():
        print(f"\nthe slowest {SLOWEST} tests")
    for name, seconds in slowest(TEST_REPORT):
        print(f"{seconds:>7.1f}  {name}")
    print("\nstage                    result   seconds")
    for result in results:
        print(f"{result.name:<24} {result.verdict:<8} {result.seconds:>7.1f}")
        if result.name == "tests":
            for folder, seconds in seconds_per_folder(TEST_REPORT):
                print(f"  {folder:<22} {'':<8} {seconds:>7.1f}")
    print(f"{'all':<24} {'':<8} {wall:>7.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--static", action="store_true", help="only the checks that need no server")
    which.add_argument("--quick", action="store_true", help="the checks, and the tests that take milliseconds each")
    which.add_argument("--long", action="store_true", help="only the tests that are marked long")
    chosen = parser.parse_args()

    TEST_REPORT.unlink(missing_ok=True)
    started = time.monotonic()
    if chosen.static:
        results = run_both((TYPES,), (*RUFF, LUA, *IN_TESTS))
    elif chosen.quick:
        results = run_both((*RUFF, LUA, QUICK_TYPES), (QUICK_TESTS,))
    elif chosen.long:
        results = [run(LONG_TESTS)]
    else:
        results = run_both((*RUFF, LUA, TYPES), (COLLECT, TESTS, COVERAGE))

    print_table(results, time.monotonic() - started)
    return int(any(result.verdict == "FAILED" for result in results))


if __name__ == "__main__":
    sys.exit(main())

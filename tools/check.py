"""Run all checks and tests, and print how long each took. Exits with 1 when one failed; the others run all the same."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TEST_REPORT = ROOT / "build" / "tests.xml"


@dataclass(frozen=True, slots=True)
class Stage:
    """One line of the table: commands that run until one fails."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    program: str | None = None
    """A program from outside the virtual environment that the stage needs."""


def _tool(name: str, *arguments: str) -> tuple[str, ...]:
    return (str(BIN / name), *arguments)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


STATIC = (
    Stage("ruff check", (_tool("ruff", "check", "--quiet", "--output-format=concise"),)),
    Stage("ruff format", (_tool("ruff", "format", "--check", "--quiet"),)),
    Stage("mypy --strict", (_tool("mypy", "--strict", "--no-error-summary"),)),
    Stage("luacheck", (_module("tools.check_lua"),), program="luacheck"),
    Stage("import contracts", (_tool("lint-imports", "--no-logo", "--no-cache"),)),
    Stage("requirements table", (_module("tools.requirements_table", "--check"),)),
)
# Most tests wait for servers, so one more of them than there are cores run at a time. By file: fixtures of a module
# (clusters, brokers, databases) are made once.
_PARALLEL = ("-n", str((os.cpu_count() or 1) + 1), "--dist", "loadfile")
TESTS = (
    Stage(
        "tests",
        (
            _module("coverage", "erase"),
            _module("coverage", "run", "-m", "pytest", "-q", *_PARALLEL, f"--junitxml={TEST_REPORT}"),
        ),
    ),
    Stage(
        "coverage",
        (
            _module("coverage", "combine", "--quiet"),
            _module("coverage", "json", "--quiet"),
            _module("tools.coverage_gate"),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    verdict: str
    seconds: float


def run(stage: Stage) -> Result:
    print(f"\n=== {stage.name}", flush=True)
    started = time.monotonic()
    if stage.program is not None and shutil.which(stage.program) is None:
        # A stage that cannot run is skipped at home and a failure in CI, as with tests.
        verdict = "FAILED" if os.environ.get("CI") == "true" else "skipped"
        print(f"{stage.program} is not installed")
    else:
        passed = all(subprocess.run(command, cwd=ROOT, check=False).returncode == 0 for command in stage.commands)
        verdict = "ok" if passed else "FAILED"
    return Result(stage.name, verdict, time.monotonic() - started)


def seconds_per_folder(report: Path) -> Iterator[tuple[str, float]]:
    """Where the time of the test run went; fixtures count for the test that asked first."""
    if not report.exists():
        return
    seconds: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        folder = ".".join(case.get("classname", "").split(".")[:2])
        seconds[folder.replace(".", "/")] += float(case.get("time", 0))  # type: ignore[assignment]  # a Counter of floats
    yield from seconds.most_common()


def print_table(results: list[Result]) -> None:
    print("\nstage                    result   seconds")
    for result in results:
        print(f"{result.name:<24} {result.verdict:<8} {result.seconds:>7.1f}")
        if result.name == "tests":
            for folder, seconds in seconds_per_folder(TEST_REPORT):
                print(f"  {folder:<22} {'':<8} {seconds:>7.1f}")
    print(f"{'all':<24} {'':<8} {sum(result.seconds for result in results):>7.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--static", action="store_true", help="only the checks that need no server")
    only_static = parser.parse_args().static

    TEST_REPORT.unlink(missing_ok=True)
    results = [run(stage) for stage in (STATIC if only_static else (*STATIC, *TESTS))]

    print_table(results)
    return int(any(result.verdict == "FAILED" for result in results))


if __name__ == "__main__":
    sys.exit(main())

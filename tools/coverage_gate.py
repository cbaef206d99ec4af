"""Compare a coverage report with the goals in pyproject.toml ([tool.coverage_gate]) and fail below them.

In: coverage.json, made by `coverage json`. Lines and branches are the report's totals. A function counts as covered
when at least one of its lines was executed. Critical files must have every line executed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Goals:
    """Percentages to be exceeded, and the files that must be covered in full."""

    lines: float
    branches: float
    functions: float
    critical: tuple[str, ...]

    @classmethod
    def read(cls, pyproject: Path) -> Goals:
        table = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["coverage_gate"]
        return cls(table["lines"], table["branches"], table["functions"], tuple(table["critical"]))


@dataclass(frozen=True, slots=True)
class Share:
    name: str
    covered: int
    total: int
    goal: float

    @property
    def percent(self) -> float:
        return 100 * self.covered / self.total if self.total else 100.0

    @property
    def reached(self) -> bool:
        return self.percent > self.goal

    def __str__(self) -> str:
        verdict = "ok" if self.reached else "TOO LOW"
        return f"{self.name:<10} {self.percent:6.2f} %   goal > {self.goal} %   {self.covered}/{self.total}   {verdict}"


def shares(report: dict[str, Any], goals: Goals) -> list[Share]:
    totals = report["totals"]
    functions = list(_functions(report))
    return [
        Share("lines", totals["covered_lines"], totals["num_statements"], goals.lines),
        Share("branches", totals["covered_branches"], totals["num_branches"], goals.branches),
        Share("functions", sum(executed for _, executed in functions), len(functions), goals.functions),
    ]


def _functions(report: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Every function with a statement of its own, and whether one was executed."""
    for path, file in report["files"].items():
        for name, function in file["functions"].items():
            # The nameless entry is the module's own code; a function without statements (a protocol's) is no code.
            if name and function["summary"]["num_statements"]:
                yield f"{path}::{name}", bool(function["executed_lines"])


def gaps_in_critical_files(report: dict[str, Any], critical: Sequence[str]) -> Iterator[str]:
    files = {Path(path).as_posix(): file for path, file in report["files"].items()}
    for path in critical:
        if path not in files:
            yield f"{path}: critical, but not in the report"
        elif missing := files[path]["missing_lines"]:
            yield f"{path}: critical, but these lines were not executed: {_ranges(missing)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Line numbers as a reader wants them: 3, 7-12."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fail when the measured coverage is below the goals.")
    parser.add_argument("report", nargs="?", type=Path, default=ROOT / "coverage.json")
    parser.add_argument("--pyproject", type=Path, default=ROOT / "pyproject.toml")
    options = parser.parse_args(arguments)
    goals = Goals.read(options.pyproject)
    report: dict[str, Any] = json.loads(options.report.read_text(encoding="utf-8"))

    measured = shares(report, goals)
    gaps = list(gaps_in_critical_files(report, goals.critical))
    print(*measured, *gaps, sep="\n")
    if not measured[-1].reached:
        print(*(f"never called: {name}" for name, executed in _functions(report) if not executed), sep="\n")
    return int(bool(gaps) or not all(share.reached for share in measured))


if __name__ == "__main__":
    sys.exit(main())

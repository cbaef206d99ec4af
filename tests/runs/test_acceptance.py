"""The table of acceptance criteria is true, and what it promises about the suite as a whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "reference" / "runs-acceptance.md"
REAL = {"stage", "lite", "guarded", "caretaker", "arena", "address", "client", "type_", "redis_url"}
"""Fixtures behind which real queues and databases are."""


def named_in(path: Path) -> dict[str, set[str]]:
    """Tests of a file, with the fixtures that each uses."""
    tree = ast.parse(path.read_text())
    return {
        node.name: {argument.arg for argument in node.args.args}
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.requirement("R-47")
def test_every_criterion_names_tests_that_exist() -> None:
    known = {f"{path.name}::{name}" for path in HERE.glob("test_*.py") for name in named_in(path)}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`test_" in line]

    named = [set(re.findall(r"`(test_\w+\.py::test_\w+)`", row)) for row in rows]

    assert {f"AC{number}" for number in range(1, 12)} == {
        word for row in rows for word in re.findall(r"^\| (AC\d+)", row)
    }
    assert all(named)
    assert set().union(*named) - known == set()


@pytest.mark.requirement("R-45", "R-46")
def test_the_suite_has_enough_tests() -> None:
    suites = {path.name: named_in(path) for path in HERE.glob("test_*.py")}

    end_to_end = [name for tests in suites.values() for name, fixtures in tests.items() if fixtures & REAL]

    assert len(suites["test_processor.py"]) >= 18
    assert len(suites["test_app.py"]) >= 1
    assert len(end_to_end) >= 46


@pytest.mark.requirement("R-48")
def test_the_linter_has_no_objections() -> None:
    command = [str(Path(sys.executable).parent / "ruff"), "check", "src/bullpen/runs", "src/bullpen/http", "tests/runs"]

    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert answer.returncode == 0, answer.stdout

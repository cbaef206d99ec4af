"""The gate counts what coverage reports, and fails below each of its goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import coverage_gate

pytestmark = pytest.mark.requirement("W-62")

PYPROJECT = """\
[tool.coverage_gate]
lines = 90
branches = 85
functions = 95
critical = ["src/bullpen/core.py"]
"""


def function(executed: list[int], missing: list[int]) -> dict[str, Any]:
    summary = {"num_statements": len(executed) + len(missing)}
    return {"executed_lines": executed, "missing_lines": missing, "summary": summary}


def report(**changes: Any) -> dict[str, Any]:
    totals = {"covered_lines": 95, "num_statements": 100, "covered_branches": 9, "num_branches": 10} | changes
    functions = {
        "": function([1], [2]),
        "settle": function([3], [4]),
        "Port.publish": function([], []),
    }
    return {"totals": totals, "files": {"src/bullpen/core.py": {"missing_lines": [], "functions": functions}}}


def judge(tmp_path: Path, content: dict[str, Any]) -> int:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "coverage.json").write_text(json.dumps(content))
    return coverage_gate.main([str(tmp_path / "coverage.json"), "--pyproject", str(tmp_path / "pyproject.toml")])


def test_a_report_above_all_goals_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(tmp_path, report()) == 0
    assert "functions  100.00 %   goal > 95 %   1/1   ok" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"covered_lines": 90}, {"covered_branches": 8}])
def test_a_goal_that_is_only_reached_is_not_exceeded(tmp_path: Path, change: dict[str, int]) -> None:
    assert judge(tmp_path, report(**change)) == 1


def test_a_function_that_was_never_called_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = report()
    content["files"]["src/bullpen/core.py"]["functions"]["park"] = function([], [7, 8])

    assert judge(tmp_path, content) == 1
    assert "never called: src/bullpen/core.py::park" in capsys.readouterr().out


def test_a_gap_in_a_critical_file_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = report()
    content["files"]["src/bullpen/core.py"]["missing_lines"] = [3, 7, 8, 9]

    assert judge(tmp_path, content) == 1
    assert "src/bullpen/core.py: critical, but these lines were not executed: 3, 7-9" in capsys.readouterr().out


def test_a_critical_file_that_nobody_measured_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = report()
    content["files"]["src/bullpen/renamed.py"] = content["files"].pop("src/bullpen/core.py")

    assert judge(tmp_path, content) == 1
    assert "src/bullpen/core.py: critical, but not in the report" in capsys.readouterr().out


def test_the_goals_of_this_project_are_the_promised_ones() -> None:
    goals = coverage_gate.Goals.read(coverage_gate.ROOT / "pyproject.toml")

    assert (goals.lines, goals.branches, goals.functions) == (90, 85, 95)
    assert [path for path in goals.critical if not (coverage_gate.ROOT / path).exists()] == []

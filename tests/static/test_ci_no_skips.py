"""A skip is a skip at home and a failure in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCES = {
    "in the test": 'def test_a(): pytest.skip("no server 1")',
    "by a mark": '@pytest.mark.skip(reason="no server 2")\ndef test_a(): ...',
    "in a fixture": '@pytest.fixture\ndef server(): pytest.skip("no server 3")\ndef test_a(server): ...',
    "of a module": 'pytest.skip("no server 4", allow_module_level=True)\ndef test_a(): ...',
    "expected failure": '@pytest.mark.xfail(reason="known")\ndef test_a(): assert False',
}


def run(directory: Path, **environ: str) -> str:
    """Run the tests of all sources in one new process; returns what pytest says."""
    for number, source in enumerate(SOURCES.values()):
        (directory / f"test_{number}.py").write_text(f"import pytest\n{source}\ndef test_b(): ...\n")
    clean = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("COVERAGE_")}
    answer = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-rA",
                "--import-mode=importlib",
                "--continue-on-collection-errors",
            ),
            *("-p", "tests.ci_no_skips", "-p", "no:cacheprovider", "--rootdir", str(directory), str(directory)),
        ],
        cwd=directory,
        env=clean | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environ,
        capture_output=True,
        text=True,
    )
    return f"{answer.stdout}\nended with {answer.returncode}"


@pytest.fixture(scope="module")
def in_ci(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("ci"), CI="true")


@pytest.mark.parametrize("number", [1, 2, 3, 4], ids=list(SOURCES)[:4])
def test_a_skip_fails_in_ci_and_says_why(in_ci: str, number: int) -> None:
    assert f"skipped, which CI does not allow: Skipped: no server {number}" in in_ci
    assert "ended with 1" in in_ci
    assert "1 failed, 4 passed, 1 xfailed, 3 errors" in in_ci, "what skips before its test runs is an error"


def test_at_home_a_skip_is_a_skip(tmp_path: Path) -> None:
    told = run(tmp_path)

    assert "4 passed, 4 skipped, 1 xfailed" in told
    assert "ended with 0" in told

"""A skip is a skip at home and a failure in CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCES = {
    "in the test": 'def test_a(): pytest.skip("no server")',
    "by a mark": '@pytest.mark.skip(reason="no server")\ndef test_a(): ...',
    "in a fixture": '@pytest.fixture\ndef server(): pytest.skip("no server")\ndef test_a(server): ...',
    "of a module": 'pytest.skip("no server", allow_module_level=True)\ndef test_a(): ...',
}


def run(directory: Path, source: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_it.py").write_text(f"import pytest\n{source}\ndef test_b(): ...\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.ci_no_skips",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:valkey",
    ]
    clean = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("COVERAGE_")}
    environment = clean | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run(
        [*command, "--rootdir", str(directory), str(directory)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("where", SOURCES)
def test_a_skip_fails_in_ci_and_says_why(tmp_path: Path, where: str) -> None:
    answer = run(tmp_path, SOURCES[where], CI="true")

    assert answer.returncode != 0
    assert "which CI does not allow" in answer.stdout
    assert "no server" in answer.stdout


def test_at_home_a_skip_is_a_skip(tmp_path: Path) -> None:
    answer = run(tmp_path, SOURCES["in the test"])

    assert answer.returncode == 0, answer.stdout
    assert "1 passed, 1 skipped" in answer.stdout


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    answer = run(tmp_path, '@pytest.mark.xfail(reason="known")\ndef test_a(): assert False', CI="true")

    assert answer.returncode == 0, answer.stdout
    assert "1 passed, 1 xfailed" in answer.stdout

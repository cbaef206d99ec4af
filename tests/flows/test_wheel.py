"""The wheel that users install: complete, and working without anything of the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bullpen._version import __version__ as VERSION  # noqa: N812 - a constant here

ROOT = Path(__file__).resolve().parents[2]

# Building and installing take longer than a test may, on a busy machine.


def run(*command: str | Path, cwd: Path) -> str:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE", "BULLPEN"))
    }
    answer = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", target, ROOT, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel and what it depends on, nothing else."""
    target = tmp_path_factory.mktemp("empty") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", target, cwd=target.parent)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", target / "bin" / "python")
    constraints = ("-c", ROOT / "constraints.txt")
    run(*pip, "install", "--quiet", *constraints, f"{wheel}[embedded,cli]", cwd=target.parent)
    return target


def test_the_wheel_holds_the_package_with_its_scripts_and_types_and_nothing_else(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()

    assert {
        "bullpen/py.typed",
        "bullpen/_demo/stage.py",
        "bullpen/wire/lua/exchange.lua",
        "bullpen/wire/lua/lib/clock.lua",
    } <= set(files)
    assert [name for name in files if not name.startswith(("bullpen/", f"bullpen_mq-{VERSION}.dist-info/"))] == []


@pytest.mark.long
def test_every_module_can_be_imported_that_needs_no_further_extra(environment: Path, tmp_path: Path) -> None:
    """A name that only the development environment has would be noticed by the first user otherwise."""
    modules = "bullpen, bullpen.errors, bullpen.queue, bullpen.settings, bullpen.testing, bullpen.wire.scripts"
    script = f"import {modules}; print(bullpen.__file__)"

    found = run(environment / "bin" / "python", "-c", script, cwd=tmp_path)

    assert Path(found.strip()).is_relative_to(environment)


@pytest.mark.long
def test_the_command_says_its_version(environment: Path, tmp_path: Path) -> None:
    answer = run(environment / "bin" / "bullpen", "--version", cwd=tmp_path)

    assert VERSION in answer


@pytest.mark.long
def test_the_demo_runs_from_the_installed_wheel(environment: Path, tmp_path: Path) -> None:
    """What a user does first, with nothing there but what pip installed."""
    answer = run(environment / "bin" / "bullpen", "demo", "--json", "--jobs", "60", "--duration", "2", cwd=tmp_path)

    told = json.loads(answer)
    assert told["addsUp"]
    assert (told["added"], told["completed"] + told["deadLettered"]) == (60, 60)
    assert list(tmp_path.iterdir()) == []

"""The environment of somebody who has just installed the wheel."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.first_hour._user import Environment, clean

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A virtual environment with bullpen from the wheel, made once for all processes of a test run.

    Everything else comes from the environment of the tests, so that nothing is downloaded.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    place = shared / "first_hour"
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "ready").exists():
            _install(place)
            (place / "ready").touch()
    return Environment(place / "venv")


def _install(place: Path) -> None:
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", place, cwd=ROOT)
    (wheel,) = place.glob("*.whl")
    _run(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", place / "venv" / "bin" / "python")
    _run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=place)
    (packages,) = (place / "venv" / "lib").glob("python*/site-packages")
    # A path in a .pth file is searched last, and .pth files below it are not read: bullpen is never the checkout's.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _run(*command: str | Path, cwd: Path) -> None:
    answer = subprocess.run(command, cwd=cwd, env=clean(), capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr

"""The command that makes a fresh machine says what it needs, and harms nothing where it may not work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _fresh_machine(*arguments: str, path: str = os.environ.get("PATH", os.defpath)) -> tuple[int, str]:
    command = [sys.executable, "-m", "tools.fresh_machine", *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stderr


def test_a_misspelt_run_is_told_which_there_are() -> None:
    code, errors = _fresh_machine("roto-closed")

    assert code == 2
    assert "no run is called 'roto-closed'; there are root-closed, root-open, user" in errors


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """Before anything is made."""
    code, errors = _fresh_machine(path=os.fspath(tmp_path))

    reason = "debootstrap is missing (apt-get install debootstrap)" if os.geteuid() == 0 else "it needs root"
    assert code == 2
    assert f"no fresh machine can be made here: {reason}" in errors


def test_a_directory_with_other_things_is_left_as_it_is(tmp_path: Path) -> None:
    """The directory is removed in the end, so it must be ours."""
    (tmp_path / "mine.txt").write_text("precious")

    code, errors = _fresh_machine("--directory", os.fspath(tmp_path))

    assert code == 2
    assert "holds something else; name an empty directory" in errors
    assert (tmp_path / "mine.txt").read_text() == "precious"

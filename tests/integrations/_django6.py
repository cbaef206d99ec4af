"""Django 6, which needs Python 3.12, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.environments import EnvironmentMissing, other_environment

_NEWER = ("3.12", "3.13", "3.14")


def find_newer_python() -> str:
    """This interpreter or another one of the machine."""
    names = [sys.executable, *(f"python{each}" for each in _NEWER)]
    names += [str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python"))]
    for name in names:
        try:
            said = subprocess.run([name, "-c", "import sys; print(sys.version_info >= (3, 12))"], capture_output=True)
        except OSError:
            continue
        if said.stdout.strip() == b"True":
            return name
    raise EnvironmentMissing("no Python 3.12 or newer is installed")


def ensure_environment() -> Path:
    """The interpreter of an environment with Django 6 and what bullpen needs."""
    extras = "[embedded,cli,sqlite,postgres]"
    return other_environment("django6", "django>=6.0,<6.1", interpreter=find_newer_python(), extras=extras)

"""Django 6, which needs Python 3.12, in an environment of its own."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from bullpen._version import DISTRIBUTION
from tests.environments import ROOT, closure

DJANGO = "django>=6.0,<6.1"
_NEWER = ("3.12", "3.13", "3.14")


class NoNewerPython(Exception):
    """No interpreter here can run Django 6, or its packages cannot be fetched."""


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
    raise NoNewerPython("no Python 3.12 or newer is installed")


def ensure_environment() -> Path:
    """The interpreter of an environment with Django 6 and what bullpen needs, in the versions of the other tests."""
    environment = ROOT / ".venvs" / "django6"
    environment.parent.mkdir(exist_ok=True)
    python = environment / "bin" / "python"
    with (environment.parent / "django6.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(environment.glob("lib/python3*/site-packages/django-6*.dist-info")):
            needed = [name for name in closure(f"{DISTRIBUTION}[embedded,cli,sqlite,postgres]") if name != DISTRIBUTION]
            pip: tuple[str | Path, ...] = (
                sys.executable,
                "-m",
                "pip",
                "--python",
                python,
                "--disable-pip-version-check",
            )
            commands: tuple[tuple[str | Path, ...], ...] = (
                (find_newer_python(), "-m", "venv", "--without-pip", environment),
                (*pip, "install", "--quiet", DJANGO, *(f"{name}=={version(name)}" for name in needed)),
            )
            try:
                for command in commands:
                    subprocess.run(command, check=True, capture_output=True, timeout=600)
            except (subprocess.SubprocessError, OSError) as error:
                output = getattr(error, "stderr", None) or b""
                raise NoNewerPython(f"needs `pip install '{DJANGO}'`: {output.decode()[-500:]}") from error
    return python

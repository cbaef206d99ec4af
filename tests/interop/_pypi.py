"""Run PyPI `bullmq` of the pinned version in a Python process of its own.

It pins other versions of our dependencies, hence its own virtual environment. Elsewhere: the ops (`pypi_driver.py`),
the line protocol (`_peer`).
"""

import fcntl
import subprocess
import sys
from pathlib import Path

from ._peer import Peer

VERSION = "3.4.4"
_ROOT = Path(__file__).parents[2]
_ENVIRONMENT = _ROOT / ".venvs" / "pybullmq"


class PyBullmqMissing(Exception):
    """The environment could not be made: the tests that need it skip at home and fail in CI."""


def ensure_environment() -> Path:
    """Return the interpreter of an environment that holds the pinned version, made on first use."""
    _ENVIRONMENT.parent.mkdir(exist_ok=True)
    python = _ENVIRONMENT / "bin" / "python"
    with (_ENVIRONMENT.parent / "pybullmq.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once make it one after the other
        if not _holds_pinned_version():
            try:
                subprocess.run(
                    [sys.executable, "-m", "venv", _ENVIRONMENT], check=True, capture_output=True, timeout=120
                )
                subprocess.run(
                    [python, "-m", "pip", "install", "--quiet", f"bullmq=={VERSION}"],
                    check=True,
                    capture_output=True,
                    timeout=300,
                )
            except (subprocess.SubprocessError, OSError) as error:
                output = getattr(error, "stderr", None) or b""
                raise PyBullmqMissing(f"needs `pip install bullmq=={VERSION}`: {output.decode()[-500:]}") from error
    return python


class PyBullmqPeer(Peer):
    """PyPI `bullmq` in one Python process, connected to one Redis server."""

    def __init__(self, url: str, python: Path) -> None:
        super().__init__([python, Path(__file__).with_name("pypi_driver.py"), url])


def _holds_pinned_version() -> bool:
    return any(_ENVIRONMENT.glob(f"lib/python3*/site-packages/bullmq-{VERSION}.dist-info"))

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
OLDER_VERSION = "2.26.0"
_ROOT = Path(__file__).parents[2]


class PyBullmqMissing(Exception):
    """The environment could not be made: the tests that need it skip at home and fail in CI."""


def ensure_environment(version: str = VERSION) -> Path:
    """Return the interpreter of an environment that holds this version, made on first use."""
    environments = _ROOT / ".venvs"
    environment = environments / ("pybullmq" if version == VERSION else f"pybullmq-{version}")
    environments.mkdir(exist_ok=True)
    python = environment / "bin" / "python"
    with (environments / "pybullmq.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once make it one after the other
        if not any(environment.glob(f"lib/python3*/site-packages/bullmq-{version}.dist-info")):
            try:
                # With the pip that is there: a new one takes longer to install than what it is wanted for.
                pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
                for command in (
                    (sys.executable, "-m", "venv", "--without-pip", environment),
                    (*pip, "install", "--quiet", f"bullmq=={version}"),
                ):
                    subprocess.run(command, check=True, capture_output=True, timeout=300)
            except (subprocess.SubprocessError, OSError) as error:
                output = getattr(error, "stderr", None) or b""
                raise PyBullmqMissing(f"needs `pip install bullmq=={version}`: {output.decode()[-500:]}") from error
    return python


class PyBullmqPeer(Peer):
    """PyPI `bullmq` in one Python process, connected to one Redis server."""

    def __init__(self, url: str, python: Path) -> None:
        super().__init__([python, Path(__file__).with_name("pypi_driver.py"), url])

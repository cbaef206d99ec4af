"""The tests pass however they are started: in the background and under `nohup` too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
IGNORED = """
import signal
print([number.name for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
       if signal.getsignal(number) is signal.SIG_IGN])
"""


def _with_ignored_signals(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a shell without job control runs it in the background, as `nohup` does, and worse."""
    command = ["sh", "-c", 'trap "" HUP INT QUIT TERM; exec "$@"', "sh", sys.executable, *arguments]
    # Not measured: coverage would handle SIGTERM in there.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_what_a_test_starts_ignores_no_signal() -> None:
    """Else a test that interrupts it waits for ever, in this run or in one that was started to ignore signals."""
    child = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {IGNORED!r}], check=True)"

    assert subprocess.run([sys.executable, "-c", IGNORED], capture_output=True, check=True).stdout == b"[]\n"
    assert _with_ignored_signals("-c", IGNORED).stdout == "['SIGHUP', 'SIGINT', 'SIGQUIT', 'SIGTERM']\n"
    assert _with_ignored_signals("-c", child).stdout == "[]\n"


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    """What it starts gets the default, the run itself does not: it would end when its user logs out."""
    run = _with_ignored_signals(
        "-c", "import os, signal, tests.conftest; os.kill(os.getpid(), signal.SIGHUP); print('alive')"
    )

    assert run.stdout == "alive\n", run.stderr

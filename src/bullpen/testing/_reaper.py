"""End the processes we started, and remove their directories, however our own process ends.

In: process ids and directories that belong to this process. Out: none of them is left once this process is gone.

One small child watches over all of them. It notices our death by the end of a pipe, or by getting another parent (a
forked copy of us may still hold the pipe). PR_SET_PDEATHSIG would need no child, but it fires when the *thread* that
started the process ends, and pytest plug-ins and executors start things from threads that come and go.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from pathlib import Path

# Runs without site-packages, so that it is up in a few milliseconds. A process id may be used again by the system
# after its process was collected; the start time tells a successor from the one we were asked to end.
_WATCHER = r"""
import os, select, shutil, signal, sys

parent, started, directories, pending = int(sys.argv[1]), {}, {}, b""

def start_time(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[19]
    except (OSError, IndexError):
        return None

while True:
    orphaned = os.getppid() != parent  # perhaps before we were up: what it has told us is still in the pipe
    if not select.select([0], [], [], 0 if orphaned else 0.5)[0]:
        if orphaned:
            break
        continue
    chunk = os.read(0, 65536)
    if not chunk:
        break
    pending += chunk
    *lines, pending = pending.split(b"\n")
    for line in lines:
        word, _, rest = line.decode("utf-8", "surrogateescape").partition(" ")
        if word == "process":
            started[int(rest)] = start_time(int(rest))
        elif word == "collected":
            started.pop(int(rest), None)
        elif word == "directory":
            directories[rest] = True
        elif word == "removed":
            directories.pop(rest, None)

for pid, since in started.items():
    if start_time(pid) != since:
        continue
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
for path in directories:
    shutil.rmtree(path, ignore_errors=True)
"""

_lock = threading.Lock()
_watcher: subprocess.Popen[bytes] | None = None


def watch_process(pid: int) -> None:
    """End this process (and its group, if it leads one) when ours has ended."""
    _send(f"process {pid}")


def forget_process(pid: int) -> None:
    """The process was collected; its id may soon belong to somebody else."""
    _send(f"collected {pid}")


def watch_directory(path: Path) -> None:
    """Remove this directory when our process has ended."""
    _send(f"directory {path}")


def forget_directory(path: Path) -> None:
    """The directory is gone or has a new owner."""
    _send(f"removed {path}")


def _send(line: str) -> None:
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHER, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in the terminal is for the tests, not for what cleans up after them
                cwd="/",
            )
        assert _watcher.stdin is not None
        _watcher.stdin.write(os.fsencode(line) + b"\n")
        _watcher.stdin.flush()


def _finish() -> None:
    global _watcher
    with _lock:
        watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.communicate()


def _forget_in_forked_child() -> None:
    # What the parent started stays the parent's. The copy of the pipe is closed without a wait: it is not our child.
    global _watcher, _lock
    _lock = threading.Lock()
    watcher, _watcher = _watcher, None
    if watcher is not None:
        assert watcher.stdin is not None
        watcher.stdin.close()
        watcher.returncode = 0  # no ResourceWarning about a process that is not ours


atexit.register(_finish)
os.register_at_fork(after_in_child=_forget_in_forked_child)

"""Run a Python program as a child process, watch what it prints, and end it the hard way.

In: a script, module or piece of code. Out: its lines as they come, its exit code, and the certainty that it is gone
when the test is. Elsewhere: servers (`servers`), what the killed processes did (`ledger`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from bullpen.testing import _reaper

__all__ = ["Child", "wait_until_gone"]

_LINE_DEADLINE_S = 30.0
_SHOWN_CHARACTERS = 4_000


def wait_until_gone(pid: int, timeout: float = 10.0) -> None:
    """Block until a process has ended that need not be ours; AssertionError if it has not in time.

    A process that ended and was not collected yet counts as gone.
    """
    deadline = time.monotonic() + timeout
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            ended, _, _ = select.select([descriptor], [], [], timeout)
        finally:
            os.close(descriptor)
        assert ended, f"process {pid} still runs after {timeout} s"
        return
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.01)
        raise AssertionError(f"process {pid} still runs after {timeout} s")


class Child:
    """A child process whose output is collected line by line.

    Use it as a context manager, or call `close`: both kill the process and everything it started in its group. If the
    test process dies first, the child is killed by our watcher.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        """Start any command. `env` is added to the environment of the test."""
        self._changed = threading.Condition()
        self._lines: dict[str, list[str]] = {"stdout": [], "stderr": []}
        self._read_up_to = 0
        self._closed = False
        self._command = list(command)
        self._process = self._start({**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})}, cwd)
        _reaper.watch_process(self._process.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._open_streams = 2
        self._readers = [
            threading.Thread(target=self._collect, args=(name, stream), name=f"child-{name}", daemon=True)
            for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    @classmethod
    def script(
        cls, path: Path | str, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Self:
        """Run a Python file with this interpreter."""
        return cls([sys.executable, str(path), *args], env=env, cwd=cwd)

    @classmethod
    def module(cls, name: str, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Self:
        """Run a module, as `python -m name`."""
        return cls([sys.executable, "-m", name, *args], env=env, cwd=cwd)

    @classmethod
    def code(cls, source: str, *args: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Self:
        """Run a piece of Python source, as `python -c source`."""
        return cls([sys.executable, "-c", source, *args], env=env, cwd=cwd)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives (it may be paused)."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative signal number, or None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """Everything it has written to stdout so far."""
        with self._changed:
            return "".join(f"{line}\n" for line in self._lines["stdout"])

    @property
    def errors(self) -> str:
        """Everything it has written to stderr so far."""
        with self._changed:
            return "".join(f"{line}\n" for line in self._lines["stderr"])

    def wait_for(self, pattern: str | re.Pattern[str], timeout: float = _LINE_DEADLINE_S) -> str:
        """Block until a line of stdout matches (a regular expression, searched) and return that line.

        Each call goes on behind the line that the last one found. Raises AssertionError with the whole output if the
        process ends, or the time runs out, before such a line.
        """
        wanted = re.compile(pattern)
        with self._changed:
            position = self._read_up_to

            def found() -> bool:
                nonlocal position
                lines = self._lines["stdout"]
                while position < len(lines) and not wanted.search(lines[position]):
                    position += 1
                return position < len(lines) or self._open_streams == 0

            self._changed.wait_for(found, timeout)
            lines = self._lines["stdout"]
            if position < len(lines):
                self._read_up_to = position + 1
                return lines[position]
        raise AssertionError(self._describe(f"no line with {wanted.pattern!r} within {timeout} s"))

    async def seen(self, pattern: str | re.Pattern[str], timeout: float = _LINE_DEADLINE_S) -> str:
        """As `wait_for`, without blocking the event loop."""
        return await asyncio.to_thread(self.wait_for, pattern, timeout)

    def send_line(self, text: str) -> None:
        """Write one line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n".encode())
        self._process.stdin.flush()

    def close_stdin(self) -> None:
        """Let it read end-of-file."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """End the process with SIGKILL and wait for it. What it started itself lives on, until `close`."""
        self._signal(signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """Send SIGTERM and do not wait."""
        self._signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does, and do not wait."""
        self._signal(signal.SIGINT)

    def pause(self) -> None:
        """Freeze the process (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def wait(self, timeout: float = _LINE_DEADLINE_S) -> int:
        """Wait for the end of the process and return its exit code (negative: the signal that killed it)."""
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._describe(f"still running after {timeout} s")) from None
        self._join_readers()
        return code

    async def ended(self, timeout: float = _LINE_DEADLINE_S) -> int:
        """As `wait`, without blocking the event loop."""
        return await asyncio.to_thread(self.wait, timeout)

    def close(self) -> None:
        """Kill the process and its whole group, and collect it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        _reaper.forget_process(self._process.pid)
        self._join_readers()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Child {self.pid} {'running' if self.is_running else f'ended with {self.exit_code}'}>"

    def _start(self, env: Mapping[str, str], cwd: Path | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            start_new_session=True,  # its own group: can be killed as a whole, and Ctrl-C at the test does not reach it
        )

    def _signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)  # does nothing once the process was collected

    def _collect(self, name: str, stream: IO[bytes]) -> None:
        # Closed here and nowhere else: closing a stream that another thread reads would wait for that thread.
        with stream:
            for line in stream:
                with self._changed:
                    self._lines[name].append(line.decode(errors="replace").rstrip("\r\n"))
                    self._changed.notify_all()
        with self._changed:
            self._open_streams -= 1
            self._changed.notify_all()

    def _join_readers(self) -> None:
        # A grandchild may still hold the pipes open: what it says later is no longer ours to wait for.
        deadline = time.monotonic() + 1
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))

    def _describe(self, problem: str) -> str:
        if self._open_streams == 0:  # it has said its last word, and is about to end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        state = "is running" if self.is_running else f"ended with {self.exit_code}"
        command = " ".join(self._command)[:200]
        output, errors = self.output[-_SHOWN_CHARACTERS:], self.errors[-_SHOWN_CHARACTERS:]
        return f"{problem}; {command} {state}\n-- stdout\n{output}-- stderr\n{errors}"

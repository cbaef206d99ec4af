"""Commands on a pseudo-terminal without the half second that Python needs to start.

A process that has imported the command forks for each one: the child gets terminals and a session of its own, the
environment and directory of the request, and runs what the entry point runs. In: arguments. Out: a `WarmTerminal`, to
be used like `Terminal`. Elsewhere: `test_terminal` compares one command with a cold start.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.flows._cli import Answer, TerminalText, environment

_REPOSITORY = Path(__file__).parents[2]
_LONGEST_REQUEST = 100_000
_END_OF_PART = "\x1e"
"""Follows what a command has written, on both terminals."""
# Imported by commands only when they need it; here once for all.
PRELOADED = ("bullpen.ledger", "bullpen.runs", "bullpen.messages", "bullpen.outbox", "bullpen._parts.ledger",
             "bullpen._parts.messages", "bullpen._parts.outbox", "bullpen._parts.runs", "bullpen.ledger.migrate",
             "alembic.command", "aiosqlite", "rich.live", "rich.progress", "rich.table", "uvloop")  # fmt: skip


class Warm:
    """The process that forks."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        screen, terminal = pty.openpty()  # consoles decide at import whether there are colours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.flows._warm", str(theirs.fileno())],
            cwd=_REPOSITORY,
            env=environment({"TERM": "xterm-256color"}),
            stdin=terminal,
            stdout=terminal,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        self._screen = screen
        theirs.close()
        os.close(terminal)

    def start(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, rows: int = 40,
              columns: int = 100) -> WarmTerminal:  # fmt: skip
        """Run a command on a terminal; its stderr is another terminal, so that both can be told apart."""
        return self.session([arguments], cwd=cwd, env=env, rows=rows, columns=columns)

    def session(self, commands: Sequence[Sequence[str]], *, cwd: Path, env: Mapping[str, str] | None = None,
                rows: int = 40, columns: int = 100) -> WarmTerminal:  # fmt: skip
        """Run several commands on one terminal, one after the other in one process; each has a part of what is seen."""
        pairs = [pty.openpty(), pty.openpty()]
        status, told = os.pipe()
        for _, theirs in pairs:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        request = {
            "commands": commands,
            "cwd": str(cwd),
            "env": environment({"TERM": "xterm-256color", **(env or {})}),
        }
        descriptors = [*(theirs for _, theirs in pairs), told]
        socket.send_fds(self._ours, [json.dumps(request).encode()], descriptors)
        if self._ours.recv(1) != b"+":
            assert self._process.stderr is not None
            raise AssertionError(f"the warm process has died: {self._process.stderr.read().decode()}")
        for descriptor in descriptors:
            os.close(descriptor)
        return WarmTerminal(pairs[0][0], pairs[1][0], status)

    def run(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, typed: str = "",
            timeout: float = 40) -> Answer:  # fmt: skip
        """Run a command to its end; `typed` is waiting in the terminal when it starts."""
        terminal = self.start(*arguments, cwd=cwd, env=env)
        if typed:
            terminal.type(typed)
        code = terminal.end(timeout)
        return Answer(code, terminal.text, terminal.error)

    def close(self) -> None:
        self._ours.close()  # it ends when nobody can ask any more
        self._process.communicate(timeout=10)
        os.close(self._screen)


class WarmTerminal(TerminalText):
    """A forked command on two terminals."""

    def __init__(self, ours: int, errors: int, status: int) -> None:
        self._descriptors = {ours: bytearray(), errors: bytearray()}
        self._open = set(self._descriptors)
        self._ours, self._errors = ours, errors
        self._status = os.fdopen(status, "rb")
        self.pid = int(self._status.readline())

    @property
    def raw(self) -> bytes:  # type: ignore[override]  # an attribute there
        return bytes(self._descriptors[self._ours])

    @property
    def error(self) -> str:
        return self.plain(bytes(self._descriptors[self._errors]))

    def wait_for_error(self, pattern: str, timeout: float = 30) -> None:
        """Read until what went to stderr matches."""
        give_up = time.monotonic() + timeout
        while not re.search(pattern, self.error):
            if not self._read(give_up):
                self.close()
                raise AssertionError(f"no {pattern!r} in:\n{self.error}")

    def wait_for_either(self, pattern: str, timeout: float = 60, *, part: int = 0) -> None:
        """Read until stdout or stderr of a session's command matches."""
        give_up = time.monotonic() + timeout
        while not any(re.search(pattern, text) for text in self.part(part)):
            if not self._read(give_up):
                self.close()
                raise AssertionError(f"no {pattern!r} in:\n{self.text}\n{self.error}")

    def part(self, number: int) -> tuple[str, str]:
        """What one command of a session has written so far to stdout and to stderr."""
        out, err = (f"{text}{_END_OF_PART * (number + 1)}".split(_END_OF_PART) for text in (self.text, self.error))
        return out[number], err[number]

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def end(self, timeout: float = 40) -> int:
        give_up = time.monotonic() + timeout
        try:
            while self._read(give_up):
                pass
            if time.monotonic() >= give_up:
                raise AssertionError(f"it did not end:\n{self.text}\n{self.error}")
            return int(self._status.readline() or -1)  # nothing: it was killed
        finally:
            self.close()

    def codes(self, timeout: float = 60) -> list[int]:
        """Read until the session ends; the exit code of each command."""
        give_up = time.monotonic() + timeout
        try:
            while self._read(give_up):
                pass
            if time.monotonic() >= give_up:
                raise AssertionError(f"it did not end:\n{self.text}\n{self.error}")
            return [int(line) for line in self._status]
        finally:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._status.close()
        for descriptor in self._open:
            os.close(descriptor)
        self._open.clear()

    def _read(self, give_up: float) -> bool:
        if not self._open:
            return False
        ready, _, _ = select.select(list(self._open), [], [], max(0.0, give_up - time.monotonic()))
        for descriptor in ready:
            try:
                chunk = os.read(descriptor, 65_536)
            except OSError:  # how Linux tells that nobody has the other side open
                chunk = b""
            self._descriptors[descriptor] += chunk
            if not chunk:
                os.close(descriptor)
                self._open.discard(descriptor)
        return bool(ready)


# In the process that forks ------------------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> None:
    import importlib
    import threading

    from bullpen.cli import commands

    for module in PRELOADED:
        importlib.import_module(module)
    commands.tree()
    _keep_what_was_measured()
    assert threading.active_count() == 1, "threads do not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies; they tell their codes themselves
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _run(json.loads(request), commands.run, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"+")


def _keep_what_was_measured() -> None:
    """Store the coverage of all the imports once: what is not stored before the fork, every child stores again."""
    if "coverage" in sys.modules:
        import coverage

        measured = coverage.Coverage.current()
        if measured is not None:
            measured.save()


def _run(request: Any, run: Callable[[list[str]], int], terminal: int, errors: int, told: int) -> NoReturn:
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.write(told, f"{os.getpid()}\n".encode())
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)  # or Ctrl-C would signal nobody
        for number, descriptor in enumerate((terminal, terminal, errors)):
            os.dup2(descriptor, number)
        os.close(terminal)
        os.close(errors)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        *before, last = request["commands"]
        for arguments in before:
            os.write(told, f"{exit_code(run, arguments)}\n".encode())
            for stream in (sys.stdout, sys.stderr):
                stream.write(_END_OF_PART)
                stream.flush()
            _forget_the_program(request["cwd"])
        code = exit_code(run, last)
    finally:
        os.write(told, f"{code}\n".encode())
        os._exit(code)


def _forget_the_program(directory: str) -> None:
    """The user's own modules: the next command imports them again, as in a process of its own."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{directory}{os.sep}"):
            del sys.modules[name]


def exit_code(run: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run a command as the entry point does."""
    try:
        code = run(arguments)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()  # as Python would
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))

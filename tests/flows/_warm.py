"""Commands on a pseudo-terminal without the half second that Python needs to start.

A process that has imported the command forks for each one: the child gets terminals and a session of its own, the
environment and directory of the request, and runs what the entry point runs. In: arguments. Out: a `WarmTerminal`, to
be used like `Terminal`. Elsewhere: `test_terminal` compares one command with a cold start.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bullpen.cli import commands
from tests.flows._cli import Answer, TerminalText, environment
from tests.forks import Fork, ForkServer, Tell, exit_code

_END_OF_PART = "\x1e"
"""Follows what a command has written, on both terminals."""


class Warm:
    """The process that forks."""

    def __init__(self) -> None:
        self._screen, terminal = pty.openpty()  # consoles decide at import whether there are colours
        self._server = ForkServer.launch(__name__, env=environment({"TERM": "xterm-256color"}), stream=terminal)
        os.close(terminal)

    def start(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, rows: int = 40,
              columns: int = 100) -> WarmTerminal:  # fmt: skip
        """Run a command on a terminal; its stderr is another terminal, so that both can be told apart."""
        return self.session([arguments], cwd=cwd, env=env, rows=rows, columns=columns)

    def session(self, commands: Sequence[Sequence[str]], *, cwd: Path, env: Mapping[str, str] | None = None,
                rows: int = 40, columns: int = 100) -> WarmTerminal:  # fmt: skip
        """Run several commands on one terminal, one after the other in one process; each has a part of what is seen."""
        pairs = [pty.openpty(), pty.openpty()]
        for _, theirs in pairs:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        (ours, terminal), (our_errors, errors) = pairs
        fork = self._server.start(
            f"{__name__}:run_session",
            *(json.dumps(arguments) for arguments in commands),
            streams=(terminal, terminal, errors),
            env=environment({"TERM": "xterm-256color", **(env or {})}),
            cwd=cwd,
        )
        return WarmTerminal(ours, our_errors, fork)

    def run(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, typed: str = "",
            timeout: float = 40) -> Answer:  # fmt: skip
        """Run a command to its end; `typed` is waiting in the terminal when it starts."""
        terminal = self.start(*arguments, cwd=cwd, env=env)
        if typed:
            terminal.type(typed)
        code = terminal.end(timeout)
        return Answer(code, terminal.text, terminal.error)

    def close(self) -> None:
        self._server.close()
        os.close(self._screen)


class WarmTerminal(TerminalText):
    """A forked command on two terminals."""

    def __init__(self, ours: int, errors: int, fork: Fork) -> None:
        self._descriptors = {ours: bytearray(), errors: bytearray()}
        self._open = set(self._descriptors)
        self._ours, self._errors = ours, errors
        self._fork = fork
        self.pid = fork.pid

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
        self._fork.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._fork.signal(signal.SIGCONT)

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
            return self._fork.lines()[-1]
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
            return self._fork.lines()
        finally:
            self.close()

    def close(self) -> None:
        self._fork.signal(signal.SIGKILL)
        self._fork.close()
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


# In the process that was forked -------------------------------------------------------------------------------------


def run_session(words: list[str], tell: Tell) -> int:
    """Run commands one after the other; the codes of all but the last are told."""
    *before, last = (json.loads(word) for word in words)
    for arguments in before:
        tell(exit_code(commands.run, arguments))
        for stream in (sys.stdout, sys.stderr):
            stream.write(_END_OF_PART)
            stream.flush()
        _forget_the_program(os.getcwd())
    return exit_code(commands.run, last)


def _forget_the_program(directory: str) -> None:
    """The user's own modules: the next command imports them again, as in a process of its own."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{directory}{os.sep}"):
            del sys.modules[name]

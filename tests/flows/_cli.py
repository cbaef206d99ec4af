"""Run the command as a user does: in a process of its own, on pipes or on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from bullpen.cli import commands
from bullpen.testing import Child
from tests import forks
from tests.forks import MergedChild

COMMAND = (sys.executable, "-m", "bullpen.cli")
_OURS = re.compile(r"BULLPEN_(?!TEST)|REDIS_")


def environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the machine has, without what configures bullpen."""
    clean = {name: value for name, value in os.environ.items() if not _OURS.match(name)}
    return {**clean, **(given or {})}


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str


def cli(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str = "") -> Answer:
    """Run one command to its end, in this process: the same code, half a second sooner."""
    out, err = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with (
        mock.patch.dict(os.environ, environment(env), clear=True),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = commands.run(list(arguments))
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)  # not the attribute: loggers remember what was switched off until they are told
            logging.getLogger("bullpen.embedded").setLevel(logging.NOTSET)
    return Answer(code, out.getvalue(), err.getvalue())


def cli_process(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 50) -> Answer:
    """Run one command to its end in a process of its own."""
    done = forks.run([*COMMAND[1:], *arguments], cwd=cwd, env=environment(env), timeout=timeout)
    return Answer(done.returncode, done.stdout, done.stderr)


def child(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> Child:
    """Start a command that goes on; its stdout and stderr are read as one."""
    clean = {name: "" for name in os.environ if _OURS.match(name)}  # an empty variable counts as not set
    return MergedChild([*COMMAND, *arguments], cwd=cwd, env={**clean, **(env or {})})


class TerminalText:
    """What a command has written to a terminal."""

    raw: bytes

    @staticmethod
    def plain(raw: bytes) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode(errors="replace")).replace("\r\n", "\n")

    @property
    def text(self) -> str:
        """What has been written so far, without colours and cursor movements."""
        return self.plain(self.raw)

    def wait_for(self, pattern: str, timeout: float = 30, *, after: int = 0) -> str:
        """Read until the text matches, from the character `after` on."""
        give_up = time.monotonic() + timeout
        while not re.search(pattern, self.text[after:]):
            if not self._read(give_up):
                self.close()  # a test that fails here would leave it running
                raise AssertionError(f"no {pattern!r} in:\n{self.text[after:]}")
        return self.text

    def close(self) -> None:
        raise NotImplementedError

    def _read(self, give_up: float) -> bool:
        raise NotImplementedError


class Terminal(TerminalText):
    """A command on a pseudo-terminal of 100 columns."""

    def __init__(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self._process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=cwd,
            env=environment({"TERM": "xterm-256color", **(env or {})}),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # or Ctrl-C would signal nobody
        )
        os.close(theirs)
        self.raw = b""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self, timeout: float = 40) -> int:
        """Read to the end and return the exit code."""
        give_up = time.monotonic() + timeout
        try:
            while self._read(give_up):
                pass
            return self._process.wait(5)
        finally:
            self.close()

    def close(self) -> None:
        """Kill what still runs. May be called twice."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def _read(self, give_up: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], max(0.0, give_up - time.monotonic()))
        if not ready:
            return False
        try:
            chunk = os.read(self._ours, 65_536)
        except OSError:  # how Linux tells that nobody has the other side open
            return False
        self.raw += chunk
        return bool(chunk)

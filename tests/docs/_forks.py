"""Processes that begin with everything imported: a page and each command on it without the seconds that this takes.

One process per test run imports all and is forked for each page; the page's process is forked again for its commands.
In: what to run, its environment and directory. Out: a `Fork`, whose output and exit code are a process's. Nothing is
measured in it and nothing is on a terminal. Elsewhere: commands on terminals (`tests.flows._warm`).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, Self

from tests.flows._warm import PRELOADED, exit_code

_REPOSITORY = Path(__file__).parents[2]
_LONGEST_REQUEST = 100_000


class Fork:
    """A forked process, seen from the one that asked for it."""

    def __init__(self, out: int, errors: int, status: int) -> None:
        self._streams = {out: bytearray(), errors: bytearray()}
        self._open = {out, errors}
        self._out, self._errors = out, errors
        self._status = os.fdopen(status, "rb")
        self.pid = int(self._status.readline())

    @property
    def output(self) -> bytes:
        return bytes(self._streams[self._out])

    @property
    def errors(self) -> bytes:
        return bytes(self._streams[self._errors])

    def read(self, timeout: float, until: bytes | None = None) -> bool:
        """Read until something was written, or to the end; whether it came to that."""
        give_up = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for descriptor in self._open:
                selector.register(descriptor, selectors.EVENT_READ)
            while self._open and (until is None or until not in self.output + self.errors):
                ready = selector.select(max(0.0, give_up - time.monotonic()))
                if not ready:
                    return False
                for key, _ in ready:
                    chunk = os.read(key.fd, 65_536)
                    self._streams[key.fd] += chunk
                    if not chunk:
                        selector.unregister(key.fd)
                        self._open.discard(key.fd)
        return until is None or until in self.output + self.errors

    def code(self) -> int:
        """The exit code, once it has ended."""
        return int(self._status.readline() or -1)  # nothing: it was killed

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def close(self) -> None:
        self._status.close()
        for descriptor in (self._out, self._errors):
            os.close(descriptor)


class Forks:
    """The way to a process that forks on demand."""

    def __init__(self, requests: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._requests, self._process = requests, process

    @classmethod
    def launch(cls, env: Mapping[str, str]) -> Self:
        """Start a process that imports everything and can run pages."""
        ours, theirs = socket.socketpair()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.docs._forks", str(theirs.fileno())],
            cwd=_REPOSITORY,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return cls(ours, process)

    @classmethod
    def here(cls) -> Self:
        """Fork this process, which has no threads yet, into one that runs commands."""
        from bullpen.cli import commands

        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            try:
                _serve(theirs, {"command": lambda words: commands.run(words)})
            finally:
                os._exit(0)
        theirs.close()
        return cls(ours)

    def start(self, what: str, *words: str, env: Mapping[str, str], cwd: Path) -> Fork:
        (out, theirs), (errors, their_errors), (status, told) = os.pipe(), os.pipe(), os.pipe()
        request = {"what": what, "words": words, "env": dict(env), "cwd": str(cwd)}
        descriptors = [theirs, their_errors, told]
        socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
        answer = self._requests.recv(1)
        for descriptor in descriptors:
            os.close(descriptor)
        assert answer == b"+", "the process that forks has died"
        return Fork(out, errors, status)

    def close(self) -> None:
        self._requests.close()  # it ends when nobody can ask any more
        if self._process is not None:
            self._process.wait(10)


# In the process that forks ------------------------------------------------------------------------------------------


def _serve(requests: socket.socket, functions: Mapping[str, Callable[[list[str]], int]]) -> None:
    assert threading.active_count() == 1, "threads do not survive a fork"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies; they tell their codes themselves
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 3)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _run(functions, *descriptors, **json.loads(request))
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"+")


def _run(
    functions: Mapping[str, Callable[[list[str]], int]], out: int, errors: int, told: int, *,
    what: str, words: list[str], env: dict[str, str], cwd: str,
) -> NoReturn:  # fmt: skip
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if what == "page":
            os.setsid()  # with its commands it can be killed as a whole
        os.write(told, f"{os.getpid()}\n".encode())
        os.set_inheritable(told, False)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        os.close(out)
        os.close(errors)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        code = exit_code(functions[what], words)
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of Python: other threads are waited for
        atexit._run_exitfuncs()
    finally:
        os.write(told, f"{code}\n".encode())
        os._exit(code)


def main() -> None:
    from bullpen.cli import commands
    from tests.docs import run_page

    for module in PRELOADED:
        importlib.import_module(module)
    commands.tree()
    _serve(socket.socket(fileno=int(sys.argv[1])), {"page": run_page.run})


if __name__ == "__main__":
    main()

"""Pages and their commands in forked processes, whose output is read.

One process per test run imports everything and is forked for each page; the page's process is forked again for its
commands. Elsewhere: the forking (`tests.forks`).
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.forks import Fork, ForkServer


class PipedFork:
    """A forked process and what it writes."""

    def __init__(self, fork: Fork, out: int, errors: int) -> None:
        self._fork = fork
        self._streams = {out: bytearray(), errors: bytearray()}
        self._open = {out, errors}
        self._out, self._errors = out, errors
        self.signal, self.code = fork.signal, fork.code

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

    def close(self) -> None:
        self._fork.close()
        for descriptor in (self._out, self._errors):
            os.close(descriptor)


class Forks:
    """The way to a process that forks pages, or a page that forks commands."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self.close = server.close

    @classmethod
    def launch(cls, env: Mapping[str, str]) -> Self:
        return cls(ForkServer.launch("tests.docs.run_page", env=env))

    @classmethod
    def here(cls) -> Self:
        return cls(ForkServer.here())

    def page(self, path: Path, *, env: Mapping[str, str], cwd: Path) -> PipedFork:
        """Run a page; with its commands it can be killed as a whole."""
        return self._start("tests.docs.run_page:run", str(path), env=env, cwd=cwd, session=True)

    def command(self, *words: str, env: Mapping[str, str], cwd: Path) -> PipedFork:
        """Run `bullpen …`."""
        return self._start("tests.forks:command", *words, env=env, cwd=cwd, session=False)

    def _start(self, call: str, *words: str, env: Mapping[str, str], cwd: Path, session: bool) -> PipedFork:
        (out, theirs), (errors, their_errors) = os.pipe(), os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        fork = self._server.start(
            call, *words, streams=(nothing, theirs, their_errors), env=env, cwd=cwd, session=session
        )
        return PipedFork(fork, out, errors)

"""Processes of the fault tests, forked from one that has imported everything: starting Python anew for each takes
longer than what it is there for.

In: an order for `chaos_process`. Out: a process that can be killed, and whose end can be waited for. When the tests
end, for whatever reason, so does it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Final

from tests.outbox import chaos_process

_context: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.outbox.chaos_process", "bullpen.plugins.sources.kurrent"])

PATIENCE_S: Final = 60.0


def _live(order: dict[str, Any], ready: Any) -> None:
    """In the process itself."""

    async def main() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        # Without tests there is nobody left to kill it.
        asyncio.get_running_loop().add_reader(parent.sentinel, os._exit, 1)
        await chaos_process.main(order, on_ready=ready.set)

    asyncio.run(main())


class Forked:
    """One process."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._ready = _context.Event()
        self._process: BaseProcess = _context.Process(target=_live, args=(order, self._ready), daemon=True)
        self._process.start()

    def until_ready(self) -> None:
        """Wait until it works."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._ready.wait(0.2):
            assert self._process.exitcode is None, f"ended with {self._process.exitcode} before it was ready"
            assert time.monotonic() < deadline, f"not ready after {PATIENCE_S} s"

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Wait for its end; returns the exit code, negative for the signal that killed it."""
        self._process.join(timeout)
        code = self._process.exitcode
        assert code is not None, f"still running after {timeout} s"
        return code

    def kill(self) -> None:
        """SIGKILL, and wait."""
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """As `kill`; may be called twice."""
        self.kill()

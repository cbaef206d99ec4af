"""Watch over worker processes: start them, start those again that die, pass on the wish to stop.

In: the arguments of the command that each process runs. Out: the exit code. Children are in process groups of their
own, so that Ctrl-C in a terminal reaches only us, and each holds one end of a pipe: when we die, they see it and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen.cli.code_changes import CodeChanges

logger = get_logger("bullpen.supervisor")

WRONG_COMMAND: Final = 2
"""A child that says this would say it again; it is not started a second time."""
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_RELOAD_WITHIN_S: Final = 2.0
"""How long running jobs may take to end when the code has changed."""
_HEALTHY_AFTER_S: Final = 30.0
"""A child that lived so long did start; its next death begins with the short pause again."""


def pause_after(deaths: int) -> float:
    """Seconds to wait after so many deaths in a row (from 1)."""
    return float(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(deaths - 1, 10)))


class Supervisor:
    """Runs `processes` children until a signal. With `changes` they are replaced when the code changes, and one that
    ends by itself waits for that."""

    def __init__(self, arguments: list[str], processes: int, changes: CodeChanges | None = None) -> None:
        self._command = [sys.executable, "-m", "bullpen.cli", *arguments]
        self._processes, self._changes = processes, changes
        self._replaced: set[asyncio.subprocess.Process] = set()
        self._changed = asyncio.Event()
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self._signals = 0
        self._stopping = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Until the first signal, then until all children have ended."""
        lifeline, self._our_end = os.pipe()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._keep_running(slot, lifeline)) for slot in range(1, self._processes + 1)
                ]
                if self._changes is not None:
                    following = group.create_task(self._follow(self._changes))
                    await asyncio.wait(running)
                    following.cancel()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            os.close(lifeline)
            os.close(self._our_end)
        logger.info("all worker processes have ended")
        return self._exit_code

    async def _keep_running(self, slot: int, lifeline: int) -> None:
        deaths = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            child = await asyncio.create_subprocess_exec(
                *(*self._command, "--slot", str(slot), "--lifeline", str(lifeline)),
                pass_fds=(lifeline,),
                process_group=0,
            )
            self._children[slot] = child
            logger.info("worker process %d is pid %d", slot, child.pid)
            if self._stopping.is_set():  # the signal came while it was being started
                self._send(child, signal.SIGTERM)
            code = await child.wait()
            del self._children[slot]
            if self._stopping.is_set():
                return
            if self._changes is not None:
                if child not in self._replaced:
                    logger.error(
                        "the worker process ended with %s; it starts again when the code changes", describe(code)
                    )
                    await self._wait_for_change()
                self._replaced.discard(child)
                continue
            if code == WRONG_COMMAND:
                self._exit_code = code
                self._stop()
                return
            deaths = 1 if time.monotonic() - started > _HEALTHY_AFTER_S else deaths + 1
            await self._pause(slot, child.pid, code, deaths)

    async def _pause(self, slot: int, pid: int, code: int, deaths: int) -> None:
        pause_s = pause_after(deaths)
        logger.error(
            "worker process %d (pid %d) ended with %s; starting it again in %g s", slot, pid, describe(code), pause_s
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()

    async def _follow(self, changes: CodeChanges) -> None:
        async for names in changes.follow():
            others = f" and {len(names) - 3} more" if len(names) > 3 else ""
            logger.info("%s%s changed; starting again", ", ".join(names[:3]), others)
            self._changed.set()
            leaving = list(self._children.values())
            self._replaced.update(leaving)
            for child in leaving:
                self._send(child, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELOAD_WITHIN_S):
                    await asyncio.gather(*(child.wait() for child in leaving))
            for child in leaving:
                self._send(child, signal.SIGTERM)  # running jobs are given back, and run by the new code

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        waits = [asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(self._stopping.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals += 1
        match self._signals:
            case 1:
                logger.info("%s: worker processes finish their jobs; a second signal hurries them", number.name)
                self._stop()
            case 2:
                logger.warning("%s again: running jobs are given back; another signal kills", number.name)
                for child in self._children.values():
                    self._send(child, signal.SIGTERM)
            case _:
                logger.warning(
                    "%s once more: worker processes are killed; the check for stalled jobs gives their running jobs "
                    "back when their locks have run out",
                    number.name,
                )
                self._exit_code = 128 + number
                for child in self._children.values():
                    self._send(child, signal.SIGKILL)

    def _stop(self) -> None:
        self._stopping.set()
        for child in self._children.values():
            self._send(child, signal.SIGTERM)

    @staticmethod
    def _send(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(number)


def describe(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"

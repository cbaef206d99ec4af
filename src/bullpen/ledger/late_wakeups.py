"""Late wake-ups of loops that wait for rows: noted in the ledger, where an operator's command sees them.

In: the telemetry of this process. Out: one checkpoint per loop, with how many there were and when the last one was.
Elsewhere: counting (`bullpen._kernel.telemetry`), those of workers (`bullpen.queue.late_wakeups`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError
from bullpen.ledger.ledger import Ledger
from bullpen.ledger.messages import SqlMessages

__all__ = ["late_wakeups_in", "noting_late_wakeups"]

logger = get_logger("bullpen.ledger")

_PREFIX: Final = "late-wakeups:"


@asynccontextmanager
async def noting_late_wakeups(ledger: Ledger, *loops: str) -> AsyncIterator[None]:
    """While this is entered, late wake-ups of these loops are noted. They are rare; what cannot be written is
    forgotten."""
    loop, pending = asyncio.get_running_loop(), Counter[str]()
    wake = asyncio.Event()

    def count(where: str, more: int) -> None:
        pending[where] += more
        wake.set()

    def listen(event: str, fields: dict[str, Any]) -> None:
        if event == "wakeup.late" and fields["where"] in loops:
            loop.call_soon_threadsafe(count, fields["where"], fields["count"])

    async def write_all() -> None:
        for where in list(pending):
            await _note(ledger, where, pending.pop(where))

    async def write() -> None:
        while True:
            await wake.wait()
            wake.clear()
            await write_all()

    unsubscribe = telemetry.subscribe(listen)
    writing = loop.create_task(write(), name=f"bullpen late wake-ups of {', '.join(loops)}")
    try:
        yield
    finally:
        unsubscribe()
        writing.cancel()
        await asyncio.wait([writing])
        await write_all()


async def _note(ledger: Ledger, where: str, more: int) -> None:
    name = f"{_PREFIX}{where}"
    try:
        before = (await ledger.checkpoints.read(name) or "0").split()[0]
        total = more + (int(before) if before.isdecimal() else 0)
        await SqlMessages(ledger.database).note(ledger.checkpoints, name, f"{total} {{now}}")
    except BullpenError as error:
        logger.debug("a late wake-up of the %s was not recorded: %s", where, error)


async def late_wakeups_in(ledger: Ledger) -> dict[str, str]:
    """The notes, by loop: how many there were, and the instant of the last one in ms since 1970."""
    stored = await ledger.checkpoints.list(_PREFIX)
    return {name.removeprefix(_PREFIX): note for name, note in stored.items()}

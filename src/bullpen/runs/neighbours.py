"""Notice that another application, with a ledger of its own, uses the same queue of runs.

Each worker and maintenance writes the identity of its ledger beside the queue when it starts, and reads who else did.
Runs are safe all the same, because each job names its ledger (`processor`); but every job that comes to the wrong
application is late, and both see each other's dead letters. So it is told, once per ledger.
"""

from __future__ import annotations

import logging
from typing import Final

from bullpen._kernel.scrub import summary
from bullpen.errors import BullpenError
from bullpen.ledger import TransactionManager
from bullpen.queue import Queue
from bullpen.runs._logs import log

__all__ = ["Neighbours"]

_KIND: Final = "ledgers"


class Neighbours:
    """The ledgers that used the queue of runs within a day."""

    def __init__(self, transactions: TransactionManager, queue: Queue) -> None:
        self._transactions, self._queue = transactions, queue
        self._told = set[str]()

    async def look(self, *, unless_new: bool = False) -> None:
        """Write down that this ledger is used, and warn of others that were not there before."""
        own = await self._transactions.ledger_id()
        try:
            found = await self._queue.note_user(_KIND, own, unless_new=unless_new)
        except BullpenError as error:
            # It is a hint: whoever needs the server notices by himself that it is away.
            text = "Could not find out which other ledgers use the queue of runs"
            log(logging.INFO, text, error=summary(str(error)))
            return
        others = [one for one in found if one not in self._told]
        self._told.update(others)
        if others:
            log(logging.WARNING, f"Queue {self._queue.name!r} has runs of ledger {own} and, within a day, of "
                f"{', '.join(others)}. Each run reaches its own application late, and dead letters are mixed. Give "
                "each application a prefix of its own (BULLPEN_PREFIX)", operation="RUNS_SHARED")  # fmt: skip

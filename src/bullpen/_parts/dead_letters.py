"""All stores of dead letters that an application can reach, as one console.

In: the server of its queues, and its ledger if there is one. Out: a console over every dead-letter queue that exists,
over the outbox, and over the stores that the program added. Elsewhere: the console (`bullpen.ops.dead_letters`).
"""

from __future__ import annotations

from collections.abc import Iterable

from bullpen.errors import LedgerNotReady
from bullpen.ledger import Ledger
from bullpen.ops.dead_letters import DeadLetterConsole
from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.ports.dead_letters import DeadLetterStore
from bullpen.queue import Connection, Queue
from bullpen.queue.browse import find_queues
from bullpen.queue.dead_letter_stores import DeadLetterQueueStore

__all__ = ["make_console"]

_SUFFIX = "-dlq"


async def make_console(
    connection: Connection,
    prefix: str,
    ledger: Ledger | None,
    added: Iterable[DeadLetterStore],
    tenant_id: str | None,
) -> DeadLetterConsole:
    """Everything that is there now."""
    names = await find_queues(connection, prefix)
    stores: list[DeadLetterStore] = [
        DeadLetterQueueStore(Queue(name.removesuffix(_SUFFIX), connection=connection, prefix=prefix))
        for name in names
        if name.endswith(_SUFFIX)
    ]
    if ledger is not None:
        try:
            await ledger.check(connections=1)
        except LedgerNotReady:
            pass  # never used: there is nothing dead in it
        else:
            stores.append(OutboxDeadLetters(ledger.outbox, tenant_id=tenant_id))
    return DeadLetterConsole([*stores, *added], tenant_id=tenant_id)

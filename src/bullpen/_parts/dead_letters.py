"""All stores of dead letters that an application can reach, as one console.

In: the server of its queues, its ledger and its messages if there are any. Out: a console over every dead-letter queue
that exists, over the outbox, and over the stores that the program added; what is done is written to the ledger's audit
table, without a ledger to a stream. Work whose content is a row of the ledger (runs, messages) may go back, but its
payload cannot be edited here: it only names the row. Elsewhere: the console (`bullpen.ops.dead_letters`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from bullpen._kernel.logs import get_logger
from bullpen.errors import LedgerNotReady, MissingExtra, NotConfigured
from bullpen.ops.dead_letters import DeadLetterConsole, Found
from bullpen.ports.dead_letters import DeadLetterStore, FixedDeadLetters
from bullpen.queue import Connection, Queue
from bullpen.queue.audit import AuditStreams
from bullpen.queue.browse import find_queues
from bullpen.queue.dead_letter_stores import DeadLetterQueueStore
from bullpen.settings import Settings

if TYPE_CHECKING:  # the ledger needs an extra, which whoever has only queues need not install
    from bullpen.ledger import Ledger
    from bullpen.messages import Messages

__all__ = ["LetterAudit", "installed_ledger", "make_console", "message_letters", "ready_ledger"]

logger = get_logger("bullpen.dead_letters")

_SUFFIX: Final = "-dlq"
RUNS_DEAD_LETTERS: Final = "workflow-execution-dlq"
"""`bullpen.runs.DEAD_LETTER_QUEUE`, which cannot be imported without the ledger's extra."""
OUTBOX_STORE: Final = "integration_outbox"
"""`OutboxDeadLetters.name_of_store`, for the same reason."""
OF_RUNS: Final = "a run's payload is in its row, which never changes; submit a new run, then discard this letter"
OF_MESSAGES: Final = (
    "an order only names its message; mend the recipient or the template (bullpen messages), then redrive it as it is"
)


async def make_console(
    connection: Connection | None,
    prefix: str,
    ledger: Ledger | None,
    added: Iterable[DeadLetterStore],
    tenant_id: str | None,
    *,
    message_queue: str,
) -> DeadLetterConsole:
    """Everything that is there now. `message_queue` carries the orders of scheduled messages. No connection: queues are
    not used."""
    fixed = {RUNS_DEAD_LETTERS: OF_RUNS, f"{message_queue}{_SUFFIX}": OF_MESSAGES}
    stores: list[DeadLetterStore] = []
    for name in [] if connection is None else await find_queues(connection, prefix):
        if name.endswith(_SUFFIX):
            store = DeadLetterQueueStore(Queue(name.removesuffix(_SUFFIX), connection=connection, prefix=prefix))
            stores.append(FixedDeadLetters(store, fixed[name]) if name in fixed else store)
    ledger = await ready_ledger(ledger)
    if ledger is not None:
        from bullpen.outbox.dead_letters import OutboxDeadLetters

        stores.append(OutboxDeadLetters(ledger.outbox, tenant_id=tenant_id))
    audit = LetterAudit(ledger, None if connection is None else AuditStreams(connection, prefix))
    return DeadLetterConsole([*stores, *added], tenant_id=tenant_id, audit=audit)


def installed_ledger(make: Callable[[], Ledger]) -> Ledger | None:
    """The ledger, unless this machine lacks the packages for it: the letters of queues have nothing to do with it."""
    try:
        return make()
    except MissingExtra as error:
        logger.warning("dead letters of the ledger are not shown, and its audit table is not written: %s", error)
        return None


async def ready_ledger(ledger: Ledger | None) -> Ledger | None:
    """The ledger, or None when it was never used: there is nothing dead in it, and no table to write to."""
    if ledger is not None:
        try:
            await ledger.check(connections=1)
        except LedgerNotReady:
            return None
    return ledger


def message_letters(settings: Settings, messages: Messages | None) -> list[DeadLetterStore]:
    """Orders of scheduled messages that failed, where they are not in the server of the queues."""
    if messages is None or settings.messages.transport != "rabbitmq":
        return []
    transport = messages.messaging.transport  # type: ignore[attr-defined]  # every client that settings make has one
    return [FixedDeadLetters(transport.dead_letters(settings.rabbitmq.queue_name), OF_MESSAGES)]


class LetterAudit:
    """Writes down what is done to letters that are no rows of the ledger: in its audit table, else in streams."""

    def __init__(self, ledger: Ledger | None, streams: AuditStreams | None) -> None:
        self._ledger, self._streams = ledger, streams

    async def __call__(self, action: str, found: Found, by: str, detail: Mapping[str, Any]) -> None:
        letter = found.letter
        if found.store == OUTBOX_STORE:
            return  # the outbox writes its own entry, in the transaction of the deed
        told = {"source": letter.source, "id": letter.message_id, "fingerprint": found.fingerprint, **detail}
        await self.write(found.store, by, action, f"{found.store}/{letter.id}", letter.tenant_id, told)

    async def write(
        self, store: str, by: str, action: str, subject: str, tenant_id: str | None, detail: Mapping[str, Any]
    ) -> None:
        """Add one entry for a store of letters; returns when it is stored."""
        action = f"dead_letter.{action}"
        if self._ledger is not None:
            await self._ledger.audit.write(by, action, subject, tenant_id=tenant_id, detail=detail)
        elif self._streams is None:
            raise NotConfigured(
                "what is done to dead letters must be written down, and neither a database nor a Redis is configured; "
                "set BULLPEN_DATABASE_URL or BULLPEN_REDIS_URL"
            )
        else:
            await self._streams.write(store, by, action, subject, tenant_id=tenant_id, detail=detail)

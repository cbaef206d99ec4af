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
from bullpen.errors import LedgerNotReady, MissingExtra
from bullpen.ops.dead_letters import DeadLetterConsole
from bullpen.ports.dead_letters import DeadLetter, DeadLetterStore, FixedDeadLetters, fingerprint
from bullpen.queue import Queue
from bullpen.queue.audit import AuditStreams
from bullpen.queue.browse import find_queues
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.wiring.audit import AuditTrail

if TYPE_CHECKING:  # the ledger needs an extra, which whoever has only queues need not install
    from bullpen.ledger import Ledger
    from bullpen.messages import Messages

__all__ = ["DeadLetterAudit", "installed_ledger", "make_console", "message_dead_letters", "ready_ledger"]

logger = get_logger("bullpen.dead_letters")

_SUFFIX: Final = "-dlq"
RUNS_DEAD_LETTERS: Final = "workflow-execution-dlq"
"""`bullpen.runs.DEAD_LETTER_QUEUE`, which cannot be imported without the ledger's extra."""
RUN_QUEUES: Final = "workflow-execution."
"""How queues of handlers with a name begin, unless they name another."""
OUTBOX_STORE: Final = "integration_outbox"
"""`OutboxDeadLetters.name_of_store`, for the same reason."""
OF_RUNS: Final = "a run's payload is in its row, which never changes; submit a new run, then discard this dead letter"
OF_MESSAGES: Final = (
    "the dead letter only names its message; correct the recipient or the template (bullpen messages), then redrive it"
)


async def make_console(
    connection: Connection | None,
    prefix: str,
    ledger: Ledger | None,
    added: Iterable[DeadLetterStore],
    tenant_id: str | None,
    *,
    message_queue: str,
    run_queues: Iterable[str] = (),
    names: Iterable[str] | None = None,
) -> DeadLetterConsole:
    """Everything that is there now. `message_queue` carries the orders of scheduled messages, `run_queues` are those of
    handlers that name one. `names` are the dead-letter queues, where they are known: finding them walks over all keys.
    No connection: queues are not used."""
    fixed = {f"{message_queue}{_SUFFIX}": OF_MESSAGES, **{f"{each}{_SUFFIX}": OF_RUNS for each in run_queues}}
    stores: list[DeadLetterStore] = []
    if names is None:
        names = [] if connection is None else await find_queues(connection, prefix)
    for name in names:
        if name.endswith(_SUFFIX):
            store = Queue(name.removesuffix(_SUFFIX), connection=connection, prefix=prefix).dead_letters
            why = OF_RUNS if name == RUNS_DEAD_LETTERS or name.startswith(RUN_QUEUES) else fixed.get(name)
            stores.append(store if why is None else FixedDeadLetters(store, why))
    ledger = await ready_ledger(ledger)
    if ledger is not None:
        from bullpen.outbox.dead_letters import OutboxDeadLetters

        stores.append(OutboxDeadLetters(ledger.outbox, tenant_id=tenant_id))
    audit = DeadLetterAudit(AuditTrail(ledger, None if connection is None else AuditStreams(connection, prefix)))
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


def message_dead_letters(settings: Settings, messages: Messages | None) -> list[DeadLetterStore]:
    """Orders of scheduled messages that failed, where they are not in the server of the queues."""
    if messages is None or settings.messages.transport != "rabbitmq":
        return []
    transport = messages.messaging.transport  # type: ignore[attr-defined]  # every client that settings make has one
    return [FixedDeadLetters(transport.dead_letters(settings.rabbitmq.queue_name), OF_MESSAGES)]


class DeadLetterAudit:
    """Writes down what is done to letters that are no rows of the ledger."""

    def __init__(self, trail: AuditTrail) -> None:
        self._trail = trail

    async def __call__(
        self, action: str, store: str, letter: DeadLetter | None, by: str, detail: Mapping[str, Any]
    ) -> None:
        if store == OUTBOX_STORE:
            return  # the outbox writes its own entries, in the transaction of the deed
        told: dict[str, Any] = dict(detail)
        if letter is not None:
            told = {"source": letter.source, "id": letter.message_id, "fingerprint": fingerprint(letter), **detail}
        subject, tenant = (
            (store, detail.get("tenant_id")) if letter is None else (f"{store}/{letter.id}", letter.tenant_id)
        )
        await self._trail.write(store, by, f"dead_letter.{action}", subject, tenant, told)

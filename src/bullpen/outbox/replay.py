"""Send again what was sent: a target lost it, or was restored from an older copy.

In: which rows, and a label. Out: copies that are delivered like any message. History is not rewritten. Elsewhere: the
copies themselves (`bullpen.ledger`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final, TypedDict

from bullpen.errors import require
from bullpen.ledger import OutboxRepository, OutboxStatus
from bullpen.outbox._logs import log

_SOURCE: Final = "outbox-replay"
_PAGE: Final = 200


class ReplayArguments(TypedDict, total=False):
    """What `Outbox.replay` takes besides destination, actor and label."""

    since: datetime | None
    before: datetime | None
    tenant_id: str | None
    new_key: bool
    limit: int | None
    status: OutboxStatus
    on_progress: Callable[[int], None] | None


async def replay(
    store: OutboxRepository,
    *,
    by: str,
    label: str,
    integration_type: str,
    since: datetime | None = None,
    before: datetime | None = None,
    tenant_id: str | None = None,
    new_key: bool = False,
    limit: int | None = None,
    status: OutboxStatus = OutboxStatus.SENT,
    on_progress: Callable[[int], None] | None = None,
) -> int:
    """Send all SENT rows of a destination again that were stored in a period, or all DEAD ones. Returns how many copies
    were made.

    A copy has the key of its original, so that a target which still knows it takes no harm; with `new_key` it has one
    of its own. The same label again copies nothing that was copied before: a replay that broke off may be repeated.
    """
    require("label", label.isprintable() and 0 < len(label) <= 40, "1 to 40 printable characters", label)
    require("status", status in (OutboxStatus.SENT, OutboxStatus.DEAD), "SENT or DEAD", status)
    total, looked, after_seq = 0, 0, None
    while limit is None or looked < limit:
        rows = await store.find(
            status=status,
            integration_type=integration_type,
            since=since,
            before=before,
            tenant_id=tenant_id,
            after_seq=after_seq,
            limit=_PAGE if limit is None else min(_PAGE, limit - looked),
        )
        if not rows:
            break
        after_seq, looked = rows[-1].seq, looked + len(rows)
        # A copy that was sent meanwhile is no history: it would be copied for ever.
        originals = [row.id for row in rows if "replayOf" not in row.headers]
        copied = await store.replay(originals, by=by, label=label, new_key=new_key, tenant_id=tenant_id)
        total += len(copied)
        log("OUTBOX_REPLAY", "SUCCESS", source=_SOURCE, integrationType=integration_type, count=len(copied))
        if on_progress is not None:
            on_progress(total)
    return total

"""`/chains/{id}`: from the event to the receipt. All that carries one correlation id, in the order of time.

Events of the ledger's own store, rows of the outbox, attempts with their receipts, transitions of entities. A visitor
of some tenants sees theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from bullpen._kernel.command_line import command_line
from bullpen._kernel.scrub import summary
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.reads.ledger import holds_up, ledger_of, ms_of, read
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.status import WorkStatus, attempt_status, counted, duration_text, outbox_status

if TYPE_CHECKING:
    from bullpen.ledger import Ledger
    from bullpen.ledger.looks import Chain, ChainAttempt, ChainMove, ChainRow

_MOST: Final = 200
_TO_LEAVE: Final = ("PENDING", "FAILED")


class ChainStep(msgspec.Struct, rename="camel", frozen=True):
    """One thing that happened, or will."""

    at_ms: int
    kind: str
    """`event`, `row`, `attempt`, `move` or `due`."""
    word: str
    """What it means, in the common words."""
    label: str
    title: str
    detail: str = ""
    error: str = ""
    url: str = ""
    after_ms: int | None = None
    """Since the step before."""


class ChainView(msgspec.Struct, rename="camel", frozen=True):
    """One chain."""

    id: str
    says: str
    """How it stands, in one sentence."""
    word: str
    steps: tuple[ChainStep, ...]
    rows: int
    entities: tuple[tuple[str, str], ...]
    """Entities that it moved: workflow and urn."""
    is_cut: bool


async def chain(context: Context) -> Page:
    """Everything of one correlation id."""
    # What is no UTF-8 is nothing that a ledger holds.
    wanted, ledger = context.path["id"][:200].encode("utf-8", "replace").decode(), await ledger_of(context)
    parts = await read(context, ledger.parts())
    found = await read(context, ledger.looks.chain(wanted, parts=parts, tenant_id=context.tenant, limit=_MOST))
    if not found.rows and not found.moves:
        raise PageProblem(404, "Nothing in the ledger has this correlation id.", hint=command_line("outbox list"))
    now_ms = (await context.desk.snapshot()).at_ms if not context.principal.tenants else 0
    steps = _steps(context, found, now_ms)
    deliveries = [row for row in found.rows if row.integration_type != ledger.dead_letter_type]
    notes = await _notes(context, ledger, deliveries)
    says, word = _standing(deliveries, found.moves, notes)
    entities = tuple(dict.fromkeys((move.workflow, move.urn) for move in found.moves))
    view = ChainView(wanted, says, word.value, steps, len(deliveries), entities, found.is_cut)
    return Page("chain.html", view, f"Chain {wanted}", "outbox", is_polled=True)


async def _notes(context: Context, ledger: Ledger, rows: Sequence[ChainRow]) -> dict[str, str]:
    """Why the destinations of rows that did not leave take none."""
    to_leave = {row.integration_type for row in rows if row.status in _TO_LEAVE}
    if not to_leave:
        return {}
    troubled = await read(context, ledger.destinations.troubled())
    return {name: note for name in sorted(to_leave) if (note := holds_up(troubled.get(name)))}


def _standing(rows: Sequence[ChainRow], moves: Sequence[ChainMove], notes: Mapping[str, str]) -> tuple[str, WorkStatus]:
    """The worst first."""
    words = [outbox_status(row.status) for row in rows]
    failed = [move for move in moves if move.kind == "failed"]
    if dead := words.count(WorkStatus.DEAD):
        return f"{counted(dead, 'delivery', 'deliveries')} of {len(words)} failed finally.", WorkStatus.DEAD
    if failed:
        return f"An action of {failed[-1].workflow} failed; its entity needs attention.", WorkStatus.DEAD
    if notes:
        held = sum(row.status in _TO_LEAVE and row.integration_type in notes for row in rows)
        return f"{counted(held, 'delivery waits', 'deliveries wait')}. {' '.join(notes.values())}", WorkStatus.BLOCKED
    if retrying := words.count(WorkStatus.RETRYING):
        return f"{counted(retrying, 'delivery is', 'deliveries are')} tried again.", WorkStatus.RETRYING
    if waiting := sum(word in (WorkStatus.WAITING, WorkStatus.ACTIVE) for word in words):
        return f"{counted(waiting, 'delivery is', 'deliveries are')} on the way.", WorkStatus.ACTIVE
    if words:
        return f"{counted(len(words), 'delivery', 'deliveries')} arrived.", WorkStatus.DONE
    return f"{counted(len(moves), 'transition')} and no delivery.", WorkStatus.DONE


def _steps(context: Context, found: Chain, now_ms: int) -> tuple[ChainStep, ...]:
    rows = {row.id: row for row in found.rows}
    steps = [
        ChainStep(
            ms_of(event.recorded_at),
            *("event", WorkStatus.DONE.value, "event"),
            event.event_type,
            f"version {event.version} of {event.stream_id}",
        )
        for event in found.events
    ]
    steps += [_row_step(context, row) for row in found.rows]
    steps += [_attempt_step(context, each, rows[each.outbox_id]) for each in found.attempts]
    steps += [_move_step(context, move) for move in found.moves]
    for row in found.rows:
        if row.status in _TO_LEAVE and ms_of(row.due_at) > max(now_ms, ms_of(row.created_at)):
            title = f"{row.integration_type} is tried again" if row.attempts else f"{row.integration_type} is due"
            url = context.url("outbox", row.id)
            steps.append(ChainStep(ms_of(row.due_at), "due", WorkStatus.DELAYED.value, "due", title, url=url))
    steps.sort(key=lambda step: (step.at_ms, _ORDER[step.kind]))
    return tuple(
        msgspec.structs.replace(step, after_ms=step.at_ms - steps[place - 1].at_ms) if place else step
        for place, step in enumerate(steps)
    )


_ORDER: Final = {"event": 0, "move": 1, "row": 2, "attempt": 3, "due": 4}


def _row_step(context: Context, row: ChainRow) -> ChainStep:
    word = outbox_status(row.status)
    return ChainStep(
        ms_of(row.created_at),
        *("row", word.value, row.status.lower()),
        f"{row.event_type} for {row.integration_type} stored",
        f"source {row.source_stream_id} {row.source_event_id}"
        + (f" · tenant {row.tenant_id}" if row.tenant_id else ""),
        url=context.url("outbox", row.id),
    )


def _attempt_step(context: Context, each: ChainAttempt, row: ChainRow) -> ChainStep:
    word = attempt_status(each.outcome)
    facts = [f"by {each.worker}"] if each.worker else []
    if each.started_at is not None:
        facts.append(f"took {duration_text(ms_of(each.finished_at) - ms_of(each.started_at))}")
    if each.receipt and context.payloads:
        facts.append(f"receipt {summary(each.receipt)}")
    error = " ".join(part for part in (each.error_code or "", summary(each.error) if each.error else "") if part)
    return ChainStep(
        ms_of(each.finished_at),
        *("attempt", word.value, each.outcome.lower()),
        f"attempt {each.number} at {row.integration_type}",
        " · ".join(facts),
        error if context.payloads else each.error_code or "",
        context.url("outbox", row.id),
    )


def _move_step(context: Context, move: ChainMove) -> ChainStep:
    facts = [f"by job {move.job_id}"] if move.job_id else []
    if move.attempt:
        facts.append(f"attempt {move.attempt}")
    if move.user_id:
        facts.append(f"user {move.user_id}")
    word = WorkStatus.DEAD if move.kind == "failed" else WorkStatus.DONE
    return ChainStep(
        ms_of(move.at),
        *("move", word.value, "transition" if move.kind == "event" else move.kind),
        f"{move.urn}: {move.source} → {move.target}" + (f" on {move.event}" if move.event else ""),
        " · ".join([f"workflow {move.workflow}", *facts]),
        summary(move.reason) if move.reason and context.payloads else "",
        context.url("workflows", move.workflow, move.urn),
    )


ROUTES = (PageRoute("/chains/{id}", chain, for_tenants=True, view=ChainView),)

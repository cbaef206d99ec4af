"""A queue's dead letters in the words of all stores, and back. No input or output here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bullpen.ports.dead_letters import DeadLetterRecord
from bullpen.queue.dead_letters import operations as dead_letter


def as_letter(found: dead_letter.DeadLetter) -> DeadLetterRecord:
    """A dead letter of a queue in the words of the port."""
    tenant = found.entry.get("tenantId")
    return DeadLetterRecord(
        id=found.id,
        source=found.queue,
        message_id=found.job_id,
        name=found.job_name,
        data=found.data,
        error_message=found.error_message,
        error_stack=found.error_stack,
        cause=found.cause,
        failed_at=found.failed_at,
        attempts_made=found.attempts_made,
        tenant_id=tenant if isinstance(tenant, str) else None,
        entry=found.entry,
    )


def complete_entry(letter: DeadLetterRecord) -> dict[str, Any]:
    """The entry with at least what a redrive needs: one that was made elsewhere may know other fields only."""
    known: Mapping[str, Any] = {
        "originalJobId": letter.message_id,
        "originalJobName": letter.name or "unknown",
        "originalQueue": letter.source,
        "originalData": letter.data,
        "error": {"message": letter.error_message, "stack": letter.error_stack},
        "failedAt": letter.failed_at,
        "attemptsMade": letter.attempts_made,
        "attemptsStarted": starts_of(letter),
    }
    perhaps = {"cause": letter.cause, "tenantId": letter.tenant_id}
    return {**known, **{name: value for name, value in perhaps.items() if value is not None}, **letter.entry}


def starts_of(letter: DeadLetterRecord) -> int:
    """How often the work had been started, by the entry, by the end of its id, or by its attempts."""
    told = letter.entry.get("attemptsStarted")
    if isinstance(told, int) and told >= 0:
        return told
    last = letter.id.rpartition("-")[2]
    return int(last) if last.isdecimal() else max(1, letter.attempts_made)

"""Finally failed work, wherever it is kept: a queue, a topic, a ledger row, memory.

In: ids of entries. Out: the same record and the same six operations for every store, so that one console, one command
and one runbook serve all of them; and a seventh, sending back with another payload, for stores that allow it.
Elsewhere: deciding that a failure is final (`bullpen._kernel.outcome`), writing the entry (whoever settles the work),
changing a payload (`edits`), who may look (`bullpen.ops`).
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from bullpen.errors import DeadLetterChanged
from bullpen.ports.edits import Edit, payload_fingerprint

__all__ = [
    "DeadLetterRecord",
    "DeadLetterStore",
    "EditableDeadLetters",
    "FixedDeadLetters",
    "check_unchanged",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRecord:
    """One finally failed piece of work with all its context."""

    id: str
    """Of the entry. The same failure has the same id, however often it was written."""
    source: str
    """Where the work came from: queue, topic, integration type."""
    message_id: str
    """Identity of the work itself, kept over retries and redrive."""
    name: str = ""
    """Kind of work: job name, event type."""
    data: Any = None
    """The payload as it was received."""
    error_message: str = ""
    error_stack: str | None = None
    cause: str | None = None
    """Why the failure was final, see `bullpen._kernel.outcome.Cause`; None when somebody else decided it."""
    failed_at: str = ""
    """ISO 8601, UTC."""
    attempts_made: int = 0
    tenant_id: str | None = None
    entry: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All stored fields, under their wire names."""


class DeadLetterStore(Protocol):
    """The dead letters of one source.

    Redriving sends the work back with its identity kept and its attempts reset, then removes the entry. It may be
    repeated: after a crash in between, the work may be delivered twice with the same identity, never lost; once the
    entry is gone, DeadLetterNotFound is raised and nothing is sent.
    """

    @property
    def name(self) -> str:
        """The queue, topic or table that holds the entries."""
        ...

    async def depth(self) -> int:
        """How many wait for somebody."""
        ...

    async def put(self, letter: DeadLetterRecord) -> None:
        """Write an entry; returns when the store has it for certain. Writing it again changes nothing."""
        ...

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetterRecord]:
        """Oldest first, from `start`."""
        ...

    async def get(self, entry_id: str) -> DeadLetterRecord | None:
        """One entry, or None."""
        ...

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        """Send one back; returns the identity of the work. `by` tells who asked, and is recorded."""
        ...

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        """Delete one for good. False when there was none. `by` is recorded where the store keeps such records."""
        ...


@runtime_checkable
class EditableDeadLetters(Protocol):
    """A store whose letters may go back with another payload; not every store is one.

    As with redriving, the identity of the work is kept, and the entry is gone afterwards: of two that edit the same
    letter one is told DeadLetterNotFound. What is kept of the edit is its note, never the earlier payload.
    """

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        """Send one back with `edit.data`; returns the identity of the work.

        Raises DeadLetterNotFound; DeadLetterChanged when the stored payload is not the one that was edited;
        DeadLetterNotEditable where this one must stay as it is.
        """
        ...


def check_unchanged(store: str, letter: DeadLetterRecord, edit: Edit) -> None:
    """Raises DeadLetterChanged unless the letter holds the payload that the edit was made from."""
    if payload_fingerprint(letter.data) != edit.before:
        raise DeadLetterChanged(store, letter.id)


class FixedDeadLetters:
    """A store that could change payloads but must not: its letters go back as they are, or not at all."""

    def __init__(self, store: DeadLetterStore, reason: str) -> None:
        """`reason` says why, and what to do instead."""
        self._store, self.reason = store, reason

    @property
    def name(self) -> str:
        return self._store.name

    async def depth(self) -> int:
        return await self._store.depth()

    async def put(self, letter: DeadLetterRecord) -> None:
        await self._store.put(letter)

    async def list(self, *, start: int = 0, count: int = 100) -> builtins.list[DeadLetterRecord]:
        return await self._store.list(start=start, count=count)

    async def get(self, entry_id: str) -> DeadLetterRecord | None:
        return await self._store.get(entry_id)

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        return await self._store.redrive(entry_id, by=by)

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        return await self._store.discard(entry_id, by=by)

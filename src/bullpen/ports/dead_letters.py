"""Finally failed work, wherever it is kept: a queue, a topic, a ledger row, memory.

In: ids of entries. Out: the same record and the same six operations for every store, so that one console, one command
and one runbook serve all of them. Elsewhere: deciding that a failure is final (`bullpen._kernel.outcome`), writing the
entry (whoever settles the work), who may look (`bullpen.ops`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from bullpen.errors import BullpenError

__all__ = ["DeadLetter", "DeadLetterNotFound", "DeadLetterStore"]


class DeadLetterNotFound(BullpenError):
    """No entry has this id: it was redriven or discarded already, or never existed. Nothing was changed."""

    def __init__(self, store: str, entry_id: str) -> None:
        super().__init__(
            f"dead letter {entry_id!r} is not in {store!r}; it may have been redriven or discarded already"
        )
        self.store, self.entry_id = store, entry_id


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
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

    async def put(self, letter: DeadLetter) -> None:
        """Write an entry; returns when the store has it for certain. Writing it again changes nothing."""
        ...

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetter]:
        """Oldest first, from `start`."""
        ...

    async def get(self, entry_id: str) -> DeadLetter | None:
        """One entry, or None."""
        ...

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        """Send one back; returns the identity of the work. `by` tells who asked, and is recorded."""
        ...

    async def discard(self, entry_id: str) -> bool:
        """Delete one for good. False when there was none."""
        ...

"""Several events of one kind for one entity, handled in one transition.

In: their payloads. Out: a sequence for actions, which may refuse single ones. Elsewhere: gathering them (`bindings`),
applying them (`engine`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar, overload

from bullpen.errors import InvalidOption

__all__ = ["Batch"]

P_co = TypeVar("P_co", covariant=True)


class Batch(Sequence[P_co], Generic[P_co]):
    """The payloads of events that are applied together. `fail` takes one of them out: it is tried again, or dies, by
    itself, and the others are applied."""

    def __init__(self, payloads: Sequence[P_co]) -> None:
        self._payloads = tuple(payloads)
        self.failures: dict[int, Exception] = {}

    @overload
    def __getitem__(self, index: int) -> P_co: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[P_co]: ...

    def __getitem__(self, index: int | slice) -> P_co | Sequence[P_co]:
        return self._payloads[index]

    def __len__(self) -> int:
        return len(self._payloads)

    def __iter__(self) -> Iterator[P_co]:
        return iter(self._payloads)

    def __repr__(self) -> str:
        return f"Batch({list(self._payloads)!r})"

    def fail(self, index: int, error: Exception) -> None:
        """Refuse one event; `error` decides about its retry as if its own handler had raised it."""
        if not 0 <= index < len(self._payloads):
            raise InvalidOption("index", f"0 to {len(self._payloads) - 1}", index)
        self.failures[index] = error

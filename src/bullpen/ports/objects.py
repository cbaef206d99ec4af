"""What keeps payloads that are too large for a job: the port of object stores.

In: keys that we made (letters, digits, `=._-` and `/`) and bytes. Out: the same bytes, or an error of
`bullpen.errors`. Elsewhere: what goes there and when (`bullpen.queue.codec`), the stores
(`bullpen.plugins.objects`), and the suite that every store passes (`bullpen.testing.contracts.objects`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["ObjectStore", "StoredObject"]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a listing."""

    key: str
    size: int
    stored_ms: int
    """When it was stored, Unix ms, by the store's clock."""


@runtime_checkable
class ObjectStore(Protocol):
    """Keeps bytes under keys. All methods may be called at the same time, and from several event loops in turn.

    What cannot be done now (no network, no right, no space) raises ObjectStoreFailed.
    """

    async def put(self, key: str, content: bytes) -> None:
        """Store it. When this returns, `get` finds all of it; a reader never sees half of one."""

    async def get(self, key: str, *, max_bytes: int) -> bytes | None:
        """The content, or None when there is no such object. Raises PayloadTooLarge, without reading all of it, when it
        is longer than `max_bytes`."""

    async def delete(self, key: str) -> None:
        """Remove it. A missing object is no error."""

    def list(self, directory: str) -> AsyncIterator[StoredObject]:
        """All objects whose key begins with `<directory>/`, in no order. One that is stored or removed meanwhile may be
        there or not."""

    async def aclose(self) -> None:
        """Close connections. It may be used again: they are opened again."""

"""How a processor that takes a third argument hears that its job shall end."""

from __future__ import annotations

import asyncio

__all__ = ["AbortController", "AbortError", "AbortSignal"]


class AbortError(Exception):
    """Raised by `signal.throw_if_aborted()`: the job fails with this reason."""

    def __init__(self, reason: str | None = None) -> None:
        super().__init__(reason or "The operation was aborted")
        self.reason = reason


class AbortSignal:
    """What the processor sees."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._reason: str | None = None

    @property
    def aborted(self) -> bool:
        """Whether the job shall end."""
        return self._event.is_set()

    @property
    def reason(self) -> str | None:
        """What whoever cancelled it said."""
        return self._reason

    async def wait(self) -> None:
        """Until the job shall end."""
        await self._event.wait()

    def throw_if_aborted(self) -> None:
        """Raise AbortError when the job shall end."""
        if self.aborted:
            raise AbortError(self._reason)

    def set(self, reason: str | None) -> None:
        """Called by the controller; the first reason stays."""
        if not self.aborted:
            self._reason = reason
            self._event.set()


class AbortController:
    """The other end of a signal."""

    def __init__(self) -> None:
        self.signal = AbortSignal()

    def abort(self, reason: str | None = None) -> None:
        """Tell the processor to end. Again is without effect."""
        self.signal.set(reason)

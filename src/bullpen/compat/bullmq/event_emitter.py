"""Callbacks by the name of an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["EventEmitter"]


class EventEmitter:
    """Calls what was given to `on`, in that order, in the same turn of the loop."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callable[..., Any]]] = {}

    def on(self, event_name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Call `function` for each such event; returns it."""
        self._callbacks.setdefault(event_name, []).append(function)
        return function

    def emit(self, event_name: str, *args: Any, **kwargs: Any) -> None:
        """Call them. What one raises ends the call, as with any function."""
        for function in tuple(self._callbacks.get(event_name, ())):
            function(*args, **kwargs)

    def off(self, event_name: str, function: Callable[..., Any]) -> None:
        """Call it no more. Raises ValueError when it was not given to `on`."""
        listed = self._callbacks.get(event_name, [])
        if function not in listed:
            raise ValueError(f"off({event_name!r}): this function does not listen to it")
        listed.remove(function)

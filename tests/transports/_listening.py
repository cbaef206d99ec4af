"""Hear what is logged and told, and wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bullpen._kernel import telemetry

PATIENCE_S = 60.0


class Heard:
    """Telemetry events so far, and a way to wait for the next."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self._changed = asyncio.Event()

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        self.all.append((event, fields))
        self._changed.set()

    def of(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.all if name == event]

    async def wait(self, event: str, count: int = 1, *, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Fields of the `count`-th such event."""
        try:
            async with asyncio.timeout(within_s):
                while len(self.of(event)) < count:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"no {count} x {event!r}; heard was {[name for name, _ in self.all]}") from None
        return self.of(event)[count - 1]


@contextmanager
def listening() -> Iterator[Heard]:
    """Everything that is told inside of the block."""
    heard = Heard()
    stop = telemetry.subscribe(heard)
    try:
        yield heard
    finally:
        stop()


def lines(records: list[logging.LogRecord], text: str) -> list[dict[str, Any]]:
    """Fields of all log records with exactly this text."""
    return [vars(record) for record in records if record.getMessage() == text]

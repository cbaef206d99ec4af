"""The ledger's own table of events as a source: the event store that needs nothing but the database.

In: a ledger. Out: its events in the order of positions, at once when a commit is told, else at the next look.
Elsewhere: appending, and how positions are given (`bullpen.ledger.events`), the port (`bullpen.ports.source`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from bullpen._kernel import telemetry
from bullpen._kernel.duration import check_int, check_texts
from bullpen._kernel.ending import end, to_its_end
from bullpen.errors import DatabaseUnavailable, LedgerError, SourceUnavailable
from bullpen.ledger import Ledger
from bullpen.ports.source import EventBatch, EventFilter, SourceHealth

__all__ = ["SqlEvents"]

T = TypeVar("T")

_BATCH: Final = 200
_NOTIFICATION_WITHIN_S: Final = 1.0


class SqlEvents:
    """Events of a ledger, perhaps only some types.

        events = SqlEvents(ledger, prefixes=["payment.", "account."])

    `poll_ms` is how often to look although nobody told of a commit (a pooler that gives out connections per
    transaction tells nobody). The ledger belongs to whoever made it.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        prefixes: str | Iterable[str] = (),
        regex: str | None = None,
        batch_size: int = _BATCH,
        poll_ms: int = 1_000,
    ) -> None:
        self._ledger = ledger
        wanted = (prefixes,) if isinstance(prefixes, str) else check_texts("prefixes", prefixes)
        self._filter = EventFilter(wanted, regex)
        self._batch_size = check_int("batch_size", batch_size, minimum=1)
        # SQLite tells nobody: there the poll is the notification.
        self._is_notified = ledger.events.notify and ledger.database.is_postgres
        self._notified = 0
        self._poll_s = check_int("poll_ms", poll_ms, minimum=1) / 1000

    @property
    def name(self) -> str:
        return self._ledger.database.address

    async def subscribe(self, after: int) -> AsyncGenerator[EventBatch, None]:
        async with self._notification() as told:
            is_first, is_fallback = True, False
            while True:
                told.clear()
                batch = await self._next(after)
                if batch is not None and is_fallback and self._is_notified:
                    # The notification of what was committed in this very moment is on its way.
                    loop = asyncio.get_running_loop()
                    loop.call_later(_NOTIFICATION_WITHIN_S, self._count_unless_notified_since, self._notified)
                if batch is None and is_first:
                    batch = EventBatch((), after, caught_up=True)
                is_first = False
                if batch is not None:
                    assert batch.position is not None
                    after = batch.position
                    yield batch
                if batch is None or batch.caught_up:
                    try:
                        async with asyncio.timeout(self._poll_s):  # not wait_for: see `_kernel.ending`
                            await told.wait()
                        is_fallback = False
                    except TimeoutError:
                        is_fallback = True

    def _count_unless_notified_since(self, notified: int) -> None:
        if notified and notified == self._notified:  # before the first one nobody listens yet
            telemetry.late_wakeup("projector", source=self.name)

    async def read(self, after: int, *, until: int) -> AsyncGenerator[EventBatch, None]:
        while after < until and (batch := await self._next(after, until)) is not None:
            assert batch.position is not None
            after = batch.position
            yield batch

    async def confirm(self, batch: EventBatch) -> None:
        """Nothing to do: whoever reads keeps the checkpoint."""

    async def head(self) -> int:
        with _translated():
            return await self._ledger.events.head()

    async def check(self) -> SourceHealth:
        try:
            await self._ledger.events.head()
        except LedgerError as error:
            return SourceHealth(False, str(error))
        return SourceHealth(True)

    async def aclose(self) -> None:
        """Nothing to let go of."""

    async def _next(self, after: int, until: int | None = None) -> EventBatch | None:
        with _translated():
            found = await to_its_end(self._ledger.events.page(after, self._batch_size, until=until))
        if not found:
            return None
        wanted = tuple(event for event in found if self._filter.wants(event.type))
        return EventBatch(wanted, found[-1].position, caught_up=len(found) < self._batch_size)

    @asynccontextmanager
    async def _notification(self) -> AsyncIterator[asyncio.Event]:
        """An event that is set whenever somebody committed."""
        told = asyncio.Event()

        async def listen() -> None:
            async with contextlib.aclosing(self._ledger.events.commits()) as commits:
                async for _ in commits:
                    self._notified += 1
                    told.set()

        listener = asyncio.create_task(listen(), name="bullpen events listener")
        try:
            yield told
        finally:
            await end(listener)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except DatabaseUnavailable as error:
        raise SourceUnavailable(str(error)) from error

"""Write outcomes: all that are ready in one statement, asked again while their leases last.

A database that fails after a good send is asked again, and the send is not repeated for it. Each outcome is given up
when its own lease is nearly over: one that was slow has little left, and must not make those beside it be sent twice.
One that the database refuses is written alone, so that the others are written. In: settlements of a store (`Rows`) with
the end of their leases. Out: what the store made of each, or why nobody knows. Elsewhere: the guarded statement
(`bullpen.ledger`), making the outcome (`judge`).
"""

from __future__ import annotations

import asyncio
import random as _random
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, Protocol, TypeVar

from bullpen._kernel import telemetry
from bullpen._kernel.batches import Batches
from bullpen._kernel.logs import get_logger
from bullpen.errors import DatabaseUnavailable, LedgerError

__all__ = ["Rows", "Settling"]

_log: Final = get_logger("bullpen.delivery")

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 2.0
_ENOUGH_LEASE: Final = 0.8
"""Share of the lease after which a settlement is given up: somebody else will have the row then."""

Settlement = TypeVar("Settlement")
Settled = TypeVar("Settled")
Given_contra = TypeVar("Given_contra", contravariant=True)
Made_co = TypeVar("Made_co", covariant=True)


class Rows(Protocol[Given_contra, Made_co]):
    """What a store of rows does for deliveries: a guarded write, and nothing of who calls whom."""

    async def settle(self, settlements: Sequence[Given_contra], *, tenant_id: str | None = None) -> Sequence[Made_co]:
        """Write outcomes in one transaction, each only if its claim still holds. One result for each, in order.

        Raises DatabaseUnavailable, with nothing written or nobody knowing; other LedgerErrors with nothing written."""
        ...

    def refused(self, settlement: Given_contra) -> Made_co:
        """The result of one that could not be written at all: its claim runs out."""
        ...


class Settling(Generic[Settlement, Settled]):
    """Settlements of one store, many at the same time. `events` are emitted before and after each batch."""

    def __init__(
        self,
        rows: Rows[Settlement, Settled],
        *,
        events: tuple[str, str],
        random: Callable[[], float] = _random.random,
    ) -> None:
        self._rows, self._random = rows, random
        self._before, self._after = events
        self._batches: Batches[tuple[Settlement, float], Settled | LedgerError] = Batches(self._write_batch)

    async def submit(self, settlement: Settlement, *, until: float, tenant_id: str | None = None) -> Settled:
        """Write one, with all that are ready at the same time. `until` is monotonic: the end of its lease.

        Raises a LedgerError when it could not be written, or nobody knows."""
        result = await self._batches.submit((settlement, until), tenant_id)
        if isinstance(result, LedgerError):
            raise result
        return result

    def put(
        self,
        settlement: Settlement,
        receive: Callable[[Settled | LedgerError | None, BaseException | None], None],
        *,
        until: float,
    ) -> None:
        """The same without waiting: `receive` gets the result or the error."""
        self._batches.put((settlement, until), receive)

    async def idle(self) -> None:
        """Wait until everything is written or given up."""
        await self._batches.idle()

    async def each(self, settlements: Sequence[Settlement], tenant_id: str | None = None) -> Sequence[Settled]:
        """Write in one transaction, or one by one when the database refuses that. One result for each, in order.

        Raises DatabaseUnavailable."""
        try:
            return await self._rows.settle(settlements, tenant_id=tenant_id)
        except DatabaseUnavailable:
            raise
        except LedgerError:
            # One that the database refuses must not keep the others from being written.
            if len(settlements) == 1:
                raise
        results: list[Settled] = []
        for settlement in settlements:
            try:
                results += await self._rows.settle([settlement], tenant_id=tenant_id)
            except DatabaseUnavailable:
                raise
            except LedgerError as error:
                _log.error("an outcome cannot be written: %s", error)
                results.append(self._rows.refused(settlement))
        return results

    async def _write_batch(
        self, tenant_id: Hashable, batch: Sequence[tuple[Settlement, float]]
    ) -> Sequence[Settled | LedgerError]:
        began, tenant = time.monotonic(), None if tenant_id is None else str(tenant_id)
        telemetry.emit(self._before, count=len(batch))
        try:
            settled: Sequence[Settled | LedgerError] = await self.each([settlement for settlement, _ in batch], tenant)
        except DatabaseUnavailable as error:
            settled = await self._insist(batch, tenant, error, began)
        if done := sum(not isinstance(result, LedgerError) for result in settled):
            telemetry.emit(self._after, count=done)
        return settled

    async def _insist(
        self, batch: Sequence[tuple[Settlement, float]], tenant: str | None, error: DatabaseUnavailable, began: float
    ) -> Sequence[Settled | LedgerError]:
        """Ask a database that is away again, for each settlement until its own lease is nearly over."""
        waiting = {
            n: (settlement, began + (until - began) * _ENOUGH_LEASE) for n, (settlement, until) in enumerate(batch)
        }
        results: dict[int, Settled | LedgerError] = {}
        pause_s = _FIRST_PAUSE_S
        while waiting:
            next_try = time.monotonic() + pause_s
            given_up = [n for n, (_, give_up) in waiting.items() if next_try > give_up]
            results |= dict.fromkeys(given_up, error)
            waiting = {n: entry for n, entry in waiting.items() if n not in results}
            if not waiting:
                break
            await asyncio.sleep(pause_s * (0.5 + self._random() / 2))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            try:
                settled = await self.each([settlement for settlement, _ in waiting.values()], tenant)
            except DatabaseUnavailable as again:
                error = again
            else:
                results |= dict(zip(waiting, settled, strict=True))
                break
        return [results[n] for n in range(len(batch))]

"""Keep two events of one entity apart: within a process, or over all processes that use one Redis or one ledger.

In: urns. Out: at most one holder each. Locks make waiting short and actions not overlap; what may never happen, a lost
update, is prevented by the version check of an `EntityStore`. Access without versions has only the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Final

from bullpen._kernel.duration import to_ms
from bullpen._kernel.ending import end
from bullpen._kernel.patience import Patience
from bullpen.errors import ConnectionLost, DatabaseUnavailable, EmitsToItself, EntityBusy
from bullpen.ports.entity import UrnLocks
from bullpen.redis import Connection
from bullpen.wire.scripts import SCRIPTS
from bullpen.workflow.stores.redis import RedisEntities

if TYPE_CHECKING:
    from bullpen.ledger.turns import Turns

__all__ = ["LedgerLocks", "LocalLocks", "RedisLocks", "local_locks_beside", "locks_of"]

# Nobody is told when a lock is given back. A notification would cost a connection per waiting event (a blocked read) or
# rights that the documented user does not have (channels); since the events of one process take turns among themselves,
# at most one per entity and process asks here, and the question is as cheap as the notification would be.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.04
_SHORT_LEASE_MS: Final = 10_000
_WAIT_MS: Final = 30_000
"""How long an event waits for its turn."""


@dataclass(slots=True, eq=False)
class _Hold:
    """A lock that the code which runs now, or the code that started it, is inside of."""

    key: tuple[object, str]
    is_over: bool = False


_holds: ContextVar[tuple[_Hold, ...]] = ContextVar("bullpen_urn_locks", default=())


@contextlib.contextmanager
def _inside(place: object, urn: str) -> Iterator[None]:
    """Around taking and holding a lock. Raises EmitsToItself when the holder of the lock waits for this caller.

    Tasks inherit it, because an action may wait for a task. One that is still there when the lock was given back is
    free again.
    """
    outer = _holds.get()
    if any(hold.key == (place, urn) and not hold.is_over for hold in outer):
        raise EmitsToItself(urn)
    hold = _Hold((place, urn))
    _holds.set((*(each for each in outer if not each.is_over), hold))
    try:
        yield
    finally:
        hold.is_over = True
        _holds.set(outer)


class LocalLocks:
    """Between the tasks of one event loop."""

    def __init__(self, *, wait: int | timedelta = _WAIT_MS) -> None:
        """Whoever waits longer raises EntityBusy: an action that hangs must not take everybody behind it along."""
        self._wait_ms = to_ms("wait", wait, minimum=1)
        self._held: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, urn: str) -> AsyncIterator[None]:
        lock, users = self._held.get(urn, (None, 0))
        lock = lock or asyncio.Lock()
        self._held[urn] = (lock, users + 1)
        try:
            with _inside(self, urn):
                await self._take(lock, urn)
                try:
                    yield
                finally:
                    lock.release()
        finally:
            lock, users = self._held.pop(urn)
            if users > 1:
                self._held[urn] = (lock, users - 1)

    async def _take(self, lock: asyncio.Lock, urn: str) -> None:
        try:
            async with asyncio.timeout(self._wait_ms / 1000):
                await lock.acquire()
        except TimeoutError:
            raise EntityBusy(urn, self._wait_ms) from None


class _Leased(ABC):
    """A lock that its holder renews every third of `lease`; when it dies, the next one gets it after `lease` at the
    latest. A holder that was stopped for longer than that has lost it without knowing: only a version check helps
    against that."""

    _away: ClassVar[type[Exception]]
    """What is raised while the place of the locks cannot be reached."""

    def __init__(self, place: str, lease: int | timedelta, wait: int | timedelta) -> None:
        self._place = place
        self._lease_ms = to_ms("lease", lease, minimum=100)
        self.wait_ms = to_ms("wait", wait, minimum=1)
        self._leaving: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def _is_ours(self, urn: str, token: str) -> bool:
        """Take it if it is free, renew it if it is ours."""

    @abstractmethod
    async def _give_back(self, urn: str, token: str) -> None: ...

    @asynccontextmanager
    async def hold(self, urn: str) -> AsyncIterator[None]:
        token = uuid.uuid4().hex
        with _inside(self._place, urn):
            try:
                await self._take(urn, token)
            except EntityBusy:
                raise
            except BaseException:
                # Cancelled, or without an answer: it may be given to us all the same, and nobody else would get it.
                self._forgo(urn, token)
                raise
            renewing = asyncio.create_task(self._renew(urn, token), name=f"bullpen lock of {urn}")
            try:
                yield
            finally:
                await end(renewing)
                await self._try_to_give_back(urn, token)

    async def _try_to_give_back(self, urn: str, token: str) -> None:
        """If it cannot be given back, it ends by itself."""
        with contextlib.suppress(self._away):
            await self._give_back(urn, token)

    def _forgo(self, urn: str, token: str) -> None:
        """Without waiting for it: whoever leaves may be in a hurry, and the server away."""
        leaving = asyncio.create_task(self._try_to_give_back(urn, token), name=f"bullpen lock of {urn} is not wanted")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._left)

    def _left(self, leaving: asyncio.Task[None]) -> None:
        self._leaving.discard(leaving)
        if not leaving.cancelled():
            leaving.exception()  # as above: it ends by itself

    async def _take(self, urn: str, token: str) -> None:
        patience = Patience(first_s=_SHORTEST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, within_s=self.wait_ms / 1000)
        while not await self._is_ours(urn, token):
            if not await patience.pause():
                raise EntityBusy(urn, self.wait_ms)

    async def _renew(self, urn: str, token: str) -> None:
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            with contextlib.suppress(self._away):  # tried again in a third of the lease
                await self._is_ours(urn, token)


class RedisLocks(_Leased):
    """Between all processes that use one Redis.

    A holder renews its lock every third of `lease`; when it dies, the next one gets it after `lease` at the latest. A
    holder that was stopped for longer than that has lost it without knowing: only a version check helps against that.
    """

    _away = ConnectionLost

    def __init__(
        self,
        connection: Connection,
        *,
        prefix: str = "bullpen:lock:",
        lease: int | timedelta = 30_000,
        wait: int | timedelta = _WAIT_MS,
    ) -> None:
        super().__init__(f"{connection!r} {prefix}", lease, wait)
        self._connection, self._prefix = connection, prefix

    async def _is_ours(self, urn: str, token: str) -> bool:
        key = f"{self._prefix}{urn}"
        door = self._connection.shared_door(key)
        return bool(await door.evaluate(SCRIPTS["hold_lock"], [key], [token, self._lease_ms]))

    async def _give_back(self, urn: str, token: str) -> None:
        key = f"{self._prefix}{urn}"
        await self._connection.shared_door(key).evaluate(SCRIPTS["release_lock"], [key], [token])


class LedgerLocks(_Leased):
    """Between all processes that use one ledger, as rows with a lease. `kind` tells its entities from others."""

    _away = DatabaseUnavailable

    def __init__(
        self, turns: Turns, kind: str, *, lease: int | timedelta = 30_000, wait: int | timedelta = _WAIT_MS
    ) -> None:
        super().__init__(f"{turns.place} {kind}", lease, wait)
        self._turns, self._kind = turns, kind

    async def _is_ours(self, urn: str, token: str) -> bool:
        return await self._turns.take(f"{self._kind}/{urn}", token, self._lease_ms)

    async def _give_back(self, urn: str, token: str) -> None:
        await self._turns.release(f"{self._kind}/{urn}", token)


def local_locks_beside(locks: UrnLocks | None) -> LocalLocks:
    """For the events of one process: those who wait for each other here wait as long as they would there."""
    return LocalLocks(wait=locks.wait_ms) if isinstance(locks, _Leased) else LocalLocks()


def locks_of(store: Any) -> UrnLocks | None:
    """The locks that lie beside the entities of a ready store, so that every process finds the same; None for others.

    Their lease is short, because versions are the fence: after a crash the entity is free sooner.
    """
    if isinstance(store, RedisEntities):
        return RedisLocks(store.connection, prefix=f"bullpen:lock:{store.kind}", lease=_SHORT_LEASE_MS)
    turns = getattr(store, "turns", None)
    if turns is not None:  # not by its class, which needs SQLAlchemy
        return LedgerLocks(turns, store.kind, lease=_SHORT_LEASE_MS)
    return None

"""What all pages read, shared by all who look.

In: a `Bullpen` app. Out: views. Each read is remembered for half a second: however many people look at a page, the
server is asked once. What takes longer than two seconds is given up, and the page says so. Nothing of the app is run.
Elsewhere: what the views hold (`bullpen.ops.views`), how they are drawn (`render`, `pages`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from bullpen._kernel.scrub import scrub
from bullpen.app import Bullpen
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.once import Once
from bullpen.errors import BullpenError, ConnectionLost, EmbeddedError, InvalidOption, LedgerNotReady
from bullpen.ops.actions import EVERY_ENTRY, Actions, Actor, AuditRecord, AuditSearch
from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.estimates import Estimator
from bullpen.ops.hub import Hub, Sampler
from bullpen.ops.operations import Operations
from bullpen.ops.overview import QueueSnapshot, Snapshot
from bullpen.ops.pauses import PauseNote, read_pause
from bullpen.ops.symptoms import DEAD_SUFFIX
from bullpen.ops.views.queues import OPERATIONS
from bullpen.queue import Queue
from bullpen.wire.keys import QueueKeys

if TYPE_CHECKING:
    from bullpen.ledger import Ledger
    from bullpen.ops.dead_letters import DeadLetterConsole
    from bullpen.wiring.audit import AuditTrail

__all__ = ["Desk"]

T = TypeVar("T")

_REMEMBERED_S: Final = 0.5
_PATIENCE_S: Final = 2.0
_MOST_QUEUES: Final = 500
_MOST_REMEMBERED: Final = 2_000
PER_PAGE: Final = 50


class Desk:
    """Reads for all pages of one dashboard."""

    def __init__(self, app: Bullpen) -> None:
        self.app = app
        self.limits: SymptomLimits = app.settings.alerts
        self._queues: OrderedDict[str, Queue] = OrderedDict()
        self._remembered: OrderedDict[Hashable, tuple[asyncio.Task[Any], float]] = OrderedDict()
        self._sampler: Sampler | None = None
        self._hub: Hub | None = None
        self._operations: Operations | None = None
        self._estimator: Estimator | None = None
        self.patience_s = _PATIENCE_S
        """How long a page waits for a store before it says that it does not answer."""
        self.away_since: dict[str, float] = {}
        """Parts that do not answer, by when that was noticed (Unix seconds)."""

    @property
    def sampler(self) -> Sampler:
        if self._sampler is None:
            self._sampler = Sampler(self.app.connection, self.app.prefix)
        return self._sampler

    @property
    def hub(self) -> Hub:
        if self._hub is None:
            self._hub = Hub(self.app.connection, self.app.prefix, self.sampler)
        return self._hub

    @property
    def estimator(self) -> Estimator:
        """What other clients did, for the charts."""
        if self._estimator is None:
            own = QueueKeys(self.app.prefix, OPERATIONS)
            self._estimator = Estimator(self.app.connection, self.app.prefix, own, self.sampler.snapshot)
        return self._estimator

    @property
    def do_once(self) -> Once:
        return Once(self.app.connection, QueueKeys(self.app.prefix, OPERATIONS))

    @property
    def operations(self) -> Operations:
        """Bulk actions, which this process runs while there are any."""
        if self._operations is None:
            self._operations = Operations(
                self.app.connection,
                self.app.prefix,
                self.actions,
                self.app.dead_letters,
                self.forget,
                ledger=self.ledger,
            )
        return self._operations

    @property
    def known_dead_letters(self) -> int | None:
        """How many there were in the newest snapshot; None before the first. Asks nobody."""
        latest = None if self._sampler is None else self._sampler.latest
        return None if latest is None else sum(look.dead_letters for look in latest.looks)

    def queue(self, name: str) -> Queue:
        """A queue of the server, made when it is first named. Raises PageProblem for what can be no name."""
        known = self._queues.get(name)
        if known is None:
            try:
                known = Queue(name, connection=self.app.connection, prefix=self.app.prefix)
            except InvalidOption:
                raise PageProblem(404, f"There is no queue {name!r}.") from None
            self._queues[name] = known
            if len(self._queues) > _MOST_QUEUES:
                self._queues.popitem(last=False)  # it holds no connection of its own
        self._queues.move_to_end(name)
        return known

    async def must_exist(self, name: str) -> Queue:
        """The queue, if there is one of this name."""
        queue = self.queue(name)
        door = self.app.connection.shared_door(queue.keys.base)
        if not await self.within(door.call("EXISTS", queue.keys.meta)):
            text = f"There is no queue {name!r} under the prefix {self.app.prefix!r}."
            raise PageProblem(404, text, hint="bullpen queues")
        return queue

    # ---- reading ----------------------------------------------------------------------------------------------

    async def within(self, work: Awaitable[T], part: str = "redis") -> T:
        """The result of a read, if it comes in time. Raises PageProblem that names the part."""
        try:
            async with asyncio.timeout(self.patience_s):
                found = await work
        except (TimeoutError, BullpenError, OSError) as error:
            if isinstance(error, BullpenError) and not _is_away(error):
                raise
            since = self.away_since.setdefault(part, time.time())
            named = {"redis": "The server of the queues", "ledger": "The ledger"}.get(part, part)
            ago = int(time.time() - since)
            reason = f"no answer within {self.patience_s:g} s" if isinstance(error, TimeoutError) else scrub(str(error))
            raise PageProblem(503, f"{named} does not answer (for {ago} s): {reason}", hint="bullpen doctor") from None
        self.away_since.pop(part, None)
        return found

    async def once(self, key: Hashable, ask: Callable[[], Awaitable[T]], *, for_s: float = _REMEMBERED_S) -> T:
        """What `ask` answers; all who want the same within a moment get the same."""
        task, until = self._remembered.get(key, (None, 0.0))
        if task is None or (task.done() and (time.monotonic() >= until or task.cancelled() or task.exception())):
            task = asyncio.ensure_future(_as_coroutine(ask))
            self._remembered[key] = task, float("inf")
            task.add_done_callback(lambda done: self._expire(key, done, for_s))
            while len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        return cast("T", await asyncio.shield(task))

    def _expire(self, key: Hashable, task: asyncio.Task[Any], for_s: float) -> None:
        if self._remembered.get(key, (None, 0.0))[0] is task:
            self._remembered[key] = task, time.monotonic() + for_s
        if not task.cancelled():
            task.exception()  # whoever asked has it; nobody asked when he went away

    def forget(self) -> None:
        """Something was changed: whoever looks next must see it."""
        self._remembered.clear()
        if self._sampler is not None:
            self._sampler.forget()

    async def snapshot(self) -> Snapshot:
        return await self.within(self.sampler.snapshot())

    async def look(self, name: str) -> QueueSnapshot:
        """One queue of the snapshot; an empty one when it is too new to be in it."""
        picture = await self.snapshot()
        return next((each for each in picture.looks if each.queue == name), QueueSnapshot(name))

    async def ledger(self) -> Ledger | None:
        """The ledger, if there is one and its tables are made."""
        from bullpen.wiring.dead_letters import installed_ledger, ready_ledger

        if self.app.made_ledger is None and not self.app.settings.has_ledger():
            return None
        return await self.within(ready_ledger(installed_ledger(lambda: self.app.ledger)), "ledger")

    async def console(self, tenant_id: str | None = None) -> DeadLetterConsole:
        """The dead letters of everything. Which queues have any is known from the snapshot: nobody walks over keys."""
        names = [
            look.queue if look.queue.endswith(DEAD_SUFFIX) else f"{look.queue}{DEAD_SUFFIX}"
            for look in (await self.snapshot()).looks
            if look.dead_letters or look.queue.endswith(DEAD_SUFFIX)
        ]
        return await self.within(
            self.once(
                ("console", tenant_id, tuple(names)),
                lambda: self.app.dead_letters(tenant_id=tenant_id, queues=names),
                for_s=15.0,
            )
        )

    # ---- acting -----------------------------------------------------------------------------------------------

    async def trail(self) -> AuditTrail:
        return await self.within(self.once("trail", self.app.trail, for_s=60.0))

    async def actions(self, actor: Actor) -> Actions:
        return Actions(self.queue, await self.trail(), actor)

    async def audit(
        self,
        *,
        queues: list[str] | None = None,
        tenant_id: str | None = None,
        limit: int = 100,
        search: AuditSearch = EVERY_ENTRY,
    ) -> list[AuditRecord]:
        """Who did what, newest first: to these queues, else to all that are known."""
        trail = await self.trail()
        if queues is None:
            looks = (await self.snapshot()).looks[:100]
            queues = ["dashboard", *(each.queue for each in looks), *(f"{each.queue}-dlq" for each in looks)]
        return await self.within(trail.read(queues, tenant_id=tenant_id, limit=limit, search=search))

    async def pause(self, name: str) -> PauseNote | None:
        """Who paused a queue; None: it is not paused."""
        return await self.within(self.once(("pause", name), lambda: read_pause(self.queue(name)), for_s=2.0))

    async def aclose(self) -> None:
        if self._estimator is not None:
            await self._estimator.aclose()
        if self._operations is not None:
            await self._operations.aclose()
        if self._hub is not None:
            await self._hub.aclose()
        if self._sampler is not None:
            await self._sampler.aclose()
        for task, _ in self._remembered.values():
            task.cancel()
        for queue in self._queues.values():
            await queue.close()


async def _as_coroutine(ask: Callable[[], Awaitable[T]]) -> T:
    return await ask()


def _is_away(error: BullpenError) -> bool:
    return isinstance(error, ConnectionLost | EmbeddedError | LedgerNotReady)

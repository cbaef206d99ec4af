"""Follow an event store and keep the outbox up with it.

A projector reads behind its own checkpoint, stores what each batch becomes together with the new checkpoint, and goes
on; after an outage of the event store or the database it begins again where the checkpoint is. Any number may run under
one name: one of them works, the others stand by and take over when it stops moving. In: a source, routes, a ledger.
Out: rows for the dispatcher. Elsewhere: one batch (`projection`), old events for a new route (`backfill`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from bullpen._kernel import telemetry
from bullpen._kernel.ending import end
from bullpen._kernel.logs import get_logger
from bullpen._kernel.patience import Patience
from bullpen._kernel.service import BaseService
from bullpen._kernel.ticker import Ticker
from bullpen.errors import DatabaseUnavailable, LedgerError, NotConfigured, Overtaken, SourceUnavailable, require
from bullpen.ledger import Ledger
from bullpen.outbox.backfill import Backfilled, Progress, backfill, resume_at
from bullpen.outbox.mapping import EventRoute, EventRoutes, Since
from bullpen.outbox.projection import Projected, Projection, ProjectorOptions
from bullpen.ports.source import BEGINNING, EventSource, SourceEvent

_log = get_logger("bullpen.outbox")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 10.0
_PARKED_AT_ONCE: Final = 20
_CLOSE_TIMEOUT_MS: Final = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorStatus:
    """Where a projector is, as the database and the event store say; any process may ask."""

    name: str
    source: str
    position: int | None
    """Its checkpoint; None before the first batch, and for a source that keeps it itself."""
    head: int | None
    """Position of the newest event; None when the event store does not answer."""
    parked: int
    routes: dict[str, str] = field(default_factory=dict)
    """From where on each route is live."""
    backfills: dict[str, int] = field(default_factory=dict)
    """Positions that backfills have reached, by route."""

    @property
    def lag(self) -> int | None:
        """Distance to the newest event, in the event store's own positions. None: unknown."""
        if self.head is None or self.position is None:
            return None
        return max(0, self.head - self.position)


@contextlib.asynccontextmanager
async def _unless_away() -> AsyncIterator[None]:
    with contextlib.suppress(SourceUnavailable, LedgerError):
        yield


class Projector(BaseService):
    """Turns events into rows of the outbox, until closed.

        projector = Projector(ledger, SqlEvents(ledger), routes)
        app.add(projector)

    `name` is whose checkpoint it is: two projectors of one name share the work of one, two names do it twice (and the
    second finds duplicates). `prepare` is awaited before the first read.
    """

    def __init__(
        self,
        ledger: Ledger,
        source: EventSource,
        routes: EventRoutes,
        *,
        name: str = "default",
        options: ProjectorOptions | None = None,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        require("name", isinstance(name, str) and 0 < len(name) <= 60, "1 to 60 characters", name)
        super().__init__(f"projector {name!r}", close_timeout=_CLOSE_TIMEOUT_MS)
        self.name, self.routes, self.source = name, routes, source
        self.options = options or ProjectorOptions()
        self.state = "new"
        """What it does now: starting, reading, caught up, standing by, waiting, stopped."""
        self.projected = Projected()
        """What this process has done."""
        ledger.use("projector")
        self._ledger, self._prepare = ledger, prepare
        self._starts: dict[str, int | datetime] = {}
        self._projection = self._make_projection(self._checkpoint, self._live)
        self._retries = Ticker("parked events", self.retry_parked, every=self.options.parked_interval_ms)
        self._busy = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._outages = 0
        self._patience = Patience(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        self._last_event: datetime | None = None

    # ---- running ------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        require("routes", len(self.routes) > 0, "at least one route", self.routes)
        if self._ledger.database.tenant_required:
            raise NotConfigured("a projector stores rows of all tenants: it needs a ledger with duty='service'")
        self.routes.freeze()
        self.state = "starting"
        if self._prepare is not None:
            await self._prepare()
        self._following = self._spawn(self._follow_for_ever())
        await self._retries.start()

    async def _end(self) -> None:
        """Let the batch that is under way end; what takes longer is cut short, and nothing is lost by that: its
        transaction has not committed. It may wait at an event that cannot be mapped, for as long as nobody changes
        that."""
        await self._retries.stop()
        if self._following is not None:
            between = asyncio.create_task(self._end_between_batches(self._following))
            await self._let_end([between])
            await end(between, self._following)
        self.state = "stopped"

    async def _end_between_batches(self, following: asyncio.Task[None]) -> None:
        async with self._busy:
            following.cancel()

    # ---- following ----------------------------------------------------------------------------------------------

    async def _follow_for_ever(self) -> None:
        while True:
            try:
                await self._follow()
            except Overtaken:
                await self._stand_by()
            except (SourceUnavailable, LedgerError) as error:
                await self._wait_after(error)

    async def _follow(self) -> None:
        async with self._busy:
            await self._resolve_starts()
            checkpoint = await self._ledger.checkpoints.read(self._checkpoint)
        after = self._first() if checkpoint is None else int(checkpoint)
        telemetry.emit("projector.subscribing", projector=self.name, after=after)
        async with contextlib.aclosing(self.source.subscribe(after)) as batches:
            async for batch in batches:
                if not batch.events and batch.position == after:
                    self._account(Projected(), (), caught_up=batch.caught_up)  # a sign of life
                    continue
                async with self._busy:
                    done = await self._projection.project(batch.events, expected=checkpoint, position=batch.position)
                    self._account(done, batch.events, caught_up=batch.caught_up)
                    await self.source.confirm(batch)
                if batch.position is not None:
                    after, checkpoint = batch.position, str(batch.position)
        raise SourceUnavailable(f"{self.source.name} ended the subscription")

    def _account(self, done: Projected, events: Sequence[SourceEvent], *, caught_up: bool) -> None:
        self.projected += done
        if events:
            self._last_event = events[-1].recorded_at
        self.state = "caught up" if caught_up else "reading"
        if self._outages:
            _log.warning("projector %s works again after %d failures", self.name, self._outages)
            self._outages = 0
            self._patience.reset()
        if caught_up:
            telemetry.emit("projector.caught_up", projector=self.name)

    async def _wait_after(self, error: Exception) -> None:
        """Nothing is lost: the checkpoint has not moved. Said once when it begins and once when it ends."""
        self.state = "waiting"
        self._outages += 1
        if self._outages == 1:
            away = isinstance(error, SourceUnavailable | DatabaseUnavailable)
            level = logging.WARNING if away else logging.ERROR
            _log.log(level, "projector %s stopped (%s); it keeps trying", self.name, error)
        telemetry.emit("projector.interrupted", projector=self.name, error=error, failures=self._outages)
        await self._patience.pause()

    async def _stand_by(self) -> None:
        """Another one of this name works. Wait until its checkpoint stands still although there are events."""
        self.state = "standing by"
        telemetry.emit("projector.standing_by", projector=self.name)
        seen = None
        while True:
            async with self._busy, _unless_away():
                position = await self._ledger.checkpoints.read(self._checkpoint)
                if position == seen and await self.source.head() > int(position or BEGINNING):
                    return
                seen = position
            await asyncio.sleep(self.options.standby_ms / 1000 * (0.75 + random.random() / 2))

    # ---- routes and where they begin ----------------------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def _checkpoint(self) -> str:
        return f"projector/{self.name}"

    def _start_name(self, route: EventRoute) -> str:
        return f"{self._checkpoint}/route/{route.name}"

    async def _resolve_starts(self) -> None:
        """Where each route begins. Only `now` has to be remembered; the others are said in the program."""
        for route in self.routes:
            if route.name not in self._starts:
                self._starts[route.name] = await self._resolve(route)

    async def _resolve(self, route: EventRoute) -> int | datetime:
        if route.since == "now":
            name = self._start_name(route)
            known = await self._ledger.checkpoints.read(name)
            if known is None:
                # Behind the checkpoint, if there is one: nothing between it and the head may be passed over.
                reached = await self._ledger.checkpoints.read(self._checkpoint)
                now = await self.source.head() if reached is None else int(reached)
                async with self._ledger.database.transaction() as connection:
                    await self._ledger.checkpoints.advance(connection, name, None, str(now))
                known = await self._ledger.checkpoints.read(name)  # another projector may have been first
            assert known is not None
            return int(known)
        return BEGINNING if isinstance(route.since, str) else route.since

    def _first(self) -> int:
        """Where to begin without a checkpoint: where the earliest route does."""
        starts = self._starts.values()
        return min((BEGINNING if isinstance(start, datetime) else start for start in starts), default=BEGINNING)

    def _live(self, event: SourceEvent) -> list[EventRoute]:
        return [route for route in self.routes.of(event.type) if route.is_live(event, self._starts[route.name])]

    def _make_projection(
        self, checkpoint: str, pick: Callable[[SourceEvent], Sequence[EventRoute]], route: str | None = None
    ) -> Projection:
        return Projection(
            self._ledger,
            name=self.name,
            checkpoint=checkpoint,
            pick=pick,
            declared=lambda event_type: len(self.routes.of(event_type)),
            options=self.options,
            route=route,
        )

    # ---- what failed, and what was before -----------------------------------------------------------------------

    async def retry_parked(self) -> bool:
        """Try again what somebody asked for. True: there is more."""
        wanted = await self._ledger.parked.find(projector=self.name, retry_wanted=True, limit=_PARKED_AT_ONCE)
        if wanted:
            await self._resolve_starts()
        for parked in wanted:
            if parked.route is None:
                await self._projection.retry(parked)
            elif parked.route in self.routes:
                await self._for_route(self.routes.get(parked.route)).retry(parked)
            else:
                await self._projection.leave(parked, f"there is no route {parked.route!r} any more; skip it")
        return len(wanted) == _PARKED_AT_ONCE

    async def backfill(
        self, route: str, *, since: Since, restart: bool = False, progress: Progress | None = None
    ) -> Backfilled:
        """Send events of the past through one route, up to where it is live. Only this sends history.

        It may be interrupted and goes on where it was; `restart` begins again. What is stored already is a duplicate.
        """
        chosen = self.routes.get(route)
        await self._resolve_starts()
        checkpoint = f"{self._checkpoint}/backfill/{route}"
        start = self._starts[route]
        reached = await self._ledger.checkpoints.read(self._checkpoint)
        until = start if isinstance(start, int) and start > BEGINNING else int(reached or BEGINNING)
        return await backfill(
            self._ledger,
            self.source,
            self._for_route(chosen),
            checkpoint=checkpoint,
            after=await resume_at(self._ledger, checkpoint, since, restart=restart),
            until=until,
            since=since if isinstance(since, datetime) else None,
            progress=progress,
        )

    def _for_route(self, route: EventRoute) -> Projection:
        checkpoint = f"{self._checkpoint}/backfill/{route.name}"
        return self._make_projection(checkpoint, lambda event: [route] if route.takes(event.type) else [], route.name)

    # ---- looking ------------------------------------------------------------------------------------------------

    async def status(self) -> ProjectorStatus:
        """Where it is. An event store that is away leaves `head` unknown; a database that is away raises."""
        stored = await self._ledger.checkpoints.list(self._checkpoint)
        position = stored.get(self._checkpoint)
        head: int | None = None
        with contextlib.suppress(SourceUnavailable):
            head = await self.source.head()
        backfills = f"{self._checkpoint}/backfill/"
        return ProjectorStatus(
            name=self.name,
            source=self.source.name,
            position=None if position is None else int(position),
            head=head,
            parked=await self._ledger.parked.count(self.name),
            routes={route.name: self._show_start(route, stored.get(self._start_name(route))) for route in self.routes},
            backfills={
                name.removeprefix(backfills): int(reached)
                for name, reached in stored.items()
                if name.startswith(backfills)
            },
        )

    def _show_start(self, route: EventRoute, stored: str | None) -> str:
        if route.since == "now":
            return "now" if stored is None else f"behind {stored}"
        if isinstance(route.since, datetime):
            return f"from {route.since.astimezone(UTC).isoformat()}"
        return route.since if isinstance(route.since, str) else f"behind {route.since}"

    @property
    def behind_s(self) -> float:
        """Age of the newest event that was handled, while there are more; 0 when caught up or idle."""
        if self.state != "reading" or self._last_event is None:
            return 0.0
        return max(0.0, time.time() - self._last_event.timestamp())

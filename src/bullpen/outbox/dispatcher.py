"""Claim rows that are due and see that they leave.

Each tick claims a batch, spread over channels (and tenants, when asked), and hands it on: the direct strategy delivers
here, the queued one adds a job per row. A tick does not wait for what it handed on, so a slow channel holds up nobody;
what it may claim is bounded by what is still under way. Full lanes are claimed again at once. Next to it a reaper gives
back rows whose holder died, and retention removes what was sent long ago.

In: a store, routes, queues. Out: every due row is delivered, queued, or back with a reason. Any number of dispatchers
may run: claims keep them apart. Elsewhere: one delivery (`delivery`), the jobs (`queues`, `workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self

from bullpen._kernel import telemetry
from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.ending import end
from bullpen._kernel.ids import worker_name
from bullpen._kernel.lifecycle import Lifecycle
from bullpen._kernel.logs import get_logger
from bullpen._kernel.scrub import scrub
from bullpen._kernel.ticker import Ticker
from bullpen.delivery.gates import Gates
from bullpen.errors import DatabaseUnavailable, require
from bullpen.ledger import (
    Died,
    Lane,
    OutboxRepository,
    OutboxRow,
    Released,
    RowOutcome,
    Sent,
    SettledRow,
    Settlement,
    TenantLimits,
)
from bullpen.ledger.wakeups import LINE
from bullpen.outbox._logs import log
from bullpen.outbox.delivery import UNKNOWN_TYPE, OutboxDeliveries, judge_lost
from bullpen.outbox.queues import OutboxQueues, Placed
from bullpen.outbox.routing import Route, Router, queue_name
from bullpen.outbox.runs import KeyRuns
from bullpen.outbox.shares import Shares

_log = get_logger("bullpen.outbox")

UNQUEUABLE: Final = "UNQUEUABLE"
_SOURCE: Final = "outbox-dispatcher"
_RUNNING_LEASE_MS: Final = 5_000
_REDIS_RETRY_MS: Final = 1_000
_REAP_BATCH: Final = 200
_RETIRE_STEPS: Final = 20
_NOTIFICATION_WITHIN_S: Final = 1.0
_OVERLOOKED_S: Final = 0.1
"""A row that could be claimed for so long, and was found without a notification, was announced to nobody."""
_AT_ONCE: Final = timedelta(milliseconds=50)
_AGAIN_S: Final = 0.02
_UNPARK_EVERY_S: Final = 15.0
_TIMERS_MAY_BE_EARLY_S: Final = 0.02
_LEFT_BEHIND_S: Final = 1.0
"""Until a dispatcher looks whether a settlement left a row of its ordering key asleep."""
_UNSETTLED_BATCHES: Final = 2
_REFILL_PARTS: Final = 4
_GIVE_UP_S: Final = 0.01
_FULL_S: Final = 0.01
"""Until a full queue, or a tenant's limit, is asked again, at least: longer each time that it is still full, shorter
each time that it was not, so that it is asked about as often as there is something to add."""
_FULL_AGAIN: Final = 1.5
_FULL_NO_MORE: Final = 0.6
_LONGEST_FULL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherOptions:
    """All durations in milliseconds."""

    claim_batch_size: int = 100
    """Rows claimed by one tick, over all channels."""
    tick_interval_ms: int = 1_000
    """How often to poll without a notification of new rows."""
    lease_ms: int = 60_000
    """How long a claim holds. After a crash rows wait so long; it must exceed the slowest delivery (`timeout_ms`)."""
    fair_tenants: bool = True
    """Share claims among the tenants of a channel, by weight. Costs one more query per channel and tick. Tenants with
    limits (`bullpen outbox tenants`) are looked at either way."""
    unknown_types: Literal["dead", "leave"] = "dead"
    """dead: a row whose type no route serves is DEAD at once, with a clear code. leave: other processes serve it."""
    keep_sent_ms: int | None = 7 * 86_400_000
    """SENT rows are removed after so long; their fences stay. None: never."""
    retire_grace_ms: int = 3_600_000
    """How long a fence must be visible before its row may go; longer than any transaction that stores events."""
    retire_interval_ms: int = 60_000

    def __post_init__(self) -> None:
        for name in ("claim_batch_size", "tick_interval_ms", "lease_ms", "retire_interval_ms"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("retire_grace_ms", self.retire_grace_ms, minimum=0)
        require("fair_tenants", isinstance(self.fair_tenants, bool), "a bool", self.fair_tenants)
        if self.keep_sent_ms is not None:
            check_int("keep_sent_ms", self.keep_sent_ms, minimum=0)
        require("unknown_types", self.unknown_types in ("dead", "leave"), "'dead' or 'leave'", self.unknown_types)

    @property
    def reap_interval_ms(self) -> int:
        """A quarter of the lease: what a dead holder leaves behind waits at most that much longer."""
        return max(100, min(self.lease_ms // 4, 15_000))


class Dispatcher:
    """KeyRuns until closed. May be entered for a block instead, and then ticks when it is told to.

    `commits` gives a stream of wake-ups (`Ledger.commits`); without one only the interval helps. `is_notified`: whoever
    stores rows notifies, so what only the interval finds is a late wake-up.
    """

    def __init__(
        self,
        store: OutboxRepository,
        router: Router,
        *,
        queues: OutboxQueues | None = None,
        gates: Gates | None = None,
        limits: TenantLimits | None = None,
        options: DispatcherOptions | None = None,
        commits: Callable[[], AsyncGenerator[str, None]] | None = None,
        is_notified: bool = True,
        name: str | None = None,
    ) -> None:
        self.options = options or DispatcherOptions()
        self.name = name or worker_name()
        """What rows show as `locked_by`: `{hostname}-{pid}-{random}` unless given."""
        self._store, self._router, self._queues = store, router, queues
        self._gates = gates
        self._shares = Shares(limits)
        self._deliveries = OutboxDeliveries(
            store, worker_id=self.name, source=_SOURCE, lease_ms=self.options.lease_ms, gates=gates
        )
        self._commits = commits
        self._is_notified = commits is not None and is_notified
        self._ticker = Ticker("outbox dispatcher", self._look, every=self.options.tick_interval_ms)
        self._reaper = Ticker("outbox reaper", self.reap, every=self.options.reap_interval_ms)
        self._retirement = Ticker("outbox retention", self.retire, every=self.options.retire_interval_ms)
        self._life = Lifecycle("outbox dispatcher", self._begin, self._end)
        self._ended = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: Counter[str] = Counter()
        """Rows per integration type that were handed on and are not sent or queued yet."""
        self._lines: defaultdict[str, deque[tuple[OutboxRow, float]]] = defaultdict(deque)
        """Claimed rows of direct routes that nobody sends yet, each with the end of its lease."""
        self._senders: Counter[str] = Counter()
        self._spare: dict[str, asyncio.Task[None]] = {}
        """Senders that have not begun yet, by type."""
        self._runs = KeyRuns(store, self._shares)
        self._gives_up_at: defaultdict[str, float] = defaultdict(float)
        """When a line of an ordering key next leaves its place to others that wait, by type."""
        self._unsettled = 0
        """Rows that were sent, and whose outcome is on its way to the database."""
        self._starved: set[str] = set()
        """Types that had more than they may have under way: the next free place is a reason to look."""
        self._held_back: set[str] = set()
        """Types with due rows that something outside holds back (a gate, a full queue): asked for at every interval."""
        self._was_held_back: set[str] = set()
        self._full: set[str] = set()
        """Types whose queue holds enough jobs for now, or whose tenants have as much as they may."""
        self._full_pause_s = _FULL_S
        self._notified, self._notified_at = 0, 0.0
        self._overlooked: list[tuple[int, OutboxRow]] = []
        """Rows that the interval found, each with how many notifications had come by then."""
        self._tenant_cursor: defaultdict[str, str] = defaultdict(str)
        self._type_cursor = ""
        self._next_unpark = 0.0
        self._next_plan = 0.0
        """Until then nobody asks again when something is due next, while places are what is missing."""
        self._is_closing = False
        self._close_timeout_s = self.options.lease_ms / 1000
        for pattern, route in router.items():
            self._check_route(pattern, route)

    def _check_route(self, pattern: str, route: Route) -> None:
        option, lease_ms = f"routes[{pattern!r}]", self.options.lease_ms
        has_queues = route.is_direct or self._queues is not None
        require(f"{option}.strategy", has_queues, "'direct', or an outbox with a Redis connection", "queued")
        is_shorter = not route.is_direct or route.timeout_ms is None or route.timeout_ms < lease_ms
        require(f"{option}.timeout_ms", is_shorter, f"less than the lease ({lease_ms})", route.timeout_ms)

    # ---- running ------------------------------------------------------------------------------------------------

    async def run(self, *, signals: bool | None = None) -> None:
        """Work until closed. Signals are for the app, or whoever calls this."""
        await self._life.start()
        await self._ended.wait()

    async def start(self) -> None:
        """Begin to dispatch in the background."""
        await self._life.start()

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Claim no more, let what is under way end, then stop. What is unfinished after `timeout` is cancelled: its
        lease runs out and the row comes back. Safe to call twice."""
        if timeout is not None:
            self._close_timeout_s = to_ms("timeout", timeout) / 1000
        if self._close_timeout_s == 0:  # hurries a close that is under way, too
            for task in self._tasks:
                task.cancel()
        await self._life.stop()
        self._ended.set()

    async def __aenter__(self) -> Self:
        """For a block in which `tick` and `reap` are called by hand."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._finish()

    def wake(self) -> None:
        """Look now: somebody knows of new rows."""
        self._ticker.wake()

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks or self._unsettled:  # a row that is settled may bring the next of its ordering key
            if self._tasks:
                await asyncio.wait(list(self._tasks))
            await self._deliveries.idle()

    async def _begin(self) -> None:
        await self._ticker.start()
        await self._reaper.start()
        if self.options.keep_sent_ms is not None:
            await self._retirement.start()
        self._listener = asyncio.create_task(self._listen(), name="bullpen outbox listener")

    async def _end(self) -> None:
        """Stop claiming; wait; cancel what is left; settle. Channels and connections go last, they belong to others."""
        if self._listener is not None:  # else the beginning failed before it
            await end(self._listener)
        self._judge_late_wakeups()
        for ticker in (self._ticker, self._reaper, self._retirement):
            await ticker.stop()
        await self._finish()
        self._ended.set()

    async def _finish(self) -> None:
        self._is_closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._close_timeout_s):
                await self.idle()
        await end(*self._tasks)
        await self._deliveries.idle()

    async def _listen(self) -> None:
        if self._commits is None:
            return
        async with contextlib.aclosing(self._commits()) as commits:
            async for what in commits:
                if what == LINE:
                    self._plan_unpark()
                    continue
                self._notified += 1
                self._notified_at = time.monotonic()
                self._ticker.wake()

    def _plan_unpark(self) -> None:
        """Some row was the last of its ordering key as far as its settlement saw. One that came meanwhile is woken by
        whoever settled it; if that process died before it could, here."""
        soon = time.monotonic() + _LEFT_BEHIND_S
        if self._next_unpark > soon:
            self._next_unpark = soon
            self._reaper.wake_in(_LEFT_BEHIND_S)

    # ---- claiming -----------------------------------------------------------------------------------------------

    async def _look(self) -> bool:
        """A tick, and then a plan for the rows that wait for their time: nobody will tell that it has come."""
        more = await self.tick()
        if not more:
            self._ticker.wake_in(await self._seconds_until_due())
        return more

    def _seconds_until_room(self) -> float | None:
        """When to ask again where there was no room: queues that were full, out of which workers take jobs and tell
        nobody, and destinations that asked to be left alone for a while."""
        opens_s = None if self._gates is None else self._gates.opens_in_s()
        if not self._full:
            return opens_s
        pause_s = min(self._full_pause_s, self.options.tick_interval_ms / 1000)
        self._full_pause_s = min(self._full_pause_s * _FULL_AGAIN, _LONGEST_FULL_S)
        return pause_s if opens_s is None else min(pause_s, opens_s)

    async def _seconds_until_due(self) -> float | None:
        if self._starved and time.monotonic() < self._next_plan:
            return _AGAIN_S  # a place that becomes free comes first, and after each batch one does
        self._next_plan = time.monotonic() + _AGAIN_S
        left_ms = await self._store.next_due_ms()
        if (until_room_s := self._seconds_until_room()) is not None:
            return until_room_s if not left_ms else min(until_room_s, left_ms / 1000)
        if left_ms is None or left_ms > 0:
            return None if left_ms is None else left_ms / 1000
        # Due already: since the tick, or held by another dispatcher in that moment, which will not tell when it lets
        # go. Types that have no room wait for something else than time.
        return _AGAIN_S if set(await self._store.due_types()) - self._starved else None

    async def tick(self, limit: int | None = None) -> bool:
        """Claim one batch and hand it on. True: there is more, and room for it at once."""
        types = await self._store.due_types()
        if not types:
            self._held_back = set()
            self._full.clear()
            return False
        under_way = dict(self._under_way)
        self._full.clear()
        # All at once: with a queue each they share a few round trips, and one that does not answer costs one wait.
        room = dict(zip(types, await asyncio.gather(*(self._room(name) for name in types)), strict=True))
        served = [name for name in types if room[name] > 0]
        self._starved = set(types) - set(served)
        self._was_held_back, self._held_back = (
            self._held_back,
            {name for name in self._starved if not under_way.get(name)},
        )
        lanes = await self._share(served, room, self.options.claim_batch_size if limit is None else limit)
        full = [
            await self._claim([lane for lane in lanes if self._kind(lane.integration_type) == kind], kind)
            for kind in ("direct", "queued", "unknown")
        ]
        # A batch may have ended after its places were counted and before its type was noted as starved: then nobody
        # was woken, so compare with what was counted.
        has_room = any(self._under_way[name] < under_way.get(name, 0) for name in self._starved)
        return has_room or any(full)

    def _kind(self, integration_type: str) -> str:
        route = self._router.resolve(integration_type)
        if route is None:
            return "unknown"
        return "direct" if route.is_direct else "queued"

    async def _room(self, integration_type: str) -> int:
        """How many more rows of a type may be handed on now."""
        free = await self._free(integration_type)
        return free if self._gates is None or free <= 0 else await self._gates.room(integration_type, free)

    async def _free(self, integration_type: str) -> int:
        route = self._router.resolve(integration_type)
        batch = self.options.claim_batch_size
        if route is None:
            return batch if self.options.unknown_types == "dead" else 0
        if route.is_direct:
            # Rows that were sent need no place at the target any more; a database that is slow to write their outcomes
            # still bounds how many there are.
            is_behind = self._unsettled >= _UNSETTLED_BATCHES * max(batch, route.concurrency)
            return 0 if is_behind else route.concurrency - self._under_way[integration_type]
        if self._queues is None:
            return 0
        name = queue_name(integration_type)
        if not await self._queues.is_open(name):
            return 0
        free = batch - self._under_way[integration_type]
        if route.split_tenants or free <= 0:
            return free
        room = await self._queues.room(name, route.max_queued - self._under_way[integration_type])
        # Not for a handful of rows: a queue that is nearly full is filled when a part of it has been worked on.
        if room < min(batch, max(1, route.max_queued // _REFILL_PARTS)):
            self._full.add(integration_type)
            return 0
        return min(free, room)

    async def _share(self, types: Sequence[str], room: dict[str, int], limit: int) -> list[Lane]:
        """An equal share of the batch for each lane; what one leaves over the next tick gives to the others. Of more
        lanes than a batch has rows, as many as it has, beginning behind the last one that was served."""
        if len(types) > limit:
            later = [name for name in types if name > self._type_cursor]
            types = [*later, *(name for name in types if name <= self._type_cursor)][:limit]
            self._type_cursor = types[-1]
        share = max(1, limit // max(1, len(types)))
        if types:
            await self._shares.refresh()
        by_tenant = self.options.fair_tenants or not self._shares.is_empty
        lanes = []
        for name in types:
            quota = min(share, room[name])
            is_shared = by_tenant and not (self._shares.is_empty and self._is_of_one_tenant(name))
            lanes += await self._share_tenants(name, quota) if is_shared else [Lane(name, quota)]
        return lanes

    def _is_of_one_tenant(self, integration_type: str) -> bool:
        route = self._router.resolve(integration_type)
        return route is not None and route.one_tenant

    async def _share_tenants(self, integration_type: str, quota: int) -> list[Lane]:
        """As many tenants as may share the quota, beginning behind the last one that was served."""
        most = self._shares.most_tenants(quota)
        after = self._tenant_cursor[integration_type]
        tenants = await self._store.due_tenants(integration_type, after=after, most=most)
        if len(tenants) < most and after:
            first = await self._store.due_tenants(integration_type, most=most - len(tenants))
            tenants += [tenant for tenant in first if tenant < after]
        if not tenants:
            return []
        # The next name that could exist: "\0" is the smallest character, and no tenant's name has it. With all of them
        # in this claim the next one begins at the first name again, which saves the second look.
        self._tenant_cursor[integration_type] = f"{tenants[-1]}\x01" if len(tenants) == most else ""
        return self._shares.lanes(integration_type, tenants, quota)

    async def _claim(self, lanes: Sequence[Lane], kind: str) -> bool:
        if not lanes:
            return False
        began = time.monotonic()
        claimed = await self._store.claim(
            lanes, worker_id=self.name, lease_ms=self.options.lease_ms, starting=kind == "direct"
        )
        took_ms = (time.monotonic() - began) * 1000
        telemetry.emit("outbox.claimed", count=len(claimed.rows), took_ms=took_ms, kind=kind)
        if claimed.rows:
            count = len(claimed.rows)
            if kind == "queued" or claimed.held_types:
                self._full_pause_s = max(_FULL_S, self._full_pause_s * _FULL_NO_MORE)
            log("OUTBOX_CLAIM", "SUCCESS", source=_SOURCE, level=logging.DEBUG, count=count, durationMs=round(took_ms))
            if self._ticker.is_fallback and self._is_notified:
                self._suspect_late_wakeup(claimed.rows)
        until = began + self.options.lease_ms / 1000
        match kind:
            case "direct":
                for row in claimed.rows:
                    self._put_in_line(row, until)
            case "queued":
                for name, rows in self._by_queue(claimed.rows):
                    self._hand_on(rows, self._enqueue(name, rows, until))
            case _:
                self._hand_on(claimed.rows, self._bury(claimed.rows, until))
        self._full |= claimed.held_types
        self._held_back |= claimed.held_types
        # A lane whose places are all taken is no reason to look again at once: a place that becomes free is.
        again = False
        for integration_type, _ in claimed.full_lanes:
            if kind == "direct" and self._under_way[integration_type] >= self._route(integration_type).concurrency:
                self._starved.add(integration_type)
            else:
                again = True
        return again

    def _suspect_late_wakeup(self, rows: Sequence[OutboxRow]) -> None:
        """Only the interval found these. Of one that was committed in this very moment the notification is on its way,
        so wait for that; and before the first one nobody listens yet."""
        quiet_s = time.monotonic() - self._notified_at
        overlooked = [row for row in rows if row.integration_type not in self._was_held_back and _waited(row, quiet_s)]
        if overlooked and self._notified:
            self._overlooked.append((self._notified, overlooked[0]))
            asyncio.get_running_loop().call_later(_NOTIFICATION_WITHIN_S, self._judge_late_wakeups)

    def _judge_late_wakeups(self) -> None:
        suspected, self._overlooked = self._overlooked, []
        for notified, row in suspected:
            if notified == self._notified:
                telemetry.late_wakeup("dispatcher", integration_type=row.integration_type, outbox_id=row.id)

    def _route(self, integration_type: str) -> Route:
        route = self._router.resolve(integration_type)
        assert route is not None
        return route

    def _by_queue(self, rows: Iterable[OutboxRow]) -> Iterable[tuple[str, list[OutboxRow]]]:
        queues: dict[str, list[OutboxRow]] = defaultdict(list)
        for row in rows:
            tenant = row.tenant_id if self._route(row.integration_type).split_tenants else None
            queues[queue_name(row.integration_type, tenant)].append(row)
        return queues.items()

    # ---- handing on ---------------------------------------------------------------------------------------------

    def _hand_on(self, rows: Sequence[OutboxRow], work: Coroutine[Any, Any, None]) -> None:
        """Let work on rows go on beside the ticks."""
        types = Counter(row.integration_type for row in rows)
        self._under_way.update(types)
        task = asyncio.create_task(work, name="bullpen outbox dispatch")
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._under_way.subtract(types)
            if not done.cancelled() and (error := done.exception()) is not None:
                _log.error("dispatching failed; its rows become due again when their lease ends", exc_info=error)
            if self._starved & set(types):
                self._ticker.wake()

        task.add_done_callback(over)

    def _put_in_line(self, row: OutboxRow, until: float) -> None:
        self._under_way[row.integration_type] += 1
        self._lines[row.integration_type].append((row, until))
        self._add_sender(row.integration_type)

    def _add_sender(self, integration_type: str) -> None:
        """See that somebody takes the next row of a line, if there is one and if the route allows one more.

        One spare sender is enough: as soon as it begins, it sees to the next one. So a target that answers at once is
        served by one task, and each row that has to wait for an answer has a task of its own."""
        if not self._lines[integration_type] or integration_type in self._spare:
            return
        if self._senders[integration_type] >= self._route(integration_type).concurrency:
            return
        self._senders[integration_type] += 1
        task = asyncio.create_task(self._send_line(integration_type), name="bullpen outbox dispatch")
        self._spare[integration_type] = task
        self._tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if self._spare.get(integration_type) is done:  # cancelled before it began
                del self._spare[integration_type]
            self._senders[integration_type] -= 1
            if not done.cancelled():
                if (error := done.exception()) is not None:
                    _log.error("dispatching failed; its row becomes due again when its lease ends", exc_info=error)
                self._add_sender(integration_type)

        task.add_done_callback(over)

    async def _send_line(self, integration_type: str) -> None:
        route, line = self._route(integration_type), self._lines[integration_type]
        del self._spare[integration_type]
        while line:
            row, until = line.popleft()
            self._add_sender(integration_type)
            began = time.monotonic()
            sent: list[tuple[OutboxRow, RowOutcome]] = []
            try:
                if await self._send(row, route, until, sent) and row.ordering_key is not None:
                    for each in await self._runs.behind(row, route):
                        is_over = self._is_closing or self._runs.is_over(began)
                        if is_over or not await self._send(each, route, until, sent):
                            break
            finally:
                self._under_way[integration_type] -= 1
                self._wake_if_starved(integration_type)
                if sent:  # also of a run that is cancelled in the middle
                    self._unsettled += 1
                    self._deliveries.settle_soon(
                        *sent[0],
                        until=until,
                        took_ms=(time.monotonic() - began) * 1000 / len(sent),
                        operation="OUTBOX_DIRECT_SEND",
                        takes_next=row.ordering_key is not None and self._takes_next(integration_type),
                        then=partial(self._on_settled, row, time.monotonic()),
                        run=sent[1:],
                    )

    async def _send(self, row: OutboxRow, route: Route, until: float, sent: list[tuple[OutboxRow, RowOutcome]]) -> bool:
        """Whether the target took it. What became of it is noted in `sent`, unless it was not even begun."""
        outcome = await self._deliveries.attempt(row, route, until=until, operation="OUTBOX_DIRECT_SEND")
        if outcome is not None:
            sent.append((row, outcome))
        return isinstance(outcome, Sent)

    def _takes_next(self, integration_type: str) -> bool:
        """Whether the next of an ordering key keeps the place of the one before it. Where others wait for a place, one
        is given up now and then: as many keys as places would hold them all for as long as they have rows."""
        now = time.monotonic()
        if integration_type in self._starved and now >= self._gives_up_at[integration_type]:
            self._gives_up_at[integration_type] = now + _GIVE_UP_S
            return False
        return not self._is_closing

    def _on_settled(self, row: OutboxRow, asked_at: float, settled: SettledRow | None) -> None:
        self._unsettled -= 1
        integration_type = row.integration_type
        if row.ordering_key is not None:
            self._runs.settled(row, settled)
        if settled is not None and settled.next is not None:
            self._put_in_line(settled.next, asked_at + self.options.lease_ms / 1000)
        if self._starved or integration_type in self._full:  # a limit of its tenant may have kept the next one back
            self._ticker.wake()

    def _wake_if_starved(self, integration_type: str) -> None:
        if integration_type in self._starved:
            self._ticker.wake()

    async def _enqueue(self, name: str, rows: Sequence[OutboxRow], until: float) -> None:
        assert self._queues is not None
        telemetry.emit("outbox.enqueueing", queue=name, count=len(rows))
        placed = await self._queues.place(name, rows)
        telemetry.emit("outbox.enqueued", queue=name, count=len(rows))
        running = [row for row, place, _ in placed if place is Placed.RUNNING]
        if running:
            # If that job has just ended a delivery, nobody will look at the row again before its lease ends.
            with contextlib.suppress(DatabaseUnavailable):
                await self._store.extend(running, _RUNNING_LEASE_MS)
        back: list[tuple[OutboxRow, RowOutcome]] = []
        for row, place, reason in placed:
            if place in (Placed.QUEUED, Placed.RUNNING):
                log("OUTBOX_ENQUEUE_JOB", "SUCCESS", row, source=_SOURCE, level=logging.DEBUG, queue=name)
                continue
            log("OUTBOX_ENQUEUE_JOB", "ERROR", row, source=_SOURCE, level=logging.WARNING, queue=name, error=place)
            if place is Placed.IMPOSSIBLE:
                back.append((row, Died(scrub(reason), UNQUEUABLE, counted=False)))
            else:
                # Redis being away is no failed delivery: nothing is counted, or an outage would kill rows untried.
                back.append((row, Released(_REDIS_RETRY_MS, scrub(reason))))
        await asyncio.gather(*(self._deliveries.settle(row, outcome, until=until) for row, outcome in back))

    async def _bury(self, rows: Sequence[OutboxRow], until: float) -> None:
        for row in rows:
            log("OUTBOX_CLAIM", "ERROR", row, source=_SOURCE, level=logging.ERROR, error=UNKNOWN_TYPE)
        reason = "no route serves this integration type; register one and redrive the row"
        outcome = Died(reason, UNKNOWN_TYPE, counted=False)
        await asyncio.gather(*(self._deliveries.settle(row, outcome, until=until) for row in rows))
        for row in rows:
            telemetry.emit(
                "outbox.delivered",
                outbox_id=row.id,
                integration_type=row.integration_type,
                tenant_id=row.tenant_id,
                status="DEAD",
                code=UNKNOWN_TYPE,
                attempts=row.attempts,
                took_ms=0.0,
            )

    # ---- looking after ------------------------------------------------------------------------------------------

    async def reap(self) -> bool:
        """Give back rows whose holder died. True: there were as many as one step takes."""
        rows = await self._store.expired(_REAP_BATCH)
        if rows:
            outcomes = [(row, judge_lost(row)) for row in rows]
            # One by one if need be: a row that cannot be written must not keep the others from coming back.
            settled = await self._deliveries.settle_each(
                [Settlement(row, outcome, self.name) for row, outcome in outcomes]
            )
            for (row, outcome), done in zip(outcomes, settled, strict=True):
                if done.status is None:
                    continue  # its holder was only slow, or another reaper was faster
                counted, status = not isinstance(outcome, Released), str(done.status)
                telemetry.emit(
                    "outbox.reaped", outbox_id=row.id, integration_type=row.integration_type, counted=counted
                )
                log("OUTBOX_REAP", "SUCCESS", row, source=_SOURCE, level=logging.WARNING, outcome=status)
            self._ticker.wake()
        if time.monotonic() >= self._next_unpark - _TIMERS_MAY_BE_EARLY_S:
            self._next_unpark = time.monotonic() + _UNPARK_EVERY_S
            if woken := await self._store.unpark():
                telemetry.emit("outbox.unparked", count=woken)
                log("OUTBOX_REAP", "SUCCESS", source=_SOURCE, level=logging.WARNING, outcome="UNPARKED", count=woken)
                self._ticker.wake()
        return len(rows) == _REAP_BATCH

    async def retire(self) -> bool:
        """Remove what was sent long ago, in small steps. True: more is left than these steps took."""
        assert self.options.keep_sent_ms is not None
        for _ in range(_RETIRE_STEPS):
            fenced, deleted = await self._store.retire(
                keep_ms=self.options.keep_sent_ms, grace_ms=self.options.retire_grace_ms
            )
            if fenced or deleted:
                log("OUTBOX_RETENTION", "SUCCESS", source=_SOURCE, level=logging.DEBUG, fenced=fenced, deleted=deleted)
                telemetry.emit("outbox.retired", fenced=fenced, deleted=deleted)
            else:
                return False
        return True


def _waited(row: OutboxRow, quiet_s: float) -> bool:
    """Ready since it was stored, and no notification has come since. (For one that waits for its time, or comes back, a
    timer is set.)"""
    if row.locked_at is None or row.attempts or row.due_at - row.created_at > _AT_ONCE:
        return False
    return _OVERLOOKED_S < (row.locked_at - row.due_at).total_seconds() < quiet_s

"""The scheduler: every minute, find what falls due within the next hour and hand it to the broker, never early.

In: rows CREATED whose instant is near, and rows whose lease ended. Out: orders in the broker, each with a delay until
its instant; rows QUEUED, with the broker's confirm noted. One life of a row here:

    claim (QUEUED, lease) ──▶ publish with delay ──▶ broker confirms ──▶ note it (lease of a day)

Dying between two of these steps leaves a lease that ends: the row is published again, and the second order finds the
message sent. A broker that refuses leaves the row CREATED for the next run; one that was published before stays QUEUED.
Any number of schedulers may run; one never overlaps itself. A transport without delays gets rows when they are due.
Elsewhere: making the rows (`planner`), what becomes of an order (`sender`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bullpen._kernel import cron, telemetry
from bullpen._kernel.duration import check_int
from bullpen._kernel.logs import get_logger
from bullpen._kernel.service import BaseService
from bullpen._kernel.ticker import Ticker
from bullpen.errors import BullpenError, InvalidOption, PublishFailed, require
from bullpen.ledger.checkpoints import Checkpoints
from bullpen.ledger.message_records import ToPublish
from bullpen.ledger.messages import SqlMessages
from bullpen.messages.kinds import StoredKinds
from bullpen.messages.orders import make_order
from bullpen.messages.planner import Planner
from bullpen.ports.messaging import Messaging, Outgoing

__all__ = ["MessageEnqueuer", "Scheduler", "SchedulerHealth", "SchedulerOptions", "read_health"]

logger = get_logger("bullpen.messages")

_RUN: Final = "messages.scheduler.run"
_SUCCESS: Final = "messages.scheduler.success"
"""Names under which the last run and the last one that succeeded are noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """When the scheduler runs, and how far it looks."""

    schedule: str = "* * * * *"
    """Cron pattern in UTC. A message is as late as the pattern is coarse; look-ahead makes up for it."""
    look_ahead_ms: int = 3_600_000
    """How long before its instant a message is given to the broker, which holds it back. 0: when it is due."""
    horizon_ms: int = 172_800_000
    """How far ahead messages are planned. Long enough for a weekend without a scheduler."""
    lease_ms: int = 60_000
    """How long publishing may take before another scheduler publishes the same row."""
    lost_after_ms: int = 90_000_000
    """A confirmed order that has led to nothing so long after its instant is published again. More than the broker's
    TTL of 24 h, so that the first copy is gone."""
    late_after_ms: int = 30_000
    """An order that the broker held back, and that is with no sender so long after its instant, is published once more:
    a broker that was away meanwhile may let the rest of the delay run in full. The sender finds the second copy sent.
    """
    batch: int = 1_000
    """Rows claimed at a time."""

    def __post_init__(self) -> None:
        cron.next_after(self.schedule, None, 0)
        check_int("look_ahead_ms", self.look_ahead_ms, minimum=0)
        check_int("lease_ms", self.lease_ms, minimum=1)
        check_int("lost_after_ms", self.lost_after_ms, minimum=1)
        check_int("late_after_ms", self.late_after_ms, minimum=1)
        check_int("batch", self.batch, minimum=1)
        check_int("horizon_ms", self.horizon_ms, minimum=1)
        fits = self.horizon_ms >= self.look_ahead_ms
        require("horizon_ms", fits, f"at least the look-ahead of {self.look_ahead_ms}", self.horizon_ms)


class MessageEnqueuer:
    """Publishes rows that are near their instant."""

    def __init__(self, store: SqlMessages, messaging: Messaging[Any], *, queue: str, options: SchedulerOptions) -> None:
        self._store, self._messaging, self._queue, self.options = store, messaging, queue, options
        self._ahead_ms = options.look_ahead_ms if messaging.features.delays else 0

    async def run_once(self) -> tuple[int, int]:
        """One run: all that is due within the look-ahead, however old. Returns how many were found and published."""
        late = await self._store.give_up_late()
        for (status, occasion, channel), count in late.items():
            logger.warning("%d messages of %s by %s were too late and are now %s", count, occasion, channel, status)
            telemetry.emit("messages.late", status=str(status), occasion=occasion, channel=channel, count=count)
        found, published = 0, 0
        for claim, may_be_there in ((self._claim_due, False), (self._claim_again, True)):
            while batch := await claim():
                confirmed = await self._publish(batch, may_be_there=may_be_there)
                found, published = found + len(batch), published + confirmed
                if confirmed < len(batch) // 2 or len(batch) < self.options.batch:
                    # Done; or the broker is full or away, and the next run will see whether it has recovered.
                    break
        return found, published

    async def _claim_due(self) -> list[ToPublish]:
        options = self.options
        return await self._store.claim(ahead_ms=self._ahead_ms, lease_ms=options.lease_ms, limit=options.batch)

    async def _claim_again(self) -> list[ToPublish]:
        found = await self._store.claim_again(lease_ms=self.options.lease_ms, limit=self.options.batch)
        if found:
            logger.warning("%d messages are published again: they are late, or their state is unknown", len(found))
        return found

    async def _publish(self, batch: Sequence[ToPublish], *, may_be_there: bool) -> int:
        telemetry.emit("messages.claimed", count=len(batch))
        problems = await self._produce(batch)
        confirmed = [message for message, problem in zip(batch, problems, strict=True) if problem is None]
        refused = [(message, problem) for message, problem in zip(batch, problems, strict=True) if problem is not None]
        telemetry.emit("messages.publishing_done", count=len(confirmed), refused=len(refused))
        if confirmed:
            await self._store.confirm(
                confirmed, lost_after_ms=self.options.lost_after_ms, late_after_ms=self.options.late_after_ms
            )
        if refused:
            if not may_be_there:
                # Else it stays QUEUED, and comes round after the lease: an earlier order, which the broker may have,
                # would find it CREATED and pass it over.
                await self._store.unclaim(refused)
            logger.warning(
                "%d of %d messages were not accepted by the broker: %s", len(refused), len(batch), refused[0][1]
            )
        telemetry.emit("messages.published", count=len(confirmed), refused=len(refused))
        return len(confirmed)

    async def _produce(self, batch: Sequence[ToPublish]) -> list[str | None]:
        """Why each was not taken by the broker; None: it has it."""
        try:
            results = await self._messaging.produce_many(self._queue, map(_outgoing, batch))
        except InvalidOption as error:  # one of them, before anything was sent: the others must not wait for it
            if len(batch) == 1:
                logger.error("message %s cannot be published: %s", batch[0].id, error)
                return [str(error)]
            return [problem for message in batch for problem in await self._produce([message])]
        except BullpenError as error:
            return [str(error)] * len(batch)
        return [result.reason if isinstance(result, PublishFailed) else None for result in results]


def _outgoing(message: ToPublish) -> Outgoing:
    return Outgoing(
        name=message.occasion,
        data=make_order(message),
        # Another publication is another event: a broker that knows ids would drop it as a duplicate.
        idempotency_key=f"{message.id}-{message.publication}",
        delay=message.delay_ms,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerHealth:
    """How the scheduler is."""

    last_run: datetime | None
    last_success: datetime | None
    found: int
    """Rows of the last successful run."""
    published: int
    queue_lag_ms: int
    """How long the oldest due message waits to be queued."""
    send_lag_ms: int
    """How long the oldest due and queued message waits to be sent."""
    reason: str
    """Why it is unhealthy; empty when it is not."""

    @property
    def is_healthy(self) -> bool:
        return not self.reason


class Scheduler(BaseService):
    """Plans and enqueues on a cron pattern in UTC. An app runs it; `run_once` is one tick."""

    def __init__(
        self,
        store: SqlMessages,
        kinds: StoredKinds,
        planner: Planner,
        enqueuer: MessageEnqueuer,
        *,
        checkpoints: Checkpoints,
    ) -> None:
        super().__init__("scheduler of messages")
        self._store, self._kinds, self._planner, self._enqueuer = store, kinds, planner, enqueuer
        self._checkpoints = checkpoints
        self.options = enqueuer.options
        self._ticker = Ticker("messages", self.run_once, cron=self.options.schedule, tz="UTC")

    async def run_once(self) -> None:
        """One tick: plan what comes near, then publish what falls due. What it did is noted for `health`.

        Before that, what was planned when a kind was sent at another time is planned again.
        """
        telemetry.emit("messages.run_started")
        began = await self._store.note(self._checkpoints, _RUN, "{now} 0 0")
        await self._kinds.write()
        await self._planner.run_until_done()
        found, published = await self._enqueuer.run_once()
        await self._store.note(self._checkpoints, _SUCCESS, f"{_epoch_ms(began)} {found} {published}")
        telemetry.emit("messages.run_ended", found=found, published=published)

    async def _begin(self) -> None:
        await self._ticker.start()  # what fails is logged, and tried again at the next tick

    async def _end(self) -> None:
        await self._ticker.stop()

    async def health(self) -> SchedulerHealth:
        """How all schedulers of this ledger are; see `read_health`."""
        return await read_health(self._store, self._checkpoints, self.options)


async def read_health(store: SqlMessages, checkpoints: Checkpoints, options: SchedulerOptions) -> SchedulerHealth:
    """What is known about the last runs of all schedulers, and how far behind messages are.

    A missed run makes it unhealthy, whoever should have made it.
    """
    last_run, _, _ = _read_note(await checkpoints.read(_RUN))
    last_success, found, published = _read_note(await checkpoints.read(_SUCCESS))
    queue_lag_ms, send_lag_ms = await store.lags_ms()
    return SchedulerHealth(
        last_run=last_run,
        last_success=last_success,
        found=found,
        published=published,
        queue_lag_ms=queue_lag_ms,
        send_lag_ms=send_lag_ms,
        reason=_ill_because(options.schedule, last_success, await store.now()),
    )


def _ill_because(schedule: str, last_success: datetime | None, now: datetime) -> str:
    if last_success is None:
        return "no run has succeeded yet"
    # The run of the next slot must have succeeded by the slot after it.
    slot = cron.next_after(schedule, "UTC", _epoch_ms(last_success))
    if _epoch_ms(now) <= cron.next_after(schedule, "UTC", slot):
        return ""
    return f"a run was missed: the last success was {last_success:%Y-%m-%d %H:%M:%S} UTC"


def _read_note(note: str | None) -> tuple[datetime | None, int, int]:
    if note is None:
        return None, 0, 0
    at, found, published = map(int, note.split())
    return datetime.fromtimestamp(at / 1000, UTC), found, published


def _epoch_ms(instant: datetime) -> int:
    # Cut, not rounded, as the ledger writes its own: the two are compared.
    return (instant - datetime.fromtimestamp(0, UTC)) // timedelta(milliseconds=1)

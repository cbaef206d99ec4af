"""The watch of an application: what it looks at, whom it tells, and one service for `run`.

In: settings, ledger, connection, and the stores of dead letters that the program added. Out: a `Watcher`, the routes
that alerts leave by, and the service of the role `alerts`. That service delivers its alerts itself, straight from the
database: an alert must not need the dispatcher, the workers or the Redis server that it tells of.
Elsewhere: looking, judging and storing (`bullpen.ops`), the channels (`channels`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from bullpen._kernel.logs import get_logger
from bullpen._kernel.patience import Patience
from bullpen._kernel.service import BaseService
from bullpen._kernel.ticker import Ticker
from bullpen.errors import BullpenError, DatabaseUnavailable, NotConfigured
from bullpen.ledger import Ledger
from bullpen.ops.alerts import Seen, Target, Watcher
from bullpen.ops.symptoms import (
    QueueNames,
    Source,
    Symptom,
    dead_letter_symptoms,
    is_away,
    ledger_symptoms,
    queue_symptoms,
)
from bullpen.outbox import Dispatcher, DispatcherOptions, Outbox, Route
from bullpen.ports.dead_letters import DeadLetterStore
from bullpen.queue.browse import find_queues
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.wiring.channels import Channels

__all__ = ["AlertService", "alert_routes", "make_watcher"]

logger = get_logger("bullpen.alerts")

_NAME: Final = "bullpen-alerts"
_RETRY_S: Final = 5.0
_LEASE_MS: Final = 20_000
"""Shorter than for other messages: when a watcher dies while it sends, the next alert of the rule waits for this."""


def make_watcher(
    settings: Settings,
    ledger: Ledger,
    find_connection: Callable[[], Connection | None],
    prefix: str,
    stores: Callable[[], Iterable[DeadLetterStore]],
) -> Watcher:
    """The configured watch. Nothing is connected yet. `find_connection` gives None where queues are not used."""
    chosen = limits = settings.alerts

    async def list_queues() -> list[str]:
        connection = find_connection()
        return [] if connection is None else await find_queues(connection, prefix)

    names = QueueNames(list_queues)

    async def look_at_queues(connection: Connection | None, readable: set[Source]) -> list[Symptom]:
        # Counting the letters of a Kafka topic is reading them all: nothing to do twice a minute.
        countable = [store for store in stores() if not getattr(store, "counts_by_reading", False)]
        if connection is None:
            return await _read("queues", dead_letter_symptoms(countable, limits), readable)
        readable.add("redis")
        if (away := await is_away(connection)) is not None:
            return [away]
        return await _read("queues", queue_symptoms(connection, prefix, limits, countable, names), readable)

    async def look() -> Seen:
        readable: set[Source] = set()
        signs = await look_at_queues(find_connection(), readable)
        signs += await _read("ledger", ledger_symptoms(ledger, limits), readable)
        return Seen(signs, frozenset(readable))

    targets = _targets(settings)
    return Watcher(ledger, look, targets, telling=chosen, every_ms=chosen.every_ms, label=chosen.label or "")


async def _read(source: Source, look: Awaitable[list[Symptom]], readable: set[Source]) -> list[Symptom]:
    try:
        found = await look
    except (BullpenError, OSError) as error:
        logger.warning("%s could not be checked, so their incidents are neither reported nor closed: %s", source, error)
        return []
    readable.add(source)
    return found


def _targets(settings: Settings) -> list[Target]:
    chosen = settings.alerts
    given = {"webhook": chosen.webhook_url, "slack": chosen.slack_url, "email": chosen.email, "sms": chosen.sms}
    reached = {"email": chosen.email, "sms": chosen.sms}
    return [Target(f"{kind}:{_NAME}", reached.get(kind)) for kind, value in given.items() if value]


def alert_routes(settings: Settings) -> dict[str, Route]:
    """How the configured alerts leave: from the database straight to the target."""
    chosen, channels = settings.alerts, Channels(settings)
    made: dict[str, Any] = {}
    if chosen.webhook_url:
        made["webhook"] = channels.webhook(
            chosen.webhook_url, secret=chosen.webhook_secret, body="payload", **_trusted(chosen.webhook_url)
        )
    if chosen.slack_url:
        made["slack"] = channels.slack(chosen.slack_url, **_trusted(chosen.slack_url))
    if chosen.email:
        made["email"] = channels.email()
    if chosen.sms:
        # A second message costs less than an incident that nobody heard of.
        made["sms"] = channels.sms(when_unknown="resend", **_trusted(settings.sms.url or ""))
    return {f"{kind}:{_NAME}": Route(channel=channel, strategy="direct") for kind, channel in made.items()}


def _trusted(url: str) -> dict[str, Any]:
    """The operator chose the address, and may well mean one in the own network; customers cannot."""
    return {"allow_http": url.startswith("http://"), "allowed_networks": ["0.0.0.0/0", "::/0"]}


class AlertService(BaseService):
    """Watches and delivers until closed."""

    role: Final = "alerts"

    def __init__(
        self, watcher: Watcher, ledger: Ledger, settings: Settings, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__("alerts")
        self._watcher, self._ledger, self._settings, self._prepare = watcher, ledger, settings, prepare
        self._ticker = Ticker("alerts", self._tick, every=settings.alerts.every_ms)
        self._outbox: Outbox | None = None
        self._dispatcher: Dispatcher | None = None
        self._beginning: asyncio.Task[None] | None = None

    async def _begin(self) -> None:
        self._beginning = self._spawn(self._work())  # the database may be away for long, which must not keep others

    async def _work(self) -> None:
        if not await self._ledger_is_ready():
            return
        if self._ledger.database.tenant_required:
            raise NotConfigured(
                "alerts cover all tenants: run the part `alerts` where BULLPEN_DATABASE_DUTY is service"
            )
        options = DispatcherOptions(
            tick_interval_ms=self._settings.outbox.tick_interval_ms,
            lease_ms=_LEASE_MS,
            unknown_types="leave",  # what else is in the outbox is not our business,
            keep_sent_ms=None,  # nor how long it is kept
        )
        self._outbox = Outbox(self._ledger, alert_routes(self._settings), options=options)
        self._dispatcher = self._outbox.dispatcher()
        await self._dispatcher.start()
        await self._ticker.start()

    async def _end(self) -> None:
        """Let a look that is under way end: it is short, and its transaction would be torn."""
        if self._beginning is not None:
            await asyncio.wait([self._beginning])
        await self._ticker.stop()
        if self._dispatcher is not None and self._outbox is not None:
            await self._dispatcher.close()
            await self._outbox.aclose()

    async def _ledger_is_ready(self) -> bool:
        """Wait for a database that is away: who only watches must not keep workers from working. False: closed."""
        patience, is_reported = Patience(first_s=_RETRY_S, longest_s=_RETRY_S), False
        while not self._closing.is_set():
            try:
                await self._prepare()
            except DatabaseUnavailable as error:
                if not is_reported:
                    logger.warning("nothing is watched until the database answers again: %s", error)
                is_reported = True
                await patience.pause(unless=self._closing)
            else:
                return True
        return False

    async def _tick(self) -> None:
        await self._watcher.watch()

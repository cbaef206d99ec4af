"""The outbox of an application, and what of it this process runs.

In: settings, ledger, connection. Out: an `Outbox` that adds jobs without being told how (`bullmq:*`), and one service
for `run`: the dispatcher, and workers for what is queued. With row-level security a process does one of the two, by the
role it has. Elsewhere: the parts themselves (`bullpen.outbox`), the channels (`bullpen.wiring.channels`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Final

from bullpen._kernel.service import BaseService
from bullpen.errors import NotConfigured
from bullpen.ledger import Ledger
from bullpen.ledger.late_wakeups import noting_late_wakeups
from bullpen.outbox import DeliveryWorkers, Dispatcher, DispatcherOptions, Outbox
from bullpen.outbox.outbox import JOBS
from bullpen.plugins.channels.queue import QueueChannel
from bullpen.ports.channel import ChannelHealth, Message, NotTried, SendResult
from bullpen.queue.codec import Codec
from bullpen.redis import Connection
from bullpen.settings import Settings

__all__ = ["OutboxService", "make_outbox"]

_NO_REDIS_RETRY_MS: Final = 10_000
CONNECTIONS: Final = 4
"""Database connections that dispatcher, reaper, retention and workers use at the same time."""


def make_outbox(
    settings: Settings, ledger: Ledger, connection: Connection | None, prefix: str, codec: Codec | None = None
) -> Outbox:
    """The configured outbox; only the way of jobs is known, other routes are added with `route`.

    Without a connection every other route is direct, and jobs wait for a process that has one."""
    options = DispatcherOptions(
        claim_batch_size=settings.outbox.claim_batch_size,
        tick_interval_ms=settings.outbox.tick_interval_ms,
        lease_ms=settings.outbox.lease_ms,
        fair_tenants=settings.outbox.fair_tenants,
        unknown_types=settings.outbox.unknown_types,
    )
    jobs = _NoQueues(settings) if connection is None else QueueChannel(connection, prefix=prefix, codec=codec)
    return Outbox(ledger, {JOBS: jobs}, connection=connection, prefix=prefix, options=options)


class _NoQueues:
    """Takes jobs where no Redis is configured: they stay in the database, and say why."""

    def __init__(self, settings: Settings) -> None:
        try:
            settings.connection_url()
        except NotConfigured as error:
            self._reason = str(error)

    async def send(self, message: Message) -> SendResult:
        return NotTried(self._reason, _NO_REDIS_RETRY_MS)

    async def check(self) -> ChannelHealth:
        return ChannelHealth(False, self._reason)

    async def aclose(self) -> None:
        pass


class OutboxService(BaseService):
    """Delivers until closed. Dispatcher and workers are made when it runs, so that routes may be added until then."""

    role: Final = "outbox"

    def __init__(self, outbox: Outbox, prepare: Callable[[], Awaitable[None]]) -> None:
        super().__init__("outbox")
        self._outbox, self._prepare = outbox, prepare
        self._parts: list[Dispatcher | DeliveryWorkers] = []
        self._noting = AsyncExitStack()

    async def _begin(self) -> None:
        await self._prepare()
        ledger = self._outbox.ledger
        if ledger.roles is None or ledger.duty == "service":
            self._parts.append(self._outbox.dispatcher())
        if ledger.duty == "worker" if ledger.roles is not None else self._outbox.has_queues:
            self._parts.append(self._outbox.workers())
        await self._noting.enter_async_context(noting_late_wakeups(ledger, "deliveries", "dispatcher"))
        for part in self._parts:
            await part.start()

    async def _hurry(self) -> None:
        await asyncio.gather(*(part.close(self._close_timeout) for part in self._parts))

    async def _end(self) -> None:
        """Stop both at once: what the dispatcher still hands on waits in its queue for the next worker."""
        await asyncio.gather(*(part.close(self._close_timeout) for part in self._parts))
        await self._noting.aclose()

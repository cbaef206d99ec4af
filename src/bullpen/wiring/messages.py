"""The scheduled messages of an application, on the transport that its settings name.

In: settings, ledger, and a way to the Redis connection. Out: `Messages` whose client is made on first use, when all
kinds of occasions are known, and one service for `run`. On RabbitMQ the topology has the configured names, one routing
key per kind; on the others the same queue, policy and dead letters. Elsewhere: the parts (`bullpen.messages`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen._kernel.service import BaseService
from bullpen.errors import require
from bullpen.ledger import Ledger
from bullpen.messages import Messages, SchedulerOptions, SenderOptions
from bullpen.ports.messaging import Messaging
from bullpen.redis import Connection
from bullpen.settings import Settings

_MOST_BY_ITSELF: Final = 200

__all__ = ["MessageService", "make_client", "make_messages"]


def make_messages(settings: Settings, ledger: Ledger, connection: Callable[[], Connection], prefix: str) -> Messages:
    """The configured messages. Nothing is connected yet."""
    chosen = settings.messages
    scheduler = SchedulerOptions(
        schedule=chosen.schedule,
        look_ahead_ms=chosen.look_ahead_ms,
        horizon_ms=max(SchedulerOptions().horizon_ms, 2 * chosen.look_ahead_ms),
        # Later than the broker's own end of it, so that a copy that is still there is never doubled.
        lost_after_ms=chosen.message_ttl_ms + 3_600_000,
    )
    return Messages(
        ledger,
        lambda kinds: make_client(settings, kinds, connection, prefix),
        queue=settings.rabbitmq.queue_name,
        concurrency=chosen.concurrency,
        max_concurrency=_max_concurrency(settings),
        scheduler=scheduler,
        sender=SenderOptions(attempts=chosen.max_attempts, lost_after_ms=scheduler.lost_after_ms),
    )


def _max_concurrency(settings: Settings) -> int:
    """Whoever says how many at a time means it, unless he also says how far that may go."""
    chosen, origin = settings.messages, settings.origins.get("messages.concurrency")
    is_said = origin is not None and origin.kind != "default"
    return chosen.max_concurrency or (chosen.concurrency if is_said else _MOST_BY_ITSELF)


def make_client(
    settings: Settings, kinds: tuple[str, ...], connection: Callable[[], Connection], prefix: str
) -> Messaging[Any]:
    """The client that carries orders of these kinds."""
    chosen, rabbit = settings.messages, settings.rabbitmq
    if chosen.transport == "rabbitmq":
        from bullpen.plugins.transports.rabbitmq import RabbitMQClient, Topology

        topology = Topology.scheduled_messages(
            exchange_name=rabbit.exchange_name,
            dlx_name=rabbit.dlx_name,
            queue_name=rabbit.queue_name,
            dlq_name=rabbit.dlq_name,
            routing_keys=kinds,
            ttl_ms=chosen.message_ttl_ms,
            max_length=chosen.max_queue_length,
        )
        return RabbitMQClient.for_scheduled_messages(
            rabbit.urls,
            topology=topology,
            max_retries=chosen.max_retries,
            retry_delay_ms=chosen.retry_delay_ms,
            retry_backoff=chosen.retry_backoff,
            concurrency=chosen.concurrency,
            separate_connections=rabbit.connections == 2,
        )
    policy = _policy(settings)
    if chosen.transport == "memory":
        from bullpen.plugins.transports.memory import MemoryClient

        return MemoryClient(policy=policy, concurrency=chosen.concurrency)
    from bullpen.plugins.transports.bullmq import BullMQClient

    known = chosen.retry_backoff == "exponential"
    require("messages.retry_backoff", known, "'exponential' on BullMQ: Node's workers know no other backoff", "linear")
    return BullMQClient(connection(), prefix=prefix, policy=policy, concurrency=chosen.concurrency)


def _policy(settings: Settings) -> RetryPolicy:
    chosen = settings.messages
    growth = 2 ** max(0, chosen.max_retries - 1) if chosen.retry_backoff == "exponential" else chosen.max_retries
    backoff = Backoff(chosen.retry_backoff, chosen.retry_delay_ms, max_ms=max(1, chosen.retry_delay_ms * growth))
    return RetryPolicy(
        attempts=chosen.max_attempts,
        backoff=backoff,
        retry_owner="broker",
        dead_letters=DeadLetterPolicy(store="queue"),
    )


class MessageService(BaseService):
    """Makes the ledger ready, then runs the messages' parts until closed."""

    role: Final = "messages"

    def __init__(self, messages: Messages, prepare: Callable[[], Awaitable[None]]) -> None:
        super().__init__("messages of the app")
        self._messages, self._prepare = messages, prepare

    async def _begin(self) -> None:
        await self._prepare()
        await self._host(self._messages)

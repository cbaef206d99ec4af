"""The messaging client on RabbitMQ, with the presets of workflow events and of scheduled messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Unpack

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.policy import SCHEDULED_MESSAGE, WORKFLOW_EVENT, DeadLetterPolicy, RetryPolicy, from_retries
from bullpen.errors import InvalidOption, require
from bullpen.plugins.messaging import ClientArguments, MessagingClient
from bullpen.plugins.transports.rabbitmq.topology import Topology
from bullpen.plugins.transports.rabbitmq.transport import RabbitMQTransport
from bullpen.ports.bindings import RabbitMQ
from bullpen.ports.transport import Published

__all__ = ["RabbitMQClient", "RabbitMQClientArguments"]


class RabbitMQClientArguments(ClientArguments, total=False):
    """What a RabbitMQ client takes besides urls and policy."""

    topology: Topology | None
    separate_connections: bool


class RabbitMQClient(MessagingClient[Published]):
    """A messaging client on RabbitMQ quorum queues."""

    def __init__(
        self,
        urls: str | Sequence[str] = "amqp://guest:guest@localhost:5672",
        *,
        policy: RetryPolicy = WORKFLOW_EVENT.policy,
        topology: Topology | None = None,
        separate_connections: bool = False,
        **options: Unpack[ClientArguments],
    ) -> None:
        """`urls` are the nodes of one cluster; `options` are those of `MessagingClient`."""
        policy = policy.over(WORKFLOW_EVENT.policy)
        topology = topology or Topology()
        for spec in topology.queues:
            # A message that outlives so many consumers must not die before its own attempts are used up.
            fits = spec.delivery_limit > policy.attempts
            require("delivery_limit", fits, f"more than the policy's {policy.attempts} attempts", spec.delivery_limit)
        transport = RabbitMQTransport(
            urls,
            topology=topology,
            dead_letters=policy.dead_letters,
            separate_connections=separate_connections,
        )
        super().__init__(transport, policy=policy, **options)

    @classmethod
    def from_binding(cls, binding: RabbitMQ[Any], **options: Unpack[RabbitMQClientArguments]) -> RabbitMQClient:
        """The client that a workflow's `rabbitmq` describes."""
        return cls(binding.urls, policy=binding.policy(), **options)

    @classmethod
    def for_scheduled_messages(
        cls,
        urls: str | Sequence[str] = "amqp://guest:guest@localhost:5672",
        *,
        topology: Topology | None = None,
        max_retries: int = 5,
        retry_delay_ms: int = 2_000,
        retry_backoff: Literal["exponential", "linear"] = "exponential",
        separate_connections: bool = False,
        **options: Unpack[ClientArguments],
    ) -> RabbitMQClient:
        """The pipeline of scheduled messages: six deliveries, pauses of 2, 4, 8, 16 and 32 s, prefetch 5."""
        if retry_backoff not in ("exponential", "linear"):
            raise InvalidOption("retry_backoff", "'exponential' or 'linear'", retry_backoff)
        topology = topology or Topology.scheduled_messages()
        attempts = from_retries(max_retries)
        longest_ms = retry_delay_ms * (2 ** max(0, max_retries - 1) if retry_backoff == "exponential" else max_retries)
        backoff = Backoff(retry_backoff, retry_delay_ms, max_ms=max(1, longest_ms))
        letters = DeadLetterPolicy(store="queue", name=topology.queues[0].dead_letter_queue)
        policy = RetryPolicy(attempts=attempts, backoff=backoff, retry_owner="broker", dead_letters=letters)
        options.setdefault("concurrency", SCHEDULED_MESSAGE.concurrency or 5)
        return cls(urls, policy=policy, topology=topology, separate_connections=separate_connections, **options)

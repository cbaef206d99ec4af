"""The messaging client on Kafka topics."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, Unpack

from bullpen._kernel.duration import is_text
from bullpen._kernel.policy import WORKFLOW_EVENT, RetryPolicy
from bullpen.errors import require
from bullpen.plugins._kafka import Brokers
from bullpen.plugins.messaging import ClientArguments, MessagingClient
from bullpen.plugins.transports.kafka.transport import SESSION_TIMEOUT_MS, KafkaTransport
from bullpen.ports.bindings import Kafka
from bullpen.ports.transport import Published

__all__ = ["KafkaClient", "KafkaClientArguments"]


class KafkaClientArguments(ClientArguments, total=False):
    """What a Kafka client takes besides brokers and workflow."""

    client_id: str | None
    policy: RetryPolicy
    retry: Literal["pause", "park"]
    session_timeout: int | timedelta


class KafkaClient(MessagingClient[Published]):
    """A messaging client on Kafka topics; the consumer group is `{workflow}consumer`, reading from the beginning."""

    def __init__(
        self,
        brokers: str | Brokers = "localhost:9092",
        *,
        workflow: str,
        client_id: str | None = None,
        policy: RetryPolicy = WORKFLOW_EVENT.policy,
        retry: Literal["pause", "park"] = "pause",
        session_timeout: int | timedelta = SESSION_TIMEOUT_MS,
        **options: Unpack[ClientArguments],
    ) -> None:
        """`options` are those of `MessagingClient`."""
        policy = policy.over(WORKFLOW_EVENT.policy)
        require("workflow", is_text(workflow), "non-empty text as the workflow's name", workflow)
        transport = KafkaTransport(
            brokers,
            group=f"{workflow}consumer",
            client_id=client_id,
            dead_letters=policy.dead_letters,
            retry=retry,
            session_timeout=session_timeout,
        )
        super().__init__(transport, policy=policy, **options)

    @classmethod
    def from_binding(
        cls, binding: Kafka[Any], *, workflow: str, **options: Unpack[KafkaClientArguments]
    ) -> KafkaClient:
        """The client that a workflow's `kafka` describes; options win over it."""
        described: KafkaClientArguments = {
            "client_id": binding.client_id,
            "policy": binding.policy(),
            "retry": binding.retry,
            **options,
        }
        return cls(",".join(binding.broker_list()), workflow=workflow, **described)

    async def produce_keyed(self, topic: str, key: str, data: Any) -> Published:
        """Send a value under a key, as Kafka's own clients do: the key is the urn, the value is the payload."""
        return await self.send(self.event(topic, "", {"urn": key, "payload": data}))

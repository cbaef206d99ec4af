"""A client on RabbitMQ with names of its own and quick delays. Apart from the fixtures, because processes that are
killed by the dozen use it too and should start soon."""

from __future__ import annotations

import uuid
from typing import Any

from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQClient, Topology


def rabbit_names() -> dict[str, str]:
    """The names of the preset, under a first word of their own."""
    base = f"birthday-{uuid.uuid4().hex[:8]}"
    return {
        "exchange_name": f"{base}.messages",
        "dlx_name": f"{base}.messages.dlx",
        "queue_name": f"{base}.messages.queue",
        "dlq_name": f"{base}.messages.dlq",
    }


def rabbit_client(urls: Any, names: dict[str, str], **options: Any) -> RabbitMQClient:
    topology: dict[str, Any] = {**names, "delays": DelayLadder(unit_ms=20, levels=9), **options.pop("topology", {})}
    return RabbitMQClient.for_scheduled_messages(
        urls, topology=Topology.scheduled_messages(**topology), **{"retry_delay_ms": 20, **options}
    )

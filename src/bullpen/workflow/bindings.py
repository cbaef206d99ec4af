"""Let the events of a transport drive a workflow: one consumer per source, dispatched by job name.

In: a binding (which source causes which event), a messaging client, and the workflow's `emit`. Out: every delivery
emitted and awaited; what `emit` raises goes back to the client, whose policy decides about a retry.
Elsewhere: what a binding may say (`bullpen.ports.bindings`), what an event does (`engine`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Generic, TypeVar

from bullpen.ports.bindings import Binding, Route
from bullpen.ports.messaging import Consumer, Messaging
from bullpen.ports.transport import Delivery

__all__ = ["EventConsumers"]

E = TypeVar("E")

logger = logging.getLogger("bullpen.workflow")

Emit = Callable[[E, str, Any], Awaitable[Any]]
"""`emit(event, urn, payload)`."""


class EventConsumers(Generic[E]):
    """The consumers of one workflow."""

    def __init__(
        self,
        binding: Binding[E] | None,
        client: Messaging[Any] | None,
        emit: Emit[E],
        *,
        label: str | None = None,
    ) -> None:
        """`label` names the transport in log lines when there is no binding."""
        self._binding, self._client, self._emit = binding, client, emit
        self._label = binding.label if binding is not None else label or "BullMQ"
        self._consumers: list[Consumer] = []
        self.problem: str | None = None
        """Why a workflow that should consume does not; for the health check."""

    @property
    def is_healthy(self) -> bool:
        return self.problem is None and all(consumer.is_alive for consumer in self._consumers)

    async def start(self) -> None:
        """Start one consumer per source. Sources that share a queue share its consumer: two would compete."""
        routes = self._binding.routes() if self._binding is not None else {}
        if not routes or self._binding is None:
            logger.info("No %s events defined.", self._label)
            return
        if self._client is None:
            self.problem = f"{self._label} client not available, skipping worker initialization."
            logger.warning("%s", self.problem)
            return
        for source, route in routes.items():
            consumer = await self._client.consume(
                source,
                self._handler(route),
                concurrency=self._binding.concurrency_of(source),
                ordered=self._binding.ordered,
            )
            self._consumers.append(consumer)
            logger.info("Initialized %s worker for queue: %s", self._label, source, extra={"queue": source})

    async def close(self, timeout: int | timedelta | None = None) -> None:
        """Stop consuming; the client stays open, it may serve others."""
        await asyncio.gather(*(consumer.close(timeout) for consumer in self._consumers))

    def _handler(self, route: Route[E]) -> Callable[[Delivery], Awaitable[None]]:
        async def handle(delivery: Delivery) -> None:
            fields = {"jobId": delivery.id, "queue": delivery.source, "urn": delivery.urn}
            logger.info("%s job received", self._label, extra=fields)
            try:
                await self._emit(route.event_for(delivery.name), delivery.urn, delivery.payload)
            except BaseException as error:
                logger.error("%s job processing failed: %s", self._label, error, extra={**fields, "error": str(error)})
                raise
            logger.info("%s job processed successfully", self._label, extra=fields)

        return handle

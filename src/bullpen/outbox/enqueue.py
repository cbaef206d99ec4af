"""Turn what a caller writes into items of the outbox: a message for a target, or a job for a queue.

In: keyword arguments. Out: a checked `OutboxItem`. Elsewhere: storing it in the caller's transaction
(`bullpen.ledger.enqueue`), adding the job later (`bullpen.plugins.channels.queue`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, TypedDict, Unpack

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.ids import check_queue_name
from bullpen.errors import InvalidOption
from bullpen.ledger import OutboxFields, OutboxItem, check_tenant
from bullpen.ledger.endpoint_records import endpoint_type
from bullpen.ports.channel import Message
from bullpen.wire.deferred import options_to_json
from bullpen.wire.records import check_job_name

DIRECT_STREAM: Final = "direct"
"""Stream of messages that come from no event: each is an event of its own."""

_ENDPOINT_STREAM: Final = "published"
"""Stream of events that name none."""

JOB_CHANNEL: Final = "bullmq"
"""First part of the integration type of jobs: `bullmq:<queue>`."""

JOB_OPTIONS: Final = "jobOptions"
"""Header that holds the options of a job until it is added."""


def make_item(
    *,
    integration_type: str,
    event_type: str,
    payload: Any = None,
    **fields: Unpack[OutboxFields],
) -> OutboxItem:
    """A message. Without a source each call is an event of its own, and nothing is recognised as a duplicate."""
    source_stream_id, source_event_id = fields.pop("source_stream_id", None), fields.pop("source_event_id", None)
    rest: dict[str, Any] = {**fields}
    if (source_stream_id is None) != (source_event_id is None):
        raise InvalidOption("source_event_id", "stream and event together, or neither", source_event_id)
    if source_stream_id is None or source_event_id is None:
        source_stream_id, source_event_id = DIRECT_STREAM, str(uuid.uuid4())
        rest.setdefault("idempotency_key", source_event_id)  # no other message has this event
    return OutboxItem(
        integration_type=integration_type,
        event_type=event_type,
        payload=payload,
        source_stream_id=source_stream_id,
        source_event_id=source_event_id,
        **rest,
    )


class PublishFields(TypedDict, total=False):
    """What `Outbox.publish` takes besides tenant, event type and payload; `OutboxItem` says what each is."""

    event_id: str | None
    stream: str | None
    user_id: str | None
    correlation_id: str | None
    ordering_key: str | None
    headers: Mapping[str, Any] | None
    due_at: datetime | None
    delay: int | timedelta
    max_attempts: int | None
    backoff: Backoff | int | timedelta | None


class PublishedEvent:
    """One event, of which each endpoint that wants it gets a message. Raises InvalidOption for what cannot be sent."""

    def __init__(
        self, tenant_id: str, event_type: str, payload: Any, fields: PublishFields, *, is_strict: bool
    ) -> None:
        if is_strict:
            raise InvalidOption(
                "strict_sources", "False, to publish: one event becomes a message for each endpoint", is_strict
            )
        rest: dict[str, Any] = {**fields}
        self._fields: dict[str, Any] = {
            **rest,
            "tenant_id": check_tenant(tenant_id),
            "event_type": event_type,
            "payload": payload,
            "source_stream_id": rest.pop("stream", None) or _ENDPOINT_STREAM,
            "source_event_id": rest.pop("event_id", None) or str(uuid.uuid4()),
        }
        for name in ("stream", "event_id"):
            self._fields.pop(name, None)
        self.item_for("-")  # checked whether or not anybody wants it

    def item_for(self, endpoint_id: str) -> OutboxItem:
        return OutboxItem(integration_type=endpoint_type(endpoint_id), **self._fields)


TEST_EVENT: Final = "bullpen.test.v1"


def make_test_message(integration_type: str, payload: Any, tenant_id: str | None) -> Message:
    """A message that says itself that it is a test: no other one has its event type or its key."""
    test_id = str(uuid.uuid4())
    return Message(
        id=test_id,
        integration_type=integration_type,
        event_type=TEST_EVENT,
        payload={"test": True} if payload is None else payload,
        idempotency_key=f"test-{test_id}",
        source_stream_id="test",
        source_event_id=test_id,
        tenant_id=tenant_id,
        created_ms=int(time.time() * 1000),
    )


def make_job_item(
    queue: str,
    name: str,
    data: Any = None,
    *,
    source_stream_id: str | None = None,
    source_event_id: str | None = None,
    tenant_id: str | None = None,
    user_id: str | None = None,
    correlation_id: str | None = None,
    ordering_key: str | None = None,
    headers: Mapping[str, Any] | None = None,
    options: Mapping[str, Any],
) -> OutboxItem:
    """A job that will be added to `queue` after the commit, with the options of `Queue.add`, checked now."""
    stored = options_to_json(options)
    return make_item(
        integration_type=f"{JOB_CHANNEL}:{check_queue_name(queue)}",
        event_type=check_job_name(name),
        payload=data,
        source_stream_id=source_stream_id,
        source_event_id=source_event_id,
        tenant_id=tenant_id,
        user_id=user_id,
        correlation_id=correlation_id,
        ordering_key=ordering_key,
        headers={**(headers or {}), **({JOB_OPTIONS: stored} if stored else {})},
    )

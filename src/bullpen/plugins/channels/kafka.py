"""Deliver a message as a record of a Kafka topic: `kafka:<topic>`.

In: a message. Out: a record with the payload as JSON, once all replicas in sync have it. Its key says which partition:
the source event id by default, the stream id where the order of an aggregate matters. The idempotency key is always a
header, too. Elsewhere: the client itself (`bullpen.plugins._kafka`), events of workflows (`transports.kafka`).
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, Literal, Unpack

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, is_text
from bullpen.errors import BullpenError, ServerRefused, require
from bullpen.plugins._kafka import BrokerArguments, Brokers, KafkaDoor, RecordRefused
from bullpen.ports.channel import (
    Accepted,
    ChannelHealth,
    Message,
    Refused,
    SendResult,
    Unavailable,
    Unknown,
    WhenUnknown,
)

__all__ = ["KafkaChannel", "KafkaChannelArguments", "headers_of"]

Key = Literal["event", "stream", "idempotency", "tenant", "none"]

_KEYS: Final = ("event", "stream", "idempotency", "tenant", "none")
_is_topic = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}").fullmatch


class KafkaChannelArguments(BrokerArguments, total=False):
    """What `app.channels.kafka` takes: the arguments of `KafkaChannel`, without the brokers."""

    topic: str | None
    key: Key
    timeout_ms: int


class KafkaChannel:
    """Records in one cluster; the topic is the target of a message, unless one is given.

    `key`: `event` (default) spreads records evenly; `stream` keeps those of one stream in order; `tenant` keeps a
    tenant together; `idempotency` is the message's key; `none` leaves it to the client. `options` are those of the
    cluster: `tls`, `username`, `password`, `sasl_mechanism`, `client_id`.
    """

    when_unknown = WhenUnknown.RESEND
    """A second copy has the same key and the same `idempotencyKey` header: consumers know it again."""

    def __init__(
        self,
        brokers: str,
        *,
        topic: str | None = None,
        key: Key = "event",
        timeout_ms: int = 10_000,
        **options: Unpack[BrokerArguments],
    ) -> None:
        require("key", key in _KEYS, " or ".join(map(repr, _KEYS)), key)
        require("topic", topic is None or (is_text(topic) and bool(_is_topic(topic))), "the name of a topic", topic)
        self._topic, self._key = topic, key
        self._timeout_ms = check_int("timeout_ms", timeout_ms, minimum=1)
        self._door = KafkaDoor(Brokers.parse(brokers, **options))

    async def send(self, message: Message) -> SendResult:
        topic = self._topic or message.target
        if not _is_topic(topic):
            return Refused(f"{topic!r} is not a valid topic name", "NO_SUCH_TOPIC")
        key, was_open = self._key_of(message), self._door.is_open
        limit_ms = message.limit_ms(self._timeout_ms)
        try:
            # The client itself tries again for longer than anybody wants to wait.
            async with asyncio.timeout(limit_ms / 1000):
                partition, offset = await self._door.send(
                    topic,
                    key=None if key is None else key.encode(),
                    value=json.encode(message.payload),
                    headers=headers_of(message),
                )
        except TimeoutError:
            return Unknown(f"Kafka did not answer within {limit_ms} ms", "NO_ANSWER")
        except RecordRefused as error:
            return Refused(str(error), "KAFKA_REFUSED")
        except ServerRefused as error:
            # Our rights are the problem, not this message: it must not cost every message its life.
            return Unavailable(str(error), "KAFKA_RIGHTS")
        except BullpenError as error:
            if not (was_open or self._door.is_open):
                return Unavailable(str(error), "NO_CONNECTION")
            return Unknown(str(error), "NO_ANSWER")
        return Accepted(f"{topic}/{partition}@{offset}")

    async def check(self) -> ChannelHealth:
        try:
            await self._door.topics()
        except BullpenError as error:
            return ChannelHealth(False, str(error))
        return ChannelHealth(True)

    async def aclose(self) -> None:
        await self._door.aclose()

    def _key_of(self, message: Message) -> str | None:
        match self._key:
            case "event":
                return message.source_event_id
            case "stream":
                return message.source_stream_id
            case "tenant":
                return message.tenant_id
            case "idempotency":
                return message.idempotency_key
        return None


def headers_of(message: Message) -> dict[str, str]:
    """The headers of a record: those of the message, and its ids. What is absent is left out, never sent as null."""
    given = {name: value if isinstance(value, str) else json.encode(value).decode()
             for name, value in message.headers.items() if value is not None}  # fmt: skip
    ids = {
        "idempotencyKey": message.idempotency_key,
        "eventType": message.event_type,
        "outboxId": message.id,
        "sourceStreamId": message.source_stream_id,
        "sourceEventId": message.source_event_id,
        "correlationId": message.correlation_id,
        "tenantId": message.tenant_id,
        "userId": message.user_id,
    }
    return {**given, **{name: value for name, value in ids.items() if value}}

"""Events as AMQP messages, and back. No I/O.

Body: `{"urn", "payload"}` as JSON. Properties: `message_id` is the event's id, `type` its name, delivery mode 2.
Headers: the event's own, `x-retry-count` (tries that failed), an override of the policy, and what remains of a delay
that is longer than the ladder. Dropped on the way out are headers that the broker adds when it dead-letters a message:
with them it would take a retry for a cycle. Dropped too are those by which it routes to further queues: the sender of a
message may not use the rights of the consumer who sends its retry.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractIncomingMessage
from pamqp.commands import Basic

from bullpen._kernel import json
from bullpen._kernel.duration import is_text
from bullpen.errors import NotJson, require
from bullpen.plugins.transports._dead_letters import stored_entry
from bullpen.plugins.transports._encoding import (
    RETRY_COUNT_HEADER,
    TRIES_HEADER,
    read_count,
    read_failures,
    read_tries,
    readable,
    tries_to_header,
)
from bullpen.plugins.transports.rabbitmq._frames import UNREADABLE_HEADER
from bullpen.ports.dead_letters import DeadLetter
from bullpen.ports.transport import Delivery, Event

DELAY_LEFT_HEADER: Final = "x-bullpen-delay-left"
READY_AT_HEADER: Final = "x-bullpen-ready-at"
"""When it became ready, in Unix ms of the sender: for measuring the wait only, nothing is decided by it."""
_OURS: Final = frozenset({RETRY_COUNT_HEADER, TRIES_HEADER, DELAY_LEFT_HEADER, READY_AT_HEADER, UNREADABLE_HEADER})
_BROKERS: Final = ("x-death", "x-first-death", "x-last-death", "x-delivery-count", "x-acquired-count")
_ROUTING: Final = frozenset({"CC", "BCC"})
"""Further routing keys. With text in them, as ours would be, the broker closes the channel."""
_MOST_HEADER_BYTES: Final = 128
_MOST_TEXT_BYTES: Final = 255
"""Of an id or a name: what AMQP has room for."""


def message_of(event: Event, *, failures: int = 0, ready_in_ms: int = 0, delay_left_ms: int = 0) -> Message:
    """Raises InvalidOption, NotJson or PayloadTooLarge."""
    return Message(
        _body_of(event),
        headers=_headers_of(event, failures, ready_in_ms, delay_left_ms),
        message_id=event.id,
        type=event.name,
        content_type="application/json",
        delivery_mode=DeliveryMode.PERSISTENT,
        timestamp=datetime.now(UTC),
    )


def content_of(event: Event, *, ready_in_ms: int = 0, delay_left_ms: int = 0) -> tuple[bytes, Basic.Properties]:
    """What `message_of` makes, in the form in which many are written at once."""
    properties = Basic.Properties(
        content_type="application/json",
        headers=_headers_of(event, 0, ready_in_ms, delay_left_ms),
        delivery_mode=DeliveryMode.PERSISTENT,
        priority=0,
        message_id=event.id,
        timestamp=datetime.now(UTC),
        message_type=event.name,
    )
    return _body_of(event), properties


def _body_of(event: Event) -> bytes:
    data: dict[str, Any] = {"urn": event.urn}
    if event.payload is not None:
        data["payload"] = event.payload
    body = json.encode(data, what="data")
    json.check_payload_size(len(body), 0)
    return body


def _headers_of(event: Event, failures: int, ready_in_ms: int, delay_left_ms: int) -> dict[str, Any]:
    _check(event)
    headers: dict[str, Any] = {
        **event.headers,
        RETRY_COUNT_HEADER: failures,
        READY_AT_HEADER: _now_ms() + ready_in_ms + delay_left_ms,
    }
    if event.tries is not None:
        headers[TRIES_HEADER] = tries_to_header(event.tries)
    if delay_left_ms:
        headers[DELAY_LEFT_HEADER] = delay_left_ms
    return headers


def _check(event: Event) -> None:
    """Refuse what fails inside the driver or makes the broker close the channel: others publish on it."""
    for option, text in (("id", event.id), ("name", event.name)):
        require(option, _bytes_of(text) <= _MOST_TEXT_BYTES, f"text of at most {_MOST_TEXT_BYTES} bytes", text)
    for name, value in event.headers.items():
        is_name = name not in _ROUTING and _bytes_of(name) <= _MOST_HEADER_BYTES
        expected = f"names of at most {_MOST_HEADER_BYTES} bytes, without CC and BCC, by which RabbitMQ routes"
        require("headers", is_name, expected, name)
        require(f"headers[{name!r}]", not isinstance(value, str) or _bytes_of(value) < math.inf, "text", value)


def _bytes_of(text: str) -> float:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return math.inf  # lone surrogates have no bytes


def copy_of(message: AbstractIncomingMessage, *, failures: int, ready_in_ms: int, delay_left_ms: int) -> Message:
    """The same message once more, byte for byte, with its counters changed."""
    headers = {name: _sendable(value) for name, value in message.headers.items() if not _is_brokers(name)}
    headers[RETRY_COUNT_HEADER] = failures
    headers[READY_AT_HEADER] = _now_ms() + ready_in_ms + delay_left_ms
    headers.pop(DELAY_LEFT_HEADER, None)
    if delay_left_ms:
        headers[DELAY_LEFT_HEADER] = delay_left_ms
    return Message(
        message.body,
        headers=headers,
        message_id=message.message_id,
        type=message.type,
        content_type=message.content_type,
        correlation_id=message.correlation_id,
        delivery_mode=DeliveryMode.PERSISTENT,
        timestamp=message.timestamp,
    )


def _sendable(value: Any) -> Any:
    """The driver reads a text that is no UTF-8 as bytes, and writes bytes in its other form only."""
    if isinstance(value, bytes):
        return bytearray(value)
    if isinstance(value, list):
        return [_sendable(one) for one in value]
    if isinstance(value, dict):
        return {name: _sendable(one) for name, one in value.items()}
    return value


def delay_left_ms(message: AbstractIncomingMessage) -> int:
    return read_count(message.headers.get(DELAY_LEFT_HEADER))


def delivery_of(message: AbstractIncomingMessage, source: str, handle: object) -> Delivery:
    """Anybody may have sent it: what cannot be read is told as the delivery's problem."""
    return readable(lambda: _delivery_of(message, source, handle), source, f"{source}-{message.delivery_tag}", handle)


def _delivery_of(message: AbstractIncomingMessage, source: str, handle: object) -> Delivery:
    urn, payload, problem = _read_body(message.body)
    headers = message.headers
    if UNREADABLE_HEADER in headers:
        problem = f"the message cannot be decoded: {str(headers[UNREADABLE_HEADER])[:200]}"
    event_id = message.message_id or f"{source}-{message.delivery_tag}"
    ready_at_ms = read_count(headers.get(READY_AT_HEADER))
    event = Event(
        source=source,
        urn=urn,
        name=message.type or message.routing_key or "",
        payload=payload,
        id=event_id,
        headers=_text_headers(headers),
        tries=read_tries(headers.get(TRIES_HEADER)),
    )
    return Delivery(
        event,
        attempt=read_failures(headers.get(RETRY_COUNT_HEADER)) + 1,
        idempotency_key=f"{source}/{event_id}",
        handle=handle,
        problem=problem,
        waited_ms=max(0, _now_ms() - ready_at_ms) if ready_at_ms else None,
        is_redelivered=bool(message.redelivered),
    )


def dead_letter_message(letter: DeadLetter) -> Message:
    return Message(
        json.encode(stored_entry(letter), what="dead letter"),
        message_id=letter.id,
        type=f"{letter.name}-failed",
        content_type="application/json",
        delivery_mode=DeliveryMode.PERSISTENT,
        timestamp=datetime.now(UTC),
    )


def dead_letter_of_message(message: AbstractIncomingMessage, source: str) -> DeadLetter:
    """An entry of ours, or what the broker dead-lettered by itself: too old, or the death of too many consumers."""
    try:
        entry: Any = json.decode(message.body)
    except NotJson:
        entry = None
    if isinstance(entry, dict) and "originalJobId" in entry:
        return DeadLetter.from_entry(message.message_id or "", entry, source=source)
    reason = str(message.headers.get("x-first-death-reason") or "unknown")
    delivery = delivery_of(message, source, None)
    told = {
        "originalJobId": delivery.id,
        "originalJobName": delivery.name,
        "originalQueue": source,
        "originalHeaders": dict(delivery.headers),
        "originalData": {"urn": delivery.urn, "payload": delivery.payload},
        "error": {"message": f"dead-lettered by RabbitMQ: {reason}"},
        "errorMessage": f"dead-lettered by RabbitMQ: {reason}",
        "cause": reason,
        "failedAt": _death_time(message),
        "attemptsMade": delivery.attempt - 1,
    }
    return DeadLetter.from_entry(f"dl-{delivery.id}-{reason}", told, source=source)


def _read_body(body: bytes) -> tuple[str, Any, str | None]:
    try:
        data: Any = json.decode(body)
    except NotJson as error:
        return "", body.decode("utf-8", "replace"), f"the body is not JSON: {error}"
    urn: Any = data.get("urn") if isinstance(data, dict) else None
    if not is_text(urn):
        return "", data, "urn: expected non-empty text that names the entity"
    return urn, data.get("payload"), None


def _text_headers(headers: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        for name, value in headers.items()
        if isinstance(value, str | bytes | int | float) and name not in _OURS and not _is_brokers(name)
    }


def _is_brokers(name: str) -> bool:
    return name in _ROUTING or name.startswith(_BROKERS)


def _death_time(message: AbstractIncomingMessage) -> str:
    deaths: Any = message.headers.get("x-death")
    when = deaths[0].get("time") if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else None
    return when.astimezone(UTC).isoformat().replace("+00:00", "Z") if isinstance(when, datetime) else ""


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

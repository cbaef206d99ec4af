"""Events as Kafka records, and back. No I/O.

Key: the urn. Value: the payload as JSON. Headers: the event's own, its id and name, an override of the policy and, on a
retry topic, how often it failed and how long it rests. How often the record in front of a partition failed stands in
the metadata of the group's commit at its offset. Anybody may have written any of it: what cannot be read is told as the
delivery's problem, and what is odd counts as absent.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, Final

from bullpen._kernel import json
from bullpen.errors import NotJson
from bullpen.plugins._kafka import KafkaRecord
from bullpen.plugins._kafka_batches import UNREADABLE_HEADER
from bullpen.plugins.transports._encoding import (
    RETRY_COUNT_HEADER,
    TRIES_HEADER,
    read_count,
    read_failures,
    read_tries,
    readable,
    tries_to_header,
)
from bullpen.ports.transport import Delivery, Event

ID_HEADER, NAME_HEADER = "x-bullpen-id", "x-bullpen-name"
PAUSE_HEADER: Final = "x-bullpen-pause"
"""On a retry topic: how many milliseconds the record rests, from its timestamp."""
_OURS: Final = frozenset({ID_HEADER, NAME_HEADER, PAUSE_HEADER, RETRY_COUNT_HEADER, TRIES_HEADER, UNREADABLE_HEADER})
_METADATA: Final = re.compile(r"bullpen:failures=(\d{1,9}),rest=(\d{1,15}),until=(\d{1,15})")
LONGEST_REST_MS: Final = 86_400_000
"""A header of anybody must not hold a partition for ever."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The record in front of a partition has failed, or asked for a pause."""

    offset: int
    failures: int
    rest_ms: int
    until_ms: int
    """When the rest ends, by the clock of whoever wrote it; a reader with another clock waits `rest_ms` at most."""

    @classmethod
    def begins(cls, offset: int, failures: int, rest_ms: int) -> Trouble:
        return cls(offset, failures, rest_ms, _now_ms() + rest_ms)

    @classmethod
    def read(cls, offset: int, metadata: str) -> Trouble | None:
        """From the metadata of a commit."""
        found = _METADATA.fullmatch(metadata)
        return None if found is None else cls(offset, *map(int, found.groups()))

    def metadata(self) -> str:
        return f"bullpen:failures={self.failures},rest={self.rest_ms},until={self.until_ms}"

    def left_s(self) -> float:
        return _left_s(self.rest_ms, self.until_ms)


def headers_of(event: Event) -> dict[str, str]:
    headers = {**event.headers, ID_HEADER: event.id, NAME_HEADER: event.name}
    if event.tries is not None:
        headers[TRIES_HEADER] = tries_to_header(event.tries)
    return headers


def parked_headers(event: Event, failures: int, rest_ms: int) -> dict[str, str]:
    return {**headers_of(event), RETRY_COUNT_HEADER: str(failures), PAUSE_HEADER: str(rest_ms)}


def delivery_of(record: KafkaRecord, source: str, trouble: Trouble | None, handle: object) -> Delivery:
    made_up_id = f"{source}-{record.partition.number}-{record.offset}"
    return readable(lambda: _delivery_of(record, source, trouble, handle, made_up_id), source, made_up_id, handle)


def _delivery_of(
    record: KafkaRecord, source: str, trouble: Trouble | None, handle: object, made_up_id: str
) -> Delivery:
    headers = {name: value.decode("utf-8", "replace") for name, value in record.headers}
    urn = (record.key or b"").decode("utf-8", "replace")
    payload, problem = read_value(record.value)
    if UNREADABLE_HEADER in headers:
        problem = f"the record cannot be decoded: {headers[UNREADABLE_HEADER]}"
    elif not urn:
        problem = problem or "key: expected the urn of the entity"
    event_id = headers.get(ID_HEADER) or made_up_id
    failures = read_failures(headers.get(RETRY_COUNT_HEADER))
    if trouble is not None and trouble.offset == record.offset:
        failures = trouble.failures
    event = Event(
        source=source,
        urn=urn,
        name=headers.get(NAME_HEADER, ""),
        payload=payload,
        id=event_id,
        headers={name: text for name, text in headers.items() if name not in _OURS},
        tries=read_tries(headers.get(TRIES_HEADER)),
    )
    return Delivery(
        event,
        attempt=failures + 1,
        idempotency_key=f"{source}/{event_id}",
        handle=handle,
        problem=problem,
        waited_ms=None if failures else max(0, _now_ms() - record.timestamp_ms),
    )


def read_value(value: bytes | None) -> tuple[Any, str | None]:
    """The payload, and why it is none."""
    if value is None:
        return None, None
    try:
        return json.decode(value), None
    except NotJson as error:
        return value.decode("utf-8", "replace"), f"the value is not JSON: {error}"


def parked_for_s(record: KafkaRecord, source: str) -> float:
    """How long a record of a retry topic still rests."""
    if record.partition.topic == source:
        return 0.0
    rest_ms = min(read_count(dict(record.headers).get(PAUSE_HEADER)), LONGEST_REST_MS)
    return _left_s(rest_ms, record.timestamp_ms + rest_ms)


def _left_s(rest_ms: int, until_ms: int) -> float:
    return max(0, min(rest_ms, until_ms - _now_ms())) / 1000


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""Payloads and retry overrides as bytes and headers, for brokers that carry both apart.

In: events; bytes of anybody. Out: UTF-8 JSON and plain header values; or, for what cannot be read, why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.backoff import Backoff, from_wire
from bullpen._kernel.duration import MAX_MS
from bullpen.errors import NotJson
from bullpen.ports.transport import Delivery, Event, Tries

TRIES_HEADER: Final = "x-bullpen-tries"
"""JSON of an override of the consumer's policy."""
RETRY_COUNT_HEADER: Final = "x-retry-count"
"""How many tries have failed: 0 or absent is the first delivery."""
MOST_FAILURES: Final = 999_999_998
"""More than any policy allows, and every broker can store it."""
_LONGEST_COUNT: Final = 18
"""Digits that are looked at."""


def encode_payload(event: Event) -> bytes:
    """Raises NotJson or PayloadTooLarge."""
    raw = json.encode(event.payload, what="payload")
    json.check_payload_size(len(raw), 0)
    return raw


def tries_to_wire(tries: Tries) -> dict[str, Any]:
    wire: dict[str, Any] = {"attempts": tries.attempts}
    if isinstance(tries.backoff, Backoff):
        wire["backoff"] = tries.backoff.to_wire()
    return wire


def tries_to_header(tries: Tries) -> str:
    return msgspec.json.encode(tries_to_wire(tries)).decode()


def read_tries(header: object) -> Tries | None:
    """The override of a message of anybody; what is odd counts as none."""
    try:
        stored = json.decode(header) if isinstance(header, str | bytes) else None
    except NotJson:
        return None
    return tries_from_wire(stored)


def tries_from_wire(stored: object) -> Tries | None:
    attempts = stored.get("attempts") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or type(attempts) is not int or not 1 <= attempts <= MAX_MS:
        return None
    return Tries(attempts, from_wire(stored.get("backoff")))


def read_count(header: object, *, most: int = MAX_MS) -> int:
    """A counter of anybody's message: never negative, never above `most`, never an error."""
    if isinstance(header, str | bytes):
        # Python refuses numbers of many thousands of digits, and takes its time for those below.
        digits = header.strip()
        header = most if digits.isdigit() and len(digits) > _LONGEST_COUNT else digits[: _LONGEST_COUNT + 2]
    try:
        count = int(header) if isinstance(header, int | str | bytes) else 0
    except ValueError:
        return 0
    return min(max(0, count), most)


def read_failures(header: object) -> int:
    return read_count(header, most=MOST_FAILURES)


def readable(read: Callable[[], Delivery], source: str, event_id: str, handle: object) -> Delivery:
    """What `read` makes of a message. Whatever stops it is the problem of this message, which fails without being
    handled: raised, it would end the consumer, and again after each restart."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - anybody may have written it, and a driver may have read it
        return Delivery(
            Event(source=source, urn="", id=event_id),
            attempt=1,
            idempotency_key=f"{source}/{event_id}",
            handle=handle,
            problem=f"the message cannot be read: {type(error).__name__}: {str(error)[:200]}",
        )

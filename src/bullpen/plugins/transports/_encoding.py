"""Payloads and retry overrides as bytes and headers, for brokers that carry both apart.

In: events; bytes of anybody. Out: UTF-8 JSON and plain header values; or, for what cannot be read, why.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.backoff import Backoff, from_wire
from bullpen.ports.transport import Event, Tries

TRIES_HEADER: Final = "x-bullpen-tries"
"""JSON of an override of the consumer's policy."""
RETRY_COUNT_HEADER: Final = "x-retry-count"
"""How many tries have failed: 0 or absent is the first delivery."""


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
        stored = msgspec.json.decode(header) if isinstance(header, str | bytes) else None
    except msgspec.DecodeError:
        return None
    attempts = stored.get("attempts") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or type(attempts) is not int or attempts < 1:
        return None
    return Tries(attempts, from_wire(stored.get("backoff")))


def read_count(header: object) -> int:
    """A counter of anybody's message: never negative, never an error."""
    try:
        count = int(header) if isinstance(header, int | str | bytes) else 0
    except ValueError:
        return 0
    return max(0, count)

"""What travels between scheduler and sender: which message, and for which instant. No I/O.

No names, addresses or texts: the row is the truth, and is read again when the order arrives. The instant tells an order
for a plan that has changed since from the right one. Orders are checked before they are published and again when they
arrive, because anybody can put something into a queue.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from bullpen.errors import InvalidOption, PermanentError
from bullpen.ledger.message_records import ToPublish
from bullpen.ports.messaging import EventData

__all__ = ["Order", "make_order", "read_order"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UUID: Final = r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"


class Order(msgspec.Struct, frozen=True, rename="camel"):
    """Send this message, which is due then."""

    message_id: Annotated[str, msgspec.Meta(pattern=_UUID)]
    occasion: Annotated[str, msgspec.Meta(min_length=1, max_length=60)]
    due_ms: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]

    @property
    def due_at(self) -> datetime:
        return _EPOCH + timedelta(milliseconds=self.due_ms)


def make_order(message: ToPublish) -> EventData:
    """The data of an event. Raises InvalidOption for one that its receiver would refuse."""
    payload = {
        "messageId": message.id,
        "occasion": message.occasion,
        "dueMs": (message.due_at - _EPOCH) // timedelta(milliseconds=1),
    }
    try:
        msgspec.convert(payload, Order)
    except msgspec.ValidationError as error:
        raise InvalidOption("message", f"what the schema of orders says ({error})", payload) from error
    return {"urn": f"urn:message:{message.id}", "payload": payload}


def read_order(payload: Any) -> Order:
    """Raises PermanentError for anything else than an order: trying again would not make it one."""
    try:
        return msgspec.convert(payload, Order)
    except msgspec.ValidationError as error:
        raise PermanentError(f"this is not an order for a message: {error}") from error

"""The dead letter of a delivery, as it is written by transports that have no format of their own for it.

In: a delivery that failed finally. Out: one JSON object with the fields that BullMQ's dead letters have too, so that a
reader need not know where it came from; and back. Elsewhere: storing it (each transport), the record itself
(`bullpen.ports.dead_letters`).
"""

from __future__ import annotations

import getpass
import socket
from datetime import UTC, datetime
from typing import Any, Final

from bullpen._kernel import json
from bullpen._kernel.outcome import Failed
from bullpen.errors import InvalidOption, NotJson
from bullpen.plugins.transports._encoding import tries_from_wire, tries_to_wire
from bullpen.ports.dead_letters import DeadLetter, check_unchanged
from bullpen.ports.edits import Edit
from bullpen.ports.transport import Delivery, Event

_EVENT: Final = frozenset({"urn", "payload"})


def dead_letter_of(delivery: Delivery, failed: Failed) -> DeadLetter:
    """The dead letter of a failure. The same failure has the same id, so writing it twice can be noticed."""
    event = delivery.event
    data: dict[str, Any] = {"urn": _as_text(event.urn)}
    if event.payload is not None:
        data["payload"] = _storable(event.payload)
    entry: dict[str, Any] = {
        "originalJobId": event.id,
        "originalJobName": event.name,
        "originalQueue": event.source,
        "originalHeaders": {name: _as_text(value) for name, value in event.headers.items()},
        "error": {"message": failed.reason, "stack": failed.stack},
        "errorMessage": failed.reason.splitlines()[0] if failed.reason else "",
        "cause": failed.cause.value,
        "failedAt": now_iso(),
        "attemptsMade": delivery.attempt,
        "originalData": data,
    }
    if event.tries is not None:
        entry["originalTries"] = tries_to_wire(event.tries)
    for name in ("runId", "tenantId"):
        value = event.payload.get(name) if isinstance(event.payload, dict) else None
        if isinstance(value, str):
            entry[name] = _as_text(value)
    if "tenantId" not in entry and "tenantId" in event.headers:
        entry["tenantId"] = event.headers["tenantId"]
    return DeadLetter.from_entry(f"dl-{event.id}-{delivery.attempt}", entry, source=event.source)


def _storable(payload: Any) -> Any:
    """A payload that only lenient readers take (NaN, a lone surrogate, a very long number) is kept as text.
    Otherwise its message would have no dead letter at all."""
    try:
        json.encode(payload, what="payload")
    except NotJson:
        return json.lenient_text(payload)
    return payload


def _as_text(value: str) -> str:
    return value.encode("utf-8", "replace").decode()


def stored_entry(letter: DeadLetter) -> dict[str, Any]:
    """What is stored of a letter: its entry, and its tenant where only the record names it."""
    return {**({} if letter.tenant_id is None else {"tenantId": letter.tenant_id}), **letter.entry}


def event_of(letter: DeadLetter, *, by: str, edit: Edit | None = None) -> Event:
    """The event to send back: identity kept, attempts reset, and a note of who asked for it and when."""
    shown = letter.data if edit is None else edit.data
    data = shown if isinstance(shown, dict) else {}
    headers = letter.entry.get("originalHeaders")
    return Event(
        source=letter.source,
        urn=str(data.get("urn", "")),
        name=letter.name,
        payload=data.get("payload"),
        id=letter.message_id,
        headers={
            **({str(name): str(value) for name, value in headers.items()} if isinstance(headers, dict) else {}),
            "x-redriven-by": by,
            "x-redriven-at": now_iso(),
            **({} if edit is None else {"x-edited": f"{edit.before}/{edit.after}"}),
        },
        tries=tries_from_wire(letter.entry.get("originalTries")),
    )


def check_event_edit(store: str, letter: DeadLetter, edit: Edit) -> None:
    """An event is `{"urn": …, "payload": …}`; what has no urn, or more than that, would be sent as something else."""
    check_unchanged(store, letter, edit)
    data = edit.data
    is_event = isinstance(data, dict) and isinstance(data.get("urn"), str) and data["urn"] and not data.keys() - _EVENT
    if not is_event:
        raise InvalidOption("data", 'the data of an event, {"urn": text, "payload": …}', data)


def who() -> str:
    """User and host of this process, for records of who did something."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def now_iso() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

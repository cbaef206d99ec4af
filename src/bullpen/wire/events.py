"""Entries of a queue's event stream, decoded.

In: one stream entry, written by a Node or a bullpen worker. Out: `QueueEvent`. Broken entries become events with
less in them, never an exception: one bad entry must not end a listener.
Elsewhere: reading the stream (`bullpen.queue.events`), writing it (the scripts).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from bullpen._kernel import json
from bullpen.errors import NotJson
from bullpen.wire.records import as_bytes, read_int

DEFAULT_MAX_LEN: Final = 10_000
"""Entries that a stream keeps, about. Older ones are lost; long-term history belongs elsewhere."""


class EventName(StrEnum):
    """Names that workers and queues write. Producers of custom events use others."""

    ADDED = "added"
    WAITING = "waiting"
    DELAYED = "delayed"
    ACTIVE = "active"
    PROGRESS = "progress"
    COMPLETED = "completed"
    FAILED = "failed"
    RETRIES_EXHAUSTED = "retries-exhausted"
    RETRY = "retry"
    STALLED = "stalled"
    WAITING_CHILDREN = "waiting-children"
    CANCELLED = "cancelled"
    REMOVED = "removed"
    DUPLICATED = "duplicated"
    DEDUPLICATED = "deduplicated"
    CLEANED = "cleaned"
    DRAINED = "drained"
    PAUSED = "paused"
    RESUMED = "resumed"


FINISHED: Final = frozenset({EventName.COMPLETED, EventName.FAILED})

# Fields with a place of their own in QueueEvent; all others are its data.
_OWN_FIELDS: Final = frozenset({b"event", b"jobId", b"timestamp", b"attemptsMade"})

_JSON_FIELDS: Final = {(EventName.PROGRESS, b"data"), (EventName.COMPLETED, b"returnvalue")}
_NUMBER_FIELDS: Final = {
    (EventName.DELAYED, b"delay"),
    (EventName.RETRY, b"delay"),
    (EventName.CLEANED, b"count"),
}


@dataclass(frozen=True, slots=True)
class QueueEvent:
    """Something that happened in a queue."""

    id: str
    """Id of the stream entry; later entries have greater ones."""
    event: str
    """An EventName, or the name of a custom event."""
    job_id: str | None
    timestamp: int
    """When it happened, Unix ms of the server."""
    attempts_made: int | None = None
    """Ended attempts of the job, when the writer tells (Node does on `retries-exhausted` only)."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further fields by their wire names: `returnvalue` and progress `data` as values, numbers as ints, else text."""

    @classmethod
    def parse(cls, entry_id: bytes | str, fields: Mapping[Any, Any] | Iterable[Any]) -> QueueEvent:
        """From an entry id and its fields, as a mapping or as the flat list that Redis sends. Never raises."""
        if not isinstance(fields, Mapping):
            flat = iter(fields)
            fields = dict(zip(flat, flat, strict=False))
        stored = {as_bytes(name): as_bytes(value) for name, value in fields.items()}
        name = _text(stored.get(b"event", b""))
        job_id = stored.get(b"jobId")
        made = stored.get(b"attemptsMade")
        return cls(
            id=entry_id if isinstance(entry_id, str) else _text(entry_id),
            event=name,
            job_id=None if job_id is None else _text(job_id),
            timestamp=timestamp_of(entry_id),
            attempts_made=None if made is None else read_int(made),
            data={_text(key): _value(name, key, raw) for key, raw in stored.items() if key not in _OWN_FIELDS},
        )

    @property
    def is_final(self) -> bool:
        """True when the job has reached its end."""
        return self.event in FINISHED

    def to_json(self) -> dict[str, Any]:
        """The event for API answers, names as on the wire, unset fields left out."""
        answer: dict[str, Any] = {"event": self.event, "jobId": self.job_id, "timestamp": self.timestamp}
        if self.attempts_made is not None:
            answer["attemptsMade"] = self.attempts_made
        if self.data:
            answer["data"] = dict(self.data)
        return {name: value for name, value in answer.items() if value is not None}


def timestamp_of(entry_id: bytes | str) -> int:
    """The server's time when an entry was written: the first half of its id."""
    text = entry_id if isinstance(entry_id, str) else _text(entry_id)
    return max(0, read_int(text.partition("-")[0]))


def _value(event: str, name: bytes, raw: bytes) -> Any:
    if (event, name) in _JSON_FIELDS:
        try:
            return json.decode(raw, what=name.decode())
        except NotJson:
            return _text(raw)
    if (event, name) in _NUMBER_FIELDS:
        return read_int(raw)
    return _text(raw)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")

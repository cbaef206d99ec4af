"""A stored job, decoded.

In: the fields of a job's hash as Redis returns them. Out: `JobRecord`, which reads each field when it is asked for and
survives whatever stands there. Elsewhere: its options (`options`), writing a job (the scripts).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

from bullpen._kernel import json
from bullpen._kernel.ids import is_encodable
from bullpen._kernel.instants import possible
from bullpen._kernel.json import decode_strict
from bullpen._kernel.scrub import with_type
from bullpen.errors import InvalidOption, NotJson
from bullpen.wire.cancels import reason_in
from bullpen.wire.envelope import SEALED, seal_words
from bullpen.wire.options import WireOptions

_MISSING: Final = object()


class JobRecord:
    """One job as it was stored at the moment of reading. Immutable; most fields are decoded on access. A field that
    is None is absent.

    Times are Unix ms, 0 when not (yet) set. Numbers that cannot be read are 0.
    """

    __slots__ = ("_data", "_fields", "id")

    id: str
    _fields: Mapping[bytes, bytes | None]
    _data: Any

    def __init__(self, job_id: str, fields: Mapping[bytes, bytes | None]) -> None:
        _put_id(self, job_id)
        _put_fields(self, fields)
        _put_data(self, _MISSING)

    @classmethod
    def parse(cls, job_id: str, fields: Mapping[Any, Any] | Iterable[Any]) -> JobRecord:
        """From a mapping of fields, or from the flat list that Redis sends. Names and values may be bytes or text."""
        if not isinstance(fields, Mapping):
            flat = iter(fields)
            fields = dict(zip(flat, flat, strict=False))
        return cls(job_id, {as_bytes(name): as_bytes(value) for name, value in fields.items() if value is not None})

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        raise AttributeError(f"JobRecord is frozen: {attribute} cannot be set")

    def __delattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"JobRecord is frozen: {attribute} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobRecord) and self.id == other.id and self.fields() == other.fields()

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        # No data: records end up in logs, payloads must not.
        return f"JobRecord(id={self.id!r}, name={self.name!r}, attempts_made={self.attempts_made})"

    @property
    def exists(self) -> bool:
        """False for an id whose hash is gone or a stub: such a job must not be run."""
        return self._fields.get(b"name") is not None

    @property
    def name(self) -> str:
        return self._text(b"name")

    @property
    def data(self) -> Any:
        """The payload; raises NotJson when what is stored is not JSON. Decoded once."""
        if self._data is _MISSING:
            _put_data(self, json.decode(self.raw_data))
        return self._data

    @property
    def data_for_logs(self) -> Any:
        """Data whose ids may be logged; None when what is stored is not JSON."""
        try:
            return self.data
        except NotJson:
            return None

    def decode_data(self) -> bool:
        """Decode `data` now, for whoever reads it later. False: it is sealed, or no JSON, and reading it raises."""
        raw = self._fields.get(b"data") or b"{}"
        if raw.startswith(SEALED):
            return False
        try:
            _put_data(self, decode_strict(raw))
        except Exception:  # noqa: BLE001 - whatever the strict reader refused, the lenient one has the last word
            try:
                _put_data(self, json.decode(raw))
            except NotJson:
                return False
        return True

    @property
    def is_sealed(self) -> bool:
        """Whether what is stored as data is an envelope of a codec, also after it was opened here."""
        return (self._fields.get(b"data") or b"").startswith(SEALED)

    @property
    def seal_words(self) -> str | None:
        """What to show instead of sealed data, such as `encrypted with key k1`; None when it is not sealed, or was
        opened here."""
        try:
            return seal_words(self.data)
        except NotJson:
            return None

    def opened(self, data: bytes, return_value: bytes | None) -> JobRecord:
        """The same job with what a codec made of its data and its return value."""
        return OpenedRecord(self, data, return_value)

    @property
    def raw_data(self) -> bytes:
        """The payload as stored; `{}` when there is none."""
        return self._fields.get(b"data") or b"{}"

    @property
    def opts(self) -> WireOptions:
        return WireOptions.parse(self._fields.get(b"opts"))

    @property
    def raw_opts(self) -> bytes:
        return self._fields.get(b"opts") or b"{}"

    @property
    def progress(self) -> Any:
        """Whatever JSON was reported last, 0 before the first report."""
        return self._json(b"progress", 0)

    @property
    def delay(self) -> int:
        """The delay that put the job into `delayed`, in ms; 0 when it is not delayed."""
        return self._int(b"delay")

    @property
    def due_ms(self) -> int:
        """When the job could first run. The field `delay` is 0 again as soon as it is due; its options keep what was
        asked for."""
        opts = self.opts
        if opts.at_ms is not None:
            return max(self.timestamp, opts.at_ms)
        return self.timestamp + max(self.delay, opts.delay_ms)

    @property
    def priority(self) -> int:
        return self._int(b"priority")

    @property
    def timestamp(self) -> int:
        """When the job was created."""
        return possible(self._int(b"timestamp"))

    @property
    def attempts_made(self) -> int:
        """Attempts that have ended. While the first one runs this is 0."""
        made, older = self._fields.get(b"atm"), self._fields.get(b"attemptsMade")
        if older:  # written by old releases, and by nobody since: alone it would stand still
            return max(read_attempts(older), read_attempts(made or b"0"))
        return read_attempts(made) if made else 0

    @property
    def attempts_started(self) -> int:
        """How often the job was taken; grows with every take, so it fences writes of older takers."""
        return max(0, self._int(b"ats"))

    @property
    def stalled_count(self) -> int:
        """How often a worker lost the job without a word."""
        raw = self._fields.get(b"stc") or self._fields.get(b"stalledCounter")
        return max(0, read_int(raw)) if raw else 0

    @property
    def processed_on(self) -> int:
        """When the latest attempt began."""
        return max(0, possible(self._int(b"processedOn")))

    @property
    def finished_on(self) -> int:
        """When the job completed or finally failed."""
        return max(0, possible(self._int(b"finishedOn")))

    @property
    def worker_id(self) -> str | None:
        """Name of the worker that took the job last."""
        return self._text(b"pb") or self._text(b"workerId") or None

    @property
    def has_return_value(self) -> bool:
        return self._fields.get(b"returnvalue") is not None

    @property
    def return_value(self) -> Any:
        """What the handler returned; None before that, and when it cannot be read."""
        return self._json(b"returnvalue", None)

    @property
    def failed_reason(self) -> str | None:
        """Text of the latest error of a failed or retrying job.

        None for a completed job, although Node leaves the text of an earlier failed attempt beside the return value.
        """
        return None if self.has_return_value else self.raw_failed_reason

    @property
    def raw_failed_reason(self) -> str | None:
        """The stored text, whatever became of the job later."""
        raw = self._fields.get(b"failedReason")
        return None if raw is None else raw.decode("utf-8", "replace")

    @property
    def failure_text(self) -> str:
        """Why it failed last, with the type of the error in front where the newest stack tells it."""
        return with_type(self.raw_failed_reason or "", self.stacktrace[-1] if self.stacktrace else None)

    @property
    def stacktrace(self) -> tuple[str, ...]:
        """One stack per failed attempt, oldest first."""
        return tuple(_read_stacks(self._fields.get(b"stacktrace")))

    @property
    def deferred_failure(self) -> str | None:
        """Set by others: the worker that takes the job must fail it with this text, without running it."""
        raw = self._fields.get(b"defa")
        return None if raw is None else raw.decode("utf-8", "replace")

    @property
    def cancel_reason(self) -> str | None:
        """What was said by whoever cancelled the job, perhaps nothing (empty); None: nobody has, or it ended by itself
        before its worker heard of it."""
        raw = self._fields.get(b"bpcancel")
        text = self.failed_reason if self.finished_on else self.deferred_failure
        return None if raw is None or reason_in(text or "") is None else raw.decode("utf-8", "replace")

    @property
    def parent_key(self) -> str | None:
        """Key of the parent job, `<prefix>:<queue>:<id>`."""
        return self._text(b"parentKey") or None

    @property
    def parent(self) -> dict[str, Any] | None:
        """`{"id", "queueKey"}` and the policy flag for a failure."""
        value = self._json(b"parent", None)
        if isinstance(value, dict):
            return value
        if self.parent_key is None:
            return None
        # A worker does not read the field: the options of a child say the same.
        opts = self._json(b"opts", None)
        given = opts.get("parent") if isinstance(opts, dict) else None
        if not isinstance(given, dict) or "id" not in given:
            return None
        flags = {flag: opts[flag] for flag in ("fpof", "cpof", "idof", "rdof") if opts.get(flag)}
        return {"id": given["id"], "queueKey": given.get("queue"), **flags}

    @property
    def scheduler_id(self) -> str | None:
        """The job scheduler that made the job; its next iteration must be scheduled when this one is taken."""
        return self._text(b"rjk") or None

    @property
    def deduplication_id(self) -> str | None:
        if (stored := self._text(b"deid")) or b"deid" in self._fields:
            return stored or None
        # A worker does not read the field: the options say the same.
        opts = self._json(b"opts", None)
        given = opts.get("de") if isinstance(opts, dict) else None
        named = given.get("id") if isinstance(given, dict) else None
        return named if isinstance(named, str) else None

    @property
    def lane(self) -> str | None:
        """Whose fair share of the queue the job belongs to."""
        return self._text(b"bplane") or self.opts.lane

    @property
    def dead_letter_id(self) -> str | None:
        """Id of the entry that a failed job left in the dead-letter queue."""
        return self._text(b"bpdl") or None

    @property
    def solo_fence(self) -> int:
        """`attempts_started` of the take that ran the suspected job alone, 0 when there was none."""
        return max(0, self._int(b"bpsolo"))

    def field(self, name: bytes) -> bytes | None:
        """A stored field as it is."""
        return self._fields.get(name)

    def fields(self) -> dict[bytes, bytes]:
        """A copy of all stored fields that were read."""
        return {name: value for name, value in self._fields.items() if value is not None}

    def idempotency_key(self, queue: str) -> str:
        """The same for every run of this job and for no other.

        With the creation time, because the counter of ids starts again after obliterate or on a new server.
        """
        return f"{queue}/{self.id}/{self.timestamp}"

    def to_json(self) -> dict[str, Any]:
        """The job for API answers and pages: names as on the wire, unset fields left out, never a lock token."""
        answer: dict[str, Any] = {"id": self.id, "name": self.name}
        try:
            answer["data"] = self.data
        except NotJson:
            answer["data"] = self.raw_data.decode("utf-8", "replace")
        answer["opts"] = self.opts.to_json()
        answer["progress"] = self.progress
        answer["delay"] = self.delay
        answer["timestamp"] = self.timestamp
        answer["attemptsMade"] = self.attempts_made
        optional = {
            "processedOn": self.processed_on,
            "finishedOn": self.finished_on,
            "workerId": self.worker_id,
            "failedReason": self.failed_reason,
            "stacktrace": list(self.stacktrace),
            "parent": self.parent,
            "lane": self.lane,
            "deduplicationId": self.deduplication_id,
        }
        answer.update((name, value) for name, value in optional.items() if value)
        if self.has_return_value:
            answer["returnvalue"] = self.return_value
        return answer

    def _text(self, name: bytes) -> str:
        raw = self._fields.get(name)
        return "" if raw is None else raw.decode("utf-8", "replace")

    def _int(self, name: bytes) -> int:
        raw = self._fields.get(name)
        return 0 if raw is None else read_int(raw)

    def _json(self, name: bytes, default: Any) -> Any:
        raw = self._fields.get(name)
        if not raw:
            return default
        try:
            return json.decode(raw, what=name.decode())
        except NotJson:
            return default


def read_int(raw: bytes | str) -> int:
    """A whole number of a hash field; 0 when it cannot be read, or is one that not every reader takes. Fractions are
    cut, as Node does."""
    try:
        number = int(raw)
    except ValueError:
        try:
            number = int(float(raw))
        except (ValueError, OverflowError):
            return 0
    return number if -_MOST <= number <= _MOST else 0


def read_score(raw: bytes | str) -> int:
    """A score of a sorted set as a whole number; 0 for an infinite one, which anybody can write."""
    score = float(raw)
    return int(score) if math.isfinite(score) else 0


_MOST: Final = 2**53 - 1
USED_UP: Final = 2**53 - 2
"""One more is still a number that every reader takes."""


def read_attempts(raw: bytes | str) -> int:
    """A count of attempts. What is no finite number, or above all bounds, counts as used up: as none it would be tried
    for ever."""
    try:
        made = int(raw) if len(raw) < 20 else USED_UP
    except ValueError:
        try:
            made = int(float(raw))
        except (ValueError, OverflowError):
            return USED_UP
    return min(max(0, made), USED_UP)


# Straight into the slots of a frozen class: an assignment by name takes twice as long, and every job has three.
_slots: dict[str, Any] = {**vars(JobRecord)}
_put_id, _put_fields, _put_data = (_slots[name].__set__ for name in ("id", "_fields", "_data"))


class OpenedRecord(JobRecord):
    """A record whose payload was opened: `data` and `fields` show it, `raw_data` is still what is stored."""

    __slots__ = ("_stored",)

    _stored: bytes

    def __init__(self, record: JobRecord, data: bytes, return_value: bytes | None) -> None:
        fields: dict[bytes, bytes | None] = {**record.fields(), b"data": data}
        if return_value is not None:
            fields[b"returnvalue"] = return_value
        super().__init__(record.id, fields)
        _put_stored(self, record.raw_data)
        _put_data(self, json.decode(data))

    @property
    def raw_data(self) -> bytes:
        return self._stored

    @property
    def is_sealed(self) -> bool:
        return self._stored.startswith(SEALED)

    @property
    def data_for_logs(self) -> Any:
        """Nothing: what a producer encrypted is not for logs."""
        return None


_put_stored = vars(OpenedRecord)["_stored"].__set__


class LateRecord(JobRecord):
    """A record whose fields are made when the first one is read."""

    __slots__ = ("_make",)

    _make: Callable[[], Mapping[bytes, bytes | None]]

    def __init__(self, job_id: str, make: Callable[[], Mapping[bytes, bytes | None]]) -> None:
        _put_id(self, job_id)
        _put_make(self, make)

    def __getattr__(self, attribute: str) -> Any:
        # Two slots are empty at first.
        if attribute == "_data":
            return _MISSING
        if attribute != "_fields":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")
        fields = self._make()
        _put_fields(self, fields)
        return fields


_put_make = vars(LateRecord)["_make"].__set__


def check_job_name(name: Any) -> str:
    """Return the name if a job may have it."""
    if not isinstance(name, str) or not name or not (name.isascii() or is_encodable(name)):
        raise InvalidOption("name", "non-empty text as the job's name, without lone surrogates", name)
    return name


def check_progress(value: Any) -> bytes:
    """The `progress` field for a report, as JSON: a number from 0 to 100, text, a boolean, a list or an object."""
    if not isinstance(value, int | float | str | list | tuple | dict):
        raise InvalidOption("progress", "a number from 0 to 100, text, a boolean, a list or an object", value)
    if isinstance(value, dict):
        message = value.get("message", "")
        if not isinstance(message, str):
            raise InvalidOption("progress.message", "text", message)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value <= 100:
        raise InvalidOption("progress", "a number from 0 to 100, text, a boolean, a list or an object", value)
    raw = json.encode(value, what="progress")
    json.check_size("Job progress size", len(raw))
    return raw


def check_log_line(line: Any) -> bytes:
    """A line of a job's log, as it is stored."""
    if not isinstance(line, str):
        raise InvalidOption("line", "text", line)
    raw = line.encode("utf-8", "backslashreplace")
    json.check_size("Job log line size", len(raw))
    return raw


def _read_stacks(raw: bytes | None) -> list[str]:
    if not raw:
        return []
    try:
        value = json.decode(raw, what="stacktrace")
    except NotJson:
        return []
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def as_bytes(value: Any) -> bytes:
    """A field name or value as bytes, whatever the client decoded."""
    if isinstance(value, bytes):
        return value
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else str(value).encode()

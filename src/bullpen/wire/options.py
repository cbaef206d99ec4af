"""Job options: what our callers may write, and what anybody may have written.

In: keyword options of `add` (strict), or the `opts` JSON of a stored job (tolerant). Out: `JobOptions` with its
wire JSON made once, or `WireOptions`, which never fails to parse.
Elsewhere: the options of workers, which are another type on purpose (`bullpen.worker.worker`).
"""

from __future__ import annotations

import difflib
import functools
import math
import operator
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, TypedDict

from bullpen._kernel import json
from bullpen._kernel.backoff import BUILT_IN, Backoff, BackoffMapping, CustomBackoff, from_option, from_wire
from bullpen._kernel.duration import MAX_MS, check_int, to_ms
from bullpen._kernel.ids import check_job_id, check_lane, is_encodable
from bullpen._kernel.keep import KeepJobs, Retention
from bullpen._kernel.policy import DEFAULT_ATTEMPTS, DEFAULT_BACKOFF
from bullpen.errors import InvalidOption, NotJson, require
from bullpen.wire.deduplication import Deduplication
from bullpen.wire.links import FLAGS, HasKey, JobKey, OnFailure, check_on_failure

MAX_PRIORITY: Final = 2_097_151
"""2^21 - 1: one more and the score would lose the order among equals."""

LARGE_RETENTION: Final = 10_000
DEFAULT_KEEP_LOGS: Final = 1_000
DEFAULT_STACK_TRACE_LIMIT: Final = 10


KEEP_ALL: Final = KeepJobs()
KEEP_NONE: Final = KeepJobs(count=0)

DEFAULT_KEEP_COMPLETED: Final = KeepJobs(count=1_000, age_s=86_400)
DEFAULT_KEEP_FAILED: Final = KeepJobs(age_s=7 * 86_400)
"""Only of those that have a dead letter; the others stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMeta:
    """Where a job comes from: ids and headers that travel beside its data.

    Jobs that leave the outbox have those of their message. Stored in the options as `bpmeta`, which other clients keep.
    """

    tenant_id: str | None = None
    user_id: str | None = None
    correlation_id: str | None = None
    source_stream_id: str | None = None
    source_event_id: str | None = None
    headers: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def to_wire(self) -> dict[str, Any]:
        """Names as on the wire; what is absent is left out."""
        wire: dict[str, Any] = {wired: value for name, wired in _META_NAMES.items() if (value := getattr(self, name))}
        return wire | ({"headers": dict(self.headers)} if self.headers else {})

    @staticmethod
    def from_wire(stored: Any) -> JobMeta:
        """Read what anybody may have stored. Never raises: what is no text is absent."""
        if not isinstance(stored, dict):
            return _NO_META
        ids = {name: value for name, wired in _META_NAMES.items() if isinstance(value := stored.get(wired), str)}
        headers = stored.get("headers")
        return JobMeta(**ids, headers=headers if isinstance(headers, dict) else {})


_META_NAMES: Final = {
    "tenant_id": "tenantId",
    "user_id": "userId",
    "correlation_id": "correlationId",
    "source_stream_id": "sourceStreamId",
    "source_event_id": "sourceEventId",
}
_NO_META: Final = JobMeta()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How one job runs, checked when made. Nobody needs to look again.

    As queue defaults they hold for every job that does not say otherwise.
    """

    delay_ms: int = 0
    """Wait so long before the first run, from the server's now."""
    at: datetime | None = None
    """Run at this instant instead; needs a time zone."""
    priority: int = 0
    """BullMQ's order: 0 before all others, then 1 (first) to 2097151 (last)."""
    urgency: int = 0
    """The other way to say it: higher runs earlier, 1 to 2097151. Not together with `priority`."""
    attempts: int = DEFAULT_ATTEMPTS
    """Number of attempts, the first included."""
    backoff: Backoff | CustomBackoff | None = DEFAULT_BACKOFF
    """Pause before a retry; None only without retries."""
    ttl_ms: int | None = None
    """How long it may wait once it could run. Our workers fail one that they take later, with the cause `expired`."""
    lifo: bool = False
    """Run before the jobs that wait already."""
    job_id: str | None = None
    """An id of your own: adding it twice makes one job. None lets the queue count."""
    remove_on_complete: Retention = None
    remove_on_fail: Retention = None
    keep_logs: int | None = None
    """Log lines kept per job; the oldest go first. None: 1000 by our workers, while Node's keep them all."""
    stack_trace_limit: int | None = None
    """Stack traces kept per job, one per failed attempt; 0 keeps none. None: 10."""
    timestamp_ms: int | None = None
    """Creation time to store, in Unix ms; None is the server's now."""
    tm: str | None = None
    """Trace context of the producer, opaque text."""
    meta: JobMeta | None = None
    """Ids and headers that travel beside the data; read as `job.meta`."""
    deduplication: Deduplication | None = None
    """Which other adds of the queue mean the same job; an id alone is the simplest rule."""
    parent: JobKey | None = None
    """The job that waits for this one; it must exist. A Job, or its key."""
    on_failure: OnFailure | None = None
    """What the final failure of this job does to its parent. Must be said where there is one."""
    lane: str | None = None
    """Whose fair share of the queue the job belongs to: a tenant, a customer. Its class is its priority, 1 if none."""
    large_retention: Literal["warn", "refuse"] = "warn"
    """What happens to a `remove_on_*` above 10000 jobs. Not written."""
    wire_json: bytes = field(init=False, repr=False, compare=False)
    """The `opts` field of the job, ready to store."""
    place: str = field(init=False, repr=False, compare=False)
    """When and where the job runs, as the `add` script takes it; made once, because thousands of jobs share it."""
    forms: dict[Any, Any] = field(init=False, repr=False, compare=False)
    """Of those that jobs derive from these, by what was given for them (`option_forms`)."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            check(name, getattr(self, name))
        self._settle()

    def _settle(self) -> None:
        """Check what depends on several options, and make the wire JSON."""
        require("urgency", not (self.urgency and self.priority), "not together with priority", self.urgency)
        require("at", not (self.at and self.delay_ms), "not together with delay", self.at)
        if self.parent is not None or self.on_failure is not None:
            self._check_parent()
        if self.backoff is None and self.attempts > 1:
            object.__setattr__(self, "backoff", DEFAULT_BACKOFF)
        _check_size("remove_on_complete", self.remove_on_complete, self.large_retention)
        _check_size("remove_on_fail", self.remove_on_fail, self.large_retention)
        object.__setattr__(self, "wire_json", json.encode_checked(self.to_wire()))
        object.__setattr__(self, "place", self.place_of(replaces=False))
        object.__setattr__(self, "forms", {})

    def _check_parent(self) -> None:
        expected = "what a failure does to the parent: " + ", ".join(map(repr, FLAGS))
        require("on_failure", self.on_failure is not None, expected, self.on_failure)
        require("on_failure", self.parent is not None, "a parent", self.on_failure)
        # Its parent would wait for a job that was never added.
        require("deduplication", self.deduplication is None, "none for a job with a parent", self.deduplication)

    @property
    def at_ms(self) -> int | None:
        """The instant of `at` in Unix ms."""
        return None if self.at is None else to_epoch_ms("at", self.at)

    @property
    def wire_priority(self) -> int:
        """The priority that Redis sees, from whichever of the two ways it was given."""
        if self.urgency:
            return urgency_to_priority(self.urgency)
        return self.priority or (0 if self.lane is None else 1)

    def place_of(self, *, replaces: bool) -> str:
        """The words for the `add` script, or nothing for a job that just waits in line. `replaces`: it takes the place
        of a finished job with its id."""
        place = self._words(2 if replaces else 0)
        return "" if place == _JUST_WAITS else place

    @property
    def full_place(self) -> str:
        """The same words, also for a job that just waits in line."""
        return self._words(0)

    def _words(self, flags: int) -> str:
        words = (self.timestamp_ms, self.delay_ms, self.at_ms, self.wire_priority, flags + (1 if self.lifo else 0))
        place = " ".join("-" if word is None else str(word) for word in words)
        if self.deduplication is not None or self.parent is not None:
            place += " tied"
        return place if self.lane is None else f"{place} @{self.lane}"

    def to_wire(self) -> dict[str, Any]:
        """The options as BullMQ stores them, with its names; what changes nothing is left out.

        Not only for the bytes: a server keeps a hash compact as long as no value is longer than 64 bytes. With the 60
        of the default options a small job takes 225 bytes, with 64 and more twice that.
        """
        wire: dict[str, Any] = {"attempts": self.attempts}
        if self.backoff is not None and self.attempts > 1:  # a job that is never retried has nothing to wait for
            wire["backoff"] = self.backoff.to_wire()
        if self.delay_ms:
            wire["delay"] = self.delay_ms
        if (at_ms := self.at_ms) is not None:
            wire["bpat"] = at_ms  # the hash keeps a delay only until it has passed
        if priority := self.wire_priority:
            wire["priority"] = priority
        if self.ttl_ms is not None:
            wire["bpttl"] = self.ttl_ms
        if self.lifo:
            wire["lifo"] = True
        if self.job_id is not None:
            wire["jobId"] = self.job_id
        if self.remove_on_complete is not None:
            wire["removeOnComplete"] = _retention_to_wire(self.remove_on_complete)
        if self.remove_on_fail is not None:
            wire["removeOnFail"] = _retention_to_wire(self.remove_on_fail)
        if self.timestamp_ms is not None:
            wire["timestamp"] = self.timestamp_ms
        if self.keep_logs is not None:
            wire["kl"] = self.keep_logs
        if self.stack_trace_limit is not None:
            wire["stackTraceLimit"] = self.stack_trace_limit
        elif self.attempts > DEFAULT_STACK_TRACE_LIMIT:
            wire["stackTraceLimit"] = DEFAULT_STACK_TRACE_LIMIT
        if self.tm is not None:
            wire["tm"] = self.tm
        if self.meta is not None and (meta := self.meta.to_wire()):
            wire["bpmeta"] = meta
        if self.deduplication is not None:
            wire["de"] = self.deduplication.to_wire()
        if self.parent is not None and self.on_failure is not None:
            wire["parent"] = self.parent.to_wire()
            if flag := FLAGS[self.on_failure]:
                wire[flag] = True
        if self.lane is not None:
            wire["bplane"] = self.lane
        return wire


_JUST_WAITS: Final = "- 0 - 0 0"


class CommonArguments(TypedDict, total=False):
    """Job options that callers write in the same way everywhere.

    `JobOptions` says what each does, and checks it. None means "not given".
    """

    priority: int | None
    urgency: int | None
    attempts: int | None
    backoff: Backoff | CustomBackoff | int | timedelta | BackoffMapping | None
    ttl: int | timedelta | None
    lifo: bool | None
    remove_on_complete: Retention
    remove_on_fail: Retention
    keep_logs: int | None
    stack_trace_limit: int | None
    tm: str | None
    meta: JobMeta | None
    large_retention: Literal["warn", "refuse"] | None


class TimeArguments(TypedDict, total=False):
    """Job options that are about one time."""

    delay: int | timedelta | None
    at: datetime | None
    deduplication: Deduplication | str | None
    timestamp: int | datetime | None


class TemplateArguments(CommonArguments, total=False):
    """Job options where they hold for jobs of any time: those that a scheduler makes."""

    lane: str | None


class JobDefaults(TemplateArguments, TimeArguments, total=False):
    """The same, where they hold for many jobs: `Queue(…)`."""


class JobArguments(JobDefaults, total=False):
    """Options of one job, as callers write them."""

    job_id: str | None
    parent: JobKey | HasKey | None
    on_failure: OnFailure | None


def make_defaults(**given: Any) -> JobOptions:
    """The options of all jobs of a queue, by the names of `JobDefaults`. Raises InvalidOption as `make_options`."""
    for name in JobArguments.__annotations__.keys() - JobDefaults.__annotations__.keys():
        if name in given:
            raise InvalidOption(name, "an option of one job, not of a whole queue", given[name])
    for name, value in given.items():
        if name not in _OPTION_NAMES:
            raise unknown_option(name, value, "an argument of Queue or a job option", _OF_QUEUES)
    return make_options(DEFAULT_OPTIONS, **given)


def make_options(defaults: JobOptions, /, **given: Any) -> JobOptions:
    """The options of one job: what was given, by the names of `JobArguments`, over the queue's defaults.

    Raises InvalidOption for a wrong value, and for a wrong name with the nearest right one.
    """
    changes: dict[str, Any] = {}
    for name, value in given.items():
        if name not in _OPTION_NAMES:
            raise unknown_option(name, value)
        if value is None:
            continue
        if name == "delay":
            changes["delay_ms"] = to_ms("delay", value)
        elif name == "ttl":
            changes["ttl_ms"] = to_ms("ttl", value, minimum=1)
        elif name == "timestamp":
            changes["timestamp_ms"] = to_epoch_ms("timestamp", value) if isinstance(value, datetime) else value
        elif name == "backoff":
            changes["backoff"] = value if isinstance(value, CustomBackoff) else from_option(value)
        elif name == "parent":
            changes["parent"] = JobKey.read("parent", value)
        elif name == "deduplication":
            changes["deduplication"] = Deduplication.read(value)
        else:
            changes[name] = value
    if not changes:
        return defaults
    _settle_rivals(changes, "priority", "urgency", 0)
    _settle_rivals(changes, "delay_ms", "at", None)
    return _derive(defaults, changes)


def _derive(defaults: JobOptions, changes: dict[str, Any]) -> JobOptions:
    """As `dataclasses.replace`, but only what changed is checked: a third of its cost, on the path of every add."""
    for name, value in changes.items():
        _CHECKS[name](name, value)
    options, put = object.__new__(JobOptions), object.__setattr__
    for name, value in zip(_FIELDS, _values_of(defaults), strict=True):
        put(options, name, changes.get(name, value))
    options._settle()
    return options


def _settle_rivals(changes: dict[str, Any], first: str, second: str, none_of_second: Any) -> None:
    """Two ways to say one thing: both at once is refused, and either replaces the other of the defaults."""
    if first in changes:
        if second in changes:
            raise InvalidOption(second, f"not together with {first.removesuffix('_ms')}", changes[second])
        changes[second] = none_of_second
    elif second in changes:
        changes[first] = 0


_OPTION_NAMES: Final = frozenset(JobArguments.__annotations__)

_OF_QUEUES: Final = (
    *("connection", "prefix", "events_max_len", "dead_letter_suffix", "add_deadline", "max_buffered", "durability"),
    *("clock_offset_ms", "codec"),
)

_WORKER_ONLY: Final = {
    **dict.fromkeys(("lock", "lock_duration", "lock_ms", "lockDuration"), "lock"),
    **{name: name for name in ("concurrency", "stalled_interval", "drain_delay")},
}

# Wire names and words of other libraries, for the hint only.
_OTHER_NAMES: Final = {
    "kl": "keep_logs",
    "max_attempts": "attempts",
    "retries": "attempts",
    "countdown": "delay",
    **dict.fromkeys(("dedupe", "dedup", "debounce"), "deduplication"),
}


def is_option(name: str) -> bool:
    """Whether there is a job option of this name; `upsert_scheduler` and flows have one more."""
    return name in _OPTION_NAMES or name in ("durability", "replace_finished")


def unknown_option(
    name: str, value: Any, kind: str = "a job option", besides: tuple[str, ...] = (), *, near: str | None = None
) -> InvalidOption:
    """The error for an option name that does not exist (or not here). Names `besides` job options may be meant."""
    if name in _WORKER_ONLY and name not in besides:
        return InvalidOption(name, f"not a job option: set {_WORKER_ONLY[name]} on Worker", value)
    if name in ("opts", "options") and isinstance(value, Mapping):
        return InvalidOption(name, "options by name: `attempts=3, delay=5_000`", value)
    snake, known = to_snake(name), {*_OPTION_NAMES, *besides}
    suggestion = (
        near
        or _OTHER_NAMES.get(name)
        or next(iter([snake] if snake in known else difflib.get_close_matches(snake, sorted(known), 1)), None)
    )
    return InvalidOption(name, f"the name of {kind}", value, suggestion=suggestion)


def to_snake(name: str) -> str:
    """`lockDuration` as it is written here: `lock_duration`."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda match: "_" + match[1].lower(), name)


def to_epoch_ms(name: str, instant: datetime) -> int:
    """Unix milliseconds of an aware datetime."""
    if not _is_aware(instant):
        raise InvalidOption(name, "a datetime with a time zone", instant)
    epoch_ms = math.floor(instant.timestamp() * 1000 + 0.5)
    require(name, epoch_ms > 0, "an instant after 1970", instant)
    return epoch_ms


def _is_aware(value: object) -> bool:
    return isinstance(value, datetime) and value.utcoffset() is not None


def urgency_to_priority(urgency: int) -> int:
    """Wire priority of an urgency; 0 stays 0 (the plain waiting list)."""
    return MAX_PRIORITY + 1 - urgency if urgency else 0


def priority_to_urgency(priority: int) -> int:
    """The urgency that a wire priority stands for."""
    return MAX_PRIORITY + 1 - priority if priority else 0


def _check_ms(name: str, value: Any) -> None:
    check_int(name.removesuffix("_ms"), value, minimum=0)


def _check_instant(name: str, value: Any) -> None:
    if value is not None:
        to_epoch_ms(name, value)


def _check_timestamp(name: str, value: Any) -> None:
    if value is not None:
        check_int("timestamp", value, minimum=1)


def _check_priority(name: str, value: Any) -> None:
    check_int(name, value, minimum=0, maximum=MAX_PRIORITY)


def _check_attempts(name: str, value: Any) -> None:
    check_int(name, value, minimum=1)


def _check_count(name: str, value: Any) -> None:
    if value is not None:
        check_int(name, value, minimum=0)


def _check_backoff(name: str, value: Any) -> None:
    if value is not None:
        require(name, isinstance(value, Backoff | CustomBackoff), "a Backoff", value)
        # A Node worker that must retry another kind throws, and leaves the job active until it stalls. Who writes
        # `Backoff.custom` says that the workers have a strategy of this name.
        is_known = isinstance(value, CustomBackoff) or value.kind in BUILT_IN
        require("backoff.type", is_known, "'fixed', 'exponential' or Backoff.custom(…)", value)


def _check_flag(name: str, value: Any) -> None:
    require(name, isinstance(value, bool), "True or False", value)


def _check_ttl(name: str, value: Any) -> None:
    if value is not None:
        check_int("ttl", value, minimum=1)


def _check_own_id(name: str, value: Any) -> None:
    if value is not None:
        check_job_id(value)


def _check_trace(name: str, value: Any) -> None:
    require(name, value is None or (isinstance(value, str) and is_encodable(value)), "text", value)


def _check_meta(name: str, value: Any) -> None:
    if value is None:
        return
    require(name, isinstance(value, JobMeta), "a JobMeta", value)
    for each in _META_NAMES:
        text = getattr(value, each)
        require(f"{name}.{each}", text is None or (isinstance(text, str) and is_encodable(text)), "text", text)
    require(f"{name}.headers", isinstance(value.headers, Mapping), "a mapping", value.headers)


def _check_deduplication(name: str, value: Any) -> None:
    require(name, value is None or isinstance(value, Deduplication), "a Deduplication", value)


def _check_parent_key(name: str, value: Any) -> None:
    require(name, value is None or isinstance(value, JobKey), "a JobKey", value)


def _check_lane(name: str, value: Any) -> None:
    if value is not None:
        check_lane(value)


def _check_large(name: str, value: Any) -> None:
    require(name, value in ("warn", "refuse"), "'warn' or 'refuse'", value)


def check_retention(name: str, value: Any) -> None:
    """Refuse what is no Retention, for option `name`."""
    fits = value is None or isinstance(value, KeepJobs) or (isinstance(value, int) and 0 <= value <= MAX_MS)
    require(name, fits, "True, False, a number of jobs from 0, or KeepJobs", value)


_CHECKS: Final[dict[str, Callable[[str, Any], None]]] = {
    "delay_ms": _check_ms,
    "at": _check_instant,
    "priority": _check_priority,
    "urgency": _check_priority,
    "attempts": _check_attempts,
    "backoff": _check_backoff,
    "ttl_ms": _check_ttl,
    "lifo": _check_flag,
    "job_id": _check_own_id,
    "remove_on_complete": check_retention,
    "remove_on_fail": check_retention,
    "keep_logs": _check_count,
    "stack_trace_limit": _check_count,
    "timestamp_ms": _check_timestamp,
    "tm": _check_trace,
    "meta": _check_meta,
    "deduplication": _check_deduplication,
    "parent": _check_parent_key,
    "on_failure": lambda _, value: check_on_failure(value),
    "lane": _check_lane,
    "large_retention": _check_large,
}
"""What each option must be on its own, by the name of its field."""

_FIELDS: Final = tuple(_CHECKS)
_values_of: Final = operator.attrgetter(*_FIELDS)


def is_large(value: Retention) -> bool:
    """Whether it keeps so many finished jobs that callers are warned of it."""
    count = value.count if isinstance(value, KeepJobs) else value
    return count is not None and count > LARGE_RETENTION


def _check_size(name: str, value: Retention, large: Literal["warn", "refuse"]) -> None:
    if not is_large(value):
        return
    if large == "refuse":
        raise InvalidOption(name, f"at most {LARGE_RETENTION} jobs", value)
    count = value.count if isinstance(value, KeepJobs) else value
    warnings.warn(
        f"{name}: keeping {count} finished jobs can fill the server's memory; up to {LARGE_RETENTION} is usual",
        stacklevel=_callers_level(),
    )


def _callers_level() -> int:
    """Stack level of the first frame outside this package: a warning must point at the line of the caller."""
    level, frame = 1, sys._getframe(1)
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level


def _retention_to_wire(value: bool | int | KeepJobs) -> bool | int | dict[str, int]:
    return value.to_wire() if isinstance(value, KeepJobs) else value


def resolve(job_value: Any, worker_default: KeepJobs | None = None) -> KeepJobs:
    """Which finished jobs stay after this one, from the job's raw `removeOn…` and the worker's rule. Never raises."""
    if job_value is None:
        return worker_default or KEEP_ALL
    if job_value is True:
        return KEEP_NONE
    if isinstance(job_value, KeepJobs):
        return job_value
    if isinstance(job_value, dict):
        limit = _read_int(job_value.get("limit"), 0)
        count, age_s = _read_bound(job_value.get("count")), _read_bound(job_value.get("age"))
        return KeepJobs(count, age_s, limit if limit > 0 else None)
    # False, a negative number and what nobody can read: the safe reading is to keep the jobs.
    return KeepJobs(count=_read_bound(job_value))


def rule_text(keep: KeepJobs) -> str:
    """The rule as scripts read it."""
    if keep.keeps_none:
        return "none"
    if keep.keeps_all:
        return "all"
    age_ms = -1 if keep.age_s is None else keep.age_s * 1000
    return f"{-1 if keep.count is None else keep.count}:{age_ms}:{keep.limit or 1000}"


def _read_bound(value: Any) -> int | None:
    number = _read_int(value, -1)
    return number if number >= 0 else None


def _read_int(value: Any, default: int) -> int:
    """A whole number of foreign JSON: floats are cut, text is read as a number, anything else is `default`."""
    if isinstance(value, bool):
        return default
    try:
        number = float(value) if not isinstance(value, int) else value
    except (TypeError, ValueError, OverflowError):
        return default
    if number != number:  # NaN
        return default
    return int(max(-MAX_MS, min(MAX_MS, number)))


@dataclass(frozen=True, slots=True)
class WireOptions:
    """The options of a stored job, whoever stored it. Broken parts read as if they were absent."""

    attempts: int = 1
    """At least 1: Node writes 0 for "not given", and a negative number means one attempt too."""
    backoff: Backoff | CustomBackoff | None = None
    lifo: bool = False
    priority: int = 0
    """As given when the job was added. The job's own `priority` field decides where it goes."""
    remove_on_complete: Any = None
    """As stored; `resolve` gives it a meaning."""
    remove_on_fail: Any = None
    keep_logs: int | None = None
    """None: the producer set no bound."""
    stack_trace_limit: int | None = None
    """None: unlimited."""
    tm: str | None = None
    has_repeat: bool = False
    """Made by a job scheduler of the old kind."""
    delay_ms: int = 0
    """As given when the job was added."""
    at_ms: int | None = None
    """The instant that was given instead of a delay."""
    lane: str | None = None
    """Whose fair share of the queue the job belongs to."""
    ttl_ms: int | None = None
    """How long it may wait once it could run."""
    raw: bytes = field(default=b"{}", repr=False, compare=False)

    @staticmethod
    def parse(raw: bytes | str | None) -> WireOptions:
        """Read `opts` JSON. Never raises; equal bytes give the same object, because jobs share few distinct options."""
        if raw is None:
            return _NO_OPTIONS
        if isinstance(raw, str):
            raw = raw.encode("utf-8", "surrogatepass")
        # Options with a job id or a trace are unique: caching large ones would only hold memory.
        return _parse_cached(raw) if len(raw) <= 1_024 else _parse(raw)

    @property
    def meta(self) -> JobMeta:
        """Ids and headers beside the data. Read when asked for: most jobs have none, and no worker needs it."""
        return JobMeta.from_wire(_read_object(self.raw).get("bpmeta")) if b"bpmeta" in self.raw else _NO_META

    def stored(self) -> dict[str, Any]:
        """All of them as they are stored."""
        return dict(_read_object(self.raw))

    def to_json(self) -> dict[str, Any]:
        """All stored options with their public names, also those that have no attribute here."""
        stored = _read_object(self.raw)
        return {_PUBLIC_NAMES.get(name, name): value for name, value in stored.items()}


_PUBLIC_NAMES: Final = {
    "de": "deduplication",
    "fpof": "failParentOnFailure",
    "cpof": "continueParentOnFailure",
    "idof": "ignoreDependencyOnFailure",
    "rdof": "removeDependencyOnFailure",
    "kl": "keepLogs",
    "tm": "telemetryMetadata",
    "omc": "omitContext",
    "bpmeta": "meta",
    "bplane": "lane",
    "bpttl": "ttl",
}


def _read_object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.decode(raw, what="opts")
    except NotJson:
        return {}
    return value if isinstance(value, dict) else {}


def _parse(raw: bytes) -> WireOptions:
    stored = _read_object(raw)
    trace = stored.get("tm")
    return WireOptions(
        attempts=_read_attempts(stored.get("attempts")),
        backoff=from_wire(stored.get("backoff")),
        lifo=bool(stored.get("lifo")),
        priority=max(0, _read_int(stored.get("priority"), 0)),
        remove_on_complete=stored.get("removeOnComplete"),
        remove_on_fail=stored.get("removeOnFail"),
        keep_logs=_read_bound(stored.get("kl")),
        stack_trace_limit=_read_bound(stored.get("stackTraceLimit")),
        tm=trace if isinstance(trace, str) else None,
        has_repeat=bool(stored.get("repeat")),
        delay_ms=max(0, _read_int(stored.get("delay"), 0)),
        at_ms=_read_bound(stored.get("bpat")),
        ttl_ms=_read_bound(stored.get("bpttl")),
        lane=lane if isinstance(lane := stored.get("bplane"), str) and lane else None,
        raw=raw,
    )


def _read_attempts(value: Any) -> int:
    # 2.5 attempts allow a third one in Node, which compares "made < attempts".
    if isinstance(value, float) and math.isfinite(value):
        value = math.ceil(value)
    return max(1, _read_int(value, 1))


_parse_cached = functools.lru_cache(maxsize=512)(_parse)
_NO_OPTIONS: Final = WireOptions()

DEFAULT_OPTIONS: Final = JobOptions()

"""When the jobs of a scheduler run: the rule as callers write it, as it is stored, and the next time by it.

In: options of `upsert_scheduler` (strict), or the stored record of anybody's scheduler (tolerant), and an instant. Out:
`Schedule` with the fields to store, `SchedulerRecord`, and `SchedulerPlan`: the next time, and whether the present job
runs. All times are Unix ms of the server's clock. Nothing is read or written here.
Elsewhere: the rules of cron (`bullpen._kernel.cron`), storing (`bullpen.queue.schedulers`), advancing
(`bullpen.worker.scheduler`).
"""

from __future__ import annotations

import difflib
import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, Literal, TypedDict, Unpack

from bullpen._kernel import json
from bullpen._kernel.cron import LOCAL, find_zone, next_after
from bullpen._kernel.duration import check_int, read_ms
from bullpen._kernel.ids import is_encodable
from bullpen._kernel.instants import possible
from bullpen.errors import InvalidOption, NotJson, require
from bullpen.wire.options import WireOptions, to_epoch_ms
from bullpen.wire.records import read_int

__all__ = [
    "SCHEDULE_NAMES",
    "CatchUp",
    "Overlap",
    "Schedule",
    "ScheduleArguments",
    "SchedulerPlan",
    "SchedulerRecord",
    "SchedulerRule",
    "digest",
    "is_legacy",
    "make_schedule",
    "next_runs",
    "options_head",
    "read_instant",
    "read_rule",
    "read_scheduler",
    "repeat_options",
]

Overlap = Literal["queue", "one", "skip"]
CatchUp = Literal["once", "skip"] | int

DEFAULT_GRACE_MS: Final = 60_000
_MOST_CAUGHT_UP: Final = 1_000
_MOST_NAMED_AHEAD: Final = 100_000


class ScheduleArguments(TypedDict, total=False):
    """When jobs are made. One of `every` and `cron` is needed. None means "not given"."""

    every: int | timedelta | str | None
    """The time from one run to the next: ms, a timedelta, or text such as `90s`, `5m`, `2h`, `1d`. The first run is at
    once, unless `start` or `offset` says otherwise."""
    cron: str | None
    """A pattern: `0 9 * * 1-5`, `*/5 * * * *`, `@daily`; six fields begin with seconds."""
    tz: str | None
    """Time zone of `cron`, UTC unless given: `Europe/Berlin`, `UTC+3`."""
    start: datetime | None
    """No run before this instant."""
    end: datetime | None
    """No further run is planned after this instant."""
    limit: int | None
    """Number of runs, then the schedule ends."""
    immediately: bool | None
    """With `cron`: the first run is now. Each upsert begins anew."""
    offset: int | timedelta | str | None
    """With `every`: how long after the full interval (counted from 1970 in UTC) each run is."""
    overlap: Overlap | None
    """What a run does that is due while the one before has not ended: `queue` (default) runs beside it, `one` waits for
    its end, `skip` is left out."""
    catch_up: CatchUp | None
    """What happens to runs that were missed because no worker ran: `once` (default) makes up for all with one run,
    `skip` leaves them out, a number lets so many of the newest run."""
    grace: int | timedelta | str | None
    """With `catch_up="skip"`: a run that begins later than this is left out; one minute unless given."""
    jitter: int | timedelta | str | None
    """Up to so much later, by chance: many schedulers of one moment are spread."""


SCHEDULE_NAMES: Final = tuple(ScheduleArguments.__annotations__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When jobs are made, checked once."""

    every_ms: int | None = None
    pattern: str | None = None
    zone: str | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    limit: int | None = None
    immediately: bool = False
    offset_ms: int | None = None
    overlap: Overlap = "queue"
    catch_up: CatchUp = "once"
    grace_ms: int = DEFAULT_GRACE_MS
    jitter_ms: int = 0

    @property
    def fields(self) -> dict[str, str | int]:
        """The fields of the scheduler's record, with BullMQ's names and ours. `offset` is the script's."""
        named = {
            "every": self.every_ms,
            "pattern": self.pattern,
            "tz": self.zone,
            "startDate": self.start_ms,
            "endDate": self.end_ms,
            "limit": self.limit,
            "bpoverlap": None if self.overlap == "queue" else self.overlap,
            "bpcatchup": None if self.catch_up == "once" else self.catch_up,
            "bpgrace": self.grace_ms if self.catch_up == "skip" else None,
            "bpjitter": self.jitter_ms or None,
        }
        return {name: value for name, value in named.items() if value is not None}

    @property
    def repeat(self) -> dict[str, Any]:
        """The rule as it stands in the options of every job that it makes."""
        fields = self.fields
        repeat = {name: value for name, value in fields.items() if not name.startswith("bp")}
        return repeat if not self.offset_ms else {**repeat, "offset": self.offset_ms}

    def first_ms(self, scheduler_id: str, now_ms: int, *, after_ms: int | None = None) -> int | None:
        """The first time by `cron`, after another that is taken; None for `every`, which the script computes."""
        if self.pattern is None:
            return None
        if self.immediately and after_ms is None:
            return now_ms
        after = max(now_ms, self.start_ms or 0, after_ms or 0)
        first = next_after(self.pattern, self.zone, after, seed=_seed(scheduler_id, self.pattern))
        if self.end_ms is not None and first > self.end_ms:
            raise InvalidOption("end", "an instant after the first run", _instant(self.end_ms).isoformat())
        return first


def make_schedule(options: Mapping[str, Any]) -> Schedule:
    """Check what a caller wrote (see `ScheduleArguments`); None means "not given". Raises InvalidOption."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in SCHEDULE_NAMES:
            near = [*difflib.get_close_matches(name, SCHEDULE_NAMES, 1), None][0]
            raise InvalidOption(name, "the name of a schedule option", value, suggestion=near)
    every, pattern, zone = given.get("every"), given.get("cron"), given.get("tz")
    if every is None and pattern is None:
        for name, value in given.items():
            raise InvalidOption(name, "together with `every` or `cron`", value)
    if (every is None) == (pattern is None):
        raise InvalidOption("every", "either `every` or `cron`", every if pattern is None else (every, pattern))
    schedule = Schedule(
        every_ms=None if every is None else read_ms("every", every, minimum=1),
        pattern=None if pattern is None else _check_pattern(pattern, zone),
        # Written down although it is the default: a Node worker would take its machine's zone.
        zone=None if pattern is None else zone or "UTC",
        start_ms=_instant_option("start", given),
        end_ms=_instant_option("end", given),
        limit=check_int("limit", given["limit"], minimum=1) if "limit" in given else None,
        immediately=given.get("immediately", False),
        offset_ms=read_ms("offset", given["offset"]) if "offset" in given else None,
        overlap=given.get("overlap", "queue"),
        catch_up=given.get("catch_up", "once"),
        grace_ms=read_ms("grace", given["grace"]) if "grace" in given else DEFAULT_GRACE_MS,
        jitter_ms=read_ms("jitter", given["jitter"]) if "jitter" in given else 0,
    )
    _check_together(schedule, given)
    return schedule


def _check_together(schedule: Schedule, given: Mapping[str, Any]) -> None:
    now, offset, every_ms = schedule.immediately, schedule.offset_ms, schedule.every_ms
    require("immediately", isinstance(now, bool), "True or False", now)
    expected = "with cron; the first run of an interval is at once, unless start or offset says otherwise"
    require("immediately", not now or every_ms is None, expected, now)
    require("immediately", not (now and "start" in given), "not together with start", now)
    if "tz" in given:
        require("tz", schedule.pattern is not None, "a zone only with cron; an interval has no zone", given["tz"])
    if offset is not None:
        require("offset", every_ms is not None, "with every; a pattern sets its own times", given["offset"])
        require("offset", every_ms is None or offset < every_ms, "less than every", given["offset"])
    if schedule.start_ms is not None and schedule.end_ms is not None:
        require("end", schedule.start_ms < schedule.end_ms, "an instant after start", given["end"])
    require("overlap", schedule.overlap in ("queue", "one", "skip"), "'queue', 'one' or 'skip'", schedule.overlap)
    if schedule.catch_up not in ("once", "skip"):
        is_number = type(schedule.catch_up) is int and 1 <= schedule.catch_up <= _MOST_CAUGHT_UP
        require("catch_up", is_number, f"'once', 'skip' or a number, 1 to {_MOST_CAUGHT_UP}", schedule.catch_up)
    if "grace" in given:
        require("grace", schedule.catch_up == "skip", "with catch_up='skip'", given["grace"])


def _check_pattern(pattern: Any, zone: Any) -> str:
    require("cron", isinstance(pattern, str), "text such as '0 9 * * 1-5'", pattern)
    require("cron", is_encodable(pattern), "text without lone surrogates", pattern)
    require("tz", zone is None or isinstance(zone, str), "the name of a time zone", zone)
    if zone is not None:
        find_zone(zone)
    try:
        next_after(pattern, zone, 0)  # raises for what cannot be read, and for what no day is like
    except InvalidOption as error:
        raise InvalidOption("cron", error.expected, error.value) from None
    return str(pattern)


def _instant_option(name: str, given: Mapping[str, Any]) -> int | None:
    if name not in given:
        return None
    require(name, isinstance(given[name], datetime), "a datetime with a time zone", given[name])
    return to_epoch_ms(name, given[name])


def next_runs(
    *, after: datetime | None = None, count: int = 5, scheduler_id: str = "", **options: Unpack[ScheduleArguments]
) -> list[datetime]:
    """When a scheduler would run that is made at `after` (now, by this machine's clock). Nothing is asked or stored.

    `scheduler_id` matters to patterns with `H` only. Raises InvalidOption as `upsert_scheduler` would.
    """
    check_int("count", count, minimum=1, maximum=_MOST_NAMED_AHEAD)
    schedule, after_ms = make_schedule(options), to_epoch_ms("after", after or datetime.now(UTC))
    first = schedule.first_ms(scheduler_id, after_ms)
    if first is None:
        assert schedule.every_ms is not None
        first = max(after_ms, schedule.start_ms or 0)
        if schedule.offset_ms and schedule.start_ms is None:
            first = _aligned(after_ms, schedule.every_ms, schedule.offset_ms)
    rule = SchedulerRule(
        every_ms=schedule.every_ms,
        pattern=schedule.pattern,
        zone=schedule.zone,
        ends_ms=schedule.end_ms,
        limit=schedule.limit,
        seed=_seed(scheduler_id, schedule.pattern),
    )
    return [_instant(run_ms) for run_ms in islice(rule.runs_from(first, 1), count)]


# ---- stored rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerRule:
    """The rule of a stored scheduler, whoever stored it: what its record says, else what its job's options say."""

    every_ms: int | None = None
    pattern: str | None = None
    zone: str | None = None
    starts_ms: int | None = None
    ends_ms: int | None = None
    limit: int | None = None
    offset_ms: int = 0
    seed: str = ""
    overlap: str = "queue"
    catch_up: CatchUp = "once"
    grace_ms: int = DEFAULT_GRACE_MS
    jitter_ms: int = 0

    def runs_from(self, first_ms: int, number: int) -> Iterator[int]:
        """This time, which is that of run `number`, and those after it, as far as end and limit allow."""
        instant = first_ms
        while (self.limit is None or number <= self.limit) and (self.ends_ms is None or instant <= self.ends_ms):
            yield instant
            number += 1
            if not self.every_ms and not self.pattern:
                return
            instant = self._following(instant)

    def plan(self, slot_ms: int, now_ms: int, *, iteration: int, after_ms: int | None = None) -> SchedulerPlan:
        """What follows the job of `slot_ms`, which was taken now; `iteration` is the number of the next one.

        `after_ms`: the next time must be later than this, because that one is taken. Raises NeverMatches for a pattern
        that no day is like, InvalidOption for one that cannot be read.
        """
        is_over = (self.limit is not None and iteration > self.limit) or (
            self.ends_ms is not None and now_ms > self.ends_ms
        )
        is_missed, next_ms = self._is_late(slot_ms, now_ms), None
        if isinstance(self.catch_up, int):
            oldest = self._oldest_to_run(slot_ms, now_ms, self.catch_up)
            is_missed = slot_ms < oldest
            next_ms = oldest if is_missed else self._following(slot_ms)
        elif not is_over:
            next_ms = self._next(slot_ms, now_ms)
        while after_ms is not None and next_ms is not None and next_ms <= after_ms:
            next_ms = self._following(next_ms)
        if self.pattern and self.ends_ms is not None and next_ms is not None and next_ms > self.ends_ms:
            next_ms = None
        return SchedulerPlan(None if is_over else next_ms, is_missed)

    def resume_at(self, slot_ms: int, now_ms: int) -> int | None:
        """When a scheduler runs that was paused: at the time it had if that is to come, else at the next one."""
        if self.ends_ms is not None and now_ms > self.ends_ms:
            return None
        if self.every_ms:
            return slot_ms if slot_ms > now_ms else self._next(slot_ms, now_ms)
        found = self._next(slot_ms - 1, now_ms) if slot_ms > now_ms else self._next(slot_ms, now_ms)
        return None if self.ends_ms is not None and found > self.ends_ms else found

    def _next(self, slot_ms: int, now_ms: int) -> int:
        if self.every_ms:
            found = slot_ms + self.every_ms
            return found if found >= now_ms else _aligned(now_ms, self.every_ms, self.offset_ms)
        # Also after the slot that was taken: a job that was promoted by hand runs before its time, and the same slot
        # must not come out again.
        return self._following(max(now_ms, self.starts_ms or 0, slot_ms))

    def _following(self, instant_ms: int) -> int:
        if self.every_ms:
            return instant_ms + self.every_ms
        assert self.pattern is not None
        return next_after(self.pattern, self.zone, instant_ms, seed=self.seed)

    def _is_late(self, slot_ms: int, now_ms: int) -> bool:
        return self.catch_up == "skip" and now_ms - slot_ms > self.grace_ms + self.jitter_ms

    def _oldest_to_run(self, slot_ms: int, now_ms: int, count: int) -> int:
        """The oldest of the newest `count` times from `slot_ms` to now."""
        if now_ms < (following := self._following(slot_ms)):
            return slot_ms
        if self.every_ms:
            missed = (now_ms - slot_ms) // self.every_ms + 1
            return slot_ms + max(0, missed - count) * self.every_ms
        # Backwards in growing windows: a pattern can only be read forwards, and a year of minutes is half a million.
        window_ms = (following - slot_ms) * count
        while True:
            begin_ms = max(slot_ms, now_ms - window_ms)
            newest, total = deque[int](maxlen=count), 0
            for instant in self._between(begin_ms, now_ms):
                newest.append(instant)
                total += 1
            if total >= count:
                return newest[0]
            if begin_ms == slot_ms:
                return slot_ms
            window_ms *= 2

    def _between(self, after_ms: int, until_ms: int) -> Iterator[int]:
        while (after_ms := self._following(after_ms)) <= until_ms:
            yield after_ms


@dataclass(frozen=True, slots=True)
class SchedulerPlan:
    """What becomes of a job that a scheduler made, and of the scheduler."""

    next_ms: int | None
    """The time of the next job; None when the scheduler has ended."""
    is_missed: bool
    """The job is too late by the scheduler's own rule, and does not run."""


def read_rule(
    scheduler_id: str, stored: Mapping[str, Any], repeat: Mapping[str, Any], zone: str | None
) -> SchedulerRule:
    """The rule of a record, as text by field name; what it leaves out is taken from `repeat`, the job's own options.

    `zone` is for patterns that name none. Raises InvalidOption for what cannot be read: then only another client can.
    """
    every = stored.get("every") or repeat.get("every")
    pattern = stored.get("pattern") or repeat.get("pattern") or repeat.get("cron")
    limit = stored.get("limit") or repeat.get("limit")
    every_ms = read_int(str(every)) if every else None
    if every_ms is not None and every_ms < 1:
        raise InvalidOption("repeat", "a pattern, or an interval in milliseconds", every)
    if every_ms is None:
        if not pattern:
            raise InvalidOption("repeat", "a pattern, or an interval in milliseconds", pattern)
        require("pattern", isinstance(pattern, str), "text", pattern)
    seed = repeat.get("hashSeed")
    return SchedulerRule(
        every_ms=every_ms,
        pattern=None if every_ms is not None else pattern,
        zone=zone,
        starts_ms=read_instant(stored.get("startDate") or repeat.get("startDate")),
        ends_ms=read_instant(stored.get("endDate") or repeat.get("endDate")),
        limit=None if limit is None else read_int(str(limit)),
        offset_ms=read_int(str(stored.get("offset") or repeat.get("offset") or 0)),
        seed=seed if isinstance(seed, str) and seed else _seed(scheduler_id, pattern),
        overlap=stored.get("bpoverlap") or "queue",
        catch_up=_read_catch_up(stored.get("bpcatchup")),
        grace_ms=read_int(stored.get("bpgrace") or str(DEFAULT_GRACE_MS)),
        jitter_ms=max(0, read_int(stored.get("bpjitter") or "0")),
    )


def read_instant(value: Any) -> int | None:
    """A date as older clients store it: ms, their text, or ISO text. None: there is none."""
    if value is None or value == "":
        return None
    try:
        return int(float(value))
    except (TypeError, ValueError, OverflowError):
        pass
    try:
        parsed = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidOption("repeat", "dates in ms or ISO text", value) from None
    return round((parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() * 1000)


def repeat_options(opts: Any) -> dict[str, Any]:
    """`repeat` of a job's decoded options; empty for what is none."""
    repeat = opts.get("repeat") if isinstance(opts, dict) else None
    return repeat if isinstance(repeat, dict) else {}


def options_head(opts: Mapping[str, Any], scheduler_id: str, id_head: str, repeat: Mapping[str, Any]) -> bytes:
    """The options of a scheduler's job as JSON, up to the time in its id: the scripts write the rest, since they know
    the time. `id_head` is all of the id before that."""
    changing = ("jobId", "delay", "timestamp", "prevMillis", "repeat", "repeatJobKey")
    kept = {name: value for name, value in opts.items() if name not in changing}
    value = {**kept, "repeat": dict(repeat), "repeatJobKey": scheduler_id}
    try:
        whole = json.encode_checked(value)
    except Exception:  # noqa: BLE001 - what lenient writers left: it goes on as it is
        whole = json.lenient_text(value).encode()
    return whole[:-1] + b',"jobId":' + json.encode_checked(id_head)[:-1]


def digest(*parts: Any) -> str:
    """Tells whether a declared scheduler is the one that is stored."""
    return hashlib.sha256(json.encode_checked(list(parts))).hexdigest()[:16]


# ---- records -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SchedulerRecord:
    """A job scheduler as it is stored. Times are Unix ms."""

    id: str
    name: str
    """Name of the jobs it makes."""
    next_ms: int
    """When the next one is due."""
    iterations: int
    """How many it has made."""
    every_ms: int | None
    pattern: str | None
    zone: str | None
    offset_ms: int
    limit: int | None
    starts_ms: int | None
    ends_ms: int | None
    data: Any
    opts: WireOptions
    overlap: str = "queue"
    catch_up: CatchUp = "once"
    grace_ms: int = DEFAULT_GRACE_MS
    jitter_ms: int = 0
    paused_ms: int | None = None
    """When it was paused; None while it runs."""
    is_declared: bool = field(default=False, compare=False)
    """Made by an app for a task with `every` or `cron`."""

    @property
    def job_id(self) -> str:
        """Id of the next job."""
        return f"repeat:{self.id}:{self.next_ms}"

    @property
    def is_paused(self) -> bool:
        return self.paused_ms is not None

    def next_runs(self, count: int = 5) -> list[datetime]:
        """When it runs, the stored next time first; as far as its end and its limit allow. Empty while it is paused."""
        check_int("count", count, minimum=1, maximum=_MOST_NAMED_AHEAD)
        if self.is_paused:
            return []
        rule = SchedulerRule(
            every_ms=self.every_ms,
            pattern=self.pattern,
            zone=self.zone or LOCAL,  # as workers compute it: the machine's, as Node's do
            ends_ms=self.ends_ms,
            limit=self.limit,
            seed=_seed(self.id, self.pattern),
        )
        runs = rule.runs_from(self.next_ms, max(1, self.iterations))
        try:
            return [_instant(run_ms) for run_ms in islice(runs, count)]
        except (ValueError, OverflowError):  # beyond the calendar: it will not run
            return []


def is_legacy(scheduler_id: str) -> bool:
    """Clients before 5.x keep no record: `<name>:<id>:<end>:<zone>:<pattern or interval>` is all there is."""
    return scheduler_id.count(":") >= 4


def read_scheduler(scheduler_id: str, due: bytes, flat: list[bytes]) -> SchedulerRecord:
    """What is stored about a scheduler: its score and the fields of its record. Never raises."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    if not fields:
        name, _, end, zone, rule = scheduler_id.encode().split(b":", 4)
        given = {b"name": name, b"endDate": end, b"tz": zone, b"every" if rule.isdigit() else b"pattern": rule}
        fields = {field: value for field, value in given.items() if value}

    def number(name: bytes) -> int | None:
        return read_int(fields[name]) if name in fields else None

    def instant(name: bytes) -> int | None:
        return possible(number(name) or 0) or None

    def text(name: bytes) -> str | None:
        return fields[name].decode("utf-8", "replace") if name in fields else None

    return SchedulerRecord(
        id=scheduler_id,
        name=text(b"name") or "",
        next_ms=read_int(due),
        iterations=number(b"ic") or 0,
        every_ms=number(b"every"),
        pattern=text(b"pattern"),
        zone=text(b"tz"),
        offset_ms=number(b"offset") or 0,
        limit=number(b"limit"),
        starts_ms=instant(b"startDate"),
        ends_ms=instant(b"endDate"),
        data=_json_or(fields.get(b"data", b"{}")),
        opts=WireOptions.parse(fields.get(b"opts")),
        overlap=text(b"bpoverlap") or "queue",
        catch_up=_read_catch_up(text(b"bpcatchup")),
        grace_ms=number(b"bpgrace") or DEFAULT_GRACE_MS,
        jitter_ms=number(b"bpjitter") or 0,
        paused_ms=possible(read_int(fields[b"bppaused"])) if b"bppaused" in fields else None,
        is_declared=b"bpdef" in fields,
    )


def _read_catch_up(text: str | None) -> CatchUp:
    if text == "skip":
        return "skip"
    number = read_int(text or "0")
    return min(number, _MOST_CAUGHT_UP) if number > 0 else "once"


def _json_or(raw: bytes) -> Any:
    """Stored JSON, or its text when somebody stored something else."""
    try:
        return json.decode(raw)
    except NotJson:
        return raw.decode("utf-8", "replace")


def _aligned(now_ms: int, every_ms: int, offset_ms: int) -> int:
    """The first time after now that lies `offset_ms` behind a full interval."""
    found = now_ms // every_ms * every_ms + offset_ms
    return found if found > now_ms else found + every_ms


def _seed(scheduler_id: str, pattern: str | None) -> str:
    return f"{scheduler_id} {pattern}"


def _instant(epoch_ms: int) -> datetime:
    return datetime.fromtimestamp(epoch_ms / 1000, UTC)

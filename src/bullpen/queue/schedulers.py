"""Make, change, pause, remove and read job schedulers.

In: an id, a rule (`every` or `cron`), and what the jobs are made of; checked before anything is sent. Out: the stored
record. A scheduler always has exactly one job to come, however many clients change it at once.
Elsewhere: when it runs (`bullpen.wire.schedules`), storing the next job when one is taken (`bullpen.worker.scheduler`),
tasks that declare their schedule (`bullpen.queue.tasks`).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Unpack

from bullpen._kernel import json
from bullpen._kernel.cron import LOCAL
from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import check_scheduler_id, check_stored_id, new_token
from bullpen._kernel.keep import KeepJobs, Retention
from bullpen.errors import InvalidOption, JobStateConflict, NotJson, SchedulerNotFound, require
from bullpen.queue.actions import QueueActions
from bullpen.queue.arguments import AddArguments, SchedulerArguments
from bullpen.queue.base import QueuePart
from bullpen.queue.packing import call_ttl_ms, clock_and_version
from bullpen.queue.states import JobState
from bullpen.wire.envelope import is_envelope
from bullpen.wire.keys import QueueKeys
from bullpen.wire.links import FLAGS, check_on_failure
from bullpen.wire.options import JobOptions, is_option, make_options, unknown_option
from bullpen.wire.records import check_job_name, read_int
from bullpen.wire.schedules import (
    SCHEDULE_NAMES,
    Schedule,
    SchedulerRecord,
    digest,
    is_legacy,
    make_schedule,
    options_head,
    read_rule,
    read_scheduler,
    repeat_options,
)

MOST_TRIES: Final = 32
_PER_JOB: Final = (
    *("delay", "at", "job_id", "timestamp", "replace_finished", "durability", "deduplication"),
    *("parent", "on_failure"),
)
DECLARED: Final = "bpsched:"
"""Fields of `meta` that name the schedulers which an app made for its tasks."""


class Upsert:
    """One checked call of `upsert_scheduler`: its arguments, and how its reply is read. No I/O."""

    def __init__(
        self,
        keys: QueueKeys,
        scheduler_id: str,
        name: str | None,
        data: Any,
        options: Mapping[str, Any],
        defaults: JobOptions,
        *,
        is_declared: bool = False,
    ) -> None:
        self.id, self._keys = check_scheduler_id(scheduler_id), keys
        on_failure = options.get("on_failure")
        check_on_failure(on_failure)
        options = {option: value for option, value in options.items() if option != "on_failure"}
        self.schedule, template = split_options(options, defaults)
        self._name = check_job_name(self.id if name is None else name)
        self.data = json.encode({} if data is None else data)
        """A codec seals it before it is sent."""
        self._opts = template.to_wire()
        if on_failure is not None and (flag := FLAGS[on_failure]):
            self._opts[flag] = True
        self._lifo, self._priority = template.lifo, template.wire_priority
        json.check_payload_size(len(self.data), len(template.wire_json))
        self._head = options_head(self._opts, self.id, f"repeat:{self.id}:", {**self.schedule.repeat, "count": 1})
        stored = {**self.schedule.fields, "name": self._name}
        parts = (stored, self.schedule.offset_ms, self._opts, self.data.decode())
        self._digest = digest(*parts) if is_declared else ""

    @classmethod
    def change(cls, keys: QueueKeys, found: SchedulerRecord, rule: Mapping[str, Any], data: Any) -> Upsert:
        """Another rule or other data for a stored scheduler; the options of its jobs stay as whoever made it wrote
        them."""
        made = cls(keys, found.id, found.name, data, rule, JobOptions())
        made._opts = {name: value for name, value in found.opts.stored().items() if name != "repeat"}
        made._lifo, made._priority = found.opts.lifo, found.opts.priority
        made._head = options_head(made._opts, found.id, f"repeat:{found.id}:", {**made.schedule.repeat, "count": 1})
        return made

    @property
    def needs_time(self) -> bool:
        """Whether the server's time must be known first."""
        return self.schedule.pattern is not None or self.schedule.end_ms is not None

    @property
    def keys(self) -> list[str]:
        return [self._keys.call(new_token())]

    def arguments(self, now_ms: int, after_ms: int | None, *, ttl_ms: int, clock_offset_ms: int = 0) -> list[Any]:
        """`after_ms`: a time that a stored job has already. Raises InvalidOption when there is none left."""
        schedule = self.schedule
        if schedule.end_ms is not None and schedule.end_ms <= now_ms:
            raise InvalidOption("end", "a time in the future", schedule.end_ms)
        first_ms = schedule.first_ms(self.id, now_ms, after_ms=after_ms)
        fields = {**schedule.fields, "name": self._name, "opts": json.encode_checked(self._opts)}
        return [
            *(self._keys.base, 1, ttl_ms, clock_and_version(clock_offset_ms), self.id),
            *(_or_empty(schedule.every_ms), _or_empty(first_ms), _or_empty(schedule.start_ms)),
            *(_or_empty(schedule.offset_ms), self._head, self.data, self._priority, "1" if self._lifo else ""),
            *(later_ms(schedule.jitter_ms), self._digest),
            *(part for pair in fields.items() for part in pair),
        ]

    def read(self, reply: Any) -> tuple[SchedulerRecord, bool] | int:
        """The record, and whether it was changed; or the time that is taken."""
        if reply[0] == -1:
            return read_int(reply[1])
        return read_scheduler(self.id, reply[1], reply[2]), reply[0] == 1

    def refuse(self, taken_ms: int) -> JobStateConflict:
        return JobStateConflict(
            f"scheduler {self.id!r} of queue {self._keys.name!r}: its next {MOST_TRIES} times belong to jobs that "
            "exist already; remove them, or use another id",
            queue=self._keys.name,
            job_id=f"repeat:{self.id}:{taken_ms}",
        )


def split_options(options: Mapping[str, Any], defaults: JobOptions) -> tuple[Schedule, JobOptions]:
    """The rule, and the options of the jobs. Raises InvalidOption."""
    for name in _PER_JOB:
        if options.get(name) is not None:
            raise InvalidOption(name, "an option of a single job, not of a scheduler", options[name])
    for name, value in options.items():
        if name not in SCHEDULE_NAMES and not is_option(name):
            near = {"pattern": "cron"}.get(name)
            raise unknown_option(name, value, "an option of a scheduler or of its jobs", SCHEDULE_NAMES, near=near)
    rule = {name: value for name, value in options.items() if name in SCHEDULE_NAMES}
    rest = {name: value for name, value in options.items() if name not in SCHEDULE_NAMES}
    return make_schedule(rule), make_options(defaults, **rest)


def changed_rule(
    found: SchedulerRecord, *, every: int | timedelta | str | None, cron: str | None, tz: str | None
) -> dict[str, Any]:
    """The options of a stored scheduler with another rule. What fits only the old rule is left out."""
    if every is None and cron is None:
        every, cron = found.every_ms, found.pattern
    kept: dict[str, Any] = {
        "start": _instant(found.starts_ms),
        "end": _instant(found.ends_ms),
        "limit": found.limit,
        "overlap": found.overlap,
        "catch_up": found.catch_up,
        "grace": found.grace_ms if found.catch_up == "skip" else None,
        "jitter": found.jitter_ms or None,
    }
    if cron is not None:
        return {**kept, "cron": cron, "tz": tz or found.zone, "every": every}
    return {**kept, "every": every, "offset": found.offset_ms or None if every == found.every_ms else None}


def _instant(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def later_ms(jitter_ms: int) -> int:
    return round(random.random() * jitter_ms)


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value


def template_options(record: SchedulerRecord) -> AddArguments:
    """How a job is added that is like those of the schedule. What queue and workers say by themselves is left out."""
    opts = record.opts
    given: AddArguments = {"attempts": opts.attempts, "priority": opts.priority, "lifo": opts.lifo}
    if opts.attempts > 1 and opts.backoff is not None:
        given["backoff"] = opts.backoff
    if opts.lane is not None:
        given["lane"] = opts.lane
    if opts.ttl_ms is not None:
        given["ttl"] = opts.ttl_ms
    if opts.keep_logs is not None:
        given["keep_logs"] = opts.keep_logs
    if (done := _retention(opts.remove_on_complete)) is not None:
        given["remove_on_complete"] = done
    if (failed := _retention(opts.remove_on_fail)) is not None:
        given["remove_on_fail"] = failed
    return given


def _retention(stored: Any) -> Retention:
    if isinstance(stored, dict):
        bounds = {to: stored.get(name) for name, to in (("count", "count"), ("age", "age_s"), ("limit", "limit"))}
        return KeepJobs(**{name: int(value) for name, value in bounds.items() if isinstance(value, int | float)})
    return stored if isinstance(stored, bool | int) else None


def removal(keys: QueueKeys, scheduler_id: str) -> tuple[list[str], list[Any]]:
    """Keys and arguments of `remove_scheduler`."""
    check_stored_id("scheduler_id", scheduler_id)
    return [keys.repeat, keys.scheduler(scheduler_id), keys.delayed, keys.meta], [keys.base, scheduler_id]


def scheduler_reads(keys: QueueKeys, scheduler_id: str) -> list[tuple[str | bytes | int, ...]]:
    """The commands that read one scheduler."""
    check_stored_id("scheduler_id", scheduler_id)
    return [("ZSCORE", keys.repeat, scheduler_id), ("HGETALL", keys.scheduler(scheduler_id))]


def found_scheduler(scheduler_id: str, due: bytes | None, fields: list[bytes]) -> SchedulerRecord | None:
    if due is None or not (fields or is_legacy(scheduler_id)):
        return None
    return read_scheduler(scheduler_id, due, fields)


def page_read(keys: QueueKeys, start: int, count: int, *, descending: bool) -> tuple[str | int, ...]:
    """The command that reads the ids of a page of schedulers, with their times."""
    check_int("start", start, minimum=0)
    check_int("count", count, minimum=1)
    order = ("REV",) if descending else ()
    return ("ZRANGE", keys.repeat, start, start + count - 1, *order, "WITHSCORES")


def record_reads(keys: QueueKeys, flat: list[bytes]) -> list[tuple[str | bytes | int, ...]]:
    """The commands that read the records of such a page."""
    head = keys.scheduler("").encode()
    return [("HGETALL", head + raw) for raw in flat[::2]]


def read_page(flat: list[bytes], records: list[list[bytes]]) -> list[SchedulerRecord]:
    ids = [raw.decode("utf-8", "replace") for raw in flat[::2]]
    found = (found_scheduler(*row) for row in zip(ids, flat[1::2], records, strict=True))
    return [record for record in found if record is not None]


def _resume_arguments(scheduler_id: str, due: bytes, flat: list[bytes], now_ms: int) -> list[Any]:
    """From the fourth on: the slot, the next time, and what the next job is made of."""
    fields = dict(zip((name.decode() for name in flat[::2]), flat[1::2], strict=True))
    stored = {name: value.decode("utf-8", "replace") for name, value in fields.items()}
    slot_ms, step = read_int(due), read_int(stored.get("bpstep") or "0")
    try:
        opts = json.decode(fields["bpopts"]) if "bpopts" in fields else None
    except NotJson:
        opts = {}
    if not isinstance(opts, dict):  # it had ended before it was paused
        return [slot_ms, "", "", "", 0, 0, "", 0]
    repeat = repeat_options(opts)
    rule = read_rule(scheduler_id, stored, repeat, stored.get("tz") or repeat.get("tz") or LOCAL)
    iteration = read_int(str(repeat.get("count") or stored.get("ic") or 0)) + step
    is_over = rule.limit is not None and iteration > rule.limit
    next_ms = None if is_over else rule.resume_at(slot_ms, now_ms)
    return [
        *(slot_ms, _or_empty(next_ms)),
        options_head(opts, scheduler_id, f"repeat:{scheduler_id}:", {**repeat, "count": iteration}),
        *("1" if rule.pattern else "", later_ms(rule.jitter_ms)),
        *(read_int(str(opts.get("priority") or 0)), "1" if opts.get("lifo") is True else "", step),
    ]


@dataclass(frozen=True, slots=True)
class DeclaredScheduler:
    """A scheduler that the code declares."""

    id: str
    name: str
    """Name of its jobs."""
    data: Any
    options: Mapping[str, Any]
    """SchedulerRule, policies and job options, as `upsert_scheduler` takes them."""


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The result of storing the schedulers that the code declares."""

    changed: tuple[str, ...]
    """Made or changed now; the others were stored already."""
    stale: tuple[str, ...]
    """Declared once, and no longer."""


class Scheduling(QueuePart):
    """The job schedulers of a `Queue`."""

    _defaults: JobOptions
    _deadline_s: float

    async def upsert_scheduler(
        self, scheduler_id: str, name: str | None = None, data: Any = None, **options: Unpack[SchedulerArguments]
    ) -> SchedulerRecord:
        """Make a job scheduler, or change the one with this id; `name` (else the id) and `data` are those of its jobs.

            await queue.upsert_scheduler("report", cron="0 9 * * 1-5", tz="Europe/Berlin", attempts=3)

        See `ScheduleArguments` and `TemplateArguments`. Any number of clients may do it at the same time: there is one
        scheduler and one job to come. The same `every` keeps its times; a pause stays. Raises InvalidOption before
        anything is written, JobStateConflict when stored jobs hold all its next times. It may be repeated.
        """
        upsert = Upsert(self._keys, scheduler_id, name, data, options, self._defaults)
        return (await self._upsert(upsert))[0]

    async def change_scheduler(
        self,
        scheduler_id: str,
        *,
        every: int | timedelta | str | None = None,
        cron: str | None = None,
        tz: str | None = None,
        data: Any = None,
    ) -> SchedulerRecord:
        """Change when a scheduler fires, or the data of its jobs; all else stays as it is, a pause too.

        Without `every` and `cron` its rule stays. Raises SchedulerNotFound, and InvalidOption before anything is
        written. A task that declares the scheduler writes its own rule again when its app starts.
        """
        found = await self._must_find(scheduler_id)
        rule = changed_rule(found, every=every, cron=cron, tz=tz)
        upsert = Upsert.change(self._keys, found, rule, await self._open_data(found) if data is None else data)
        return (await self._upsert(upsert))[0]

    async def _upsert(self, upsert: Upsert) -> tuple[SchedulerRecord, bool]:
        actions, after_ms = self._ready(), None
        if actions.sealer is not None:
            upsert.data = await actions.sealer.seal(upsert.data)
        now_ms = await self._server_ms(actions) if upsert.needs_time else 0
        for _ in range(MOST_TRIES):
            # The same call key and number however often it is sent: a lost reply is answered again.
            keys, ttl_ms = upsert.keys, call_ttl_ms(self._deadline_s)
            args = upsert.arguments(now_ms, after_ms, ttl_ms=ttl_ms, clock_offset_ms=self._clock_offset_ms)
            answer = upsert.read(await actions.evaluate("upsert_scheduler", keys, args))
            if not isinstance(answer, int):
                return answer
            after_ms = answer
        raise upsert.refuse(after_ms or 0)

    async def remove_scheduler(self, scheduler_id: str) -> bool:
        """End a scheduler and its job to come; False when there was none. A job of it that already waits or runs
        is the last."""
        reply, was_repeated = await self._ready().evaluate_noting_repeats(
            "remove_scheduler", *removal(self._keys, scheduler_id)
        )
        return bool(reply) or was_repeated

    async def get_scheduler(self, scheduler_id: str) -> SchedulerRecord | None:
        """One job scheduler, or None."""
        due, fields = await self._ready().commands(scheduler_reads(self._keys, scheduler_id))
        return found_scheduler(scheduler_id, due, fields)

    async def schedulers(self, *, start: int = 0, count: int = 100, descending: bool = False) -> list[SchedulerRecord]:
        """A page of the job schedulers, those that are due next first; `descending` turns that round."""
        actions, keys = self._ready(), self._keys
        flat = await actions.command(*page_read(keys, start, count, descending=descending))
        return read_page(flat, await actions.commands(record_reads(keys, flat)) if flat else [])

    async def count_schedulers(self) -> int:
        """How many job schedulers there are."""
        return int(await self._ready().command("ZCARD", self._keys.repeat))

    async def run_scheduler(self, scheduler_id: str, *, early: bool = False) -> str:
        """Add one more job like those of a scheduler, which runs now, and return its id; the times of the scheduler
        stay where they are. This works while it is paused and after it has ended, too.

        With `early` no job is added: the next regular job runs now instead of at its time, and the job after it comes
        at its own time. Then it raises JobStateConflict when that job is due already, or there is none: the scheduler
        is paused or has ended. Raises SchedulerNotFound.
        """
        require("early", isinstance(early, bool), "True or False", early)
        if early:
            return await self._run_early(scheduler_id)
        found = await self._must_find(scheduler_id)
        job = await self.add(found.name, await self._open_data(found), **template_options(found))
        return job.id

    async def _run_early(self, scheduler_id: str) -> str:
        keys = self._keys
        for _ in range(MOST_TRIES):
            found = await self._must_find(scheduler_id)
            if found.is_paused:
                raise self._conflict(found, "is paused; resume it first")
            if (ended := await self.why_ended(found)) is not None:
                raise self._conflict(found, f"has ended ({ended}); upsert it again in the program that makes it")
            job_id = found.job_id
            reply, was_repeated = await self._ready().evaluate_noting_repeats(
                "promote", [keys.job(job_id), keys.delayed], [keys.base, job_id]
            )
            if reply == 0 or (reply == -3 and was_repeated):
                return job_id
            if not await self._has_moved(found):
                break
            # A worker took that job meanwhile, and another one is the next now.
        if reply == -1:
            raise self._conflict(
                found,
                "has no next job: it has ended, or that job was deleted; upsert it again in the program that makes it",
            )
        raise JobStateConflict(f"the job {job_id!r} of this scheduler is due already", queue=keys.name, job_id=job_id)

    async def _has_moved(self, found: SchedulerRecord) -> bool:
        """Whether another job is the next one of a scheduler by now."""
        now = await self.get_scheduler(found.id)
        return now is None or now.job_id != found.job_id

    async def pause_scheduler(self, scheduler_id: str) -> bool:
        """Pause a scheduler: it makes no jobs until it is resumed. False when it was paused already. A running job
        continues.

        It stays listed, without a job to come: no client finds anything to run. Raises SchedulerNotFound, and
        JobStateConflict for one that a client before 5.20 made, which has no record.
        """
        check_stored_id("scheduler_id", scheduler_id)
        keys = self._keys
        reply, was_repeated = await self._ready().evaluate_noting_repeats(
            "pause_scheduler",
            [keys.repeat, keys.scheduler(scheduler_id)],
            [keys.base, self._clock_offset_ms, scheduler_id],
        )
        if reply == 0:
            raise SchedulerNotFound(keys.name, scheduler_id)
        if reply == -1:
            raise JobStateConflict(
                f"scheduler {scheduler_id!r} of queue {keys.name!r} has no record: an older client made it, and only "
                "that client can stop it",
                queue=keys.name,
            )
        return bool(reply == 1 or was_repeated)

    async def resume_scheduler(self, scheduler_id: str) -> bool:
        """Resume a paused scheduler at its next time; missed runs are not repeated. False when it was not
        paused. Raises SchedulerNotFound."""
        keys, actions = self._keys, self._ready()
        for _ in range(MOST_TRIES):
            due, flat, (seconds, micros) = await actions.commands([*scheduler_reads(keys, scheduler_id), ("TIME",)])
            if due is None or not flat:
                raise SchedulerNotFound(keys.name, scheduler_id)
            now_ms = int(seconds) * 1000 + int(micros) // 1000 + self._clock_offset_ms
            reply = await actions.evaluate(
                "resume_scheduler",
                [keys.repeat, keys.scheduler(scheduler_id), keys.id],
                [keys.base, self._clock_offset_ms, scheduler_id, *_resume_arguments(scheduler_id, due, flat, now_ms)],
            )
            if reply in (1, 2):
                return bool(reply == 1)
        raise JobStateConflict(
            f"scheduler {scheduler_id!r} of queue {keys.name!r} is being changed all the time; try later",
            queue=keys.name,
        )

    async def why_ended(self, record: SchedulerRecord) -> str | None:
        """Why a scheduler fires no more, or None: the job that it names is over, and no other came after it."""
        if record.is_paused:
            return None
        state = await self._ready().state_of(record.job_id)
        is_over = state in (JobState.COMPLETED, JobState.FAILED)
        if is_over and await self._has_moved(record):
            return None  # a worker took that job, stored the next one, and was done between the two reads
        if is_over or state is JobState.UNKNOWN:
            if record.limit is not None and record.iterations >= record.limit:
                return f"limit of {record.limit} reached"
            if record.ends_ms is not None and record.ends_ms < await self._server_ms(self._ready()):
                return "its end date has passed"
        return "no further time" if is_over else None

    async def reconcile_schedulers(self, declared: Iterable[DeclaredScheduler], *, prune: bool = False) -> Reconciled:
        """Make what is stored equal to what the code declares.

        Unchanged ones are not touched. Those that were declared once and are no longer stay, and are named in the
        answer; with `prune` they are removed.
        """
        wanted = {
            one.id: Upsert(self._keys, one.id, one.name, one.data, one.options, self._defaults, is_declared=True)
            for one in declared
        }
        changed = [upsert.id for upsert in wanted.values() if (await self._upsert(upsert))[1]]
        fields = await self._ready().command("HGETALL", self._keys.meta)
        known = [name.decode("utf-8", "replace") for name in fields[::2]]
        ids = [name.removeprefix(DECLARED) for name in known if name.startswith(DECLARED)]
        stale = sorted(scheduler_id for scheduler_id in ids if scheduler_id not in wanted)
        for scheduler_id in stale if prune else ():
            await self.remove_scheduler(scheduler_id)
        return Reconciled(tuple(changed), tuple(stale))

    async def _open_data(self, found: SchedulerRecord) -> Any:
        """The data of a scheduler's jobs, as they were before a codec sealed them."""
        sealer = self._ready().sealer
        if sealer is None or not is_envelope(found.data):
            return found.data
        return json.decode(await sealer.open(json.encode_checked(found.data), found.job_id))

    async def _must_find(self, scheduler_id: str) -> SchedulerRecord:
        found = await self.get_scheduler(scheduler_id)
        if found is None:
            raise SchedulerNotFound(self._keys.name, scheduler_id)
        return found

    def _conflict(self, found: SchedulerRecord, why: str) -> JobStateConflict:
        return JobStateConflict(f"the scheduler {found.id!r} {why}", queue=self._keys.name, job_id=found.job_id)

    async def _server_ms(self, actions: QueueActions) -> int:
        seconds, micros = await actions.command("TIME")
        return int(seconds) * 1000 + int(micros) // 1000 + self._clock_offset_ms

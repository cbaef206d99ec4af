"""The arguments and the reply of the `add` script, for callers with and without an event loop.

In: checked jobs. Out: keys and arguments ready to send, and the records that the script stored. No I/O.
Elsewhere: sending them (`add`, `bullpen.sync`), the script itself (`bullpen.wire.lua.add`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from bullpen import _version
from bullpen._kernel import json, tracing
from bullpen._kernel.duration import to_ms
from bullpen._kernel.ids import check_job_id
from bullpen._kernel.tuples import maker
from bullpen.errors import BullpenError, InvalidOption, JobNotFound, JobStateConflict, LaneFull, ServerRefused, require
from bullpen.queue.arguments import NewJobArguments
from bullpen.queue.job import Added, BlockedBy, NewJob
from bullpen.queue.states import JobState
from bullpen.wire.keys import QueueKeys
from bullpen.wire.option_forms import form_of
from bullpen.wire.options import JobOptions, make_options
from bullpen.wire.records import JobRecord, LateRecord, check_job_name
from bullpen.wire.scripts import SCRIPTS

MOST_JOBS_PER_CALL: Final = 200
MOST_BYTES_PER_CALL: Final = 1024 * 1024
ADD_DEADLINE_S: Final = 5.0
"""How long an add or a read waits for an unreachable server: a web request must not hang."""
_SHORTEST_CALL_TTL_MS: Final = 60_000
VERSION_FIELD: Final = f"bullpen:{_version.__version__}"


class PackedJob(NamedTuple):
    """A checked job: the arguments that the script takes, in its order, and the options they were made from."""

    job_id: str
    """Empty: the server counts."""
    name: str
    data: bytes
    options_json: bytes
    place: str
    options: JobOptions
    """Those that the job shares with others: without its own id and delay."""

    @property
    def delay_ms(self) -> int:
        return int(self.place.split(" ", 2)[1]) if self.place else 0


_NAME, _DATA, _OPTIONS_JSON = itemgetter(1), itemgetter(2), itemgetter(3)
_new_packed = maker(PackedJob)


class Other(NamedTuple):
    """The job that was there first."""

    record: JobRecord
    added: Added
    blocked_by: BlockedBy


_NO_PARENT: Final = -5
_LANE_FULL: Final = -8


def refusal(why: bytes, job: PackedJob, queue: str) -> BullpenError:
    """The error of a job whose lane is full, that cannot be its parent's child, or for which a key has another type."""
    if not why.removeprefix(b"-").isdigit():
        which = f"the job {job.job_id!r}" if job.job_id else f"a job {job.name!r}"
        reason = why.decode("utf-8", "replace")
        return ServerRefused(f"{which} of queue {queue!r} was not stored: {reason}. Check the key with TYPE")
    code = int(why)
    if code == _LANE_FULL and job.options.lane is not None:
        return LaneFull(queue, job.options.lane, job.job_id or None)
    parent = job.options.parent
    if code == _NO_PARENT and parent is not None:
        return JobNotFound(parent.queue, parent.id)
    return JobStateConflict(
        f"job {job.job_id!r} of queue {queue!r} exists and cannot become this child: it is another job's child, or has "
        "children of its own",
        queue=queue,
        job_id=job.job_id,
    )


class Stored(NamedTuple):
    """What the script reports in its reply."""

    now: bytes
    """The server's time in ms. Numbers stay text until they are read."""
    first: bytes
    """Number of the first job: what an id is made of."""
    last_event: bytes
    """Id of the last event of the call; empty when it is not known, after a lost reply."""
    taken: Sequence[Any]
    """Index from 1, and id, state and stored fields of the job that was there first, flat, for each that was not
    stored."""

    def records(self, jobs: Iterable[PackedJob]) -> list[JobRecord]:
        """What the script stored, decoded on demand: few callers read more than the id."""
        now = self.now
        return [
            LateRecord(job.job_id or str(number), partial(stored_fields, job, now))
            for number, job in enumerate(jobs, int(self.first))
        ]

    def event_before_end(self) -> bytes:
        """Id of the first event that can come behind this call, which is the end of none of its jobs: each must become
        active first. Empty when it is not known."""
        if not self.last_event:
            return b""
        ms, _, place = self.last_event.partition(b"-")
        return b"%b-%d" % (ms, int(place) + 1)

    def record(self, job: PackedJob) -> JobRecord:
        """The same of a call with one job."""
        return LateRecord(job.job_id or self.first.decode(), partial(stored_fields, job, self.now))

    def others(self, jobs: Sequence[PackedJob], queue: str) -> Iterator[tuple[int, Other | BullpenError]]:
        """For each job that was not stored: its place in the call, and the job that was there first or why not."""
        rest = iter(self.taken)
        for index, raw_id, state, flat in zip(rest, rest, rest, rest, strict=True):
            job = jobs[index - 1]
            if not raw_id:
                yield index - 1, refusal(state, job, queue)
                continue
            first_id = raw_id.decode("utf-8", "surrogateescape")
            added = Added.DUPLICATE if job.job_id == first_id else Added.DEDUPLICATED
            blocked_by = BlockedBy(first_id, JobState(state.decode()))
            yield index - 1, Other(JobRecord.parse(first_id, flat), added, blocked_by)


_new_stored = maker(Stored)


def read_stored(reply: Any) -> Stored:
    """The reply as it came from the wire."""
    if type(reply) is bytes:
        return _new_stored((*reply.split(b" "), ()))
    text, taken = reply
    return _new_stored((*text.split(b" "), taken))


def stored_fields(job: PackedJob, now: bytes) -> dict[bytes, bytes]:
    """The hash of a job that was stored `now`."""
    options, now_ms = job.options, int(now)
    at_ms = options.at_ms
    of_few = {} if options.parent is None else {b"parentKey": str(options.parent).encode()}
    if options.lane is not None:
        of_few[b"bplane"] = options.lane.encode()
    return of_few | {
        b"name": job.name.encode(),
        b"data": job.data,
        b"opts": job.options_json,
        b"timestamp": b"%d" % (options.timestamp_ms or now_ms),
        b"delay": b"%d" % (job.delay_ms if at_ms is None else max(0, at_ms - now_ms)),
        b"priority": b"%d" % options.wire_priority,
    }


def pack_job(
    name: str, data: Any, defaults: JobOptions, given: NewJobArguments, limit_bytes: int = json.MAX_PAYLOAD_BYTES
) -> PackedJob:
    """Check and encode one job. Uses up `given`. Raises InvalidOption, NotJson or PayloadTooLarge."""
    job_id, options, options_json, place = "", defaults, defaults.wire_json, defaults.place
    if given or tracing.tracer is not None:
        job_id, options, options_json, place = _own_options(defaults, given)
    raw = json.encode({} if data is None else data)
    if len(raw) + len(options_json) > limit_bytes:
        json.check_payload_size(len(raw), len(options_json), limit_bytes=limit_bytes)
    return _new_packed((job_id, check_job_name(name), raw, options_json, place, options))


def _own_options(defaults: JobOptions, given: NewJobArguments) -> tuple[str, JobOptions, bytes, str]:
    """Its id, the options that it shares with others, their JSON and place."""
    if tracing.tracer is not None and "tm" not in given and (context := tracing.as_text(tracing.carrier())):
        given["tm"] = context
    replaces = given.pop("replace_finished", False)
    job_id, delay = given.pop("job_id", None), given.pop("delay", None)
    form = None if replaces else form_of(defaults, given)
    if form is None or (delay is not None and form.options.at is not None):
        return _rare_options(make_options(defaults, job_id=job_id, delay=delay, **given), replaces=replaces)
    options = form.options
    if job_id is not None:
        check_job_id(job_id)
    elif delay is None:
        return "", options, options.wire_json, options.place
    delay_ms = options.delay_ms if delay is None else to_ms("delay", delay)
    return job_id or "", options, *form.write(delay_ms, job_id)


def _rare_options(options: JobOptions, *, replaces: object) -> tuple[str, JobOptions, bytes, str]:
    place = options.place
    if replaces:
        require("replace_finished", replaces is True, "True or False", replaces)
        require(
            "replace_finished",
            options.job_id is not None,
            "together with job_id, the id of the job that may be replaced",
            replaces,
        )
        place = options.place_of(replaces=True)
    return options.job_id or "", options, options.wire_json, place


def pack_jobs(
    jobs: Iterable[NewJob | tuple[str, Any]], defaults: JobOptions, limit_bytes: int = json.MAX_PAYLOAD_BYTES
) -> list[PackedJob]:
    """Check and encode many jobs, all before the first can be sent."""
    packed = []
    for job in jobs:
        if isinstance(job, NewJob):
            packed.append(pack_job(job.name, job.data, defaults, {**job.options}, limit_bytes))
        elif isinstance(job, tuple) and len(job) == 2:
            packed.append(pack_job(job[0], job[1], defaults, {}, limit_bytes))
        else:
            raise InvalidOption("jobs", "NewJob or (name, data)", job)
    return packed


def size_of(jobs: Sequence[PackedJob]) -> int:
    """Bytes that these add to a call."""
    return sum(map(len, map(_DATA, jobs))) + sum(map(len, map(_OPTIONS_JSON, jobs)))


def count_fitting(jobs: Sequence[PackedJob], begin: int, most: int, most_bytes: int, *, at_least: int) -> int:
    """How many of these, from the one at `begin` on, still fit into a call."""
    piece = jobs[begin : begin + most]
    if size_of(piece) <= most_bytes:
        return len(piece)
    size = 0
    for count, job in enumerate(piece):
        size += len(job.data) + len(job.options_json)
        if size > most_bytes and count >= at_least:
            return count
    return len(piece)


def add_keys(keys: QueueKeys, caller_id: str) -> list[str]:
    return [keys.call(caller_id)]


def clock_and_version(clock_offset_ms: int) -> str:
    """As the script reads it."""
    return f"{clock_offset_ms} {VERSION_FIELD}"


_USUAL_CLOCK: Final = clock_and_version(0)
_ADD: Final = SCRIPTS["add"]


def call_ttl_ms(deadline_s: float) -> int:
    """How long the server remembers a call: longer than it is repeated. Not for long, because another client that
    deletes the queue does not know the key."""
    return max(_SHORTEST_CALL_TTL_MS, math.ceil(2_000 * deadline_s))


def add_arguments(
    keys: QueueKeys, jobs: Sequence[PackedJob], number: int, ttl_ms: int, clock: str = _USUAL_CLOCK
) -> list[Any]:
    """`ttl_ms`: see `call_ttl_ms`. `clock`: made by `clock_and_version`."""
    if _differ_in_data_alone(jobs):
        # As the jobs of one loop do: one argument each instead of five.
        _, name, _, options_json, place, _ = jobs[0]
        return [keys.base, number, ttl_ms, clock, name, options_json, place, *map(_DATA, jobs)]
    args: list[Any] = [keys.base, number, ttl_ms, clock, "", "", ""]
    for job in jobs:
        args += job[:5]
    return args


def command_for_one(
    job: PackedJob, call_key: str, base: str, number: int, ttl_ms: int, clock: str = _USUAL_CLOCK
) -> tuple[Any, ...]:
    """The whole call of one job, in one step for a caller that is alone."""
    job_id, name, data, options_json, place, _ = job
    if job_id:
        jobs: tuple[Any, ...] = ("", "", "", *job[:5])
    else:
        jobs = (name, options_json, place, data)
    return ("EVALSHA", _ADD.sha1, 1, call_key, base, number, ttl_ms, clock, *jobs)


def _differ_in_data_alone(jobs: Sequence[PackedJob]) -> bool:
    if jobs[0].job_id:
        return False
    # By identity: options are written once for all jobs that share them, and to compare them takes longer.
    return len(jobs) == 1 or (len(set(map(_NAME, jobs))) == 1 and len(set(map(id, map(_OPTIONS_JSON, jobs)))) == 1)


def read_add_deadline(given: int | timedelta | None) -> float | None:
    """The option in seconds; None when it is not given."""
    return None if given is None else to_ms("add_deadline", given, minimum=1) / 1000

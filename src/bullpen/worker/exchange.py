"""Settle what finished and take what is free: the worker's one script call.

In: finished jobs with their outcomes, and how many jobs may be taken. Out: one code per settled job and the taken jobs.
Packing and unpacking only: what to do about a code is the worker's matter, what an outcome is was decided before.
Elsewhere: the script (`bullpen.wire.lua.exchange`), repeating a lost call (`bullpen.redis.calls`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, assert_never

from bullpen._kernel import json
from bullpen._kernel.keep import KeepJobs
from bullpen._kernel.outcome import Completed, Delayed, Failed, Outcome, Retry, Waiting, WaitingChildren
from bullpen._kernel.tuples import maker
from bullpen.queue.dead_letters.entry import DeadLetterWriter
from bullpen.queue.job import Job, JobActions
from bullpen.queue.job_logs import read_dropped
from bullpen.redis.calls import OBSERVE_EVERY_S, Caller, Carry, Flight
from bullpen.redis.client import Door
from bullpen.redis.socket import HOLE, Form, Receiver
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import resolve, rule_text
from bullpen.wire.records import JobRecord
from bullpen.wire.scripts import SCRIPTS
from bullpen.worker.options import RateLimit
from bullpen.worker.pump import MOST_JOBS

DONE, NO_JOB, NO_LOCK, NOT_ACTIVE, PENDING_CHILDREN, FOREIGN_LOCK, FAILED_CHILDREN = 0, -1, -2, -3, -4, -6, -9
DONE_WITHOUT_LETTER: Final = 2
"""The job failed as told, but its dead letter could not be written; a sweep offers it again."""

# What is known without asking, then in the order of the script.
_FIELDS: Final = (
    *(b"processedOn", b"pb"),
    *(b"name", b"data", b"opts", b"timestamp", b"priority", b"atm", b"ats", b"stc"),
    *(b"defa", b"parentKey", b"rjk", b"attemptsMade", b"progress"),
    *(b"failedReason", b"stacktrace"),
)
REFUSED: Final = 1
"""No code of the script: the server refused it with this outcome."""
_ALL_DONE: Final = b",".join([b"0"] * MOST_JOBS)
_STC, _DEFA, _RJK = (_FIELDS.index(name) - 2 for name in (b"stc", b"defa", b"rjk"))


class JobSettlement(NamedTuple):
    """A finished job and what became of it."""

    job: Job
    outcome: Outcome


new_settlement = maker(JobSettlement)


class ExchangeReply(NamedTuple):
    """What one exchange did."""

    now_ms: int
    codes: list[int]
    """One per settlement, in order: see the constants above."""
    taken: list[Job]
    limited_ms: int
    """> 0: a rate limit lets nobody take a job for so long."""
    next_due_ms: int
    """When the next delayed job is due (0: none, or nothing was to be taken)."""
    has_more: bool
    """Ready jobs were left behind."""


_new_reply = maker(ExchangeReply)


class Exchange:
    """The numbered calls of one worker."""

    def __init__(
        self,
        door: Door,
        keys: QueueKeys,
        actions: JobActions,
        *,
        worker_name: str,
        lock_ms: int,
        limit: RateLimit | None,
        keep_completed: KeepJobs | None,
        keep_failed: KeepJobs | None,
        dead_letters: DeadLetterWriter | None,
        clock_offset_ms: int,
        metrics_minutes: int | None = None,
        on_dropped: Callable[[Sequence[tuple[str, str]]], None] | None = None,
    ) -> None:
        self._on_dropped = on_dropped
        self._script = SCRIPTS["exchange"]
        self._caller = Caller(door, self._script)
        self._clock = door.connection.clock
        self._actions = actions
        self._queue = keys.name
        self._lock_ms = lock_ms
        self._keep_completed, self._keep_failed = keep_completed, keep_failed
        self._rules: dict[bytes, tuple[str, str]] = {}
        self._dead_letters = dead_letters
        self._keys = [keys.call(self._caller.id)]
        self._base, self._worker_name, self._raw_worker_name = keys.base, worker_name, worker_name.encode()
        self._clock_offset_ms = clock_offset_ms
        self._call_ttl_ms = max(2 * lock_ms, 600_000)
        self._extras = _extras(clock_offset_ms, limit, metrics_minutes, dead_letters)
        self._token = ""
        self._observe_at = 0.0
        self._poll_form: Form | None = None
        self._poll_command: tuple[str | float, ...] = ()
        self.is_unanswered = False
        """A poll behind a blocked read was sent, and nobody knows yet what became of it."""

    async def run(self, settlements: list[JobSettlement], take: int) -> ExchangeReply:
        """One exchange, repeated until it is answered. Raises ServerRefused when the script itself failed."""
        make_args = partial(self._arguments, settlements, take)
        return self._read(await self._caller.call(self._keys, make_args, queue=self._queue, deadline_s=None))

    def send(
        self, settlements: list[JobSettlement], take: int, receiver: Receiver, carry: Carry | None = None
    ) -> Flight:
        """Begin an exchange, at once; its end (`recover` or `take_in`) must come before the next. `carry`: see
        `Caller.send`."""
        return self._caller.send(self._keys, partial(self._arguments, settlements, take), receiver, carry)

    async def recover(self, flight: Flight, error: BaseException | None) -> ExchangeReply:
        """The end of an exchange that was not sent, or met an error. Raises as `run`."""
        return self._read(await self._caller.recover(flight, error, queue=self._queue, deadline_s=None))

    def take_in(self, flight: Flight, reply: Any) -> ExchangeReply:
        """Read the reply to a flight, where it comes."""
        found = self._read(reply)
        now = time.monotonic()
        if now >= self._observe_at:
            # Not from a call that had to be repeated: nobody knows how long it waited for a connection.
            self._observe_at = now + OBSERVE_EVERY_S
            self._clock.observe(found.now_ms - self._clock_offset_ms, flight.sent_at, now)
        return found

    def poll_behind(self, command: tuple[str | float, ...]) -> bytes:
        """A blocked read and a poll for one job behind it, packed: the server begins the poll by itself when the read
        is answered. The call is in flight until `read_poll` has its reply, or `void` makes an end of it."""
        if self._poll_form is None or self._poll_command != command:
            self._poll_form, self._poll_command = self._form_of_poll(command), command
        number = self._caller.next_number()
        self._token = f"{self._caller.id}:{number}"
        self.is_unanswered = True
        return self._poll_form.fill(b"%d" % number, self._token.encode())

    def read_poll(self, reply: Any) -> ExchangeReply:
        """The reply to the poll of `poll_behind`."""
        self.is_unanswered = False
        return self._read(reply)

    async def repeat_poll(self) -> Any:
        """The same poll without its read, again and again until it is answered."""
        make_args = partial(self._arguments, (), 1)
        return await self._caller.repeat(self._keys, make_args, queue=self._queue, deadline_s=None)

    def _form_of_poll(self, command: tuple[str | float, ...]) -> Form:
        base, _, call_ttl_ms, _, *rest = self._arguments((), 1, 0)
        call = ("EVALSHA", self._script.sha1, len(self._keys), *self._keys, base, HOLE, call_ttl_ms, HOLE, *rest)
        return Form(command, call)

    @property
    def call_key(self) -> str:
        """Where the server keeps the latest call."""
        return self._keys[0]

    async def void(self) -> ExchangeReply:
        """Make an end of the latest call: the jobs that it took and still holds are told, and if it was not run yet it
        never will be."""
        make_args = partial(self._arguments, (), 0)
        reply = await self._caller.repeat(self._keys, make_args, queue=self._queue, deadline_s=None)
        self.is_unanswered = False
        return self._read(reply)

    def _arguments(self, settlements: Sequence[JobSettlement], take: int, number: int) -> list[Any]:
        # A token per call, not per worker: a run that lost its lock must not pass for the next run of the same job.
        self._token = f"{self._caller.id}:{number}"
        args: list[Any] = [
            *(self._base, number, self._call_ttl_ms, self._token, self._lock_ms, take, self._worker_name, self._extras)
        ]
        for job, outcome in settlements:
            if isinstance(outcome, Completed):  # nearly all of them
                args += (job.id, job.token, "completed", self._rule(job)[0], outcome.value_json)
            else:
                self._pack(args, job, outcome)
        return args

    def _read(self, reply: Any) -> ExchangeReply:
        try:
            lines, taken = reply  # nearly always
        except ValueError:
            lines, taken, dropped = reply
            if self._on_dropped is not None:
                self._on_dropped(read_dropped(dropped))
        _, now_ms, codes, limited_ms, next_due_ms, more, _ = lines.split(b"\n", 6)
        token = self._token
        begun = [now_ms, self._raw_worker_name]
        jobs = [self._unpack(fields, token, begun) for fields in taken]
        return _new_reply((int(now_ms), _read_codes(codes), jobs, int(limited_ms), int(next_due_ms), more == b"1"))

    def _pack(self, args: list[Any], job: Job, outcome: Failed | Retry | Delayed | Waiting | WaitingChildren) -> None:
        match outcome:
            case Failed():
                opts, stack = job.opts, json.encode_checked(outcome.stack)
                limit = "" if opts.stack_trace_limit is None else opts.stack_trace_limit
                args.extend((job.id, job.token, "failed", self._rule(job)[1], outcome.reason, stack))
                args.extend((limit, opts.attempts))
                has_letter = self._dead_letters is not None and self._dead_letters.wants(outcome)
                args.extend(self._dead_letters.parts(job, outcome) if self._dead_letters and has_letter else ("",) * 7)
            case Retry():
                opts, stack = job.opts, json.encode_checked(outcome.stack)
                limit = "" if opts.stack_trace_limit is None else opts.stack_trace_limit
                args.extend((job.id, job.token, "retry", outcome.delay_ms, outcome.reason, stack))
                args.extend((limit, "1" if opts.lifo or outcome.keeps_turn else ""))
            case Delayed(delay_ms):
                args.extend((job.id, job.token, "delayed", delay_ms))
            case Waiting(pause_ms):
                args.extend((job.id, job.token, "waiting", pause_ms))
            case WaitingChildren():
                args.extend((job.id, job.token, "waiting-children"))
            case _:
                assert_never(outcome)

    def _rule(self, job: Job) -> tuple[str, str]:
        """How finished jobs are kept after this one, as the script reads it. Cached: thousands of jobs share their
        options."""
        raw = job.record.raw_opts
        rules = self._rules.get(raw)
        if rules is None:
            if len(self._rules) > 512:
                self._rules.clear()
            opts = job.opts
            rules = self._rules[raw] = (
                rule_text(resolve(opts.remove_on_complete, self._keep_completed)),
                rule_text(resolve(opts.remove_on_fail, self._keep_failed)),
            )
        return rules

    def _unpack(self, fields: list[Any], token: str, begun: list[bytes]) -> Job:
        job_id = fields.pop()
        stored = dict(zip(_FIELDS, begun + fields, strict=False))  # the last two come with a job that was tried before
        job = Job(self._actions, JobRecord(job_id.decode("utf-8", "surrogateescape"), stored), token=token)
        job.is_ordinary = (
            fields[_STC] is None
            and fields[_DEFA] is None
            and fields[_RJK] is None
            and b'"bpttl"' not in job.record.raw_opts
        )
        return job


def _read_codes(text: bytes) -> list[int]:
    if not text:
        return []
    count = (len(text) + 1) // 2
    if text == _ALL_DONE[: len(text)]:  # nearly always
        return [DONE] * count
    return [int(code) for code in text.split(b",")]


def _extras(
    clock_offset_ms: int, limit: RateLimit | None, metrics_minutes: int | None, dead_letters: DeadLetterWriter | None
) -> str:
    """What few workers use, as the script reads it."""
    lines = (
        clock_offset_ms,
        limit.max if limit else "",
        limit.duration_ms if limit else "",
        "" if metrics_minutes is None else metrics_minutes,
        dead_letters.base if dead_letters else "",
    )
    return "" if lines == (0, "", "", "", "") else "\n".join(map(str, lines))

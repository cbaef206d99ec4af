"""Dead letters of a queue: what an operator does with finally failed jobs.

An entry is an ordinary job of the queue `{queue}-dlq`, readable by any BullMQ client; no worker takes it. The
script that moves a job to failed writes it, so there is no moment in which a job has failed without its entry. Jobs
that workers of other clients failed get theirs from the sweep of our workers.
In: an entry's id or a filter. Out: entries, jobs that are queued again, or removed entries.
Elsewhere: making entries (`entry`), sweeping (`sweep`), deciding that a failure is final
(`bullpen._kernel.outcome`).
"""

from __future__ import annotations

import builtins
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.causes import LONGEST_SAMPLE
from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import check_job_id
from bullpen._kernel.scrub import summary
from bullpen.errors import CorruptJob, DeadLetterChanged, DeadLetterNotFound, JobStateConflict, NotJson, require
from bullpen.ports.dead_letters import (
    ANY,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    LetterPage,
    RedriveReport,
)
from bullpen.ports.edits import Edit, payload_fingerprint
from bullpen.queue.actions import QueueActions, is_wrong_type
from bullpen.queue.actor import check_actor
from bullpen.queue.dead_letters.entry import (
    DeadLetterWriter,
    check_not_sealed,
    complete_entry,
    entry_options,
    original_data,
)
from bullpen.queue.dead_letters.index import DeadLetterIndex, facts_of
from bullpen.queue.dead_letters.sweep import Sweeper
from bullpen.queue.lists import walk_line
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import WireOptions
from bullpen.wire.records import JobRecord

__all__ = ["DeadLetters"]

_IDS_PER_PAGE: Final = 200
_AT_ONCE: Final = 50
"""Redrives in flight when no rate is given."""
_MOST_SKIPPED_NAMED: Final = 100
_MOST_LOOKED_AT: Final = 5_000
"""How many entries one page reads at most for a filter with few matches."""


OnProgress = Callable[[RedriveReport], Awaitable[None] | None]


class DeadLetters:
    """The dead letters of one queue: list, find, get, redrive, discard, depth. Reached as `queue.dead_letters`."""

    def __init__(
        self, actions: QueueActions, keys: QueueKeys, dead_letter_keys: QueueKeys, *, clock_offset_ms: int = 0
    ) -> None:
        self._actions = actions
        self._keys = keys
        self._entries = dead_letter_keys
        self._clock_offset_ms = clock_offset_ms
        self._index = DeadLetterIndex(actions, dead_letter_keys, keys.name)

    @property
    def name(self) -> str:
        """The queue that holds the entries."""
        return self._entries.name

    async def depth(self) -> int:
        """How many there are."""
        return int(await self._actions.command("LLEN", self._entries.wait))

    async def put(self, letter: DeadLetter) -> None:
        """Workers write entries with the move to failed; this is for work that failed elsewhere. Writing one that is
        there already changes nothing."""
        entries, fields = self._entries, complete_entry(letter)
        entry = json.encode(fields)
        opts = entry_options(check_job_id(letter.id))
        json.check_payload_size(len(entry), len(opts))
        failed_ms = None if letter.failed_ms is not None else self._actions.clock.now_ms()
        written = await self._actions.evaluate(
            "put_dead_letter",
            [entries.job(letter.id)],
            [
                *(entries.base, self._clock_offset_ms, letter.id, f"{letter.name or 'unknown'}-failed"),
                *(entry, opts, facts_of(DeadLetter.from_entry(letter.id, fields, source=self._keys.name), failed_ms)),
            ],
        )
        if written < 0:
            raise JobStateConflict(
                f"dead letter {letter.id!r} was not written: a key of queue {entries.name!r} has a wrong type",
                queue=entries.name,
                job_id=letter.id,
            )

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetter]:
        """Oldest first, from `start`."""
        check_int("start", start, minimum=0)
        check_int("count", count, minimum=1)
        ids = await self._actions.command("LRANGE", self._entries.wait, -start - count, -start - 1)
        return [*await self._read(ids[::-1])]

    async def __aiter__(self) -> AsyncIterator[DeadLetter]:
        """All of them, oldest first, read in pages; redriving or discarding on the way passes over none."""
        async for ids in walk_line(self._actions, self._entries.base, self._entries.wait, per_page=_IDS_PER_PAGE):
            for letter in await self._read(ids):
                yield letter

    async def find(self, where: DeadLetterFilter = ANY) -> AsyncIterator[DeadLetter]:
        """Those that match, oldest first."""
        async for letter in self:
            if where.matches(letter):
                yield letter

    async def get(self, entry_id: str) -> DeadLetter | None:
        """One entry, or None."""
        found = await self._read([entry_id.encode("utf-8", "surrogateescape")])
        return found[0] if found else None

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        """Newest first; `after` is the `next` of the page before. What the index knows, tenant, cause and time, costs
        nothing; for names and texts the entries are read, some thousand at a time."""
        check_int("limit", limit, minimum=1)
        await self._index.catch_up()
        rest, found, looked_at = replace(where, fingerprint=None), list[DeadLetter](), 0
        while True:
            wanted = limit - len(found) + 1
            ids = await self._index.ids(where, after=after, count=max(wanted, _IDS_PER_PAGE if found else wanted))
            letters = {letter.id: letter for letter in await self._read([raw for _, raw in ids])}
            gone = list[bytes]()
            for cursor, raw in ids:
                letter = letters.get(raw.decode("utf-8", "surrogateescape"))
                if letter is not None and rest.matches(letter):
                    if len(found) == limit:
                        await self._index.forget(gone)
                        return LetterPage(found, after)
                    found.append(letter)
                elif letter is None:
                    gone.append(raw)
                after = cursor
            await self._index.forget(gone)
            looked_at += len(ids)
            if len(ids) < wanted:
                return LetterPage(found, None)
            if looked_at >= _MOST_LOOKED_AT:
                return LetterPage(found, after)

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        """The most frequent causes first, from counters."""
        check_int("limit", limit, minimum=1)
        await self._index.catch_up()
        groups = await self._index.groups(self.name, tenant_id=tenant_id, limit=limit)
        if tenant_id is None:
            return groups
        # What is kept of a cause may be of another tenant.
        letters = {each.id: each for each in await self._read([group.example.encode() for group in groups])}
        return [
            replace(group, error=summary(letters[group.example].error_text, LONGEST_SAMPLE))
            if group.example in letters
            else group
            for group in groups
        ]

    async def of_tenant(self, tenant_id: str, *, after: str | None = None, limit: int = 50) -> LetterPage:
        """Those whose work is this tenant's, newest first, and how many there are; `after` is the `next` of the page
        before."""
        page = await self.page(DeadLetterFilter(tenant_id=tenant_id), after=after, limit=limit)
        return replace(page, depth=await self._index.count(tenant_id))

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        """Send the job back with its id, data and idempotency key; attempts start again. Returns the job id.

        `by` is noted with the instant in the job's field `bpredriven` (default: user and host of this process). Safe
        to repeat: raises DeadLetterNotFound when the entry is gone, JobStateConflict when the id is in use by a job
        that has not failed.
        """
        return await self._redrive(entry_id, by, None)

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        """As `redrive`, with other data (see `make_edit`). Raises DeadLetterChanged when the entry has other data than
        was edited."""
        return await self._redrive(entry_id, by, edit)

    async def _redrive(self, entry_id: str, by: str | None, edit: Edit | None) -> str:
        flat = await self._actions.command("HGETALL", self._entries.job(entry_id))
        if not flat:
            raise DeadLetterNotFound(self.name, entry_id)
        entry, fields = self._parse(JobRecord.parse(entry_id, flat))
        told = _text(fields, "originalQueue")
        if told and told != self._keys.name:
            # Two queues may keep their letters in one store; whoever adds to one must not reach the other by it.
            raise JobStateConflict(
                f"dead letter {entry_id!r} of queue {self._entries.name!r} is of queue {told!r}, so it was not "
                f"redriven to {self._keys.name!r}; redrive it from its own queue",
                queue=self._keys.name,
                job_id=entry_id,
            )
        job_id = fields.get("originalJobId")
        if not isinstance(job_id, str) or not job_id:
            raise CorruptJob(
                f"dead letter {entry_id!r} of queue {self._entries.name!r} names no job, so it cannot be redriven",
                queue=self._entries.name,
                job_id=entry_id,
            )
        opts = bytes(entry.get("originalOpts", msgspec.Raw(b"{}")))
        call = secrets.token_hex(8)
        members: dict[str, Any] = {"by": check_actor(by), "entry": entry_id, "call": call}
        data = original_data(entry)
        if edit is not None:
            if payload_fingerprint(self._shown_data(entry)) != edit.before:
                raise DeadLetterChanged(self._entries.name, entry_id)
            check_not_sealed(self._entries.name, entry_id, self._shown_data(entry))
            members["edit"], data = edit.note(), json.encode(edit.data)
            json.check_payload_size(len(data), len(opts))
        note = msgspec.json.encode(members)[1:-1]
        keys, entries = self._keys, self._entries
        answer = await self._actions.evaluate(
            "redrive",
            [entries.job(entry_id), keys.job(job_id), keys.failed],
            [
                *(keys.base, self._clock_offset_ms, entries.base, entry_id, job_id),
                *(_text(fields, "originalJobName"), data, opts),
                *(_whole(fields, "originalTimestamp"), _whole(fields, "originalPriority")),
                "1" if WireOptions.parse(opts).lifo else "",
                *(_starts(entry_id, fields), bytes(entry.get("redriven", msgspec.Raw(b""))), note),
                "" if edit is None else "1",
            ],
        )
        if answer == b"gone":
            # It was there a moment ago: our own call whose reply was lost, which has left its mark, or somebody else.
            notes = await self._actions.command("HGET", keys.job(job_id), "bpredriven")
            if notes is None or call.encode() not in notes:
                raise DeadLetterNotFound(self.name, entry_id)
            return job_id
        if answer.startswith(b"busy:"):
            state = answer.partition(b":")[2].decode()
            raise JobStateConflict(
                f"dead letter {entry_id!r}: job {job_id!r} of queue {keys.name!r} is {state}, so it was not redriven; "
                "wait for it, or discard the entry",
                queue=keys.name,
                job_id=job_id,
            )
        return job_id

    async def redrive_all(
        self,
        where: DeadLetterFilter = ANY,
        *,
        limit: int | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        by: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> RedriveReport:
        """Send back all that match, oldest first; at most `limit`, and at most `rate` per second.

        What cannot go back (its id is in use, it is no entry of ours) is skipped and named in the report.
        `dry_run` counts only. `on_progress` gets the report so far, again and again.
        """

        async def send_back(letter: DeadLetter) -> str | None:
            try:
                await self.redrive(letter.id, by=by)
            except (DeadLetterNotFound, JobStateConflict, CorruptJob) as error:
                return str(error)
            return None

        return await self._for_all(where, send_back, limit, rate, dry_run=dry_run, on_progress=on_progress)

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        """Delete one entry for good. False when there was none. `by` is for stores that keep it."""
        entries = self._entries
        return bool(
            await self._actions.evaluate(
                "discard", [entries.job(entry_id), entries.wait, entries.events], [entries.base, entry_id]
            )
        )

    async def discard_all(
        self,
        where: DeadLetterFilter,
        *,
        limit: int | None = None,
        dry_run: bool = False,
        on_progress: OnProgress | None = None,
    ) -> RedriveReport:
        """Delete all that match for good, oldest first. The failed jobs they speak of stay where they are."""

        async def throw_away(letter: DeadLetter) -> str | None:
            return None if await self.discard(letter.id) else "it was removed already"

        return await self._for_all(where, throw_away, limit, None, dry_run=dry_run, on_progress=on_progress)

    async def sweep(self) -> int:
        """Give every failed job without a dead letter its own now, also those that other clients failed; how many.

        Workers with dead letters do this every minute. Only failures since the last sweep, less an hour, count: where
        there was no sweep before, those of the last hour.
        """
        writer = DeadLetterWriter(self._keys, self._entries, self._actions.clock)
        return await Sweeper(self._actions, self._keys, writer, clock_offset_ms=self._clock_offset_ms).sweep() or 0

    async def _for_all(
        self,
        where: DeadLetterFilter,
        act: Callable[[DeadLetter], Coroutine[Any, Any, str | None]],
        limit: int | None,
        rate: float | None,
        *,
        dry_run: bool,
        on_progress: OnProgress | None,
    ) -> RedriveReport:
        if limit is not None:
            check_int("limit", limit, minimum=1)
        is_rate = rate is None or (isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0)
        require("rate", is_rate, "entries per second, more than 0", rate)
        report, batch = RedriveReport(is_dry_run=dry_run), list[DeadLetter]()
        pace = _RateLimiter(rate, self._actions.sleep)

        async def act_on_batch() -> None:
            nonlocal report
            await pace.wait(len(batch))
            refused = await self._actions.together(map(act, batch))
            skipped = [(letter.id, why) for letter, why in zip(batch, refused, strict=True) if why is not None]
            report = replace(
                report,
                done=report.done + len(batch) - len(skipped),
                skipped=(report.skipped + tuple(skipped))[:_MOST_SKIPPED_NAMED],
            )
            batch.clear()

        async def tell() -> None:
            if on_progress is not None and inspect.isawaitable(answer := on_progress(report)):
                await answer

        async for letter in self:
            matches = where.matches(letter)
            report = replace(report, examined=report.examined + 1, matched=report.matched + matches)
            if matches and not dry_run:
                batch.append(letter)
                if len(batch) >= pace.batch:
                    await act_on_batch()
                    await tell()
            if report.matched == limit:
                break
        if batch:
            await act_on_batch()
        await tell()
        return report

    async def _read(self, ids: Sequence[bytes]) -> Sequence[DeadLetter]:
        """The entries of these ids; those that vanished are passed over."""
        base = self._entries.base.encode()
        hashes = await self._actions.commands([("HGETALL", base + raw) for raw in ids], or_none=is_wrong_type)
        return [
            self._entry(JobRecord.parse(raw.decode("utf-8", "surrogateescape"), flat))
            for raw, flat in zip(ids, hashes, strict=True)
            if flat
        ]

    def _entry(self, record: JobRecord) -> DeadLetter:
        try:
            stored = record.data
        except NotJson:
            stored = None
        # Anybody may put jobs into this queue; one that is no entry must not hide those that are.
        return DeadLetter.from_entry(record.id, stored if isinstance(stored, dict) else {}, source=self._keys.name)

    @staticmethod
    def _shown_data(entry: dict[str, msgspec.Raw]) -> Any:
        """The payload as `get` shows it, which is the text that was edited."""
        return json.decode(bytes(entry["originalData"])) if "originalData" in entry else None

    @staticmethod
    def _parse(record: JobRecord) -> tuple[dict[str, msgspec.Raw], dict[str, Any]]:
        """The entry's members as stored, and decoded; without any when it is none of ours."""
        try:
            entry = msgspec.json.decode(record.raw_data, type=dict[str, msgspec.Raw])
            return entry, {name: json.decode(bytes(value)) for name, value in entry.items() if name != "originalData"}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, NotJson):
            return {}, {}


class _RateLimiter:
    """Limits the rate per second; no limit without a rate."""

    def __init__(self, rate: float | None, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._rate, self._sleep = rate, sleep
        # With a rate, in batches of at most a tenth of a second, so that it is even.
        self.batch = _AT_ONCE if rate is None else max(1, min(_AT_ONCE, int(rate / 10)))
        self._next_at = 0.0

    async def wait(self, count: int) -> None:
        if self._rate is None:
            return
        now = time.monotonic()
        if self._next_at > now:
            await self._sleep(self._next_at - now)
        self._next_at = max(self._next_at, now) + count / self._rate


def _text(fields: Mapping[str, Any], name: str) -> str:
    """A field of an entry. Anybody may have written it: what is no text is none."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > json.MAX_SAFE_INTEGER:
        return 0
    return value


def _starts(entry_id: str, fields: dict[str, Any]) -> int:
    """How often the job had been started: from the entry, or from the end of its id for older entries."""
    if isinstance(fields.get("attemptsStarted"), int) and (told := _whole(fields, "attemptsStarted")) >= 0:
        return told
    last = entry_id.rpartition("-")[2]
    return int(last) if last.isdecimal() and len(last) < 16 else 0

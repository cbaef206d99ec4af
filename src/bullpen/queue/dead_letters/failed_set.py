"""The failed set of a queue as its store of dead letters (`bullpen.ports.dead_letters`).

In: ids of entries, which name a job and which of its failures is meant. Out: dead letters, jobs that are queued again,
or jobs that are gone. Of two that redrive the same failure one does it, and a failure that came later is never touched
in the name of an earlier one. Elsewhere: a dead-letter queue beside it (`operations`), choosing between the two
(`store`).
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.duration import check_int
from bullpen._kernel.ids import check_job_id
from bullpen.errors import DeadLetterChanged, DeadLetterNotFound, InvalidOption, JobStateConflict
from bullpen.ports.dead_letters import (
    ANY,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    LetterPage,
    check_unchanged,
    groups_of,
)
from bullpen.ports.edits import Edit
from bullpen.queue.actions import QueueActions, is_wrong_type
from bullpen.queue.actor import check_actor
from bullpen.queue.dead_letters.entry import DeadLetterWriter, check_not_sealed, entry_id, starts_of
from bullpen.queue.job import Job
from bullpen.queue.packing import VERSION_FIELD
from bullpen.queue.states import JobState
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import DEFAULT_OPTIONS
from bullpen.wire.records import JobRecord, check_job_name

__all__ = ["FailedSetStore"]

_HASHES_PER_PAGE: Final = 100
"""Hashes carry payloads: a page of them must fit in memory and in the deadline of one call."""
_MOST_LOOKED_AT: Final = 5_000


class FailedSetStore:
    """The failed jobs themselves, for queues without a dead-letter queue. Discarding one deletes the job."""

    def __init__(
        self, actions: QueueActions, keys: QueueKeys, dead_letter_keys: QueueKeys, *, clock_offset_ms: int = 0
    ) -> None:
        self._actions, self._keys, self._clock_offset_ms = actions, keys, clock_offset_ms
        # To describe a failed job as its entry would; nothing is written to that queue.
        self._writer = DeadLetterWriter(keys, dead_letter_keys, actions.clock)

    @property
    def name(self) -> str:
        return self._keys.name

    async def depth(self) -> int:
        return int(await self._actions.command("ZCARD", self._keys.failed))

    async def put(self, letter: DeadLetter) -> None:
        """Store work that failed elsewhere as a failed job under its own identity.

        Raises JobStateConflict when that id is in use by a job that has not failed.
        """
        keys, job_id = self._keys, check_job_id(letter.message_id)
        data = json.encode({} if letter.data is None else letter.data)
        opts = letter.entry.get("originalOpts")
        wire_opts = json.encode(opts) if isinstance(opts, dict) else DEFAULT_OPTIONS.wire_json
        json.check_payload_size(len(data), len(wire_opts))
        timestamp = letter.entry.get("originalTimestamp")
        reply = await self._actions.evaluate(
            "put_failed",
            [keys.job(job_id), keys.failed, keys.meta, keys.events],
            [
                *(self._clock_offset_ms, job_id, check_job_name(letter.name or "unknown"), data, wire_opts),
                *(timestamp if isinstance(timestamp, int) else "", _instant_ms(letter.failed_at)),
                *(starts_of(letter), letter.attempts_made, letter.error_message),
                *(json.encode([] if letter.error_stack is None else [letter.error_stack]), VERSION_FIELD),
            ],
        )
        if reply < 0:
            raise JobStateConflict(
                f"dead letter {letter.id!r}: job {job_id!r} of queue {keys.name!r} has not failed, so it was not "
                "replaced; wait for the job, or remove it",
                queue=keys.name,
                job_id=job_id,
            )

    async def list(self, *, start: int = 0, count: int = 100) -> builtins.list[DeadLetter]:
        check_int("start", start, minimum=0)
        check_int("count", count, minimum=1)
        ids = await self._actions.command("ZRANGE", self._keys.failed, start, start + count - 1)
        return await self._read(ids)

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        """As the port says. The set knows when jobs finished; for all else they are read, some thousand at a time."""
        check_int("limit", limit, minimum=1)
        found, looked_at = list[DeadLetter](), 0
        start, behind = (0, None) if after is None else await self._behind(after)
        while True:
            flat = await self._actions.command(
                *("ZRANGE", self._keys.failed, start, start + _HASHES_PER_PAGE - 1, "REV", "WITHSCORES")
            )
            ids, scores = flat[::2], flat[1::2]
            letters = {letter.message_id: letter for letter in await self._read(ids)}
            for raw, score in zip(ids, scores, strict=True):
                if behind is not None and (float(score), raw) >= behind:
                    continue  # of the same millisecond, and shown already
                letter = letters.get(raw.decode("utf-8", "surrogateescape"))
                if letter is not None and where.matches(letter):
                    if len(found) == limit:
                        return LetterPage(found, after)
                    found.append(letter)
                after = f"{score.decode()}/{raw.decode('utf-8', 'surrogateescape')}"
            start, looked_at = start + len(ids), looked_at + len(ids)
            if len(ids) < _HASHES_PER_PAGE:
                return LetterPage(found, None)
            if looked_at >= _MOST_LOOKED_AT:
                return LetterPage(found, after)

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        """Of the newest failed jobs: the set has no counters, and no entries that could be counted."""
        newest = await self.page(DeadLetterFilter(tenant_id=tenant_id), limit=_MOST_LOOKED_AT)
        return groups_of(newest.letters, self.name, tenant_id=tenant_id, limit=limit)

    async def _behind(self, after: str) -> tuple[int, tuple[float, bytes]]:
        """Where the set continues after a cursor, also when that job was removed."""
        score, mark, job_id = after.partition("/")
        if not mark or not score.isascii() or not score.isdecimal():
            raise InvalidOption("after", "the `next` of the page before", after)
        start = int(await self._actions.command("ZCOUNT", self._keys.failed, f"({score}", "+inf"))
        return start, (float(score), job_id.encode("utf-8", "surrogateescape"))

    async def _read(self, ids: Sequence[bytes]) -> builtins.list[DeadLetter]:
        letters: builtins.list[DeadLetter] = []
        for first in range(0, len(ids), _HASHES_PER_PAGE):
            page = ids[first : first + _HASHES_PER_PAGE]
            base = self._keys.base.encode()
            hashes = await self._actions.commands([("HGETALL", base + raw) for raw in page], or_none=is_wrong_type)
            for raw, flat in zip(page, hashes, strict=True):
                record = JobRecord.parse(raw.decode("utf-8", "surrogateescape"), flat or [])
                if record.exists:  # else it was removed meanwhile
                    letters.append(self._entry_of(Job(self._actions, record)))
        return letters

    async def get(self, entry_id: str) -> DeadLetter | None:
        job = await self._find(entry_id)
        return None if job is None else self._entry_of(job)

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        return await self._redrive(entry_id, by, None)

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        """As the port says, in one script: data that another client changes in between is not overwritten."""
        return await self._redrive(entry_id, by, edit)

    async def _redrive(self, entry_id: str, by: str | None, edit: Edit | None) -> str:
        actor = check_actor(by)
        job = await self._find(entry_id)
        if job is None:
            raise DeadLetterNotFound(self.name, entry_id)
        keys, data, digest = self._keys, b"", ""
        members: dict[str, Any] = {"by": actor, "entry": entry_id}
        if edit is not None:
            check_unchanged(self.name, self._entry_of(job), edit)
            check_not_sealed(self.name, entry_id, self._entry_of(job).data)
            members["edit"], data = edit.note(), json.encode(edit.data)
            json.check_payload_size(len(data), len(job.record.raw_opts))
            digest = hashlib.sha1(job.record.raw_data, usedforsecurity=False).hexdigest()  # what Lua can compute
        note = msgspec.json.encode(members)[1:-1]
        done, was_repeated = await self._actions.evaluate_noting_repeats(
            "redrive_failed",
            [keys.job(job.id), keys.failed],
            [keys.base, self._clock_offset_ms, self._writer.base, job.id, job.attempts_started, note, data, digest],
        )
        if done == 1:
            return job.id
        # An earlier copy of our own call may have done it; then the job is back, with what we sent.
        found = await self._actions.read(job.id) if was_repeated else None
        is_back = found is not None and found[0] is not JobState.FAILED
        if not is_back or (edit is not None and found is not None and found[1].raw_data != data):
            raise (DeadLetterChanged if done == -1 else DeadLetterNotFound)(self.name, entry_id)
        return job.id

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        job = await self._find(entry_id)
        if job is None:
            return False
        keys = self._keys
        done, was_repeated = await self._actions.evaluate_noting_repeats(
            "discard_failed",
            [keys.job(job.id), keys.failed],
            [keys.base, self._clock_offset_ms, job.id, job.attempts_started],
        )
        return bool(done) or was_repeated

    async def _find(self, wanted: str) -> Job | None:
        """The failed job of an entry's id, if it is still that failure."""
        written = wanted.removeprefix("dl-").rpartition("-")[0]
        for job_id in dict.fromkeys((written, written.replace("%3A", ":"))):
            found = await self._actions.read(job_id) if job_id else None
            if found is not None and found[0] is JobState.FAILED:
                job = Job(self._actions, found[1])
                if entry_id(job.id, job.attempts_started) == wanted:
                    return job
        return None

    def _entry_of(self, job: Job) -> DeadLetter:
        identity, _, head, tail, _, form, _ = self._writer.parts_of_failed(job)
        raw = {"": job.record.raw_data, "text": msgspec.json.encode(job.record.raw_data.decode("utf-8", "replace"))}
        entry = json.decode(head + raw.get(form, b"") + tail)
        return DeadLetter.from_entry(identity, entry, source=self.name)


def _instant_ms(text: str) -> int | str:
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        return ""

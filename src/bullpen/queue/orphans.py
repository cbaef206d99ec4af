"""Find jobs that are in no state; delete them, or put them back into the queue.

In: a queue's keys and something that can reach the server. Out: how many keys were deleted. No call takes longer when
more jobs are stored; the ids of all jobs are in this process's memory meanwhile.
Elsewhere: the one step that deletes (`remove_orphans.lua`), reading lines that move (`lists`).

A live job that is taken for an orphan is a lost job, and jobs move during the search. So:

1. Every key of the queue is scanned; who is met in a set or a line is acquitted. That only reduces the suspects.
2. Where the lists are short, one script call searches all sets and lists and deletes: one instant, no race.
3. Where they are long, each suspect is *marked* in one script call which sees that it is in no set, has no lock and
   is at no end of a list. Then the lists are read, `active` before the waiting list; a job that is found is acquitted.
   A second call deletes a suspect that is in no set, has no lock, stands at no end, and whose mark is as it was
   written.

Why a live job survives step 3. When it was marked it was in a line, since it was in no set. When it is judged it is in
a line again, or the judge sees it. In between either

- it kept its place in its line. `walk_line_strictly` meets every such id. A line as a whole may be renamed (older
  clients move `wait` to `paused` and back); each call that reads one of the two sees that the other is empty, so at
  the instant of each call all waiting jobs were in the line that was read, or the attempt does not count; or
- it was taken and came back. Every client that takes a job writes `processedOn` and counts `ats`, a stall counts `stc`,
  a failure leaves a stack trace: the mark holds all of these and differs now; or
- it was deleted and added again: the new hash has no mark; or
- its priority was changed and it is in a list again. Ours takes the mark away. Another client may leave the hash as
  it was, by changes that end where they began; it then puts the job on the left, which the walk reaches last, or
  (`lifo`) at the running end, whose ten thousand ids are read again after the walk.

A call that is repeated because its reply was lost changes nothing: a mark of the same search is not written again, so a
first copy that the server gets to late cannot make it look fresh.

An interrupted search leaves only marks; they are not read, and the next search writes its own.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final, Literal, TypeVar

from bullpen._kernel.ids import JOB_SUFFIXES, QUEUE_SUFFIXES, new_token
from bullpen.errors import JobStateConflict
from bullpen.queue.actions import QueueActions, is_wrong_type
from bullpen.queue.base import literally
from bullpen.queue.lists import LineMoved, walk_line_strictly
from bullpen.redis.client import Connection
from bullpen.wire.keys import QueueKeys

T = TypeVar("T")

_SCAN_COUNT: Final = 1_000
_IDS_PER_READ: Final = 1_000
_PER_STEP: Final = 200
"""Candidates per call: each takes some 10 to 20 µs, and where lines are short the call reads 10 000 ids in addition."""
_RUNNING_END: Final = 10_000
_ATTEMPTS: Final = 3
_MOST_LOOKED_AT: Final = 20_000


Mode = Literal["delete", "all", "restore"]
"""`delete` leaves jobs that have not finished, since they can be queued again; `all` deletes them too; `restore`
puts them back and deletes nothing."""


async def remove_orphans(
    actions: QueueActions,
    keys: QueueKeys,
    *,
    clock_offset_ms: int,
    and_ours: bool,
    mode: Mode = "all",
    limit: int | None = None,
) -> int:
    """With `and_ours` also what other parts of bullpen keep beside the jobs, but the audit trail: the queue is gone. At
    most `limit`.

    Raises JobStateConflict when lines moved so much that some suspects could not be judged; all others are done then.
    """
    suspects: set[str] = set()
    others: list[tuple[str, str]] = []
    async for rest in _keys_under(actions, keys):
        match _kind_of(rest):
            case "job":
                suspects.add(rest)
            case "ours":
                if and_ours and not rest.startswith("bp:audit:"):  # who did what, this among it
                    await actions.command("UNLINK", _raw(keys.base + rest))
            case kind if kind is not None:
                others.append((kind, rest))
    await _acquit_listed(actions, keys, suspects)
    court = _Court(actions, keys, clock_offset_ms, mode, limit)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            await court.judge(suspects)
            break
        except LineMoved:
            if attempt == _ATTEMPTS:
                raise JobStateConflict(
                    f"queue {keys.name!r}: {court.deleted} orphans were removed, but {len(suspects)} jobs that seem "
                    "to be in no state were kept: the queue changed too much to be sure; run it again when the queue "
                    "is less busy, or resume the queue first if an older client paused it",
                    queue=keys.name,
                ) from None
    # After the jobs: their logs and deduplication ids are gone with them, and what is left has no job.
    if mode != "restore":
        await court.delete(others)
    return court.deleted


async def find_orphans(
    actions: QueueActions, keys: QueueKeys, *, count: int, met: Sequence[str] | None = None
) -> list[str]:
    """Ids of jobs that no state lists, among the first `count` that a bounded scan meets, or among those that one has
    met already. Changes nothing.

    Where lists are so long that only a search could show it, a job counts as listed: this is a sample, not a verdict.
    """
    if met is None:
        met = await _first_jobs(actions, keys, count)
    suspects = set(met)
    await _acquit_listed(actions, keys, suspects, most_of_line=_IDS_PER_READ)
    nowhere = [
        job_id for job_id in dict.fromkeys(met) if job_id in suspects and await _is_nowhere(actions, keys, job_id)
    ]
    # Once more: whoever was being added has its place by now.
    return [job_id for job_id in nowhere if await _is_nowhere(actions, keys, job_id)]


async def sample_jobs(connection: Connection, prefix: str, names: Iterable[str], *, count: int) -> dict[str, list[str]]:
    """The first `count` ids of jobs, or fewer, that one bounded scan meets of each of these queues: one for all of
    them, since each walks over the keys of the whole server."""
    met: dict[str, list[str]] = {name: [] for name in names}
    left, keys_left, at = set(met), _MOST_LOOKED_AT * len(met), len(prefix) + 1
    async with connection.every_primary() as doors:
        for door in doors:
            cursor: bytes | None = None
            while cursor != b"0" and left and keys_left > 0:
                cursor, found = await door.call(
                    "SCAN", cursor or b"0", "MATCH", f"{literally(prefix)}:*", "COUNT", _SCAN_COUNT
                )
                keys_left -= len(found)
                for key in found:
                    name, _, rest = _text(key)[at:].partition(":")
                    if name in left and _kind_of(rest) == "job":
                        met[name].append(rest)
                        if len(met[name]) == count:
                            left.discard(name)
    return met


async def _first_jobs(actions: QueueActions, keys: QueueKeys, count: int) -> list[str]:
    met: list[str] = []
    seen_keys = 0
    async for rest in _keys_under(actions, keys):
        seen_keys += 1
        if _kind_of(rest) == "job":
            met.append(rest)
        if len(met) >= count or seen_keys >= _MOST_LOOKED_AT:
            break
    return met


async def _is_nowhere(actions: QueueActions, keys: QueueKeys, job_id: str) -> bool:
    state, record = await actions.evaluate("read_job", [keys.job(job_id)], [keys.base, job_id])
    if not record or state != b"unknown" or b"ic" in record[::2]:
        return False
    _, is_repeat, scheduler_id = job_id.partition("repeat:")
    # The record of a scheduler; those of older clients have no `ic` and are known by name only.
    return not (is_repeat and await actions.command("ZSCORE", keys.repeat, _raw(scheduler_id)) is not None)


class _Court:
    """Judges suspects. `deleted` counts keys of all kinds, and jobs that were put back."""

    def __init__(
        self, actions: QueueActions, keys: QueueKeys, clock_offset_ms: int, mode: Mode, limit: int | None
    ) -> None:
        self._actions, self._keys, self._clock_offset_ms, self._mode = actions, keys, clock_offset_ms, mode
        self._search = new_token()
        self._limit = math.inf if limit is None else limit
        self.deleted = 0

    async def judge(self, suspects: set[str]) -> None:
        """Delete the orphans among them; what was decided leaves the set. Raises LineMoved when some were not."""
        self._search = new_token()
        order = await self._order(suspects)
        marked, line = await self.delete([("job", job_id) for job_id in order])
        suspects &= marked
        if not suspects:
            return
        try:
            met = await self._met(suspects, line)
        except LineMoved:
            await self._unmark(suspects)
            raise
        await self._unmark(met)
        suspects -= met
        await self.delete([("job", job_id) for job_id in order if job_id in suspects], not_met=True)
        await self._unmark(suspects)  # those that were taken meanwhile and are there
        suspects.clear()

    async def _order(self, suspects: set[str]) -> list[str]:
        """Jobs return to the queue in the order in which they were added: by time, then by id."""
        if self._mode != "restore":
            return list(suspects)
        ids, added = list(suspects), list[tuple[int, int, str]]()
        for page in _pages(ids, _IDS_PER_READ):
            keys = [_raw(self._keys.base + job_id) for job_id in page]
            times = await self._actions.commands([("HMGET", key, "timestamp") for key in keys], or_none=is_wrong_type)
            for job_id, fields in zip(page, times, strict=True):
                raw = (fields or [None])[0] or b""
                # Ids that the server counts are numbers: 9 came before 10.
                number = int(job_id) if job_id.isascii() and job_id.isdecimal() else 0
                added.append((int(raw) if raw.isdigit() else 0, number, job_id))
        return [job_id for _, _, job_id in sorted(added)]

    async def delete(self, candidates: Sequence[tuple[str, str]], *, not_met: bool = False) -> tuple[set[str], str]:
        """Returns the ids that are marked now and the key of the line in which jobs wait."""
        keys, marked, lines, first = self._keys, set[str](), set[str](), 0
        while first < len(candidates) and self.deleted < self._limit:
            page = candidates[first : first + int(min(_PER_STEP, self._limit - self.deleted))]
            first += len(page)
            deleted, waiting, paused, marked_now = await self._actions.evaluate(
                "remove_orphans",
                [keys.meta, keys.wait, keys.paused, keys.active],
                [
                    *(keys.base, self._clock_offset_ms, self._search, "1" if not_met else "", self._mode),
                    *(_raw(text) for candidate in page for text in candidate),
                ],
            )
            self.deleted += deleted
            marked.update(map(_text, marked_now))
            lines.update(key for key, length in ((keys.wait, waiting), (keys.paused, paused)) if length)
        if marked and len(lines) > 1:
            await self._unmark(marked)
            raise LineMoved
        return marked, lines.pop() if lines else keys.wait

    async def _met(self, suspects: set[str], line: str) -> set[str]:
        """Those of the suspects that stand in a line."""
        keys, met = self._keys, set[str]()
        async for ids in walk_line_strictly(self._actions, keys.base, keys.active, twin=None):
            met |= suspects.intersection(map(_text, ids))
        twin = keys.paused if line == keys.wait else keys.wait
        async for ids in walk_line_strictly(self._actions, keys.base, line, twin=twin):
            met |= suspects.intersection(map(_text, ids))
        running_end = await self._actions.command("LRANGE", line, -_RUNNING_END, -1)
        return met | suspects.intersection(map(_text, running_end))

    async def _unmark(self, job_ids: Iterable[str]) -> None:
        for page in _pages(sorted(job_ids), _PER_STEP):
            await self._actions.commands([("HDEL", _raw(self._keys.base + job_id), "bporphan") for job_id in page])


async def _keys_under(actions: QueueActions, keys: QueueKeys) -> AsyncIterator[str]:
    """What follows the base in every key of the queue."""
    pattern = f"{literally(keys.base)}*"
    cursor: bytes = b"0"
    while True:
        cursor, found = await actions.command("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
        for key in found:
            yield _text(key)[len(keys.base) :]
        if cursor == b"0":
            return


def _kind_of(rest: str) -> str | None:
    """Whose key this is by its name: a job's, a part of a job's, of a deduplication id, ours, or (None) the queue's."""
    family, colon, _ = rest.partition(":")
    if rest in QUEUE_SUFFIXES or family == "metrics":
        return None
    if colon and family in ("de", "dn", "bp"):
        return {"de": "owner", "dn": "next", "bp": "ours"}[family]
    _, colon, last = rest.rpartition(":")
    return "part" if colon and last in JOB_SUFFIXES else "job"


async def _acquit_listed(
    actions: QueueActions, keys: QueueKeys, suspects: set[str], *, most_of_line: int | None = None
) -> None:
    """Take out of `suspects` the ids that a state lists; page by page, since the server is not to be held up, and only
    as long as there are any. `most_of_line`: no more than so many at the running end of each line."""
    for key in (keys.wait, keys.active, keys.paused):
        if not suspects:
            return
        if most_of_line is not None:
            listed = await actions.command("LRANGE", key, -most_of_line, -1)
            suspects.difference_update(map(_text, listed))
            continue
        length = await actions.command("LLEN", key)
        for start in range(0, length, _IDS_PER_READ):
            listed = await actions.command("LRANGE", key, start, start + _IDS_PER_READ - 1)
            suspects.difference_update(map(_text, listed))
    for key in (keys.completed, keys.failed, keys.delayed, keys.prioritized, keys.waiting_children):
        for page in _pages(list(suspects), _IDS_PER_READ):
            scores = await actions.command("ZMSCORE", key, *map(_raw, page))
            suspects.difference_update(job_id for job_id, score in zip(page, scores, strict=True) if score is not None)


def _pages(items: Sequence[T], size: int) -> Iterable[Sequence[T]]:
    return (items[first : first + size] for first in range(0, len(items), size))


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")

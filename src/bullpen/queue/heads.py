"""What a list shows of jobs: small fields whole, of large ones the beginning and the size.

In: a state and a position in it. Out: heads of jobs. However large their payloads are, a page of them is small: the
server sends at most `PREVIEW_BYTES` of each large field.
Elsewhere: whole jobs (`browse`), what the fields mean (`bullpen.wire.records`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bullpen._kernel.duration import check_int, check_texts
from bullpen.queue.base import QueuePart
from bullpen.queue.places import lines_of
from bullpen.queue.states import JobState
from bullpen.wire.records import JobRecord

__all__ = ["PREVIEW_BYTES", "FoundHeads", "HeadFilter", "Heads", "JobHead"]

PREVIEW_BYTES: Final = 800
"""Of each large field: 200 characters, whatever their alphabet."""
_LARGE: Final = ("data", "returnvalue", "stacktrace", "failedReason", "progress", "opts")
_PER_CALL: Final = 200
_ASKED_PER_CALL: Final = 500
"""Jobs that one script reads: a few milliseconds."""


@dataclass(frozen=True, slots=True)
class JobHead:
    """One job of a list."""

    record: JobRecord
    """Its large fields are cut: read them as text, not as JSON."""
    sizes: dict[str, int]
    """Bytes of each large field, as it is stored."""

    def preview(self, field: str) -> str:
        """The beginning of a large field."""
        raw = self.record.field(field.encode()) or b""
        return raw.decode("utf-8", "ignore" if self.sizes.get(field, 0) > len(raw) else "replace")

    def is_cut(self, field: str) -> bool:
        return self.sizes.get(field, 0) > len(self.record.field(field.encode()) or b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFilter:
    """Which jobs are wanted; what is left out does not matter."""

    name: str = ""
    """Of the job, exactly."""
    text: str = ""
    """Somewhere in its id, or in the beginning of its data or error; the case of A to Z does not matter."""
    attempts: int | None = None
    """At least this many were made."""
    since_ms: int | None = None
    """Added then or later."""
    until_ms: int | None = None
    """Added before."""

    @property
    def is_any(self) -> bool:
        return self == HeadFilter()


@dataclass(frozen=True, slots=True)
class FoundHeads:
    """What a walk has found."""

    ids: list[str]
    looked_at: int
    """Places that were passed; the next walk begins behind them."""
    is_end: bool


class Heads(QueuePart):
    """The lists of a `Queue`."""

    async def heads(
        self, state: JobState, *, start: int = 0, count: int = 50, newest_first: bool = False
    ) -> list[JobHead]:
        """A page of the jobs in a state, from position `start`: the next to run or the oldest finished first;
        `newest_first` turns that round. Ids whose job is gone are left out."""
        check_int("start", start, minimum=0)
        check_int("count", count, minimum=1)
        return await self.heads_of(await self._ids(state, start, count, newest_first=newest_first))

    async def find(
        self,
        state: JobState,
        wanted: HeadFilter,
        *,
        start: int = 0,
        count: int = 50,
        most: int = 20_000,
        newest_first: bool = False,
    ) -> FoundHeads:
        """The next ids in a state that fit, from position `start`: until there are `count`, or `most` were read.
        The jobs are filtered on the server, five hundred at a time."""
        check_int("start", start, minimum=0)
        found, position = list[str](), start
        while position - start < most:
            page = await self._ids(state, position, min(_ASKED_PER_CALL, most), newest_first=newest_first)
            if not page:
                return FoundHeads(found, position - start, is_end=True)
            fitting = await self._fitting(page, wanted)
            if len(found) + len(fitting) >= count:
                found += fitting[: count - len(found)]
                passed = page.index(found[-1]) + 1
                return FoundHeads(found, position + passed - start, is_end=False)
            found += fitting
            position += len(page)
        return FoundHeads(found, position - start, is_end=False)

    async def _fitting(self, ids: list[str], wanted: HeadFilter) -> list[str]:
        bounds = (wanted.attempts, wanted.since_ms, wanted.until_ms)
        replies = await self._ready().evaluate(
            "find_jobs",
            [self._keys.meta],
            [
                self._keys.base,
                wanted.name,
                _lower_case(wanted.text),
                PREVIEW_BYTES,
                *("" if each is None else each for each in bounds),
                *(each.encode("utf-8", "surrogateescape") for each in ids),
            ],
        )
        return [raw.decode("utf-8", "surrogateescape") for raw in replies]

    async def _ids(self, state: JobState, start: int, count: int, *, newest_first: bool) -> list[str]:
        actions, ids = self._ready(), list[bytes]()
        lines = lines_of(self._keys, JobState(state))
        lengths = await actions.commands([(line.length, line.key) for line in lines])
        for line, length in zip(lines, lengths, strict=True):
            if start < length and len(ids) < count:
                wanted = min(length - start, count - len(ids))
                ids += await line.page(actions, start, wanted, newest_first=newest_first)
            start = max(0, start - length)
        return [raw.decode("utf-8", "surrogateescape") for raw in ids]

    async def heads_of(self, ids: list[str]) -> list[JobHead]:
        """The heads of these jobs, in their order; those that are gone are left out."""
        ids, found = list(check_texts("ids", ids)), list[JobHead]()
        for first in range(0, len(ids), _PER_CALL):
            page = ids[first : first + _PER_CALL]
            replies = await self._ready().evaluate(
                "read_heads",
                [self._keys.meta],
                [self._keys.base, PREVIEW_BYTES, *(each.encode("utf-8", "surrogateescape") for each in page)],
            )
            for job_id, reply in zip(page, replies, strict=True):
                if reply:
                    sizes = dict(zip(_LARGE, reply, strict=False))
                    found.append(JobHead(JobRecord.parse(job_id, reply[len(_LARGE) :]), sizes))
        return found

    async def position_at(self, state: JobState, epoch_ms: int, *, newest_first: bool = False) -> int:
        """How many finished jobs stand in front of those of an instant; of delayed ones, by when they are due.

        0 for states that are not ordered by time.
        """
        keys, actions = self._keys, self._ready()
        match state:
            case JobState.COMPLETED | JobState.FAILED:
                score = epoch_ms
            case JobState.DELAYED:
                score = epoch_ms * 4096
            case _:
                return 0
        bounds = (f"({score}", "+inf") if newest_first else ("-inf", f"({score}")
        return int(await actions.command("ZCOUNT", getattr(keys, state.name.lower()), *bounds))


def _lower_case(text: str) -> str:
    """As the script makes them: of A to Z only."""
    return "".join(char.lower() if char.isascii() else char for char in text)

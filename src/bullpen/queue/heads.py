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
from bullpen.queue.job import JobState
from bullpen.queue.places import lines_of
from bullpen.wire.records import JobRecord

__all__ = ["PREVIEW_BYTES", "Heads", "JobHead"]

PREVIEW_BYTES: Final = 800
"""Of each large field: 200 characters, whatever their alphabet."""
_LARGE: Final = ("data", "returnvalue", "stacktrace", "failedReason", "progress", "opts")
_PER_CALL: Final = 200


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


class Heads(QueuePart):
    """The lists of a `Queue`."""

    async def heads(
        self, state: JobState, *, start: int = 0, count: int = 50, newest_first: bool = False
    ) -> list[JobHead]:
        """A page of the jobs in a state, from position `start`: the next to run or the oldest finished first;
        `newest_first` turns that round. Ids whose job is gone are left out."""
        check_int("start", start, minimum=0)
        check_int("count", count, minimum=1)
        actions, ids = self._ready(), list[bytes]()
        lines = lines_of(self._keys, JobState(state))
        lengths = await actions.commands([(line.length, line.key) for line in lines])
        for line, length in zip(lines, lengths, strict=True):
            if start < length and len(ids) < count:
                wanted = min(length - start, count - len(ids))
                ids += await line.page(actions, start, wanted, newest_first=newest_first)
            start = max(0, start - length)
        return await self.heads_of([raw.decode("utf-8", "surrogateescape") for raw in ids])

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

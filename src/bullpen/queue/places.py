"""Where the ids of jobs stand: lists and sorted sets, read by page or walked through.

In: the keys of a queue and a state. Out: the places of that state, each with its length, a page and a walk.
Elsewhere: walking a list that moves (`lists`), what is read of the jobs (`browse`, `heads`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from bullpen.errors import require
from bullpen.queue.actions import QueueActions
from bullpen.queue.lists import walk_line
from bullpen.queue.states import JobState
from bullpen.wire.keys import QueueKeys

_IDS_PER_PAGE: Final = 500


class ListLine:
    """A list of ids. New ones are pushed on the left; the right end is next to run."""

    length: Final = "LLEN"

    def __init__(self, key: str) -> None:
        self.key = key

    async def page(self, actions: QueueActions, start: int, count: int, *, newest_first: bool) -> list[bytes]:
        if newest_first:
            ids: list[bytes] = await actions.command("LRANGE", self.key, start, start + count - 1)
            return ids
        ids = await actions.command("LRANGE", self.key, -start - count, -start - 1)
        return ids[::-1]

    def walk(self, actions: QueueActions, base: str, *, newest_first: bool) -> AsyncIterator[list[bytes]]:
        return walk_line(actions, base, self.key, per_page=_IDS_PER_PAGE, newest_first=newest_first)


class ScoreLine:
    """A sorted set of ids; the lowest score is next to run, or the oldest finished."""

    length: Final = "ZCARD"

    def __init__(self, key: str) -> None:
        self.key = key

    async def page(self, actions: QueueActions, start: int, count: int, *, newest_first: bool) -> list[bytes]:
        order = ("REV",) if newest_first else ()
        ids: list[bytes] = await actions.command("ZRANGE", self.key, start, start + count - 1, *order)
        return ids

    async def walk(self, actions: QueueActions, base: str, *, newest_first: bool) -> AsyncIterator[list[bytes]]:
        # From score to score, not from place to place: what leaves the set meanwhile moves no job past us.
        bounds, order = (["-inf", "+inf"], ()) if not newest_first else (["+inf", "-inf"], ("REV",))
        last_score, seen = b"", set[bytes]()
        while True:
            flat = await actions.command(
                *("ZRANGE", self.key, *bounds, "BYSCORE", *order),
                *("LIMIT", 0, _IDS_PER_PAGE + len(seen), "WITHSCORES"),
            )
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            fresh = [job_id for job_id, score in pairs if score != last_score or job_id not in seen]
            if not fresh:
                return
            yield fresh
            if pairs[-1][1] != last_score:
                last_score, seen = pairs[-1][1], set()
            seen.update(job_id for job_id, score in pairs if score == last_score)
            bounds[0] = last_score.decode()


def lines_of(keys: QueueKeys, state: JobState) -> tuple[ListLine | ScoreLine, ...]:
    """Where jobs of a state are; `paused` is where older clients put the waiting jobs of a paused queue."""
    match state:
        case JobState.WAITING:
            return ListLine(keys.wait), ListLine(keys.paused)
        case JobState.ACTIVE:
            return (ListLine(keys.active),)
        case _:
            require("state", state is not JobState.UNKNOWN, "a state that jobs can have", state)
            return (ScoreLine(getattr(keys, state.name.lower())),)

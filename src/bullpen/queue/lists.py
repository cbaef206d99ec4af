"""Find and read ids in lines of any length: lists that new ids enter on the left and leave on the right.

In: something that can send scripts, and the key of a line. Out: ids, page by page, or the state of one job. Each call
does a bounded piece of work, whether thousands or millions wait; between two calls the line moves, and each function
says what it then promises.
Elsewhere: what is done with the ids (`browse`, `dead_letters.operations`, `orphans`), the scripts `read_line` and
`seek`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from typing import Any, Final, Protocol

from bullpen.queue.states import JobState
from bullpen.wire.keys import QueueKeys

_STEP: Final = 4_000
"""Distance between two places where the last read ids are searched; the script searches 2500 ids to either side."""
_FURTHEST: Final = 10_000
"""How many ids may have come in front of them in the meantime."""
_STRICT_PAGE: Final = 5_000
_STRICT_ANCHORS: Final = 50
_MOST_RESTARTS: Final = 5


class LineMoved(Exception):
    """The line moved too much to read it all; or its twin appeared, which means that the line was renamed."""


class _Server(Protocol):
    async def evaluate(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any: ...


async def walk_line(
    server: _Server, base: str, key: str, *, per_page: int, newest_first: bool = False
) -> AsyncIterator[list[bytes]]:
    """All ids, in pages; the next to run first. What leaves the line meanwhile hides nothing that stays."""
    position, latest_first = 0, list[bytes]()
    while True:
        position, ids = await _next_page(server, base, key, per_page, position, latest_first, newest_first=newest_first)
        if not ids:
            return
        in_order, seen = ids if newest_first else ids[::-1], set(latest_first)
        yield [job_id for job_id in in_order if job_id not in seen]
        position, latest_first = position + len(ids), in_order[::-1]


async def walk_line_strictly(server: _Server, base: str, key: str, *, twin: str | None) -> AsyncIterator[list[bytes]]:
    """Every id that keeps its place in the line from the first call to the last one is met, some more than once.

    From the running end, so that what enters on the left is met too. Where the place is lost, because workers took all
    that was read last, it begins again. Raises LineMoved when that happens too often, and as soon as the `twin`,
    which the line is renamed to and from, has ids.
    """
    position, latest_first, restarts = 0, list[bytes](), 0
    while True:
        place, ids, twin_has_ids = await server.evaluate(
            "read_line", [key, twin or key], [base, _STRICT_PAGE, "", "1", position, position, *latest_first]
        )
        if (twin and twin_has_ids) or restarts > _MOST_RESTARTS:
            raise LineMoved
        if place < 0:
            position, latest_first, restarts = 0, [], restarts + 1
            continue
        yield ids
        if len(ids) < _STRICT_PAGE:
            return
        position, latest_first = place + len(ids), ids[:_STRICT_ANCHORS]


async def _next_page(
    server: _Server,
    base: str,
    key: str,
    count: int,
    position: int,
    latest_first: list[bytes],
    *,
    newest_first: bool,
) -> tuple[int, list[bytes]]:
    fixed = [base, count, "1" if newest_first else "", ""]
    for around in _places(position):
        place, ids, _ = await server.evaluate("read_line", [key, key], [*fixed, position, around, *latest_first])
        if place >= 0:
            return place, ids
        if place == -2:
            break
    # None of them stands in the line any more. Deleted ones only made it shorter. From the running end jobs leave in
    # order, so if they were taken, all in front of them are gone too.
    before = max(0, position - len(latest_first))
    place, ids, _ = await server.evaluate(
        "read_line", [key, key], [*fixed, before if newest_first or place == -2 else 0, 0]
    )
    return place, ids


def _places(position: int) -> Iterator[int]:
    """Where to search the last read ids: where they were, then nearer to where reading started, then beyond."""
    yield from range(position, -_STEP, -_STEP)
    yield from range(position + _STEP, position + _FURTHEST + 1, _STEP)


def seeking(keys: QueueKeys, job_id: str) -> Generator[tuple[list[str], list[Any]], Any, JobState]:
    """Search the lines for a job that is in none of the sets. Yields keys and arguments of `seek`, takes its replies.

    Where it is met, it was at that instant. Twice, because a job that is put in front of the pages read last (from one
    line into the other, or to the running end again) is not met by one search.
    """
    for _ in range(2):
        for line in (keys.wait, keys.paused):
            passed = 0
            while passed >= 0:
                state, passed = yield [keys.job(job_id), line], [keys.base, job_id, passed]
                if state:
                    return JobState(state.decode())
    return JobState.UNKNOWN

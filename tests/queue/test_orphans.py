"""The search for orphans beside lines that are too long for one look: what is orphaned goes, what lives never does.

Moves are made between two given calls of the search, for each pair of calls: that is where a race would be. The line
has ids without jobs, which is enough for whoever only reads ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bullpen.errors import JobStateConflict
from bullpen.queue import Queue
from bullpen.queue.orphans import remove_orphans
from tests.queue._kit import Kit

LONG = 16_000
"""More than a script looks through at once, also after some were taken; four pages of the search."""
X = "live"
CALLS = 8
"""Of the search: mark, active, four pages of the line, its running end again, verdict."""


class Between:
    """Send what the search sends, and do something before the call of a given number, counted from the first mark."""

    def __init__(
        self, queue: Queue, number: int, move: Callable[[], Any], *, hide: Callable[[], Any], show: Any
    ) -> None:
        self._actions = queue._ready()
        self._number, self._move, self._hide, self._show = number, move, hide, show
        self.marks = self.calls = 0

    async def evaluate(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any:
        if script == "remove_orphans":
            self.marks += 1
            if self.marks == 1:
                self._show()
        if self.marks:
            self._count()
        return await self._actions.evaluate(script, keys, args)

    async def command(self, *command: str | bytes | int) -> Any:
        if command[0] == "LLEN" and not self.marks:
            self._hide()  # from the first look, so that it becomes a suspect
        if self.marks:
            self._count()
        return await self._actions.command(*command)

    async def commands(self, commands: list[tuple[str | bytes | int, ...]]) -> list[Any]:
        return await self._actions.commands(commands)

    def _count(self) -> None:
        if self.calls == self._number:
            self._move()
        self.calls += 1


def long_line(kit: Kit, length: int = LONG) -> None:
    kit.redis.lpush(f"{kit.base}wait", *(f"id-{number}" for number in range(length)))
    kit.seed(X, to=None)


def put_in_the_middle(kit: Kit, place: int = LONG // 2) -> None:
    kit.redis.linsert(f"{kit.base}wait", "AFTER", f"id-{place}", X)


def leave(kit: Kit) -> None:
    assert kit.redis.lrem(f"{kit.base}wait", 0, X) == 1


def run_once(kit: Kit) -> None:
    """Taken and put back to the running end, with the traces that every client leaves."""
    leave(kit)
    kit.redis.hset(f"{kit.base}{X}", "processedOn", 5)
    kit.redis.hincrby(f"{kit.base}{X}", "ats", 1)
    put_in_the_middle(kit, 10)


def deferred(kit: Kit) -> None:
    """Out of the line into a set: seen there."""
    leave(kit)
    kit.redis.zadd(f"{kit.base}delayed", {X: 2.0**52})


def taken(kit: Kit) -> None:
    leave(kit)
    kit.redis.lpush(f"{kit.base}active", X)
    kit.redis.set(f"{kit.base}{X}:lock", "token", px=60_000)


def requeued_left(kit: Kit) -> None:
    """Another client gives it the priority it has: nothing in the hash tells."""
    leave(kit)
    kit.redis.lpush(f"{kit.base}wait", X)


def requeued_right(kit: Kit) -> None:
    """The same with `lifo`, and others come to stand before it."""
    leave(kit)
    kit.redis.rpush(f"{kit.base}wait", X, *(f"more-{number}" for number in range(1_500)))


def consumed(kit: Kit) -> None:
    """Workers take most of what stands before it, and so all that the search read last."""
    kit.command("LTRIM", f"{kit.base}wait", 0, LONG - 5_500)


def given_back(kit: Kit) -> None:
    """Many are put in at the running end."""
    kit.redis.rpush(f"{kit.base}wait", *(f"more-{number}" for number in range(3_000)))


def renamed(kit: Kit) -> None:
    """An older client pauses."""
    kit.redis.rename(f"{kit.base}wait", f"{kit.base}paused")


def added_anew(kit: Kit) -> None:
    leave(kit)
    kit.redis.delete(f"{kit.base}{X}")
    kit.seed(X, to=None)
    put_in_the_middle(kit, 10)


MOVES = (run_once, deferred, taken, requeued_left, requeued_right, consumed, given_back, renamed, added_anew)


async def search(kit: Kit, queue: Queue, number: int, move: Callable[[], Any]) -> tuple[int, Between]:
    """One search, with a move before the call of that number. The live job is a suspect: the first look misses it."""
    between = Between(queue, number, move, hide=lambda: kit.redis.lrem(f"{kit.base}wait", 0, X), show=lambda: show(kit))
    # Not a QueueActions, but all of it that the search uses.
    removed = await remove_orphans(between, queue.keys, clock_offset_ms=0, and_ours=False)  # type: ignore[arg-type]
    return removed, between


def show(kit: Kit) -> None:
    kit.redis.lrem(f"{kit.base}wait", 0, X)
    put_in_the_middle(kit)


@pytest.mark.requirement("X-128", "W-64")
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
async def test_a_job_that_moves_during_the_search_is_not_lost(kit: Kit, move: Callable[[Kit], Any]) -> None:
    queue = kit.queue()
    for number in range(CALLS):
        long_line(kit)
        kit.seed("orphan", to=None)

        try:
            removed, between = await search(kit, queue, number, lambda: move(kit))
        except JobStateConflict:
            assert move is renamed
        else:
            assert removed == 1
            assert between.marks >= 2
            assert between.calls > number or move is consumed  # a shorter line needs fewer
            assert not kit.has("orphan")
        assert kit.has(X), f"lost when moved before call {number}"
        assert "bporphan" not in kit.fields(X)
        kit.redis.flushall()


@pytest.mark.many
@pytest.mark.requirement("X-128")
async def test_a_job_that_stays_where_it_is_is_acquitted_wherever_it_stands(kit: Kit) -> None:
    queue = kit.queue()
    for place in (2_000, LONG - 5_001, LONG - 5_000, LONG - 4_999, LONG // 2, LONG - 2_000):
        long_line(kit)

        between = Between(
            queue,
            -1,
            lambda: None,
            hide=lambda: kit.redis.lrem(f"{kit.base}wait", 0, X),
            show=lambda place=place: put_in_the_middle(kit, place),
        )
        assert await remove_orphans(between, queue.keys, clock_offset_ms=0, and_ours=False) == 0  # type: ignore[arg-type]

        assert between.marks == 1  # it was a suspect, and nobody was left to be judged
        assert kit.has(X)
        kit.redis.flushall()


@pytest.mark.many
@pytest.mark.requirement("X-128")
@pytest.mark.parametrize("taken", [1_500, 6_000])
async def test_a_line_that_moves_on_draws_no_job_past_the_search(kit: Kit, taken: int) -> None:
    """Workers take from the running end, so what was not read yet comes to stand where was read already."""
    queue = kit.queue()
    for number in range(5, 8):
        long_line(kit, 28_000)

        between = Between(
            queue,
            number,
            lambda: kit.command("RPOP", f"{kit.base}wait", taken),
            hide=lambda: kit.redis.lrem(f"{kit.base}wait", 0, X),
            # Next in the page before which the line moves; what is read again in the end does not reach it.
            show=lambda number=number: put_in_the_middle(kit, (number - 2) * 5_000 + 100),
        )
        assert await remove_orphans(between, queue.keys, clock_offset_ms=0, and_ours=False) == 0  # type: ignore[arg-type]

        assert kit.has(X), f"lost when the line moved before call {number}"
        kit.redis.flushall()


@pytest.mark.many
@pytest.mark.requirement("X-128")
async def test_orphans_beside_a_long_line_go_with_all_that_is_theirs(kit: Kit) -> None:
    queue = kit.queue()
    long_line(kit)
    put_in_the_middle(kit)
    kit.redis.lpush(f"{kit.base}active", *(f"running-{number}" for number in range(LONG)))
    for number in range(450):  # more than one step
        kit.seed(f"orphan-{number}", to=None)
    kit.redis.rpush(f"{kit.base}orphan-7:logs", "line")
    kit.seed("held", to=None)
    kit.redis.set(f"{kit.base}held:lock", "token", px=60_000)
    kit.seed("paused-too", to="failed", score=1)

    removed = await queue.remove_orphans(restorable=True)

    assert removed >= 450
    assert {key.decode().removeprefix(kit.base) for key in kit.redis.scan_iter(f"{kit.base}*", _type="hash")} == {
        *(X, "held", "paused-too", "meta")
    }
    assert not kit.has("orphan-7:logs")
    assert await queue.remove_orphans(restorable=True) == 0
    kit.redis.flushall()


@pytest.mark.requirement("X-128")
async def test_two_lines_at_once_are_not_judged_and_the_message_says_what_to_do(kit: Kit) -> None:
    """Older clients move jobs from one to the other; while both have jobs, one might be passed over between them."""
    long_line(kit)
    put_in_the_middle(kit)
    kit.seed("orphan", to=None)
    kit.redis.lpush(f"{kit.base}paused", "old")

    with pytest.raises(
        JobStateConflict, match=r"0 orphans were removed, but 1 jobs .* were kept: .* resume the queue first"
    ):
        await kit.queue().remove_orphans(restorable=True)
    assert "bporphan" not in kit.fields("orphan")
    await kit.queue().resume()

    assert await kit.queue().remove_orphans(restorable=True) == 1
    kit.redis.flushall()


@pytest.mark.requirement("X-128")
async def test_an_interrupted_search_is_simply_made_again(kit: Kit) -> None:
    """It leaves marks, which mean nothing to the next one."""
    queue = kit.queue()
    long_line(kit)
    kit.seed("orphan", to=None)

    def die() -> None:
        raise RuntimeError("the process ends here")

    for number in (3, 5, 7):
        with pytest.raises(RuntimeError, match="ends here"):
            await search(kit, queue, number, die)
        assert kit.has("orphan")
    assert "bporphan" in kit.fields("orphan")

    assert (await search(kit, queue, -1, lambda: None))[0] == 1

    assert kit.has(X)
    kit.redis.flushall()


@pytest.mark.requirement("X-128")
async def test_a_mark_that_is_repeated_late_does_not_hide_that_a_job_moved(kit: Kit) -> None:
    """The reply of the first call was lost, the second one was answered, and the server gets to the first only then."""
    queue, sent = kit.queue(), list[tuple[Any, ...]]()
    long_line(kit)

    class Late(Between):
        async def evaluate(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any:
            if script == "remove_orphans":
                sent.append((script, keys, args))
                if len(sent) == 2:
                    kit.redis.hset(f"{kit.base}{X}", "processedOn", 5)
                    put_in_the_middle(kit)
                    await self._actions.evaluate(*sent[0])
            return await super().evaluate(script, keys, args)

    # It runs meanwhile, and comes back when the search has passed.
    late = Late(queue, -1, lambda: None, hide=lambda: kit.redis.lrem(f"{kit.base}wait", 0, X), show=lambda: hidden(kit))
    assert await remove_orphans(late, queue.keys, clock_offset_ms=0, and_ours=False) == 0  # type: ignore[arg-type]

    assert len(sent) == 2
    assert kit.has(X)
    kit.redis.flushall()


def hidden(kit: Kit) -> None:
    """Where the search does not look, as if the job had passed by it."""
    kit.redis.lrem(f"{kit.base}wait", 0, X)

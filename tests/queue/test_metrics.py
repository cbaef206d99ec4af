"""Figures per minute, kept in the keys that every BullMQ client and dashboard reads."""

from __future__ import annotations

from typing import Any

from bullpen.errors import PermanentError
from bullpen.queue import Job
from tests.queue._kit import Kit, nothing

MINUTE_MS = 60_000


def stored(kit: Kit, kind: str = "completed") -> tuple[dict[str, int], list[int]]:
    flat: Any = kit.redis.hgetall(f"{kit.base}metrics:{kind}")
    points: Any = kit.redis.lrange(f"{kit.base}metrics:{kind}:data", 0, -1)
    return {name.decode(): int(value) for name, value in flat.items()}, [int(point) for point in points]


TODAY = 1_800_000_000_000 // MINUTE_MS


async def finish(kit: Kit, count: int, *, minute: int, **options: Any) -> None:
    """Let so many jobs finish in the n-th minute of a certain day, in as few calls as possible."""
    offset_ms = (TODAY + minute) * MINUTE_MS + 10_000 - kit.server_ms()
    await kit.queue().add_many(("n", n) for n in range(count))
    await kit.drain(nothing, count, concurrency=count, clock_offset_ms=offset_ms, **options)


async def test_without_the_option_nothing_is_counted(kit: Kit) -> None:
    """Two commands per call that nobody asked for."""
    await finish(kit, 2, minute=0)

    assert stored(kit) == ({}, [])


async def test_a_minute_appears_when_a_later_one_begins(kit: Kit) -> None:
    """The head of the list is the newest closed minute; quiet minutes are zeros; a batch counts in full."""
    await finish(kit, 3, minute=0, metrics_minutes=100)
    first = stored(kit)
    await finish(kit, 2, minute=1, metrics_minutes=100)
    second = stored(kit)
    await finish(kit, 1, minute=4, metrics_minutes=100)
    third = stored(kit)

    assert (first[0]["count"], first[0]["prevCount"], first[1]) == (3, 0, [])
    assert (second[0]["count"], second[1]) == (5, [3])
    assert (third[0]["count"], third[1]) == (6, [0, 0, 2, 3])
    assert third[0]["prevCount"] == 5


async def test_so_many_minutes_are_kept(kit: Kit) -> None:
    """A week of silence must not become ten thousand zeros."""
    await finish(kit, 1, minute=0, metrics_minutes=5)

    await finish(kit, 1, minute=10_000, metrics_minutes=5)

    assert stored(kit)[1] == [0, 0, 0, 0, 1]


async def test_failures_have_their_own_figures(kit: Kit) -> None:
    """A failed attempt that is retried is no failure yet."""

    async def fail(job: Job) -> None:
        if job.name == "bad":
            raise PermanentError("no")
        if job.attempts_made == 0:
            raise RuntimeError("again")

    await kit.queue(attempts=2, backoff={"type": "fixed", "delay": 1}).add_many([("bad", None), ("retried", None)])

    await kit.drain(fail, 2, metrics_minutes=10)

    assert stored(kit, "failed")[0]["count"] == 1
    assert stored(kit, "completed")[0]["count"] == 1
    metrics = await kit.queue().metrics("failed")
    assert metrics.count == 1

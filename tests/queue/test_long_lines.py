"""One job in a line of very many: found, moved and removed without a search through all of it, wherever it stands.

The lines are longer than what a script looks through at once. Most stand in the order of their creation, and there a
job is found by halving; those that do not, and those whose neighbours moved meanwhile, must be found all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bullpen import sync
from bullpen.queue import Added, Job, JobState, NewJob, Queue
from bullpen.queue.lists import seeking, walk_line
from tests.queue._kit import Kit

LONG = 24_000
MIDDLE = LONG // 2
_SEED = """
for number = 1, tonumber(ARGV[2]) do
  local id = ARGV[3] .. number
  redis.call("HSET", ARGV[1] .. id, "name", "job", "data", "{}", "opts", "{}", "delay", 0, "priority", 0,
    "timestamp", 1000 + math.floor(number / 300))
  redis.call("LPUSH", ARGV[1] .. ARGV[4], id)
end
redis.call("HSET", ARGV[1] .. "meta", "opts.maxLenEvents", 10000)
redis.call("ZADD", ARGV[1] .. "marker", 0, "0")
"""


def seed(kit: Kit, *, to: str = "wait", id_start: str = "", queue: str | None = None) -> None:
    """A line in order of creation, three hundred of each instant."""
    kit.command("EVAL", _SEED, 0, f"bull:{queue or kit.name}:", LONG, id_start, to)


@pytest.fixture
def long(kit: Kit) -> Iterator[Kit]:
    """A kit whose queue has a long line; it is gone before the structures are inspected, which would take a while."""
    seed(kit)
    yield kit
    kit.redis.flushall()


def misplace(kit: Kit, place: int = MIDDLE + 3_000) -> str:
    """A job that was retried or promoted stands in no order of creation."""
    kit.seed("odd", to=None, timestamp=1)
    kit.redis.linsert(f"{kit.base}wait", "BEFORE", str(place), "odd")
    return "odd"


class TestState:
    @pytest.mark.requirement("Q-22", "Q-65")
    @pytest.mark.parametrize("line", ["wait", "paused"])
    async def test_it_is_told_wherever_the_job_stands(self, kit: Kit, line: str) -> None:
        seed(kit, to=line)
        kit.redis.lpush(f"{kit.base}active", "running")
        kit.seed("running", to=None)
        queue = kit.queue()

        for number in (1, 2, 5_001, MIDDLE, LONG - 5_001, LONG):
            assert await queue.state_of(str(number)) is JobState.WAITING
        assert await queue.state_of("running") is JobState.ACTIVE
        kit.redis.flushall()

    @pytest.mark.requirement("Q-22", "Q-65")
    async def test_a_job_in_order_is_found_with_one_call(self, long: Kit) -> None:
        """Also with ids that are no numbers, and hundreds of one instant."""
        seed(long, queue=f"{long.name}-named", id_start="order-")
        queue, named = long.queue(), long.queue(f"{long.name}-named")
        await queue.counts(), await named.counts()
        long.reset_statistics()

        assert await queue.state_of(str(MIDDLE + 7)) is JobState.WAITING
        assert await named.state_of(f"order-{MIDDLE + 7}") is JobState.WAITING

        assert long.script_calls() <= 4  # one each, and one more for a script that the server did not know

    @pytest.mark.requirement("Q-22", "Q-65")
    async def test_a_job_out_of_order_is_searched_and_one_that_nothing_lists_is_unknown(self, long: Kit) -> None:
        long.seed("orphan", to=None)
        misplace(long)
        blocking = sync.Queue(long.name, connection=long.url)

        for state_of in (long.queue().state_of, blocking.state_of):
            found: dict[str, Any] = {job_id: state_of(job_id) for job_id in ("odd", "orphan")}
            for job_id, answer in found.items():
                found[job_id] = answer if isinstance(answer, JobState) else await answer
            assert found == {"odd": JobState.WAITING, "orphan": JobState.UNKNOWN}
        blocking.close()

    @pytest.mark.requirement("Q-22")
    async def test_a_job_that_leaves_during_the_search_is_found_where_it_went(self, long: Kit) -> None:
        moves: dict[str, Callable[[], Any]] = {
            "delayed": lambda: long.redis.zadd(f"{long.base}delayed", {"odd": 2.0**52}),
            "active": lambda: long.redis.lpush(f"{long.base}active", "odd"),
            "unknown": lambda: long.redis.delete(f"{long.base}odd"),
        }
        for state, move in moves.items():
            for calls_before in range(3):
                misplace(long)
                search = seeking(long.queue().keys, "odd")
                call = next(search)
                for _ in range(calls_before):
                    call = search.send([b"", 0])  # a page in vain
                long.redis.lrem(f"{long.base}wait", 0, "odd")
                move()

                with pytest.raises(StopIteration) as end:
                    search.send(await long.queue()._ready().evaluate("seek", *call))

                assert end.value.value == state
                long.redis.delete(f"{long.base}delayed", f"{long.base}active")

    @pytest.mark.requirement("Q-14")
    async def test_an_add_with_a_taken_id_does_not_search_the_line(self, long: Kit) -> None:
        """Hundreds of them in one call would: by elimination they wait."""
        misplace(long)
        long.redis.zadd(f"{long.base}delayed", {"later": 2.0**52})
        long.seed("later", to=None)

        jobs = await long.queue().add_many([NewJob("job", None, {"job_id": job_id}) for job_id in ("odd", "later")])

        assert [job.added for job in jobs] == [Added.DUPLICATE] * 2
        assert [job.blocked_by and job.blocked_by.state for job in jobs] == ["waiting", "delayed"]


class TestChanges:
    @pytest.mark.requirement("Q-40", "Q-65")
    async def test_a_job_leaves_the_line_from_wherever_it_stands(self, long: Kit) -> None:
        queue = long.queue()
        misplace(long)
        order = long.ids("wait")
        for job_id in ("3", str(MIDDLE - 9), str(LONG - 5_500), str(LONG), "odd"):
            neighbour = order[order.index(job_id) - 2]
            order = [one for one in order if one not in (job_id, neighbour)]

            await queue.change_priority(job_id, 5)
            assert await queue.remove(neighbour)

            assert long.ids("wait") == order
            assert list(long.zset("prioritized")) == [job_id]
            assert await queue.remove(job_id)
            assert not await queue.remove(job_id)

    @pytest.mark.requirement("Q-40")
    async def test_a_new_priority_of_a_job_that_does_not_wait_leaves_the_line_alone(self, long: Kit) -> None:
        long.seed("done", to="completed", score=1)
        long.redis.lpush(f"{long.base}active", "running")
        long.seed("running", to=None)
        order = long.ids("wait")

        for job_id in ("done", "running"):
            await long.queue().change_priority(job_id, 5)

        assert [long.fields(job_id)["priority"] for job_id in ("done", "running")] == ["5", "5"]
        assert long.ids("wait") == order
        assert not long.zset("prioritized")

    @pytest.mark.requirement("X-5")
    async def test_a_dead_letter_is_discarded_from_the_middle(self, kit: Kit) -> None:
        seed(kit, queue=f"{kit.name}-dlq", id_start="dl-")
        queue = kit.queue()

        assert await queue.dead_letters.discard(f"dl-{MIDDLE}")
        assert not await queue.dead_letters.discard(f"dl-{MIDDLE}")

        assert await queue.dead_letters.depth() == LONG - 1
        kit.redis.flushall()


class TestWalks:
    """`iter_jobs` looks for its place in every page: the reader may be slow, and much may happen meanwhile."""

    @staticmethod
    async def walk(queue: Queue, at: int, move: Callable[[], Any], *, newest_first: bool = False) -> list[str]:
        met = list[bytes]()
        walk = walk_line(queue._ready(), queue.keys.base, queue.keys.wait, per_page=500, newest_first=newest_first)
        async for ids in walk:
            met += ids
            if len(met) == at:
                move()
        return [raw.decode() for raw in met]

    @pytest.mark.requirement("Q-31")
    @pytest.mark.parametrize("gone", [1_000, 4_500, 9_000])
    async def test_many_that_were_taken_hide_none_that_stay(self, long: Kit, gone: int) -> None:
        met = await self.walk(long.queue(), 12_000, lambda: long.command("RPOP", f"{long.base}wait", gone))

        assert met == [str(number) for number in range(1, LONG + 1)]

    @pytest.mark.requirement("Q-31")
    async def test_when_all_that_was_read_is_gone_it_goes_on_with_what_is_next(self, long: Kit) -> None:
        met = await self.walk(long.queue(), 12_000, lambda: long.command("RPOP", f"{long.base}wait", 13_000))

        assert met == [str(number) for number in (*range(1, 12_001), *range(13_001, LONG + 1))]

    @pytest.mark.requirement("Q-31")
    async def test_many_new_ones_are_not_met_and_hide_none(self, long: Kit) -> None:
        def add() -> None:
            long.redis.lpush(f"{long.base}wait", *(f"new-{number}" for number in range(8_000)))

        met = await self.walk(long.queue(), 12_000, add, newest_first=True)

        assert met == [str(number) for number in range(LONG, 0, -1)]

    @pytest.mark.requirement("Q-31")
    async def test_one_that_jumped_to_the_far_end_does_not_draw_the_reader_along(self, long: Kit) -> None:
        """Of the ids read last only neighbours tell the place."""

        def jump() -> None:
            long.redis.lrem(f"{long.base}wait", 1, str(LONG - 2_000))
            long.redis.lpush(f"{long.base}wait", str(LONG - 2_000))

        met = await self.walk(long.queue(), LONG - 2_000, jump)

        assert set(met) == {str(number) for number in range(1, LONG + 1)}


@pytest.mark.requirement("W-64")
async def test_a_job_read_in_a_long_line_is_complete(long: Kit) -> None:
    """Its state costs another call; its fields do not wait for that."""
    misplace(long)

    job = await long.queue().get_job("odd")

    assert isinstance(job, Job)
    assert job.name == "foreign"
    assert await job.state() is JobState.WAITING

"""Jobs of others that carry a parent, a deduplication id or a scheduler are settled with all that belongs to them.

Stored as Node stores them; `tests/interop` does the same with a living Node.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from bullpen.errors import PermanentError, WaitForChildren
from bullpen.queue import Job
from tests.queue._kit import Failing, Gate, Kit, echo, nothing

FAR = 9e15
"""A due time in 2039, as a score of `delayed`."""


async def fail(job: Job) -> None:
    raise PermanentError("no")


class Family:
    """A parent that waits, and children in the same queue."""

    def __init__(self, kit: Kit, *, policy: str | None = None, **parent: Any) -> None:
        self.kit = kit
        self.key = f"{kit.base}parent"
        self._policy = policy
        kit.seed("parent", to="waiting-children", score=1, **parent)
        kit.redis.delete(kit.base + "marker")

    def child(self, name: str, **fields: Any) -> str:
        link: dict[str, Any] = {"id": "parent", "queueKey": self.kit.base[:-1]}
        if self._policy:
            link[self._policy] = True
        self.kit.seed(name, parentKey=self.key, parent=json.dumps(link), **fields)
        key = self.kit.base + name
        self.kit.redis.sadd(f"{self.key}:dependencies", key)
        return key

    def pending(self) -> set[str]:
        found: Any = self.kit.redis.smembers(f"{self.key}:dependencies")
        return {raw.decode() for raw in found}

    def stored(self, suffix: str) -> dict[str, str]:
        flat: Any = self.kit.redis.hgetall(f"{self.key}:{suffix}")
        return {name.decode(): value.decode() for name, value in flat.items()}


class TestParents:
    async def test_the_last_child_releases_its_parent(self, kit: Kit) -> None:
        """Its value is stored with the parent first, so the parent's run sees all of them."""
        family = Family(kit)
        first, second = family.child("c1", data="1"), family.child("c2", data="2")

        told = await kit.drain(echo, 3)

        assert told.ids("active") == ["c1", "c2", "parent"]
        assert family.stored("processed") == {first: "1", second: "2"}
        assert {"event": "waiting", "jobId": "parent", "prev": "waiting-children"} in kit.events()

    async def test_two_children_of_one_call_are_both_counted(self, kit: Kit) -> None:
        """They end together; the test for "none pending" must come after both, and the parent goes once."""
        family = Family(kit)
        for name in ("c1", "c2", "c3"):
            family.child(name)
        gate = Gate()

        async def together(job: Job) -> None:
            if job.id != "parent":
                await gate(job)

        told = await kit.work(together, concurrency=5)
        await gate.reached(3)
        gate.open()
        await told.finished(4)

        assert told.ids("active").count("parent") == 1
        assert len(family.stored("processed")) == 3

    async def test_a_released_parent_goes_to_the_front_or_to_its_class_or_waits_for_its_delay(self, kit: Kit) -> None:
        """As the protocol says: right of wait, its priority, or `delayed`."""
        places: list[tuple[dict[str, Any], str]] = [
            ({}, "wait"),
            ({"priority": 4}, "prioritized"),
            ({"delay": 60_000}, "delayed"),
        ]
        for fields, place in places:
            kit.redis.flushdb()
            family = Family(kit, policy=None, **fields)
            family.child("c1")
            kit.seed("last", to="delayed", score=FAR)
            told = await kit.work(nothing)
            await told.wait("completed")
            if place == "delayed":
                assert kit.zset("delayed")["parent"] / 4096 > kit.server_ms() + 50_000
            else:
                await told.finished(2)
                assert told.ids("completed") == ["c1", "parent"]
            await told.worker.close()

    @pytest.mark.parametrize("policy", [None, "fpof", "cpof", "idof", "rdof"])
    async def test_a_failed_child_acts_by_its_policy(self, kit: Kit, policy: str | None) -> None:
        """None: the parent waits on. fpof: it fails. cpof: it runs at once. idof, rdof: counted out."""
        family = Family(kit, policy=policy)
        bad = family.child("bad")
        other = f"{kit.base}other"
        kit.seed("other", to="delayed", score=FAR)
        kit.redis.sadd(f"{family.key}:dependencies", other)

        await kit.drain(fail, 2 if policy == "fpof" else 1)

        waits = "parent" in kit.zset("waiting-children")
        if policy is None:
            assert waits and family.pending() == {bad, other}
        elif policy == "fpof":
            assert kit.fields("parent")["failedReason"] == f"child {bad} failed"
            assert set(kit.zset("failed")) == {"bad", "parent"}
            assert [raw.decode() for raw in kit.command("ZRANGE", f"{family.key}:unsuccessful", 0, -1)] == [bad]
        elif policy == "cpof":
            assert not waits  # it runs although another child is pending
            assert family.stored("failed") == {bad: "no"}
        else:
            assert waits and family.pending() == {other}
            assert family.stored("failed") == ({bad: "no"} if policy == "idof" else {})

    async def test_a_failed_child_that_is_removed_counts_out(self, kit: Kit) -> None:
        """removeOnFail without a policy: nobody could ever retry it, so the parent must not wait for it."""
        family = Family(kit)
        family.child("bad", opts='{"removeOnFail": true}')

        async def handle(job: Job) -> None:
            if job.id == "bad":
                raise PermanentError("no")

        told = await kit.drain(handle, 2)

        assert told.ids("completed") == ["parent"]

    async def test_a_parent_with_failed_children_cannot_complete(self, kit: Kit) -> None:
        """It was told before it ran; returning a value anyway does not make it whole."""
        kit.seed("parent", opts='{"attempts": 5}')
        kit.redis.zadd(f"{kit.base}parent:unsuccessful", {f"{kit.base}kid": 1})

        told = await kit.drain(nothing, 1)

        assert told.of("failed")[0][1] == "has failed children"
        assert kit.fields("parent")["atm"] == "1"

    async def test_waiting_with_failed_children_fails_too(self, kit: Kit) -> None:
        """There is nothing left to wait for."""
        kit.seed("parent", opts='{"attempts": 5}')
        kit.redis.zadd(f"{kit.base}parent:unsuccessful", {f"{kit.base}kid": 1})
        kit.redis.sadd(f"{kit.base}parent:dependencies", f"{kit.base}other")

        told = await kit.drain(Failing(WaitForChildren()), 1)

        assert told.ids("failed") == ["parent"]

    async def test_a_parent_that_is_gone_harms_no_child(self, kit: Kit) -> None:
        """Removed by hand or evicted; the child's own outcome still counts."""
        family = Family(kit, policy="fpof")
        family.child("c1")
        kit.redis.delete(family.key, f"{family.key}:dependencies", kit.base + "waiting-children")

        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == ["c1"]
        assert not kit.redis.exists(f"{family.key}:processed", f"{family.key}:unsuccessful")

    @pytest.mark.parametrize("link", ["no json", "[]", "null", '{"fpof": "yes"}'])
    async def test_a_broken_link_harms_no_child(self, kit: Kit, link: str) -> None:
        """The policy cannot be read, so there is none; the failure is written all the same."""
        kit.seed("parent", to="waiting-children", score=1)
        kit.seed("bad", parentKey=f"{kit.base}parent", parent=link)
        kit.redis.sadd(f"{kit.base}parent:dependencies", f"{kit.base}bad")

        told = await kit.work(fail)
        await told.wait("failed")
        await told.worker.close()

        assert "bad" in kit.zset("failed")
        assert kit.ids("active") == []

    async def test_a_paused_parents_queue_is_not_woken(self, kit: Kit) -> None:
        """The parent is released, but nobody may be called to a queue that is paused."""
        family = Family(kit)
        family.child("c1")
        parents = "bull:others:"
        kit.redis.hset(parents + "p", mapping={"name": "p", "data": "{}", "opts": "{}", "priority": 0, "delay": 0})
        kit.redis.zadd(parents + "waiting-children", {"p": 1})
        kit.redis.hset(parents + "meta", mapping={"paused": 1, "opts.maxLenEvents": 100})
        kit.redis.sadd(parents + "p:dependencies", f"{kit.base}c2")
        kit.seed("c2", parentKey=parents + "p", parent=json.dumps({"id": "p", "queueKey": "bull:others"}))

        await kit.drain(nothing, 3)

        assert kit.redis.lrange(parents + "wait", 0, -1) == [b"p"]
        assert not kit.redis.exists(parents + "marker")


class TestDeduplication:
    def owner(self, kit: Kit, **fields: Any) -> None:
        kit.seed("owner", deid="d", **fields)
        kit.redis.set(kit.base + "de:d", "owner")

    @pytest.mark.parametrize("handler", [nothing, fail], ids=["completed", "failed"])
    async def test_the_end_of_its_owner_frees_the_id(self, kit: Kit, handler: Any) -> None:
        """Left behind it would block that id for ever."""
        self.owner(kit)

        await kit.drain(handler, 1)

        assert not kit.has("de:d")

    async def test_an_id_with_a_time_to_live_keeps_it(self, kit: Kit) -> None:
        """Throttling outlives the job on purpose."""
        self.owner(kit)
        kit.redis.pexpire(kit.base + "de:d", 60_000)

        await kit.drain(nothing, 1)

        assert 0 < int(kit.command("PTTL", kit.base + "de:d")) <= 60_000

    async def test_an_id_that_somebody_else_owns_is_left_alone(self, kit: Kit) -> None:
        """Replaced meanwhile: only the owner may free it."""
        self.owner(kit)
        kit.seed("newer", deid="d", to="delayed", score=FAR)
        kit.redis.set(kit.base + "de:d", "newer")

        await kit.drain(nothing, 1)

        assert kit.redis.get(kit.base + "de:d") == b"newer"

    @pytest.mark.parametrize(
        ("opts", "place"), [("{}", "wait"), ('{"priority": 3}', "prioritized"), ('{"delay": 60000}', "delayed")]
    )
    async def test_the_stored_follow_up_is_created_by_the_settle(self, kit: Kit, opts: str, place: str) -> None:
        """In the same script, or a crash in between would lose the last request."""
        self.owner(kit)
        kit.redis.set(kit.base + "id", 7)
        stored = json.dumps({**json.loads(opts), "de": {"id": "d", "keepLastIfActive": True}})
        kit.redis.hset(kit.base + "dn:d", mapping={"name": "next", "data": '{"v":3}', "opts": stored})
        told = await kit.work(nothing)
        await told.wait("completed")
        if place != "delayed":
            await told.finished(2)

        assert (kit.fields("8")["name"], kit.fields("8")["data"], kit.fields("8")["deid"]) == ("next", '{"v":3}', "d")
        assert not kit.has("dn:d")
        assert (kit.redis.get(kit.base + "de:d") == b"8") is (place == "delayed")
        names = [(event["event"], event.get("jobId")) for event in kit.events()]
        assert names.index(("added", "8")) < names.index(("completed", "owner"))

    async def test_a_follow_up_whose_own_id_is_taken_gets_a_number(self, kit: Kit) -> None:
        """A kept job has that id; overwriting it would put one id into two states."""
        self.owner(kit)
        kit.seed("mine", to="completed", score=1, returnvalue='"kept"')
        kit.redis.hset(kit.base + "dn:d", mapping={"name": "next", "data": "{}", "opts": "{}", "jid": "mine"})

        told = await kit.drain(nothing, 2)

        assert kit.fields("mine")["returnvalue"] == '"kept"'
        assert told.ids("completed") == ["owner", "1"]

    async def test_a_broken_follow_up_loses_neither_job(self, kit: Kit) -> None:
        """Options that nobody can read are none."""
        self.owner(kit)
        kit.redis.hset(kit.base + "dn:d", mapping={"name": "next", "data": "{}", "opts": "no json"})

        told = await kit.drain(nothing, 2)

        assert len(told.of("completed")) == 2
        assert kit.ids("active") == []


class TestSchedulers:
    def scheduler(self, kit: Kit, **record: Any) -> str:
        slot = kit.server_ms()
        job_id = f"repeat:hb:{slot}"
        kit.redis.zadd(kit.base + "repeat", {"hb": slot})
        stored: Any = {"name": "beat", "ic": 1, "data": '{"x":1}', **record}
        kit.redis.hset(kit.base + "repeat:hb", mapping=stored)
        opts = {"attempts": 2, "repeat": {"count": 1}, "jobId": job_id, "repeatJobKey": "hb"}
        kit.seed(job_id, rjk="hb", opts=json.dumps(opts))
        kit.redis.set(kit.base + "id", 1)
        return job_id

    async def test_taking_an_iteration_stores_the_next_before_it_runs(self, kit: Kit) -> None:
        """Whatever becomes of this run, the chain goes on."""
        job_id = self.scheduler(kit, every=60_000)
        slot = int(job_id.rpartition(":")[2])
        seen: list[dict[str, float]] = []

        async def look(job: Job) -> None:
            seen.append(kit.zset("delayed"))

        await kit.drain(look, 1)

        following = f"repeat:hb:{slot + 60_000}"
        assert seen == [{following: (slot + 60_000) * 4096}]
        stored = kit.fields(following)
        assert (stored["name"], stored["data"], stored["rjk"]) == ("beat", '{"x":1}', "hb")
        assert json.loads(stored["opts"])["repeat"]["count"] == 2
        assert kit.zset("repeat") == {"hb": slot + 60_000}
        assert kit.redis.hget(kit.base + "repeat:hb", "ic") == b"2"
        kit.redis.delete(kit.base + "repeat", kit.base + "repeat:hb")

    async def test_a_retry_of_an_iteration_does_not_advance_again(self, kit: Kit) -> None:
        """Only the iteration that the record names may."""
        self.scheduler(kit, every=60_000)

        await kit.drain(Failing(RuntimeError("again")), 1)

        assert len(kit.zset("delayed")) == 1
        assert kit.redis.hget(kit.base + "repeat:hb", "ic") == b"2"
        kit.redis.delete(kit.base + "repeat", kit.base + "repeat:hb")

    @pytest.mark.parametrize(
        "record",
        [{"every": 60_000, "limit": 1}, {"every": 60_000, "endDate": 1}],
        ids=str,
    )
    async def test_a_scheduler_that_is_over_lets_its_last_iteration_run(self, kit: Kit, record: dict[str, Any]) -> None:
        """The job itself is sound; Node would leave it active until it stalls."""
        job_id = self.scheduler(kit, **record)

        told = await kit.drain(nothing, 1)

        assert told.ids("completed") == [job_id]
        assert kit.zset("delayed") == {}
        kit.redis.delete(kit.base + "repeat", kit.base + "repeat:hb")

    async def test_missed_iterations_are_skipped(self, kit: Kit) -> None:
        """After a day of downtime there is one run, not 1440."""
        job_id = self.scheduler(kit, every=60_000, offset=0)
        slot = int(job_id.rpartition(":")[2])

        await kit.drain(nothing, 1, clock_offset_ms=86_400_000)

        [following] = kit.zset("delayed")
        assert int(following.rpartition(":")[2]) > slot + 86_000_000
        kit.redis.delete(kit.base + "repeat", kit.base + "repeat:hb")

    async def test_a_cron_pattern_tells_the_next_time(self, kit: Kit) -> None:
        """Computed by the client in the scheduler's zone, stored by the script."""
        self.scheduler(kit, pattern="0 3 * * *", tz="Europe/Paris")

        await kit.drain(nothing, 1)

        [following] = kit.zset("delayed")
        due = int(following.rpartition(":")[2])
        assert 0 < due - kit.server_ms() <= 86_400_000
        assert due % 3_600_000 == 0
        kit.redis.delete(kit.base + "repeat", kit.base + "repeat:hb")

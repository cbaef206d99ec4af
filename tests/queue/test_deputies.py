"""A tenant that may write its own queue cannot make our scripts write another's.

Scripts run with the rights of workers and operators, who may have both queues. What a job stores may name any key: a
parent, children, a deduplication id, a dead letter, a scheduler. Here a Redis user that is limited to queue A writes
such references to queue B, and whatever our clients then do with A, not a byte of B changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from bullpen._kernel.policy import DeadLetterPolicy as Policy
from bullpen.errors import JobStateConflict, PermanentError
from bullpen.queue import Deduplication, Flow, Job, JobKey, JobState, Queue
from bullpen.worker import Worker
from tests.queue._kit import Gate, Kit, nothing

pytestmark = [pytest.mark.requirement("Q-17")]

TENANT = "tenant_a"


class Tenant:
    """Somebody who may write queue A, and nothing else."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.a, self.b = kit.base, kit.base[:-1] + "-b:"
        self.b_name = kit.name + "-b"
        kit.command("ACL", "SETUSER", TENANT, "reset", "on", ">word", "+@all", f"~{self.a}*")
        at = kit.redis.connection_pool.connection_kwargs
        where = {"unix_socket_path": at["path"]} if "path" in at else {"host": at["host"], "port": at["port"]}
        self.redis = redis.Redis(**where, username=TENANT, password="word")

    def write_job(self, job_id: str, *, to: str = "wait", **fields: str) -> str:
        """A job of A as the tenant likes it, in a state of its choice."""
        stored: Any = {
            "name": "x",
            "data": "{}",
            "opts": "{}",
            "timestamp": "1",
            "delay": "0",
            "priority": "0",
            **fields,
        }
        self.redis.hset(self.a + job_id, mapping=stored)
        if to in ("wait", "active"):
            self.redis.lpush(self.a + to, job_id)
            self.redis.zadd(self.a + "marker", {"0": 0})
        else:
            self.redis.zadd(self.a + to, {job_id: 1})
        return self.a + job_id

    def everything_of_b(self) -> dict[bytes, Any]:
        return {key: self.kit.redis.dump(key) for key in sorted(self.kit.redis.scan_iter(self.b + "*"))}


@pytest.fixture
async def tenant(kit: Kit) -> Any:
    """Queue B has jobs in every state, a flow, a scheduler and a deduplication id."""
    made = Tenant(kit)
    b, client = made.b, kit.redis
    for state in ("wait", "completed", "failed", "delayed", "waiting-children"):
        job_id = f"b-{state}"
        client.hset(b + job_id, mapping={"name": "b", "data": '{"b":1}', "opts": "{}", "timestamp": "1", "delay": "0"})
        if state == "wait":
            client.lpush(b + state, job_id)
        else:
            client.zadd(b + state, {job_id: 4096 * 4_000_000_000_000})
    client.hset(b + "b-child", mapping={"name": "b", "data": "{}", "opts": "{}", "parentKey": b + "b-waiting-children"})
    client.lpush(b + "wait", "b-child")
    client.sadd(b + "b-waiting-children:dependencies", b + "b-child")
    client.zadd(b + "repeat", {"beat": 4_000_000_000_000})
    client.hset(b + "repeat:beat", mapping={"name": "beat", "ic": 1, "every": 60_000})
    client.set(b + "de:d", "b-wait")
    client.hset(b + "meta", mapping={"opts.maxLenEvents": 10_000, "version": "bullmq:5.0.0"})
    with pytest.raises(redis.exceptions.NoPermissionError):
        made.redis.set(b + "x", "y")

    yield made

    made.redis.close()
    kit.command("ACL", "DELUSER", TENANT)
    kit.redis.delete(*kit.redis.scan_iter(b + "*"))


async def unharmed(tenant: Tenant, act: Callable[[], Awaitable[Any]]) -> None:
    before = tenant.everything_of_b()
    assert len(before) > 10

    await act()

    assert tenant.everything_of_b() == before


def references(tenant: Tenant) -> Iterator[str]:
    """Keys of B, and beginnings that become one when a suffix is added."""
    yield from (tenant.b + f"b-{state}" for state in ("wait", "completed", "failed", "delayed", "waiting-children"))
    yield from (tenant.b + "wait", tenant.b + "failed", tenant.b + "meta", tenant.b[:-1], tenant.b)


async def refuse(job: Job) -> None:
    raise PermanentError("no")


class TestDeduplication:
    @pytest.mark.parametrize("key", ["wait", "paused", "failed", "b-waiting-children:dependencies", "new"])
    async def test_the_follow_up_of_a_deduplicated_job(self, kit: Kit, tenant: Tenant, key: str) -> None:
        for parent_key in (tenant.b + "b-waiting-children", tenant.b[:-1], tenant.a + "own"):
            tenant.write_job("owner", deid="d")
            tenant.redis.set(tenant.a + "de:d", "owner")
            stored: Any = {"name": "next", "data": "{}", "opts": "{}", "pk": parent_key, "pdk": tenant.b + key}
            tenant.redis.hset(tenant.a + "dn:d", mapping=stored)

            await unharmed(tenant, lambda: kit.drain(nothing, 2))

            assert kit.ids("wait") == [] and not kit.has("dn:d")
            await kit.queue().clean(0, state=JobState.COMPLETED)

    @pytest.mark.parametrize(
        "how",
        [{"replace": True}, {"ttl": 60_000, "extend": True}, {"reschedule": True}, {"keep_last_if_active": True}, {}],
        ids=str,
    )
    async def test_an_owner_that_the_tenant_made_up(self, kit: Kit, tenant: Tenant, how: dict[str, Any]) -> None:
        """Whoever adds looks at the owner of the id, and may remove it, put it elsewhere or keep its successor."""
        queue = kit.queue()
        for owner in (*references(tenant), f"../{tenant.b_name}:b-delayed", "b-delayed"):
            tenant.redis.set(tenant.a + "de:d", owner)
            tenant.redis.zadd(tenant.a + "delayed", {owner: 4096 * 4_000_000_000_000})
            tenant.redis.lpush(tenant.a + "active", owner)

            rule = Deduplication("d", **how)
            await unharmed(tenant, lambda rule=rule: queue.add("x", deduplication=rule, delay=60_000))  # type: ignore[misc]

            kit.redis.delete(*kit.redis.scan_iter(tenant.a + "*"))

    async def test_a_parent_of_the_same_queue_gets_the_follow_up_as_its_child(self, kit: Kit, tenant: Tenant) -> None:
        """So that it waits for the request that replaced the first one."""
        tenant.write_job("parent", to="waiting-children")
        tenant.write_job("owner", deid="d")
        tenant.redis.set(tenant.a + "de:d", "owner")
        parent_key = tenant.a + "parent"
        stored: Any = {
            "name": "next",
            "data": "{}",
            "opts": "{}",
            "pk": parent_key,
            "pdk": f"{parent_key}:dependencies",
        }
        tenant.redis.hset(tenant.a + "dn:d", mapping=stored)

        told = await kit.drain(nothing, 3)

        assert told.ids("completed")[-1] == "parent"

    async def test_a_waiting_parent_of_another_queue_without_children_gets_it_too(
        self, kit: Kit, tenant: Tenant
    ) -> None:
        """Nobody else would ever release it."""
        parent_key = tenant.b + "b-alone"
        kit.redis.hset(parent_key, mapping={"name": "b", "data": "{}", "opts": "{}"})
        kit.redis.zadd(tenant.b + "waiting-children", {"b-alone": 1})
        tenant.write_job("owner", deid="d")
        tenant.redis.set(tenant.a + "de:d", "owner")
        stored: Any = {
            "name": "next",
            "data": "{}",
            "opts": "{}",
            "pk": parent_key,
            "pdk": f"{parent_key}:dependencies",
        }
        tenant.redis.hset(tenant.a + "dn:d", mapping=stored)

        await kit.drain(nothing, 2)

        assert kit.redis.lrange(tenant.b + "wait", -1, -1) == [b"b-alone"]

    @pytest.mark.parametrize("opts", ['{"delay":1e999}', '{"de":{"ttl":1e999}}', '{"de":{"ttl":1e30}}', '{"delay":-1}'])
    async def test_numbers_that_no_command_takes_do_not_stop_the_settle(
        self, kit: Kit, tenant: Tenant, opts: str
    ) -> None:
        tenant.write_job("owner", deid="d")
        tenant.redis.set(tenant.a + "de:d", "owner")
        tenant.redis.hset(tenant.a + "dn:d", mapping={"name": "next", "data": "{}", "opts": opts})

        told = await kit.drain(nothing, 2)

        assert len(told.of("completed")) == 2


class TestParents:
    @pytest.mark.parametrize("policy", ["", "fpof", "cpof", "idof", "rdof"])
    async def test_a_job_that_ends(self, kit: Kit, tenant: Tenant, policy: str) -> None:
        for number, parent_key in enumerate(references(tenant)):
            parent = json.dumps({"id": "x", "queue": tenant.b[:-1], **({policy: True} if policy else {})})
            tenant.write_job(f"{number}", parentKey=parent_key, parent=parent)
        count = len(list(references(tenant)))

        await unharmed(tenant, lambda: kit.drain(refuse if policy else nothing, count))

    async def test_a_job_that_is_put_back_or_removed(self, kit: Kit, tenant: Tenant) -> None:
        """By every way there is. A reference to something else raises nothing either: it harms only itself."""
        queue = kit.queue()
        acts: list[Callable[[str], Awaitable[Any]]] = [
            lambda job_id: queue.retry(job_id),
            lambda _: queue.retry_all(),
            lambda job_id: queue.remove(job_id),
            lambda _: queue.clean(0, state=JobState.FAILED),
            lambda _: queue.drain(),
        ]
        for act in acts:
            for number, parent_key in enumerate(references(tenant)):
                tenant.write_job(f"{number}", to="failed", parentKey=parent_key)
                if act is acts[-1]:
                    await queue.retry(f"{number}")
                await unharmed(tenant, lambda act=act, number=number: act(f"{number}"))  # type: ignore[misc]

                assert not kit.redis.zscore(kit.base + "failed", f"{number}")

    @pytest.mark.parametrize("policy", ["fpof", "cpof", "idof", "rdof"])
    async def test_a_job_that_is_cancelled(self, kit: Kit, tenant: Tenant, policy: str) -> None:
        queue = kit.queue()
        for number, parent_key in enumerate(references(tenant)):
            parent = json.dumps({"id": "x", "queue": tenant.b[:-1], policy: True})
            tenant.write_job(f"{number}", parentKey=parent_key, parent=parent, deid=parent_key)

            await unharmed(tenant, lambda number=number: queue.cancel(f"{number}", "no"))  # type: ignore[misc]

            assert kit.redis.zscore(kit.base + "failed", f"{number}")

    async def test_a_job_that_leaves_its_parent(self, kit: Kit, tenant: Tenant) -> None:
        queue = kit.queue()
        for number, parent_key in enumerate(references(tenant)):
            tenant.write_job(f"{number}", parentKey=parent_key)
            job = await queue.get_job(f"{number}")
            assert job is not None

            await unharmed(tenant, job.leave_parent)

    async def test_a_job_that_another_parent_adopts(self, kit: Kit, tenant: Tenant) -> None:
        """Whoever adds a child under an id that is stored already looks at the parent it has."""
        queue = kit.queue()
        for number, parent_key in enumerate(references(tenant)):
            tenant.write_job(f"{number}x", to="completed", parentKey=parent_key)
            own = tenant.write_job("own", to="waiting-children")
            tenant.redis.sadd(f"{own}:dependencies", tenant.a + "never")
            at = JobKey("own", tenant.a[:-1])

            async def adopt(number: int = number, at: JobKey = at) -> None:
                with contextlib.suppress(JobStateConflict):  # it is another's child, who may be alive
                    await queue.add("x", job_id=f"{number}x", parent=at, on_failure="fail_parent")
                with contextlib.suppress(JobStateConflict):
                    await queue.add_flow(
                        Flow("top", children=[Flow("x", job_id=f"{number}x", queue=kit.name, on_failure="ignore")])
                    )

            await unharmed(tenant, adopt)

    async def test_an_id_that_is_used_again(self, kit: Kit, tenant: Tenant) -> None:
        queue = kit.queue()
        for number, parent_key in enumerate(references(tenant)):
            tenant.write_job(f"{number}x", to="completed", parentKey=parent_key)

            await unharmed(tenant, lambda number=number: queue.add("x", job_id=f"{number}x", replace_finished=True))  # type: ignore[misc]

            assert f"{number}x" in kit.ids("wait")

    async def test_a_queue_that_is_obliterated(self, kit: Kit, tenant: Tenant) -> None:
        for number, parent_key in enumerate(references(tenant)):
            tenant.write_job(f"{number}", to="failed", parentKey=parent_key)
        queue = kit.queue()
        await queue.pause()

        await unharmed(tenant, queue.obliterate)

        assert not list(kit.redis.scan_iter(kit.base + "[0-9]*"))


class TestChildren:
    def claim_all_of_b(self, tenant: Tenant, key: str) -> None:
        children = [*references(tenant), tenant.b + "b-child"]
        tenant.redis.sadd(f"{key}:dependencies", *children)
        tenant.redis.hset(f"{key}:processed", mapping=dict.fromkeys(children, "1"))
        tenant.redis.hset(f"{key}:failed", mapping=dict.fromkeys(children, "1"))
        tenant.redis.zadd(f"{key}:unsuccessful", dict.fromkeys(children, 1))

    async def test_a_job_is_removed_with_its_children(self, kit: Kit, tenant: Tenant) -> None:
        self.claim_all_of_b(tenant, tenant.write_job("1"))

        await unharmed(tenant, lambda: kit.queue().remove("1"))

        assert not kit.has("1")

    async def test_a_child_of_b_that_runs_does_not_keep_a_job_from_being_removed(
        self, kit: Kit, tenant: Tenant
    ) -> None:
        self.claim_all_of_b(tenant, tenant.write_job("1"))
        kit.redis.set(tenant.b + "b-wait:lock", "token")

        await unharmed(tenant, lambda: kit.queue().remove("1"))

        assert not kit.has("1")

    async def test_a_flow_that_is_too_large_for_one_step(self, kit: Kit, tenant: Tenant) -> None:
        key = tenant.write_job("1")
        self.claim_all_of_b(tenant, key)
        tenant.redis.sadd(f"{key}:dependencies", *(f"{tenant.a}no-{number}" for number in range(1_100)))

        await unharmed(tenant, lambda: kit.queue().remove("1"))

        assert not kit.has("1")

    async def test_children_that_a_job_waits_for(self, kit: Kit, tenant: Tenant) -> None:
        key = tenant.write_job("1")
        self.claim_all_of_b(tenant, key)
        own = tenant.write_job("2", parentKey=key)
        tenant.redis.sadd(f"{key}:dependencies", own)

        await unharmed(tenant, lambda: kit.queue().remove_unprocessed_children("1"))

        assert not kit.has("2")


class TestDeadLetters:
    async def letter_of_b(self, kit: Kit, tenant: Tenant) -> tuple[Queue, str]:
        """Both queues share a store of dead letters, by their suffixes; B has one there."""
        told = await kit.work(refuse, queue=tenant.b_name, dead_letters=True)
        queue = kit.queue(tenant.b_name)
        kit.redis.delete(tenant.b + "wait", tenant.b + "failed", tenant.b + "delayed")
        await queue.add("x", {"of": "b"})
        await told.wait("failed")
        await told.worker.close()
        (letter,) = await queue.dead_letters.list()
        return queue, letter.id

    @pytest.mark.parametrize("way", ["retry", "retry_all", "redrive", "take", "sweep"])
    async def test_a_job_that_names_the_letter_of_another_queue(self, kit: Kit, tenant: Tenant, way: str) -> None:
        of_b, letter_id = await self.letter_of_b(kit, tenant)
        mine = kit.queue(dead_letter_suffix="-b-dlq")
        assert mine.dead_letters.name == of_b.dead_letters.name
        state = "wait" if way == "take" else "failed"
        tenant.write_job("1", to=state, bpdl=letter_id, atm="1", ats="7", failedReason="no")

        match way:
            case "retry":
                await mine.retry("1")
            case "retry_all":
                await mine.retry_all()
            case "take":
                await kit.drain(nothing, 1, dead_letters=Policy(store="queue", suffix="-b-dlq"))
            case "sweep":
                kit.redis.zadd(kit.base + "failed", {"1": kit.server_ms()})
                await mine.dead_letters.sweep()
            case "redrive":
                kit.redis.zadd(kit.base + "failed", {"1": kit.server_ms()})
                await mine.dead_letters.sweep()
                kit.redis.hset(kit.base + "1", "bpdl", letter_id)
                await mine.dead_letters.redrive("dl-1-7")

        assert [letter.data async for letter in of_b.dead_letters.find() if letter.queue == tenant.b_name] == [
            {"of": "b"}
        ]

    async def test_a_letter_in_the_tenants_own_store_that_names_another_queue(self, kit: Kit, tenant: Tenant) -> None:
        """An operator who sends everything back sends nothing into B."""
        kit.command("ACL", "SETUSER", TENANT, f"~{kit.base[:-1]}-dlq:*")
        entry = {"originalQueue": tenant.b_name, "originalJobId": "b-failed", "originalJobName": "b", "originalData": 1}
        base = kit.base[:-1] + "-dlq:"
        tenant.redis.hset(base + "dl-b-failed-1", mapping={"name": "x", "data": json.dumps(entry), "opts": "{}"})
        tenant.redis.lpush(base + "wait", "dl-b-failed-1")

        queue = kit.queue()
        await unharmed(tenant, queue.dead_letters.redrive_all)

        report = await queue.dead_letters.redrive_all()
        assert report.done == 0 and f"is of queue '{tenant.b_name}'" in report.skipped[0][1]
        await queue.dead_letters.discard("dl-b-failed-1")

    async def test_a_letter_of_the_tenants_queue_in_a_store_of_both(self, kit: Kit, tenant: Tenant) -> None:
        """The queue `shop` with the suffix `-eu-dlq` and the queue `shop-eu` share a store. An operator who sends back
        all letters of B sends none of A's into it."""
        both = Policy(store="queue", suffix="-b-dlq")
        tenant.write_job("1", data='{"cmd":"pay me"}')
        told = await kit.work(refuse, dead_letters=both)
        await told.wait("failed")
        await told.worker.close()
        queue = kit.queue(tenant.b_name)
        assert await queue.dead_letters.depth() == 1

        await unharmed(tenant, queue.dead_letters.redrive_all)

        assert await queue.dead_letters.depth() == 1
        await kit.queue(dead_letter_suffix="-b-dlq").dead_letters.redrive_all()
        assert kit.ids("wait") == ["1"]

    @pytest.mark.parametrize("how", ["bpredriven", "data"])
    async def test_no_stored_text_makes_members_of_a_letter(self, kit: Kit, tenant: Tenant, how: str) -> None:
        """The script puts both into the letter as they stand; data may be another one since the worker took the job."""
        forged = f'"originalQueue":"{tenant.b_name}","originalJobId":"b-failed","cause":"forged"'
        tenant.write_job("1", data="{}", **({"bpredriven": f"[],{forged}"} if how == "bpredriven" else {}))

        async def handle(job: Job) -> None:
            if how == "data":
                tenant.redis.hset(tenant.a + "1", "data", f"1,{forged}")
            raise PermanentError("no")

        told = await kit.work(handle, dead_letters=True)
        await told.wait("failed")
        await told.worker.close()
        (letter,) = await kit.queue().dead_letters.list()

        assert (letter.queue, letter.job_id, letter.cause) == (kit.name, "1", "permanent")
        assert letter.redriven == []


class TestSchedulers:
    async def test_an_iteration_that_names_a_scheduler_of_another_queue(self, kit: Kit, tenant: Tenant) -> None:
        slot = kit.server_ms()
        for number, name in enumerate((f"{tenant.b}beat", f"{tenant.b}repeat:beat", f"../{tenant.b_name}:repeat:beat")):
            job_id = f"repeat:{number}:{slot}"
            tenant.redis.zadd(tenant.a + "repeat", {name: slot})
            tenant.redis.hset(f"{tenant.a}repeat:{name}", mapping={"name": "beat", "ic": 1, "every": 3_600_000})
            opts = {"repeat": {"count": 1, "key": name}, "jobId": job_id, "repeatJobKey": name}
            tenant.write_job(job_id, rjk=name, opts=json.dumps(opts))

        await unharmed(tenant, lambda: kit.drain(nothing, 3))

    @pytest.mark.parametrize("field", ["bprun", "bpopts"])
    async def test_a_record_whose_own_fields_name_another_queue(self, kit: Kit, tenant: Tenant, field: str) -> None:
        """The run that must end before the next one, and the options of a paused scheduler's next job."""
        queue = kit.queue()
        for number, key in enumerate(references(tenant)):
            name = f"s{number}"
            await queue.upsert_scheduler(name, every=3_600_000, overlap="skip")
            parent = {"id": "b-waiting-children", "queue": tenant.b[:-1]}
            opts = {"parent": parent, "jobId": key, "repeatJobKey": key, "bplane": key, "de": {"id": key}, "fpof": True}
            stored = key if field == "bprun" else json.dumps(opts)

            async def act(name: str = name, stored: str = stored) -> None:
                await queue.pause_scheduler(name)
                tenant.redis.hset(f"{tenant.a}repeat:{name}", field, stored)
                await queue.resume_scheduler(name)
                await queue.run_scheduler(name, early=True)
                await queue.upsert_scheduler(name, every=1_800_000, overlap="skip")

            await unharmed(tenant, act)
        count = len(list(references(tenant)))
        await unharmed(tenant, lambda: kit.drain(nothing, count))
        for number in range(count):
            await unharmed(tenant, lambda number=number: queue.remove_scheduler(f"s{number}"))  # type: ignore[misc]


class TestLanes:
    async def test_a_lane_that_names_keys_of_another_queue(self, kit: Kit, tenant: Tenant) -> None:
        """What a lane holds, counts and runs lies beside the jobs, under the name that the job gives."""
        queue = kit.queue()
        await queue.lanes.set(None, concurrency=1, size=100, rate=(1_000, 60_000))
        lanes = [*references(tenant), f"../../{tenant.b_name}:wait", f"x:{tenant.b}wait"]
        for number, lane in enumerate(lanes):
            for twice in ("a", "b"):
                tenant.write_job(f"{number}{twice}", to="prioritized", bplane=lane, priority="1")
                tenant.redis.zadd(tenant.a + "prioritized", {f"{number}{twice}": 4_294_967_296 + number})
        tenant.redis.zadd(tenant.a + "marker", {"0": 0})

        await unharmed(tenant, lambda: kit.drain(nothing, 2 * len(lanes)))

        for number, lane in enumerate(lanes):
            tenant.write_job(f"{number}c", to="delayed", bplane=lane)
            await unharmed(tenant, lambda number=number: queue.cancel(f"{number}c"))  # type: ignore[misc]
        await queue.pause()
        await unharmed(tenant, queue.obliterate)


class TestCancels:
    async def test_requests_in_the_tenants_queue_end_no_job_of_another(self, kit: Kit, tenant: Tenant) -> None:
        """Both workers live in one process, whose keepalive reads the requests of all its queues; the tenant even knows
        the token of B's job."""
        gates = Gate("a"), Gate("b")
        mine = kit.worker(gates[0], lock=1_000)
        other = Worker(tenant.b_name, gates[1], connection=kit.url, lock=1_000)
        failed: list[str] = []
        for worker in (mine, other):
            worker.on("failed", lambda job, _reason: failed.append(job.name))
        kit.redis.delete(tenant.b + "wait")
        async with Queue(tenant.b_name, connection=kit.url) as queue:
            job = await queue.add("of b", job_id="same")
            await kit.queue().add("of a", job_id="same")
            await mine.start()
            await other.start()
            for gate in gates:
                await gate.reached()
            tokens = [kit.redis.get(f"{base}same:lock") for base in (tenant.a, tenant.b)]

            for token in tokens:
                request = {"job": "same", "token": token, "reason": "mine"}
                tenant.redis.xadd(tenant.a + "bp:cancel:asked", request)  # type: ignore[arg-type]
            await kit.until(lambda: failed == ["of a"], "the tenant's own job has ended")
            kit.redis.delete(tenant.a + "bp:cancel:asked")
            gates[1].open()
            async with asyncio.timeout(10):
                assert await job.result() == "b"
            await other.close()
            await mine.close()

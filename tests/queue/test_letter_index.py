"""Counters and order of dead letters: kept with each entry, and caught up with what others did."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bullpen import Queue
from bullpen.ports.dead_letters import DeadLetter, DeadLetterFilter
from tests.queue._kit import Kit


def letter(number: int, error: str = "HTTP 503", *, tenant: str | None = None) -> DeadLetter:
    return DeadLetter(
        id=f"dl-{number}-1",
        source="mails",
        message_id=f"m{number}",
        name="send",
        data={"n": number},
        error_message=f"{error} for order {number}",
        failed_at=f"2030-01-01T00:00:{number % 60:02d}.000Z",
        tenant_id=tenant,
    )


async def counts(queue: Queue, tenant_id: str | None = None) -> list[tuple[int, dict[str, int]]]:
    groups = await queue.dead_letters.groups(tenant_id=tenant_id)
    return [(group.count, dict(group.tenants)) for group in groups]


@pytest.mark.requirement("X-5", "X-41")
async def test_groups_are_counted_by_cause_and_tenant_without_reading_letters(kit: Kit) -> None:
    async with kit.queue() as queue:
        for number in range(6):
            await queue.dead_letters.put(letter(number, tenant="acme" if number % 2 else "zeta"))
        await queue.dead_letters.put(letter(6, "HTTP 401"))

        assert await counts(queue) == [(6, {"acme": 3, "zeta": 3}), (1, {})]
        assert await counts(queue, "acme") == [(3, {"acme": 3})]
        kit.redis.config_resetstat()
        await queue.dead_letters.groups()
        stats = kit.redis.info("commandstats")
        assert "cmdstat_hgetall" not in stats or stats["cmdstat_hgetall"]["calls"] == 1, "of tenants, not of letters"
        (mine,) = await queue.dead_letters.groups(tenant_id="acme")
        assert mine.error == "HTTP 503 for order 5", "no words of another tenant's letter"
        page = await queue.dead_letters.page(DeadLetterFilter(fingerprint=mine.fingerprint, tenant_id="zeta"))
        assert [found.message_id for found in page.letters] == ["m4", "m2", "m0"]
        assert (await queue.dead_letters.of_tenant("acme", limit=2)).depth == 3


@pytest.mark.requirement("X-5")
async def test_what_other_clients_write_and_remove_is_caught_up_with(kit: Kit) -> None:
    """Node, a user with redis-cli, or a worker of an earlier release: they know of no counters."""
    async with kit.queue() as queue, Queue(queue.dead_letters.name, connection=kit.url) as entries:
        for number in range(4):
            await queue.dead_letters.put(letter(number))
        entry = (await queue.dead_letters.list())[0].entry
        await entries.add("send-failed", {**entry, "originalJobId": "m9"}, job_id="dl-9-1")
        assert [count for count, _ in await counts(queue)] == [5]

        await entries.remove("dl-9-1")
        await entries.remove("dl-0-1")
        assert [count for count, _ in await counts(queue)] == [3]
        kit.redis.delete(*kit.redis.keys(f"*{queue.dead_letters.name}:bp:letters:*"))
        assert [count for count, _ in await counts(queue)] == [3], "all of it may vanish"
        page = await queue.dead_letters.page()
        assert [found.id for found in page.letters] == ["dl-3-1", "dl-2-1", "dl-1-1"]


@pytest.mark.leaves_queue_broken
async def test_an_entry_that_went_unseen_is_forgotten_where_it_is_met(kit: Kit) -> None:
    async with kit.queue() as queue:
        for number in range(3):
            await queue.dead_letters.put(letter(number))
        await queue.dead_letters.groups()
        base = queue.dead_letters.name
        kit.redis.delete(f"bull:{base}:dl-1-1")

        page = await queue.dead_letters.page()

        assert [found.id for found in page.letters] == ["dl-2-1", "dl-0-1"]
        assert kit.redis.hlen(f"bull:{base}:bp:letters:facts") == 2


async def test_everything_beside_the_entries_ends_by_itself_and_with_the_queue(kit: Kit) -> None:
    async with kit.queue() as queue, Queue(queue.dead_letters.name, connection=kit.url) as entries:
        for number in range(3):
            await queue.dead_letters.put(letter(number, tenant="acme"))
        await queue.dead_letters.groups()
        keys: Any = kit.redis.keys("*:bp:letters:*")
        assert {key.rpartition(b":")[2] for key in keys} == {*(b"facts", b"index", b"counts", b"causes", b"tenants")}
        assert all(kit.redis.ttl(key) > 0 for key in keys)

        await entries.pause()
        await entries.obliterate()
        assert kit.redis.keys("*:bp:letters:*") == []


@pytest.mark.leaves_queue_broken
@pytest.mark.parametrize("kind", ["hash", "string"])
async def test_a_foreign_key_in_the_way_keeps_no_letter_from_being_written(kit: Kit, kind: str) -> None:
    async with kit.queue() as queue:
        name = f"bull:{queue.dead_letters.name}:bp:letters:"
        kit.redis.set(f"{name}{'index' if kind == 'hash' else 'facts'}", "foreign")

        one = replace(letter(1), source=queue.name)
        await queue.dead_letters.put(one)
        await queue.dead_letters.put(replace(one, error_message="written twice"))

        assert await queue.dead_letters.depth() == 1
        assert await queue.dead_letters.redrive("dl-1-1") == "m1"
        assert await queue.dead_letters.depth() == 0


@pytest.mark.parametrize("part", ["facts", "index", "counts", "causes"])
async def test_a_part_that_was_evicted_is_made_again(kit: Kit, part: str) -> None:
    """A server with an eviction policy takes keys that end by themselves, one by one."""
    async with kit.queue() as queue:
        for number in range(3):
            await queue.dead_letters.put(letter(number))
        kit.redis.delete(f"bull:{queue.dead_letters.name}:bp:letters:{part}")

        assert [count for count, _ in await counts(queue)] == [3]
        assert len((await queue.dead_letters.page()).letters) == 3

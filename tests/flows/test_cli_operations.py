"""Dead letters acted on as a stored operation: by the command, in another process, after an interruption."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bullpen import Bullpen, Queue
from bullpen.ops.operations import Operation, Operations
from bullpen.ports.dead_letters import DeadLetter
from bullpen.queue.audit import AuditStreams
from tests.flows._cli import Answer, cli

pytestmark = pytest.mark.requirement("X-40", "X-41")


async def bury(queue: Queue, count: int) -> None:
    for number in range(count):
        await queue.dead_letters.put(
            DeadLetter(
                id=f"dl-m{number}-1",
                source=queue.name,
                message_id=f"m{number}",
                name="send",
                data={"tenantId": "acme" if number % 2 else "zeta"},
                error_message=f"HTTP {'503' if number < 3 else '401'} for order {number}",
                failed_at=f"2026-01-01T00:00:{number:02d}.000Z",
                tenant_id="acme" if number % 2 else "zeta",
            )
        )


async def test_a_stored_operation_is_listed_noted_once_and_touches_what_fits(
    redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    async def run(*words: str) -> Answer:
        return await asyncio.to_thread(lambda: cli(*words, cwd=tmp_path, env={"BULLPEN_REDIS_URL": redis_url}))

    async with Queue(queue_name, connection=redis_url) as queue:
        await bury(queue, 5)
        mark = (await queue.dead_letters.groups())[0].fingerprint

        sent = await run("dead-letters", "redrive", queue_name, "--group", mark, "--stored", "--by", "ada", "--json")
        mine = await run("dead-letters", "discard", queue_name, "dl-m3-1", "dl-m4-1", "--tenant", "acme", "--stored")
        none = await run("dead-letters", "redrive", queue_name, "--name", "other", "--stored")

        told = json.loads(sent.out)
        assert (told["state"], told["done"], told["total"], told["by"]) == ("completed", 3, 3, "ada")
        assert (await queue.counts()).waiting == 3
        assert [letter.id for letter in await queue.dead_letters.list()] == ["dl-m4-1"], "of another tenant"
        assert (mine.code, none.out.strip()) == (0, "redriven: 0")
        notes = await AuditStreams(queue.connection, "bull").read(f"{queue_name}-dlq")
        assert [note.action for note in notes] == ["operation.start", "operation.start"]
        listed = json.loads((await run("operations", "list", "--json")).out)
        assert [each["done"] for each in listed] == [1, 3]
        shown = await run("operations", "show", told["id"])
        assert "Redrive dead letters" in shown.out
        assert (await run("operations", "show", "nope")).code == 1


async def test_what_a_process_left_is_resumed_or_stopped(redis_url: str, queue_name: str, tmp_path: Path) -> None:
    async def run(*words: str) -> Answer:
        return await asyncio.to_thread(lambda: cli(*words, cwd=tmp_path, env={"BULLPEN_REDIS_URL": redis_url}))

    async with Queue(queue_name, connection=redis_url) as queue, Bullpen(redis_url) as app:
        await bury(queue, 4)
        operations = Operations(app.connection, app.prefix, app.actions, app.dead_letters)
        asked = {"by": "ada", "store": f"{queue_name}-dlq", "until": "2026-02-01T00:00:00+00:00"}
        slow = await operations.submit(Operation(kind="redrive", total=4, rate=0.5, **asked))  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            while (await queue.counts()).waiting == 0:  # noqa: ASYNC110 - another connection's work
                await asyncio.sleep(0.05)
        await operations.aclose()
        assert (await run("operations", "stop", slow)).out == f"stopping: {slow}\n"
        rest = await operations_of(app).submit(Operation(kind="discard", total=4, **asked))  # type: ignore[arg-type]

        done = json.loads((await run("operations", "resume", "--json")).out)

        assert {each["id"]: each["state"] for each in done} == {slow: "stopped", rest: "completed"}
        assert await queue.dead_letters.depth() == 0
        assert (await queue.counts()).waiting < 4


def operations_of(app: Bullpen) -> Operations:
    """They store, but do not run: closed before the first is taken."""
    operations = Operations(app.connection, app.prefix, app.actions, app.dead_letters)
    operations._is_closed = True
    return operations

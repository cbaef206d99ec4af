"""Dead letters of queues need no ledger: whoever has none is shown and may mend them all the same."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bullpen import Bullpen, Queue
from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.ports.dead_letters import DeadLetter
from bullpen.runs import DEAD_LETTER_QUEUE
from bullpen.testing import RedisServer
from bullpen.wiring.dead_letters import OUTBOX_STORE, RUNS_DEAD_LETTERS
from tests.environments import clean_environ
from tests.flows._cli import cli

LOOK_AND_MEND = """
import asyncio
import sys

sys.modules["sqlalchemy"] = None  # as where neither `sqlite` nor `postgres` is installed

from bullpen import Bullpen
from bullpen.ports.dead_letters import DeadLetter


async def main(url):
    async with Bullpen(url) as app:
        await app.queue("forms").dead_letters.put(
            DeadLetter(id="dl-1-1", source="forms", message_id="1", name="parcel", error_message="no street")
        )
        console = await app.dead_letters()
        print([*console.stores], await console.redrive("forms-dlq", "dl-1-1", by="ada"))


asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("configured", [{}, {"BULLPEN_DATABASE_URL": "sqlite:///unused.sqlite3"}])
def test_the_console_works_where_the_extra_of_the_ledger_is_missing(configured: dict[str, str]) -> None:
    """Also where a ledger is configured that this machine has no driver for: queues have nothing to do with it."""
    with RedisServer.start() as server:
        look = subprocess.run(
            [sys.executable, "-c", LOOK_AND_MEND, server.url],
            env={**clean_environ(), **configured},
            capture_output=True,
            text=True,
            check=False,
        )

    assert (look.returncode, look.stdout) == (0, "['forms-dlq'] 1\n"), look.stderr
    assert ("not shown" in look.stderr) == bool(configured)


async def _three_letters(queue: Queue) -> None:
    for number in range(3):
        letter = DeadLetter(id=f"dl-{number}-1", source="forms", message_id=str(number), name="parcel", data={"n": 1})
        await queue.dead_letters.put(letter)


async def test_what_is_done_without_a_ledger_is_written_to_a_capped_stream(redis_url: str, tmp_path: Path) -> None:
    async with Bullpen(redis_url) as app:
        await _three_letters(app.queue("forms"))
        console = await app.dead_letters()
        _, edit = await console.edit("forms-dlq", "dl-0-1", merge={"n": 2}, why="a form bug")
        await console.redrive_edited("forms-dlq", "dl-0-1", edit, by="ada")
        await console.discard("forms-dlq", "dl-1-1", by="grace")
        env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_EMBEDDED": "never"}
        command = ("dead-letters", "redrive", "forms", "dl-2-1", "--by", "alan")
        done = await asyncio.to_thread(lambda: cli(*command, cwd=tmp_path, env=env))
        assert done.code == 0, done.err

        key = f"{app.prefix}:forms-dlq:bp:audit:log"
        entries = await app.connection.shared_door(key).call("XRANGE", key, "-", "+")
        found = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in entries]

    assert [(each[b"actor"], each[b"action"], each[b"subject"]) for each in found] == [
        (b"ada", b"dead_letter.edit", b"forms-dlq/dl-0-1"),
        (b"grace", b"dead_letter.discard", b"forms-dlq/dl-1-1"),
        (b"alan", b"dead_letter.redrive", b"forms-dlq"),
    ]
    assert json.loads(found[0][b"detail"])["why"] == "a form bug"


@pytest.mark.many
async def test_the_stream_of_deeds_is_bounded(redis_url: str) -> None:
    async with Bullpen(redis_url) as app:
        await _three_letters(app.queue("forms"))
        key = f"{app.prefix}:forms-dlq:bp:audit:log"
        door = app.connection.shared_door(key)
        await door.call_many([("XADD", key, "*", "actor", "old")] * 12_000)
        await (await app.dead_letters()).discard("forms-dlq", "dl-1-1", by="grace")

        assert 10_000 <= await door.call("XLEN", key) < 10_200


def test_dead_runs_are_known_by_the_name_of_their_queue() -> None:
    assert RUNS_DEAD_LETTERS == DEAD_LETTER_QUEUE
    assert OutboxDeadLetters.name_of_store == OUTBOX_STORE

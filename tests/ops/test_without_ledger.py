"""Dead letters of queues need no ledger: whoever has none is shown and may mend them all the same."""

from __future__ import annotations

import subprocess
import sys

from bullpen._parts.dead_letters import RUNS_DEAD_LETTERS
from bullpen.runs import DEAD_LETTER_QUEUE
from bullpen.testing import RedisServer
from tests.environments import clean_environ

LOOK_AND_MEND = """
import asyncio
import sys

sys.modules["sqlalchemy"] = None  # as where neither `sqlite` nor `postgres` is installed

from bullpen import Bullpen
from bullpen.ports.dead_letters import DeadLetter
from bullpen.queue.dead_letter_stores import DeadLetterQueueStore


async def main(url):
    async with Bullpen(url) as app:
        await DeadLetterQueueStore(app.queue("forms")).put(
            DeadLetter(id="dl-1-1", source="forms", message_id="1", name="parcel", error_message="no street")
        )
        print([*(await app.dead_letters()).stores])


asyncio.run(main(sys.argv[1]))
"""


def test_the_console_works_where_the_extra_of_the_ledger_is_missing() -> None:
    with RedisServer.start() as server:
        look = subprocess.run(
            [sys.executable, "-c", LOOK_AND_MEND, server.url],
            env=clean_environ(),
            capture_output=True,
            text=True,
            check=False,
        )

    assert (look.returncode, look.stdout) == (0, "['forms-dlq']\n"), look.stderr


def test_dead_runs_are_known_by_the_name_of_their_queue() -> None:
    assert RUNS_DEAD_LETTERS == DEAD_LETTER_QUEUE

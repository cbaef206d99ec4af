"""The demo's jobs, their handler, and a worker process for them: `python jobs.py QUEUE NAME`.

The data of a job says how its runs go, so how many end as dead letters is known before the first one runs. A worker
process finds its server in the environment, prints a line when it takes jobs, and ends when its stdin does: then the
demo is over, or was killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

from bullpen import Backoff, Connection, Job, NewJob, PermanentError, Worker

LOCK_MS = 2_000
STALLED_INTERVAL_MS = 500
"""Short, so that a viewer sees the recovery; the defaults are 30 s and 10 s."""
CONCURRENCY = 20

KINDS = {
    "thumbnail": 56,  # plain
    "reminder": 12,  # delayed
    "receipt": 8,  # prioritised
    "crm-sync": 12,  # fails once or twice, then succeeds
    "report": 4,  # reports progress
    "video": 3,  # takes a second
    "import": 3,  # fails in every attempt: dead letter
    "bad-input": 2,  # fails for good at once: dead letter
}
"""Name of a kind -> its share of all, in percent."""
DEAD = frozenset({"import", "bad-input"})


def make_jobs(count: int, seconds: float, dice: random.Random) -> Iterator[NewJob]:
    """`count` jobs in the shares above, mixed; delayed ones become due within `seconds`."""
    quickly = Backoff.exponential(200)
    for name in _names(count, dice):
        data: dict[str, Any] = {"ms": dice.randint(1, 25)}
        options: Any = {}
        match name:
            case "reminder":
                options = {"delay": dice.randint(200, max(201, int(seconds * 1000)))}
            case "receipt":
                options = {"priority": dice.randint(1, 10)}
            case "crm-sync":
                data["fails"] = dice.choice((1, 1, 2))
                options = {"attempts": 4, "backoff": quickly}
            case "report":
                data["steps"] = 4
            case "video":
                data["ms"] = dice.randint(800, 1_200)
            case "import":
                data["fails"] = 3
                options = {"attempts": 3, "backoff": quickly}
            case "bad-input":
                data["hopeless"] = True
        yield NewJob(name, data, options)


def _names(count: int, dice: random.Random) -> list[str]:
    """At least one of each kind, so that a small demo shows everything too."""
    names = [*KINDS][:count]
    names += dice.choices([*KINDS], weights=[*KINDS.values()], k=max(0, count - len(names)))
    dice.shuffle(names)
    return names


class ServiceAway(Exception):
    """What the pretended remote service does when it fails."""


async def handle(job: Job) -> dict[str, str]:
    """The handler of all kinds: does as the data says."""
    work = job.data
    if work.get("hopeless"):
        raise PermanentError("no such customer")
    await asyncio.sleep(work["ms"] / 1000)
    if job.attempts_made < work.get("fails", 0):
        raise ServiceAway("503 service unavailable")
    for step in range(1, work.get("steps", 0) + 1):
        await job.progress(step * 100 // work["steps"])
        await asyncio.sleep(0.05)
    return {"by": "python"}


async def main(queue: str, name: str) -> None:
    worker = Worker(
        queue,
        handle,
        connection=Connection(os.environ["BULLPEN_REDIS_URL"]),
        prefix=os.environ["BULLPEN_PREFIX"],
        name=name,
        dead_letters=True,
        concurrency=CONCURRENCY,
        lock=LOCK_MS,
        stalled_interval=STALLED_INTERVAL_MS,
    )
    loop = asyncio.get_running_loop()
    closing: list[asyncio.Task[None]] = []

    def on_end() -> None:
        loop.remove_reader(sys.stdin)
        closing.append(loop.create_task(worker.close()))

    loop.add_reader(sys.stdin, on_end)
    await worker.start()
    print("ready", flush=True)
    await worker.run(signals=False)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))

"""What the demo's jobs are and what their handler does.

The data of a job says how its runs go, so how many end as dead letters is known before the first one runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bullpen._kernel.backoff import Backoff
from bullpen.errors import PermanentError
from bullpen.queue import Job, NewJob
from bullpen.queue.arguments import NewJobArguments

LOCK_MS = 2_000
STALLED_INTERVAL_MS = 500
"""Short, so that a viewer sees the recovery; the defaults are 30 s and 10 s."""
CONCURRENCY = 20

_QUICKLY = Backoff.exponential(200)


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of job: its share of all, and what makes it special."""

    name: str
    share: int
    text: str


KINDS = (
    Kind("thumbnail", 56, "plain"),
    Kind("reminder", 12, "delayed"),
    Kind("receipt", 8, "prioritised"),
    Kind("crm-sync", 12, "fails once or twice, then succeeds"),
    Kind("report", 4, "reports progress"),
    Kind("video", 3, "takes a second"),
    Kind("import", 3, "fails in every attempt: dead letter"),
    Kind("bad-input", 2, "fails for good at once: dead letter"),
)
DEAD = frozenset({"import", "bad-input"})


def make_jobs(count: int, seconds: float, dice: random.Random) -> Iterator[NewJob]:
    """`count` jobs in the shares above, mixed; delayed ones become due within `seconds`."""
    for name in _names(count, dice):
        data: dict[str, Any] = {"ms": dice.randint(1, 25)}
        options: NewJobArguments = {}
        match name:
            case "reminder":
                options["delay"] = dice.randint(200, max(201, int(seconds * 1000)))
            case "receipt":
                options["priority"] = dice.randint(1, 10)
            case "crm-sync":
                data["fails"] = dice.choice((1, 1, 2))
                options.update({"attempts": 4, "backoff": _QUICKLY})
            case "report":
                data["steps"] = 4
            case "video":
                data["ms"] = dice.randint(800, 1_200)
            case "import":
                data["fails"] = 3
                options.update({"attempts": 3, "backoff": _QUICKLY})
            case "bad-input":
                data["hopeless"] = True
        yield NewJob(name, data, options)


def _names(count: int, dice: random.Random) -> list[str]:
    """At least one of each kind, so that a small demo shows everything too."""
    names = [kind.name for kind in KINDS][:count]
    names += dice.choices(
        [kind.name for kind in KINDS], weights=[kind.share for kind in KINDS], k=max(0, count - len(names))
    )
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

"""Not timed: let two processes drain a queue that keeps all its events, and read what happened to every job."""

from collections import Counter
from dataclasses import replace
from typing import Any

from benchmarks.arena import Failed, Run
from benchmarks.contestants import Contestant
from benchmarks.workloads import Metric, Workload
from bullpen.testing import RedisServer

_LIFE = ["added", "waiting", "active", "completed"]
_WORKLOAD = Workload("audit", "drain", 0, (Metric("audit", "drain that keeps all events"),), variant=("all_events",))


def audit(contestant: Contestant, server: RedisServer, jobs: int) -> None:
    """Raises Failed unless each job was added, waited, became active and was completed: once each, in this order."""
    Run(contestant, replace(_WORKLOAD, jobs=jobs, processes=2), server).measure()
    lives: dict[str, list[str]] = {}
    entries: Any = server.client().xrange("bull:bench:events")
    for _, fields in entries:
        if b"jobId" in fields:
            lives.setdefault(fields[b"jobId"].decode(), []).append(fields[b"event"].decode())
    if len(lives) != jobs:
        raise Failed(f"{contestant.name}: the events tell of {len(lives)} jobs, {jobs} were added")
    wrong = Counter(" ".join(life) for life in lives.values() if life != _LIFE)
    if wrong:
        raise Failed(f"{contestant.name}: {wrong.total()} jobs have another life in the events: {wrong.most_common(3)}")

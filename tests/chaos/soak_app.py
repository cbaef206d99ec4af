"""What the soak runs: `bullpen run tests.chaos.soak_app:app`. Every handler writes down what it ran."""

from __future__ import annotations

import json
import os
from pathlib import Path

from bullpen import Bullpen, Job, Settings

_RAN = os.open(Path(os.environ["SOAK_DIRECTORY"], "ran"), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

app = Bullpen(settings=Settings.load())
app.use_outbox()


def note(kind: str, name: str) -> None:
    os.write(_RAN, json.dumps([kind, name]).encode() + b"\n")


# What is kept on purpose reaches its bound within a minute; what grows afterwards is a leak.
@app.handler("mixed", concurrency=20, lock=5_000, stalled_interval=2_000, remove_on_complete=200, events_max_len=1_000)
async def mixed(job: Job) -> dict[str, int]:
    note("ran", job.id)
    if job.name == "retried" and not job.attempts_made:
        raise RuntimeError("the first attempt fails as ordered")
    return {"attempts": job.attempts_made}


@app.handler(
    "delivered", concurrency=5, lock=5_000, stalled_interval=2_000, remove_on_complete=200, events_max_len=1_000
)
async def delivered(job: Job) -> None:
    note("delivered", job.data["row"])


app.task_queue("periodic", remove_on_complete=200, events_max_len=1_000)


@app.task("periodic", every=1_000)
async def tick() -> None:
    note("tick", "")

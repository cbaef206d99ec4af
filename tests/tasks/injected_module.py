"""Tasks and handlers whose parameters are found in a child process."""

from __future__ import annotations

import os
from collections.abc import Iterator

from bullpen import Bullpen, Depends, Job
from bullpen.redis import Connection

app = Bullpen(Connection("redis://127.0.0.1:1"))  # never used: the child only runs functions


class Pool:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.opened = 0


class Session:
    def __init__(self, pool: Pool) -> None:
        self.pool = pool


app.provide(Pool, Pool)


@app.provide(scope="job")
def session(pool: Pool) -> Iterator[Session]:
    pool.opened += 1
    yield Session(pool)
    pool.opened -= 1


@app.handler("handled", processes=True)
def handled(job: Job, session: Session = Depends()) -> list[int]:
    return [session.pool.pid, session.pool.opened]


app.task_queue("asked", processes=True)


@app.task("asked")
async def asked(session: Session = Depends()) -> list[int]:
    return [session.pool.pid, session.pool.opened]

"""Tasks that a child process imports."""

from __future__ import annotations

import os
from dataclasses import dataclass

from bullpen import BatchOptions, Bullpen
from bullpen.redis import Connection

app = Bullpen(Connection("redis://127.0.0.1:1"))  # never used: the child only runs functions
app.task_queue("heavy", concurrency=1)


@app.task("heavy")
def square(number: int) -> int:
    return number * number


@app.task("heavy")
def pid() -> int:
    return os.getpid()


@dataclass
class Row:
    number: int


@app.task("rows", batch=BatchOptions(size=10))
async def squares(rows: list[Row]) -> list[tuple[int, int]]:
    return [(os.getpid(), row.number**2) for row in rows]

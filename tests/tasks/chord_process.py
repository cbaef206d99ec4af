"""A chord's tasks, and a process that works on them until it dies at the step that it is told.

In: the server, the step, and the end of the id of the job at which it dies. Out: death by SIGKILL. The test that
started it makes the same tasks with `tasks_of`, to finish what is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from bullpen import Bullpen, PermanentError, Task
from bullpen.queue import tasks
from bullpen.worker.exchange import Exchange

MEMBERS, CALLBACKS = "members", "callbacks"


def tasks_of(
    url: str, *, told: Callable[[str, Any], None] = lambda *_: None, failing: int | None = None
) -> tuple[Bullpen, Task[[int], int], Task[[list[int]], list[int]]]:
    """An app, the task of a member and that of the callback; `failing` is the member that cannot be done."""
    app = Bullpen(url)
    for queue in (MEMBERS, CALLBACKS):
        app.task_queue(queue, concurrency=1, lock=500, stalled_interval=100)

    @app.task(MEMBERS)
    async def square(number: int) -> int:
        told("member", number)
        if number == failing:
            raise PermanentError("no")
        return number * number

    @app.task(CALLBACKS)
    async def collect(squares: list[int]) -> list[int]:
        told("callback", squares)
        return squares

    return app, square, collect


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def die_at(step: str, at: str) -> Callable[[str, Any], None]:
    """Put the death where it belongs; what is returned is for the tasks to call."""
    send, take_in, results_for = Exchange.send, Exchange.take_in, tasks._results_for
    settled = set[int]()

    def dying_send(exchange: Any, settlements: Any, *rest: Any) -> Any:
        if any(settlement.job.id.endswith(at) for settlement in settlements):
            if step == "before its end is sent":
                die()
            settled.add(id(exchange))
        return send(exchange, settlements, *rest)

    def dying_take_in(exchange: Any, flight: Any, answer: Any) -> Any:
        reply = take_in(exchange, flight, answer)
        if step == "after its end is stored" and reply.codes and id(exchange) in settled:
            die()
        return reply

    async def dying_results(job: Any) -> Any:
        dies = job.id.endswith(at)
        if dies and step == "before its results are read":
            die()
        found = await results_for(job)
        if dies and step == "after its results are read":
            die()
        return found

    Exchange.send, Exchange.take_in = dying_send, dying_take_in  # type: ignore[assignment, method-assign]
    tasks._results_for = dying_results

    def told(what: str, value: Any) -> None:
        if step == "while it runs" and at == (f"~{value}" if what == "member" else "-callback"):
            die()

    return told


if __name__ == "__main__":
    url, step, at = sys.argv[1:]
    asyncio.run(tasks_of(url, told=die_at(step, at))[0].run(signals=False))

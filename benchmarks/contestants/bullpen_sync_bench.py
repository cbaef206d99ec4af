"""bullpen's blocking queue, for programs without an event loop. It only adds."""

from collections.abc import Sequence
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script

from bullpen.sync import Job, Queue


class BullpenSync:
    def __init__(self, task: Any) -> None:
        self.queue = Queue(task.queue, connection=task.url, attempts=task.attempts)

    async def open(self) -> None:
        """It connects with the first add, which warms up."""

    async def add(self, data: Any) -> Job:
        return self.queue.add("bench", data)

    async def add_many(self, many: Sequence[Any]) -> list[Job]:
        return self.queue.add_many([("bench", data) for data in many])


if __name__ == "__main__":
    harness.main(BullpenSync)

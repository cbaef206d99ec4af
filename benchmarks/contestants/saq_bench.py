"""saq on Redis and uvloop. Delayed jobs have a resolution of a second there."""

import asyncio
from collections.abc import Sequence
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
from saq import Queue, Worker  # type: ignore[import-not-found]  # only in the environment of this file


class Saq:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.queue = Queue.from_url(task.url, name=task.queue)

    async def open(self) -> None:
        await self.queue.connect()

    async def add(self, data: Any) -> Any:
        options: dict[str, Any] = {"retries": self.task.attempts, "ttl": 60 if self.task.wants_result else -1}
        if self.task.due_at is not None:
            options["scheduled"] = int(self.task.due_at)
        return await self.queue.enqueue("bench", data=data, timeout=0, **options)

    async def add_many(self, many: Sequence[Any]) -> None:
        await asyncio.gather(*(self.add(data) for data in many))

    async def ask(self, data: Any) -> None:
        # Its own wait listens for a message and needs about a second to find it; looking again and again is faster.
        added = await self.add(data)
        while not added.completed:
            await asyncio.sleep(0.0002)
            await added.refresh()

    async def work(self, tally: Any) -> None:
        handle_data = harness.async_handler(self.task, tally)

        async def bench(context: Any, *, data: Any) -> None:
            await handle_data(data, context["job"].attempts - 1)

        worker = Worker(self.queue, [("bench", bench)], concurrency=self.task.concurrency)
        await worker.start()


if __name__ == "__main__":
    harness.main(Saq, uvloop=True)

"""streaq on uvloop."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
from streaq import StreaqRetry, Worker  # type: ignore[import-not-found]  # only in the environment of this file


class Streaq:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.worker = Worker(
            redis_url=task.url, queue_name=task.queue, concurrency=task.concurrency, handle_signals=False
        )
        self.handle_data: Any = None
        ttl = 60 if task.wants_result else 0
        self.bench = self.worker.task(name="bench", max_tries=task.attempts, ttl=ttl)(self.handle)

    async def handle(self, data: dict[str, Any]) -> None:
        try:
            await self.handle_data(data, self.bench.context.tries - 1)
        except harness.FailsOnPurpose:
            raise StreaqRetry("again", delay=0) from None

    async def open(self) -> None:
        if self.task.role != "work":  # running it opens it too
            await self.worker.__aenter__()

    async def add(self, data: Any) -> Any:
        added = self.bench.enqueue(data)
        if self.task.due_at is not None:
            added = added.start(schedule=datetime.fromtimestamp(self.task.due_at, UTC))
        return await added

    async def add_many(self, many: Sequence[Any]) -> None:
        added = [self.bench.enqueue(data) for data in many]
        if self.task.due_at is not None:
            due = datetime.fromtimestamp(self.task.due_at, UTC)
            added = [each.start(schedule=due) for each in added]
        await self.worker.enqueue_many(added)

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        await added.result(10)

    async def work(self, tally: Any) -> None:
        self.handle_data = harness.async_handler(self.task, tally)
        await self.worker.run_async()


if __name__ == "__main__":
    harness.main(Streaq, uvloop=True)

"""arq on uvloop. It polls: the pause is set to a hundredth of its default."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
from arq import Retry, create_pool, func
from arq.connections import RedisSettings
from arq.worker import Worker

POLL_S = 0.005


class Arq:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.settings = RedisSettings.from_dsn(task.url)

    async def open(self) -> None:
        self.pool = await create_pool(self.settings, default_queue_name=self.task.queue)

    async def add(self, data: Any) -> Any:
        if self.task.due_at is None:
            return await self.pool.enqueue_job("bench", data)
        return await self.pool.enqueue_job("bench", data, _defer_until=datetime.fromtimestamp(self.task.due_at, UTC))

    async def add_many(self, many: Sequence[Any]) -> None:
        for data in many:
            await self.add(data)

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        await added.result(poll_delay=0.0002)

    async def work(self, tally: Any) -> None:
        handle_data = harness.async_handler(self.task, tally)

        async def bench(context: Any, data: Any) -> None:
            try:
                await handle_data(data, context["job_try"] - 1)
            except harness.FailsOnPurpose:
                raise Retry(defer=0) from None

        worker = Worker(
            [func(bench, name="bench", keep_result=60 if self.task.wants_result else 0)],
            redis_settings=self.settings,
            queue_name=self.task.queue,
            max_jobs=self.task.concurrency,
            poll_delay=POLL_S,
            handle_signals=False,
        )
        await worker.async_run()


if __name__ == "__main__":
    harness.main(Arq, uvloop=True)

"""taskiq with taskiq-redis' list broker, its fastest (no acknowledgements), on uvloop."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends  # type: ignore[import-not-found]
from taskiq.api import run_receiver_task  # type: ignore[import-not-found]
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend  # type: ignore[import-not-found]


class Taskiq:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.broker = ListQueueBroker(task.url, queue_name=task.queue)
        if task.wants_result:
            self.broker = self.broker.with_result_backend(RedisAsyncResultBackend(task.url))
        if task.attempts > 1:
            self.broker = self.broker.with_middlewares(SimpleRetryMiddleware(default_retry_count=task.attempts))
        self.handle_data: Any = None

        async def handle(data: dict[str, Any]) -> None:
            await self.handle_data(data, 0)

        async def handle_counted(data: dict[str, Any], context: Annotated[Context, TaskiqDepends()]) -> None:
            await self.handle_data(data, int(context.message.labels.get("_retries", 0)))

        if task.attempts > 1:  # resolving the context costs; only retries need it
            self.bench = self.broker.task(task_name="bench", retry_on_error=True)(handle_counted)
        else:
            self.bench = self.broker.task(task_name="bench")(handle)

    async def open(self) -> None:
        await self.broker.startup()

    async def add(self, data: Any) -> Any:
        return await self.bench.kiq(data)

    async def add_many(self, many: Sequence[Any]) -> None:
        await asyncio.gather(*(self.add(data) for data in many))

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        await added.wait_result(check_interval=0.0002)

    async def work(self, tally: Any) -> None:
        self.handle_data = harness.async_handler(self.task, tally)
        await run_receiver_task(self.broker, validate_params=False, max_async_tasks=self.task.concurrency)


if __name__ == "__main__":
    harness.main(Taskiq, uvloop=True)

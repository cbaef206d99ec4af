"""dramatiq on its Redis broker. Without the middleware that it would load by default and no workload uses."""

import asyncio
from collections.abc import Sequence
from typing import Any

import dramatiq  # type: ignore[import-not-found]  # only in the environment of this file
import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
from dramatiq.brokers.redis import RedisBroker  # type: ignore[import-not-found]
from dramatiq.middleware import CurrentMessage, Retries  # type: ignore[import-not-found]
from dramatiq.results import Results  # type: ignore[import-not-found]
from dramatiq.results.backends import RedisBackend  # type: ignore[import-not-found]


class Dramatiq:
    def __init__(self, task: Any) -> None:
        self.task = task
        middleware: list[Any] = [CurrentMessage(), Retries(max_retries=task.attempts - 1, min_backoff=1, max_backoff=1)]
        if task.wants_result:
            middleware.append(Results(backend=RedisBackend(url=task.url)))
        url = f"{task.url}?max_connections=1000"  # one per thread; redis-py allows 100 by default
        self.broker = RedisBroker(url=url, middleware=middleware)
        dramatiq.set_broker(self.broker)
        self.tally: Any = harness.Tally(0)
        self.handle_data = harness.blocking_handler(task, self.tally)
        options = {"store_results": True} if task.wants_result else {}
        self.actor = dramatiq.actor(self.handle, queue_name=task.queue, actor_name="bench", **options)

    def handle(self, data: Any) -> None:
        self.handle_data(data, CurrentMessage.get_current_message().options.get("retries", 0))

    async def open(self) -> None:
        self.broker.client.ping()

    async def add(self, data: Any) -> Any:
        delay_s = self.task.delay_s
        return self.actor.send_with_options(args=(data,), delay=None if delay_s is None else int(delay_s * 1000))

    async def add_many(self, many: Sequence[Any]) -> None:
        for data in many:
            await self.add(data)

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        # Its own blocking wait polls with growing pauses from 100 ms on; a short fixed pause finds results sooner.
        while True:
            try:
                added.get_result()
                return
            except dramatiq.results.ResultMissing:
                await asyncio.sleep(0.0002)

    async def work(self, tally: Any) -> None:
        self.handle_data = harness.blocking_handler(self.task, tally)
        worker = dramatiq.Worker(self.broker, worker_threads=self.task.concurrency, worker_timeout=1)
        worker.start()


if __name__ == "__main__":
    harness.main(Dramatiq)

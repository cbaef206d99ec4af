"""celery on Redis: the solo pool for work that needs no concurrency, threads for the rest; no gossip, no events."""

import os
from collections.abc import Sequence
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
from celery import Celery  # type: ignore[import-not-found]  # only in the environment of this file


class CeleryOnRedis:
    def __init__(self, task: Any) -> None:
        self.task = task
        self.app = Celery("bench", broker=task.url, backend=task.url if task.wants_result else None)
        self.app.conf.update(
            task_default_queue=task.queue,
            task_ignore_result=not task.wants_result,
            worker_prefetch_multiplier=100 if task.concurrency == 1 else 4,
            worker_hijack_root_logger=False,
            broker_connection_retry_on_startup=True,
        )
        self.handle_data: Any = None

        def handle(this: Any, data: Any) -> None:
            try:
                self.handle_data(data, this.request.retries)
            except harness.FailsOnPurpose as error:
                raise this.retry(exc=error, countdown=0) from None

        self.bench = self.app.task(name="bench", bind=True, max_retries=task.attempts - 1)(handle)

    async def open(self) -> None:
        self.app.connection_for_write().ensure_connection()

    async def add(self, data: Any) -> Any:
        return self.bench.apply_async((data,), countdown=self.task.delay_s)

    async def add_many(self, many: Sequence[Any]) -> None:
        for data in many:
            await self.add(data)

    async def ask(self, data: Any) -> None:
        added = await self.add(data)
        added.get(interval=0.001)

    async def work(self, tally: Any) -> None:
        self.handle_data = harness.blocking_handler(self.task, tally)
        pool = "solo" if self.task.concurrency == 1 else "threads"
        quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "CRITICAL"]
        os.environ["C_FORCE_ROOT"] = "1"
        self.app.worker_main(["worker", "-P", pool, "-c", str(self.task.concurrency), "-Ofair", *quiet])


if __name__ == "__main__":
    harness.main(CeleryOnRedis)

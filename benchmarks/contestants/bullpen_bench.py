"""bullpen. Variants: `uvloop`, `processes` (handlers in children), `dead_letters`, `unguarded` (see that file),
`all_events` (none is trimmed), `own_options` (of each job), `fsync` and `replicated` (how safe an add is)."""

import itertools
import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import harness  # type: ignore[import-not-found]  # beside this file, which is run as a script
import unguarded  # type: ignore[import-not-found]

from bullpen._kernel import json
from bullpen.queue import Durability, Job, NewJob, Queue
from bullpen.queue.arguments import NewJobArguments
from bullpen.worker import Worker

LEVELS: dict[str, Durability | str] = {"fsync": "fsync", "replicated": Durability.replicated(1)}


class Bullpen:
    def __init__(self, task: Any) -> None:
        self.task = task
        level = next((LEVELS[word] for word in task.variant if word in LEVELS), "memory")
        self.queue = Queue(
            task.queue,
            connection=task.url,
            durability=level,
            events_max_len=10_000_000 if "all_events" in task.variant else None,
            attempts=task.attempts,
        )
        self.options: NewJobArguments = {}
        if task.due_at is not None:
            self.options["at"] = datetime.fromtimestamp(task.due_at, UTC)
        if task.attempts > 1 and "backoff" not in task.variant:
            _retry_at_once(self.queue)
        if "unguarded" in task.variant:
            unguarded.replace_scripts()
        self.next_options: Iterator[NewJobArguments] = itertools.repeat(self.options)
        if "own_options" in task.variant:
            self.next_options = map(own_options, itertools.count())

    async def open(self) -> None:
        await self.queue.counts()

    async def add(self, data: Any) -> Job:
        return await self.queue.add("bench", data, **next(self.next_options))

    async def add_many(self, many: Sequence[Any]) -> list[Job]:
        options = self.next_options
        return await self.queue.add_many([NewJob("bench", data, next(options)) for data in many])

    async def ask(self, data: Any) -> None:
        job = await self.queue.add("bench", data)
        await job.result()

    async def work(self, tally: Any) -> None:
        task = self.task
        handle_data = harness.async_handler(task, tally, counts=False)

        async def handle(job: Job) -> None:
            await handle_data(job.data, job.attempts_made)

        in_children = "processes" in task.variant
        worker = Worker(
            task.queue,
            burn_in_child if in_children else handle,
            connection=task.url,
            concurrency=task.concurrency,
            processes=in_children,
            dead_letters="dead_letters" in task.variant,
        )
        if in_children:
            worker.on("active", lambda job: tally.began({}))
        # Counted when the server has confirmed it, not when the handler returned.
        worker.on("failed" if task.handler == "fail" else "completed", lambda *_: tally.ended())
        await worker.start()


def own_options(number: int) -> NewJobArguments:
    own_id = f"order-{os.getpid()}-{number}"
    return {"attempts": 5, "delay": 600_000 + number, "priority": number % 10 + 1, "job_id": own_id}


def _retry_at_once(queue: Queue) -> None:
    """Jobs without a backoff, as Node writes them by default. Our own producers always write one."""
    options = queue._defaults
    object.__setattr__(options, "backoff", None)
    object.__setattr__(options, "wire_json", json.encode(options.to_wire()))


def burn_in_child(job: Job) -> None:
    harness.burn()


if __name__ == "__main__":
    harness.main(Bullpen)

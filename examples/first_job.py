"""A queue, a worker, a result."""

import asyncio

from bullpen import Job, Queue, Worker


async def greet(job: Job) -> str:
    return f"Hello {job.data['name']}"


async def main() -> None:
    async with Queue("greetings") as queue, Worker("greetings", greet):
        job = await queue.add("greet", {"name": "Ada"})
        print(await job.result(timeout=10_000))


if __name__ == "__main__":
    asyncio.run(main())

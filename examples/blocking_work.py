"""Blocking calls in threads, heavy computing in child processes that are killed when their time is up."""

import asyncio
import time

from bullpen import Job, JobFailed, Queue, Worker


def wait_for_printer(job: Job) -> str:
    """Blocks: a plain `def` runs in a thread. A thread cannot be stopped, so it looks at `job.cancelled` itself."""
    for page in range(job.data["pages"]):
        if job.cancelled:
            return f"stopped at page {page}"
        time.sleep(0.02)
        job.sync.progress((page + 1) * 100 // job.data["pages"])
    return f"{job.data['pages']} pages"


def count_primes(job: Job) -> int:
    """Computes: in a process of its own it slows nobody down, and can be killed."""
    return sum(all(n % d for d in range(2, int(n**0.5) + 1)) for n in range(2, job.data["below"]))


async def main() -> None:
    async with (
        Queue("printer") as printer,
        Queue("primes", attempts=1) as primes,
        Worker("printer", wait_for_printer, concurrency=4),
        Worker("primes", count_primes, concurrency=2, processes=True, timeout=1_500),
    ):
        pages = await printer.add_many([("print", {"pages": n}) for n in (1, 2, 3)])
        small = await primes.add("count", {"below": 10_000})
        endless = await primes.add("count", {"below": 1_000_000_000})
        print(*[await job.result(timeout=30_000) for job in pages], sep=", ")
        print(await small.result(timeout=30_000), "primes")
        try:
            await endless.result(timeout=30_000)
        except JobFailed as error:
            print(error.reason)


if __name__ == "__main__":
    asyncio.run(main())

"""A service that is away: retries, a dead letter, and a redrive after the repair."""

import asyncio

from bullpen import Backoff, Job, JobFailed, Queue, Worker

service_is_up = False


async def call_service(job: Job) -> str:
    if "url" not in job.data:
        raise KeyError("url")  # named below as permanent: another try would not help
    if not service_is_up:
        raise ConnectionError("service away")
    return f"called {job.data['url']} in take {job.attempts_started}"


async def main() -> None:
    global service_is_up
    queue = Queue("calls", attempts=3, backoff=Backoff.exponential(100))
    worker = Worker("calls", call_service, dead_letters=True, permanent_errors=(KeyError,))
    worker.on("retrying", lambda job, reason, delay_ms: print(f"job {job.id}: {reason}, again in {delay_ms} ms"))
    async with queue, worker:
        for job in await queue.add_many([("call", {"url": "https://example.com"}), ("call", {})]):
            try:
                await job.result(timeout=10_000)
            except JobFailed as error:
                print(f"job {job.id} failed for good: {error.reason}")

        service_is_up = True
        async for letter in queue.dead_letters:
            print(f"dead letter {letter.id}: {letter.cause} after {letter.attempts_made} attempts, {letter.data}")
            if letter.cause == "exhausted":
                job_id = await queue.dead_letters.redrive(letter.id, by="the example")
                redriven = await queue.get_job(job_id)
                assert redriven is not None
                print(await redriven.result(timeout=10_000))
            else:
                await queue.dead_letters.discard(letter.id)


if __name__ == "__main__":
    asyncio.run(main())

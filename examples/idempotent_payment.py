"""A handler that dies right after the effect is run again; the idempotency key makes the second run harmless.

The "provider" is a file that remembers keys, as a real one does with the key it is sent.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from bullpen import Job, Queue, Worker

PROVIDER = Path("provider.json")


def charges() -> dict[str, int]:
    return dict(json.loads(PROVIDER.read_text())) if PROVIDER.exists() else {}


def charge(key: str, amount: int) -> bool:
    """Charge once per key; True if this call did it."""
    known = charges()
    PROVIDER.write_text(json.dumps({**known, key: amount}))
    return key not in known


async def pay(job: Job) -> str:
    is_new = charge(job.idempotency_key, job.data["amount"])
    if is_new and job.attempts_started == 1:
        os._exit(1)  # a crash at the worst moment: charged, and nobody knows
    return f"run {job.attempts_started}, {'charged' if is_new else 'was charged already'}"


async def work() -> None:
    async with Worker("payments", pay, lock=1_000, stalled_interval=250) as worker:
        await worker.run()


async def main() -> None:
    async with Queue("payments") as queue:
        job = await queue.add("pay", {"amount": 100})
        doomed = await asyncio.create_subprocess_exec(sys.executable, __file__, "work")
        print(f"the first worker ended with {await doomed.wait()}")
        async with Worker("payments", pay, lock=1_000, stalled_interval=250):
            print(await job.result(timeout=30_000))
    print(f"charges: {list(charges().values())}")


if __name__ == "__main__":
    if sys.argv[1:] != ["work"]:
        PROVIDER.unlink(missing_ok=True)
    asyncio.run(work() if sys.argv[1:] == ["work"] else main())

"""One worker in a process that will be killed, frozen or asked to leave. Started by `arena.Arena.start_worker`.

In: one JSON argument. Out: lines on stdout: `ready`, `began <job> <fence>`, `lock_lost <job>`, `stalled <job>`,
`error <text>`, `lag <ms>`, `hung <ms>`, `closed`; the books in the directory it was given.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from bullpen._kernel import telemetry
from bullpen.worker import Worker
from tests.chaos.arena import Books


def _move_wall_clock(offset_s: float) -> None:
    """This machine's clock is wrong: everything in this process that asks for the time gets the wrong one."""
    true_time, true_time_ns = time.time, time.time_ns
    time.time = lambda: true_time() + offset_s
    time.time_ns = lambda: true_time_ns() + int(offset_s * 1e9)


async def main(order: dict[str, Any]) -> None:
    books = Books(Path(order["directory"]))
    books.on_begin = lambda job: print("began", job.id, job.fence)

    def on_event(name: str, fields: dict[str, Any]) -> None:
        if name in ("worker.loop_lag", "worker.hung"):
            print(name.rpartition("_" if name.endswith("lag") else ".")[2], fields["lag_ms"])

    telemetry.subscribe(on_event)
    worker = Worker(order["queue"], books.handle, connection=order["url"], **order["options"])
    worker.on("lock_lost", lambda job, error: print("lock_lost", job.id))
    worker.on("stalled", lambda job_id: print("stalled", job_id))
    worker.on("error", lambda error: print("error", error))
    await worker.start()
    asyncio.get_running_loop().call_soon(print, "ready")  # when `run` waits: its signal handlers are in place by then
    await worker.run(signals=True)
    print("closed")


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("bullpen.worker").setLevel(logging.INFO)  # tells of signals
    given = json.loads(sys.argv[1])
    if given["offset_s"]:
        _move_wall_clock(given["offset_s"])
    asyncio.run(main(given))

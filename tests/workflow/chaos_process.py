"""A workflow in a process that will be killed, also by itself: between the commit and the settling of its job.

Started by `test_chaos` with one JSON argument. `die_after` n: SIGKILL to itself right after its n-th commit.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from typing import Any

from bullpen._kernel import telemetry
from bullpen.app import Bullpen
from bullpen.ledger import Ledger
from bullpen.settings import Settings
from bullpen.workflow.definition import Definition, States, Transition
from bullpen.workflow.locks import LedgerLocks, RedisLocks
from bullpen.workflow.service import Workflow
from tests.workflow.stored import Stored, get, put, redis_orders, sql_orders


def die_after(commits: int) -> None:
    seen = 0

    def listen(name: str, fields: dict[str, Any]) -> None:
        nonlocal seen
        if name == "workflow.moved":
            seen += 1
            if seen == commits:
                os.kill(os.getpid(), signal.SIGKILL)

    telemetry.subscribe(listen)


async def add(entity: Any, payload: int) -> Any:
    await asyncio.sleep(0)
    return put(entity, "amount", get(entity, "amount") + payload)


def workflow_of(app: Bullpen, stored: Stored, queue: str, steps: int) -> Workflow[Any, int, str, str]:
    """States s0, s1, …, each left by one event: an event that comes too early leads nowhere, and comes again."""
    from bullpen._kernel.backoff import Backoff
    from bullpen.ports.bindings import BullMQ, BullMQEvent, DefaultJobOptions

    definition = Definition[Any, int, str, str](
        name="chaos",
        states=States(initial="s0", idles=[f"s{n}" for n in range(steps)], finals=[f"s{steps}"], failed="failed"),
        transitions=[
            Transition(event=f"e{n}", from_=f"s{n - 1}", to=f"s{n}", actions=[add]) for n in range(1, steps + 1)
        ],
        entity=stored.store,  # type: ignore[arg-type]  # states are plain text here
        payloads={f"e{n}": int for n in range(1, steps + 1)},
    )
    binding = BullMQ(
        events=[BullMQEvent(queue=queue, event=f"e{n}", job_name=f"e{n}") for n in range(1, steps + 1)],
        concurrency=8,
        default_job_options=DefaultJobOptions(attempts=1_000, backoff=Backoff.fixed(50), remove_on_complete=True),
    )
    short = {"worker_options": {"lock": 1_000, "stalled_interval": 300}}
    # As the job's lock: the turn of a dead one ends soon.
    locks: Any = (
        RedisLocks(app.connection, lease=1_000)
        if stored.ledger is None
        else LedgerLocks(stored.ledger.turns, "orders", lease=1_000)
    )
    return app.workflow(definition, bullmq=binding, client_options=short, locks=locks)


async def main(order: dict[str, Any]) -> None:
    app = Bullpen(settings=Settings.load(environ={}, redis_url=order["redis"]))
    if order["store"] == "redis":
        stored = redis_orders(app.connection, status_type=str)
    else:
        stored = sql_orders(Ledger(order["database"]), status_type=str)
    if order["die_after"]:
        die_after(order["die_after"])
    workflow = workflow_of(app, stored, order["queue"], order["steps"])
    await workflow.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    logging.getLogger("bullpen").setLevel(logging.CRITICAL)
    asyncio.run(main(json.loads(sys.argv[1])))

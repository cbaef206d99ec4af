"""A workflow on access of its own, in a process that dies in its first action. Started by `test_turns`.

One JSON argument: `redis` and `dies`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

from bullpen.app import Bullpen
from bullpen.ports.bindings import BullMQ, BullMQEvent
from bullpen.settings import Settings
from bullpen.workflow import Definition, InlineEntities, States, Transition, Workflow


def workflow_of(app: Bullpen, *, dies: bool) -> Workflow[Any, Any, str, str]:
    async def load(urn: str) -> Any:
        status = await app.connection.shared_door("e").call("GET", f"entity:{urn}")
        return None if status is None else {"urn": urn, "status": status.decode()}

    async def update(entity: Any, status: str) -> Any:
        await app.connection.shared_door("e").call("SET", f"entity:{entity['urn']}", status)
        return {**entity, "status": status}

    async def charge(entity: Any, payload: Any) -> Any:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return entity

    definition = Definition[Any, Any, str, str](
        name="order",
        states=States(idles=["new"], finals=["paid"], failed="failed"),
        transitions=[Transition(event="pay", from_="new", to="paid", actions=[charge])],
        entity=InlineEntities(
            new=dict,
            load=load,
            update=update,
            status=lambda entity: str(entity["status"]),
            urn=lambda entity: str(entity["urn"]),
        ),
    )
    return app.workflow(
        definition,
        bullmq=BullMQ(
            events=[BullMQEvent(queue="orders", event="pay")], worker_options={"lock": 1_000, "stalled_interval": 300}
        ),
    )


async def main(order: dict[str, Any]) -> None:
    app = Bullpen(settings=Settings.load(environ={}, redis_url=order["redis"]))
    await workflow_of(app, dies=order["dies"]).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

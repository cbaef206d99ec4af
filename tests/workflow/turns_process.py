"""A third of the producers and consumers of one busy entity; started by `test_turns` with one JSON argument.

Prints "ready", waits for a line, produces its share, and consumes until it is killed. Each run of the action is counted
in Redis, beside whatever keeps the entities.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from bullpen.app import Bullpen
from bullpen.ledger import Ledger
from bullpen.ports.bindings import BullMQ, BullMQEvent, Kafka, KafkaEvent, RabbitMQ, RabbitMQEvent
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.workflow import Definition, States, Transition
from tests.loops import FACTORIES
from tests.workflow.stored import Stored, get, put, redis_orders, sql_orders


def stored_of(order: dict[str, Any], connection: Connection) -> Stored:
    if order["store"] == "redis":
        return redis_orders(connection, status_type=str)
    return sql_orders(Ledger(order["database"]), status_type=str)


def binding_of(order: dict[str, Any]) -> dict[str, Any]:
    """What carries the events; nothing where they are emitted."""
    source, address = order["source"], order["broker"]
    match order["way"]:
        case "bullmq":
            bound: Any = BullMQEvent(queue=source, event="pay", job_name="pay")
            return {"bullmq": BullMQ(events=[bound], concurrency=20)}
        case "rabbitmq":
            bound = RabbitMQEvent(queue=source, event="pay", job_name="pay")
            return {"rabbitmq": RabbitMQ(urls=address, events=[bound], concurrency=20)}
        case "kafka":
            bound = KafkaEvent(topic=source, event="pay", job_name="pay")
            return {"kafka": Kafka(brokers=address, events=[bound], concurrency=20)}
    return {}


async def main(order: dict[str, Any]) -> None:
    app = Bullpen(settings=Settings.load(environ={}, redis_url=order["redis"]))
    stored = stored_of(order, app.connection)

    async def charge(entity: Any, payload: int) -> Any:
        await app.connection.shared_door("runs").call("INCR", "runs")
        await asyncio.sleep(0.005)  # a quick provider
        return put(entity, "amount", get(entity, "amount") + payload)

    workflow = app.workflow(
        Definition[Any, int, str, str](
            name="order",
            states=States(idles=["new"], failed="failed"),
            transitions=[Transition(event="pay", from_="new", to="new", actions=[charge])],
            entity=stored.store,  # type: ignore[arg-type]  # states are plain text here
        ),
        **binding_of(order),
    )
    if order["way"] != "emit":
        await workflow.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

    async def produce() -> None:
        apply = workflow.emit if order["way"] == "emit" else workflow.send
        for _ in range(order["each"]):
            await apply("pay", "urn:1", 1)

    await asyncio.gather(*(produce() for _ in range(order["producers"])))
    print("produced", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    with asyncio.Runner(loop_factory=FACTORIES[given["loop"]]) as runner:
        runner.run(main(given))

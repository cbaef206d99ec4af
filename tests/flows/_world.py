"""A small company for commands to look at: queues, schedules, dead letters, outbox, runs, messages, a program."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from bullpen.errors import JobFailed
from bullpen.ledger import Ledger
from bullpen.messages import Messages
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.queue import Job, Queue
from bullpen.redis import Connection
from bullpen.runs import RunPayload, RunService
from bullpen.runs.service import run_queue
from bullpen.testing import RedisServer
from bullpen.testing.contracts.source import an_event
from bullpen.worker import Worker
from tests.databases import item
from tests.messages.kit import person

PROGRAM = """
from bullpen import Bullpen
from bullpen.outbox import EventRoutes, ProjectorOptions
from bullpen.ports.channel import Accepted, ChannelHealth
from bullpen.workflow import *

app = Bullpen()

async def api(scope, receive, send): ...


@app.handler("shop")
async def handle(job):
    return job.name

class Echo:
    async def send(self, message):
        return Accepted(message.event_type)
    async def check(self):
        return ChannelHealth(True)
    async def aclose(self): ...

app.use_outbox().route("echo:*", Echo())
routes = EventRoutes()

@routes.on("payment.*", to="echo:x", since="now")
def payment(event):
    return {"inverse": 1 / event.data["number"]}

app.projector(routes, options=ProjectorOptions(max_tries=1))
shelf = {"urn:1": "new", "urn:2": "sent"}
app.workflow(Definition(
    name="parcel",
    states=States(initial="new", idles=["new"], finals=["sent"], failed="lost"),
    transitions=[Transition(event="send", from_="new", to="sent")],
    entity=InlineEntities(new=lambda: "new", load=shelf.get, update=lambda e, s: s, status=str, urn=str),
    events=AnyTransport(events=[AnyEvent(source="parcels", event="send", job_name="send")]),
))
"""


async def fill(server: RedisServer, database: str, directory: Path) -> dict[str, str]:
    """Make everything; returns the names by which commands can ask for it."""
    (directory / "shop.py").write_text(PROGRAM)
    (directory / "people.csv").write_text("id,zone,channel,address,birthday\nada,UTC,email,ada@x,1815-12-10\n")
    known = {"redis": server.url, "database": database, "directory": str(directory)}
    known |= await _queues(server)
    async with Ledger(database, dead_letter_type=None) as ledger:
        known |= await _rows(ledger)
        known |= await _runs(ledger, server)
        known |= await _messages(ledger)
        await ledger.events.append(None, "payment-1", [an_event(number) for number in range(3)])
    return known


async def _queues(server: RedisServer) -> dict[str, str]:
    async def handle(job: Job) -> str:
        await job.log("a line")
        if job.name == "bad":
            raise ValueError("no stamp")
        return "sent"

    known: dict[str, str] = {}
    async with Queue("emails", connection=server.url, attempts=1) as queue:
        async with Worker("emails", handle, connection=server.url, dead_letters=True):
            ended = [await queue.add("bad", job_id=f"f{number}") for number in range(8)]
            ended.append(await queue.add("good", job_id="c1"))
            for job in ended:
                with contextlib.suppress(JobFailed):
                    await job.result(20_000)
        for number in range(4):
            await queue.add("waits", job_id=f"w{number}")
            await queue.add("later", job_id=f"d{number}", delay=3_600_000)
        letters = {letter.job_id: letter.id for letter in await queue.dead_letters.list()}
        known |= {f"letter_{job_id}": entry for job_id, entry in letters.items()}
    for name in ("clean", "drain", "obliterate"):
        async with Queue(name, connection=server.url) as queue:
            await queue.add("waits")
    client: Any = server.client()
    due = int(time.time() * 1000) + 3_600_000
    client.hset("bull:emails:repeat:beat", mapping={"name": "beat", "ic": 1, "every": 60_000})
    client.zadd("bull:emails:repeat", {"beat": due})
    iteration = {"name": "beat", "data": "{}", "opts": "{}", "rjk": "beat", "timestamp": due, "delay": 60_000}
    client.hset(f"bull:emails:repeat:beat:{due}", mapping=iteration)
    client.zadd("bull:emails:delayed", {f"repeat:beat:{due}": due * 0x1000})
    return known


async def _rows(ledger: Ledger) -> dict[str, str]:
    stored = await ledger.outbox.enqueue_many([item(number) for number in range(7)])
    for row in await ledger.outbox.claim_due_batch("w", 6):
        await ledger.outbox.dead_letter(row, "the target answered 400", code="HTTP_400")
    return {f"row_{number}": str(each.id) for number, each in enumerate(stored)}


async def _runs(ledger: Ledger, server: RedisServer) -> dict[str, str]:
    known = {}
    connection = Connection(server.url)
    async with run_queue(connection) as queue:
        for number in range(3):
            run_id = f"00000000-0000-4000-8000-00000000000{number}"
            payload = RunPayload(run_id=run_id, tenant_id="alice", version_id="v1", definition={}, context_inputs={})
            known[f"run_{number}"] = run_id
            await RunService(ledger.transactions, queue).submit(payload, actor="test")
    await connection.aclose()
    async with ledger.database.transaction() as opened:
        statement = f"UPDATE bullpen_runs SET status = 'FAILED', error_message = 'no' WHERE id = '{known['run_1']}'"
        await opened.exec_driver_sql(statement)
    return known


async def _messages(ledger: Ledger) -> dict[str, str]:
    messages = Messages(ledger, MemoryClient())
    known = {}
    tomorrow = f"1990-{datetime.now(UTC) + timedelta(days=1):%m-%d}"
    try:
        for number, status in enumerate(("FAILED", "PARKED", "CREATED", "SENT")):
            await messages.recipients.save(person(number, zone="UTC", occasions={"birthday": tomorrow}))
            await messages.planner().run_until_done()
            (row,) = await messages.store.find(recipient_id=f"person-{number}")
            known[f"message_{status.lower()}"] = row.id
            async with ledger.database.transaction() as connection:
                await connection.exec_driver_sql(
                    f"UPDATE bullpen_messages SET status = '{status}' WHERE id = '{row.id}'"
                )
    finally:
        await messages.aclose()
    return known


def prepared(server: RedisServer, database: str, directory: Path) -> dict[str, str]:
    return asyncio.run(fill(server, database, directory))

"""Wrong programs: each marked line is an error for every checker."""

from __future__ import annotations

from datetime import timedelta
from typing import TypedDict

from bullpen import AddArguments, Codec, Connection, Job, NewJob, NewJobArguments, Queue, QueueEvents


class Mail(TypedDict):
    to: str


Queue("a", attemps=5)  # error
Queue("a", attempts="5")  # error
Queue("a", job_id="same")  # error
Queue("a", connection=5)  # error
Queue("a", lock=30_000)  # error
Queue("a", remove_on_complete="all")  # error
Queue("a", max_buffered=None)  # error
Queue("a", backoff="exponential")  # error
Queue("a", backoff={"type": "exponentiel", "delay": 5})  # error
Queue("a", backoff={"type": "fixed"})  # error
Queue(5)  # error


async def adds(queue: Queue) -> None:
    await queue.add("x", {}, prioritty=3)  # error
    await queue.add("x", {}, attempts="many")  # error
    await queue.add("x", {}, delay=0.5)  # error
    await queue.add("x", {}, delay="5 s")  # error
    await queue.add("x", {}, at="tomorrow")  # error
    await queue.add("x", {}, at=timedelta(seconds=1))  # error
    await queue.add("x", {}, job_id=7)  # error
    await queue.add("x", {}, lifo="yes")  # error
    await queue.add("x", {}, meta={"tenant_id": "acme"})  # error
    await queue.add("x", {}, retries=3)  # error
    await queue.add("x", {}, removeOnComplete=True)  # error
    await queue.add("x", {}, durability=2)  # error
    await queue.add("x", {}, replace_finished=1.5)  # error
    await queue.add("x", {}, large_retention="ignore")  # error
    await queue.add({"no": "name"})  # error


async def many(queue: Queue) -> None:
    await queue.add_many([NewJob("x", {}, {"prioritty": 3})])  # error
    await queue.add_many([NewJob("x", {}, {"attempts": "many"})])  # error
    await queue.add_many([NewJob("x", {}, {"durability": "fsync"})])  # error
    await queue.add_many(["x"])  # error
    await queue.add_many([("x", {})], attempts=3)  # error


def own_options() -> None:
    one: AddArguments = {"prioritty": 3}  # error
    two: NewJobArguments = {"delay": "soon"}  # error
    print(one, two)


async def results(queue: Queue) -> int:
    job = await queue.get_job("1")
    print(job.id)  # error
    await (await queue.add("x")).result(timeot=5)  # error
    return (await queue.counts()).waitng  # error


async def data(job: Job[Mail]) -> str:
    print(job.data["too"])  # error
    count: int = job.data["to"]  # error
    print(count, job.dta)  # error
    return await number(job)  # error


async def number(job: Job[int]) -> str:
    return str(job.data + 1)


def events(connection: Connection) -> None:
    QueueEvents("a", connection=connection, afer="0-0")  # error


def sealed(connection: Connection) -> None:
    Queue("a", connection=connection, codec="k1")  # error
    Codec({"k1": 32})  # error
    Codec(store="file:///srv")  # error
    Codec(abov=1)  # error


async def lanes(queue: Queue) -> None:
    await queue.add("x", lane=5)  # error
    await queue.lanes.set("a", wieght=2)  # error
    await queue.lanes.set("a", concurrency="3")  # error
    await queue.lanes.set("a", rate=5)  # error
    await queue.lanes.set("a", size="1")  # error
    await queue.lanes.pause(None)  # error

"""Right programs: deduplication, flows, chains, groups and chords."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, assert_type

from bullpen import (
    Added,
    Bullpen,
    Deduplication,
    Flow,
    FlowNode,
    Job,
    JobKey,
    Queue,
    TaskJob,
    WaitForChildren,
    chain,
    chord,
    group,
)
from bullpen.sync import Queue as BlockingQueue

app = Bullpen()


# ---- deduplication ----------------------------------------------------------------------------------------------


async def an_id(queue: Queue) -> Added:
    return (await queue.add("sync", {}, deduplication="shop-7")).added


async def rules(queue: Queue) -> None:
    await queue.add("sync", {}, deduplication=Deduplication("a", ttl=timedelta(hours=1), extend=True))
    await queue.add("sync", {}, deduplication=Deduplication("a", ttl=500, replace=True), delay=5_000)
    await queue.add("sync", {}, deduplication=Deduplication("a", reschedule=True), delay=5_000)
    await queue.add("sync", {}, deduplication=Deduplication("a", keep_last_if_active=True))


async def who_owns_it(queue: Queue) -> str | None:
    assert_type(await queue.remove_deduplication("a"), bool)
    return await queue.deduplication_owner("a")


def a_blocking_rule(queue: BlockingQueue) -> Added:
    return queue.add("sync", {}, deduplication="a").added


@app.task("sync", unique="pending")
async def refresh(shop: int) -> None: ...


def key_of_a_report(shop: int, requested_by: str) -> str:
    return str(shop)


@app.task("reports", unique=timedelta(hours=1), unique_key=key_of_a_report)
async def report(shop: int, requested_by: str) -> None: ...


async def without_the_rule() -> TaskJob[None]:
    return await refresh.options(unique=False).add(7)


# ---- flows ------------------------------------------------------------------------------------------------------


async def a_tree(queue: Queue, other: Queue) -> list[str]:
    paid = Flow("pay", {"amount": 100}, queue="payments", prefix="{shop}", on_failure="fail_parent", attempts=5)
    told = Flow("tell", queue=other, on_failure="ignore", delay=timedelta(seconds=1))
    tree = await queue.add_flow(
        Flow("ship", {"order": 17}, job_id="ship-17", children=[paid, told]), durability="fsync"
    )
    assert_type(tree, FlowNode)
    assert_type(tree.children, tuple[FlowNode, ...])
    return [job.name for job in tree.jobs()]


async def several_trees(queue: Queue) -> list[FlowNode]:
    return await queue.add_flows([Flow("a"), Flow("b")], add_deadline=500)


async def children_of_a_job(queue: Queue, job: Job) -> int:
    await queue.add("part", 1, job_id=f"{job.id}-1", parent=job, on_failure="wait")
    await queue.add("part", 1, parent=queue.key_of("a"), on_failure="remove")
    await queue.add("part", 1, parent=JobKey("a", "bull:mails"), on_failure="continue_parent")
    if (await job.children_counts()).pending:
        raise WaitForChildren
    values: dict[str, Any] = await job.children_values()
    reasons: dict[str, str] = {**await job.ignored_children(), **await job.failed_children()}
    return len(values) + len(reasons)


def a_blocking_child(queue: BlockingQueue) -> JobKey:
    parent = queue.add("all")
    return queue.add("part", parent=parent, on_failure="ignore").key


async def what_is_stored(queue: Queue) -> str | None:
    tree = await queue.get_flow("ship-17", depth=3, max_children=5)
    page = await queue.children_page("ship-17", "processed", cursor=None, count=10)
    async for blocked in queue.blocked_parents():
        print(blocked.job.id, blocked.failed, blocked.missing)
    return page.cursor if tree is not None else None


# ---- chains, groups, chords -------------------------------------------------------------------------------------


@app.task("texts")
async def load(name: str) -> bytes:
    return name.encode()


@app.task("texts")
def parse(raw: bytes) -> list[int]:
    return list(raw)


@app.task("texts")
async def store(job: Job[object], rows: list[int], table: str, chunk: int = 10) -> int:
    return len(rows)


@app.task("texts")
async def total(counts: list[int], at_least: int = 0) -> str:
    return str(max(at_least, sum(counts)))


async def a_chain() -> int:
    job = await chain(load.call("orders.csv"), parse, store.after(table="orders")).add()
    assert_type(job, TaskJob[int])
    return await job.result(timeout=1_000)


async def a_group() -> list[TaskJob[bytes]]:
    return await group(load.call(name) for name in ("a", "b")).add()


async def a_chord() -> str:
    counted = group(chain(load.call(name), parse, store.after(table="b", chunk=5)) for name in ("a", "b"))
    return await (await chord(counted, total.after(at_least=3), on_failure="ignore").add()).result()


async def a_step_after_a_chord() -> list[int]:
    counted = group(store.call([1], "a"), store.call([2], "b"))
    whole = chain(chord(counted, total), load, parse)
    return await (await whole.add()).result()


async def a_bounded_map() -> list[bytes]:
    return await load.map([load.call("a"), {"name": "b"}], at_once=2, timeout=500)

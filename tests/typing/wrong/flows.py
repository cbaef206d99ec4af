"""Wrong programs: each marked line is an error for every checker."""

from __future__ import annotations

from bullpen import Bullpen, Deduplication, Flow, Job, Queue, chain, chord, group

app = Bullpen()


async def rules(queue: Queue) -> None:
    Deduplication("a", extends=True)  # error
    Deduplication("a", "b")  # error
    Deduplication("a", ttl="1 h")  # error
    await queue.add("a", {}, deduplication=5)  # error
    await queue.add("a", {}, deduplicate="a")  # error
    await queue.remove_deduplication(5)  # error


@app.task("b", unique="always")  # error
async def for_ever() -> None: ...


@app.task("b", unique="pending", unique_key=5)  # error
async def with_a_number() -> None: ...


@app.task("b", parent="a")  # error
async def with_a_parent() -> None: ...


async def trees(queue: Queue, job: Job) -> None:
    Flow("a", on_failure="fail")  # error
    Flow("a", attemps=3)  # error
    Flow("a", children=["b"])  # error
    Flow("a", queue=5)  # error
    Flow("a", durability="fsync")  # error
    await queue.add_flow("a")  # error
    await queue.add_flow(Flow("a"), priority=3)  # error
    await queue.add("a", {}, parent="b", on_failure="wait")  # error
    await queue.add("a", {}, parent=job, on_failure=True)  # error
    await queue.children_page("a", "completed")  # error
    number: int = await queue.get_flow("a")  # error
    print(number)


@app.task("texts")
async def load(name: str) -> bytes:
    return name.encode()


@app.task("texts")
def parse(raw: bytes) -> list[int]:
    return list(raw)


@app.task("texts")
async def store(job: Job[object], rows: list[int], table: str) -> int:
    return len(rows)


@app.task("texts")
async def total(counts: list[int]) -> str:
    return str(sum(counts))


async def work() -> None:
    chain(load, parse)  # error
    chain(load.call(5), parse)  # error
    chain(load.call("a"), total)  # error
    chain(load.call("a"), parse.call(b""))  # error
    chain(load.call("a"), store.after(table="b"))  # error
    chain(load.call("a"), parse, store)  # error
    store.after()  # error
    store.after(tabel="a")  # error
    store.after(table=5)  # error
    chord(group(load.call("a")), total)  # error
    chord(group(load.call("a")), total.after())  # error
    chord([store.call([], "a")], total)  # error
    chord(group(store.call([], "a")), total, on_failure="fail")  # error
    group(load)  # error
    wrong: int = await (await chain(load.call("a"), parse).add()).result()  # error
    await load.map([load.call("a")], at_once="2")  # error
    print(wrong)

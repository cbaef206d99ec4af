"""Wrong programs: each marked line is an error for every checker."""

from __future__ import annotations

from bullpen import BatchOptions, Bullpen, Job

app = Bullpen()


@app.task("b", attemps=1)  # error
async def misspelt() -> None: ...


@app.task("b", job_id="a")  # error
async def with_an_id() -> None: ...


@app.task("b", attempts="1")  # error
async def wrong_type() -> None: ...


@app.task("b", concurrency=5)  # error
async def option_of_a_worker() -> None: ...


@app.task("mails")
async def send(to: str, copies: int = 1) -> str:
    return to * copies


@app.task("mails")
async def with_job(job: Job[object], to: str) -> int:
    return len(to)


async def runs() -> None:
    await send.add(too="ada")  # error
    await send.add(to=5)  # error
    await send.add()  # error
    await send.add("ada", 1, 2)  # error
    await with_job.add(job=None, to="ada")  # error
    await send.options(prioritty=1).add("ada")  # error
    await send.options(delay="5").add("ada")  # error
    number: int = await (await send.add("ada")).result()  # error
    text: str = await (await with_job.add("ada")).result()  # error
    await send.add_many([send.call(too="ada")])  # error
    await send.add_in_transaction(None, too="ada")  # error
    send.add_sync(to=5)  # error
    print(number, text)


send.add_later("ada")  # error


async def a_lane() -> None:
    await send.options(lane=5).add("ada")  # error


@app.task("rows", batch=BatchOptions(size=5))  # error
async def no_list(row: str) -> None: ...


@app.task("rows", batch=BatchOptions(size=5))
async def store(rows: list[dict[str, int]]) -> list[int]:
    return [len(row) for row in rows]


async def lists() -> None:
    await store.add([{"a": 1}])  # error
    await store.add({"a": "1"})  # error
    word: str = await (await store.add({"a": 1})).result()  # error
    print(word)

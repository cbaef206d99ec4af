"""The program that the tests of the plug-in test: an app that names a server which must never be used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

from bullpen import Bullpen, Depends, Job

app = Bullpen("redis://production.invalid:6379")
emails = app.queue("emails", attempts=5)
sent: list[str] = []
charged: list[str] = []
charged_once: set[str] = set()
started: list[str] = []


class Gateway:
    async def charge(self, key: str) -> None:
        charged_once.add(key)


@app.lifespan
async def begin() -> AsyncIterator[None]:
    started.append("begin")
    yield
    started.append("end")


@app.provide(scope="job")
async def gateway() -> AsyncIterator[Gateway]:
    yield Gateway()


@app.handler("emails")
async def send(job: Job) -> None:
    sent.append(job.data["to"])


@app.task("orders", attempts=2, backoff=60_000)
async def order(number: int, customer: str = "ada") -> int:
    if number < 0:
        raise ValueError("no such order")
    await emails.add("receipt", {"to": customer})
    await remind.options(delay=timedelta(days=3)).add(customer)
    return number


@app.task("orders")
def remind(customer: str) -> None:
    sent.append(f"reminder to {customer}")


@app.task("orders")
async def careless(amount: int) -> None:
    charged.append(f"{amount}")


@app.task("orders")
async def careful(job: Job, amount: int, gateway: Gateway = Depends()) -> None:
    await gateway.charge(job.idempotency_key)


@app.task("orders")
async def restock(name: str, count: int) -> None:
    """Its parameters have the names of those of `assert_enqueued`."""

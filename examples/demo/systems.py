"""The second act: the other four systems at work, each with a fault on purpose, on the same server and a SQLite file.

In: a server and a directory. Out: one line per system that says what was asked and what came of it; it is right or the
demo fails. Everything here is what a user would write. Elsewhere: the first act, jobs and a killed worker (`play`).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from bullpen import Bullpen, Settings

__all__ = ["Line", "tour"]

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Line:
    """What one system did."""

    system: str
    text: str
    is_right: bool

    def to_json(self) -> dict[str, Any]:
        return {"system": self.system, "text": self.text, "isRight": self.is_right}


async def tour(url: str, prefix: str, directory: Path) -> AsyncIterator[Line]:
    """All at the same time; told in order, each as soon as it is done."""
    settings = Settings.load(redis_url=url, redis_prefix=prefix, ledger_url=f"sqlite:///{directory / 'ledger.sqlite3'}")
    app = Bullpen(url, prefix=prefix, settings=settings)
    await app.ledger.migrate()
    async with Partner() as partner:
        parts = [_tasks(app), await _workflow(app), _outbox(app, partner), _run(app), _message(app)]
        running = asyncio.create_task(app.run(signals=False))
        works = [asyncio.create_task(part()) for part in parts]
        try:
            for work in works:
                yield await asyncio.wait_for(work, _PATIENCE_S)
        finally:
            for work in works:
                work.cancel()
            await asyncio.wait(works)
            await app.stop()
            await running


class Partner:
    """Somebody who takes webhooks on this machine, and notes their ids."""

    async def __aenter__(self) -> Self:
        self.ids: list[str] = []
        self._came = asyncio.Event()
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/hooks"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def until(self, count: int) -> list[str]:
        """The ids, when so many webhooks have come."""
        async with asyncio.timeout(_PATIENCE_S):
            while len(self.ids) < count:
                self._came.clear()
                await self._came.wait()
        return self.ids

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the sender has closed the connection
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
                await reader.readexactly(int(headers.get("content-length", 0)))
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                await writer.drain()
                self.ids.append(headers["webhook-id"])
                self._came.set()
        writer.close()


def _tasks(app: Bullpen) -> Any:
    failed_once: set[int] = set()

    @app.task("demo-prices", backoff=50)
    async def price(amount: int) -> int:
        if amount % 10 == 0 and amount not in failed_once:
            failed_once.add(amount)
            raise OSError("the price list is away")
        return amount * 2

    async def work() -> Line:
        results = await price.map([price.call(amount) for amount in range(1, 101)], timeout=30_000)
        is_right = results == [amount * 2 for amount in range(1, 101)] and len(failed_once) == 10
        return Line("tasks", "100 typed calls, 10 of them failed once: 100 results, in order", is_right)

    return work


async def _workflow(app: Bullpen) -> Any:
    from bullpen.workflow import Definition, RedisEntities, States, Transition

    class Status(StrEnum):
        NEW = "new"
        PAID = "paid"
        PACKED = "packed"
        FAILED = "failed"

    class Event(StrEnum):
        PAY = "pay"
        PACK = "pack"

    async def charge(order: dict[str, Any], amount: int) -> dict[str, Any]:
        return {**order, "paid": order.get("paid", 0) + amount}

    orders = RedisEntities[Status](app.connection, "demo-orders", status_type=Status)
    definition = Definition[dict[str, Any], int, Event, Status](
        name="demo-order",
        states=States(initial=Status.NEW, idles=[Status.NEW], finals=[Status.PACKED], failed=Status.FAILED),
        transitions=[
            Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[charge]),
            Transition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED),
        ],
        entity=orders,
    )
    workflow = app.workflow(definition)

    async def work() -> Line:
        for number in range(20):
            await orders.create({"urn": f"urn:order:{number}", "status": Status.NEW})
        # Every event twice, at the same time: as a broker delivers it after a lost acknowledgement.
        events = [(f"urn:order:{number}", f"event-{number}") for number in range(20)] * 2
        await asyncio.gather(*(workflow.emit(Event.PAY, urn, 5, idempotency_key=key) for urn, key in events))
        ended = [await orders.load(f"urn:order:{number}") for number in range(20)]
        is_right = all(order and order["paid"] == 5 and order["status"] == Status.PACKED for order in ended)
        text = "20 orders, every payment delivered twice: each was charged once and is packed"
        return Line("workflow", text, is_right)

    return work


def _outbox(app: Bullpen, partner: Partner) -> Any:
    from bullpen.channels import Webhook

    hook = Webhook(partner.url, allow_http=True, allowed_networks=["127.0.0.0/8"])
    app.use_outbox().route("webhook:partner", hook)

    async def work() -> Line:
        for number in range(20):
            with contextlib.suppress(ArithmeticError):
                async with app.ledger.database.transaction(tenant=None) as connection:
                    await app.outbox.enqueue(
                        connection,
                        integration_type="webhook:partner",
                        event_type="order.paid.v1",
                        payload={"order": number},
                    )
                    if number % 4 == 0:
                        raise ArithmeticError("the business transaction fails")
        keys = Counter(await partner.until(15))
        is_right = len(keys) == 15 and set(keys.values()) == {1}
        return Line("outbox", "20 transactions, 5 rolled back: 15 webhooks, each with an id of its own", is_right)

    return work


def _run(app: Bullpen) -> Any:
    from bullpen.runs import Run, RunPayload, RunStatus

    charged: Counter[str] = Counter()

    async def pay(key: str) -> str:
        charged[key] += 1
        return f"receipt for {key}"

    @app.use_runs().handler
    async def execute(run: Run) -> str:
        for step in ("fetch", "generate", "store"):
            await run.step(step, pay)
            if step == "generate" and run.job.attempts_made == 0:
                raise OSError("the machine goes down in the middle")
        return "done"

    async def work() -> Line:
        run_id = str(uuid.uuid4())
        payload = RunPayload(run_id=run_id, tenant_id="acme", version_id="v1", definition={})
        await app.runs.service.submit(payload)
        while (row := await app.runs.service.get("acme", run_id)).status is not RunStatus.COMPLETED:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        is_right = row.result == "done" and len(charged) == 3 and set(charged.values()) == {1}
        return Line("run", "three paid steps, a crash after the second: completed, each step was paid once", is_right)

    return work


def _message(app: Bullpen) -> Any:
    from bullpen.channels import Message
    from bullpen.messages import Late, Recipient

    sent: list[datetime] = []
    # Not the next minute, which may begin while we are still preparing.
    due = (datetime.now(UTC) + timedelta(seconds=90)).replace(second=0, microsecond=0)

    @app.use_messages().channel("console", after_crash="same_key")
    async def send(message: Message) -> str:
        sent.append(datetime.now(UTC))
        return "shown"

    app.messages.occasion("welcome", text="Welcome, {{ name }}!", send_at=due.time(), late=Late.send())

    async def work() -> Line:
        await app.messages.recipients.save(
            Recipient(
                id="ada", name="Ada", zone="UTC", channel="console", address="ada",
                occasions={"welcome": f"2000-{due:%m-%d}"},
            )
        )  # fmt: skip
        # Two schedulers at the same minute, as after a botched deployment.
        await asyncio.gather(app.messages.scheduler().run_once(), app.messages.scheduler().run_once())
        rows = [row for row in await app.messages.store.find() if row.due_at == due]
        is_right = len(rows) == 1 and all(at >= due for at in sent) and len(sent) <= 1
        text = f"a greeting for {due:%H:%M} where Ada lives, two schedulers at once: queued once, not sent early"
        return Line("message", text, is_right)

    return work

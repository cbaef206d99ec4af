"""Take the pictures of the dashboard that the pages of the docs show: `make screenshots`.

In: a server and a ledger of its own with a fixed scenario: a partner that is down, a queue without workers, a paused
one, jobs that run, a flow that waits, schedules, a workflow, deliveries, runs and messages. Out:
docs/images/dashboard-PAGE.png of every page, and the same dark (-dark) and on a telephone (-phone); those that no page
of the docs shows are not kept in the repository. `--out DIRECTORY` writes elsewhere, `--only PAGE` takes one. Needs
Chromium and playwright.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, async_playwright
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bullpen import Bullpen, Queue, Worker
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.http.serve import HttpService
from bullpen.ledger import OutboxItem, OutboxStatus
from bullpen.ledger.messages import SqlMessages
from bullpen.ledger.records import Died, Retried, Sent, Settlement
from bullpen.messages import Messages, Recipient
from bullpen.ops.alerts import Seen, Watcher
from bullpen.ops.marks import add_mark
from bullpen.ops.pauses import pause_queue
from bullpen.ops.recorder import Recorder
from bullpen.ops.symptoms import RULES, Symptom
from bullpen.ops.views.queues import OPERATIONS
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from bullpen.ports.channel import ChannelHealth
from bullpen.ports.source import SourceEvent
from bullpen.queue.flows import Flow
from bullpen.queue.history import DONE, FAILED, RETRIED, RUN, SAMPLED, WAIT, add_history, bucket_of
from bullpen.runs import RunPayload, Runs
from bullpen.settings import DashboardSettings, Settings
from bullpen.testing import RedisServer
from bullpen.wire.keys import QueueKeys
from bullpen.workflow import BullMQ, BullMQEvent, Definition, SqlEntities, States, Transition

IMAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": {"viewport": {"width": 1180, "height": 720}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1180, "height": 720}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light", "is_mobile": True, "has_touch": True},
}
_SUFFIX: Final = {"light": "", "dark": "-dark", "phone": "-phone"}
PAGES: Final = {
    "overview": "/",
    "queues": "/queues",
    "queue": "/queues/emails",
    "queue-failed": "/queues/invoices?state=failed",
    "queue-active": "/queues/images?state=active",
    "job": "/queues/invoices/jobs/late",
    "job-edit": "/queues/invoices/jobs/41/edit",
    "job-test": "/queues/invoices/jobs/late/test",
    "job-active": "/queues/images/jobs/thumb-1",
    "limits": "/queues/images/limits",
    "add": "/queues/emails/add",
    "flow": "/queues/orders/jobs/order-1/flow",
    "pause": "/queues/emails/act/pause",
    "drain": "/queues/emails/act/drain",
    "limit": "/queues/images/act/concurrency",
    "matching": "/queues/invoices/matching/retry?state=failed",
    "pause-all": "/queues-act/pause",
    "dead-letters": "/dead-letters",
    "redrive": "/dead-letters/act/redrive?store=invoices-dlq",
    "outbox": "/outbox",
    "outbox-row": "/outbox/{row}",
    "destinations": "/destinations",
    "destination": "/destinations/webhook:partnerX",
    "switch-off": "/destinations/email/act/disable",
    "unknown": "/outbox/{unknown}",
    "decide": "/outbox/{unknown}/act/again",
    "replay": "/destinations/email/rows/replay",
    "send-test": "/destinations/email/test",
    "parked": "/parked",
    "parked-event": "/parked/{parked}",
    "parked-skip": "/parked/{parked}/act/skip",
    "silence": "/health/incidents/dead_letters/invoices-dlq/silence",
    "chain": "/chains/c-9921",
    "workflows": "/workflows",
    "workflow": "/workflows/order",
    "entity": "/workflows/order/urn:order:83112",
    "emit": "/workflows/order/urn:order:83112/emit",
    "runs": "/runs",
    "run": "/runs/{run}",
    "messages": "/messages",
    "message": "/messages/{message}",
    "calendar": "/messages/calendar",
    "schedules": "/schedules",
    "schedule": "/queues/reports/schedules/payment%2Fs-reminder",
    "schedule-edit": "/queues/reports/schedules/nightly/edit",
    "workers": "/workers",
    "charts": "/charts?range=24h",
    "chart": "/charts?queue=invoices&range=24h",
    "mark": "/charts/mark",
    "live": "/live",
    "operations": "/operations",
    "health": "/health",
    "audit": "/audit",
    "search": "/search?q=s",
    "settings": "/settings",
    "problem": "/queues/nobody",
}
# Compiled under a name of its own: stacks in pictures must not tell where this checkout is.
HANDLER: Final = """
class PartnerError(Exception): ...

async def handle(job):
    await job.log(f"order {job.data['order']} begins")
    if job.name == "send":
        raise PartnerError("HTTP 503 from partner 9: try again later")
"""


@asynccontextmanager
async def shop(app: Bullpen, url: str) -> AsyncIterator[None]:
    """A shop with a partner that is down, a queue without workers, a paused one, and images that are being made."""
    queues = {name: app.queue(name) for name in ("emails", "invoices", "reports", "images", "orders")}
    await queues["emails"].add_many(
        [("send", {"orderId": 83_000 + number, "customer": f"c{number}", "to": "…"}) for number in range(1_204)]
    )
    await queues["emails"].add("later", {"orderId": 1}, delay=3_600_000)
    await queues["reports"].add_many([("month", {"month": number}) for number in range(6)])
    await pause_queue(queues["reports"], by="bo", reason="month end")
    await _fail(queues["invoices"], url)
    later: Any = {"delay": 3_600_000, "on_failure": "ignore"}
    children = [Flow("thumbnail", {"picture": number}, queue="images", **later) for number in range(4)]
    pay = Flow("pay", {"order": 83_112}, queue="invoices", **later)
    await queues["orders"].add_flow(Flow("ship", {"order": 83_112}, job_id="order-1", children=[pay, *children]))
    for schedule, cron in (
        ("nightly", "0 3 * * *"),
        ("month-end", "0 6 L * *"),
        ("payment/s-reminder", "*/15 8-18 * * 1-5"),
    ):
        await queues["reports"].upsert_scheduler(schedule, name="month", cron=cron, tz="Europe/Berlin")
    await queues["emails"].upsert_scheduler("heartbeat", name="beat", every=5_000)
    running = asyncio.Event()

    async def paint(job: Any) -> None:
        await job.progress(40)
        await job.log("read the picture\nmade it smaller")
        running.set()
        await asyncio.Event().wait()

    for number in range(1, 9):
        await queues["images"].add("thumbnail", {"picture": number}, job_id=f"thumb-{number}")
    await queues["images"].set_global_concurrency(3)
    await _past(app)
    images = Worker("images", paint, connection=url, concurrency=4, name="web-2")
    recorder = Recorder(lambda: [images])
    async with images as worker:
        task = asyncio.create_task(worker.run(signals=False))
        await running.wait()
        telling = asyncio.create_task(recorder.run())
        yield
        await worker.close(0)
        await recorder.close()
        await asyncio.gather(task, telling)


async def _past(app: Bullpen) -> None:
    """A day of invoices and mails, with a deploy after which the partner failed."""
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    marks = QueueKeys(app.prefix, OPERATIONS)
    await add_mark(app.connection, marks, "version 2.1", "ci")
    for queue, busy in (("invoices", 40), ("emails", 90), ("images", 12)):
        for step in range(96):
            at_ms = now_ms - step * 900_000
            hour = at_ms // 3_600_000 % 24
            done = busy * (2 + abs(hour - 12)) + (step * 37) % (busy // 2)
            failed = done // 6 if queue == "invoices" and step < 14 else step % 5 // 4
            slow = 12 if queue == "invoices" and step < 14 else 1
            counts = {DONE: done, FAILED: failed, RETRIED: 2 * failed, SAMPLED: 40}
            for number, ms in enumerate((4, 6, 9, 14, 22, 60, 180)):
                counts[WAIT + bucket_of(ms + step % 7)] = 20 - 2 * number
                counts[RUN + bucket_of((ms + 30 + step % 11) * slow)] = 20 - 2 * number
            names = {"": counts, "send": {**counts, DONE: done // 3}, "create": {**counts, DONE: done * 2 // 3}}
            await add_history(app.connection, QueueKeys(app.prefix, queue), names, at_ms)


async def _fail(queue: Queue, url: str) -> None:
    handlers: dict[str, Any] = {}
    exec(compile(HANDLER, "/app/shop/mail.py", "exec"), handlers)
    await queue.add_many([("create", {"order": number}) for number in range(40)])
    for number in range(11):
        await queue.add("send", {"order": number, "tenantId": "t1"}, attempts=1)
    data = {
        "order": 83_112,
        "customer": "c112",
        "token": "sk_live_1",
        "lines": [{"sku": "A1", "count": 2}, {"sku": "B7", "count": 1}],
    }
    await queue.add("send", data, attempts=3, backoff=3_600_000, job_id="late")
    async with Worker(queue.name, handlers["handle"], connection=url, dead_letters=True, name="web-1") as worker:
        task = asyncio.create_task(worker.run(signals=False))
        while (await queue.counts()).waiting or (await queue.counts()).active:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        await worker.close()
        await task


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    urn: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default="created")
    amount: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=1)


def is_paid_in_full(order: Order, _payload: Any) -> bool:
    return order.amount < 5_000


async def fill_workflow(app: Bullpen) -> None:
    """Orders in all states, one of them with a past."""
    orders = SqlEntities[Order, str](Order, app.ledger)
    async with app.ledger.database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    moves = [
        ("order.submitted", "created", "payment pending", ()),
        ("order.paid", "payment pending", "paid", (is_paid_in_full,)),
        ("order.packed", "paid", "packed", ()),
        ("order.shipped", "packed", "shipped", ()),
        ("order.cancelled", "payment pending", "cancelled", ()),
    ]
    definition = Definition[Order, Any, str, str](
        name="order",
        states=States(
            initial="created",
            idles=["created", "payment pending", "paid", "packed"],
            finals=["shipped", "cancelled"],
            failed="failed",
        ),
        transitions=[
            Transition(event=event, from_=source, to=target, conditions=asked) for event, source, target, asked in moves
        ],
        entity=orders,
        bullmq=BullMQ(events=[BullMQEvent(queue="order-events", event=each[0], job_name=each[0]) for each in moves]),
    )
    workflow = app.workflow(definition)
    path = ("order.submitted", "order.paid", "order.packed", "order.shipped")
    for number in range(60):
        urn = f"urn:order:{83_100 + number}"
        await orders.create(Order(urn=urn, status="created", amount=9_900 if number == 12 else 120))
        steps = path[: 1 if number == 12 else number % 5]
        for event in steps:
            ids = {"correlation_id": "c-9921" if number == 12 else f"c-{number}", "user_id": "u7"}
            await workflow.emit(event, urn, **ids)


async def fill_ledger(app: Bullpen) -> None:
    """A partner that is down, mails that arrive, deliveries of one order, a run with steps, birthdays of tomorrow."""
    await app.ledger.migrate()
    await fill_workflow(app)
    for number in range(24):
        partner = number % 3 != 0
        kind = "webhook:partnerX" if partner else "email"
        outcome: Any = Sent(f"250 ok queued as 4f{number:03x}")
        if partner:
            late = Retried("HTTP 503 from partner 9: try again later", "UNAVAILABLE", 3_600_000)
            outcome = late if number % 4 else Died("HTTP 401 from partner 9: key expired", "REJECTED")
        await deliver(app, kind, outcome, number, "c-9921" if number in (0, 1) else f"c-{number}")
    lost = Died("the connection ended before the answer", "UNKNOWN_OUTCOME")
    await deliver(app, "email", lost, 60, "c-60")
    await app.ledger.outbox.enqueue_many([item("webhook:partnerX", number, f"c-{number}") for number in range(30, 52)])
    await app.ledger.destinations.trip("webhook:partnerX", pause_ms=600_000, longest_ms=600_000)
    await app.ledger.destinations.disable("sms", by="bo", reason="contract ended")
    event = SourceEvent(
        id="0f6c",
        stream="order-83101",
        type="order.refunded",
        version=4,
        position=1_204,
        recorded_at=datetime.now(UTC),
        data_bytes=b'{"order": 83101, "amount": 12, "token": "sk_live_1"}',
        metadata_bytes=b"{}",
    )
    async with app.ledger.database.transaction_without_tenant() as connection:
        await app.ledger.parked.park(connection, "default", event, "KeyError: 'vat'", tries=3)
    failed = Symptom("dead_letters", "invoices-dlq", 11, "11 dead letters need attention", "bullpen dead-letters list")

    async def look() -> Seen:
        return Seen([failed], frozenset(rule.source for rule in RULES.values()))

    await Watcher(app.ledger, look, []).watch()
    runs = Runs(app.ledger, app.connection, prefix=app.prefix)
    for number in range(3):
        payload = RunPayload(
            run_id=f"7c6f4b0e-0000-4000-8000-00000000000{number}",
            tenant_id="t1",
            version_id="report-v3",
            definition={"month": "2026-10"},
            context_inputs={},
        )
        await runs.service.grant("t1", 100, reference=f"g{number}", actor="ada")
        await runs.service.submit(payload, actor="ada", cost=5)
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    messages = Messages(app.ledger, MemoryClient(MemoryBroker()))
    messages.channel("email", Nobody(), after_crash="same_key")
    zones = ("Europe/Berlin", "Asia/Tokyo", "America/New_York", "Europe/London", "America/Sao_Paulo")
    await messages.recipients.save_many(
        Recipient(
            id=f"customer-{number}",
            tenant_id="t1" if number % 2 else "t2",
            zone=zones[number % 5],
            channel="email",
            address=f"customer-{number}@example.com",
            occasions={"birthday": tomorrow.strftime("1990-%m-%d")},
        )
        for number in range(80)
    )
    await messages.planner().run_until_done()
    await messages.aclose()


class Nobody:
    """A channel that is never asked: no sender runs."""

    async def send(self, message: Any) -> Any:
        raise AssertionError("no sender runs here")

    async def check(self) -> ChannelHealth:
        return ChannelHealth(True)

    async def aclose(self) -> None: ...


def item(kind: str, number: int, correlation: str) -> OutboxItem:
    return OutboxItem(
        integration_type=kind,
        event_type="order.paid.v1",
        source_stream_id=f"order-{83_100 + number}",
        source_event_id=f"{kind}-{number}",
        payload={"order": 83_100 + number, "customer": f"c{number}", "token": "sk_live_1"},
        tenant_id="t1" if number % 2 else "t2",
        correlation_id=correlation,
        ordering_key=f"order-{83_100 + number}",
    )


async def deliver(app: Bullpen, kind: str, outcome: Any, number: int, correlation: str) -> None:
    """One row with one attempt."""
    await app.ledger.outbox.enqueue_many([item(kind, number, correlation)])
    rows = await app.ledger.outbox.claim_due_batch("dispatcher-1", 50, lease_ms=60_000, starting=True)
    await app.ledger.outbox.settle([Settlement(row, outcome, worker="dispatcher-1") for row in rows])


async def addresses(app: Bullpen) -> dict[str, str]:
    """What stands in braces in the addresses of pages."""
    (row,) = await app.ledger.outbox.find(status=OutboxStatus.FAILED, limit=1)
    (message,) = await SqlMessages(app.ledger.database).find(limit=1)
    (run,) = await app.ledger.runs.find(limit=1)
    (unknown,) = await app.ledger.outbox.find(error_code="UNKNOWN_OUTCOME", limit=1)
    (parked,) = await app.ledger.parked.find(limit=1)
    return {"row": row.id, "message": message.id, "run": run.id, "unknown": unknown.id, "parked": str(parked.id)}


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[dict[str, str], str]]:
    """The shop behind a dashboard that listens."""
    with RedisServer.start("valkey") as server:
        settings = Settings.load(environ={}, redis_url=server.url, ledger_url=f"sqlite:///{directory}/ledger.db")
        async with Bullpen(settings=settings) as app:
            await fill_ledger(app)
            async with shop(app, server.url):
                look = DashboardSettings(label="shop-prod", colour="orange")
                pages = make_dashboard(app, access=lambda _: Visitor("ada", Role.ADMIN), settings=look)
                pages.desk.patience_s = 30.0  # a browser on a busy machine asks much at once
                await pages.start()
                service = HttpService(pages, "127.0.0.1", 0)
                running = asyncio.create_task(service.run())
                yield await addresses(app), f"http://127.0.0.1:{service.port}"
                await pages.aclose()
                await service.close()
                await running


async def take(
    browser: Browser, url: str, found: dict[str, str], out: Path, only: str | None, looks: list[str]
) -> None:
    for look in looks:
        context = await browser.new_context(timezone_id="Europe/Berlin", **LOOKS[look])
        page = await context.new_page()
        page.on("console", lambda message: print(message.text, file=sys.stderr) if message.type == "error" else None)
        for name, path in PAGES.items():
            if only in (None, name):
                await page.goto(url + path.format_map(found))
                await page.wait_for_function(
                    "() => !document.body.dataset.stream || document.body.dataset.live === 'on'"
                )
                file = out / f"dashboard-{name}{_SUFFIX[look]}.png"
                await page.screenshot(path=file, animations="disabled", full_page=look == "phone")
        await context.close()


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    parser.add_argument("--only")
    parser.add_argument("--look", action="append")
    parser.add_argument("--serve", action="store_true", help="show the scenario until Ctrl-C")
    given = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        print("chromium is missing: apt-get install chromium", file=sys.stderr)
        return 1
    given.out.mkdir(exist_ok=True, parents=True)
    with tempfile.TemporaryDirectory() as directory:
        async with served(Path(directory)) as (found, url), async_playwright() as playwright:
            if given.serve:
                print(url, flush=True)
                await asyncio.Event().wait()
            browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            await take(browser, url, found, given.out, given.only, given.look or list(LOOKS))
            await browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

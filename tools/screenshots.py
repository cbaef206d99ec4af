"""Take the pictures of the dashboard that the pages of the docs show: `make screenshots`.

In: a server and a ledger of its own with a fixed scenario: a partner that is down, a queue without workers, a paused
one, jobs that run, a flow that waits, schedules. Out: docs/images/dashboard-PAGE-LOOK.png of every page, light, dark
and on a telephone. `--out DIRECTORY` writes elsewhere, `--only PAGE` takes one. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from playwright.async_api import Browser, async_playwright

from bullpen import Bullpen, Queue, Worker
from bullpen.dashboard import Dashboard, Role, Visitor, make_dashboard
from bullpen.http.serve import HttpService
from bullpen.ledger import OutboxItem
from bullpen.ops.pauses import pause_queue
from bullpen.queue.flows import Flow
from bullpen.settings import DashboardSettings, Settings
from bullpen.testing import RedisServer

IMAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
LOOKS: Final[dict[str, dict[str, Any]]] = {
    "light": {"viewport": {"width": 1180, "height": 720}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1180, "height": 720}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "color_scheme": "light", "is_mobile": True, "has_touch": True},
}
PAGES: Final = {
    "overview": "/",
    "queues": "/queues",
    "queue": "/queues/emails",
    "queue-failed": "/queues/invoices?state=failed",
    "queue-active": "/queues/images?state=active",
    "limits": "/queues/images/limits",
    "job": "/queues/invoices/jobs/late",
    "job-active": "/queues/images/jobs/thumb-1",
    "flow": "/queues/orders/jobs/order-1/flow",
    "add": "/queues/emails/add",
    "edit": "/queues/invoices/jobs/late/edit",
    "pause": "/queues/emails/act/pause",
    "drain": "/queues/emails/act/drain",
    "limit": "/queues/images/act/concurrency",
    "matching": "/queues/invoices/matching/retry?state=failed",
    "pause-all": "/queues-act/pause",
    "dead-letters": "/dead-letters",
    "outbox": "/outbox",
    "runs": "/runs",
    "schedules": "/schedules",
    "schedule": "/queues/reports/schedules/nightly",
    "workers": "/workers",
    "operations": "/operations",
    "operation": "/operations/1",
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
    async with Worker("images", paint, connection=url, concurrency=4, name="web-2") as worker:
        task = asyncio.create_task(worker.run(signals=False))
        await running.wait()
        yield
        await worker.close(0)
        await task


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


async def fill_ledger(app: Bullpen) -> None:
    await app.ledger.migrate()
    await app.ledger.outbox.enqueue_many(
        [
            OutboxItem(
                integration_type="webhook:partnerX" if number % 3 else "email",
                event_type="order.paid.v1",
                source_stream_id=f"order-{number}",
                source_event_id=f"{number}",
                payload={"order": number},
                tenant_id="t1" if number % 2 else "t2",
            )
            for number in range(30)
        ]
    )


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[Dashboard, str]]:
    """The shop behind a dashboard that listens."""
    with RedisServer.start("valkey") as server:
        settings = Settings.load(environ={}, redis_url=server.url, ledger_url=f"sqlite:///{directory}/ledger.db")
        async with Bullpen(settings=settings) as app:
            await fill_ledger(app)
            async with shop(app, server.url):
                look = DashboardSettings(label="shop-prod", colour="orange")
                pages = make_dashboard(app, access=lambda _: Visitor("ada", Role.ADMIN), settings=look)
                await pages.start()
                service = HttpService(pages, "127.0.0.1", 0)
                running = asyncio.create_task(service.run())
                yield pages, f"http://127.0.0.1:{service.port}"
                await pages.aclose()
                await service.close()
                await running


async def take(browser: Browser, url: str, out: Path, only: str | None, looks: list[str]) -> None:
    for look in looks:
        context = await browser.new_context(timezone_id="Europe/Berlin", **LOOKS[look])
        page = await context.new_page()
        page.on("console", lambda message: print(message.text, file=sys.stderr) if message.type == "error" else None)
        for name, path in PAGES.items():
            if only in (None, name):
                await page.goto(url + path)
                await page.wait_for_function(
                    "() => !document.body.dataset.stream || document.body.dataset.live === 'on'"
                )
                await page.screenshot(
                    path=out / f"dashboard-{name}-{look}.png", animations="disabled", full_page=look == "phone"
                )
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
        async with served(Path(directory)) as (_, url), async_playwright() as playwright:
            if given.serve:
                print(url, flush=True)
                await asyncio.Event().wait()
            browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            await take(browser, url, given.out, given.only, given.look or list(LOOKS))
            await browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

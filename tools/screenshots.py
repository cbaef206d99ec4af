"""Take the pictures of the dashboard that the pages of the docs show: `make screenshots`.

In: a server of its own with a fixed scenario. Out: docs/images/dashboard-*.png. Needs Chromium and playwright.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from playwright.async_api import async_playwright

from bullpen import Bullpen, Queue, Worker
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.http.serve import HttpService
from bullpen.settings import DashboardSettings, Settings
from bullpen.testing import RedisServer

IMAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
PAGES: Final = {"overview": "/", "job": "/queues/invoices/jobs/late"}
# Compiled under a name of its own: stacks in pictures must not tell where this checkout is.
HANDLER: Final = """
class PartnerError(Exception): ...

async def handle(job):
    await job.log(f"order {job.data['order']} begins")
    if job.name == "send":
        raise PartnerError("HTTP 503 from partner 9")
"""


async def play(url: str) -> None:
    """A shop with a partner that is down, a queue without workers, and a paused one."""
    async with (
        Queue("emails", connection=url) as emails,
        Queue("invoices", connection=url) as invoices,
        Queue("reports", connection=url) as reports,
    ):
        await emails.add_many([("send", {"order": 83_000 + number}) for number in range(1_204)])
        await reports.add_many([("month", {"month": number}) for number in range(6)])
        await reports.pause()
        await invoices.add_many([("create", {"order": number}) for number in range(40)])
        for number in range(11):
            await invoices.add("send", {"order": number, "tenantId": "t1"}, attempts=1)
        await invoices.add(
            "send",
            {"order": 83_112, "customer": "c112", "lines": [{"sku": "A1", "count": 2}]},
            attempts=3,
            backoff=3_600_000,
            job_id="late",
        )

        shop: dict[str, Any] = {}
        exec(compile(HANDLER, "/app/shop/mail.py", "exec"), shop)
        async with Worker("invoices", shop["handle"], connection=url, dead_letters=True, name="web-1") as worker:
            running = asyncio.create_task(worker.run(signals=False))
            while (await invoices.counts()).waiting or (await invoices.counts()).active:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
            await worker.close()
            await running


async def main() -> int:
    program = shutil.which("chromium")
    if program is None:
        print("chromium is missing: apt-get install chromium", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with RedisServer.start("valkey") as server:
        await play(server.url)
        async with Bullpen(settings=Settings.load(environ={}, redis_url=server.url)) as app:
            pages = make_dashboard(
                app,
                access=lambda _: Visitor("ada", Role.ADMIN),
                settings=DashboardSettings(label="shop-prod", colour="orange"),
            )
            service = HttpService(pages, "127.0.0.1", 0)
            running = asyncio.create_task(service.run())
            async with async_playwright() as playwright:
                browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
                context = await browser.new_context(viewport={"width": 1180, "height": 640}, timezone_id="UTC")
                page = await context.new_page()
                for name, path in PAGES.items():
                    await page.goto(f"http://127.0.0.1:{service.port}{path}")
                    await page.wait_for_function("() => document.body.dataset.live === 'on'")
                    await page.screenshot(path=IMAGES / f"dashboard-{name}.png", animations="disabled")
                await context.close()
                await browser.close()
            await pages.aclose()
            await service.close()
            await running
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

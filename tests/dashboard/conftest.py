"""Real Chromium for the pages: one browser for the session, one context per test."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright, expect

from bullpen import Bullpen
from bullpen.dashboard import Dashboard, make_dashboard
from bullpen.http.serve import HttpService
from bullpen.settings import DashboardSettings
from tests.dashboard._kit import settings

expect.set_options(timeout=30_000)  # a busy machine is slow and not wrong

AXE = Path(__file__).parents[1] / "interop" / "node" / "node_modules" / "axe-core" / "axe.min.js"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser lives on one loop, and so must whoever speaks to it."""
    for item in items:
        if "/dashboard/test_browser" in str(item.path):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed; apt-get install chromium")
    async with async_playwright() as playwright:
        made = await playwright.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"],
        )
        yield made
        await made.close()


class Served:
    """A dashboard that listens."""

    def __init__(self, dashboard: Dashboard, url: str) -> None:
        self.dashboard, self.url = dashboard, url


@pytest_asyncio.fixture(loop_scope="session")
async def served(redis_url: str) -> AsyncIterator[Served]:
    async with Bullpen(settings=settings(redis_url)) as app:
        wanted = DashboardSettings(label="test-shop", colour="blue")
        made = make_dashboard(app, settings=wanted)
        made.desk.patience_s = 30.0  # a browser on a busy machine asks much at once
        await made.start()
        service = HttpService(made, "127.0.0.1", 0)
        running = asyncio.create_task(service.run())
        yield Served(made, f"http://127.0.0.1:{service.port}")
        await made.aclose()
        await service.close()
        await running

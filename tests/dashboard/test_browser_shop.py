"""The pages of a whole shop in real Chromium: deliveries, chains, workflows, runs, messages, flows, live.

The scenario is that of the pictures in the docs (`tools.screenshots`): what people see there is what is checked here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.http.serve import HttpService
from bullpen.ledger import OutboxItem
from tests.dashboard._kit import HOSTILE, settings
from tests.dashboard.test_browser import LIVE, must_be_accessible_and_fit, visiting
from tools import screenshots

_ELSEWHERE = (
    *("overview", "queues", "queue", "queue-failed", "queue-active", "job", "pause", "drain", "dead-letters"),
    *("redrive", "schedules", "workers", "operations", "health", "audit", "settings", "problem", "matching"),
    *("pause-all", "job-edit", "job-test", "schedule", "schedule-edit", "mark"),
)
"""Pages that `test_browser` opens in every look."""
_PAGES = {name: path for name, path in screenshots.PAGES.items() if name not in _ELSEWHERE}
_FEW = ("flow", "outbox-row", "chain", "workflow", "run", "calendar", "limits")
"""Of each kind one, but for the longest, `live`: axe-core looks at it for as long as at all others."""
_TOURS = pytest.mark.parametrize(
    "pages",
    [pytest.param(_FEW, id="of each kind one"), pytest.param(tuple(_PAGES), id="all", marks=pytest.mark.long)],
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[dict[str, str], str]]:
    async with screenshots.served(Path(tmp_path_factory.mktemp("shop"))) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="session")
async def ledger_app(redis_url: str, sqlite_url: str) -> AsyncIterator[tuple[Bullpen, str]]:
    """A dashboard of an app with a ledger of its own, for tests that change what is in it."""
    async with Bullpen(settings=settings(redis_url, ledger_url=sqlite_url)) as app:
        await app.ledger.migrate()
        made = make_dashboard(app, access=lambda _: Visitor("ada", Role.ADMIN))
        made.desk.patience_s = 30.0  # a browser on a busy machine asks much at once
        service = HttpService(made, "127.0.0.1", 0)
        running = asyncio.create_task(service.run())
        yield app, f"http://127.0.0.1:{service.port}"
        await made.aclose()
        await service.close()
        await running


def row(text: str, **changes: Any) -> OutboxItem:
    given = {
        "integration_type": "webhook:x",
        "event_type": "order.paid",
        "source_stream_id": "order-1",
        "source_event_id": f"e-{abs(hash(text))}",
        "payload": {text: [text]},
        "correlation_id": "c-1",
    }
    return OutboxItem(**{**given, **changes})


@_TOURS
@pytest.mark.requirement("W-78")
@pytest.mark.requirement("D-19")
@pytest.mark.requirement("D-123")
async def test_pages_of_the_shop_are_accessible_and_fit(
    browser: Browser, shop: tuple[dict[str, str], str], pages: Sequence[str]
) -> None:
    found, url = shop
    await must_be_accessible_and_fit(browser, {name: url + _PAGES[name].format_map(found) for name in pages})


@_TOURS
@pytest.mark.requirement("W-78")
@pytest.mark.requirement("D-114")
@pytest.mark.requirement("D-10")
async def test_pages_of_the_shop_obey_the_policy_and_need_no_script(
    browser: Browser, shop: tuple[dict[str, str], str], pages: Sequence[str]
) -> None:
    """With scripts nothing is reported; without them the same rows are there."""
    found, url = shop
    async with visiting(browser) as page, visiting(browser, java_script_enabled=False) as plain:
        await page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('policy', e.violatedDirective))"
        )
        for name in pages:
            address = url + _PAGES[name].format_map(found)
            await page.goto(address)
            await page.wait_for_function(f"() => !document.body.dataset.stream || ({LIVE})()")
            await plain.goto(address, wait_until="domcontentloaded")
            rows = "tr[data-row], .way > li, .flow li, .states g"
            assert await plain.locator(rows).count() == await page.locator(rows).count(), name


async def test_numbers_of_the_outbox_change_and_new_rows_are_offered(
    browser: Browser, ledger_app: tuple[Bullpen, str]
) -> None:
    app, url = ledger_app
    await app.ledger.outbox.enqueue_many([row("first")])
    async with visiting(browser) as page:
        await page.goto(f"{url}/outbox")
        await page.wait_for_function(LIVE)
        await app.ledger.outbox.enqueue_many([row("second")])
        await expect(page.locator("#offer")).to_be_visible()
        assert await page.locator("tr[data-row]").count() == 1
        await page.locator("#offer a").click()
        await expect(page.locator("tr[data-row]")).to_have_count(2)


async def test_a_destination_is_switched_off_and_on_without_javascript(
    browser: Browser, ledger_app: tuple[Bullpen, str]
) -> None:
    app, url = ledger_app
    await app.ledger.outbox.enqueue_many([row("first")])
    async with visiting(browser, java_script_enabled=False) as page:
        await page.goto(f"{url}/outbox")
        await page.get_by_role("link", name="Destinations").click()
        await page.get_by_role("link", name="webhook:x").click()
        await page.get_by_role("link", name="Switch off…").click()
        await page.get_by_label("Reason").fill("month end")
        await page.get_by_role("button", name="Switch off").click()
        await expect(page.locator("#note")).to_contain_text("is switched off")
        await expect(page.locator("h1 .chip")).to_contain_text("switched off")
        await page.get_by_role("link", name="Undo…").click()
        await page.get_by_role("button", name="Switch on").click()
        await expect(page.locator("h1 .chip")).to_contain_text("in order")


@pytest.mark.requirement("D-70")
async def test_an_event_is_emitted_after_its_simulation(browser: Browser, shop: tuple[dict[str, str], str]) -> None:
    _, url = shop
    async with visiting(browser) as page:
        await page.goto(f"{url}/workflows/order/urn:order:83111")
        await page.get_by_role("link", name="Emit event…").click()
        await page.get_by_label("Event").select_option("order.paid")
        await page.get_by_role("button", name="Show what it would do").click()
        await expect(page.locator("#told")).to_contain_text("payment pending → paid")
        await page.get_by_role("button", name="Emit", exact=True).click()
        await expect(page.locator("#note")).to_contain_text("order.paid was published")


@pytest.mark.requirement("D-80")
async def test_events_arrive_in_the_live_tail(browser: Browser, shop: tuple[dict[str, str], str]) -> None:
    _, url = shop
    async with visiting(browser) as page:
        await page.goto(f"{url}/live?queue=emails&kind=added")
        await page.wait_for_function(LIVE)
        added = {"name": "send", "data": '{"order": 1}', "job_id": "by-hand"}
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{url}/queues/emails/add", data=added)
        assert answer.status_code == 303
        await expect(page.locator("#tail tbody th").first).to_have_text("by-hand")


@pytest.mark.requirement("W-78")
@pytest.mark.requirement("D-116")
async def test_hostile_texts_in_the_ledger_are_only_shown(browser: Browser, ledger_app: tuple[Bullpen, str]) -> None:
    """In every text of a row, in lists, in the row, in its chain and in addresses."""
    app, url = ledger_app
    stored = []
    for number, text in enumerate(HOSTILE):
        name = "".join(char for char in text if char.isprintable())[:60] or "x"
        ids = dict.fromkeys(("event_type", "correlation_id", "ordering_key", "source_stream_id"), name)
        changes = {**ids, "source_event_id": f"{number}", "tenant_id": name[:50]}
        item = row(text.replace("\0", ""), integration_type=f"webhook:{name}", **changes)
        (one,) = await app.ledger.outbox.enqueue_many([item])
        stored.append((one.id, name))
    async with visiting(browser) as page:
        addresses = ["/outbox", "/outbox?order=newest", "/destinations"]
        addresses += [f"/outbox/{one}" for one, _ in stored[::6]]
        for address in addresses:
            answer = await page.goto(url + address, wait_until="domcontentloaded")
            assert answer is not None and answer.status == 200, address
            assert await page.evaluate("() => window.hit") is None, address
        await page.goto(f"{url}/outbox/{stored[1][0]}")
        await page.get_by_role("link", name="From event to receipt").click()
        await expect(page.locator("h1")).to_contain_text("<img")
        assert await page.evaluate("() => window.hit") is None

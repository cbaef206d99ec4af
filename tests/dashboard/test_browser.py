"""The pages in real Chromium: they open, change by themselves, act, and stay harmless."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Browser, Page, ViewportSize, expect

from bullpen import Queue
from bullpen.dashboard._web import join
from tests.dashboard._kit import HOSTILE
from tests.dashboard.conftest import AXE, Served
from tests.dashboard.test_pages import fail_one

WIDE: ViewportSize = {"width": 1280, "height": 800}
PHONE: ViewportSize = {"width": 360, "height": 740}
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
# In the dark only colours differ, on a telephone only sizes and order.
_RULES_IN_THE_DARK = ["color-contrast", "link-in-text-block"]
_RULES_ON_A_PHONE = ["target-size", "scrollable-region-focusable"]
LIVE = "() => document.body.dataset.live === 'on'"


@asynccontextmanager
async def visiting(browser: Browser, **options: Any) -> AsyncIterator[Page]:
    """A page that must raise nothing: no error of a script, no report of the policy, no request to elsewhere."""
    context = await browser.new_context(**{"viewport": WIDE, "timezone_id": "UTC", **options})
    page = await context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda sent: None if "127.0.0.1" in sent.url else problems.append(f"elsewhere: {sent.url}"))
    try:
        yield page
    finally:
        await context.close()
    assert problems == []


async def fill(redis_url: str, name: str, *, jobs: int = 3) -> dict[str, str]:
    """A queue with a job in nearly every state, and where each page is."""
    async with Queue(name, connection=redis_url) as queue:
        failed = await fail_one(redis_url, queue, {"order": 1, "lines": [{"sku": "A", "n": 2}] * 3, "big": 2**53 - 1})
        await queue.add_many([("send", {"order": number}) for number in range(jobs)])
        await queue.add("later", {}, delay=600_000, job_id="later")
        await queue.upsert_scheduler("nightly", name="send", cron="0 3 * * *", tz="Europe/Berlin")
    return {
        "overview": "/",
        "queues": "/queues",
        "queue": f"/queues/{name}",
        "failed": f"/queues/{name}?state=failed",
        "job": f"/queues/{name}/jobs/{failed.id}",
        "edit-job": f"/queues/{name}/jobs/{failed.id}/edit",
        "test": f"/queues/{name}/jobs/{failed.id}/test",
        "delayed": f"/queues/{name}/jobs/later",
        "letters": "/dead-letters",
        "redrive": f"/dead-letters/act/redrive?store={name}-dlq",
        "letter": f"/dead-letters/{name}-dlq/dl-{failed.id}-1",
        "edit": f"/dead-letters/{name}-dlq/dl-{failed.id}-1/edit",
        "workers": "/workers",
        "schedules": "/schedules",
        "charts": "/charts",
        "chart": f"/charts?queue={name}",
        "mark": "/charts/mark",
        "schedule": f"/queues/{name}/schedules/nightly",
        "schedule-edit": f"/queues/{name}/schedules/nightly/edit",
        "health": "/health",
        "audit": "/audit",
        "operations": "/operations",
        "settings": "/settings",
        "search": "/search?q=nothing",
        "pause": f"/queues/{name}/act/pause",
        "drain": f"/queues/{name}/act/drain",
    }


@pytest.mark.requirement("W-78")
@pytest.mark.requirement("D-19")
@pytest.mark.requirement("D-123")
async def test_every_page_is_accessible_and_fits(
    browser: Browser, served: Served, redis_url: str, queue_name: str
) -> None:
    """axe-core finds nothing in either theme, and nothing scrolls sideways on a telephone."""
    pages = await fill(redis_url, queue_name)
    await must_be_accessible_and_fit(browser, {name: served.url + path for name, path in pages.items()})


async def must_be_accessible_and_fit(browser: Browser, addresses: Mapping[str, str]) -> None:
    """Each page is opened once and looked at in light, in the dark and on a telephone."""
    if not AXE.exists():
        pytest.skip("axe-core is not installed; python -m tools.setup_test_machine")
    async with visiting(browser, bypass_csp=True) as page:
        for name, address in addresses.items():
            await page.set_viewport_size(WIDE)
            await page.emulate_media(color_scheme="light")
            answer = await page.goto(address, wait_until="domcontentloaded")
            assert answer is not None and answer.status == 200, name
            await page.add_script_tag(path=AXE)
            assert await _sideways(page) <= 0, f"{name} scrolls sideways"
            assert await _violations(page, _RULES) == [], name
            await page.emulate_media(color_scheme="dark")
            assert await _violations(page, _RULES_IN_THE_DARK) == [], f"{name} in the dark"
            await page.set_viewport_size(PHONE)
            assert await _sideways(page) <= 0, f"{name} scrolls sideways on a telephone"
            assert await _violations(page, _RULES_ON_A_PHONE) == [], f"{name} on a telephone"


async def _sideways(page: Page) -> int:
    wider: int = await page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    return wider


async def _violations(page: Page, rules: list[str]) -> list[str]:
    found = await page.evaluate(f"() => axe.run({{runOnly: {rules}}})")
    return [f"{each['id']}: {each['nodes'][0]['html'][:150]}" for each in found["violations"]]


@pytest.mark.requirement("D-114")
async def test_no_page_breaks_its_policy(browser: Browser, served: Served, redis_url: str, queue_name: str) -> None:
    """With the policy in force: Trusted Types, no inline script, no inline style."""
    pages = await fill(redis_url, queue_name)
    async with visiting(browser) as page:
        await page.add_init_script(
            "addEventListener('securitypolicyviolation', e => console.error('policy', e.violatedDirective))"
        )
        for path in pages.values():
            await page.goto(served.url + path)
            await page.wait_for_function("() => !document.body.dataset.stream || document.body.dataset.live === 'on'")


async def test_numbers_change_without_a_reload(
    browser: Browser, served: Served, redis_url: str, queue_name: str
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser) as page:
        await queue.add("job", {})
        await page.goto(f"{served.url}/queues/{queue_name}?state=waiting")
        await page.wait_for_function(LIVE)
        await page.evaluate("() => { window.sameDocument = true }")

        await queue.add("job", {})

        await expect(page.locator("#count-waiting")).to_have_text("2")
        assert await page.evaluate("() => window.sameDocument")


@pytest.mark.requirement("D-13")
@pytest.mark.requirement("D-99")
async def test_rows_never_move_and_selection_and_typing_stay(
    browser: Browser, served: Served, redis_url: str, queue_name: str
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser) as page:
        jobs = [await queue.add("job", {}) for _ in range(3)]
        await page.goto(f"{served.url}/queues/{queue_name}?state=waiting")
        await page.wait_for_function(LIVE)
        await page.locator(f'input[value="{jobs[1].id}"]').check()
        await page.locator("#f-text").fill("half typed")

        await queue.add("job", {})
        await queue.remove(jobs[0].id)

        await expect(page.locator("#offer")).to_be_visible()
        assert await page.locator("tr[data-row]").count() == 3
        await expect(page.locator("tr.gone")).to_have_count(1)
        await expect(page.locator(f'input[value="{jobs[1].id}"]')).to_be_checked()
        await expect(page.locator("#f-text")).to_have_value("half typed")
        await expect(page.locator("#selected")).to_have_text("1 selected")
        await page.locator("#offer a").click()
        await expect(page.locator("tr[data-row]")).to_have_count(3)
        await expect(page.locator("#offer")).to_be_hidden()


@pytest.mark.requirement("D-101")
async def test_live_can_be_paused(browser: Browser, served: Served, redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser) as page:
        await queue.add("job", {})
        await page.goto(f"{served.url}/queues/{queue_name}?state=waiting")
        await page.wait_for_function(LIVE)
        await page.keyboard.press("p")
        await expect(page.locator("#live")).to_contain_text("paused at")
        await queue.add("job", {})
        await page.keyboard.press("p")
        await expect(page.locator("#count-waiting")).to_have_text("2")


async def test_a_failed_job_is_retried_by_hand(
    browser: Browser, served: Served, redis_url: str, queue_name: str
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser) as page:
        job = await fail_one(redis_url, queue)
        await page.goto(f"{served.url}/queues/{queue_name}/jobs/{job.id}")
        await expect(page.locator("#why-text")).to_contain_text("It failed finally")
        await page.get_by_role("link", name="Retry…", exact=True).click()
        await expect(page.locator("h1")).to_contain_text("test-shop")
        await page.get_by_label("Reason").fill("partner is back")
        await page.get_by_role("button", name="Retry").click()
        await expect(page.locator("#note")).to_contain_text("is queued again")
        await expect(page.locator("h1 .chip")).to_contain_text("waiting")
        assert (await queue.counts()).waiting == 1


@pytest.mark.requirement("D-53")
async def test_a_group_is_redriven_and_its_progress_is_seen(
    browser: Browser, served: Served, redis_url: str, queue_name: str
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser) as page:
        for number in range(3):
            await fail_one(redis_url, queue, {"n": number}, error=f"HTTP 503 from partner {number}")
        await page.goto(f"{served.url}/dead-letters")
        await expect(page.locator("#groups tbody tr")).to_have_count(1)
        await page.get_by_role("link", name="Redrive…").click()
        await page.get_by_role("button", name="Redrive 3").click()
        await expect(page.locator("#done")).to_have_text("3", timeout=20_000)
        await expect(page.locator("h1 .chip")).to_contain_text("done", timeout=20_000)
        assert await queue.dead_letters.depth() == 0


@pytest.mark.requirement("D-10")
async def test_what_people_do_works_without_javascript(
    browser: Browser, served: Served, redis_url: str, queue_name: str
) -> None:
    """That every page opens and is whole, `test_pages` shows; here is what people do there."""
    async with Queue(queue_name, connection=redis_url) as queue:
        pages = await fill(redis_url, queue_name, jobs=60)
        async with visiting(browser, java_script_enabled=False) as page:
            await page.goto(served.url + pages["queue"])
            await page.get_by_role("link", name="Pause…").click()
            await page.get_by_role("button", name="Pause").click()
            await expect(page.locator("#note")).to_contain_text("is paused")
            assert await queue.is_paused()
            await page.get_by_role("link", name="Undo…").click()
            await page.get_by_role("button", name="Resume").click()
            await expect(page.locator("#note")).to_contain_text("running again")
            await page.goto(served.url + pages["queue"] + "?state=waiting")
            await page.get_by_role("link", name="next").click()
            await expect(page.locator(".pager")).to_contain_text("51–")


@pytest.mark.requirement("D-20")
@pytest.mark.requirement("D-116")
async def test_hostile_texts_are_only_shown(browser: Browser, served: Served, redis_url: str) -> None:
    """In names of queues, ids and names of jobs, their data, and on every page that shows them."""
    async with visiting(browser) as page:
        addresses = [
            "/",
            "/queues",
            join("", "queues", "many"),
            join("", "search", q="<img src=x onerror=window.hit=1>"),
        ]
        for text in HOSTILE:
            name = "".join(char for char in text.replace(":", ";") if ord(char) >= 32).strip() or "x"
            for queue_of in (name, "many"):
                async with Queue(queue_of, connection=redis_url) as queue:
                    job = await queue.add(text, {text: [text]}, job_id=f"id{name}")
            addresses.append(join("", "queues", name, "jobs", job.id))
        addresses += [join("", "queues", HOSTILE[0], "act", "drain"), join("", "queues", HOSTILE[2])]
        for address in addresses:
            answer = await page.goto(served.url + address, wait_until="domcontentloaded")
            assert answer is not None and answer.status == 200, address
            assert await page.evaluate("() => window.hit") is None, address
            await page.wait_for_function("() => document.querySelectorAll('.copy[hidden]').length === 0")


@pytest.mark.requirement("D-18")
async def test_keys_lead_through_the_pages(browser: Browser, served: Served, redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser) as page:
        await queue.add("job", {}, job_id="only")
        await page.goto(served.url)
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await page.wait_for_url(f"**/queues/{queue_name}")
        await page.keyboard.press("j")
        await page.keyboard.press("x")
        await expect(page.locator("#selected")).to_have_text("1 selected")
        await page.keyboard.press("?")
        await expect(page.locator("#help")).to_be_visible()
        await page.keyboard.press("Escape")
        await page.keyboard.press("g")
        await page.keyboard.press("d")
        await page.wait_for_url("**/dead-letters")
        await page.keyboard.press("/")
        await page.keyboard.type("only")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/jobs/only")


@pytest.mark.requirement("D-14")
async def test_the_zone_of_the_viewer_is_used_and_can_be_chosen(
    browser: Browser, served: Served, redis_url: str, queue_name: str
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser, timezone_id="Asia/Tokyo") as page:
        await queue.add("job", {}, job_id="a")
        await page.goto(f"{served.url}/queues/{queue_name}/jobs/a")
        first = page.locator("time").first
        shown, iso = await first.inner_text(), await first.get_attribute("datetime")
        assert iso is not None
        assert (int(iso[11:13]) + 9) % 24 == int(shown[11:13])
        await page.reload()
        assert await page.locator("time").first.inner_text() == shown
        await page.goto(f"{served.url}/settings")
        await page.get_by_label("Time zone").fill("UTC")
        await page.get_by_label("dark", exact=True).check()
        await page.get_by_role("button", name="Save").click()
        await page.goto(f"{served.url}/queues/{queue_name}/jobs/a")
        assert (await page.locator("time").first.inner_text())[11:13] == iso[11:13]
        colour = await page.evaluate("() => getComputedStyle(document.documentElement).backgroundColor")
        assert colour == "rgb(13, 17, 23)"


@pytest.mark.requirement("D-15")
async def test_an_id_is_copied(browser: Browser, served: Served, redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, visiting(browser) as page:
        await queue.add("job", {}, job_id="copy-me")
        await page.goto(f"{served.url}/queues/{queue_name}/jobs/copy-me")
        # What the button says is gone after a moment, which a busy machine may take to look.
        await page.evaluate(
            """() => {
                const button = document.querySelector("h1 .copy");
                window.said = new Promise((resolve) => new MutationObserver(
                    () => button.dataset.done && resolve(button.dataset.done)
                ).observe(button, { attributes: true }));
            }"""
        )
        await page.locator("h1 .copy").click()
        assert await page.evaluate("() => window.said") == "copied"

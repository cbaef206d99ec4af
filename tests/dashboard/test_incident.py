"""An incident with five causes at once: the first page names each, with a link to the page that shows it."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from bullpen import Bullpen, Job, Queue, Worker
from bullpen.dashboard import Role, Visitor, make_dashboard
from bullpen.ledger import OutboxItem
from bullpen.settings import Settings
from tests.dashboard._kit import HOST, As, transport


@pytest.mark.requirement("W-77")
@pytest.mark.requirement("D-23")
async def test_the_first_page_names_every_cause_and_leads_to_it(
    redis_url: str, sqlite_url: str, queue_name: str
) -> None:
    settings = Settings.load(environ={}, redis_url=redis_url, ledger_url=sqlite_url)
    async with Bullpen(settings=settings) as app, Queue(queue_name, connection=redis_url) as queue:
        await app.ledger.migrate()
        item = OutboxItem(
            integration_type="webhook:down", event_type="order.paid", source_stream_id="s", source_event_id="e"
        )
        await app.ledger.outbox.enqueue_many([item])
        await app.ledger.destinations.trip("webhook:down", pause_ms=600_000, longest_ms=600_000)
        await queue.upsert_scheduler("nightly", name="send", every=3_600_000)
        late = (await queue.schedulers(count=1))[0]
        await app.connection.shared_door(queue.keys.base).call(
            "ZADD", queue.keys.repeat, str(late.next_ms - 7_200_000), "nightly"
        )
        await poison(redis_url, queue)
        app.ledger.database.clock_offset_ms = 400_000
        dashboard = make_dashboard(app, access=As(Visitor("ada", Role.ADMIN)))
        async with httpx.AsyncClient(transport=transport(dashboard), base_url=HOST) as http:
            page = (await http.get("/")).text
            overview = (await http.get("/api/v1/")).json()
        await dashboard.aclose()

    findings = overview["verdict"]["findings"]
    rules = {each["rule"] for each in findings}
    assert rules >= {"dead_letters", "destination_broken", "schedule_late"}, findings
    assert "the breaker is open; 1 row waits" in page
    assert [each["word"] for each in overview["stores"] if each["store"] == "outbox"] == ["blocked"]
    assert "outbox_late" not in rules, "one cause, one finding"
    assert 'href="/destinations/webhook%3Adown"' in page
    assert f'href="/schedules?queue={queue_name}"' in page


async def poison(redis_url: str, queue: Queue) -> None:
    async def fail(job: Job) -> None:
        raise ValueError("poison")

    await queue.add("send", {}, attempts=1)
    async with Worker(queue.name, fail, connection=redis_url, dead_letters=True) as worker:
        task = asyncio.create_task(worker.run(signals=False))
        while not (await queue.counts()).failed:  # noqa: ASYNC110 - the server does not tell us
            await asyncio.sleep(0.01)
        await worker.close()
        await task

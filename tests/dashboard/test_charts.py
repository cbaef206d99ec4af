"""The charts: what is drawn, of what it was made, and marks."""

from __future__ import annotations

import re
import time

import pytest

from bullpen import Bullpen
from bullpen.dashboard import Role, Visitor
from bullpen.dashboard.charts import Series, make_chart
from bullpen.queue.history import DONE, ESTIMATED, FAILED, RUN, SAMPLED, WAIT, add_history, bucket_of
from tests.dashboard._kit import HOSTILE, settings, visit


def test_a_line_breaks_where_nothing_is_known() -> None:
    chart = make_chart("t", [Series("a", "x", [1, None, 4, 4])], list("abcd"), text_of=str)

    path = re.findall(r' d="([^"]+)"', chart.svg)

    assert path == ["M0.1 79.4H0.9M2.5 20.6L3.5 20.6"]
    assert (chart.top, chart.middle, chart.is_empty) == ("5.0", "2.5", False)


@pytest.mark.requirement("D-77")
async def test_a_day_of_a_queue_is_drawn_with_its_marks(redis_url: str, queue_name: str) -> None:
    """The numbers stand in a table too; a name has charts of its own."""
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.add("job", {})
        now_ms = int(time.time() * 1000)
        counts = {DONE: 30, FAILED: 2, SAMPLED: 32, WAIT + bucket_of(8): 32, RUN + bucket_of(500): 32}
        for step in range(5):
            await add_history(
                app.connection, queue.keys, {"": counts, "pay": counts, "send": counts}, now_ms - step * 900_000
            )
        admin = Visitor("ada", Role.ADMIN)
        await visit(app, admin, "/charts/mark", data={"text": HOSTILE[0]})

        everything, one, named, wrong = await visit(
            app,
            admin,
            "/charts?range=24h",
            f"/charts?queue={queue_name}&range=24h",
            f"/api/v1/charts?queue={queue_name}&range=24h&name=send",
            "/charts?range=9h",
        )

        assert everything.status_code == one.status_code == 200
        assert f'<bdi>{queue_name}</bdi></a></th><td class="n " data-label="done">150</td>' in everything.text
        assert one.text.count('<svg class="chart"') == 3
        assert one.text.count('<line class="chart-mark"') == 3
        assert "&lt;script&gt;" in one.text and "<script>window.hit" not in one.text
        assert "estimated from" not in one.text
        assert '<option value="send"' in one.text
        view = named.json()
        assert (view["done"], view["failed"], view["names"]) == (150, 10, ["pay", "send"])
        assert wrong.status_code == 422


@pytest.mark.requirement("D-79")
async def test_estimated_numbers_say_so(redis_url: str, queue_name: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.add("job", {})
        counts = {DONE: 900, SAMPLED: 50, ESTIMATED: 900}
        await add_history(app.connection, queue.keys, {"": counts}, int(time.time() * 1000))

        (page,) = await visit(app, Visitor("v"), f"/charts?queue={queue_name}")

        assert "estimated from 50 jobs" in page.text


async def test_an_empty_mark_is_asked_for_again(redis_url: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        (page,) = await visit(app, Visitor("o", Role.OPERATOR), "/charts/mark", data={"text": " "})
        assert page.status_code == 422
        assert "1 to 200 characters" in page.text

"""One schedule: its firings in both zones, its last job, and its rule changed by hand."""

from __future__ import annotations

import pytest

from bullpen import Bullpen, JobState, KeepJobs
from bullpen.dashboard import Role, Visitor
from tests.dashboard._kit import settings, visit

ADMIN = Visitor("ada", Role.ADMIN)


@pytest.mark.requirement("D-36")
async def test_a_schedule_is_shown_for_its_zone_and_for_the_viewer(redis_url: str, queue_name: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.upsert_scheduler(
            "daily", "send", {"to": "x"}, cron="0 9 * * 1-5", tz="Asia/Tokyo", overlap="skip", jitter=0
        )
        address = f"/queues/{queue_name}/schedules/daily"
        page, answer, gone = await visit(app, ADMIN, address, f"/api/v1{address}", f"{address}x")

        assert "from Monday to Friday at 09:00" in page.text and "Asia/Tokyo" in page.text
        assert "a run is left out while another runs" in page.text
        view = answer.json()
        assert len(view["firings"]) == 5
        assert all(each["local"].endswith("09:00:00") for each in view["firings"])
        assert page.text.count("00:00:00</time>") >= 5, "Tokyo's nine is midnight of UTC"
        assert gone.status_code == 404


@pytest.mark.requirement("D-36")
async def test_run_now_leaves_the_next_firing_where_it_was(redis_url: str, queue_name: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        before = await queue.upsert_scheduler(
            "daily", "send", {"to": "x"}, cron="0 9 * * *", attempts=4, remove_on_complete=KeepJobs(count=5, age_s=60)
        )
        address = f"/queues/{queue_name}/schedules/daily"
        (done,) = await visit(app, ADMIN, f"{address}/act/once", data={"reason": "now"})
        assert done.status_code == 303
        after = await queue.get_scheduler("daily")
        assert after is not None
        assert (after.next_ms, after.iterations) == (before.next_ms, before.iterations)
        (job,) = await queue.jobs(JobState.WAITING)
        assert (job.name, job.data, job.opts.attempts) == ("send", {"to": "x"}, 4)
        assert job.opts.remove_on_complete == before.opts.remove_on_complete


@pytest.mark.requirement("D-36")
async def test_a_rule_is_changed_and_all_else_stays(redis_url: str, queue_name: str) -> None:
    """Attempts of its jobs, overlap, the name: whoever made it said so. The audit has before and after."""
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.upsert_scheduler(
            "daily", "send", {"to": "x"}, cron="0 9 * * *", tz="Europe/Berlin", overlap="one", attempts=7, priority=3
        )
        address = f"/queues/{queue_name}/schedules/daily/edit"
        (form,) = await visit(app, ADMIN, address)
        assert 'value="0 9 * * *"' in form.text and 'value="Europe/Berlin"' in form.text

        fields = {"cron": "30 7 * * *", "tz": "UTC", "every": "", "data": '{"to": "y"}', "reason": "earlier"}
        (saved,) = await visit(app, ADMIN, address, data=fields)
        assert saved.status_code == 303
        found = await queue.get_scheduler("daily")
        assert found is not None
        assert (found.pattern, found.zone, found.overlap, found.data) == ("30 7 * * *", "UTC", "one", {"to": "y"})
        assert (found.opts.attempts, found.opts.priority, found.name) == (7, 3, "send")
        (entry,) = [each for each in await (await app.trail()).read([queue_name]) if each.action == "schedule.edit"]
        assert entry.detail["before"] == {"cron": "0 9 * * *", "tz": "Europe/Berlin"}
        assert entry.detail["after"] == {"cron": "30 7 * * *", "tz": "UTC"}

        (interval,) = await visit(app, ADMIN, address, data={"every": "15m", "cron": "", "tz": ""})
        assert interval.status_code == 303
        found = await queue.get_scheduler("daily")
        assert found is not None and (found.every_ms, found.pattern, found.opts.attempts) == (900_000, None, 7)


@pytest.mark.requirement("D-36")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": "0 9 * * *", "every": "5m"}, "not both"),
        ({}, "Give a cron pattern"),
        ({"cron": "0 9 * * *", "tz": "Mars/Base"}, "tz"),
        ({"every": "soon"}, "every"),
        ({"every": "5m", "data": "{"}, "line 1, column 2"),
    ],
)
async def test_what_is_wrong_is_said_in_the_form(
    redis_url: str, queue_name: str, fields: dict[str, str], says: str
) -> None:
    """And nothing is written."""
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.upsert_scheduler("daily", cron="0 9 * * *")
        (page,) = await visit(app, ADMIN, f"/queues/{queue_name}/schedules/daily/edit", data=fields)
        assert page.status_code == 422
        assert says in page.text
        found = await queue.get_scheduler("daily")
        assert found is not None and found.pattern == "0 9 * * *"


async def test_a_pause_stays_when_a_rule_is_changed(redis_url: str, queue_name: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        await queue.upsert_scheduler("daily", cron="0 9 * * *")
        await queue.pause_scheduler("daily")
        changed = await queue.change_scheduler("daily", cron="0 10 * * *")
        assert changed.is_paused and changed.pattern == "0 10 * * *"

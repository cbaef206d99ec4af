"""A failed job with other data, and a job as the code of a test."""

from __future__ import annotations

import ast
import re

import pytest

from bullpen import Bullpen, JobState
from bullpen.dashboard import Role, Visitor
from tests.dashboard._kit import HOSTILE, settings, visit
from tests.dashboard.test_pages import fail_one

OPERATOR = Visitor("ada", Role.OPERATOR)


@pytest.mark.requirement("D-46")
async def test_a_failed_job_goes_back_with_other_data(redis_url: str, queue_name: str) -> None:
    """First the difference, then the deed; its id stays, and a note says who changed what, without the old values."""
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        job = await fail_one(redis_url, queue, {"to": "old@example.com", "token": "sk_live_1", "keep": 2**53 - 1})
        key = job.idempotency_key
        address = f"/queues/{queue_name}/jobs/{job.id}/edit"
        patch = '{"to": "new@example.com"}'

        (preview,) = await visit(app, OPERATOR, address, data={"patch": patch})
        assert preview.status_code == 200
        assert '<span class="diff-removed">' in preview.text and "new@example.com" in preview.text
        assert "sk_live_1" not in preview.text
        assert (await queue.counts()).failed == 1, "nothing is done yet"

        before = re.findall(r'name="before" value="(\w+)"', preview.text)[0]
        fields = {"patch": patch, "before": before, "confirmed": "1", "reason": "typo", "nonce": "n1"}
        first, second = [(await visit(app, OPERATOR, address, data=fields))[0] for _ in range(2)]
        assert first.status_code == 303
        assert second.status_code == 409, "it is no longer failed, and runs with the new data already"
        (back,) = await queue.jobs(JobState.WAITING)
        assert (back.id, back.idempotency_key) == (job.id, key)
        assert back.data == {"to": "new@example.com", "token": "sk_live_1", "keep": 2**53 - 1}
        (entry,) = [each for each in await (await app.trail()).read([queue_name]) if each.action == "job.edit"]
        assert entry.detail["changed"] == ["/to"] or entry.detail["changed"] == ["to"]
        assert "old@example.com" not in str(entry.detail) and "new@example.com" not in str(entry.detail)
        (page,) = await visit(app, OPERATOR, f"/queues/{queue_name}/jobs/{job.id}")
        assert "edited and sent back" in page.text and "by ada" in page.text


@pytest.mark.requirement("D-46")
async def test_data_that_changed_meanwhile_is_not_overwritten(redis_url: str, queue_name: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        queue = app.queue(queue_name)
        job = await fail_one(redis_url, queue, {"to": "a"})
        address = f"/queues/{queue_name}/jobs/{job.id}/edit"
        (preview,) = await visit(app, OPERATOR, address, data={"patch": '{"to": "b"}'})
        before = re.findall(r'name="before" value="(\w+)"', preview.text)[0]
        await job.update_data({"to": "c"})
        fields = {"patch": '{"to": "b"}', "before": before, "confirmed": "1"}
        (refused,) = await visit(app, OPERATOR, address, data=fields)
        assert refused.status_code == 409 and "changed meanwhile" in refused.text
        found = await queue.get_job(job.id)
        assert found is not None and found.data == {"to": "c"}
        assert (await queue.counts()).failed == 1


@pytest.mark.parametrize(
    ("patch", "says"),
    [('{"a": x}', "line 1, column"), ("{}", "differs from the stored"), ('{"tenantId": "t2"}', "tenantId")],
)
async def test_a_change_that_cannot_be_is_said_in_the_form(
    redis_url: str, queue_name: str, patch: str, says: str
) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        job = await fail_one(redis_url, app.queue(queue_name), {"tenantId": "t1"})
        address = f"/queues/{queue_name}/jobs/{job.id}/edit"
        (page,) = await visit(app, OPERATOR, address, data={"patch": patch})
        assert page.status_code == 422
        assert says in page.text


async def test_only_failed_jobs_are_edited(redis_url: str, queue_name: str) -> None:
    async with Bullpen(settings=settings(redis_url)) as app:
        job = await app.queue(queue_name).add("a", {})
        (page, view) = await visit(
            app, OPERATOR, f"/queues/{queue_name}/jobs/{job.id}/edit", f"/queues/{queue_name}/jobs/{job.id}"
        )
        assert page.status_code == 409 and "only failed jobs" in page.text
        assert "Edit and retry" not in view.text


@pytest.mark.requirement("D-48")
@pytest.mark.parametrize("text", HOSTILE)
async def test_a_job_is_code_that_can_be_read(redis_url: str, queue_name: str, text: str) -> None:
    """Whatever stands in its name and data; secrets do not."""
    async with Bullpen(settings=settings(redis_url)) as app:
        data = {"text": text, "token": "sk_live_1", "lines": [{"sku": text}] * 9}
        job = await app.queue(queue_name).add(text, data, attempts=3)
        (answer, page) = await visit(
            app,
            OPERATOR,
            f"/api/v1/queues/{queue_name}/jobs/{job.id}/test",
            f"/queues/{queue_name}/jobs/{job.id}/test",
        )
        code = answer.json()["code"]
        tree = ast.parse(code)
        assert len(tree.body) == 1 and isinstance(tree.body[0], ast.AsyncFunctionDef)
        assert "sk_live_1" not in code and "attempts=3" in code
        assert page.status_code == 200 and "<script>window.hit" not in page.text

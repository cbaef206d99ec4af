"""`/queues/{queue}/jobs/{job}/edit` and `…/test`: a failed job with another payload; a job as the code of a test."""

from __future__ import annotations

import msgspec

from bullpen.dashboard._web import JSON, PageAnswer, PageProblem
from bullpen.dashboard.access import Permission
from bullpen.dashboard.edits import EDIT_FIELDS, edit_page, must_be_as_shown, patch_of
from bullpen.dashboard.problems import or_form
from bullpen.dashboard.reads.jobs import read_job
from bullpen.dashboard.routes import Context, Page, PageRoute
from bullpen.ops.job_tests import job_as_test
from bullpen.ops.views.jobs import JobView
from bullpen.ports.edits import make_edit
from bullpen.queue import Job, JobState
from bullpen.queue.dead_letters.entry import entry_id


async def edit_form(context: Context) -> Page:
    """Ask for a change of the data."""
    view, _ = await _failed(context)
    return edit_page(view, view.id, "queues", "retry", _back(context))


async def edit(context: Context) -> Page | PageAnswer:
    """Show what would differ; with `confirmed`, store it and retry, in one step. Id and idempotency key stay."""
    fields = await context.request.form()

    async def again(context: Context, given: dict[str, str], problem: str) -> Page:
        view, _ = await _failed(context)
        return edit_page(view, view.id, "queues", "retry", _back(context), given, problem=problem)

    async def work() -> Page | PageAnswer:
        view, job = await _failed(context)
        change = make_edit(job.data, merge=patch_of(fields), why=fields.get("reason", "")[:200])
        must_be_as_shown(fields, change)
        if not fields.get("confirmed"):
            return edit_page(view, view.id, "queues", "retry", _back(context), fields, (job.data, change))
        queue = context.desk.queue(view.queue)

        async def do() -> list[str]:
            actions = await context.desk.actions(context.actor)
            await actions.note("job.edit", view.queue, job.id, {**context.actor.note(), **change.note()})
            entry = entry_id(job.id, job.attempts_started)
            await context.desk.within(queue.failed_set.redrive_edited(entry, change, by=context.actor.name))
            return [f"Job {job.id} is back in line with the new data."]

        (told,) = await context.once(f"job.edit {view.queue} {job.id}", do)
        context.desk.forget()
        if context.request.is_api:
            return PageAnswer(200, msgspec.json.encode({"done": told}), JSON)
        return context.redirect(_back(context), told)

    return await or_form(context, again, work)


async def _failed(context: Context) -> tuple[JobView, Job]:
    name, job_id = context.path["queue"], context.path["job"]
    view = await read_job(context.desk, name, job_id, payloads=context.payloads)
    if JobState(view.state) is not JobState.FAILED:
        raise PageProblem(409, f"The job is {view.state}: only failed jobs are edited and retried.")
    found = await context.desk.within(context.desk.queue(name).get_job(job_id))
    if found is None:
        raise PageProblem(404, "There is no such job.")
    return view, found


def _back(context: Context) -> str:
    return context.url("queues", context.path["queue"], "jobs", context.path["job"])


class TestView(msgspec.Struct, rename="camel", frozen=True):
    """A test that adds a job."""

    queue: str
    id: str
    code: str


async def as_test(context: Context) -> Page:
    """A job as the code of a test, without its secrets."""
    queue, job_id = context.path["queue"], context.path["job"]
    found = await context.desk.within(context.desk.queue(queue).get_job(job_id))
    if found is None:
        raise PageProblem(404, "There is no such job.")
    view = TestView(queue, job_id, job_as_test(found))
    return Page("job_test.html", view, f"{job_id} as a test", "queues", values={"back": _back(context)})


ROUTES = (
    PageRoute("/queues/{queue}/jobs/{job}/edit", edit_form, Permission.ACT, view=JobView),
    PageRoute("/queues/{queue}/jobs/{job}/edit", edit, Permission.ACT, "POST", fields=EDIT_FIELDS),
    PageRoute("/queues/{queue}/jobs/{job}/test", as_test, Permission.PAYLOADS, view=TestView),
)

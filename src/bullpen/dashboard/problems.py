"""What errors become: a status and a sentence; and forms that are shown again with what was typed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bullpen._kernel.scrub import scrub
from bullpen.dashboard._web import PageAnswer, PageProblem
from bullpen.dashboard.routes import Context, Page
from bullpen.errors import (
    BullpenError,
    DeadLetterNotFound,
    InvalidOption,
    JobNotFound,
    JobStateConflict,
    SchedulerNotFound,
)

__all__ = ["as_problem", "or_form"]

Form = Callable[[Context, dict[str, str], str], Awaitable[Page]]
"""Draws a form with what was typed and what is wrong with it."""


def as_problem(error: BullpenError) -> PageProblem:
    text = scrub(str(error))
    text = text[:1].upper() + text[1:]
    match error:
        case JobNotFound() | SchedulerNotFound() | DeadLetterNotFound():
            return PageProblem(404, text)
        case JobStateConflict():
            return PageProblem(409, text)
        case InvalidOption():
            return PageProblem(422, text)
    return PageProblem(503 if "Lost" in type(error).__name__ else 409, text)


async def or_form(context: Context, form: Form, work: Callable[[], Awaitable[Page | PageAnswer]]) -> Page | PageAnswer:
    """Do it; what cannot be done as it was typed is said in the form, which keeps all that was typed."""
    try:
        return await work()
    except (PageProblem, BullpenError) as error:
        problem = error if isinstance(error, PageProblem) else as_problem(error)
        if context.request.is_api or problem.status not in (409, 422):
            raise problem from None
        page = await form(context, await context.request.form(), problem.text)
        page.status = problem.status
        return page

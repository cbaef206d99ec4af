"""What people do to queues and jobs by hand: one path for the command line, the pages and the API.

In: the name of an action, what it is done to, its parameters, and who asks. Out: what was done, in words. Every action
is written to the audit trail before it is done: what cannot be written down is not done. The table `ACTIONS` says of
each what it does, whether it can be undone, and who may do it; a preview is made of the same entry.
Elsewhere: where the trail is kept (`bullpen.wiring.audit`), dead letters (`dead_letters`), many objects (`operations`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, Protocol

from bullpen._kernel.command_line import command_line
from bullpen._kernel.duration import written_ms
from bullpen._kernel.logs import get_logger
from bullpen.errors import InvalidOption, JobNotFound, SchedulerNotFound
from bullpen.ops.pauses import pause_queue, resume_queue
from bullpen.queue import JobState, Queue
from bullpen.queue.actor import check_actor

__all__ = [
    "ACTIONS", "EVERY_ENTRY", "Action", "ActionField", "Actions", "Actor", "AuditRecord", "AuditSearch", "Deed",
    "Trail", "find_action",
]  # fmt: skip

logger = get_logger("bullpen.actions")

_READY: Final = (JobState.WAITING, JobState.PRIORITIZED, JobState.DELAYED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRecord:
    """One entry of the trail."""

    at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: str | None
    detail: Any
    login: str | None = None
    """The login that PostgreSQL reports; `actor` is the name that this login gave, and can be wrong."""
    cursor: str = ""
    """Where a page that begins behind this entry begins; empty where there are no pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSearch:
    """Which entries are wanted. Texts are parts of what stands there, in any case of letters."""

    actor: str = ""
    action: str = ""
    subject: str = ""
    since: datetime | None = None
    until: datetime | None = None
    before: str = ""
    """The cursor of the last entry of the page before."""

    def fits(self, entry: AuditRecord) -> bool:
        """Whether an entry is wanted, but for the page."""
        texts = ((self.actor, entry.actor), (self.action, entry.action), (self.subject, entry.subject))
        in_time = (self.since is None or entry.at >= self.since) and (self.until is None or entry.at < self.until)
        return in_time and all(part.casefold() in text.casefold() for part, text in texts)


EVERY_ENTRY: Final = AuditSearch()


class Trail(Protocol):
    """Where is written down who did what."""

    kept: str
    """For how long, in words."""

    async def write(
        self, store: str, by: str, action: str, subject: str, tenant_id: str | None, detail: Mapping[str, Any]
    ) -> None:
        """Add one entry; returns when it is stored. `store` is the queue or the store that it is about."""
        ...

    async def read(
        self,
        stores: list[str],
        *,
        subject: str | None = None,
        tenant_id: str | None = None,
        limit: int = 100,
        search: AuditSearch = EVERY_ENTRY,
    ) -> list[AuditRecord]:
        """The newest entries about these stores first."""
        ...


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asks, and from where."""

    name: str
    via: str = "command"
    """`command`, `dashboard` or `api`."""
    role: str = ""
    address: str = ""
    request_id: str = ""

    def note(self) -> dict[str, str]:
        found = {"via": self.via, "role": self.role, "address": self.address, "requestId": self.request_id}
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True, slots=True)
class ActionField:
    """One value that an action takes."""

    name: str
    label: str
    kind: str = "text"
    """`text`, `number`, `duration` or `flag`."""
    default: str = ""
    hint: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """One action on one subject, checked and ready to be done."""

    action: Action
    queue: str
    subject: str = ""
    """The id of a job or of a schedule; empty for the queue itself."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""

    @property
    def command(self) -> str:
        """The same as a command."""
        return self.action.command(self)


Perform = Callable[[Queue, str, Mapping[str, str]], Awaitable[str]]
"""Takes the queue, the subject and the parameters, with `by` and `reason` among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that people do."""

    name: str
    """`job.retry`: the kind of subject and the verb."""
    title: str
    says: str
    """What will happen."""
    undo: str
    """Whether it can be undone."""
    perform: Perform
    command: Callable[[Deed], str] = lambda _deed: ""
    """The same for a terminal; empty where there is no such command."""
    role: str = "operator"
    states: tuple[JobState, ...] = ()
    """Of jobs: in which states it can be done; empty: in all."""
    parameters: tuple[ActionField, ...] = ()
    danger: bool = False
    typed: bool = False
    """Whether the name of the queue has to be typed."""
    inverse: str = ""
    """The action that undoes it."""

    @property
    def kind(self) -> str:
        return self.name.partition(".")[0]

    @property
    def verb(self) -> str:
        return self.name.partition(".")[2]

    def why_not(self, state: JobState) -> str | None:
        """Why it cannot be done to a job in a state; None: it can."""
        if not self.states or state in self.states:
            return None
        return f"only for {' or '.join(each.value for each in self.states)} jobs"


class Actions:
    """Does what one actor asks for."""

    def __init__(self, queue_of: Callable[[str], Queue], trail: Trail, actor: Actor) -> None:
        self._queue_of, self._trail = queue_of, trail
        self.actor = replace(actor, name=check_actor(actor.name))

    async def do(
        self, name: str, queue: str, subject: str = "", *, reason: str = "", **parameters: str | int | bool | None
    ) -> str:
        """Audit it, do it, and return a sentence about the result.

        Raises what the queue raises: JobNotFound, JobStateConflict, SchedulerNotFound; InvalidOption for a parameter.
        """
        given = {key: _as_text(value) for key, value in parameters.items() if value is not None and value is not False}
        deed = Deed(action=find_action(name), queue=queue, subject=subject, parameters=given, reason=reason)
        return await self.perform(deed)

    async def perform(self, deed: Deed) -> str:
        """As `do`, for a deed that was made before."""
        target = self._queue_of(deed.queue)
        detail = {**self.actor.note(), **{key: value for key, value in deed.parameters.items() if key != "data"}}
        if deed.reason:
            detail["reason"] = deed.reason
        await self.note(deed.action.name, deed.queue, deed.subject, detail)
        given = {**deed.parameters, "by": self.actor.name, "reason": deed.reason}
        done = await deed.action.perform(target, deed.subject, given)
        logger.warning(
            "%s of %s by %s%s",
            *(deed.action.name, f"{deed.queue}/{deed.subject}" if deed.subject else deed.queue, self.actor.name),
            f": {deed.reason}" if deed.reason else "",
            extra={"queue": deed.queue},
        )
        return done

    async def note(self, action: str, queue: str, subject: str, detail: Mapping[str, Any]) -> None:
        """Write an entry for something that is done elsewhere."""
        name = f"{queue}/{subject}" if subject else queue
        await self._trail.write(queue, self.actor.name, action, name, None, detail)


def find_action(name: str) -> Action:
    """An action by its name; raises InvalidOption."""
    try:
        return ACTIONS[name]
    except KeyError:
        raise InvalidOption("action", f"one of {', '.join(ACTIONS)}", name) from None


def _as_text(value: str | int | bool) -> str:
    return "1" if value is True else str(value)


# What is done -------------------------------------------------------------------------------------------------------


async def _retry(queue: Queue, job_id: str, given: Mapping[str, str]) -> str:
    state = JobState.COMPLETED if given.get("state") == "completed" else JobState.FAILED
    await queue.retry(job_id, state=state, reset_attempts=bool(given.get("reset")))
    return f"Job {job_id} is queued again."


async def _promote(queue: Queue, job_id: str, _: Mapping[str, str]) -> str:
    await queue.promote(job_id)
    return f"Job {job_id} runs as soon as a worker is free."


async def _remove(queue: Queue, job_id: str, _: Mapping[str, str]) -> str:
    if not await queue.remove(job_id):
        raise JobNotFound(queue.name, job_id)
    return f"Job {job_id} was removed."


async def _cancel(queue: Queue, job_id: str, given: Mapping[str, str]) -> str:
    await queue.cancel(job_id, given.get("why") or None)
    return f"Job {job_id} is cancelled, or its worker was asked to stop it."


async def _delay(queue: Queue, job_id: str, given: Mapping[str, str]) -> str:
    delay_ms = written_ms(given.get("delay", ""))
    if delay_ms is None:
        raise InvalidOption("delay", "a duration such as 90s, 15m, 2h or 1d", given.get("delay", ""))
    await queue.change_delay(job_id, delay_ms)
    return f"Job {job_id} is due in {given['delay']}."


async def _priority(queue: Queue, job_id: str, given: Mapping[str, str]) -> str:
    await queue.change_priority(job_id, _number("priority", given.get("priority", "")))
    return f"Job {job_id} has priority {given['priority']}."


async def _pause(queue: Queue, _subject: str, given: Mapping[str, str]) -> str:
    await pause_queue(queue, by=given["by"], reason=given["reason"], group=bool(given.get("group")))
    return f"{queue.name} is paused. Jobs that run finish."


async def _resume(queue: Queue, _subject: str, given: Mapping[str, str]) -> str:
    await resume_queue(queue, group=bool(given.get("group")))
    return f"{queue.name} is running again."


async def _lift(queue: Queue, _subject: str, _: Mapping[str, str]) -> str:
    await queue.lift_rate_limit()
    return f"{queue.name} starts jobs again."


async def _concurrency(queue: Queue, _subject: str, given: Mapping[str, str]) -> str:
    if not given.get("most"):
        await queue.remove_global_concurrency()
        return f"{queue.name} no longer has a concurrency limit."
    most = _number("most", given["most"])
    await queue.set_global_concurrency(most)
    return f"At most {most} jobs of {queue.name} run at once."


async def _rate(queue: Queue, _subject: str, given: Mapping[str, str]) -> str:
    if not given.get("most"):
        await queue.remove_global_rate_limit()
        return f"{queue.name} no longer has a rate limit."
    most, duration = _number("most", given["most"]), written_ms(given.get("duration", ""))
    if not duration:
        raise InvalidOption("duration", "a duration such as 1s or 1m", given.get("duration", ""))
    await queue.set_global_rate_limit(most, duration)
    return f"At most {most} jobs of {queue.name} start per {given['duration']}."


async def _promote_all(queue: Queue, _subject: str, _: Mapping[str, str]) -> str:
    return f"{await queue.promote_all()} jobs were promoted."


async def _drain(queue: Queue, _subject: str, given: Mapping[str, str]) -> str:
    return f"{await queue.drain(delayed=bool(given.get('delayed')))} jobs were removed."


async def _obliterate(queue: Queue, _subject: str, given: Mapping[str, str]) -> str:
    return f"{queue.name} was deleted with {await queue.obliterate(force=bool(given.get('force')))} jobs."


async def _run_schedule(queue: Queue, schedule: str, _: Mapping[str, str]) -> str:
    job_id = await queue.run_scheduler(schedule)
    return f"Job {job_id} was added; the firings of {schedule} stay where they are."


async def _run_schedule_early(queue: Queue, schedule: str, _: Mapping[str, str]) -> str:
    return f"Job {await queue.run_scheduler(schedule, early=True)} of {schedule} runs now."


async def _pause_schedule(queue: Queue, schedule: str, _: Mapping[str, str]) -> str:
    await queue.pause_scheduler(schedule)
    return f"{schedule} makes no jobs until it is resumed."


async def _resume_schedule(queue: Queue, schedule: str, _: Mapping[str, str]) -> str:
    await queue.resume_scheduler(schedule)
    return f"{schedule} makes jobs again."


async def _remove_schedule(queue: Queue, schedule: str, _: Mapping[str, str]) -> str:
    if not await queue.remove_scheduler(schedule):
        raise SchedulerNotFound(queue.name, schedule)
    return f"{schedule} was removed."


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidOption(name, "a whole number", text)
    return int(text)


def _on_job(verb: str) -> Callable[[Deed], str]:
    return lambda deed: command_line(f"jobs {verb}", deed.queue, deed.subject)


def _on_queue(verb: str, *flags: str) -> Callable[[Deed], str]:
    def command(deed: Deed) -> str:
        return command_line(f"queues {verb}", deed.queue, **{flag: bool(deed.parameters.get(flag)) for flag in flags})

    return command


def _on_schedule(verb: str) -> Callable[[Deed], str]:
    return lambda deed: command_line(f"schedules {verb}", deed.queue, deed.subject)


_DELAY: Final = ActionField("delay", "Due in", "duration", "5m", "90s, 15m, 2h, 1d", required=True)
_PRIORITY: Final = ActionField(
    "priority", "Priority", "number", "0", "0 before all others, then 1 to 2097151", required=True
)
_MOST: Final = ActionField("most", "At most", "number", "", "empty: no limit")
_NO_UNDO: Final = "This cannot be undone."

ACTIONS: Final = {
    each.name: each
    for each in (
        Action(
            name="job.retry",
            title="Retry",
            says="The job is queued again with its id. Its dead letter is removed.",
            undo="It cannot be undone after a worker has taken the job; until then the job can be removed.",
            perform=_retry,
            command=_on_job("retry"),
            states=(JobState.FAILED,),
            parameters=(ActionField("reset", "Start counting attempts again", "flag", "1"),),
        ),
        Action(
            name="job.promote",
            title="Run now",
            says="The delayed job runs as soon as a worker is free.",
            undo="Cannot be undone.",
            perform=_promote,
            command=_on_job("promote"),
            states=(JobState.DELAYED,),
        ),
        Action(
            name="job.delay",
            title="Change delay",
            says="The delayed job becomes due after this time, counted from now.",
            undo="The delay can be changed again.",
            perform=_delay,
            command=lambda deed: command_line(
                "jobs change", deed.queue, deed.subject, delay=deed.parameters.get("delay", "5m")
            ),
            states=(JobState.DELAYED,),
            parameters=(_DELAY,),
        ),
        Action(
            name="job.priority",
            title="Change priority",
            says="The job moves behind the other jobs of its new priority.",
            undo="The priority can be changed again.",
            perform=_priority,
            command=lambda deed: command_line(
                "jobs change", deed.queue, deed.subject, priority=deed.parameters.get("priority", "0")
            ),
            states=_READY,
            parameters=(_PRIORITY,),
        ),
        Action(
            name="job.cancel",
            title="Cancel",
            says="A waiting job fails now as cancelled. For a running job, its worker is asked to stop it.",
            undo="It cannot be undone; a cancelled job can be retried.",
            perform=_cancel,
            command=_on_job("cancel"),
            states=(*_READY, JobState.ACTIVE, JobState.WAITING_CHILDREN),
            parameters=(ActionField("why", "Reason for the job"),),
        ),
        Action(
            name="job.remove",
            title="Remove",
            says="The job is deleted with its data, its logs and its child jobs.",
            undo=_NO_UNDO,
            perform=_remove,
            command=_on_job("remove"),
            states=tuple(state for state in JobState if state not in (JobState.ACTIVE, JobState.UNKNOWN)),
            danger=True,
        ),
        Action(
            name="queue.pause",
            title="Pause",
            says="Workers of all clients take no more jobs from this queue. Jobs that run finish.",
            undo="Resume undoes it.",
            perform=_pause,
            command=_on_queue("pause"),
            inverse="queue.resume",
        ),
        Action(
            name="queue.resume",
            title="Resume",
            says="Workers take jobs from this queue again.",
            undo="Pause undoes it.",
            perform=_resume,
            command=_on_queue("resume"),
            inverse="queue.pause",
        ),
        Action(
            name="queue.lift",
            title="End the rate-limit window",
            says="The current window of the rate limit ends now, and jobs may start again.",
            undo="Cannot be undone; the next window begins with the next job.",
            perform=_lift,
        ),
        Action(
            name="queue.concurrency",
            title="Limit concurrency",
            says="All workers of all clients together run at most this many jobs of this queue.",
            undo="The limit can be changed again.",
            perform=_concurrency,
            parameters=(_MOST,),
        ),
        Action(
            name="queue.rate",
            title="Limit the rate",
            says="All workers of all clients together start at most this many jobs of this queue per window.",
            undo="The limit can be changed again.",
            perform=_rate,
            parameters=(_MOST, ActionField("duration", "Per", "duration", "1s", "1s, 1m, 1h")),
        ),
        Action(
            name="queue.promote-all",
            title="Run all delayed jobs now",
            says="All delayed jobs run as soon as workers are free, including the next jobs of schedules.",
            undo="Cannot be undone.",
            perform=_promote_all,
            command=lambda deed: command_line("jobs promote", deed.queue, all=True),
        ),
        Action(
            name="queue.drain",
            title="Drain",
            says="All waiting jobs are deleted. Running and finished jobs stay.",
            undo=_NO_UNDO,
            perform=_drain,
            command=_on_queue("drain", "delayed"),
            role="admin",
            parameters=(ActionField("delayed", "Delete delayed jobs too", "flag"),),
            danger=True,
            typed=True,
        ),
        Action(
            name="queue.obliterate",
            title="Obliterate",
            says="The queue is deleted with all of its jobs. Its dead letters stay.",
            undo=_NO_UNDO,
            perform=_obliterate,
            command=_on_queue("obliterate", "force"),
            role="admin",
            parameters=(ActionField("force", "Also when jobs are running", "flag"),),
            danger=True,
            typed=True,
        ),
        Action(
            name="schedule.once",
            title="Run now",
            says="One more job with the name, data and options of this schedule runs now. Its firings stay.",
            undo="Cannot be undone once a worker has taken it; until then the job can be removed.",
            perform=_run_schedule,
            command=_on_schedule("run"),
        ),
        Action(
            name="schedule.run",
            title="Run the next one now",
            says="The next job of this schedule runs now. The run after it starts at its own time.",
            undo="Cannot be undone.",
            perform=_run_schedule_early,
            command=lambda deed: command_line("schedules run", deed.queue, deed.subject, early=True),
        ),
        Action(
            name="schedule.pause",
            title="Pause",
            says="The schedule makes no jobs until it is resumed. A running job continues.",
            undo="Resume undoes it.",
            perform=_pause_schedule,
            command=_on_schedule("pause"),
            inverse="schedule.resume",
        ),
        Action(
            name="schedule.resume",
            title="Resume",
            says="The schedule makes jobs again, starting with its next time.",
            undo="Pause undoes it.",
            perform=_resume_schedule,
            command=_on_schedule("resume"),
            inverse="schedule.pause",
        ),
        Action(
            name="schedule.remove",
            title="Remove",
            says="The schedule is deleted with its next job.",
            undo="It cannot be undone here: store the schedule again in the program that declares it.",
            perform=_remove_schedule,
            command=_on_schedule("remove"),
            role="admin",
            danger=True,
        ),
    )
}

"""Jobs as people see them: a line of a list, and one with all that is stored of it.

In: heads or records of jobs. Out: views without secrets; for users who may not see payloads, their sizes only.
Elsewhere: reading (`bullpen.queue`), why a job does not run (`bullpen.ops.explain`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.scrub import hide_secrets, scrub_lines, summary
from bullpen.errors import NotJson
from bullpen.ops.explain import JobExplanation, JobFacts, explain
from bullpen.ops.status import job_status
from bullpen.queue import JobState
from bullpen.queue.heads import JobHead
from bullpen.wire.events import QueueEvent
from bullpen.wire.records import JobRecord

__all__ = [
    "FailedAttempt",
    "JobRow",
    "JobView",
    "JobsView",
    "Payload",
    "TimelineStep",
    "job_row",
    "job_view",
    "payload_of",
    "shown_preview",
]

_PREVIEW: Final = 200
_MOST_SHOWN_BYTES: Final = 256_000
_LAST_LINE: Final = 300


class Payload(msgspec.Struct, rename="camel", frozen=True):
    """Stored JSON for people: without secrets, and only its size for users who may not see it."""

    size: int
    value: Any = None
    text: str = ""
    """What is shown instead, when it is not JSON or too large."""
    hidden: str = ""
    """Why nothing is shown."""


class JobRow(msgspec.Struct, rename="camel", frozen=True):
    """One job of a list."""

    id: str
    name: str
    state: str
    word: str
    created_ms: int
    attempts_made: int
    attempts: int
    preview: str
    """The beginning of its data."""
    data_bytes: int
    error: str = ""
    processed_ms: int = 0
    finished_ms: int = 0
    due_ms: int = 0
    duration_ms: int | None = None
    worker: str = ""
    priority: int = 0
    progress: str = ""
    dead_letter: str = ""


class JobsView(msgspec.Struct, rename="camel", frozen=True):
    """A page of the jobs of a state."""

    queue: str
    state: str
    start: int
    count: int
    total: int
    """In this state."""
    jobs: tuple[JobRow, ...]
    looked_at: int
    """How many jobs were read to find these."""
    next_start: int | None
    """Where the next page begins; None: this was the last."""
    fitting: int | None = None
    """How many match the filter, where that is known without reading all."""


class TimelineStep(msgspec.Struct, rename="camel", frozen=True):
    """Something that happened to a job."""

    at_ms: int
    what: str
    detail: str = ""
    after_ms: int | None = None
    """Since the step before."""


class FailedAttempt(msgspec.Struct, rename="camel", frozen=True):
    """One attempt that failed."""

    number: int
    error: str
    stack: str
    """Frames of the program; frames of libraries are in `folded`."""
    folded: str = ""
    frames_folded: int = 0


class JobView(msgspec.Struct, rename="camel", frozen=True):
    """Everything about one job."""

    queue: str
    id: str
    name: str
    state: str
    word: str
    explanation: dict[str, str]
    created_ms: int
    processed_ms: int
    finished_ms: int
    due_ms: int | None
    attempts_made: int
    attempts: int
    attempts_started: int
    stalled_count: int
    priority: int
    worker: str
    error: str
    data: Payload
    result: Payload | None
    progress: Any
    options: dict[str, Any]
    timeline: tuple[TimelineStep, ...]
    failures: tuple[FailedAttempt, ...]
    logs: tuple[str, ...]
    log_total: int
    parent: str = ""
    parent_queue: str = ""
    scheduler: str = ""
    dead_letter: str = ""
    deduplication: str = ""
    has_children: bool = False
    now_ms: int = 0


def job_row(head: JobHead, state: JobState, *, payloads: bool) -> JobRow:
    """One job of a list."""
    record = head.record
    error = record.raw_failed_reason or ""
    made = record.attempts_made
    word = job_status(state.value, attempts_made=made, has_failed=bool(error))
    began, ended = record.processed_on, record.finished_on
    return JobRow(
        id=record.id,
        name=record.name,
        state=state.value,
        word=word.value,
        created_ms=record.timestamp,
        attempts_made=made,
        attempts=record.opts.attempts,
        preview=shown_preview(head, "data")[:_PREVIEW] if payloads else "",
        data_bytes=head.sizes.get("data", 0),
        error=summary(error, _LAST_LINE) if error and payloads and state is not JobState.COMPLETED else "",
        processed_ms=began,
        finished_ms=ended,
        due_ms=record.due_ms if state is JobState.DELAYED else 0,
        duration_ms=ended - began if ended and began and ended >= began else None,
        worker=record.worker_id or "",
        priority=record.priority,
        progress=_progress(head.preview("progress"), payloads=payloads),
        dead_letter=record.dead_letter_id or "",
    )


def shown_preview(head: JobHead, field: str) -> str:
    """The first part of a large field, as shown. Filters search the same text and reveal nothing more."""
    return scrub_lines(head.preview(field))


def payload_of(raw: bytes | None, *, payloads: bool) -> Payload | None:
    """Stored JSON as a view; None when there is none."""
    if raw is None:
        return None
    if not payloads:
        return Payload(len(raw), hidden="You may not see payloads.")
    if len(raw) > _MOST_SHOWN_BYTES:
        return Payload(len(raw), hidden="It is too large to show here. Download it.")
    try:
        return Payload(len(raw), value=hide_secrets(json.decode(raw)))
    except NotJson:
        return Payload(len(raw), text=scrub_lines(raw.decode("utf-8", "replace")))


def job_view(
    facts: JobFacts, record: JobRecord, events: list[QueueEvent], logs: list[str], log_total: int, *, payloads: bool
) -> JobView:
    """Everything about one job."""
    error = record.raw_failed_reason or ""
    word = job_status(facts.state.value, attempts_made=record.attempts_made, has_failed=bool(error))
    parent = record.parent_key or ""
    parent_base, _, parent_id = parent.rpartition(":")
    explanation: JobExplanation = explain(facts)
    return JobView(
        queue=facts.queue,
        id=record.id,
        name=record.name,
        state=facts.state.value,
        word=word.value,
        explanation=explanation.to_json(),
        created_ms=record.timestamp,
        processed_ms=record.processed_on,
        finished_ms=record.finished_on,
        due_ms=facts.due_ms,
        attempts_made=record.attempts_made,
        attempts=record.opts.attempts,
        attempts_started=record.attempts_started,
        stalled_count=record.stalled_count,
        priority=record.priority,
        worker=record.worker_id or "",
        error=summary(record.failure_text) if error and payloads and not record.has_return_value else "",
        data=payload_of(record.raw_data, payloads=payloads) or Payload(0),
        result=payload_of(record.field(b"returnvalue"), payloads=payloads),
        progress=hide_secrets(record.progress) if payloads else None,
        options=hide_secrets(record.opts.to_json()),
        timeline=tuple(_timeline(facts, record, events)),
        failures=tuple(_failures(record)) if payloads else (),
        logs=tuple(scrub_lines(line) for line in logs) if payloads else (),
        log_total=log_total,
        parent=parent_id,
        parent_queue=parent_base.partition(":")[2] if parent_base else "",
        scheduler=record.scheduler_id or "",
        dead_letter=record.dead_letter_id or "",
        deduplication=record.deduplication_id or "",
        now_ms=facts.now_ms,
    )


_EVENTS: Final = {
    "active": "taken",
    "completed": "done",
    "failed": "failed",
    "delayed": "delayed",
    "stalled": "stalled, given back",
    "retries-exhausted": "attempts used up",
    "waiting": "in line",
    "waiting-children": "waits for children",
    "retry": "attempt failed",
    "removed": "removed",
}


def _timeline(facts: JobFacts, record: JobRecord, events: list[QueueEvent]) -> list[TimelineStep]:
    """What is stored in the job, and what its events still know."""
    steps = [(record.timestamp, "created", "")]
    told = {_EVENTS[event.event] for event in events if event.event in _EVENTS}
    for event in events:
        if event.event in _EVENTS and not (event.event == "waiting" and event.timestamp - record.timestamp < 5):
            by = record.worker_id or "" if event.event == "active" and event is events[-1] else ""
            steps.append((event.timestamp, _EVENTS[event.event], by))
    if record.processed_on and "taken" not in told:
        steps.append((record.processed_on, "taken", record.worker_id or ""))
    if record.finished_on and not told & {"done", "failed"}:
        steps.append((record.finished_on, "done" if facts.state is JobState.COMPLETED else "failed", ""))
    steps += _redrives(record)
    if facts.due_ms and facts.due_ms > facts.now_ms:
        steps.append((facts.due_ms, "due", ""))
    steps.sort(key=lambda step: step[0])
    found: list[TimelineStep] = []
    for at_ms, what, detail in steps:
        found.append(TimelineStep(at_ms, what, detail, at_ms - found[-1].at_ms if found else None))
    return found


def _redrives(record: JobRecord) -> list[tuple[int, str, str]]:
    """Who sent it back, and whether with other data."""
    try:
        notes = json.decode(record.field(b"bpredriven") or b"[]")
    except NotJson:
        return []
    return [
        (note["at"], "edited and sent back" if note.get("edit") else "sent back", f"by {note.get('by') or 'somebody'}")
        for note in (notes if isinstance(notes, list) else ())
        if isinstance(note, dict) and isinstance(note.get("at"), int)
    ]


def _failures(record: JobRecord) -> list[FailedAttempt]:
    """The newest first."""
    stacks = record.stacktrace
    first = record.attempts_made - len(stacks) + 1
    found = []
    for place, raw in enumerate(stacks):
        text = scrub_lines(raw)
        own, folded = _split_stack(text)
        found.append(FailedAttempt(max(1, first + place), summary(raw), "\n".join(own), "\n".join(folded), len(folded)))
    return found[::-1]


def _split_stack(text: str) -> tuple[list[str], list[str]]:
    """Lines of the program, and lines of libraries: Python's frames have two lines, Node's one."""
    own, folded = list[str](), list[str]()
    into = own
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(("File ", "at ")):
            is_library = any(
                mark in stripped
                for mark in ("site-packages", "node_modules", "/lib/python", "node:", "/bullpen/_kernel/")
            )
            into = folded if is_library else own
        elif not line.startswith("    "):
            into = own
        into.append(line)
    return own, folded


def _progress(text: str, *, payloads: bool) -> str:
    """A number says how far it is; anything else is data of the handler."""
    if text in ("", "0") or not (payloads or text.replace(".", "", 1).isdigit()):
        return ""
    return scrub_lines(text)[:60]

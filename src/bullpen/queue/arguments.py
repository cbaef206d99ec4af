"""The keyword arguments of queues, adds and tasks, as editors and type checkers read them.

Nothing is checked here: each class names what its owner checks (`Queue`, `Queue.add`, `Task`), and a test compares the
two. A new option is written where it is checked and here. Elsewhere: options of jobs (`bullpen.wire.options`), of
workers (`bullpen.worker.options`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypedDict

from bullpen.queue.codec import Codec
from bullpen.queue.durability import Durability
from bullpen.wire.links import OnFailure
from bullpen.wire.options import CommonArguments, JobArguments, JobDefaults, TemplateArguments, TimeArguments
from bullpen.wire.schedules import ScheduleArguments

__all__ = [
    "AddArguments",
    "AddInTransactionArguments",
    "JobArguments",
    "JobDefaults",
    "NewJobArguments",
    "QueueArguments",
    "RowArguments",
    "ScheduleArguments",
    "SchedulerArguments",
    "StoredJobArguments",
    "TaskArguments",
]


class NewJobArguments(JobArguments, total=False):
    """Options of a job in `add_many`: those of `add` without what holds for the whole call."""

    replace_finished: bool | None


class StoredJobArguments(NewJobArguments, total=False):
    """Options of one add that are kept until it is made."""

    durability: Durability | str | None


class AddArguments(StoredJobArguments, total=False):
    """What `Queue.add` takes besides name and data, and `Task.options`."""

    add_deadline: int | timedelta | None


class SchedulerArguments(ScheduleArguments, TemplateArguments, total=False):
    """What `upsert_scheduler` takes besides id, name and data."""

    on_failure: OnFailure | None
    """Stored with the template as other clients do. The jobs of a scheduler have no parent: it changes nothing."""


class TaskArguments(CommonArguments, TimeArguments, ScheduleArguments, total=False):
    """Options of `app.task` about the jobs of the task and its schedule."""

    lane: str | Callable[..., str | None] | None
    """A function gets the arguments of a run by their names; one that is not about all of them takes `**_`."""
    replace_finished: bool | None
    durability: Durability | str | None
    add_deadline: int | timedelta | None


class QueueArguments(JobDefaults, total=False):
    """What `app.queue` takes: arguments of `Queue`, without those that are the app's."""

    events_max_len: int | None
    dead_letter_suffix: str
    add_deadline: int | timedelta | None
    max_buffered: int
    durability: Durability | str
    clock_offset_ms: int
    codec: Codec | None


class RowArguments(TypedDict, total=False):
    """What a row of the outbox says about a job besides its options."""

    tenant_id: str | None
    user_id: str | None
    correlation_id: str | None
    ordering_key: str | None
    source_stream_id: str | None
    source_event_id: str | None
    headers: Mapping[str, Any] | None


class AddInTransactionArguments(StoredJobArguments, RowArguments, total=False):
    """What `Outbox.add_in_transaction` takes besides queue, name and data."""

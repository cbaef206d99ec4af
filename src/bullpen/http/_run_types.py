"""What travels over HTTP about runs. Names are camelCase on the wire; the OpenAPI description is made from these."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec

from bullpen._kernel.scrub import hide_secrets
from bullpen.http._api import ApiRecord
from bullpen.ledger import RunRow, RunStatus
from bullpen.ports.dead_letters import DeadLetter

Version = Annotated[str, msgspec.Meta(min_length=1, max_length=120)]


class StartRun(ApiRecord, forbid_unknown_fields=True):
    """What to run."""

    version_id: Version
    definition: Any
    handler: str | None = None
    """Who runs it; null: the handler without a name."""
    context_inputs: dict[str, Any] = msgspec.field(default_factory=dict)
    subject_file: Any = None
    subject_files: list[Any] | None = None
    knowledge_context: str | None = None
    is_test_run: bool = False
    payload_in_job: bool = True


class FailedAttemptView(ApiRecord):
    """One attempt that failed."""

    attempt: int
    at: str
    error: str


class RunView(ApiRecord):
    """A run."""

    id: str
    status: RunStatus
    version_id: str
    handler: str | None
    is_test_run: bool
    cost: int
    attempts: int
    redrives: int
    created_at: datetime
    started_at: datetime | None
    completed_at: datetime | None
    duration_ms: int | None
    progress: Any
    result: Any
    error_message: str | None
    retry_history: list[FailedAttemptView]

    @classmethod
    def of(cls, row: RunRow) -> RunView:
        return cls(
            id=row.id,
            status=row.status,
            version_id=row.version_id,
            handler=row.handler,
            is_test_run=row.is_test_run,
            cost=row.cost,
            attempts=row.attempts,
            redrives=row.redrives,
            created_at=row.created_at,
            started_at=row.started_at,
            completed_at=row.completed_at,
            duration_ms=row.duration_ms,
            progress=row.progress,
            result=row.result,
            error_message=row.error_message,
            retry_history=[FailedAttemptView(**entry) for entry in row.retry_history],
        )


class RunPage(ApiRecord):
    """Runs, newest first."""

    runs: list[RunView]
    next: str | None
    """The `cursor` of the next page; null on the last one."""


class DeadLetterView(ApiRecord):
    """A finally failed job, without its stack and with secrets hidden."""

    id: str
    run_id: str
    handler: str | None
    failed_at: str
    attempts_made: int
    cause: str | None
    error_message: str
    payload: Any

    @classmethod
    def of(cls, letter: DeadLetter, handler: str | None = None) -> DeadLetterView:
        return cls(
            id=letter.id,
            run_id=letter.job_id,
            handler=handler,
            failed_at=letter.failed_at,
            attempts_made=letter.attempts_made,
            cause=letter.cause,
            error_message=letter.error_message,
            payload=hide_secrets(letter.data),
        )


class DeadLetterPage(ApiRecord):
    """Dead letters of the tenant and one handler, newest first."""

    dead_letters: list[DeadLetterView]
    depth: int
    """How many the tenant has of this handler, on all pages."""
    next: str | None
    """The `cursor` of the next page; null on the last one."""

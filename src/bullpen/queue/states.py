"""The states of a job."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job is. The values are the wire's."""

    WAITING = "waiting"
    PRIORITIZED = "prioritized"
    DELAYED = "delayed"
    ACTIVE = "active"
    WAITING_CHILDREN = "waiting-children"
    COMPLETED = "completed"
    FAILED = "failed"
    UNKNOWN = "unknown"

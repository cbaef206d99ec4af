"""The numbers that BullMQ's scripts answer with when they refuse."""

from __future__ import annotations

from enum import Enum

__all__ = ["ErrorCode"]


class ErrorCode(Enum):
    """Why an operation was refused."""

    JobNotExist = -1
    JobLockNotExist = -2
    JobNotInState = -3
    JobPendingDependencies = -4
    ParentJobNotExist = -5
    JobLockMismatch = -6
    ParentJobCannotBeReplaced = -7
    JobHasFailedChildren = -9
    SchedulerJobIdCollision = -10
    SchedulerJobSlotsBusy = -11

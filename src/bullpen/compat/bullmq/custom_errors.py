"""What a processor raises to say more than "it failed"."""

from __future__ import annotations

__all__ = ["DelayedError", "UnrecoverableError", "WaitingChildrenError"]


class DelayedError(Exception):
    """After `job.moveToDelayed`: the job runs again later."""


class UnrecoverableError(Exception):
    """The job fails now, whatever attempts are left."""


class WaitingChildrenError(Exception):
    """After `job.moveToWaitingChildren` returned True: the job runs again when its children are done."""

"""A blocking queue for scripts, Flask, Django and everything else without an event loop; see `bullpen.queue.sync`."""

from __future__ import annotations

from bullpen.queue.sync import DeadLetters, FailedSetStore, Job, Lanes, Queue

__all__ = ["DeadLetters", "FailedSetStore", "Job", "Lanes", "Queue"]

"""The queue core: jobs shared live with every BullMQ client.

A name is loaded when it is first used: who adds jobs needs neither flows nor schedules nor dead letters.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bullpen._kernel.rates import RateLimit
    from bullpen.errors import TooFewReplicas
    from bullpen.ports.dead_letters import DeadLetter, DeadLetterFilter, RedriveReport
    from bullpen.queue.administration import JobCounts
    from bullpen.queue.browse import Metrics, WorkerInfo, find_queues
    from bullpen.queue.cancel import Cancelled
    from bullpen.queue.children import Children, ChildrenCounts
    from bullpen.queue.durability import Durability
    from bullpen.queue.events import QueueEvents
    from bullpen.queue.flows import BlockedParent, ChildrenPage, Flow, FlowNode
    from bullpen.queue.job import Added, Job, NewJob
    from bullpen.queue.lanes import LaneInfo, Lanes, LaneSettings
    from bullpen.queue.queue import Queue
    from bullpen.queue.states import JobState
    from bullpen.wire.deduplication import Deduplication
    from bullpen.wire.links import JobKey
    from bullpen.wire.schedules import SchedulerRecord, next_runs

__all__ = [
    "Added",
    "BlockedParent",
    "Cancelled",
    "Children",
    "ChildrenCounts",
    "ChildrenPage",
    "DeadLetter",
    "DeadLetterFilter",
    "Deduplication",
    "Durability",
    "Flow",
    "FlowNode",
    "Job",
    "JobCounts",
    "JobKey",
    "JobState",
    "LaneInfo",
    "LaneSettings",
    "Lanes",
    "Metrics",
    "NewJob",
    "Queue",
    "QueueEvents",
    "RateLimit",
    "RedriveReport",
    "SchedulerRecord",
    "TooFewReplicas",
    "WorkerInfo",
    "find_queues",
    "next_runs",
]

_HOMES: Final = {
    "bullpen._kernel.rates": ("RateLimit",),
    "bullpen.errors": ("TooFewReplicas",),
    "bullpen.ports.dead_letters": ("DeadLetter", "DeadLetterFilter", "RedriveReport"),
    "bullpen.queue.administration": ("JobCounts",),
    "bullpen.queue.browse": ("Metrics", "WorkerInfo", "find_queues"),
    "bullpen.queue.cancel": ("Cancelled",),
    "bullpen.queue.children": ("Children", "ChildrenCounts"),
    "bullpen.queue.durability": ("Durability",),
    "bullpen.queue.events": ("QueueEvents",),
    "bullpen.queue.flows": ("BlockedParent", "ChildrenPage", "Flow", "FlowNode"),
    "bullpen.queue.job": ("Added", "Job", "NewJob"),
    "bullpen.queue.lanes": ("LaneInfo", "Lanes", "LaneSettings"),
    "bullpen.queue.queue": ("Queue",),
    "bullpen.queue.states": ("JobState",),
    "bullpen.wire.deduplication": ("Deduplication",),
    "bullpen.wire.links": ("JobKey",),
    "bullpen.wire.schedules": ("SchedulerRecord", "next_runs"),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

# Hidden from the type checker, which would otherwise believe that every name exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(home), name)  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

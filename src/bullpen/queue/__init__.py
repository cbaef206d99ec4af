"""The queue core: jobs shared live with every BullMQ client."""

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

"""The queue core: jobs shared live with every BullMQ client."""

from bullpen.queue._default import connection_for, set_resolver
from bullpen.queue._redis import Connection
from bullpen.queue.browse import Children, ChildrenCounts, Metrics, SchedulerRecord, WorkerInfo, find_queues
from bullpen.queue.dead_letter import DeadLetter, DeadLetterFilter, RedriveReport
from bullpen.queue.durability import Durability
from bullpen.queue.events import QueueEvents
from bullpen.queue.job import Added, Job, JobState, NewJob
from bullpen.queue.queue import JobCounts, Queue
from bullpen.queue.worker import Worker
from bullpen.queue.worker_options import ChildLimits, RateLimit

__all__ = [
    "Added",
    "ChildLimits",
    "Children",
    "ChildrenCounts",
    "Connection",
    "DeadLetter",
    "DeadLetterFilter",
    "Durability",
    "Job",
    "JobCounts",
    "JobState",
    "Metrics",
    "NewJob",
    "Queue",
    "QueueEvents",
    "RateLimit",
    "RedriveReport",
    "SchedulerRecord",
    "Worker",
    "WorkerInfo",
    "connection_for",
    "find_queues",
    "set_resolver",
]

"""The queue core: jobs shared live with every BullMQ client."""

from bullpen.queue._default import connection_for, set_resolver
from bullpen.queue._redis import Connection
from bullpen.queue.dead_letter import DeadLetter
from bullpen.queue.durability import Durability
from bullpen.queue.events import QueueEvents
from bullpen.queue.job import Added, Job, JobState
from bullpen.queue.queue import JobCounts, NewJob, Queue
from bullpen.queue.worker import Worker
from bullpen.queue.worker_options import RateLimit

__all__ = [
    "Added",
    "Connection",
    "DeadLetter",
    "Durability",
    "Job",
    "JobCounts",
    "JobState",
    "NewJob",
    "Queue",
    "QueueEvents",
    "RateLimit",
    "Worker",
    "connection_for",
    "set_resolver",
]

"""PyPI's `bullmq`, over bullpen: a program that was written for it changes its import.

    from bullpen.compat.bullmq import Queue, Worker

Names, option dictionaries, return values and errors are those of PyPI `bullmq` 3.4. Queues, workers and events are
bullpen's: `queue.native_queue` and `worker.native_worker` are the objects behind. The page "BullMQ and bullpen" lists
every name, and what differs.
"""

from bullpen.compat.bullmq.abort_controller import AbortController, AbortError, AbortSignal
from bullpen.compat.bullmq.custom_errors import DelayedError, UnrecoverableError, WaitingChildrenError
from bullpen.compat.bullmq.error_code import ErrorCode
from bullpen.compat.bullmq.event_emitter import EventEmitter
from bullpen.compat.bullmq.flow_producer import FlowProducer
from bullpen.compat.bullmq.job import Job
from bullpen.compat.bullmq.job_scheduler import JobScheduler
from bullpen.compat.bullmq.queue import Queue
from bullpen.compat.bullmq.queue_events import QueueEvents
from bullpen.compat.bullmq.queue_events_producer import QueueEventsProducer
from bullpen.compat.bullmq.worker import Worker

__all__ = [
    "AbortController",
    "AbortError",
    "AbortSignal",
    "DelayedError",
    "ErrorCode",
    "EventEmitter",
    "FlowProducer",
    "Job",
    "JobScheduler",
    "Queue",
    "QueueEvents",
    "QueueEventsProducer",
    "UnrecoverableError",
    "WaitingChildrenError",
    "Worker",
]

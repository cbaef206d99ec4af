"""Take jobs, run handlers, settle outcomes."""

from bullpen.queue.batch import BatchOptions, JobBatch
from bullpen.worker.auto import AutoConcurrency
from bullpen.worker.children.limits import ChildLimits
from bullpen.worker.taker import Taker
from bullpen.worker.worker import Worker

__all__ = ["AutoConcurrency", "BatchOptions", "ChildLimits", "JobBatch", "Taker", "Worker"]

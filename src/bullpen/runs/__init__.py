"""Safe runs: charged, long operations that are submitted once, recovered after crashes and kept apart by tenant.

from bullpen.runs import Run, Runs
"""

from bullpen._kernel.breaker import CircuitBreaker
from bullpen.errors import RunFailed
from bullpen.ledger import RunRow, RunStatus, TransactionManager
from bullpen.runs.handlers import HandlerOptions, Price, RunArguments, RunOptions
from bullpen.runs.maintenance import RunMaintenance, Swept
from bullpen.runs.payload import RunPayload
from bullpen.runs.processor import RunHandler, RunProcessor
from bullpen.runs.providers import Provider
from bullpen.runs.runs import Runs, RunWorker, ingestion_job_id, ingestion_queue, ingestion_worker_options
from bullpen.runs.service import (
    DEAD_LETTER_QUEUE,
    QUEUE,
    EnqueuedRun,
    RunService,
    SubmitArguments,
    Submitted,
    run_id_for,
)
from bullpen.runs.steps import Run, RunInterrupted

__all__ = [
    "DEAD_LETTER_QUEUE",
    "QUEUE",
    "CircuitBreaker",
    "EnqueuedRun",
    "HandlerOptions",
    "Price",
    "Provider",
    "Run",
    "RunArguments",
    "RunFailed",
    "RunHandler",
    "RunInterrupted",
    "RunMaintenance",
    "RunOptions",
    "RunPayload",
    "RunProcessor",
    "RunRow",
    "RunService",
    "RunStatus",
    "RunWorker",
    "Runs",
    "SubmitArguments",
    "Submitted",
    "Swept",
    "TransactionManager",
    "ingestion_job_id",
    "ingestion_queue",
    "ingestion_worker_options",
    "run_id_for",
]

"""Take jobs, run a handler for each, settle the outcomes: the public face.

In: a handler and options. Out: every taken job is settled exactly once, or its lock runs out and another worker has it.
Elsewhere: what it shares with manual processing (`consumer`), the work itself (`engine`), options (`options`).
"""

from __future__ import annotations

import asyncio
import signal
from typing import Unpack

from bullpen._kernel.injection import marked
from bullpen._kernel.logs import get_logger
from bullpen._kernel.signatures import check_takes
from bullpen.errors import InvalidOption
from bullpen.queue.batch import BatchHandler
from bullpen.queue.job import Handler
from bullpen.redis.client import Connection
from bullpen.worker import signals as _signals
from bullpen.worker.around import Around
from bullpen.worker.consumer import JobConsumer
from bullpen.worker.handlers import runner_of
from bullpen.worker.options import WorkerArguments

logger = get_logger("bullpen.worker")


class Worker(JobConsumer):
    """Runs a handler for the jobs of one queue.

    `async def` handlers run on the event loop and are cancelled when their time is up; plain `def` handlers run in
    threads; with `processes=True` either kind runs in child processes, which can be killed. What a handler returns
    becomes the job's value; what it raises decides by the job's attempts and backoff. A handler may run more than
    once for one job (a crash, a lost lock): use `job.idempotency_key` and `job.fence`.

        async with Worker("emails", handle, connection="redis://localhost:6379", concurrency=100) as worker:
            await worker.run()
    """

    def __init__(
        self,
        queue: str,
        handler: Handler | BatchHandler,
        *,
        connection: str | Connection | None = None,
        prefix: str | None = None,
        **options: Unpack[WorkerArguments],
    ) -> None:
        if not callable(handler):
            raise InvalidOption("handler", "a function that takes a Job", handler)
        super().__init__(queue, connection, prefix, options)
        given = "job" if self.options.batch is None else "batch"
        check_takes("handler", handler, given, besides=marked(handler))
        self._runner = runner_of(handler, queue, self.options)

    def surround(self, around: Around) -> None:
        """Run this app's middleware around each job, and its hooks in child processes; before `start`."""
        self._runner.around = around

    async def run(self, *, signals: bool | None = None) -> None:
        """Work until closed. SIGTERM and SIGINT close gracefully, a second one hurries.

        `signals=None` installs the handlers only where the program has none of its own.
        """
        await self.start()
        remove_signals = _signals.install(self._on_signal, wanted=signals)
        try:
            await self._ended.wait()
        finally:
            remove_signals()
        await self.close()
        if self._crash is not None:
            raise self._crash

    def _on_signal(self, number: signal.Signals) -> None:
        engine = self._started()
        if self._is_closing:
            logger.warning("queue %r: second %s, running jobs are given back", self.queue_name, number.name)
            engine.hurry.set()
            return
        logger.info("queue %r: %s, no more jobs are taken; %d still run", self.queue_name, number.name, self.running)
        self._is_closing = True
        engine.driver.stop_taking()
        self._closing = asyncio.ensure_future(self.close())

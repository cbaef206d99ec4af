"""Submit, read, cancel and retry runs.

In: a tenant and what it wants. Out: a run and the intent to run it, stored in one transaction: the outbox adds the job
when that has committed. The row is the lasting fence: however often a run is submitted, and whether or not its job is
still known to Redis, it is run once.
Elsewhere: running (`processor`), runs whose job got lost (`maintenance`), the rows (`bullpen.ledger.runs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypedDict, Unpack

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.scrub import hide_secrets, summary
from bullpen.errors import (
    BullpenError,
    InvalidOption,
    JobNotFound,
    JobStateConflict,
    ResultTimeout,
    RowNotFound,
    RowStateConflict,
    RunFailed,
    require,
)
from bullpen.ledger import (
    NewRun,
    OutboxItem,
    RunRow,
    RunStatus,
    StepRow,
    TenantRuns,
    TransactionManager,
    check_run_id,
    check_tenant,
)
from bullpen.ports.dead_letters import DeadLetter, LetterPage
from bullpen.queue import JobState, Queue
from bullpen.redis import Connection
from bullpen.runs._ends import RunEnds
from bullpen.runs._logs import log
from bullpen.runs.handlers import QUEUE, Routes, RunRoute, job_options
from bullpen.runs.payload import LEDGER_HEADER, RunPayload, read_payload
from bullpen.wire.deferred import options_from_json, options_to_json
from bullpen.wire.options import JobMeta

__all__ = [
    "DEAD_LETTER_QUEUE",
    "QUEUE",
    "EnqueuedRun",
    "RunService",
    "SubmitArguments",
    "Submitted",
    "run_id_for",
    "run_queue",
]

DEAD_LETTER_QUEUE: Final = "workflow-execution-dlq"
"""It has no worker: its entries wait for a person."""
JOB_NAME: Final = "workflow-run"
TABLE: Final = "bullpen_runs"
_STREAM: Final = "runs"
# The words by which the outbox knows a job and its options.
_CHANNEL, _OPTIONS_HEADER = "bullmq", "jobOptions"
_NAMESPACE: Final = uuid.UUID("6f1c2b9e-6c0b-5d0e-9a55-0e3b8a1f7c21")
_MOST_LISTED: Final = 200
_FALLBACK_S: Final = 5.0
"""How long a wait for a result goes without a poll when no event comes."""
_SOON_S: Final = 0.02
_EVENT_WITHIN_S: Final = 0.5
"""How long the event of an end may be on its way."""
_GONE: Final = (JobState.UNKNOWN, JobState.COMPLETED)


class EnqueuedRun(dict[str, str]):
    """`{"jobId": run_id}`, and whether this call stored the run or found it."""

    def __init__(self, run_id: str, *, created: bool) -> None:
        super().__init__(jobId=run_id)
        self.created = created


class SubmitArguments(TypedDict, total=False):
    """What `submit` takes besides the payload, and so do `submit_in` and `enqueue_run`."""

    handler: str | None
    cost: int | None
    is_test_run: bool
    payload_in_job: bool
    actor: str | None


@dataclass(frozen=True, slots=True)
class Submitted:
    """A run, and whether it is new."""

    run: RunRow
    created: bool


def run_id_for(tenant_id: str, idempotency_key: str) -> str:
    """The id of the run that a tenant submits under a key: the same for every repetition, and for no other tenant."""
    require("idempotency_key", 0 < len(idempotency_key) <= 200, "1 to 200 characters", idempotency_key)
    return str(uuid.uuid5(_NAMESPACE, f"{len(tenant_id)}:{tenant_id}:{idempotency_key}"))


def run_queue(connection: Connection, *, prefix: str | None = None) -> Queue:
    """The queue of runs, with the options that every job of it has."""
    return Queue(QUEUE, connection=connection, prefix=prefix, **job_options())


class RunService:
    """What other modules use: `enqueue_run` and what people do with runs afterwards.

    Give it the transactions of a ledger and the queue that runs go to (`run_queue`); `routes` are the handlers that
    have a name.
    """

    def __init__(self, transactions: TransactionManager, queue: Queue, routes: Routes | None = None) -> None:
        self._transactions, self.routes = transactions, routes or Routes(queue)
        self._ends: dict[str, RunEnds] = {}

    # ---- submitting ---------------------------------------------------------------------------------------------

    async def enqueue_run(
        self, run_id: str, payload: Mapping[str, Any] | RunPayload, **options: Unpack[SubmitArguments]
    ) -> EnqueuedRun:
        """Store a run and the intent to run it. The job's id is the run's, without prefix.

        `payload` has the wire's names (`tenantId`, `versionId`, `definition`, …); `options` are those of `submit`. A
        second call for the same run stores nothing and says `created=False`.
        """
        given = payload.to_data() if isinstance(payload, RunPayload) else dict(payload)
        named = given.setdefault("runId", run_id)
        require("payload.runId", named == run_id, f"the run that is enqueued, {run_id}", named)
        submitted = await self.submit(read_payload(given), **options)
        return EnqueuedRun(submitted.run.id, created=submitted.created)

    async def submit(
        self,
        payload: RunPayload,
        *,
        handler: str | None = None,
        cost: int | None = None,
        is_test_run: bool = False,
        payload_in_job: bool = True,
        actor: str | None = None,
    ) -> Submitted:
        """Store a run, reserve what it costs, and store the intent to run it, all in one transaction.

        `handler` names who runs it (None: the one without a name); `cost` is its price in credits (None: the handler's
        own). `payload_in_job=False` keeps the payload in the ledger only: the job carries a reference. Raises
        InsufficientCredits, PayloadTooLarge (10 MiB, or the handler's limit), InvalidOption, also for a handler that
        is not known here; then nothing is stored. A known run with another payload or handler is refused.
        """
        route = self.routes.get(handler)
        new = _new_run(route, payload, cost=cost, is_test_run=is_test_run, payload_in_job=payload_in_job)
        item = _intent(route, payload, await self._transactions.ledger_id(), in_job=payload_in_job)
        return await self._transactions.run(payload.tenant_id, lambda runs: self._store(runs, new, item, actor))

    async def submit_in(self, runs: TenantRuns, payload: RunPayload, **options: Unpack[SubmitArguments]) -> Submitted:
        """As `submit`, inside a transaction of yours (`transactions.run`), with `runs.connection` for your own rows."""
        require(
            "payload.tenantId", payload.tenant_id == runs.tenant_id, "the tenant of the transaction", payload.tenant_id
        )
        actor, in_job = options.get("actor"), options.get("payload_in_job", True)
        route = self.routes.get(options.get("handler"))
        item = _intent(route, payload, await runs.ledger_id(), in_job=in_job)
        return await self._store(runs, _new_run(route, payload, **options), item, actor)

    @staticmethod
    async def _store(runs: TenantRuns, new: NewRun, item: OutboxItem, actor: str | None) -> Submitted:
        row = await runs.add(new, actor=actor)
        if row is not None:
            await runs.enqueue(item)
            return Submitted(row, True)
        row = await runs.get(new.id)
        if row is None:
            # The id exists and this tenant does not see it: it is another's. Nothing more is told.
            raise InvalidOption("run_id", "an id that is not in use", new.id)
        if row.handler != new.handler:
            raise RowStateConflict(TABLE, new.id, f"known for {_called(row.handler)}", "new")
        if await runs.payload(new.id) != json.decode(new.payload_json):
            raise RowStateConflict(TABLE, new.id, "known with another payload", "new")
        return Submitted(row, False)

    # ---- looking ------------------------------------------------------------------------------------------------

    async def get(self, tenant_id: str, run_id: str) -> RunRow:
        """One run of this tenant. Raises RowNotFound."""
        known = check_run_id(run_id)
        row = await self._transactions.run(tenant_id, lambda runs: runs.get(known))
        if row is None:
            raise RowNotFound(TABLE, known)
        return row

    async def result(self, tenant_id: str, run_id: str, *, timeout: int | timedelta | None = None) -> Any:
        """Wait until a run has ended, and return what its handler returned. Woken by the queue, not by asking.

        Raises RunFailed when it failed finally or was cancelled, ResultTimeout after `timeout` (ms or timedelta),
        RowNotFound. Cancelling the wait changes nothing about the run.
        """
        known = check_run_id(run_id)
        timeout_s = None if timeout is None else to_ms("timeout", timeout) / 1000
        queue = self.routes.queue((await self.get(tenant_id, known)).queue)
        ends = self._ends.setdefault(queue.name, RunEnds(queue))
        async with ends.of(known) as ended:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._ended(tenant_id, known, ended, queue)
            except TimeoutError:
                row = await self.get(tenant_id, known)
                text = f"run {known} has not ended within {timeout_s:g} s: it is {row.status}"
                raise ResultTimeout(text, queue=queue.name, job_id=known, state=row.status) from None

    async def _ended(self, tenant_id: str, run_id: str, ended: asyncio.Event, queue: Queue) -> Any:
        pause_s, is_fallback, is_told = _FALLBACK_S, False, False
        while True:
            ended.clear()
            row = await self.get(tenant_id, run_id)
            if row.status.is_terminal and is_fallback and not is_told and not await _is_set(ended, _EVENT_WITHIN_S):
                await queue.note_late_run(run_id)
            if row.status is RunStatus.COMPLETED:
                return row.result
            if row.status.is_terminal:
                raise RunFailed(row.id, row.status, row.error_message)
            is_fallback = not await _is_set(ended, pause_s)
            is_told = is_told or not is_fallback
            # A failure is written down a moment after its event, so the next looks come soon.
            pause_s = min(2 * pause_s, _FALLBACK_S) if is_fallback else _SOON_S

    async def find(
        self,
        tenant_id: str,
        *,
        status: RunStatus | None = None,
        handler: str | None = None,
        before: tuple[datetime, str] | None = None,
        limit: int = 50,
    ) -> list[RunRow]:
        """Runs of this tenant, newest first; `before` is `created_at` and `id` of the last run of the page before."""
        check_int("limit", limit, minimum=1, maximum=_MOST_LISTED)
        return await self._transactions.run(
            tenant_id, lambda runs: runs.find(status=status, handler=handler, before=before, limit=limit)
        )

    async def steps(self, tenant_id: str, run_id: str) -> list[StepRow]:
        """Steps of a run that are done."""
        return await self._transactions.run(tenant_id, lambda runs: runs.steps(check_run_id(run_id)))

    async def balance(self, tenant_id: str) -> int:
        """Credits that the tenant may still spend."""
        return await self._transactions.run(tenant_id, lambda runs: runs.balance())

    async def grant(self, tenant_id: str, amount: int, *, reference: str, actor: str) -> bool:
        """Give a tenant credits, once per reference. On PostgreSQL with roles this needs the service role."""
        check_int("amount", amount, minimum=1)
        require("reference", 0 < len(reference) <= 200, "1 to 200 characters", reference)

        return await self._transactions.run(
            tenant_id, lambda runs: runs.grant(amount, reference=reference, actor=actor)
        )

    # ---- changing -----------------------------------------------------------------------------------------------

    async def cancel(self, tenant_id: str, run_id: str, *, actor: str) -> RunRow:
        """End a run that has not ended, and refund what none of its steps has spent. A worker that has it stops at its
        next heartbeat or step.

        Raises RowNotFound, or RowStateConflict when it has ended already. Cancelling a cancelled run changes nothing.
        """
        known = check_run_id(run_id)

        async def cancel(runs: TenantRuns) -> tuple[RunRow | None, RunRow | None]:
            cancelled = await runs.cancel(known, actor=actor)
            return cancelled, cancelled or await runs.get(known)

        cancelled, row = await self._transactions.run(tenant_id, cancel)
        if row is None:
            raise RowNotFound(TABLE, known)
        if cancelled is None and row.status is not RunStatus.CANCELLED:
            raise RowStateConflict(TABLE, known, row.status.value, "QUEUED or RUNNING")
        await self._remove_job(row)
        return row

    async def retry(self, tenant_id: str, run_id: str, *, actor: str) -> RunRow:
        """Send a FAILED run back: QUEUED, its cost reserved again, its job queued with id and key kept, its dead
        letter removed. Finished steps are not repeated.

        Raises RowNotFound, RowStateConflict unless it is FAILED, InsufficientCredits. Should this process die half way,
        maintenance gives the run its job.
        """
        known = check_run_id(run_id)

        async def redrive(runs: TenantRuns) -> tuple[RunRow | None, RunRow | None]:
            redriven = await runs.requeue(known, actor=actor)
            return redriven, redriven or await runs.get(known)

        redriven, row = await self._transactions.run(tenant_id, redrive)
        if row is None:
            raise RowNotFound(TABLE, known)
        if redriven is None:
            raise RowStateConflict(TABLE, known, row.status.value, "FAILED")
        try:
            await self.give_job(row)
        except BullpenError as error:
            log(logging.WARNING, f"Run {known} is QUEUED and gets its job later", job_id=known, run_id=known,
                tenant_id=tenant_id, error=summary(str(error)))  # fmt: skip
        return row

    async def give_job(self, row: RunRow) -> bool:
        """See that a QUEUED run has a job that will run. True when one had to be made or sent back.

        A failed job goes back in one script, its dead letter with it; a missing job is made again from the row.
        """
        queue = self.routes.queue(row.queue)
        state = await queue.state_of(row.id)
        if state is JobState.FAILED:
            try:
                await queue.retry(row.id, reset_attempts=True)
            except (JobNotFound, JobStateConflict):
                return False  # somebody was faster; the next look tells
            return True
        if state not in _GONE:
            return False

        async def expect(runs: TenantRuns) -> RunPayload | None:
            expected = await runs.expect_new_job(row.id, row.fence, is_lost=row.status is RunStatus.RUNNING)
            return None if expected is None else read_payload(await runs.payload(row.id))

        payload = await self._transactions.run(row.tenant_id, expect)
        if payload is None:
            return False
        data = _job_data(payload, in_job=row.payload_in_job)
        headers = {LEDGER_HEADER: await self._transactions.ledger_id()}
        meta = JobMeta(tenant_id=row.tenant_id, headers=headers)
        # As it was submitted, whether or not this process knows the handler.
        options = options_from_json(row.job_options) if row.job_options else {**job_options(), "lane": row.tenant_id}
        await queue.add(JOB_NAME, data, **{**options, "job_id": row.id}, replace_finished=True, meta=meta)
        return True

    async def _remove_job(self, row: RunRow) -> None:
        """A job that still waits is not needed. One that runs notices by itself; one out of reach is skipped later."""
        queue = self.routes.queue(row.queue)
        try:
            with contextlib.suppress(JobStateConflict):  # it runs
                if await queue.remove(row.id):
                    return
            await queue.note_cancelled(row.id)  # no event tells of the end of this run
        except BullpenError as error:
            log(logging.INFO, f"The job of cancelled run {row.id} was not removed", job_id=row.id, run_id=row.id,
                tenant_id=row.tenant_id, error=summary(str(error)))  # fmt: skip

    # ---- dead letters -------------------------------------------------------------------------------------------

    async def dead_letters(
        self, tenant_id: str, *, actor: str, handler: str | None = None, limit: int = 50
    ) -> list[DeadLetter]:
        """The newest dead letters of this tenant, secrets in their payloads hidden. Reading them is audited.

        Each handler has a dead-letter queue: `handler` names it, None is the one without a name.
        """
        return [*(await self.dead_letter_page(tenant_id, actor=actor, handler=handler, limit=limit)).letters]

    async def dead_letter_page(
        self, tenant_id: str, *, actor: str, handler: str | None = None, after: str | None = None, limit: int = 50
    ) -> LetterPage:
        """As `dead_letters`, with how many there are; `after` is the `next` of the page before."""
        tenant, queue = check_tenant(tenant_id), self.routes.get(handler).queue
        check_int("limit", limit, minimum=1, maximum=_MOST_LISTED)
        page = await queue.dead_letters.of_tenant(tenant, after=after, limit=limit)
        await self._transactions.run(
            tenant, lambda runs: runs.audit(actor, "run.dead_letters.read", queue.name, count=len(page.letters))
        )
        return replace(page, letters=[_hidden(letter) for letter in page.letters])

    async def dead_letter_depth(self, handler: str | None = None) -> int:
        """How many dead letters a handler has, over all tenants."""
        return await self.routes.get(handler).queue.dead_letters.depth()


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within_s)
    return event.is_set()


def _called(handler: str | None) -> str:
    return "the handler without a name" if handler is None else f"handler {handler!r}"


def _new_run(
    route: RunRoute,
    payload: RunPayload,
    *,
    cost: int | None = None,
    is_test_run: bool = False,
    payload_in_job: bool = True,
    actor: str | None = None,
    handler: str | None = None,
) -> NewRun:
    """What is stored. `actor` and `handler` are the caller's; they are taken so that all of a submit can be given."""
    for name, value in (("is_test_run", is_test_run), ("payload_in_job", payload_in_job)):
        require(name, isinstance(value, bool), "True or False", value)
    encoded = json.encode(payload.to_data(), what="payload")
    json.check_payload_size(len(encoded), limit_bytes=route.options.max_payload_bytes)
    named: dict[str, str] = {}
    if route.name is not None or route.options.retry.named or not route.options.lane_per_tenant:
        # What it takes to make the job anew, also in a process that does not know the handler.
        options = options_to_json(route.job_options(payload.tenant_id))
        named["job_options_json"] = json.encode(options).decode()
    if route.name is not None:
        named |= {"handler": route.name, "queue": route.queue.name}
    return NewRun(
        id=payload.run_id,
        version_id=payload.version_id,
        payload_json=encoded.decode(),
        payload_in_job=payload_in_job,
        is_test_run=is_test_run,
        cost=route.cost_of(payload) if cost is None else check_int("cost", cost, minimum=0),
        **named,
    )


def _intent(route: RunRoute, payload: RunPayload, ledger_id: str, *, in_job: bool) -> OutboxItem:
    # Made before the transaction: what cannot be a job is refused before anything is stored.
    return OutboxItem(
        integration_type=f"{_CHANNEL}:{route.queue.name}",
        event_type=JOB_NAME,
        payload=_job_data(payload, in_job=in_job),
        headers={
            _OPTIONS_HEADER: options_to_json({**route.job_options(payload.tenant_id), "job_id": payload.run_id}),
            LEDGER_HEADER: ledger_id,
        },
        source_stream_id=_STREAM,
        source_event_id=payload.run_id,
        tenant_id=payload.tenant_id,
    )


def _job_data(payload: RunPayload, *, in_job: bool) -> dict[str, Any]:
    data = payload.to_data()
    if in_job:
        return data
    reference = {name: data[name] for name in ("runId", "tenantId", "versionId")}
    return {**reference, "payloadRef": f"{TABLE}/{payload.run_id}"}


def _hidden(letter: DeadLetter) -> DeadLetter:
    return replace(
        letter, data=hide_secrets(letter.data), error_message=summary(letter.error_message), error_stack=None, entry={}
    )

"""Metrics of everything in a server and a ledger, from a process that is not a worker.

The series of a worker end with it, just when they are needed; these stay. In: a connection, a ledger. Out: plain
records: gauges, read on request. Each source says whether it answered; one that did not is left out, not shown
as empty. What costs more than a moment (finding queues, counting whole tables) takes at most a twentieth of the time.
Elsewhere: what a process counts of its own work (`metrics`), serving (`bullpen.http.ops`), the rules that read these
numbers (`deploy/alerts.yml`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from bullpen._kernel.logs import get_logger
from bullpen._kernel.scrub import scrub
from bullpen.errors import BullpenError
from bullpen.ops.overview import Overview, QueueSnapshot
from bullpen.ops.symptoms import ANNOUNCEMENTS, DEAD_SUFFIX, SWITCHED_OFF_MS
from bullpen.ports.metrics import Metric, Sample
from bullpen.redis import Connection

if TYPE_CHECKING:  # needs an extra, and who asks about a ledger has it
    from bullpen.ledger import Ledger

__all__ = ["JOB_STATES", "Exporter", "LedgerSource", "ServerSource", "Source"]

logger = get_logger("bullpen.exporter")

JOB_STATES: Final = ("waiting", "active", "prioritized", "delayed", "waiting_children", "completed", "failed")
_REST_AFTER_COSTLY: Final = 20
_MOST_ROWS: Final = 1_000
_S: Final = timedelta(seconds=1)
T = TypeVar("T")


class Source(Protocol):
    """Something that may be away."""

    @property
    def name(self) -> str: ...

    async def read(self) -> Sequence[Metric]:
        """All its numbers now; raises when it cannot."""
        ...

    async def aclose(self) -> None:
        """Let go of what runs."""
        ...


class Exporter:
    """Asks all sources at the same time, each for a limited time."""

    def __init__(self, sources: Iterable[Source], *, timeout_s: float = 5.0) -> None:
        self.sources = list(sources)
        self._timeout_s = timeout_s
        self._problems: dict[str, str] = {}

    async def collect(self) -> Sequence[Metric]:
        answers = await asyncio.gather(*(self._ask(source) for source in self.sources))
        up = [
            Sample({"source": source.name}, float(bool(answer)))
            for source, answer in zip(self.sources, answers, strict=True)
        ]
        text = "1 if the server of the queues, or the ledger, answered the exporter; else 0."
        return [Metric("bullpen_source_up", "gauge", text, up), *(metric for answer in answers for metric in answer)]

    async def aclose(self) -> None:
        for source in self.sources:
            await source.aclose()

    async def _ask(self, source: Source) -> Sequence[Metric]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await source.read()
        except (BullpenError, OSError) as error:  # TimeoutError is one
            problem = scrub(str(error)) or f"no answer within {self._timeout_s:g} s"
            if source.name not in self._problems:  # once, and not every few seconds as long as it lasts
                logger.warning("%s cannot be read: %s", source.name, problem)
            self._problems[source.name] = problem
            return ()
        if self._problems.pop(source.name, None) is not None:
            logger.info("%s answers again", source.name)
        return found


# Queues -------------------------------------------------------------------------------------------------------------


class ServerSource:
    """All queues under a prefix, of all clients."""

    name = "redis"

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._overview = Overview(connection, prefix)
        self._search: asyncio.Task[None] | None = None

    async def read(self) -> Sequence[Metric]:
        await self._find_queues()
        return _queue_metrics((await self._overview.read()).looks)

    async def aclose(self) -> None:
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)

    async def _find_queues(self) -> None:
        """At the side: where there are millions of keys a search takes longer than whoever scrapes waits."""
        if self._search is not None and self._search.done():
            self._search.exception()  # a server that is away is told by the reading
            self._search = None
        if self._search is None and (not self._overview.is_complete or self._overview.search_due_s == 0):
            self._search = asyncio.create_task(self._overview.search())
        if self._search is not None and not self._overview.is_complete:
            await asyncio.shield(self._search)  # a scrape that gives up leaves the search to the next one


def _queue_metrics(looks: Iterable[QueueSnapshot]) -> list[Metric]:
    jobs: list[Sample] = []
    ages: list[Sample] = []
    letters: list[Sample] = []
    workers: list[Sample] = []
    paused: list[Sample] = []
    unreadable: list[Sample] = []
    cancelled: list[Sample] = []
    held: list[Sample] = []
    holding: list[Sample] = []
    for look in looks:
        labels = {"queue": look.queue}
        unreadable.append(Sample(labels, float(look.problem is not None)))
        if look.problem is not None:
            continue
        if look.queue.endswith(DEAD_SUFFIX):  # its own queue is gone, and no worker is missing here
            letters.append(Sample({"queue": look.queue.removesuffix(DEAD_SUFFIX)}, look.waiting))
            continue
        jobs += [Sample({**labels, "state": state}, getattr(look, state)) for state in JOB_STATES]
        is_unread = look.queue in ANNOUNCEMENTS and not look.workers
        ages.append(Sample(labels, 0.0 if is_unread else (look.oldest_ms or 0) / 1000))
        letters.append(Sample(labels, look.dead_letters))
        paused.append(Sample(labels, float(look.paused)))
        cancelled.append(Sample(labels, look.cancelled))
        held.append(Sample(labels, look.jobs_held))
        holding.append(Sample(labels, look.lanes_held))
        if look.workers is not None and not is_unread:
            workers.append(Sample(labels, look.workers))
    return [
        Metric("bullpen_queue_jobs", "gauge", "Jobs of a queue by state.", jobs),
        Metric("bullpen_queue_oldest_waiting_seconds", "gauge", "Age of the next job, 0 if none.", ages),
        Metric(
            "bullpen_queue_dead_letters", "gauge", "Dead letters that were neither redriven nor discarded.", letters
        ),
        Metric(
            "bullpen_queue_workers",
            "gauge",
            "Connected workers of any client, if the server allows CLIENT LIST.",
            workers,
        ),
        Metric(
            "bullpen_queue_jobs_cancelled_total", "counter", "Jobs that were cancelled before they began.", cancelled
        ),
        Metric("bullpen_queue_lanes_holding", "gauge", "Lanes whose limits hold jobs back.", holding),
        Metric(
            "bullpen_queue_jobs_held",
            "gauge",
            "Delayed jobs that limits of lanes hold back; of the first 100 lanes.",
            held,
        ),
        Metric("bullpen_queue_paused", "gauge", "1 if the queue is paused, else 0.", paused),
        Metric("bullpen_queue_unreadable", "gauge", "1 if the queue could not be read, else 0.", unreadable),
    ]


# Ledger -------------------------------------------------------------------------------------------------------------


class LedgerSource:
    """Outbox, scheduled messages and runs, by the database's clock."""

    name = "ledger"

    def __init__(self, ledger: Ledger, *, run_stuck_ms: int = 900_000) -> None:
        from bullpen.ledger.messages import SqlMessages

        self._ledger, self._run_stuck_ms = ledger, run_stuck_ms
        self._messages = SqlMessages(ledger.database)
        self._message_counts = _Rarely(self._messages.counts)
        self._run_counts = _Rarely(ledger.runs.counts)
        self._is_checked = False

    async def read(self) -> Sequence[Metric]:
        if not self._is_checked:  # says what is missing, where a query would only fail
            await self._ledger.check()
            self._is_checked = True
        parts = await self._ledger.parts()  # each time: `bullpen migrate --for` may have added one
        # One after the other: a look needs no more than one connection of the database.
        found = await self._outbox()
        if "projector" in parts:
            found += await self._projector()
        if "messages" in parts:
            found += await self._scheduled()
        if "runs" in parts:
            found += await self._runs()
        return found

    async def aclose(self) -> None:
        """Nothing runs between two readings, and the caller closes the ledger."""

    async def _outbox(self) -> list[Metric]:
        from bullpen.ledger import OutboxStatus
        from bullpen.ledger.endpoint_records import ENDPOINT_TYPES, type_label

        now = await self._messages.now()
        troubled = await self._ledger.destinations.troubled()
        # What a customer's endpoint does not take is no fault of the service's: its rows count, and alarm nobody.
        theirs = {name for name in troubled if type_label(name) != name}
        off = {name for name, each in troubled.items() if each.state == "disabled"} - theirs
        broken = troubled.keys() - off - theirs
        stats = await self._ledger.outbox.stats()
        waits = (OutboxStatus.PENDING, OutboxStatus.FAILED)
        kept = [status for status in OutboxStatus if status is not OutboxStatus.SENT]
        labels = {type_label(name) for name, *_ in stats}
        counts: dict[tuple[str, OutboxStatus], int] = {(label, status): 0 for label in labels for status in kept}
        ages = dict.fromkeys(labels, 0.0)
        for name, status, count, due in stats:
            label = type_label(name)
            counts[label, status] += count
            if status in waits and name not in off | theirs:
                ages[label] = max(ages[label], (now - due) / _S)
        dead = sum(
            count
            for (label, status), count in counts.items()
            if status is OutboxStatus.DEAD and label != ENDPOINT_TYPES
        )
        endpoints = await self._ledger.endpoints.counts()
        gone = await self._ledger.endpoints.switched_off(within_ms=SWITCHED_OFF_MS)
        expired = await self._ledger.outbox.expired(_MOST_ROWS)
        rows = [
            Sample({"integration_type": name, "status": status.value.lower()}, count)
            for (name, status), count in counts.items()
        ]
        return [
            Metric("bullpen_outbox_rows", "gauge", "Rows of the outbox by type and status, without sent ones.", rows),
            Metric(
                "bullpen_outbox_oldest_due_seconds",
                "gauge",
                "How long ago the oldest unclaimed row was due; 0 for disabled types.",
                [Sample({"integration_type": name}, age) for name, age in ages.items()],
            ),
            Metric(
                "bullpen_outbox_destination_broken",
                "gauge",
                "1 while the breaker of a destination is open, or half open (one trial delivery).",
                [Sample({"integration_type": name}, float(name in broken)) for name in sorted({*ages, *broken})],
            ),
            Metric(
                "bullpen_outbox_destination_disabled",
                "gauge",
                "1 for disabled destinations.",
                [Sample({"integration_type": name}, float(name in off)) for name in sorted({*ages, *off})],
            ),
            # Without a label, so that it is there before the first row is.
            Metric(
                "bullpen_outbox_dead_rows",
                "gauge",
                "Rows that failed finally, without those of endpoints.",
                [Sample({}, dead)],
            ),
            Metric(
                "bullpen_endpoints",
                "gauge",
                "Endpoints of tenants by state.",
                [Sample({"state": state.value}, count) for state, count in endpoints.items()],
            ),
            Metric(
                "bullpen_endpoints_switched_off",
                "gauge",
                "Endpoints that were switched off by themselves within a day, at most 100.",
                [Sample({}, len(gone))],
            ),
            Metric(
                "bullpen_outbox_expired_claims",
                "gauge",
                f"Claimed rows whose lease ran out, at most {_MOST_ROWS}.",
                [Sample({}, len(expired))],
            ),
        ]

    async def _projector(self) -> list[Metric]:
        parked = await self._ledger.parked.count()
        return [
            Metric(
                "bullpen_projector_parked_events", "gauge", "Parked events, which need a person.", [Sample({}, parked)]
            )
        ]

    async def _scheduled(self) -> list[Metric]:
        unqueued_ms, unsent_ms = await self._messages.lags_ms()
        counts = await self._message_counts()
        text = "Scheduled messages by occasion and status."
        rows = [Sample({"occasion": each.occasion, "status": each.status.value.lower()}, each.count) for each in counts]
        return [
            Metric("bullpen_messages", "gauge", text, rows),
            Metric(
                "bullpen_messages_unqueued_seconds",
                "gauge",
                "How long the oldest message that is due waits to be queued.",
                [Sample({}, unqueued_ms / 1000)],
            ),
            Metric(
                "bullpen_messages_unsent_seconds",
                "gauge",
                "How long the oldest message that is due and queued waits to be sent.",
                [Sample({}, unsent_ms / 1000)],
            ),
        ]

    async def _runs(self) -> list[Metric]:
        from bullpen.ledger import RunStatus

        counts = await self._run_counts()
        rows = [Sample({"status": status.value.lower()}, counts.get(status, 0)) for status in RunStatus]
        stuck = await self._ledger.runs.idle(longer_than_ms=self._run_stuck_ms, limit=_MOST_ROWS)
        text = f"Unfinished runs without progress for {self._run_stuck_ms // 1000} s."
        return [
            Metric("bullpen_runs", "gauge", "Runs by status.", rows),
            Metric("bullpen_runs_stuck", "gauge", text, [Sample({}, len(stuck))]),
        ]


class _Rarely(Generic[T]):
    """An answer that is refreshed after twenty times the time that it took."""

    def __init__(self, ask: Callable[[], Awaitable[T]]) -> None:
        self._ask = ask
        self._answer: T | None = None
        self._again_at = float("-inf")

    async def __call__(self) -> T:
        began = time.monotonic()
        if self._answer is None or began >= self._again_at:
            self._answer = await self._ask()
            ended = time.monotonic()
            self._again_at = ended + _REST_AFTER_COSTLY * (ended - began)
        return self._answer

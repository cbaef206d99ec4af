"""Dead letters for the commands, wherever they are kept.

In: a program, or only settings, and the name of a queue or store. Out: the letters of a queue of ours, or of a store
that a transport keeps, with the same methods. Which queues a transport carries only the program knows. Elsewhere: the
commands (`dead_letters`, `edit`), the console over all stores (`bullpen.ops.dead_letters`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from bullpen.app import Bullpen
from bullpen.cli import show
from bullpen.cli.context import WrongCommand, answers, brokers_of
from bullpen.cli.programs import OnProgram
from bullpen.errors import DeadLetterNotFound, JobNotFound
from bullpen.ops.dead_letters import ConsoleFilter, DeadLetterConsole, Report
from bullpen.queue import DeadLetter
from bullpen.queue.dead_letters.operations import DeadLetterFilter, DeadLetters, OnProgress, RedriveReport
from bullpen.wiring.dead_letters import OUTBOX_STORE

__all__ = ["StoredLetters", "letters_of", "name_of_store", "opened", "warn_of_brokers"]

_SUFFIX = "-dlq"


@asynccontextmanager
async def opened(at: OnProgram) -> AsyncIterator[Bullpen]:
    """The named program's app, else the configured one. A server of queues that is configured must answer."""
    async with at.made() as app:
        if app.settings.has_redis() or at.redis is not None or not (brokers_of(app) or app.settings.has_ledger()):
            await answers(app)
        if app.settings.messages.transport == "rabbitmq" and app.settings.has_ledger():
            app.use_messages()  # settings say where its letters are: nobody needs to name the program for them
        yield app


def warn_of_brokers(at: OnProgram, app: Bullpen) -> bool:
    """Whether there may be letters that only a program can name; said on stderr."""
    transport = app.settings.workflows.transport
    if at.program is not None or transport not in ("rabbitmq", "kafka"):
        return False
    show.warn(
        f"dead letters of workflows on {transport} are not looked at: name the program that has them, --app MODULE:APP"
    )
    return True


def name_of_store(console: DeadLetterConsole, named: str) -> str:
    """A store by its own name, or by that of the queue whose dead letters it holds."""
    return next((each for each in (named, f"{named}{_SUFFIX}", f"{named}.dlq") if each in console.stores), named)


async def letters_of(app: Bullpen, named: str, tenant: str | None, by: str) -> DeadLetters | StoredLetters:
    """Those of a queue, which may also be named as `stats` names their store."""
    if named == OUTBOX_STORE:
        raise WrongCommand(
            "these are rows of the outbox: bullpen outbox list --status DEAD, redrive, discard; here they can be edited"
        )
    elsewhere = {store.name for store in app.other_letters()}
    if elsewhere:
        console = await app.dead_letters(tenant_id=tenant)
        store = name_of_store(console, named)
        if store in elsewhere:
            return StoredLetters(console, store, by)
    return app.queue(named.removesuffix(_SUFFIX)).dead_letters


class StoredLetters:
    """The letters of a store that is no queue of ours. What is done to them is written down by the console."""

    def __init__(self, console: DeadLetterConsole, store: str, by: str) -> None:
        self._console, self._by = console, by
        self.queue_name = store

    async def depth(self) -> int:
        return (await self._console.depths())[self.queue_name]

    async def find(self, where: DeadLetterFilter) -> AsyncIterator[DeadLetter]:
        async for found in self._console.find(self._wanted(where)):
            yield _as_of_a_queue(found.letter)

    async def get(self, entry: str) -> DeadLetter | None:
        try:
            return _as_of_a_queue((await self._console.get(self.queue_name, entry)).letter)
        except DeadLetterNotFound:
            return None

    async def redrive(self, entry: str, *, by: str | None = None) -> None:
        try:
            await self._console.redrive(self.queue_name, entry, by=by or self._by)
        except DeadLetterNotFound:
            raise JobNotFound(self.queue_name, entry, is_letter=True) from None

    async def discard(self, entry: str) -> bool:
        try:
            await self._console.discard(self.queue_name, entry, by=self._by)
        except DeadLetterNotFound:
            return False
        return True

    async def redrive_all(
        self,
        where: DeadLetterFilter,
        *,
        limit: int | None,
        rate: float | None,
        by: str | None,
        dry_run: bool,
        on_progress: OnProgress,
    ) -> RedriveReport:
        report = await self._console.redrive_many(
            self._wanted(where), by=by or self._by, per_second=rate, limit=limit, dry_run=dry_run
        )
        return _report(report, dry_run)

    async def discard_all(
        self, where: DeadLetterFilter, *, limit: int | None, dry_run: bool, on_progress: OnProgress
    ) -> RedriveReport:
        report = await self._console.discard_many(self._wanted(where), by=self._by, limit=limit, dry_run=dry_run)
        return _report(report, dry_run)

    def _wanted(self, where: DeadLetterFilter) -> ConsoleFilter:
        return ConsoleFilter(store=self.queue_name, name=where.job_name, error=where.error)


def _as_of_a_queue(letter: Any) -> DeadLetter:
    return DeadLetter(
        id=letter.id,
        job_id=letter.message_id,
        job_name=letter.name,
        queue=letter.source,
        data=letter.data,
        error_message=letter.error_message,
        error_stack=letter.error_stack,
        failed_at=letter.failed_at,
        attempts_made=letter.attempts_made,
        cause=letter.cause,
        entry=dict(letter.entry),
    )


def _report(report: Report, dry_run: bool) -> RedriveReport:
    skipped = tuple(report.failed.items())
    return RedriveReport(
        examined=report.matched, matched=report.matched, done=report.done, skipped=skipped, is_dry_run=dry_run
    )

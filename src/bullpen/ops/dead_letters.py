"""One console for the dead letters of everything: queues, transports, outbox, runs, messages.

In: stores that share one port. Out: their letters found by what is asked, grouped by what went wrong, sent back as they
are or with another payload, or thrown away, one by one or many at a chosen rate. A console for a tenant sees and
changes the dead letters of that tenant only. Who did what is logged, and told to `audit` first where there is a table
for it: what cannot be written down is not done. Elsewhere: the stores (`bullpen.queue`, `bullpen.plugins.transports`,
`bullpen.outbox`), the commands (`bullpen.cli`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bullpen._kernel.duration import check_texts
from bullpen._kernel.logs import get_logger
from bullpen._kernel.scrub import scrub
from bullpen.errors import ConnectionLost, DeadLetterNotEditable, DeadLetterNotFound, InvalidOption, require
from bullpen.ports.dead_letters import (
    ANY,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    DeadLetterStore,
    EditableDeadLetters,
    FixedDeadLetters,
    LetterPage,
    RedriveReport,
    fingerprint,
)
from bullpen.ports.edits import KEEP, Edit, make_edit
from bullpen.queue.dead_letters.entry import check_not_sealed

__all__ = ["DeadLetterConsole", "Found"]

logger = get_logger("bullpen.dead_letters")

Audit = Callable[[str, str, DeadLetter | None, str, Mapping[str, Any]], Awaitable[None]]
"""Called before the deed with the action (`redrive`, `edit`, `discard`), the store, the letter or None for many, by
whom, and details."""
Progress = Callable[[RedriveReport], None]

_PAGE: Final = 500
_MOST_SKIPPED_NAMED: Final = 100
_NO_DETAIL: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Found:
    """A dead letter and the store that holds it."""

    store: str
    letter: DeadLetter

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.letter)


class DeadLetterConsole:
    """All stores that one program knows."""

    def __init__(
        self, stores: Iterable[DeadLetterStore], *, tenant_id: str | None = None, audit: Audit | None = None
    ) -> None:
        self._stores: dict[str, DeadLetterStore] = {}
        for store in stores:
            if store.name in self._stores:
                raise InvalidOption("stores", "one store of each name", store.name)
            self._stores[store.name] = store
        self._tenant_id, self._audit = tenant_id, audit

    @property
    def stores(self) -> tuple[str, ...]:
        """Names of the stores."""
        return tuple(self._stores)

    async def depths(self, *, away: dict[str, ConnectionLost] | None = None) -> dict[str, int]:
        """How many wait in each store. For one tenant they are counted one by one.

        With `away` a store that cannot be reached is noted there and left out, instead of hiding all others.
        """
        if self._tenant_id is None:
            depths = {}
            for name, store in self._stores.items():
                try:
                    depths[name] = await store.depth()
                except ConnectionLost as error:
                    if away is None:
                        raise
                    away[name] = error
            return depths
        counts = dict.fromkeys(self._stores, 0)
        async for found in self.find():
            counts[found.store] += 1
        return counts

    async def find(self, where: DeadLetterFilter = ANY, *, store: str | None = None) -> AsyncIterator[Found]:
        """The matching dead letters, store by store, newest first, read in pages."""
        for name, each in self._in(store).items():
            after: str | None = None
            while True:
                page = await each.page(self._mine(where), after=after, limit=_PAGE)
                for letter in page.letters:
                    yield Found(name, letter)
                if page.next is None:
                    break
                after = page.next

    async def page(
        self, store: str, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 50
    ) -> LetterPage:
        """Dead letters of one store, newest first; `after` is the `next` of the page before."""
        return await self._store(store).page(self._mine(where), after=after, limit=limit)

    async def groups(self, *, store: str | None = None, limit: int = 200) -> list[DeadLetterGroup]:
        """Dead letters by cause, the most frequent first. Stores with counters do not read the letters for it."""
        found = [
            group
            for each in self._in(store).values()
            for group in await each.groups(tenant_id=self._tenant_id, limit=limit)
        ]
        return sorted(found, key=lambda group: (-group.count, group.store, group.fingerprint))[:limit]

    async def get(self, store: str, entry_id: str) -> Found:
        """One dead letter; raises DeadLetterNotFound, also for one of another tenant."""
        letter = await self._store(store).get(entry_id)
        if letter is None or not self._may_see(letter):
            raise DeadLetterNotFound(store, entry_id)
        return Found(store, letter)

    async def redrive(self, store: str, entry_id: str, *, by: str, is_noted: bool = False) -> str:
        """Send one back with its identity kept; returns the identity of the work. `is_noted`: it is part of
        something that is in the audit already."""
        found = await self.get(store, entry_id)
        _actor(by)
        if not is_noted:
            await self._write_down("redrive", store, found.letter, by)
        identity = await self._store(store).redrive(entry_id, by=by)
        self._log_progress("redrive", found, by)
        return identity

    async def get_editable(self, store: str, entry_id: str) -> Found:
        """As `get`; raises DeadLetterNotEditable, with what to do instead, where its payload must stay as it is."""
        found = await self.get(store, entry_id)
        self._editable(store, entry_id)
        check_not_sealed(store, entry_id, found.letter.data)
        return found

    async def edit(
        self, store: str, entry_id: str, *, data: Any = KEEP, merge: Any = KEEP, why: str = ""
    ) -> tuple[Found, Edit]:
        """What would be sent: the stored dead letter and the edit of its payload. Changes nothing; for a preview.

        `data` is the whole new payload, `merge` a JSON merge patch (null removes a member). Raises InvalidOption for an
        edit that changes nothing or whose work it is, DeadLetterNotEditable for a store that takes none.
        """
        found = await self.get_editable(store, entry_id)
        return found, make_edit(found.letter.data, data=data, merge=merge, why=why, tenant_id=found.letter.tenant_id)

    async def redrive_edited(self, store: str, entry_id: str, edit: Edit, *, by: str) -> str:
        """Send one back with the payload of `edit`; returns the identity of the work, which is kept.

        Once it is done, repeating it raises DeadLetterNotFound and sends nothing. Where the stored payload is no longer
        the one that was edited, DeadLetterChanged is raised.
        """
        found = await self.get_editable(store, entry_id)
        target = self._editable(store, entry_id)
        # Made again from what is stored now: an edit that somebody built by hand must keep to the same rules.
        make_edit(found.letter.data, data=edit.data, tenant_id=found.letter.tenant_id)
        await self._write_down("edit", store, found.letter, _actor(by), edit.note())
        identity = await target.redrive_edited(entry_id, edit, by=by)
        self._log_progress(f"edit ({edit.before} to {edit.after})", found, by)
        return identity

    async def discard(self, store: str, entry_id: str, *, by: str, is_noted: bool = False) -> None:
        """Delete one for good."""
        found = await self.get(store, entry_id)
        _actor(by)
        if not is_noted:
            await self._write_down("discard", store, found.letter, by)
        if not await self._store(store).discard(entry_id, by=by):
            raise DeadLetterNotFound(store, entry_id)
        self._log_progress("discard", found, by)

    async def redrive_many(
        self,
        where: DeadLetterFilter = ANY,
        *,
        by: str,
        store: str | None = None,
        ids: Sequence[str] | None = None,
        rate: float | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        on_progress: Progress | None = None,
    ) -> RedriveReport:
        """Send back all that fit, or those of one store with these `ids`, the oldest first, at most `rate` per second.
        What cannot be sent is reported and stays. It is one entry of the audit, written before the first is touched."""

        async def send(found: Found) -> None:
            await self._store(found.store).redrive(found.letter.id, by=by)

        return await self._many("redrive", send, where, by, store, ids, rate, limit, dry_run, on_progress)

    async def discard_many(
        self,
        where: DeadLetterFilter = ANY,
        *,
        by: str,
        store: str | None = None,
        ids: Sequence[str] | None = None,
        rate: float | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        on_progress: Progress | None = None,
    ) -> RedriveReport:
        """Delete all that fit, or those of one store with these `ids`, for good; else as `redrive_many`."""

        async def throw_away(found: Found) -> None:
            if not await self._store(found.store).discard(found.letter.id, by=by):
                raise DeadLetterNotFound(found.store, found.letter.id)

        return await self._many("discard", throw_away, where, by, store, ids, rate, limit, dry_run, on_progress)

    async def _many(
        self,
        action: str,
        act: Callable[[Found], Awaitable[None]],
        where: DeadLetterFilter,
        by: str,
        store: str | None,
        ids: Sequence[str] | None,
        rate: float | None,
        limit: int | None,
        dry_run: bool,
        on_progress: Progress | None,
    ) -> RedriveReport:
        if ids is not None:
            ids = check_texts("ids", ids)
        _actor(by)
        is_rate = rate is None or (isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0)
        require("rate", is_rate, "dead letters per second, more than 0", rate)
        require("limit", limit is None or limit >= 1, "at least 1", limit)
        # Decided before the first is touched: a letter that fails again at once must not be met a second time.
        chosen, report = await self._chosen(where, store, ids, limit)
        if dry_run or not chosen:
            return replace(report, is_dry_run=dry_run)
        asked: dict[str, Any] = {**where.told(), "count": len(chosen)}
        asked |= {name: value for name, value in {"rate": rate, "limit": limit}.items() if value is not None}
        for name in dict.fromkeys(found.store for found in chosen):
            in_it = [found.letter.id for found in chosen if found.store == name]
            detail = {**asked, "count": len(in_it), **({} if ids is None else {"entries": in_it[:_MOST_SKIPPED_NAMED]})}
            await self._write_down(action, name, None, by, detail)
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        for number, found in enumerate(chosen, 1):
            if rate is not None:
                await asyncio.sleep(max(0.0, next_at - loop.time()))
                next_at = max(next_at, loop.time()) + 1 / rate
            try:
                await act(found)
                report = replace(report, done=report.done + 1)
            except Exception as error:  # noqa: BLE001 - one letter that cannot be sent must not keep the others
                if len(report.skipped) < _MOST_SKIPPED_NAMED:
                    reason = (found.letter.id, scrub(str(error) or type(error).__name__))
                    report = replace(report, skipped=(*report.skipped, reason))
            if on_progress is not None and (number % 20 == 0 or number == len(chosen)):
                on_progress(replace(report, examined=number))
        logger.warning(
            "dead letters of %s: %s of %d, %d done, by %s",
            *(store or "all stores", action, len(chosen), report.done, by),
        )
        return report

    async def _chosen(
        self, where: DeadLetterFilter, store: str | None, ids: Sequence[str] | None, limit: int | None
    ) -> tuple[list[Found], RedriveReport]:
        if ids is None:
            # Ids only: a million payloads would not fit.
            fitting = [Found(each.store, _bare(each.letter)) async for each in self.find(where, store=store)]
            chosen = fitting[::-1][:limit]
            return chosen, RedriveReport(examined=len(chosen), matched=len(chosen))
        require("store", store is not None, "the name of the store that has these ids", store)
        chosen, missing = list[Found](), list[tuple[str, str]]()
        for entry_id in dict.fromkeys(ids):
            try:
                chosen.append(await self.get(store or "", entry_id))
            except DeadLetterNotFound as error:
                missing.append((entry_id, str(error)))
        return chosen[:limit], RedriveReport(
            examined=len(ids), matched=len(chosen), skipped=tuple(missing[:_MOST_SKIPPED_NAMED])
        )

    def _store(self, name: str) -> DeadLetterStore:
        try:
            return self._stores[name]
        except KeyError:
            known = ", ".join(sorted(self._stores)) or "none"
            raise InvalidOption("store", f"one of {known}", name) from None

    def _in(self, store: str | None) -> Mapping[str, DeadLetterStore]:
        """All stores, or this one. Raises for an unknown name: an empty answer would look like good news."""
        return self._stores if store is None else {store: self._store(store)}

    def _mine(self, where: DeadLetterFilter) -> DeadLetterFilter:
        if self._tenant_id is None:
            return where
        require(
            "tenant_id", where.tenant_id in (None, self._tenant_id), f"{self._tenant_id!r} or None", where.tenant_id
        )
        return replace(where, tenant_id=self._tenant_id)

    def _may_see(self, letter: DeadLetter) -> bool:
        return self._tenant_id is None or letter.tenant_id == self._tenant_id

    def _editable(self, store: str, entry_id: str) -> EditableDeadLetters:
        target = self._store(store)
        if isinstance(target, EditableDeadLetters):
            return target
        reason = target.reason if isinstance(target, FixedDeadLetters) else "its store cannot edit a payload"
        raise DeadLetterNotEditable(store, entry_id, reason)

    async def _write_down(
        self, action: str, store: str, letter: DeadLetter | None, by: str, detail: Mapping[str, Any] = _NO_DETAIL
    ) -> None:
        if self._audit is not None:
            await self._audit(action, store, letter, by, detail)

    def _log_progress(self, action: str, found: Found, by: str) -> None:
        logger.warning(
            "dead letter %s of %s: %s by %s",
            *(found.letter.id, found.store, action, by),
            extra={"jobId": found.letter.message_id, "queue": found.letter.source, "tenantId": found.letter.tenant_id},
        )


def _bare(letter: DeadLetter) -> DeadLetter:
    return replace(letter, data=None, error_stack=None, entry={})


def _actor(by: str) -> str:
    require("by", isinstance(by, str) and bool(by.strip()), "the name of the person or program that acts", by)
    return by

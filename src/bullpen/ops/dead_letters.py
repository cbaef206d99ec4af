"""One console for the dead letters of everything: queues, transports, outbox, runs, messages.

In: stores that share one port. Out: their letters found by what is asked, grouped by what went wrong, sent back as they
are or with another payload, or thrown away, one by one or many at a chosen rate. A console for a tenant sees and
touches the letters of that tenant only. Who did what is logged, and told to `audit` first where there is a table for
it: what cannot be written down is not done.
Elsewhere: the stores (`bullpen.queue`, `bullpen.plugins.transports`, `bullpen.outbox`), the commands (`bullpen.cli`).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bullpen._kernel.logs import get_logger
from bullpen._kernel.scrub import scrub
from bullpen.errors import ConnectionLost, DeadLetterNotEditable, DeadLetterNotFound, InvalidOption, require
from bullpen.ports.dead_letters import DeadLetterRecord, DeadLetterStore, EditableDeadLetters, FixedDeadLetters
from bullpen.ports.edits import KEEP, Edit, make_edit
from bullpen.queue.dead_letters.entry import check_not_sealed

__all__ = ["ConsoleFilter", "DeadLetterConsole", "Found", "Group", "Report", "fingerprint"]

logger = get_logger("bullpen.dead_letters")

Audit = Callable[[str, "Found", str, Mapping[str, Any]], Awaitable[None]]
"""Called before the deed with the action (`redrive`, `edit`, `discard`), what it is done to, by whom, and details."""
Progress = Callable[[int], None]

_PAGE: Final = 200
_NO_DETAIL: Final[Mapping[str, Any]] = {}
# What differs between two failures of the same kind: ids, numbers, times, quoted values, addresses in memory.
_VARYING: Final = re.compile(
    r"""(?xi) 0x[0-9a-f]+ | \b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b | '[^']*' | "[^"]*"
        | \b\d[\d.:TZ+-]*\b | \b[0-9a-f]{16,}\b"""
)


def fingerprint(letter: DeadLetterRecord) -> str:
    """The same for failures of the same kind: eight signs made of source, name and the error without what varies."""
    kind = _VARYING.sub("#", letter.error_message)
    return hashlib.sha256(f"{letter.source}\0{letter.name}\0{kind}".encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Found:
    """A letter and the store that holds it."""

    store: str
    letter: DeadLetterRecord

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.letter)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleFilter:
    """Which letters are meant; all bounds hold together."""

    store: str | None = None
    name: str | None = None
    error: str | None = None
    """Part of the error's text, in any case."""
    fingerprint: str | None = None
    failed_before: str | None = None
    """ISO 8601, UTC."""
    failed_after: str | None = None

    def fits(self, found: Found) -> bool:
        letter = found.letter
        return (
            (self.store is None or found.store == self.store)
            and (self.name is None or letter.name == self.name)
            and (self.error is None or self.error.lower() in letter.error_message.lower())
            and (self.failed_before is None or letter.failed_at < self.failed_before)
            and (self.failed_after is None or letter.failed_at > self.failed_after)
            and (self.fingerprint is None or found.fingerprint == self.fingerprint)
        )


ALL: Final = ConsoleFilter()


@dataclass(slots=True)
class Group:
    """Failures of the same kind."""

    fingerprint: str
    store: str
    name: str
    error: str
    """The newest of them, without secrets."""
    count: int = 0
    first_at: str = ""
    last_at: str = ""
    example: str = ""
    """Id of the newest entry."""


@dataclass(slots=True)
class Report:
    """What became of many."""

    matched: int = 0
    done: int = 0
    gone: int = 0
    """Somebody else was faster."""
    failed: dict[str, str] = field(default_factory=dict)
    """Entry id to reason; these letters are still where they were."""


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

    async def find(self, wanted: ConsoleFilter = ALL) -> AsyncIterator[Found]:
        """The letters that fit, store by store, oldest first, read in pages."""
        if wanted.store is not None:
            self._store(wanted.store)  # a name that is wrong finds nothing, which would look like good news
        for name, store in self._stores.items():
            if wanted.store in (None, name):
                async for letter in _walk(store):
                    found = Found(name, letter)
                    if self._may_see(letter) and wanted.fits(found):
                        yield found

    async def groups(self, wanted: ConsoleFilter = ALL) -> list[Group]:
        """What goes wrong, the most frequent first."""
        groups: dict[tuple[str, str], Group] = {}
        async for found in self.find(wanted):
            letter, mark = found.letter, found.fingerprint
            group = groups.setdefault(
                (found.store, mark), Group(mark, found.store, letter.name, "", first_at=letter.failed_at)
            )
            group.count += 1
            group.first_at = min(group.first_at, letter.failed_at)
            if letter.failed_at >= group.last_at:
                group.last_at, group.error, group.example = letter.failed_at, scrub(letter.error_message), letter.id
        return sorted(groups.values(), key=lambda group: (-group.count, group.store, group.fingerprint))

    async def newest(self, most: int) -> tuple[dict[str, int], list[Found]]:
        """How many wait in each store, and of each the `most` newest, oldest first. For one tenant the numbers count
        that tenant's among these. However many letters there are, at most so many of each store are read."""
        depths: dict[str, int] = {}
        newest: list[Found] = []
        for name, store in self._stores.items():
            depth = await store.depth()
            start, letters = max(0, depth - most), list[DeadLetterRecord]()
            while len(letters) < most and (page := await store.list(start=start, count=min(_PAGE, most))):
                letters += page
                start += len(page)
            seen = [Found(name, letter) for letter in letters if self._may_see(letter)]
            depths[name] = depth if self._tenant_id is None else len(seen)
            newest += seen
        return depths, newest

    async def get(self, store: str, entry_id: str) -> Found:
        """One letter; raises DeadLetterNotFound, also for another tenant's."""
        letter = await self._store(store).get(entry_id)
        if letter is None or not self._may_see(letter):
            raise DeadLetterNotFound(store, entry_id)
        return Found(store, letter)

    async def redrive(self, store: str, entry_id: str, *, by: str) -> str:
        """Send one back with its identity kept; returns the identity of the work."""
        found = await self.get(store, entry_id)
        await self._write_down("redrive", found, _actor(by))
        identity = await self._store(store).redrive(entry_id, by=by)
        self._tell("redrive", found, by)
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
        """What would be sent: the letter as it is, and the edit of its payload. Changes nothing; for a preview.

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
        await self._write_down("edit", found, _actor(by), edit.note())
        identity = await target.redrive_edited(entry_id, edit, by=by)
        self._tell(f"edit ({edit.before} to {edit.after})", found, by)
        return identity

    async def discard(self, store: str, entry_id: str, *, by: str) -> None:
        """Delete one for good."""
        found = await self.get(store, entry_id)
        await self._write_down("discard", found, _actor(by))
        if not await self._store(store).discard(entry_id, by=by):
            raise DeadLetterNotFound(store, entry_id)
        self._tell("discard", found, by)

    async def redrive_many(
        self,
        wanted: ConsoleFilter,
        *,
        by: str,
        per_second: float | None = None,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Report:
        """Send back all that fit, the oldest first, at most `per_second`. What cannot be sent is reported and stays."""

        async def send(found: Found) -> None:
            await self.redrive(found.store, found.letter.id, by=by)

        return await self._many(wanted, send, by, per_second, limit, dry_run, progress)

    async def discard_many(
        self,
        wanted: ConsoleFilter,
        *,
        by: str,
        limit: int | None = None,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> Report:
        """Delete all that fit for good."""

        async def throw_away(found: Found) -> None:
            await self.discard(found.store, found.letter.id, by=by)

        return await self._many(wanted, throw_away, by, None, limit, dry_run, progress)

    async def _many(
        self,
        wanted: ConsoleFilter,
        act: Callable[[Found], Awaitable[None]],
        by: str,
        per_second: float | None,
        limit: int | None,
        dry_run: bool,
        progress: Progress | None,
    ) -> Report:
        _actor(by)
        require("per_second", per_second is None or per_second > 0, "a number above 0", per_second)
        require("limit", limit is None or limit >= 1, "at least 1", limit)
        report = Report()
        # Decided before the first is touched: a letter that fails again at once must not be met a second time.
        chosen = [found async for found in self.find(wanted)][:limit]
        report.matched = len(chosen)
        if dry_run:
            return report
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        for found in chosen:
            if per_second is not None:
                await asyncio.sleep(max(0.0, next_at - loop.time()))
                next_at = max(next_at, loop.time()) + 1 / per_second
            try:
                await act(found)
                report.done += 1
            except DeadLetterNotFound:
                report.gone += 1
            except Exception as error:  # noqa: BLE001 - one letter that cannot be sent must not keep the others
                report.failed[found.letter.id] = scrub(f"{type(error).__name__}: {error}")
            if progress is not None:
                progress(1)
        return report

    def _store(self, name: str) -> DeadLetterStore:
        try:
            return self._stores[name]
        except KeyError:
            known = ", ".join(sorted(self._stores)) or "none"
            raise InvalidOption("store", f"one of {known}", name) from None

    def _may_see(self, letter: DeadLetterRecord) -> bool:
        return self._tenant_id is None or letter.tenant_id == self._tenant_id

    def _editable(self, store: str, entry_id: str) -> EditableDeadLetters:
        target = self._store(store)
        if isinstance(target, EditableDeadLetters):
            return target
        reason = target.reason if isinstance(target, FixedDeadLetters) else "its store sends letters back as they are"
        raise DeadLetterNotEditable(store, entry_id, reason)

    async def _write_down(self, action: str, found: Found, by: str, detail: Mapping[str, Any] = _NO_DETAIL) -> None:
        if self._audit is not None:
            await self._audit(action, found, by, detail)

    def _tell(self, action: str, found: Found, by: str) -> None:
        logger.warning(
            "dead letter %s of %s: %s by %s",
            *(found.letter.id, found.store, action, by),
            extra={"jobId": found.letter.message_id, "queue": found.letter.source, "tenantId": found.letter.tenant_id},
        )


async def _walk(store: DeadLetterStore) -> AsyncIterator[DeadLetterRecord]:
    """All letters of a store, each once. Removing some moves the rest to other pages: then it is walked again."""
    seen: set[str] = set()
    while True:
        depth, start = await store.depth(), 0
        while page := await store.list(start=start, count=_PAGE):
            for letter in page:
                if letter.id not in seen:
                    seen.add(letter.id)
                    yield letter
            start += len(page)
        if await store.depth() >= depth:
            return


def _actor(by: str) -> str:
    require("by", isinstance(by, str) and bool(by.strip()), "the name of who asks", by)
    return by

"""Finally failed work, wherever it is kept: a queue, a topic, a ledger row, memory.

In: ids of entries, or what they have in common. Out: one record, one filter, one report, and the same operations for
every store, so that one console, one command and one runbook serve all of them; and sending back with another payload,
for stores that allow it.
Elsewhere: deciding that a failure is final (`bullpen._kernel.outcome`), writing the entry (whoever settles the work),
what makes two failures one cause (`bullpen._kernel.causes`), changing a payload (`edits`), who may look
(`bullpen.ops`).
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol, Self, runtime_checkable

from bullpen._kernel.causes import LONGEST_SAMPLE, fingerprint_of
from bullpen._kernel.json import MAX_SAFE_INTEGER
from bullpen._kernel.outcome import Cause
from bullpen._kernel.scrub import summary, with_type
from bullpen.errors import DeadLetterChanged, InvalidOption, require
from bullpen.ports.edits import Edit, payload_fingerprint

__all__ = [
    "ANY",
    "DeadLetter",
    "DeadLetterFilter",
    "DeadLetterGroup",
    "DeadLetterStore",
    "EditableDeadLetters",
    "FixedDeadLetters",
    "LetterPage",
    "PassedDeadLetters",
    "RedriveReport",
    "check_unchanged",
    "code_of",
    "fingerprint",
    "groups_of",
    "page_of",
]

_CAUSES: Final = frozenset(cause.value for cause in Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One finally failed piece of work with all its context."""

    id: str
    """Of the entry. The same failure has the same id, however often it was written."""
    source: str
    """Where the work came from: queue, topic, integration type."""
    message_id: str
    """Identity of the work itself, kept over retries and redrive."""
    name: str = ""
    """Kind of work: job name, event type."""
    data: Any = None
    """The payload as it was received."""
    error_message: str = ""
    error_stack: str | None = None
    cause: str | None = None
    """Why the failure was final, see `bullpen._kernel.outcome.Cause`, or the code of the error; None when somebody else
    decided it."""
    failed_at: str = ""
    """ISO 8601, UTC."""
    attempts_made: int = 0
    tenant_id: str | None = None
    entry: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """All stored fields, under their wire names."""

    @classmethod
    def from_entry(cls, entry_id: str, entry: Mapping[str, Any], *, source: str) -> Self:
        """The letter that stored fields tell of. Anybody may have written them: what is missing or odd is left empty,
        and came from `source`."""
        error = entry["error"] if isinstance(entry.get("error"), dict) else {}
        return cls(
            id=entry_id,
            source=_text(entry, "originalQueue") or source,
            message_id=_text(entry, "originalJobId"),
            name=_text(entry, "originalJobName"),
            data=entry.get("originalData"),
            error_message=str(error.get("message", "")),
            error_stack=_text(error, "stack") or None,
            cause=_text(entry, "cause") or None,
            failed_at=_text(entry, "failedAt"),
            attempts_made=_whole(entry, "attemptsMade"),
            tenant_id=_text(entry, "tenantId") or None,
            entry=entry,
        )

    @property
    def error_text(self) -> str:
        """The message with the type of the error in front, where the stack tells it: `KeyError: 'email'`."""
        return with_type(self.error_message, self.error_stack)

    @property
    def job_id(self) -> str:
        """`message_id` in the words of a queue."""
        return self.message_id

    @property
    def job_name(self) -> str:
        """`name` in the words of a queue."""
        return self.name

    @property
    def queue(self) -> str:
        """`source` in the words of a queue."""
        return self.source

    @property
    def redriven(self) -> list[dict[str, Any]]:
        """Earlier redrives of the work, oldest first: `at` (Unix ms), `by`, `entry`."""
        notes = self.entry.get("redriven")
        return notes if isinstance(notes, list) else []

    @property
    def failed_ms(self) -> int | None:
        """When it failed, as Unix milliseconds; None when nobody can tell."""
        failed_at = _instant(self.failed_at)
        return None if failed_at is None else round(failed_at.timestamp() * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterFilter:
    """Which dead letters are meant; what is not given does not matter."""

    name: str | None = None
    """Of the job, or type of the event."""
    error: str | None = None
    """Text that the error message contains, in any case."""
    cause: str | None = None
    fingerprint: str | None = None
    """Of the group, see `fingerprint`."""
    failed_after: datetime | None = None
    failed_before: datetime | None = None
    tenant_id: str | None = None
    """Whose work it is, as whoever added it said."""

    def __post_init__(self) -> None:
        for name in ("name", "error", "cause", "fingerprint", "tenant_id"):
            value = getattr(self, name)
            require(name, value is None or (isinstance(value, str) and value != ""), "non-empty text or None", value)
        for name in ("failed_after", "failed_before"):
            value = getattr(self, name)
            is_aware = isinstance(value, datetime) and value.tzinfo is not None
            require(name, value is None or is_aware, "an aware datetime or None", value)

    def matches(self, letter: DeadLetter) -> bool:
        return (
            (self.name is None or letter.name == self.name)
            and (self.cause is None or letter.cause == self.cause)
            and (self.tenant_id is None or letter.tenant_id == self.tenant_id)
            and (self.error is None or self.error.casefold() in letter.error_message.casefold())
            and self._matches_time(letter.failed_at)
            and (self.fingerprint is None or fingerprint(letter) == self.fingerprint)
        )

    def told(self) -> dict[str, str]:
        """What is asked for, as an audit entry keeps it."""
        given = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in given.items()
            if value is not None
        }

    def _matches_time(self, text: str) -> bool:
        if self.failed_after is None and self.failed_before is None:
            return True
        failed_at = _instant(text)
        if failed_at is None:  # somebody else's entry, whose time nobody can tell
            return False
        is_late_enough = self.failed_after is None or failed_at >= self.failed_after
        return is_late_enough and (self.failed_before is None or failed_at < self.failed_before)


ANY: Final = DeadLetterFilter()


@dataclass(frozen=True, slots=True)
class LetterPage:
    """Some letters, newest first."""

    letters: Sequence[DeadLetter]
    next: str | None
    """Give it as `after` for older ones; None: there are none."""
    depth: int | None = None
    """How many the tenant has on all pages, where that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterGroup:
    """Failures of one kind."""

    fingerprint: str
    store: str
    name: str
    error: str
    """Of one of them, without secrets."""
    count: int
    first_at: str
    last_at: str
    example: str = ""
    """Id of the newest entry, where the store knows it without looking."""
    tenants: Mapping[str, int] = field(default_factory=dict)
    """How many of whom, the most affected first; at most five."""
    trend: tuple[int, ...] = ()
    """How many failed in each of the last 24 hours, the oldest first."""


@dataclass(frozen=True, slots=True)
class RedriveReport:
    """What became of many, so far, or would."""

    examined: int = 0
    matched: int = 0
    done: int = 0
    """Redriven or discarded; with `dry_run` none."""
    skipped: tuple[tuple[str, str], ...] = ()
    """Entry id and reason of the first hundred that matched and stayed, or were gone already."""
    is_dry_run: bool = False


class DeadLetterStore(Protocol):
    """The dead letters of one source.

    Redriving sends the work back with its identity kept and its attempts reset, then removes the entry. It may be
    repeated: after a crash in between, the work may be delivered twice with the same identity, never lost; once the
    entry is gone, DeadLetterNotFound is raised and nothing is sent.
    """

    @property
    def name(self) -> str:
        """The queue, topic or table that holds the entries."""
        ...

    async def depth(self) -> int:
        """How many there are."""
        ...

    async def put(self, letter: DeadLetter) -> None:
        """Write an entry; returns when the store has it for certain. Writing it again changes nothing."""
        ...

    async def list(self, *, start: int = 0, count: int = 100) -> list[DeadLetter]:
        """Oldest first, from `start`."""
        ...

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        """Newest first, behind the cursor of the page before. Letters that come or go meanwhile hide none and repeat
        none. A page may be short, or empty, while `next` tells of more: no call looks at more than some thousand."""
        ...

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        """The most frequent causes first. A store that keeps counters reads no letter for it."""
        ...

    async def get(self, entry_id: str) -> DeadLetter | None:
        """One entry, or None."""
        ...

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        """Send one back; returns the identity of the work. `by` tells who asked, and is recorded."""
        ...

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        """Delete one for good. False when there was none. `by` is recorded where the store keeps such records."""
        ...


@runtime_checkable
class EditableDeadLetters(Protocol):
    """A store whose letters may go back with another payload; not every store is one.

    As with redriving, the identity of the work is kept, and the entry is gone afterwards: of two that edit the same
    letter one is told DeadLetterNotFound. What is kept of the edit is its note, never the earlier payload.
    """

    async def redrive_edited(self, entry_id: str, edit: Edit, *, by: str | None = None) -> str:
        """Send one back with `edit.data`; returns the identity of the work.

        Raises DeadLetterNotFound; DeadLetterChanged when the stored payload is not the one that was edited;
        DeadLetterNotEditable where this one must stay as it is.
        """
        ...


def check_unchanged(store: str, letter: DeadLetter, edit: Edit) -> None:
    """Raises DeadLetterChanged unless the letter holds the payload that the edit was made from."""
    if payload_fingerprint(letter.data) != edit.before:
        raise DeadLetterChanged(store, letter.id)


def fingerprint(letter: DeadLetter) -> str:
    """Twelve signs, the same for failures of the same kind: of one source and name, with one error and code, that came
    from the same place. Ids and numbers do not matter; a status, and the name of a field, do."""
    return fingerprint_of(
        letter.source, letter.name, letter.error_message, code=code_of(letter.cause), stack=letter.error_stack or ""
    )


def code_of(cause: str | None) -> str:
    """The code of an error, as a fingerprint has it. Why a failure was final is none: the same error may be final in
    several ways."""
    return "" if cause is None or cause in _CAUSES else cause


def page_of(letters: Iterable[DeadLetter], where: DeadLetterFilter, *, after: str | None, limit: int) -> LetterPage:
    """A page of letters that had to be read anyway: of stores without an index."""
    require("limit", isinstance(limit, int) and limit >= 1, "at least 1", limit)
    behind = None if after is None else _cursor(after)
    found = sorted(letters, key=_place, reverse=True)
    fitting = [each for each in found if (behind is None or _place(each) < behind) and where.matches(each)]
    page = fitting[:limit]
    return LetterPage(page, "{}/{}".format(*_place(page[-1])) if len(fitting) > limit else None)


def groups_of(letters: Iterable[DeadLetter], store: str, *, tenant_id: str | None, limit: int) -> list[DeadLetterGroup]:
    """Groups of letters that had to be read anyway."""
    found: dict[str, list[DeadLetter]] = {}
    for letter in letters:
        if tenant_id is None or letter.tenant_id == tenant_id:
            found.setdefault(fingerprint(letter), []).append(letter)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    groups = [_group(mark, store, members, now_ms) for mark, members in found.items()]
    return sorted(groups, key=lambda group: (-group.count, group.fingerprint))[:limit]


def _group(mark: str, store: str, members: list[DeadLetter], now_ms: int) -> DeadLetterGroup:
    newest = max(members, key=_place)
    tenants: dict[str, int] = {}
    trend = [0] * 24
    for each in members:
        if each.tenant_id is not None:
            tenants[each.tenant_id] = tenants.get(each.tenant_id, 0) + 1
        hours = -1 if each.failed_ms is None else (now_ms - each.failed_ms) // 3_600_000
        if 0 <= hours < 24:
            trend[23 - hours] += 1
    return DeadLetterGroup(
        fingerprint=mark,
        store=store,
        name=newest.name,
        error=summary(newest.error_text)[:LONGEST_SAMPLE],
        count=len(members),
        first_at=min(each.failed_at for each in members),
        last_at=newest.failed_at,
        example=newest.id,
        tenants=dict(sorted(tenants.items(), key=lambda pair: -pair[1])[:5]),
        trend=tuple(trend),
    )


def _place(letter: DeadLetter) -> tuple[str, str]:
    return letter.failed_at, letter.id


def _cursor(text: str) -> tuple[str, str]:
    failed_at, mark, entry_id = text.partition("/")
    if not mark:
        raise InvalidOption("after", "the `next` of the page before", text)
    return failed_at, entry_id


class PassedDeadLetters:
    """A store behind another one of the same words; a base for those that add something."""

    def __init__(self, store: DeadLetterStore) -> None:
        self._store = store

    @property
    def name(self) -> str:
        return self._store.name

    async def depth(self) -> int:
        return await self._store.depth()

    async def put(self, letter: DeadLetter) -> None:
        await self._store.put(letter)

    async def list(self, *, start: int = 0, count: int = 100) -> builtins.list[DeadLetter]:
        return await self._store.list(start=start, count=count)

    async def page(self, where: DeadLetterFilter = ANY, *, after: str | None = None, limit: int = 100) -> LetterPage:
        return await self._store.page(where, after=after, limit=limit)

    async def groups(self, *, tenant_id: str | None = None, limit: int = 200) -> builtins.list[DeadLetterGroup]:
        return await self._store.groups(tenant_id=tenant_id, limit=limit)

    async def get(self, entry_id: str) -> DeadLetter | None:
        return await self._store.get(entry_id)

    async def redrive(self, entry_id: str, *, by: str | None = None) -> str:
        return await self._store.redrive(entry_id, by=by)

    async def discard(self, entry_id: str, *, by: str | None = None) -> bool:
        return await self._store.discard(entry_id, by=by)


class FixedDeadLetters(PassedDeadLetters):
    """A store that could change payloads but must not: its letters go back as they are, or not at all."""

    def __init__(self, store: DeadLetterStore, reason: str) -> None:
        """`reason` says why, and what to do instead."""
        super().__init__(store)
        self.reason = reason


def _instant(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo is not None else None


def _text(fields: Mapping[str, Any], name: str) -> str:
    """A field of an entry. Anybody may have written it: what is no text is none."""
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _whole(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_SAFE_INTEGER:
        return 0
    return value

"""People and their occasions: saved, moved, removed; what was planned for them follows in the same transaction.

In: `Recipient` records, checked when made. Out: stored rows. A changed zone, date or time moves messages that have not
left; one whose occasion is gone is cancelled; one that was sent stays sent, so nobody gets a second one in its period.
Elsewhere: reading files (`imports`), planning (`planner`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from typing import Any, Final

from bullpen._kernel import json, telemetry
from bullpen._kernel.duration import check_texts, is_text
from bullpen._kernel.logs import get_logger
from bullpen.errors import InvalidOption, require
from bullpen.ledger.message_records import OccasionRow, Planned, RecipientRow
from bullpen.ledger.messages import MessageChange, SqlMessages
from bullpen.messages.calendar import Finding, Occurrence, find_zone, lint, occurrences, read_date, read_time, show_date
from bullpen.messages.occasions import OccasionKind, Occasions
from bullpen.messages.planner import coming
from bullpen.messages.routes import ChannelRoute
from bullpen.messages.templates import choose
from bullpen.ports.channel import ChecksAddresses

__all__ = ["Occasion", "Recipient", "Recipients", "missing_names", "wrong_address"]

logger = get_logger("bullpen.messages")

BATCH: Final = 500
MAX_LENGTHS: Final = {"id": 120, "tenant_id": 60, "name": 200, "channel": 60, "address": 320, "locale": 20}
MAX_ATTRIBUTES: Final = 20_000
_ONE_DAY: Final = timedelta(days=1)
_unwanted = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]").search
_is_label = re.compile(r"[A-Za-z0-9_. -]{0,60}").fullmatch


@dataclass(frozen=True, slots=True)
class Occasion:
    """A date of a recipient. `label` tells several of one kind apart: two anniversaries."""

    on: date
    label: str = ""
    send_at: time | None = None
    """Wall-clock time of its own; None: that of the kind."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "on", read_date("on", self.on))
        if self.send_at is not None:
            object.__setattr__(self, "send_at", read_time("send_at", self.send_at))
        fits = isinstance(self.label, str) and _is_label(self.label) is not None
        require("label", fits, "at most 60 letters, digits, spaces and . - _", self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipient:
    """Somebody who gets messages. Checked when made: raises InvalidOption.

    `occasions` maps the name of a kind to a date (`"1990-03-14"`, `"--03-14"` without a year), an `Occasion`, or a list
    of them.
    """

    id: str
    zone: str
    """IANA name of where they live."""
    channel: str
    """Name of the channel that reaches them."""
    address: str
    name: str = ""
    locale: str = ""
    tenant_id: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Values for templates: text and numbers."""
    occasions: Mapping[str, str | date | Occasion | Sequence[str | date | Occasion]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, limit in MAX_LENGTHS.items():
            value = getattr(self, name)
            fits = isinstance(value, str) and len(value) <= limit and not _unwanted(value)
            require(name, fits, f"at most {limit} characters on one line", value)
        for name in ("id", "channel", "address"):
            require(name, is_text(getattr(self, name)), "a text that is not empty", getattr(self, name))
        find_zone(self.zone)
        for name in ("attributes", "occasions"):
            value = getattr(self, name)
            require(name, isinstance(value, Mapping), "a mapping, by name", value)
        for key, value in self.attributes.items():
            fits = isinstance(value, str | int | float) and not isinstance(value, bool)
            require(f"attributes[{key!r}]", is_text(key) and fits, "text or a number under a name", value)
        encoded = json.encode(dict(self.attributes), what="attributes")
        require("attributes", not json.holds_nul(encoded), "text without the character U+0000", self.attributes)
        size = len(encoded)
        require("attributes", size <= MAX_ATTRIBUTES, f"at most {MAX_ATTRIBUTES} bytes", size)
        self.dates()

    @property
    def key(self) -> tuple[str, str]:
        return (self.tenant_id, self.id)

    def dates(self) -> dict[tuple[str, str], Occasion]:
        """All occasions by kind and label."""
        found: dict[tuple[str, str], Occasion] = {}
        for kind, given in self.occasions.items():
            for one in given if isinstance(given, list | tuple) else [given]:
                occasion = one if isinstance(one, Occasion) else Occasion(read_date(kind, one))
                fits = (kind, occasion.label) not in found
                require(f"occasions[{kind!r}]", fits, "a label for each of several dates", occasion.label)
                found[kind, occasion.label] = occasion
        return found


def missing_names(kind: OccasionKind, recipient: Recipient) -> set[str]:
    """Names that the text for this recipient needs, without a default, and that have no value."""
    needed = choose(kind.texts, recipient.locale).needed
    if not needed:
        return set()
    missing: set[str] = set()
    for (name, label), one in recipient.dates().items():
        if name == kind.name:
            number = None if show_date(one.on).startswith("--") else 1
            known: dict[str, Any] = {"occasion": name, "date": "2000-01-01", "name": recipient.name, "label": label}
            known["number"] = number
            values = {**recipient.attributes, **known}
            missing |= {each for each in needed if values.get(each) in (None, "")}
    return missing


def wrong_address(recipient: Recipient, routes: Mapping[str, ChannelRoute]) -> str | None:
    """What an address must be that its channel can reach; None: it may be one, or nobody here knows."""
    route = routes.get(recipient.channel)
    channel = None if route is None else route.channel
    return channel.why_not(recipient.address) if isinstance(channel, ChecksAddresses) else None


class Recipients:
    """The recipients of one ledger."""

    def __init__(
        self, store: SqlMessages, occasions: Occasions, routes: Mapping[str, ChannelRoute] | None = None
    ) -> None:
        self._store, self._occasions = store, occasions
        self._routes: Mapping[str, ChannelRoute] = {} if routes is None else routes
        self._warned: dict[str, set[str]] = {}

    async def save(self, recipient: Recipient) -> None:
        """Add somebody, or replace what is known about them. Raises InvalidOption for an address that the channel,
        where it is registered here, can never reach."""
        await self.save_many([recipient])

    async def save_many(self, recipients: Iterable[Recipient]) -> int:
        """As `save` for many; each batch of 500 is stored as a whole or not at all. Returns how many."""
        pending = list(recipients)
        for recipient in pending:
            if (expected := self.why_not(recipient)) is not None:
                raise InvalidOption(f"address of recipient {recipient.id!r}", expected, recipient.address)
            for kind, _ in recipient.dates():
                self._warn_of_missing(self._occasions.get(kind), recipient)
        for first in range(0, len(pending), BATCH):
            # The last one wins where an id comes twice: one statement must not change a row twice.
            batch = {one.key: one for one in pending[first : first + BATCH]}
            await self._save(list(batch.values()))
        return len(pending)

    def why_not(self, recipient: Recipient) -> str | None:
        """What the address must be instead; None: it may be one."""
        return wrong_address(recipient, self._routes)

    def _warn_of_missing(self, kind: OccasionKind, recipient: Recipient) -> None:
        """Somebody who cannot be sent what the kind says. Told now and once, not on the day and for each."""
        for name in missing_names(kind, recipient) - self._warned.get(kind.name, set()):
            self._warned.setdefault(kind.name, set()).add(name)
            logger.warning(
                "the text of %r needs {%s}, which recipient %r lacks; write {%s|something}, or give the attribute",
                *(kind.name, name, recipient.id, name),
            )

    async def remove(self, ids: Iterable[str], *, tenant_id: str = "") -> int:
        """Forget recipients and cancel what was planned for them. Returns how many there were."""
        removed, wanted = 0, [(tenant_id, one) for one in check_texts("ids", ids)]
        for first in range(0, len(wanted), BATCH):
            async with self._store.changing(wanted[first : first + BATCH], tenant_id=tenant_id) as change:
                await change.cancel([message for _, _, message in change.planned], code="RECIPIENT_GONE")
                removed += await change.remove()
        return removed

    async def get(self, recipient_id: str, *, tenant_id: str = "") -> Recipient | None:
        found = await self.find(ids=[recipient_id], tenant_id=tenant_id)
        return found[0] if found else None

    async def find(
        self,
        *,
        ids: Sequence[str] | None = None,
        tenant_id: str | None = None,
        after: tuple[str, str] = ("", ""),
        limit: int = 100,
    ) -> list[Recipient]:
        """Recipients in the order of (tenant, id), from behind `after`."""
        ids = ids if ids is None else check_texts("ids", ids)
        rows = await self._store.find_recipients(ids=ids, tenant_id=tenant_id, after=after, limit=limit)
        found = await self._store.occasions_of([(row.tenant_id, row.id) for row in rows], tenant_id=tenant_id or "")
        dates: dict[tuple[str, str], dict[str, list[Occasion]]] = {}
        for one in found:
            kinds = dates.setdefault((one.tenant_id, one.recipient_id), {})
            kinds.setdefault(one.occasion, []).append(_occasion(one))
        return [
            Recipient(
                id=row.id,
                zone=row.zone,
                channel=row.channel,
                address=row.address,
                name=row.name,
                locale=row.locale,
                tenant_id=row.tenant_id,
                attributes=row.attributes,
                occasions=dates.get((row.tenant_id, row.id), {}),
            )
            for row in rows
        ]

    def preview(self, recipient: Recipient, *, after: datetime, until: datetime) -> list[tuple[str, str, Occurrence]]:
        """What would be sent to somebody between two instants: kind, label, occurrence."""
        found = [
            (name, label, occurrence)
            for (name, label), one in recipient.dates().items()
            for kind in [self._occasions.get(name)]
            for occurrence in occurrences(
                one.on,
                one.send_at or kind.send_at,
                find_zone(recipient.zone),
                after=after,
                until=until,
                rule=kind.rule,
                policy=kind.clock,
                quiet=kind.quiet_hours,
            )
        ]
        return sorted(found, key=lambda each: each[2].due_at)

    def lint(self, recipient: Recipient, *, after: datetime, until: datetime) -> list[Finding]:
        """Occurrences whose local time does not exist or comes twice."""
        return [
            finding
            for (name, _), one in recipient.dates().items()
            for kind in [self._occasions.get(name)]
            for finding in lint(
                recipient.id,
                name,
                one.on,
                one.send_at or kind.send_at,
                find_zone(recipient.zone),
                after=after,
                until=until,
                rule=kind.rule,
                policy=kind.clock,
                quiet=kind.quiet_hours,
            )
        ]

    async def replan(self, kinds: Iterable[str] | None = None) -> int:
        """Compute again what is planned for everybody, or for whoever has one of `kinds`, after an update of the time
        zone database or of the kinds. Returns how many those are."""
        kinds = kinds if kinds is None else check_texts("kinds", kinds)
        after, done = ("", ""), 0
        while batch := await self.find(after=after, limit=BATCH):
            known = [
                one
                for one in batch
                if all(kind in self._occasions for kind in one.occasions)
                and (kinds is None or any(kind in kinds for kind in one.occasions))
            ]
            await self._save(known)
            after, done = batch[-1].key, done + len(known)
            telemetry.emit("messages.replanned", recipients=done)
        return done

    # ---- one batch ----------------------------------------------------------------------------------------------

    async def _save(self, batch: Sequence[Recipient]) -> None:
        tenants = {one.tenant_id for one in batch}
        tenant = tenants.pop() if len(tenants) == 1 else ""
        async with self._store.changing([one.key for one in batch], tenant_id=tenant) as change:
            rows = [row for one in batch for row in _rows(one)]
            coming_next = [self._next(row, change) for row in rows]
            await change.save([_recipient_row(one) for one in batch], coming_next)
            moved, cancelled = self._follow({row.key: row for row in rows}, change)
            await change.move(moved)
            for code, ids in cancelled.items():
                await change.cancel(ids, code=code)

    def _next(self, row: OccasionRow, change: MessageChange) -> OccasionRow:
        """The occasion with its next occurrence. What nobody touched stays as it is, so that saving everybody again
        every night loses nothing that a planner has not seen yet."""
        old = change.known.get(row.key)
        kind = self._occasions.get(row.occasion)
        after = change.now
        if old is not None and old.next_due is not None and old.next_due <= change.now:
            # Its next one has passed and was never planned: no reason to forget it because of a correction.
            after -= _ONE_DAY
            if (old.on_date, old.send_at, old.zone) == (row.on_date, row.send_at, row.zone):
                return coming(row, kind.in_period(row, old.next_period) or kind.next(row, after=after))
        return coming(row, kind.next(row, after=after))

    def _follow(
        self, rows: Mapping[tuple[str, str, str, str], OccasionRow], change: MessageChange
    ) -> tuple[list[Planned], dict[str, list[str]]]:
        """Messages that move with their recipient, and those that have lost their reason."""
        moved: list[Planned] = []
        cancelled: dict[str, list[str]] = {}
        for old, period, message in change.planned:
            row = rows.get(old.key)
            if row is None:
                cancelled.setdefault("OCCASION_GONE", []).append(message)
                continue
            kind = self._occasions.get(row.occasion)
            found = kind.in_period(row, period)
            if found is None or found.due_at < min(change.now - _ONE_DAY, old.next_due or change.now):
                # The corrected date has passed long ago: a late greeting would only tell of our mistake.
                cancelled.setdefault("DATE_PASSED", []).append(message)
            elif (found.due_at, row.zone, row.channel) != (old.next_due, old.zone, old.channel):
                moved.append(kind.plan(row, found))
        return moved, cancelled


def _rows(recipient: Recipient) -> list[OccasionRow]:
    return [
        OccasionRow(
            tenant_id=recipient.tenant_id,
            recipient_id=recipient.id,
            occasion=kind,
            label=label,
            on_date=show_date(one.on),
            send_at=None if one.send_at is None else f"{one.send_at:%H:%M}",
            zone=recipient.zone,
            channel=recipient.channel,
        )
        for (kind, label), one in recipient.dates().items()
    ]


def _recipient_row(recipient: Recipient) -> RecipientRow:
    return RecipientRow(
        tenant_id=recipient.tenant_id,
        id=recipient.id,
        name=recipient.name,
        zone=recipient.zone,
        channel=recipient.channel,
        address=recipient.address,
        locale=recipient.locale,
        attributes=recipient.attributes,
    )


def _occasion(row: OccasionRow) -> Occasion:
    send_at = None if row.send_at is None else read_time("send_at", row.send_at)
    return Occasion(read_date("on", row.on_date), row.label, send_at)

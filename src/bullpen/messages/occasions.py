"""Kinds of occasions, by registration: when they come, what is said, what happens when it is late. No I/O.

In: a name and its rules. Out: an `OccasionKind`, and from it the occurrences of one recipient's date. Birthday and
anniversary are kinds like any other; an application registers its own. Elsewhere: time itself (`calendar`).
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from typing import Final

from bullpen._kernel.duration import to_ms
from bullpen.errors import InvalidOption, require
from bullpen.ledger.message_records import LatePolicy, OccasionRow, Planned
from bullpen.messages import calendar
from bullpen.messages.calendar import Occurrence, QuietHours, Rule, TimePolicy, find_zone, read_date, read_time
from bullpen.messages.templates import Text

__all__ = ["ANNIVERSARY", "BIRTHDAY", "Late", "OccasionKind", "Occasions", "message_id"]

_NAMESPACE: Final = uuid.UUID("6f1d3c5e-6f0e-5f0c-9a55-2f6b0a1c7d42")
_is_name = re.compile(r"[a-z][a-z0-9_-]{0,59}").fullmatch
_RESERVED: Final = frozenset({"dlq"})
"""The routing key of dead letters: a kind of that name would be delivered among them."""


@dataclass(frozen=True, slots=True)
class Late:
    """What becomes of a message that could not leave on time, because scheduler, broker or provider were away.

    `Late.send()`: it is sent, however late. `Late.skip(after)`: it is not sent when no scheduler queued it by
    then. `Late.expire(after)`: as skip, and what was queued in time is not sent either once that time is over.
    """

    policy: LatePolicy = "send"
    after_ms: int | None = None

    @classmethod
    def send(cls) -> Late:
        return cls()

    @classmethod
    def skip(cls, after: int | timedelta = timedelta(hours=1)) -> Late:
        return cls("skip", to_ms("late", after, minimum=1))

    @classmethod
    def expire(cls, after: int | timedelta = timedelta(hours=24)) -> Late:
        return cls("expire", to_ms("late", after, minimum=1))

    def at(self, due_at: datetime) -> datetime | None:
        """From when on it is too late."""
        return None if self.after_ms is None else due_at + timedelta(milliseconds=self.after_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class OccasionKind:
    """One kind of occasion. Its name is also the routing key of its messages."""

    name: str
    rule: Rule = field(default_factory=Rule)
    send_at: time = time(9)
    """Wall-clock time where the recipient lives, unless the recipient has a time of its own."""
    clock: TimePolicy = field(default_factory=TimePolicy)
    late: Late = field(default_factory=Late.expire)
    quiet_hours: QuietHours | None = None
    """When nobody is disturbed, also by a retry or a message that is late."""
    texts: Mapping[str, Text] = field(default_factory=lambda: {"": Text("Hello, {name}!")})
    """What is said, by locale; the empty locale is for everybody else."""

    def __post_init__(self) -> None:
        fits = isinstance(self.name, str) and _is_name(self.name) is not None and self.name not in _RESERVED
        require("occasion", fits, "lower-case letters, digits, - and _, and not 'dlq'", self.name)
        read_time("send_at", self.send_at)
        require("texts", bool(self.texts), "at least one text", self.texts)

    def next(self, row: OccasionRow, *, after: datetime) -> Occurrence | None:
        """The first occurrence of a recipient's occasion after an instant."""
        return calendar.next_occurrence(
            read_date("on_date", row.on_date),
            self.time_of(row),
            find_zone(row.zone),
            after=after,
            rule=self.rule,
            policy=self.clock,
            quiet=self.quiet_hours,
        )

    def in_period(self, row: OccasionRow, period: str) -> Occurrence | None:
        """The occurrence of one period."""
        return calendar.occurrence_in(
            period,
            read_date("on_date", row.on_date),
            self.time_of(row),
            find_zone(row.zone),
            rule=self.rule,
            policy=self.clock,
            quiet=self.quiet_hours,
        )

    def time_of(self, row: OccasionRow) -> time:
        return self.send_at if row.send_at is None else read_time("send_at", row.send_at)

    def plan(self, row: OccasionRow, occurrence: Occurrence) -> Planned:
        """The message of an occurrence."""
        return Planned(
            id=message_id(row.tenant_id, row.recipient_id, row.occasion, row.label, occurrence.period),
            tenant_id=row.tenant_id,
            recipient_id=row.recipient_id,
            occasion=row.occasion,
            label=row.label,
            period=occurrence.period,
            number=occurrence.number,
            channel=row.channel,
            zone=row.zone,
            local_at=occurrence.local.isoformat(timespec="minutes"),
            due_at=occurrence.due_at,
            late_policy=self.late.policy,
            late_at=self.late.at(occurrence.due_at),
        )

    def quiet_ms(self, zone: str, now: datetime) -> int:
        """How long the recipient must not be disturbed from now on; 0: not at all."""
        if self.quiet_hours is None:
            return 0
        found = find_zone(zone)
        local = now.astimezone(found).replace(tzinfo=None, fold=0)
        shifted = self.quiet_hours.shift(local)
        if shifted == local:
            return 0
        wait = calendar.resolve(shifted, found, self.clock).instant - now
        return max(1, -(-wait // timedelta(milliseconds=1)))


def message_id(tenant_id: str, recipient_id: str, occasion: str, label: str, period: str) -> str:
    """The id of a message, made from what it is unique by: whoever plans it again gets the same one."""
    # Lengths before the parts: no two different lists of parts have the same text.
    text = "".join(f"{len(part)}:{part}" for part in (tenant_id, recipient_id, occasion, label, period))
    return str(uuid.uuid5(_NAMESPACE, text))


BIRTHDAY: Final = OccasionKind(
    name="birthday",
    texts={"": Text("Happy birthday, {name|dear friend}!", subject="Happy birthday, {name|dear friend}!")},
)
ANNIVERSARY: Final = OccasionKind(
    name="anniversary",
    texts={"": Text("Happy anniversary, {name|dear friend}!", subject="Happy anniversary, {name|dear friend}!")},
)


class Occasions:
    """The kinds that a program knows; birthday and anniversary from the beginning."""

    def __init__(self) -> None:
        self._kinds = {kind.name: kind for kind in (BIRTHDAY, ANNIVERSARY)}

    def register(self, kind: OccasionKind) -> OccasionKind:
        """Add a kind, or replace one."""
        self._kinds[kind.name] = kind
        return kind

    def get(self, name: str) -> OccasionKind:
        """Raises InvalidOption for a kind that was not registered."""
        known = self._kinds.get(name)
        if known is None:
            raise InvalidOption("occasion", f"one of {', '.join(self._kinds)}", name)
        return known

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __iter__(self) -> Iterator[OccasionKind]:
        return iter(self._kinds.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Also the routing keys of their messages."""
        return tuple(self._kinds)

"""When the kinds of a running app are sent, kept in the ledger: whoever has the ledger plans as the app does.

In: the kinds of an app that starts. Out: their timing beside the rows that were planned by it; recipients planned again
when it has changed; kinds for a program that registers none, as the command line. Texts are not kept: the app sends.
While two versions of an app run, each plans again what the other has changed; the one that stays has the last word.
Elsewhere: kinds (`occasions`), planning one batch (`recipients`).
"""

from __future__ import annotations

from typing import Any, Final

from bullpen._kernel import json
from bullpen._kernel.logs import get_logger
from bullpen.ledger.checkpoints import Checkpoints
from bullpen.ledger.messages import SqlMessages
from bullpen.messages.calendar import QuietHours, Rule, TimePolicy, read_time
from bullpen.messages.occasions import Late, OccasionKind, Occasions
from bullpen.messages.recipients import Recipients
from bullpen.messages.templates import Text

__all__ = ["StoredKinds"]

logger = get_logger("bullpen.messages")

_WANTED: Final = "messages.kind/"
_PLANNED: Final = "messages.planned/"
"""What rows have followed. Written last: an app that dies in between plans again when it starts."""


class StoredKinds:
    """The kinds of the app that started last on one ledger."""

    def __init__(
        self, store: SqlMessages, checkpoints: Checkpoints, recipients: Recipients, occasions: Occasions
    ) -> None:
        self._store, self._checkpoints = store, checkpoints
        self._recipients, self._occasions = recipients, occasions

    async def write(self) -> int:
        """Keep what this app says; plan again for whoever has a kind whose timing changed. Returns how many."""
        wanted = await self._checkpoints.list(_WANTED)
        planned = await self._checkpoints.list(_PLANNED)
        changed: dict[str, str] = {}
        for kind in self._occasions:
            text = _to_text(kind)
            if wanted.get(_WANTED + kind.name) != text or planned.get(_PLANNED + kind.name) != text:
                changed[kind.name] = text
        if not changed:
            return 0
        for name, text in changed.items():
            await self._store.note(self._checkpoints, _WANTED + name, text)
        done = await self._recipients.replan(kinds=changed)
        for name, text in changed.items():
            await self._store.note(self._checkpoints, _PLANNED + name, text)
        if done:
            logger.info("%d recipients are planned again: the timing of %s has changed", done, ", ".join(changed))
        return done

    async def read(self) -> bool:
        """Let this program's kinds be sent when the app sends them. False: no app has run on this ledger."""
        stored = await self._checkpoints.list(_WANTED)
        for name, text in stored.items():
            self._occasions.register(_from_text(name.removeprefix(_WANTED), text, self._occasions))
        return bool(stored)


def _to_text(kind: OccasionKind) -> str:
    quiet = kind.quiet_hours
    fields = {
        "at": f"{kind.send_at:%H:%M}",
        "repeats": kind.rule.repeats,
        "leap": kind.rule.leap_day,
        "short": kind.rule.short_month,
        "gap": kind.clock.gap,
        "overlap": kind.clock.overlap,
        "late": kind.late.policy,
        "after": kind.late.after_ms,
        "quiet": None if quiet is None else [f"{quiet.start:%H:%M}", f"{quiet.end:%H:%M}"],
    }
    return json.encode(fields).decode()


def _from_text(name: str, text: str, known: Occasions) -> OccasionKind:
    fields: dict[str, Any] = json.decode(text.encode())
    quiet = fields["quiet"]
    return OccasionKind(
        name=name,
        rule=Rule(repeats=fields["repeats"], leap_day=fields["leap"], short_month=fields["short"]),
        send_at=read_time("send_at", fields["at"]),
        clock=TimePolicy(gap=fields["gap"], overlap=fields["overlap"]),
        late=Late(fields["late"], fields["after"]),
        quiet_hours=None if quiet is None else QuietHours(*(read_time("quiet_hours", each) for each in quiet)),
        texts=known.get(name).texts if name in known else {"": Text(name)},
    )

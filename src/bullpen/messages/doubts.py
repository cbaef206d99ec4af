"""Doubts about messages that are not due yet: found when a sender starts, not at nine in the morning. No I/O.

In: recipients, the kinds of occasions, the channels of the program. Out: findings, one for all recipients that share
it. Elsewhere: local times that do not exist (`calendar`), asking about everybody (`Messages.lint`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from bullpen._kernel.duration import check_texts
from bullpen.messages.occasions import Occasions
from bullpen.messages.recipients import Recipient, missing_names

__all__ = ["BUILT_IN", "Doubt", "Doubts"]

BUILT_IN: Final = ("name", "occasion", "label", "number", "date")
"""What every template may name, besides the attributes of the recipient."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Messages that will not be sent as things are."""

    code: Literal["unregistered-channel", "unknown-name"]
    text: str

    def __str__(self) -> str:
        return f"{self.text} [{self.code}]"


class Doubts:
    """Collects what is doubtful about one recipient after the other."""

    def __init__(self, occasions: Occasions, channels: Collection[str]) -> None:
        """Without channels nothing is said about them: the program does not send."""
        self._occasions, self._channels = occasions, frozenset(check_texts("channels", channels))
        self._by_channel: dict[str, list[str]] = {}
        self._by_name: dict[tuple[str, str], list[str]] = {}

    def look_at(self, recipients: Iterable[Recipient]) -> None:
        for recipient in recipients:
            if self._channels and recipient.channel not in self._channels and recipient.occasions:
                self._by_channel.setdefault(recipient.channel, []).append(recipient.id)
            for kind in recipient.occasions:
                if kind in self._occasions:
                    for name in missing_names(self._occasions.get(kind), recipient):
                        self._by_name.setdefault((kind, name), []).append(recipient.id)

    @property
    def found(self) -> list[Doubt]:
        there_is = ", ".join(sorted(self._channels))
        channels = [
            Doubt(
                "unregistered-channel",
                f"{_people(ids)} have the channel {channel!r}, which is not registered; there is {there_is}",
            )
            for channel, ids in self._by_channel.items()
        ]
        names = [
            Doubt(
                "unknown-name",
                f"the text of {kind!r} needs {{{name}}}, which {_people(ids)} lack; write {{{name}|something}}, or "
                "give them the attribute",
            )
            for (kind, name), ids in self._by_name.items()
        ]
        return [*channels, *names]


def _people(ids: list[str]) -> str:
    shown = ", ".join(map(repr, ids[:3]))
    return f"{len(ids)} recipients ({shown}{', …' if len(ids) > 3 else ''})"

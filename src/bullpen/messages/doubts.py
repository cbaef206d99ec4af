"""Doubts about messages that are not due yet: found when a sender starts, not at nine in the morning. No I/O.

In: recipients, the kinds of occasions, the channels of the program. Out: findings, one for all recipients that share
it. Elsewhere: local times that do not exist (`calendar`), asking about everybody (`Messages.lint`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from bullpen.messages.occasions import Occasions
from bullpen.messages.recipients import Recipient, missing_names, wrong_address
from bullpen.messages.routes import ChannelRoute

__all__ = ["BUILT_IN", "Doubt", "Doubts"]

BUILT_IN: Final = ("name", "occasion", "label", "number", "date")
"""What every template may name, besides the attributes of the recipient."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Messages that will not be sent as things are."""

    code: Literal["unregistered-channel", "unknown-name", "bad-address"]
    text: str

    def __str__(self) -> str:
        return f"{self.text} [{self.code}]"


class Doubts:
    """Collects what is doubtful about one recipient after the other."""

    def __init__(self, occasions: Occasions, routes: Mapping[str, ChannelRoute]) -> None:
        """Without routes nothing is said about channels: the program does not send."""
        self._occasions, self._channels = occasions, routes
        self._by_channel: dict[str, list[str]] = {}
        self._by_address: dict[tuple[str, str], list[str]] = {}
        self._by_name: dict[tuple[str, str], list[str]] = {}

    def look_at(self, recipients: Iterable[Recipient]) -> None:
        for recipient in recipients:
            if self._channels and recipient.channel not in self._channels and recipient.occasions:
                self._by_channel.setdefault(recipient.channel, []).append(recipient.id)
            if recipient.occasions and (expected := wrong_address(recipient, self._channels)) is not None:
                self._by_address.setdefault((recipient.channel, expected), []).append(recipient.id)
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
        addresses = [
            Doubt(
                "bad-address",
                f"{_people(ids)} have an address that the channel {channel!r} cannot reach: expected {expected}",
            )
            for (channel, expected), ids in self._by_address.items()
        ]
        return [*channels, *addresses, *names]


def _people(ids: list[str]) -> str:
    shown = ", ".join(map(repr, ids[:3]))
    return f"{len(ids)} recipients ({shown}{', …' if len(ids) > 3 else ''})"

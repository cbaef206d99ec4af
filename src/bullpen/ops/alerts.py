"""Send alerts when work is stuck: once per incident, and once when it is over, through the app's own channels.

    check (queues, ledger) ──▶ judge (pure) ──▶ incidents and messages, one transaction ──▶ the outbox delivers

In: the checks, where the incidents are stored, and the targets. Out: rows of the outbox, so that an alert is as durable
as any message. Any number of processes may watch: they take turns. What dying means: before the transaction nothing has
happened and the next turn sees the same symptoms; after it the row is stored and will be delivered. Elsewhere: what is
checked (`symptoms`), when it is reported (`incidents`), the channels (`bullpen.plugins.channels`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError, require
from bullpen.ledger import Ledger, OutboxItem
from bullpen.ledger.incidents import Incident, IncidentKey, IncidentVerdict
from bullpen.ops.alert_options import AlertTiming
from bullpen.ops.incidents import IncidentChange, judge
from bullpen.ops.symptoms import RULES, Source, Symptom
from bullpen.ports.metrics import Metric, Sample

__all__ = ["ALERT_EVENT", "Seen", "Target", "Watcher"]

logger = get_logger("bullpen.alerts")

ALERT_EVENT: Final = "bullpen.alert.v1"
_STREAM: Final = "bullpen.alerts"
_MOST_NAMED: Final = 20
_LOOK_S: Final = 60.0
_WORDS: Final = {IncidentChange.OPEN: "", IncidentChange.REPEATED: "still: ", IncidentChange.RESOLVED: "resolved: "}


@dataclass(frozen=True, slots=True)
class Target:
    """Where alerts go: an integration type that a route serves, and its recipients."""

    integration_type: str
    to: str | None = None
    """Mail address or number, for channels that need one."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one check found. Only an incident whose source could be read can be over."""

    signs: Sequence[Symptom]
    readable: frozenset[Source]


class Watcher:
    """Checks, and stores what is to be reported."""

    def __init__(
        self,
        ledger: Ledger,
        look: Callable[[], Awaitable[Seen]],
        targets: Iterable[Target],
        *,
        telling: AlertTiming | None = None,
        every_ms: int = 30_000,
        label: str = "",
    ) -> None:
        """`label` names the installation in every text, such as `production`."""
        ledger.use("alerts")
        self._ledger, self._look, self._targets = ledger, look, list(targets)
        self._telling, self._every_ms, self._label = telling or AlertTiming(), every_ms, label

    def add_target(self, target: Target) -> None:
        """Add a target."""
        self._targets.append(target)

    async def watch(self) -> IncidentVerdict | None:
        """One check, if it is our turn. Returns what was written."""
        # Less than the interval: tickers of several processes drift, and a turn that is missed by a hair waits twice.
        turn = await self._ledger.incidents.take_turn(int(self._every_ms * 0.8))
        if turn is None:
            return None
        async with asyncio.timeout(_LOOK_S):
            seen = await self._look()
        news: dict[tuple[str, IncidentChange], list[Incident]] = defaultdict(list)

        def decide(known: Mapping[IncidentKey, Incident], now: datetime) -> IncidentVerdict:
            changed, forgotten = [], []
            signs = {(sign.rule, sign.subject): sign for sign in seen.signs}
            for key in {**known, **signs}:
                before, sign = known.get(key), signs.get(key)
                if sign is None and not self._could_see(key[0], seen):
                    continue
                judged = judge(before, sign, now, self._telling)
                if judged.incident is None:
                    forgotten.append(key)
                elif judged.incident != before:
                    changed.append(judged.incident)
                if judged.incident is not None and judged.news is not None:
                    news[key[0], judged.news].append(judged.incident)
            # The instant too: should turns begin again from 1, no alert may count as a duplicate of an old one.
            return IncidentVerdict(
                changed, forgotten, self._messages(news, f"{turn.number}-{int(now.timestamp() * 1000)}")
            )

        verdict = await self._ledger.incidents.apply(turn, decide)
        if verdict is None:
            return None  # it took so long that another one has looked meanwhile
        for (rule, what), incidents in news.items():
            for incident in incidents:
                level = logging.INFO if what is IncidentChange.RESOLVED else logging.WARNING
                logger.log(level, "%s%s %s: %s", _WORDS[what], rule, incident.subject, incident.message)
            telemetry.emit("alerts.told", rule=rule, news=what.value, count=len(incidents))
        telemetry.emit("alerts.watched", turn=turn.number, signs=len(seen.signs))
        return verdict

    async def collect(self) -> Sequence[Metric]:
        """Open incidents, for `/metrics`."""
        text = "Open incidents for which an alert was sent."
        try:
            found = await self._ledger.incidents.open()
        except BullpenError:
            return [Metric("bullpen_incidents", "gauge", text, [])]
        samples = [Sample({"rule": each.rule, "subject": each.subject}, 1) for each in found]
        return [Metric("bullpen_incidents", "gauge", text, samples)]

    async def send_test(self, by: str) -> list[str]:
        """Store a message that says it is a test, for every target. Returns the ids of the rows."""
        require("targets", bool(self._targets), "at least one", self._targets)
        stamp = datetime.now(UTC).isoformat()
        told = {
            "alert": "test",
            "state": "test",
            "text": f"{self._prefix()}this is a test, sent by {by}",
            "incidents": [],
        }
        items = [self._item(target, told, "test", f"test/{stamp}") for target in self._targets]
        return [str(stored.id) for stored in await self._ledger.outbox.enqueue_many(items)]

    # ---- inside -------------------------------------------------------------------------------------------------

    @staticmethod
    def _could_see(rule: str, seen: Seen) -> bool:
        known = RULES.get(rule)  # a rule of another version: who does not look for it cannot say that it is over
        return known is not None and known.source in seen.readable

    def _messages(self, news: Mapping[tuple[str, IncidentChange], Sequence[Incident]], turn: str) -> list[OutboxItem]:
        """One message per rule and kind of news: a server that restarts must not send two hundred text messages."""
        items = []
        for (rule, what), incidents in news.items():
            told = self._alert_payload(rule, what, sorted(incidents, key=lambda incident: incident.subject))
            items += [self._item(target, told, rule, f"{turn}/{what}") for target in self._targets]
        return items

    def _item(self, target: Target, told: Mapping[str, Any], rule: str, event_id: str) -> OutboxItem:
        return OutboxItem(
            integration_type=target.integration_type,
            event_type=ALERT_EVENT,
            payload=_payload(target, told),
            source_stream_id=f"{_STREAM}/{rule}",
            source_event_id=event_id,
            route_key=target.integration_type if target.to is None else f"{target.integration_type}/{target.to}"[:120],
            ordering_key=rule,  # nobody reads that it is over before reading that it began
        )

    def _alert_payload(self, rule: str, what: IncidentChange, incidents: Sequence[Incident]) -> dict[str, Any]:
        named = incidents[:_MOST_NAMED]
        lines = [f"{each.subject}: {each.message}" for each in named]
        if more := len(incidents) - len(named):
            lines.append(f"and {more} more")
        if what is not IncidentChange.RESOLVED:
            lines += [f"fix: {fix}" for fix in dict.fromkeys(each.fix for each in named)]
        head = f"{self._prefix()}{_WORDS[what]}{rule}"
        return {
            "alert": rule,
            "state": what.value,
            "label": self._label,
            "count": len(incidents),
            "text": "\n".join([head, *lines]),
            "incidents": [_incident(each) for each in named],
        }

    def _prefix(self) -> str:
        return f"[bullpen{f' {self._label}' if self._label else ''}] "


def _payload(target: Target, told: Mapping[str, Any]) -> dict[str, Any]:
    """In the form that the target's channel wants."""
    text = str(told["text"])
    match target.integration_type.partition(":")[0]:
        case "email":
            return {"to": target.to, "subject": text.partition("\n")[0], "text": text}
        case "sms":
            return {"to": target.to, "text": text[:480]}
        case "slack":
            return {"text": text}
    return dict(told)


def _incident(incident: Incident) -> dict[str, Any]:
    return {
        "subject": incident.subject,
        "number": incident.number,
        "value": incident.value,
        "message": incident.message,
        "fix": incident.fix,
        "openedAt": incident.opened_at.isoformat(timespec="milliseconds"),
        "resolvedAt": None if incident.resolved_at is None else incident.resolved_at.isoformat(timespec="milliseconds"),
    }

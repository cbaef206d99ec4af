"""Turn a batch of events into rows of the outbox: rows, checkpoint and what had to be parked in one transaction.

Only a conflict on the fence is a duplicate. Anything else stops before the checkpoint and is tried again. What fails
every time, an event on one of its routes, is parked, where somebody sees it; its other routes and the other events go
on. In: events and routes. Out: rows. Elsewhere: what an event becomes (`mapping`), where events come from (`projector`,
`backfill`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.duration import check_int
from bullpen._kernel.patience import Patience
from bullpen._kernel.scrub import scrub
from bullpen.errors import InvalidOption, LedgerError, Overtaken, PayloadTooLarge, UnreadableEvent, require
from bullpen.ledger import Enqueued, Ledger, OutboxItem, ParkedEvent
from bullpen.outbox._logs import log, logger
from bullpen.outbox.mapping import EventRoute, items_of
from bullpen.ports.source import SourceEvent

_SOURCE: Final = "outbox-projector"
_LONGEST_PAUSE_S: Final = 10.0

Pick = Callable[[SourceEvent], Sequence[EventRoute]]
"""Which routes an event takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorOptions:
    """All durations in milliseconds."""

    max_tries: int | None = 5
    """Tries of an event before it is parked. None: never parked; the projector waits at it until it can be stored."""
    retry_pause_ms: int = 200
    """Pause before the second try; it doubles up to 10 s."""
    max_payload_bytes: int = 262_144
    """Larger payloads are refused: a message carries identifiers and what the target needs, no blobs."""
    require_metadata: bool = True
    """False: events without correlation id, source or time are taken too, and correlated by their own id."""
    standby_ms: int = 5_000
    """How long a projector that was overtaken waits before it looks whether the other one still works."""
    parked_interval_ms: int = 5_000
    """How often to look for parked events that somebody wants to be tried again."""

    def __post_init__(self) -> None:
        if self.max_tries is not None:
            check_int("max_tries", self.max_tries, minimum=1)
        for name in ("retry_pause_ms", "max_payload_bytes", "standby_ms", "parked_interval_ms"):
            check_int(name, getattr(self, name), minimum=1)
        require("require_metadata", isinstance(self.require_metadata, bool), "a bool", self.require_metadata)


@dataclass(frozen=True, slots=True)
class Mapped:
    """What one event became on one of its routes: rows to be, or the reason why it became none."""

    event: SourceEvent
    route: str | None = None
    """None: the event as a whole, which has no route, or cannot be read."""
    items: tuple[OutboxItem, ...] = ()
    error: str | None = None
    tries: int = 1
    is_final: bool = False
    """Another try would give the same error."""
    is_last: bool = True
    """With it the event is done."""


@dataclass(frozen=True, slots=True)
class Projected:
    """What a batch did."""

    events: int = 0
    created: int = 0
    duplicates: int = 0
    parked: int = 0

    def __add__(self, other: Projected) -> Projected:
        return Projected(
            self.events + other.events,
            self.created + other.created,
            self.duplicates + other.duplicates,
            self.parked + other.parked,
        )


class Projection:
    """Stores events for one projector, or for one backfill of it."""

    def __init__(
        self, ledger: Ledger, *, name: str, checkpoint: str, pick: Pick, declared: Callable[[str], int],
        options: ProjectorOptions, route: str | None = None,
    ) -> None:  # fmt: skip
        self._ledger, self._name, self._checkpoint = ledger, name, checkpoint
        self._pick, self._declared, self._options, self._route = pick, declared, options, route

    async def project(self, events: Sequence[SourceEvent], *, expected: str | None, position: int | None) -> Projected:
        """Store what events become and move the checkpoint from `expected` to `position`, None: there is none.

        Raises Overtaken, and LedgerError when the database does not answer or is not ready; then nothing was stored, or
        the first part of the batch together with its checkpoint.
        """
        # At the same time: events whose mapper raises wait for their next try together, not one behind the other.
        mapped = [each for found in await asyncio.gather(*map(self._map, events)) for each in found]
        telemetry.emit("projector.mapped", projector=self._name, count=len(events))
        try:
            return await self._store(mapped, expected, position)
        except LedgerError as error:
            if type(error) is not LedgerError:
                raise  # the database does not answer, or not as it must be: no event's fault
            if len(mapped) == 0:
                raise
        return await self._store_each(mapped, expected, position)

    async def retry(self, parked: ParkedEvent) -> bool:
        """Try a parked event once more, with the code of today, and the routes of today where it names none. True: it
        is stored, or passed over. False: it stays, or a route of it is parked instead."""
        mapped = self._combined(parked.event, self._tried(parked.event, self._pick(parked.event)))
        if all(each.error is not None and each.route == parked.route for each in mapped):
            return await self.leave(parked, mapped[0].error or "")
        try:
            async with self._ledger.database.transaction() as connection:
                if not await self._ledger.parked.remove(connection, parked.id):
                    return True  # somebody else was faster
                items = [item for each in mapped for item in each.items]
                results = await self._ledger.enqueuer.enqueue_many(connection, items)
                failed = [each for each in mapped if each.error is not None]
                for each in failed:
                    await self._park(connection, each)
        except LedgerError as error:
            if type(error) is not LedgerError:
                raise
            return await self.leave(parked, _describe(error))
        self._report(mapped, results)
        return not failed

    async def leave(self, parked: ParkedEvent, reason: str) -> bool:
        """Keep a parked event where it is, with a new reason. Always False."""
        again = Mapped(parked.event, parked.route, error=reason)
        async with self._ledger.database.transaction() as connection:
            await self._park(connection, again)
        self._report([again], [])
        return False

    # ---- mapping ------------------------------------------------------------------------------------------------

    async def _map(self, event: SourceEvent) -> list[Mapped]:
        """A mapper that raises is asked again: it may have looked something up. What cannot change is not, and neither
        is a mapper that has answered."""
        if logger.isEnabledFor(logging.DEBUG):
            log("OUTBOX_ENQUEUE", "START", source=_SOURCE, level=logging.DEBUG, **_ids(event))
        tries, patience, most = 1, self._patience(), self._options.max_tries
        routes = {route.name: route for route in self._pick(event)}
        mapped = self._tried(event, routes.values())
        while True:
            open_ = [
                each
                for each in mapped
                if each.error is not None and (most is None or not (each.is_final or tries >= most))
            ]
            if not open_:
                break
            self._say_failed(event, open_[0].error or "", tries, open_[0].route)
            await patience.pause()
            tries += 1
            again = [route for name, route in routes.items() if any(each.route in (name, None) for each in open_)]
            new = {each.route: replace(each, tries=tries) for each in self._tried(event, again)}
            kept = [each for each in mapped if each not in open_]
            mapped = [*new.values()] if None in new else [*kept, *new.values()]
        return self._combined(event, mapped)

    def _tried(self, event: SourceEvent, routes: Iterable[EventRoute]) -> list[Mapped]:
        """Each route by itself. An event that nobody can read fails as a whole."""
        if event.problem is not None:
            return [Mapped(event, self._route, error=_describe(UnreadableEvent(event.problem)), is_final=True)]
        mapped = []
        for route in routes:
            try:
                items = items_of(
                    event,
                    [route],
                    declared=self._declared(event.type),
                    require_metadata=self._options.require_metadata,
                )
                self._check_sizes(items)
            except UnreadableEvent as error:
                return [Mapped(event, self._route, error=_describe(error), is_final=True)]
            except (InvalidOption, PayloadTooLarge) as error:
                mapped.append(Mapped(event, route.name, error=_describe(error), is_final=True))
            except Exception as error:  # noqa: BLE001 - a mapper is the user's code; its event must not be lost for it
                mapped.append(Mapped(event, route.name, error=_describe(error)))
            else:
                mapped.append(Mapped(event, route.name, tuple(items)))
        return mapped

    def _check_sizes(self, items: Sequence[OutboxItem]) -> None:
        limit = self._options.max_payload_bytes
        for item in items:
            fits = item.payload_bytes <= limit
            expected = f"a payload of at most {limit} bytes: identifiers and what the target needs"
            require(item.integration_type, fits, expected, f"{item.payload_bytes} bytes")

    def _combined(self, event: SourceEvent, mapped: Sequence[Mapped]) -> list[Mapped]:
        """What routes became together: their messages must not take each other's place."""
        count = sum(len(each.items) for each in mapped)
        if count > 1 and self._ledger.enqueuer.is_strict:
            error = InvalidOption("routes", "one route per event: this ledger stores each source event once", count)
            return [Mapped(event, self._route, error=_describe(error), is_final=True)]
        seen: set[str] = set()
        checked = []
        for each in mapped:
            keys = {item.route_key or item.integration_type for item in each.items}
            if taken := keys & seen:
                # The fence would take the second for a repetition of the first, and nobody would ever get it.
                error = InvalidOption(
                    "route_key", "a route key of its own for each message about one event", ", ".join(sorted(taken))
                )
                checked.append(replace(each, items=(), error=_describe(error), is_final=True, is_last=False))
                continue
            seen |= keys
            checked.append(replace(each, is_last=False))
        return [*checked[:-1], replace(checked[-1], is_last=True)] if checked else [Mapped(event, self._route)]

    # ---- storing ------------------------------------------------------------------------------------------------

    async def _store(self, batch: Sequence[Mapped], expected: str | None, position: int | None) -> Projected:
        items = [item for mapped in batch for item in mapped.items]
        poison = [mapped for mapped in batch if mapped.error is not None]
        moved = position is not None and str(position) != expected
        if not (items or poison or moved):
            return Projected(sum(mapped.is_last for mapped in batch))
        async with self._ledger.database.transaction() as connection:
            if moved:
                # First, because it locks: of two projectors with the same batch the other one waits here.
                checkpoints = self._ledger.checkpoints
                if not await checkpoints.advance(connection, self._checkpoint, expected, str(position)):
                    raise Overtaken(f"projector {self._name!r}: another process has moved the checkpoint {expected}")
            results = await self._ledger.enqueuer.enqueue_many(connection, items)
            for mapped in poison:
                await self._park(connection, mapped)
            telemetry.emit("projector.storing", projector=self._name, count=len(items))
        telemetry.emit("projector.stored", projector=self._name, count=len(items), position=position)
        return self._report(batch, results)

    async def _store_each(self, batch: Sequence[Mapped], expected: str | None, position: int | None) -> Projected:
        """The database refused something in the batch: find out what, and let the others pass."""
        total = Projected()
        for mapped in batch:
            reached = mapped.event.position if position is not None and mapped.is_last else None
            total += await self._store_one(mapped, expected, reached)
            expected = expected if reached is None else str(reached)
        return total + await self._store([], expected, position)

    async def _store_one(self, mapped: Mapped, expected: str | None, position: int | None) -> Projected:
        tries, patience = 1, self._patience()
        while True:
            try:
                return await self._store([mapped], expected, position)
            except LedgerError as error:
                if type(error) is not LedgerError or mapped.error is not None:
                    raise
                reason = _describe(error)
            if self._options.max_tries is not None and tries >= self._options.max_tries:
                return await self._store([replace(mapped, items=(), error=reason, tries=tries)], expected, position)
            self._say_failed(mapped.event, reason, tries, mapped.route)
            await patience.pause()
            tries += 1

    def _patience(self) -> Patience:
        return Patience(first_s=self._options.retry_pause_ms / 1000, longest_s=_LONGEST_PAUSE_S)

    async def _park(self, connection: Any, mapped: Mapped) -> None:
        await self._ledger.parked.park(
            connection,
            self._name,
            mapped.event,
            mapped.error or "",
            tries=mapped.tries,
            route=mapped.route,
        )

    # ---- telling ------------------------------------------------------------------------------------------------

    def _say_failed(self, event: SourceEvent, reason: str, tries: int, route: str | None) -> None:
        if tries == 1:
            log(
                "OUTBOX_ENQUEUE", "ERROR", source=_SOURCE, level=logging.WARNING, **_ids(event), route=route,
                error=_kind(reason),
            )  # fmt: skip
        telemetry.emit("projector.failed", projector=self._name, event_id=event.id, tries=tries, reason=reason)

    def _report(self, batch: Sequence[Mapped], results: Sequence[Enqueued]) -> Projected:
        remaining = iter(results)
        created = duplicates = parked = 0
        for mapped in batch:
            for item in mapped.items:
                result = next(remaining)
                created, duplicates = created + result.created, duplicates + (not result.created)
                log(
                    "OUTBOX_ENQUEUE",
                    "SUCCESS" if result.created else "DUPLICATE",
                    source=_SOURCE,
                    outboxId=result.id,
                    integrationType=item.integration_type,
                    **_ids(mapped.event),
                )
            if mapped.error is not None:
                parked += 1
                log(
                    "OUTBOX_ENQUEUE", "ERROR", source=_SOURCE, level=logging.ERROR, outcome="PARKED",
                    error=_kind(mapped.error), route=mapped.route, attemptsMade=mapped.tries, **_ids(mapped.event),
                )  # fmt: skip
                telemetry.emit(
                    "projector.parked", projector=self._name, event_id=mapped.event.id, position=mapped.event.position
                )
        done = Projected(sum(mapped.is_last for mapped in batch), created, duplicates, parked)
        telemetry.emit(
            "projector.projected",
            projector=self._name,
            events=done.events,
            created=created,
            duplicates=duplicates,
            parked=parked,
        )
        return done


def _describe(error: BaseException) -> str:
    return scrub(f"{type(error).__name__}: {error}")


def _kind(reason: str) -> str:
    """What of a reason may be logged: its class. The text may hold anything, and is in the parked event."""
    return reason.partition(":")[0]


def _ids(event: SourceEvent) -> dict[str, Any]:
    try:
        metadata = event.metadata
    except UnreadableEvent:
        return {"eventType": event.type, "sourceEventId": event.id, "position": event.position}
    return {
        "eventType": event.type,
        "sourceEventId": event.id,
        "position": event.position,
        "correlationId": metadata.correlation_id,
        "tenantId": metadata.tenant_id,
        "userId": metadata.user_id,
    }

"""Perform what an event does: read the entity, plan, run actions, store everything at once.

In: an event, an urn, a payload, and what caused it. Out: the entity in its next state, stored together with its past,
the event's identity and its outgoing messages; or an error with the entity untouched. One event is one change: its own
transition and all automatic steps are stored together.
Elsewhere: deciding the steps (`machine`), storing (`bullpen.ports.entity`), retries (the transport's, never ours).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from bullpen._kernel import telemetry
from bullpen._kernel.duration import is_text
from bullpen._kernel.ids import encode_segment, is_encodable
from bullpen._kernel.logs import get_logger
from bullpen._kernel.outcome import cut, describe
from bullpen.errors import (
    ConnectionLost,
    DatabaseUnavailable,
    DelayJob,
    EndlessSteps,
    EntityBusy,
    EntityChanged,
    EntityFailed,
    EntityNotFound,
    InvalidOption,
    NoTransition,
    PermanentError,
    RateLimited,
    ReturnToWait,
    UnknownEvent,
    WaitForChildren,
    require,
    word,
)
from bullpen.ports.entity import Change, EntityStore, Loaded, Move, UrnLocks
from bullpen.workflow.actions import Hooks, name_of
from bullpen.workflow.batch import Batch
from bullpen.workflow.context import TENANT, StepContext, Trigger, log_fields, performing
from bullpen.workflow.definition import Action, Definition
from bullpen.workflow.locks import local_locks_beside
from bullpen.workflow.machine import Step, first_step, holds_for, is_ignored, is_target, next_step
from bullpen.workflow.stores import DirectStore

__all__ = [
    "Engine",
]

T = TypeVar("T")
P = TypeVar("P")
E = TypeVar("E")
S = TypeVar("S")

logger = get_logger("bullpen.workflow")

_MOST_CONFLICTS: Final = 10
"""How often a change is decided again because another process stored first without taking turns."""
_PAUSE_PER_CONFLICT_S: Final = 0.05
_PAUSE_MS: Final = 1_000
"""When a store or a lock is asked again that was away."""
_SIGNALS: Final = (DelayJob, ReturnToWait, RateLimited, WaitForChildren)
"""What an action may raise without having failed."""


class _ActionFailed(Exception):
    def __init__(self, step: Step[Any, Any, Any, Any], error: Exception) -> None:
        super().__init__(str(error))
        self.step, self.error = step, error


class _NoEntity(PermanentError):
    """Another try would have the effect once more, and return the same."""

    def __init__(self, action: Callable[..., Any], returned: object) -> None:
        what = "None" if returned is None else type(returned).__name__
        super().__init__(f"action {name_of(action)} returned {what} instead of the entity")


@dataclass
class _Walk(Generic[T]):
    """What an event has done so far, in memory."""

    entity: T
    moves: list[Move] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    follow_ups: list[tuple[Any, Any]] = field(default_factory=list)


class Engine(Generic[T, P, E, S]):
    """Applies events to the entities of one workflow."""

    def __init__(
        self,
        name: str,
        definition: Definition[T, P, E, S],
        store: EntityStore[T, S],
        hooks: Hooks,
        *,
        locks: UrnLocks | None = None,
    ) -> None:
        """`locks` keep events of one entity apart over several processes; within this one they always are."""
        self.name, self.definition, self.store, self.hooks = name, definition, store, hooks
        self._local, self._locks = local_locks_beside(locks), locks
        self._events = definition.all_events()

    async def emit(self, event: E, urn: str, payload: Any, trigger: Trigger) -> T:
        """Apply one event; returns the entity. An event whose key was applied before changes nothing."""
        self._require_known(event)
        _check_names(urn, trigger)
        payload = self._typed(event, payload)
        async with self._alone(urn, trigger):
            return await self._repeating(urn, lambda: self._apply(event, urn, payload, trigger, [trigger.key]))

    async def emit_batch(self, event: E, urn: str, items: Sequence[tuple[Any, Trigger]]) -> list[Exception | None]:
        """Apply several events of one kind in one transition, whose payload is a `Batch`.

        One result per event: None, or why it was not applied. When the whole transition fails, each event is tried
        alone, so that a bad one harms only itself.
        """
        results: list[Exception | None] = [None] * len(items)
        good: list[int] = []
        payloads: dict[int, Any] = {}
        for at, (payload, _) in enumerate(items):
            try:
                _check_names(urn, items[at][1])
                payloads[at] = self._typed(event, payload)
                good.append(at)
            except PermanentError as error:
                results[at] = error
        async with self._alone(urn, items[0][1]):
            try:
                await self._together(event, urn, [(at, payloads[at], items[at][1]) for at in good], results)
            except Exception as error:  # noqa: BLE001 - user code; each event is judged by its transport
                if len(good) == 1:
                    results[good[0]] = error
                    return results
                logger.warning("a batch of %d failed, each is tried alone: %s", len(good), error, extra={"urn": urn})
                for at in good:
                    try:
                        await self._together(event, urn, [(at, payloads[at], items[at][1])], results)
                    except Exception as own:  # noqa: BLE001 - as above
                        results[at] = own
        return results

    async def _together(
        self, event: E, urn: str, items: Sequence[tuple[int, Any, Trigger]], results: list[Exception | None]
    ) -> None:
        if not items:
            return

        async def apply() -> T:
            loaded = await self._read(urn, [trigger.key for _, _, trigger in items], items[0][2], items[0][1])
            fresh = []
            for each in items:
                if self._was_applied(loaded, each[2].key, urn):
                    self._report_repeated(event, urn, each[2])
                else:
                    fresh.append(each)
            if not fresh:
                return loaded.entity
            batch = Batch([payload for _, payload, _ in fresh])
            failures = batch.failures

            def kept() -> list[str]:
                return [trigger.key for at, (_, _, trigger) in enumerate(fresh) if at not in failures]

            cause = _cause([trigger for _, _, trigger in fresh])
            entity = await self._change(loaded, event, urn, batch, cause, kept, is_alone=len(items) == 1)
            for at, error in failures.items():
                results[fresh[at][0]] = error
            return entity

        await self._repeating(urn, apply)

    # ---- one event ----------------------------------------------------------------------------------------------

    async def _repeating(self, urn: str, apply: Callable[[], Awaitable[T]]) -> T:
        for conflict in range(1, _MOST_CONFLICTS):
            try:
                return await apply()
            except EntityChanged:
                telemetry.emit("workflow.conflict", workflow=self.name, urn=urn)
                await asyncio.sleep(random.random() * conflict * _PAUSE_PER_CONFLICT_S)
        return await apply()

    async def _apply(self, event: E, urn: str, payload: Any, trigger: Trigger, keys: list[str]) -> T:
        loaded = await self._read(urn, keys, trigger, payload)
        if self._was_applied(loaded, trigger.key, urn):
            self._report_repeated(event, urn, trigger)
            return loaded.entity
        return await self._change(loaded, event, urn, payload, trigger, lambda: keys)

    async def _read(self, urn: str, keys: list[str], trigger: Trigger, payload: Any) -> Loaded[T]:
        with _nobody_counts(trigger), _for_good(trigger):
            loaded = await self.store.read(self.name, urn, keys, tenant_id=trigger.tenant_id)
        if loaded is not None:
            return loaded
        if self.definition.create is None:
            raise EntityNotFound(self.name, urn)
        made = self.definition.create(urn, payload)
        entity: T = await made if inspect.isawaitable(made) else made
        own = self.store.urn(entity)
        require("create", own == urn, f"an entity with the urn {urn!r}", own)
        status, known = self.store.status(entity), self.definition.all_states()
        require("create", status in known, f"an entity in a state of the workflow: {_words(known)}", word(status))
        return Loaded(entity, 0)

    def _was_applied(self, loaded: Loaded[T], key: str, urn: str) -> bool:
        before = loaded.applied.get(key)
        if before is None:
            return False
        if before.outcome == "applied":
            return True
        if self.store.status(loaded.entity) == self.definition.states.failed:
            raise EntityFailed(urn, before.reason)
        return False  # somebody has moved it out of the failed state since: the event may try again

    async def _change(
        self,
        loaded: Loaded[T],
        event: E,
        urn: str,
        payload: Any,
        trigger: Trigger,
        keys: Callable[[], list[str]],
        *,
        is_alone: bool = True,
    ) -> T:
        source = self.store.status(loaded.entity)
        try:
            walk = await self._walk(loaded.entity, event, urn, payload, trigger)
        except _ActionFailed as failure:
            if not is_alone:
                raise failure.error from None  # nobody is parked for a batch: who is to blame, the next tries show
            return await self._failed(failure, source, urn, payload, trigger, keys())
        if not walk.moves or not keys():  # no condition held, or every event of a batch failed
            return walk.entity
        return await self._commit(walk, loaded.version, urn, trigger, keys())

    async def _walk(self, entity: T, event: E, urn: str, payload: Any, trigger: Trigger) -> _Walk[T]:
        walk = _Walk(entity)
        refused = await self._move(walk, event, urn, payload, trigger)
        if refused is not None:
            walk.entity = refused
        while walk.follow_ups:
            event, payload = walk.follow_ups.pop(0)
            self._require_known(event)
            await self._move(walk, event, urn, self._typed(event, payload), trigger)
        return walk

    async def _move(self, walk: _Walk[T], event: E, urn: str, payload: Any, trigger: Trigger) -> T | None:
        """One event and its automatic steps. Returns what the fallback returned, which is not stored."""
        refused, status = None, self.store.status(walk.entity)
        holds = holds_for(self.definition, walk.entity, payload)
        try:
            step = first_step(self.definition, status, event, holds)
            if step is None:
                self._report_refused(event, status, urn, trigger)
                if self.definition.fallback is not None:
                    refused = await self.definition.fallback(walk.entity, event, payload)
        except NoTransition:
            if is_ignored(self.definition, status, event):
                self._report_ignored(event, status, urn, trigger)
                return None
            if not self._is_recognised(event, status, trigger):
                raise
            self._report_repeated(event, urn, trigger)
            step = next_step(self.definition, status, holds)
        while step is not None:
            if len(walk.moves) > self.definition.max_steps:
                raise EndlessSteps(event, status, self.definition.max_steps)
            await self._perform(step, walk, urn, payload, trigger)
            status = step.target
            step = next_step(self.definition, status, holds_for(self.definition, walk.entity, payload))
        return refused

    def _is_recognised(self, event: E, status: S, trigger: Trigger) -> bool:
        """Access without a memory of events: a delivery that comes again after a crash finds the entity where the event
        leads to. It was applied; what is missing are automatic steps, if any."""
        is_direct = isinstance(self.store, DirectStore)
        return is_direct and trigger.may_be_repeated and is_target(self.definition, event, status)

    def _report_repeated(self, event: E, urn: str, trigger: Trigger) -> None:
        logger.info("Event was applied before", extra=log_fields(urn, trigger))
        telemetry.emit("workflow.repeated", workflow=self.name, urn=urn, event=word(event))

    def _report_refused(self, event: E, status: S, urn: str, trigger: Trigger) -> None:
        """The event is done and nothing has changed: without this nobody could find out why."""
        asked = ", the fallback is called" if self.definition.fallback is not None else ""
        logger.info(
            "Event %s changes nothing: no condition holds in state %s%s",
            *(word(event), word(status), asked),
            extra=log_fields(urn, trigger),
        )
        telemetry.emit("workflow.refused", workflow=self.name, urn=urn, event=word(event), state=word(status))

    def _report_ignored(self, event: E, status: S, urn: str, trigger: Trigger) -> None:
        logger.info("Event %s is ignored in state %s", word(event), word(status), extra=log_fields(urn, trigger))
        telemetry.emit("workflow.ignored", workflow=self.name, urn=urn, event=word(event), state=word(status))

    async def _perform(self, step: Step[T, P, E, S], walk: _Walk[T], urn: str, payload: Any, trigger: Trigger) -> None:
        """The only place that runs actions."""
        context = StepContext(
            workflow=self.name,
            urn=urn,
            event=word(step.event),
            source=word(step.source),
            target=word(step.target),
            number=len(walk.moves),
            trigger=trigger,
            can_send=self.store.can_send,
            messages=walk.messages,
            follow_ups=None if isinstance(self.store, DirectStore) else walk.follow_ups,
        )
        names: Counter[str] = Counter()

        async def run(action: Action[Any, Any], name: str) -> None:
            names[name] += 1
            own = name if names[name] == 1 else f"{name} {names[name]}"
            with performing(replace(context, action=own)):
                walk.entity = await self._run(action, step, walk.entity, payload, urn)

        for action in step.transition.actions:
            await run(action, name_of(action))
        for hook in self.hooks.on_event(step):
            assert hook.run is not None
            await run(hook.run, hook.name)
        with performing(context):
            walk.entity = await self.store.advance(walk.entity, step.target)
        for hook in self.hooks.on_status_changed(step):
            assert hook.run is not None
            try:
                await run(hook.run, hook.name)
            except _ActionFailed as failure:
                if hook.fail_on_error:
                    raise
                reason = describe(failure.error)[0]
                logger.error("%s failed, which is allowed: %s", hook.name, reason, extra=log_fields(urn, trigger))
        kind: Literal["automatic", "event"] = "automatic" if step.is_automatic else "event"
        walk.moves.append(Move(word(step.event), word(step.source), word(step.target), kind))

    async def _run(
        self, action: Callable[[Any, Any], Awaitable[Any]], step: Step[T, P, E, S], entity: T, payload: Any, urn: str
    ) -> T:
        try:
            returned: T = await action(entity, payload)
            own = self._urn_of(returned, action)
            if own != urn:
                # It would be stored over another entity, or as a new one beside the old.
                raise PermanentError(
                    f"action {name_of(action)} changed the urn from {urn!r} to {own!r}; it identifies the entity"
                )
        except _SIGNALS:
            raise
        except Exception as error:
            raise _ActionFailed(step, error) from error
        return returned

    def _urn_of(self, returned: Any, action: Callable[..., Any]) -> str:
        try:
            if returned is not None:
                return self.store.urn(returned)
        except Exception as error:
            raise _NoEntity(action, returned) from error
        raise _NoEntity(action, returned)

    # ---- storing ------------------------------------------------------------------------------------------------

    async def _commit(
        self, walk: _Walk[T], version: int, urn: str, trigger: Trigger, keys: list[str], reason: str = ""
    ) -> T:
        change = Change(
            workflow=self.name,
            urn=urn,
            entity=walk.entity,
            version=version,
            moves=tuple(walk.moves),
            keys=tuple(keys),
            reason=reason,
            messages=tuple(walk.messages),
            job_id=trigger.job_id,
            attempt=trigger.attempt,
            tenant_id=trigger.tenant_id,
            user_id=trigger.user_id,
            correlation_id=trigger.correlation_id,
        )
        with _nobody_counts(trigger), _for_good(trigger):
            entity = await self.store.commit(change)
        fields = log_fields(urn, trigger)
        for move in walk.moves:
            logger.info(
                "Entity moved from %s to %s by %s (%s)", move.source, move.target, move.event, move.kind, extra=fields
            )
            telemetry.emit(
                "workflow.moved",
                workflow=self.name,
                urn=urn,
                event=move.event,
                source=move.source,
                target=move.target,
                kind=move.kind,
                tenant_id=trigger.tenant_id,
                correlation_id=trigger.correlation_id,
                traceparent=trigger.headers.get("traceparent"),
            )
        return entity

    async def _failed(
        self, failure: _ActionFailed, source: S, urn: str, payload: Any, trigger: Trigger, keys: list[str]
    ) -> T:
        """Retry: raise, the entity untouched; with the last attempt, and for the others, into the failed state."""
        is_direct = trigger.attempt is None
        policy = self.definition.on_action_error or ("raise" if is_direct else "retry")
        error, fields = failure.error, log_fields(urn, trigger)
        if policy == "retry" and not trigger.is_final(error):
            raise error
        reason = describe(error)[0]
        # Of a delivery that fails the client tells, with the traceback; of one that succeeds only this line does.
        is_told = not is_direct and policy != "fail"
        logger.log(
            logging.WARNING if is_told else logging.ERROR,
            "Action failed: %s",
            reason,
            exc_info=None if is_told else error,
            extra={**fields, "error": cut(reason, 500)},
        )
        entity = await self._park(failure.step, source, urn, payload, trigger, keys, reason)
        if policy == "fail":
            return entity
        if policy == "raise" and not is_direct and not trigger.is_final(error):
            raise PermanentError(reason) from error  # its entity is parked: another try could only say so
        raise error

    async def _park(
        self, step: Step[T, P, E, S], source: S, urn: str, payload: Any, trigger: Trigger, keys: list[str], reason: str
    ) -> T:
        # Read again: what a failed action did to its copy must not be stored.
        loaded = await self._read(urn, [], trigger, payload)
        status = self.store.status(loaded.entity)
        is_direct = isinstance(self.store, DirectStore)
        if status != source and not is_direct:
            raise EntityChanged(urn)  # it is no longer the one that failed: the event is decided anew
        failed = self.definition.states.failed
        entity = await self.store.advance(loaded.entity, failed)
        walk = _Walk(entity, [Move(word(step.event), word(status), word(failed), "failed")])
        return await self._commit(walk, loaded.version, urn, trigger, keys, cut(reason, 500))

    # ---- small things -------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _alone(self, urn: str, trigger: Trigger) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as held:
            with _nobody_counts(trigger):
                await held.enter_async_context(self._local.hold(urn))
                if self._locks is not None:
                    await held.enter_async_context(self._locks.hold(urn))
            yield

    def _require_known(self, event: E) -> None:
        if event not in self._events:
            raise UnknownEvent(self.name, event, self._events)

    def _typed(self, event: E, payload: Any) -> Any:
        kind = self.definition.payloads.get(event)
        if kind is None or (isinstance(kind, type) and isinstance(payload, kind)):
            return payload
        try:
            return msgspec.convert(payload, kind)
        except msgspec.ValidationError as error:
            raise PermanentError(f"payload of {word(event)}: {error}") from error


def _check_names(urn: str, trigger: Trigger) -> None:
    """What names an event is refused before an action has an effect: no store can hold it."""
    tenant = trigger.headers.get(TENANT)
    with _for_good(trigger):
        for option, value in (
            ("urn", urn),
            ("idempotency_key", trigger.key),
            *([] if tenant is None else [("tenant_id", tenant)]),
        ):
            fits = is_text(value) and "\0" not in value and is_encodable(value)
            require(option, fits, "non-empty text without NUL and lone surrogates", value)


@contextlib.contextmanager
def _for_good(trigger: Trigger) -> Iterator[None]:
    """What cannot be stored will not become better by another try, in which actions would have their effects again."""
    try:
        yield
    except InvalidOption as error:
        if trigger.attempt is None:
            raise
        raise PermanentError(str(error)) from error


def _words(values: Iterable[Any]) -> str:
    return ", ".join(map(word, values))


def _cause(triggers: Sequence[Trigger]) -> Trigger:
    """What caused a batch: its first event, with the keys of all. With the first's key alone, a target would take a
    batch for the smaller one that began with the same event, and swallow the rest."""
    first = triggers[0]
    return first if len(triggers) == 1 else replace(first, key="+".join(encode_segment(each.key) for each in triggers))


@contextlib.contextmanager
def _nobody_counts(trigger: Trigger) -> Iterator[None]:
    """An unreachable store or lock is not the event's fault: it is delivered again, and no attempt is counted.
    Otherwise an outage of a minute would dead-letter everything that arrives in it."""
    try:
        yield
    except (ConnectionLost, DatabaseUnavailable, EntityBusy) as error:
        if trigger.attempt is None:
            raise
        raise DelayJob(_PAUSE_MS, f"tried again, no attempt counted: {error}") from error

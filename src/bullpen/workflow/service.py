"""One registered workflow: emit, send and read; and the service that an app runs.

In: a definition, its store, perhaps the client of the transport that brings its events. Out: `emit` applies an event
here and now, `send` lets the transport carry it, `run` consumes until closed. Elsewhere: applying (`engine`), consuming
(`bindings`), putting the parts together (`bullpen.wiring.workflows`).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, Unpack

import msgspec

from bullpen._kernel.duration import is_text
from bullpen._kernel.logs import get_logger
from bullpen._kernel.service import BaseService
from bullpen.errors import DoubtfulDefinition, EntityNotFound, NotConfigured, UnknownEvent, require, word
from bullpen.ports.bindings import Binding
from bullpen.ports.entity import EntityStore, HistoryEntry, KnowsStates, UrnLocks
from bullpen.ports.messaging import Messaging, ProduceArguments
from bullpen.ports.transport import Receipt
from bullpen.workflow import diagram
from bullpen.workflow.actions import Hooks
from bullpen.workflow.bindings import EventConsumers
from bullpen.workflow.context import CORRELATION, TENANT, USER, Trigger, inherited_headers
from bullpen.workflow.definition import Definition
from bullpen.workflow.engine import Engine
from bullpen.workflow.lint import LintFinding, lint
from bullpen.workflow.simulate import Explanation, Simulation, explain, simulate

__all__ = ["Workflow"]

T = TypeVar("T")
P = TypeVar("P")
E = TypeVar("E")
S = TypeVar("S")

logger = get_logger("bullpen.workflow")


class Workflow(BaseService, Generic[T, P, E, S]):
    """The entities of one definition, and the events that move them. Made by `Bullpen.workflow`.

    A subclass may add methods of its own, and is found by its type: `app.workflow(definition, service=Orders)`.
    """

    def __init__(
        self,
        name: str,
        definition: Definition[T, P, E, S],
        store: EntityStore[T, S],
        *,
        hooks: Hooks | None = None,
        binding: Binding[E] | None = None,
        client: Messaging[Any] | None = None,
        owns_client: bool = True,
        locks: UrnLocks | None = None,
        strict: bool = False,
    ) -> None:
        super().__init__(f"workflow {name!r}")
        self.name, self.definition, self.store = name, definition, store
        self.binding, self.client = binding, client
        hooks = hooks or Hooks([])
        self.findings: tuple[LintFinding, ...] = tuple(lint(definition, hooks.all, store))
        """What lint has found."""
        errors = [finding for finding in self.findings if strict or finding.level == "error"]
        if errors:
            raise DoubtfulDefinition(name, errors)
        for finding in self.findings:
            logger.warning("workflow %r: %s", name, finding)
        if isinstance(store, KnowsStates):
            store.allow(definition.all_states())
        self._owns_client = owns_client
        self._engine = Engine(name, definition, store, hooks, locks=locks)
        self._consumers = EventConsumers(binding, client, apply=self._engine.emit, apply_batch=self._engine.emit_batch)

    def __repr__(self) -> str:
        return f"Workflow({self.name!r})"

    # ---- events -------------------------------------------------------------------------------------------------

    async def emit(
        self,
        event: E,
        urn: str,
        payload: P | None = None,
        *,
        idempotency_key: str | None = None,
        tenant_id: str | None = None,
        user_id: str | None = None,
        correlation_id: str | None = None,
    ) -> T:
        """Apply an event here and now; returns the entity.

        With an `idempotency_key` the same key counts once for an entity, where the store remembers events; `send` with
        the same key is the same event. Raises what an action raised, after the entity was stored in its failed state
        (`on_action_error` of the definition says otherwise); UnknownEvent; NoTransition when the event leads nowhere
        from the entity's status; EntityNotFound, EntityChanged.
        """
        headers = _headers(tenant_id, user_id, correlation_id)
        trigger = Trigger(key=str(uuid.uuid4()) if idempotency_key is None else idempotency_key, headers=headers)
        return await self._engine.emit(event, urn, payload, trigger)

    async def send(
        self,
        event: E,
        urn: str,
        payload: P | None = None,
        *,
        delay: int | timedelta = 0,
        idempotency_key: str | None = None,
        tenant_id: str | None = None,
        user_id: str | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[ProduceArguments],
    ) -> Receipt:
        """Let the transport carry an event, now or after `delay`; returns its receipt when the broker has it. On BullMQ
        that is the `Job`.

        It goes to the source that the binding names for this event: its consumer applies it, this program or
        another, also one in Node. With an `idempotency_key` it counts once for its entity, as with `emit`, also when
        the broker has forgotten the first. `options` are those of the transport, such as `priority` on BullMQ. Ids that
        are not given are those of the event whose action is running.
        """
        if self.client is None or self.binding is None:
            raise NotConfigured(f"workflow {self.name!r} has no transport; register it with one, or use emit")
        known = self.definition.all_events()
        if event not in known:
            raise UnknownEvent(self.name, event, known)
        mapped = self.binding.mapped(event)
        receipt: Receipt = await self.client.produce(
            mapped.source,
            mapped.job_name or word(event),
            {"urn": urn, "payload": _as_json(payload)},
            delay=delay,
            idempotency_key=idempotency_key,
            headers={**_headers(tenant_id, user_id, correlation_id), **(headers or {})},
            **options,
        )
        return receipt

    # ---- looking ------------------------------------------------------------------------------------------------

    async def load(self, urn: str, *, tenant_id: str | None = None) -> T | None:
        """The entity as it is stored now, or None."""
        loaded = await self.store.read(self.name, urn, tenant_id=tenant_id)
        return None if loaded is None else loaded.entity

    async def history(self, urn: str, *, limit: int = 100, tenant_id: str | None = None) -> list[HistoryEntry]:
        """The newest moves of an entity, oldest first. Empty where the store keeps none."""
        return await self.store.history(self.name, urn, limit=limit, tenant_id=tenant_id)

    async def explain(self, urn: str, payload: P | None = None, *, tenant_id: str | None = None) -> Explanation:
        """Where an entity is, how it came there, and what each event would do now."""
        entity = await self.load(urn, tenant_id=tenant_id)
        if entity is None:
            raise EntityNotFound(self.name, urn)
        past = await self.history(urn, limit=10, tenant_id=tenant_id)
        return explain(self.definition, urn, self.store.status(entity), entity, payload, past)

    def simulate(
        self, events: Iterable[E | tuple[E, Any]], *, entity: T | None = None, start: S | None = None
    ) -> Simulation:
        """What a sequence of events, each perhaps with a payload, would do. Conditions are asked, actions do not run.

        Begins with `entity`, else with a new one in the initial state; `start` overrides the state.
        """
        shown = self.store.new() if entity is None else entity
        status = self.definition.states.initial if start is None and entity is None else start
        if status is None:
            status = self.store.status(shown)
        pairs: list[tuple[Any, Any]] = [each if isinstance(each, tuple) else (each, None) for each in events]
        return simulate(self.definition, status, shown, pairs)

    def mermaid(self) -> str:
        """The states as Mermaid text."""
        return diagram.mermaid(self.definition)

    def svg(self) -> str:
        """The states as a diagram."""
        return diagram.svg(self.definition)

    def event(self, text: str) -> E:
        """The event that is written so."""
        for each in self.definition.all_events():
            if word(each) == text:
                return each
        known = ", ".join(map(word, self.definition.all_events()))
        raise NotConfigured(f"workflow {self.name!r} has no event {text!r}; there is {known}")

    # ---- running ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Events of the transport that are being handled now."""
        return self._consumers.running

    @property
    def problem(self) -> str | None:
        """Why events are not consumed although they should be."""
        return self._consumers.problem

    async def is_healthy(self) -> bool:
        """Whether events are consumed as they should be, and the broker answers. Never raises."""
        if not self._consumers.is_healthy:
            return False
        return self.client is None or await self.client.is_healthy()

    async def check(self) -> str | None:
        """Why it is not healthy, or None."""
        if await self.is_healthy():
            return None
        return self.problem or "a consumer has ended, or the broker does not answer; see the log"

    async def _begin(self) -> None:
        await self._consumers.start()

    async def _hurry(self) -> None:
        await self._consumers.close(self._close_timeout)

    async def _end(self) -> None:
        await self._consumers.close(self._close_timeout)
        if self.client is not None and self._owns_client:
            await self.client.close(self._close_timeout)


def _headers(tenant_id: str | None, user_id: str | None, correlation_id: str | None) -> dict[str, str]:
    given = {TENANT: tenant_id, USER: user_id, CORRELATION: correlation_id}
    for option, value in zip(("tenant_id", "user_id", "correlation_id"), given.values(), strict=True):
        # An empty one is a mistake of the caller, and not the same as none.
        require(option, value is None or is_text(value), "non-empty text or None", value)
    return {**inherited_headers(), **{name: value for name, value in given.items() if value is not None}}


def _as_json(payload: Any) -> Any:
    """Typed payloads as they are read back; anything else is unchanged and must be JSON."""
    if isinstance(payload, msgspec.Struct) or is_dataclass(payload):
        return msgspec.to_builtins(payload)
    return payload

"""What a workflow is: states, transitions, conditions, actions. Frozen records, checked when they are made.

In: what the user writes. Out: a definition that every other part trusts; InvalidOption, with the place of the mistake,
while it is made. Elsewhere: what an event does (`machine`), running it (`engine`), doubts that are no mistakes
(`lint`), which source brings which event (`bullpen.ports.bindings`).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from bullpen._kernel.duration import check_int, is_text
from bullpen.errors import InvalidOption, require, word
from bullpen.ports.bindings import AnyTransport, BullMQ, Kafka, RabbitMQ
from bullpen.ports.entity import Entities, EntityStore

__all__ = ["Action", "Condition", "Definition", "InlineEntities", "States", "Transition", "many"]

T = TypeVar("T")
"""Entity."""
P = TypeVar("P")
"""Payload."""
E = TypeVar("E")
"""Event."""
S = TypeVar("S")
"""State."""

Action = Callable[[T, P], Awaitable[T]]
"""`async def action(entity, payload) -> entity`; it may run again after a crash, with the same `step().key`."""
Condition = Callable[[T, P], bool]
"""Asked before an action runs, perhaps often: no I/O, no effects."""

_MANY = (list, tuple, set, frozenset)


def many(value: object) -> tuple[Any, ...]:
    """One or many, as many. Text is one."""
    return tuple(value) if isinstance(value, _MANY) else (value,)


@dataclass(frozen=True, kw_only=True)
class States(Generic[S]):
    """Where a workflow rests."""

    finals: Sequence[S] = ()
    """Ends: no event leads out of them, unless a transition says so."""
    idles: Sequence[S] = ()
    """Where the engine stops and waits for the next event."""
    failed: S
    """Where an entity is parked when an action fails."""
    initial: S | None = None
    """Where entities start. Only used by diagrams and lint."""

    def __post_init__(self) -> None:
        for name in ("finals", "idles"):
            value = getattr(self, name)
            require(f"states.{name}", isinstance(value, _MANY), "a list of states", value)
        both = [state for state in self.finals if state in self.idles]
        require("states.idles", not both, "states that are not final", both)

    def rests(self, state: S) -> bool:
        """Whether the engine stops here."""
        return state == self.failed or state in self.idles or state in self.finals


@dataclass(frozen=True, kw_only=True)
class Transition(Generic[T, P, E, S]):
    """An event leads from one state, or from each of several, to another, if its conditions hold."""

    # Not Sequence: text, and so a StrEnum, is a sequence of its letters.
    event: E | list[E] | tuple[E, ...]
    from_: S | list[S] | tuple[S, ...]
    to: S
    actions: Sequence[Action[T, P]] = ()
    """Run in their order, each with what the one before returned."""
    conditions: Sequence[Condition[T, P]] = ()
    """All must hold."""
    ignore_in: Sequence[S] = ()
    """States in which the event comes too late and is done without any change, instead of leading nowhere."""

    def __post_init__(self) -> None:
        require("transition.event", bool(many(self.event)), "at least one event", self.event)
        require("transition.from_", bool(many(self.from_)), "at least one state", self.from_)
        for name in ("actions", "conditions"):
            value = getattr(self, name)
            require(f"transition.{name}", isinstance(value, _MANY), "a list of functions", value)
        fits = isinstance(self.ignore_in, _MANY) and not set(self.ignore_in) & set(self.sources)
        require("transition.ignore_in", fits, "a list of states, none of which is in `from_`", self.ignore_in)
        for action in self.actions:
            require("transition.actions", _is_async(action), "functions declared with `async def`", action)
        _check_conditions("transition.conditions", self.conditions)

    @property
    def events(self) -> tuple[E, ...]:
        return many(self.event)

    @property
    def sources(self) -> tuple[S, ...]:
        return many(self.from_)

    def __str__(self) -> str:
        events, sources = (" or ".join(map(word, each)) for each in (self.events, self.sources))
        return f"{sources} --{events}--> {word(self.to)}"


@dataclass(frozen=True, kw_only=True)
class InlineEntities(Generic[T, S]):
    """Access to entities from five functions; `load` and `update` may be `async def` or plain."""

    new_: Callable[[], T]
    load_: Callable[[str], Awaitable[T | None] | T | None]
    update_: Callable[[T, S], Awaitable[T] | T]
    status_: Callable[[T], S]
    urn_: Callable[[T], str]

    def __init__(
        self,
        *,
        new: Callable[[], T],
        load: Callable[[str], Awaitable[T | None] | T | None],
        update: Callable[[T, S], Awaitable[T] | T],
        status: Callable[[T], S],
        urn: Callable[[T], str],
    ) -> None:
        given = {"new": new, "load": load, "update": update, "status": status, "urn": urn}
        for name, function in given.items():
            require(f"entity.{name}", callable(function), "a function", function)
            object.__setattr__(self, f"{name}_", function)

    def new(self) -> T:
        return self.new_()

    async def load(self, urn: str) -> T | None:
        found = self.load_(urn)
        return await found if inspect.isawaitable(found) else found

    async def update(self, entity: T, status: S) -> T:
        updated = self.update_(entity, status)
        return await updated if inspect.isawaitable(updated) else updated

    def status(self, entity: T) -> S:
        return self.status_(entity)

    def urn(self, entity: T) -> str:
        return self.urn_(entity)


EntityAccess = Entities[T, S] | EntityStore[T, S]


@dataclass(frozen=True, kw_only=True)
class Definition(Generic[T, P, E, S]):
    """One workflow, whatever carries its events.

    For example:

        Definition[Order, Payment, OrderEvent, OrderStatus](
            name="order",
            states=States(idles=[NEW], finals=[PAID], failed=FAILED),
            transitions=[Transition(event=PAY, from_=NEW, to=PAID, actions=[charge])],
            entity=orders,
        )
    """

    states: States[S]
    transitions: Sequence[Transition[T, P, E, S]]
    entity: EntityAccess[T, S] | type[EntityAccess[T, S]]
    """Access to entities: an object, or a class that the app makes one of."""
    name: str | None = None
    actions: Sequence[object] = ()
    """Objects, or classes that the app makes objects of, with methods marked by `on_event` and `on_status_changed`."""
    conditions: Sequence[Condition[T, P]] = ()
    """Must hold for every transition, besides its own."""
    fallback: Callable[[T, E, P], Awaitable[T]] | None = None
    """`async def fallback(entity, event, payload)`: called when an event fits but no condition set holds. What it
    returns is given back, and not stored."""
    create: Callable[[str, P], T | Awaitable[T]] | None = None
    """`create(urn, payload)` makes the entity of an event that finds none; it is stored with what the event does. None:
    such an event is tried again, as one that is too early for the state."""
    payloads: Mapping[E, Any] = field(default_factory=dict)
    """Types of payloads, by event. JSON becomes such an object; what does not fit fails for good."""
    on_action_error: Literal["retry", "raise", "fail"] | None = None
    """retry: the entity stays untouched and the event is tried again, the failed state comes with the last attempt.
    raise: into the failed state at once, and the error goes to the caller; an event of a transport becomes a dead
    letter. fail: into the failed state at once, and the event counts as handled. None: retry for events of a transport,
    raise for a direct `emit`."""
    max_steps: int = 100
    """Automatic steps that one event may cause. More means that the states run in a circle."""
    kafka: Kafka[E] | None = None
    bullmq: BullMQ[E] | None = None
    rabbitmq: RabbitMQ[E] | None = None
    events: AnyTransport[E] | None = None
    """Where events come from when a setting chooses the transport."""

    def __post_init__(self) -> None:
        require("name", self.name is None or is_text(self.name), "non-empty text or None", self.name)
        require("states", isinstance(self.states, States), "a States object", self.states)
        require("transitions", isinstance(self.transitions, _MANY), "a list of transitions", self.transitions)
        require("transitions", bool(self.transitions), "at least one transition", self.transitions)
        for transition in self.transitions:
            require("transitions", isinstance(transition, Transition), "Transition objects", transition)
        _check_conditions("conditions", self.conditions)
        require("fallback", self.fallback is None or _is_async(self.fallback), "an `async def`", self.fallback)
        require("create", self.create is None or callable(self.create), "a function of urn and payload", self.create)
        check_int("max_steps", self.max_steps, minimum=1)
        if self.on_action_error not in (None, "retry", "raise", "fail"):
            raise InvalidOption("on_action_error", "'retry', 'raise', 'fail' or None", self.on_action_error)
        access = (
            "new",
            "status",
            "urn",
            *(("read", "commit") if hasattr(self.entity, "commit") else ("load", "update")),
        )
        missing = [name for name in access if not callable(getattr(self.entity, name, None))]
        require("entity", not missing, f"access with {', '.join(access)} (it lacks {', '.join(missing)})", self.entity)
        known = set(self.all_events())
        for event in self.payloads:
            require("payloads", event in known, "events of the transitions", event)
        for binding in (self.kafka, self.bullmq, self.rabbitmq, self.events):
            for mapped in binding.events if binding is not None else ():
                require("events", mapped.event in known, "events of the transitions", mapped.event)

    def all_states(self) -> tuple[S, ...]:
        """Every state that is named anywhere, in the order of its first naming."""
        states = self.states
        named = [*([] if states.initial is None else [states.initial])]
        for transition in self.transitions:
            named += [*transition.sources, transition.to]
        return tuple(dict.fromkeys([*named, *states.idles, *states.finals, states.failed]))

    def all_events(self) -> tuple[E, ...]:
        return tuple(dict.fromkeys(event for transition in self.transitions for event in transition.events))


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - the method itself is asked


def _check_conditions(option: str, conditions: Sequence[object]) -> None:
    for condition in conditions:
        plain = callable(condition) and not _is_async(condition)
        # An `async def` would always hold: a coroutine is true.
        require(option, plain, "plain functions that return True or False", condition)

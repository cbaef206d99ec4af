"""What an action may know and leave behind besides entity and payload: ids, a stable key, messages for the outbox.

In: set by the engine around each step. Out: `step()` for actions, and the headers that events sent from an action
inherit. Elsewhere: storing the messages with the entity (`bullpen.ports.entity.EntityStore`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Unpack

from bullpen._kernel.ids import encode_segment
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.ports.transport import KEY_HEADER

if TYPE_CHECKING:  # an extra, for those alone who send from an action
    from bullpen.ledger import OutboxFields

__all__ = [
    "CORRELATION",
    "TENANT",
    "USER",
    "StepContext",
    "Trigger",
    "inherited_headers",
    "log_fields",
    "performing",
    "step",
]

TENANT: Final = "tenantId"
USER: Final = "userId"
CORRELATION: Final = "correlationId"
"""Names of headers, and of fields in log records."""


_LONGEST_STREAM: Final = 200
_LONGEST_KEY: Final = 200
"""What providers take as a key; the usual limit is 255."""


def _never(error: BaseException) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """What caused an event: a delivery of a transport, or a call."""

    key: str
    """Identifies this event among others of its entity and workflow: the same for every delivery, on every way."""
    headers: Mapping[str, str] = field(default_factory=dict)
    job_id: str | None = None
    queue: str | None = None
    attempt: int | None = None
    """Number of this attempt, from 1. None: a call, which is not repeated."""
    may_be_repeated: bool = False
    """Whether an earlier delivery may have been applied already."""
    is_final: Callable[[BaseException], bool] = _never
    """Whether this error ends the tries, by the transport's own decision."""

    @property
    def tenant_id(self) -> str | None:
        return self.headers.get(TENANT)

    @property
    def user_id(self) -> str | None:
        return self._told(USER, 60)

    @property
    def correlation_id(self) -> str | None:
        return self._told(CORRELATION, 120)

    def _told(self, name: str, limit: int) -> str | None:
        """Only told, never compared: what a stranger's producer wrote too long must not fail the event."""
        return self.headers.get(name, "").replace("\0", "")[:limit] or None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The step that is being performed."""

    workflow: str
    urn: str
    event: str
    source: str
    target: str
    number: int
    """0 for the event's own transition, then one more for each automatic step."""
    trigger: Trigger
    action: str = ""
    """The action or hook that runs now; a number follows where one step has several of the same name."""
    can_send: bool
    messages: list[Any]
    follow_ups: list[tuple[Any, Any]] | None = None
    """Events that are applied after this one, in their order. None: entities are stored step by step."""

    @property
    def key(self) -> str:
        """For the target of an effect: the same whenever this action runs again for this event, and for nothing else.

        ASCII, at most 200 characters.
        """
        parts = (self.workflow, self.urn, self.trigger.key, str(self.number), self.action)
        # Each part encoded, so that the slashes between them are the only ones.
        joined = "/".join(encode_segment(part) for part in parts)
        return joined if len(joined) <= _LONGEST_KEY else f"%sha256/{hashlib.sha256(joined.encode()).hexdigest()}"

    @property
    def attempt(self) -> int:
        return self.trigger.attempt or 1

    @property
    def tenant_id(self) -> str | None:
        return self.trigger.tenant_id

    @property
    def correlation_id(self) -> str | None:
        return self.trigger.correlation_id

    def enqueue(
        self, *, integration_type: str, event_type: str, payload: Any = None, **options: Unpack[OutboxFields]
    ) -> None:
        """Let a message leave if and only if this change is stored; `options` are those of `OutboxItem`.

        Raises InvalidOption where entities are not kept in a SQL ledger.
        """
        if not self.can_send:
            raise InvalidOption(
                "enqueue", "entities in a SQL ledger: only there can a message share their transaction", event_type
            )
        from bullpen.ledger import OutboxItem

        given: dict[str, Any] = {
            "source_stream_id": self.urn if len(self.urn) <= _LONGEST_STREAM else _short(self.urn),
            "source_event_id": f"{len(self.messages)}.{_short(self.key)}",
            "tenant_id": self.tenant_id,
            "user_id": self.trigger.user_id,
            "correlation_id": self.correlation_id,
            **options,
        }
        self.messages.append(
            OutboxItem(integration_type=integration_type, event_type=event_type, payload=payload, **given)
        )

    def follow_up(self, event: Any, payload: Any = None) -> None:
        """Apply another event to the same entity, after this one and its automatic steps; both are stored together.

        A later one finds the entity where the one before has left it. When one of them fails, none is stored, and all
        come again with the event. Raises InvalidOption where entities are stored step by step.
        """
        if self.follow_ups is None:
            raise InvalidOption(
                "follow_up",
                "entities in a store with change history, such as SqlEntities or RedisEntities",
                event,
            )
        self.follow_ups.append((event, payload))


_current: ContextVar[StepContext] = ContextVar("bullpen_workflow_step")


def step() -> StepContext:
    """The step whose action runs now. Raises NotConfigured outside of actions."""
    try:
        return _current.get()
    except LookupError:
        raise NotConfigured("step() is for actions of a workflow, while an event is handled") from None


@contextmanager
def performing(context: StepContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def inherited_headers() -> Mapping[str, str]:
    """Ids of the event whose action runs now: what is sent from within belongs to the same story, but is an event of
    its own."""
    context = _current.get(None)
    if context is None:
        return {}
    return {name: value for name, value in context.trigger.headers.items() if name != KEY_HEADER}


def log_fields(urn: str, trigger: Trigger) -> dict[str, Any]:
    """Names as in every log record of ours; absent ones are left out."""
    given = {
        "jobId": trigger.job_id,
        "queue": trigger.queue,
        "urn": urn,
        TENANT: trigger.tenant_id,
        USER: trigger.user_id,
        CORRELATION: trigger.correlation_id,
        "attemptsMade": None if trigger.attempt is None else trigger.attempt - 1,
    }
    return {name: value for name, value in given.items() if value is not None}


def _short(key: str) -> str:
    """Bounded, and as distinct as the key itself."""
    return hashlib.sha256(key.encode()).hexdigest()[:40]

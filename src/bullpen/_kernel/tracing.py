"""The one place where traces enter and leave.

In: a tracer that somebody installed (`bullpen.ops.tracing`), or none. Out: the carrier of the current trace, which
travels with a job in the field that Node's library uses, in the headers of a row or of a message; and spans around work
that came with one. Without a tracer nothing is made and nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal, Protocol

import msgspec

__all__ = [
    "Kind",
    "Span",
    "Tracer",
    "as_text",
    "carried_ids",
    "carrier",
    "from_text",
    "install",
    "span",
    "trace_id",
    "tracer",
]

Kind = Literal["producer", "consumer", "client", "internal"]
Carrier = Mapping[str, str]


class Span(Protocol):
    """Work that is going on."""

    def fail(self, error: BaseException | str) -> None:
        """It ended with this."""
        ...

    def note(self, name: str, value: str | int) -> None:
        """An attribute that was not known before."""
        ...


class Tracer(Protocol):
    """What makes spans."""

    def carrier(self) -> dict[str, str]:
        """The current trace as headers; empty outside of any."""
        ...

    def span(
        self, name: str, kind: Kind, parent: Carrier, attributes: Mapping[str, str | int]
    ) -> AbstractContextManager[Span]:
        """A span that is the current one while it is entered. It belongs to `parent`, else to the current one."""
        ...


class _Nothing:
    def fail(self, error: BaseException | str) -> None:
        """Nobody looks."""

    def note(self, name: str, value: str | int) -> None:
        """Nobody looks."""


_IDS: Final = ("runId", "tenantId", "userId", "correlationId")
_LONGEST_ID: Final = 200
_NOTHING = nullcontext(_Nothing())
tracer: Tracer | None = None
"""Whoever traces now. Hot paths look here themselves: a call per job would cost more than all of this."""


def install(chosen: Tracer) -> Callable[[], None]:
    """Trace from now on; returns the function that ends it."""
    global tracer
    before, tracer = tracer, chosen

    def remove() -> None:
        global tracer
        tracer = before

    return remove


def carrier() -> dict[str, str]:
    """The current trace as headers; empty when there is none."""
    return {} if tracer is None else tracer.carrier()


def span(
    name: str, kind: Kind, parent: Carrier | None = None, **attributes: str | int | None
) -> AbstractContextManager[Span]:
    """A span around work; one that does nothing when nobody traces. It fails with what is raised in it. In names of
    attributes `__` stands for a dot; those that are None are left out."""
    if tracer is None:
        return _NOTHING
    named = {key.replace("__", "."): value for key, value in attributes.items() if value is not None}
    return tracer.span(name, kind, parent or {}, named)


def sending(
    system: str, destination: str, operation: str, parent: Carrier | None = None, **attributes: str | int | None
) -> AbstractContextManager[Span]:
    """The span of whoever hands messages to a queue, with the attributes of the semantic conventions."""
    return span(
        f"{operation} {destination}",
        "producer",
        parent,
        messaging__system=system,
        messaging__operation__name=operation,
        messaging__operation__type="send",
        messaging__destination__name=destination,
        **attributes,
    )


def processing(
    system: str, destination: str, message_id: str, parent: Carrier, **attributes: str | int | None
) -> AbstractContextManager[Span]:
    """The span of whoever handles a message."""
    return span(
        f"process {destination}",
        "consumer",
        parent,
        messaging__system=system,
        messaging__operation__name="process",
        messaging__operation__type="process",
        messaging__destination__name=destination,
        messaging__message__id=message_id,
        **attributes,
    )


def as_text(headers: Carrier) -> str | None:
    """As one field of a job: JSON, as Node's library writes it; None when there is nothing to carry."""
    return msgspec.json.encode(headers).decode() if headers else None


def from_text(text: str | None) -> dict[str, str]:
    """What anybody wrote there; empty when it is no object of texts."""
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, str])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return {}


def trace_id(headers: Carrier) -> str | None:
    """The id of the trace that is carried, by the W3C's header; None when there is none."""
    parts = headers.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == 32 else None


def carried_ids(data: object) -> dict[str, str]:
    """Ids that travel in the data of a job or in the headers of a message, under the names of log records."""
    if not isinstance(data, Mapping):
        return {}
    return {name: value for name in _IDS if isinstance(value := data.get(name), str) and len(value) <= _LONGEST_ID}

"""Traces for OpenTelemetry: from a producer through queues, workers, rows and messages to the target.

In: the tracer provider of the program (the global one unless given). Out: spans named and attributed as Node's library
does, so that one trace joins both languages, and with the attributes of OpenTelemetry's conventions for messaging.
Needs the extra `tracing`. Elsewhere: where spans begin (`bullpen._kernel.tracing` and its callers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from bullpen import _version
from bullpen._kernel import tracing
from bullpen._kernel.outcome import describe
from bullpen._kernel.remote import RemoteError, qualified
from bullpen._kernel.scrub import scrub
from bullpen.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry import trace

__all__ = ["install_tracing"]

_KINDS: Final = {"producer": "PRODUCER", "consumer": "CONSUMER", "client": "CLIENT", "internal": "INTERNAL"}


def install_tracing(provider: trace.TracerProvider | None = None) -> Callable[[], None]:
    """Trace from now on with the program's OpenTelemetry set-up; returns the function that ends it."""
    try:
        from opentelemetry import trace
    except ImportError:
        raise MissingExtra("tracing", "tracing with OpenTelemetry") from None
    return tracing.install(_OpenTelemetry(trace.get_tracer("bullpen", _version.__version__, provider)))


class _OpenTelemetry:
    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def carrier(self) -> dict[str, str]:
        from opentelemetry import propagate

        headers: dict[str, str] = {}
        propagate.inject(headers)
        return headers

    @contextmanager
    def span(
        self, name: str, kind: tracing.Kind, parent: Mapping[str, str], attributes: Mapping[str, str | int]
    ) -> Iterator[tracing.Span]:
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        context = propagate.extract(parent) if parent else None
        # What is raised is recorded here and not by the library, which would write secrets as they are.
        with self._tracer.start_as_current_span(
            name,
            context=context,
            kind=SpanKind[_KINDS[kind]],
            attributes=dict(attributes),
            record_exception=False,
            set_status_on_exception=False,
        ) as opened:
            span = _Span(opened)
            try:
                yield span
            except Exception as error:
                span.fail(error)
                raise


class _Span:
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def note(self, name: str, value: str | int) -> None:
        self._span.set_attribute(name, value)

    def fail(self, error: BaseException | str) -> None:
        from opentelemetry.trace import Status, StatusCode

        if isinstance(error, str):
            self._span.set_status(Status(StatusCode.ERROR, scrub(error)))
            return
        kind = error.kind if isinstance(error, RemoteError) else qualified(type(error))
        kind = kind.removeprefix("builtins.")
        reason, stack = describe(error)
        self._span.set_attribute("error.type", kind)
        self._span.add_event(
            "exception", {"exception.type": kind, "exception.message": reason, "exception.stacktrace": stack}
        )
        self._span.set_status(Status(StatusCode.ERROR, scrub(f"{kind.rpartition('.')[2]}: {reason}")))

"""What the parts of `Queue` have in common.

`Queue` adds jobs; reading (`browse`), maintaining it (`maintain`) and limits (`limits`) change for other reasons
and are classes of their own, which `Queue` inherits from. This is what they may rely on.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from bullpen._kernel import tracing
from bullpen._kernel.ids import is_encodable
from bullpen.errors import InvalidOption
from bullpen.queue.actions import QueueActions
from bullpen.queue.job import Job
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import JobOptions

if TYPE_CHECKING:
    from bullpen.queue.arguments import AddArguments
    from bullpen.queue.durability import Durability
    from bullpen.queue.flow_entries import SendsFlows

P = ParamSpec("P")
R = TypeVar("R")


class QueuePart:
    """Reach the server as `Queue` does."""

    _keys: QueueKeys
    _dead_letter_keys: QueueKeys
    _clock_offset_ms: int
    _defaults: JobOptions
    _durability: Durability
    _deadline_s: float

    def _ready(self) -> QueueActions:
        """The queue's actions in the running loop. Raises QueueClosed after close."""
        raise NotImplementedError

    async def add(self, name: str, data: Any = None, **options: Unpack[AddArguments]) -> Job:
        """Store one job and return it."""
        raise NotImplementedError

    def _actions_of(self, keys: QueueKeys) -> QueueActions:
        """Those of another queue on the same connection, for jobs that a flow has there."""
        raise NotImplementedError

    def _flow_sender(self) -> SendsFlows:
        raise NotImplementedError


Part = TypeVar("Part", bound=QueuePart)


def traced(
    operation: str, kind: tracing.Kind = "internal"
) -> Callable[
    [Callable[Concatenate[Part, P], Coroutine[Any, Any, R]]], Callable[Concatenate[Part, P], Coroutine[Any, Any, R]]
]:
    """A method that changes a queue has a span of its own, named as in Node's library."""

    def wrap(
        method: Callable[Concatenate[Part, P], Coroutine[Any, Any, R]],
    ) -> Callable[Concatenate[Part, P], Coroutine[Any, Any, R]]:
        @wraps(method)
        async def call(self: Part, /, *args: P.args, **kwargs: P.kwargs) -> R:
            name = self._keys.name
            with tracing.span(
                f"{operation} {name}", kind, bullmq__queue__name=name, bullmq__queue__operation=operation
            ):
                return await method(self, *args, **kwargs)

        return call

    return wrap


def id_of(job: str | Job) -> str:
    """The id of a job that was given by its id or as a Job."""
    if isinstance(job, Job):
        return job.id
    if not isinstance(job, str) or not job or not is_encodable(job):
        raise InvalidOption("job", "a Job or the id of one", job)
    return job


def literally(text: str) -> str:
    """Text with the special characters of MATCH patterns escaped."""
    return "".join(f"\\{character}" if character in "*?[]^\\" else character for character in text)

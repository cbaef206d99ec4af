"""Deliver a message as a job of a BullMQ queue: `bullmq:<queue>`.

In: a message whose headers may hold job options. Out: the job is in its queue, with an id that makes adding it again
harmless: the one that was asked for, else the message's own. Its data are the payload; ids and headers of the message
are its `meta`. A Redis that is away counts as no attempt. Elsewhere:
storing such messages (`bullpen.outbox`), the queue (`bullpen.queue`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from bullpen.errors import BullpenError, InvalidOption, PayloadTooLarge, TooFewReplicas
from bullpen.ports.channel import Accepted, ChannelHealth, Message, NotTried, Refused, SendResult, WhenUnknown
from bullpen.queue import Added, Queue
from bullpen.queue.codec import Codec
from bullpen.redis import Connection
from bullpen.wire.deferred import options_from_json
from bullpen.wire.options import JobMeta

__all__ = ["QueueChannel"]

_JOB_OPTIONS: Final = "jobOptions"
_ADD_DEADLINE_MS: Final = 5_000
_REDIS_RETRY_MS: Final = 2_000


class QueueChannel:
    """Adds jobs to any queue of one Redis; the target of a message is the queue's name."""

    when_unknown = WhenUnknown.RESEND
    """A job with the same id is not added twice."""

    def __init__(
        self,
        connection: Connection,
        *,
        prefix: str | None = None,
        deadline_ms: int = _ADD_DEADLINE_MS,
        codec: Codec | None = None,
    ) -> None:
        self._connection, self._prefix, self._codec = connection, prefix, codec
        self._deadline_ms = deadline_ms
        self._queues: dict[str, Queue] = {}

    async def send(self, message: Message) -> SendResult:
        try:
            job = await self._queue(message.target).add(message.event_type, message.payload, **_options(message))
        except TooFewReplicas as error:  # it is the server that has to change, and the message is still owed
            return NotTried(str(error), _REDIS_RETRY_MS)
        except (InvalidOption, PayloadTooLarge) as error:
            return Refused(str(error), "NO_SUCH_JOB")
        except BullpenError as error:
            # Away, full, or nobody knows: with its own id the job can be added again without harm.
            return NotTried(str(error), _REDIS_RETRY_MS)
        return Accepted(f"job {job.id}" if job.added is Added.CREATED else f"job {job.id} was there already")

    async def check(self) -> ChannelHealth:
        try:
            (await self._connection.open()).close()
        except BullpenError as error:
            return ChannelHealth(False, str(error))
        return ChannelHealth(True)

    async def aclose(self) -> None:
        for queue in self._queues.values():
            await queue.close()

    def _queue(self, name: str) -> Queue:
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = Queue(
                name,
                connection=self._connection,
                prefix=self._prefix,
                add_deadline=self._deadline_ms,
                codec=self._codec,
            )
        return queue


def _options(message: Message) -> dict[str, Any]:
    """The options that were stored, and what makes a repeated add the same job with the same idempotency key."""
    stored = message.headers.get(_JOB_OPTIONS)
    options = options_from_json(stored if isinstance(stored, dict) else {}, waited_ms=message.waited_ms)
    options.setdefault("job_id", message.id)
    options.setdefault("timestamp", message.created_ms)
    own = _meta(message)
    given = options.setdefault("meta", own)
    if own.tenant_id is not None:
        # The row's word: row-level security has checked it, and nobody has checked the options.
        options["meta"] = replace(given, tenant_id=own.tenant_id)
    return options


def _meta(message: Message) -> JobMeta:
    """What the job's data do not tell of the message, because they are the payload alone."""
    return JobMeta(
        tenant_id=message.tenant_id,
        user_id=message.user_id,
        correlation_id=message.correlation_id,
        source_stream_id=message.source_stream_id,
        source_event_id=message.source_event_id,
        headers={name: value for name, value in message.headers.items() if name != _JOB_OPTIONS},
    )

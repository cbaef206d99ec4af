"""Short operations on one queue or one of its jobs, each one call to the server.

In: the queue's keys. Out: decoded values. Used by queues and by the jobs that workers hand to handlers. How the server
is reached is left open: `AsyncActions` does it on an event loop, `BlockingActions` (`blocking`) in a plain thread,
where the same coroutines run without ever being suspended. So nothing here, nor in what is built on it, may await
anything else than these.
Elsewhere: adding (`queue`), taking and settling (`bullpen.worker.exchange`), waiting for results (`results`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from bullpen._kernel import json
from bullpen._kernel.clock import ServerClock
from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.patience import Patience
from bullpen.errors import ConnectionLost, JobNotFound, ServerRefused
from bullpen.queue.cancel import Cancelled, cancel_call, check_reason, failure_of, read_reply
from bullpen.queue.changes import JobChanges
from bullpen.queue.children import PARTS, ChildrenCounts, read_part, remove_pending_children, text
from bullpen.queue.codec import Codec, Sealer, owner_commands
from bullpen.queue.job import Mark
from bullpen.queue.lists import seeking
from bullpen.queue.results import ResultListener
from bullpen.queue.states import JobState
from bullpen.redis.calls import until
from bullpen.redis.client import Door
from bullpen.wire.keys import QueueKeys
from bullpen.wire.options import WireOptions
from bullpen.wire.records import JobRecord, check_log_line
from bullpen.wire.scripts import SCRIPTS

T = TypeVar("T")

RESULT_PATIENCE_S: Final = 60.0
"""How long a wait for a result survives an unreachable server: it has a timeout of its own, and the job continues."""
_STATES = {state.value.encode(): state for state in JobState}


async def repeat_read(door: Door, read: Callable[[], Awaitable[T]], *, within_s: float) -> T:
    """Repeat something that changes nothing, or nothing more when repeated, until it is answered or time is up."""
    patience = Patience(within_s=within_s)
    # An open wire has a limit of its own, and nearly all reads need no other.
    is_bounded = within_s >= door.connection.command_timeout_s and door.open_wire is not None
    while True:
        try:
            if is_bounded:
                is_bounded = False
                return await read()
            async with until(patience.give_up_at):
                return await read()
        except ConnectionLost:
            if door.closed or not await patience.pause(door.reconnect_wait_s()):
                raise


def is_wrong_type(error: Exception) -> bool:
    """A key is not what its name says: no BullMQ client wrote it."""
    return isinstance(error, ServerRefused) and "WRONGTYPE" in str(error)


class QueueActions(ABC):
    """The operations that a Queue and a running Job share."""

    def __init__(
        self,
        keys: QueueKeys,
        codec: Codec | None = None,
        *,
        dead_letter_keys: QueueKeys | None = None,
        clock_offset_ms: int = 0,
    ) -> None:
        self._dead_letter_keys, self._clock_offset_ms = dead_letter_keys, clock_offset_ms
        self.sealer = None if codec is None else self._make_sealer(codec, keys)
        """Seals and opens payloads, where a codec is configured."""
        self._keys = keys

    # ---- reaching the server ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def clock(self) -> ServerClock:
        """The server's clock as this connection knows it."""

    @abstractmethod
    async def evaluate_noting_repeats(
        self, script: str, keys: Sequence[str | bytes], args: list[Any], *, within_s: float | None = None
    ) -> tuple[Any, bool]:
        """Run a script that changes nothing more when it is repeated; also whether it was sent more than once, so that
        an earlier copy may have done the work. `within_s`: how long to wait for an unreachable server."""

    @abstractmethod
    async def evaluate_once(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any:
        """Run a script that is not repeated when its reply is lost."""

    @abstractmethod
    async def converse(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Several reads in one write. Errors among their replies are returned in place."""

    @abstractmethod
    async def wait_result(self, job_id: str, timeout: int | timedelta | None, mark: Mark | None = None) -> Any:
        """Wait for the end of a job; see `Job.result`."""

    @abstractmethod
    async def together(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """What each returns, in order; at the same time where that is possible."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None: ...

    def _make_sealer(self, codec: Codec, keys: QueueKeys) -> Sealer:
        return Sealer(codec, keys, self._object_owner)

    async def evaluate(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any:
        return (await self.evaluate_noting_repeats(script, keys, args))[0]

    async def command(self, *command: str | bytes | int) -> Any:
        (reply,) = await self.commands([command])
        return reply

    async def commands(
        self,
        commands: Sequence[tuple[str | bytes | int, ...]],
        *,
        or_none: Callable[[Exception], bool] | None = None,
    ) -> list[Any]:
        """Several reads in one write. Raises the first error among their replies, except those that `or_none` names:
        they are None."""
        replies = await self.converse(commands)
        for place, reply in enumerate(replies):
            if isinstance(reply, Exception):
                if or_none is None or not or_none(reply):
                    raise reply
                replies[place] = None
        return replies

    # ---- what is asked ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._keys.name

    @property
    def changes(self) -> JobChanges:
        """What changes jobs of the queue."""
        keys = self._keys
        letters = self._dead_letter_keys or QueueKeys(keys.prefix, keys.dead_letter_name())
        return JobChanges(self, keys, letters, self._clock_offset_ms)

    @property
    def queue_key(self) -> str:
        """`<prefix>:<queue>`."""
        return self._keys.base[:-1]

    async def update_progress(self, job_id: str, progress: bytes) -> None:
        keys = self._keys
        reply = await self.evaluate("update_progress", [keys.job(job_id), keys.meta, keys.events], [job_id, progress])
        self._must_exist(reply, job_id)

    async def add_log(self, job_id: str, line: str, keep: int) -> int:
        keys = self._keys
        # Not repeated after a lost reply: the line may be there already, and a log with the line twice misleads.
        reply = await self.evaluate_once("add_log", [keys.job(job_id), keys.logs(job_id)], [check_log_line(line), keep])
        self._must_exist(reply, job_id)
        return int(reply)

    async def _object_owner(self) -> str:
        """Whose objects in a store are this queue's. Read each time: the queue may have been deleted meanwhile."""
        return str((await self.commands(owner_commands(self._keys)))[1].decode())

    async def open(self, record: JobRecord) -> JobRecord:
        """The job with its payload opened, where a codec is configured."""
        return record if self.sealer is None else await self.sealer.open_record(record)

    async def update_data(self, job_id: str, data: bytes) -> None:
        if self.sealer is not None:
            data = await self.sealer.seal(data)
            json.check_payload_size(len(data))
        self._must_exist(await self.evaluate("update_data", [self._keys.job(job_id)], [data]), job_id)

    async def read(self, job_id: str) -> tuple[JobState | None, JobRecord] | None:
        """State and record of one instant, or None. The state is None in a line so long that it must be sought."""
        reply = await self.evaluate("read_job", [self._keys.job(job_id)], [self._keys.base, job_id])
        if not reply[1]:
            return None
        return _STATES.get(reply[0]), JobRecord.parse(job_id, reply[1])

    async def state_of(self, job_id: str) -> JobState:
        found = await self.read(job_id)
        if found is None:
            return JobState.UNKNOWN
        return found[0] or await self._seek(job_id)

    async def _seek(self, job_id: str) -> JobState:
        search = seeking(self._keys, job_id)
        call = next(search)
        while True:
            reply = await self.evaluate("seek", *call)
            try:
                call = search.send(reply)
            except StopIteration as end:
                return JobState(end.value)

    async def cancel(self, job_id: str, reason: str | None, *, clock_offset_ms: int = 0) -> Cancelled:
        """End the job, or ask its worker to. Raises JobNotFound, or JobStateConflict when it has finished."""
        said = check_reason(reason)
        raw_opts = await self.command("HGET", self._keys.job(job_id), "opts")
        call = cancel_call(self._keys, job_id, said, WireOptions.parse(raw_opts or b"{}"), clock_offset_ms)
        reply, was_repeated = await self.evaluate_noting_repeats("cancel", *call)
        return read_reply(self.name, job_id, reply, was_repeated=was_repeated)

    async def read_logs(
        self, job_id: str, start: int = 0, count: int | None = None, *, newest_first: bool = False
    ) -> list[str]:
        check_int("start", start, minimum=0)
        end = -1 if count is None else start + check_int("count", count, minimum=1) - 1
        bounds = (start, end) if not newest_first else (0 if count is None else -end - 1, -start - 1)
        lines = await self.command("LRANGE", self._keys.logs(job_id), *bounds)
        found = [line.decode("utf-8", "replace") for line in lines]
        return found[::-1] if newest_first else found

    async def clear_logs(self, job_id: str, keep: int) -> None:
        logs = self._keys.logs(job_id)
        await (self.command("LTRIM", logs, -keep, -1) if keep else self.command("DEL", logs))

    async def count_children(self, job_id: str) -> ChildrenCounts:
        job_key = self._keys.job(job_id)
        exists, *counts = await self.commands(
            [("EXISTS", job_key), *((part.size, f"{job_key}:{part.suffix}") for part in PARTS.values())]
        )
        if not exists:
            raise JobNotFound(self.name, job_id)
        return ChildrenCounts(*counts)

    def open_children(self, kind: str, flat: list[bytes]) -> list[bytes]:
        """Children of one kind as they were read, with their return values opened where a codec is configured."""
        sealer = self.sealer
        if sealer is None or kind != "processed":
            return flat
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [part for key, raw in pairs for part in (key, sealer.open_result_bytes(raw, text(key)))]

    async def read_children(self, job_id: str, kind: str) -> list[bytes]:
        """Children of one kind as they are stored; with each that failed its parent, why it did."""
        found = await read_part(self, self._keys.job(job_id), kind)
        if kind != "failed":
            return self.open_children(kind, found)
        keys = [text(raw) for raw in found[::2]]
        reasons = await self.commands([("HGET", key, "failedReason") for key in keys], or_none=is_wrong_type)
        return [part for key, reason in zip(found[::2], reasons, strict=True) for part in (key, reason or b"")]

    async def leave_parent(self, job_id: str) -> bool:
        reply = await self.evaluate("leave_parent", [self._keys.job(job_id)], [0])
        self._must_exist(reply, job_id)
        return bool(reply)

    async def remove_deduplication(self, job_id: str, deduplication_id: str) -> bool:
        """Free a deduplication id, if this job owns it."""
        key = self._keys.deduplication(deduplication_id)
        return bool(await self.evaluate("release_lock", [key], [job_id]))

    async def remove_unprocessed_children(self, job_id: str) -> int:
        return await remove_pending_children(self, self._keys.job(job_id))

    async def read_result(self, job_id: str, within_s: float = RESULT_PATIENCE_S) -> tuple[bool, Any]:
        """(finished?, value). Raises JobFailed or JobNotFound."""
        names = [self._keys.job(job_id), self._keys.completed, self._keys.failed]
        reply, _ = await self.evaluate_noting_repeats("read_result", names, [job_id], within_s=within_s)
        match reply[0]:
            case b"completed":
                value = json.decode(reply[1], what="return value")
                return True, value if self.sealer is None else self.sealer.open_result(value)
            case b"failed":
                raise failure_of(self.name, job_id, *reply[1:])
            case b"pending":
                return False, None
        raise JobNotFound(self.name, job_id)

    def _must_exist(self, reply: int, job_id: str) -> None:
        if reply == -1:
            raise JobNotFound(self.name, job_id)


class AsyncActions(QueueActions):
    """On an event loop, through a door."""

    def __init__(
        self,
        door: Door,
        keys: QueueKeys,
        *,
        deadline_s: float,
        codec: Codec | None = None,
        dead_letter_keys: QueueKeys | None = None,
        clock_offset_ms: int = 0,
    ) -> None:
        super().__init__(keys, codec, dead_letter_keys=dead_letter_keys, clock_offset_ms=clock_offset_ms)
        self._door = door
        self._deadline_s = deadline_s
        self.results: ResultListener | None = None
        """Made by the first wait for a result."""

    @property
    def clock(self) -> ServerClock:
        return self._door.connection.clock

    async def evaluate(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any:
        return await repeat_read(
            self._door, lambda: self._door.evaluate(SCRIPTS[script], keys, args), within_s=self._deadline_s
        )

    async def evaluate_noting_repeats(
        self, script: str, keys: Sequence[str | bytes], args: list[Any], *, within_s: float | None = None
    ) -> tuple[Any, bool]:
        times_sent = 0

        async def send() -> Any:
            nonlocal times_sent
            times_sent += 1
            return await self._door.evaluate(SCRIPTS[script], keys, args)

        reply = await repeat_read(self._door, send, within_s=self._deadline_s if within_s is None else within_s)
        return reply, times_sent > 1

    async def evaluate_once(self, script: str, keys: Sequence[str | bytes], args: list[Any]) -> Any:
        return await self._door.evaluate(SCRIPTS[script], keys, args)

    async def command(self, *command: str | bytes | int) -> Any:
        return await repeat_read(self._door, lambda: self._door.call(*command), within_s=self._deadline_s)

    async def converse(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        return await repeat_read(self._door, lambda: self._door.call_many(commands), within_s=self._deadline_s)

    async def together(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return await asyncio.gather(*work)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @property
    def heard(self) -> int | None:
        """How many finished jobs were seen so far; None while no caller listens."""
        return None if self.results is None else self.results.heard

    def wait_result(
        self, job_id: str, timeout: int | timedelta | None, mark: Mark | None = None
    ) -> Coroutine[Any, Any, Any]:
        timeout_ms = None if timeout is None else to_ms("timeout", timeout)
        if self.results is None:
            self.results = ResultListener(self._door.connection, self._keys, self)
        return self.results.wait(job_id, timeout_ms, mark)

    async def aclose(self) -> None:
        if self.results is not None:
            await self.results.aclose()

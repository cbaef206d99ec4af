"""Numbered script calls: repeating one after a lost reply is always safe.

In: a script and its arguments. Out: its reply, however often it had to be sent.
Elsewhere: remembering the last number with its answer (`bullpen.wire.lua.add`, `bullpen.wire.lua.exchange`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NamedTuple

from bullpen._kernel.ids import new_token
from bullpen._kernel.patience import Patience
from bullpen._kernel.tuples import maker
from bullpen.errors import ConnectionLost, OutcomeUnknown, ServerRefused
from bullpen.redis.client import Door
from bullpen.redis.discovery import ServerUnavailable
from bullpen.redis.socket import Receiver, ReplyError, Sending, Wire, pack
from bullpen.wire.scripts import Script

OBSERVE_EVERY_S: Final = 0.1
"""How often the server's clock is learned from replies: a clock does not change from one call to the next."""

_LAST_TRY_S: Final = 0.1

MakeArguments = Callable[[int], list[Any]]
"""The arguments of a call, from its number."""
Carry = Callable[[Sending], Wire]
"""Writes a call together with something else, and tells where to."""


class Flight(NamedTuple):
    """A call that was begun."""

    keys: Sequence[str | bytes]
    make_args: MakeArguments
    sent_at: float
    wire: Wire | None
    """Where it was written to; None when no wire was open."""


_new_flight = maker(Flight)


class Caller:
    """A numbered stream of calls to one script, one call in flight.

    The script keeps the last number with its answer. A call whose reply was lost is sent again with the same number
    and gets the same answer; a late copy of an old call is refused. So repeating is always safe.
    """

    def __init__(self, door: Door, script: Script, caller_id: str | None = None) -> None:
        self.id = caller_id or new_token()
        self._door = door
        self._script = script
        self._within_s = door.connection.command_timeout_s
        self._number = 0

    async def call(
        self,
        keys: Sequence[str | bytes],
        make_args: MakeArguments,
        *,
        queue: str,
        deadline_s: float | None,
    ) -> Any:
        """Send the next call until it is answered.

        After `deadline_s` (None: never) raises ConnectionLost if it cannot have been executed, else OutcomeUnknown.
        """
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        flight = self.send(keys, make_args, reply)
        error: BaseException | None = None
        if flight.wire is not None:
            try:
                return await reply
            except (ReplyError, ConnectionLost) as lost:
                error = lost
        return await self.recover(flight, error, queue=queue, deadline_s=deadline_s)

    def send(
        self, keys: Sequence[str | bytes], make_args: MakeArguments, receiver: Receiver, carry: Carry | None = None
    ) -> Flight:
        """The next call, written at once if a wire is open, or by what carries it. Without a wire, or when the receiver
        gets an error, it must be recovered (`recover`) before the one after it."""
        sent_at = time.monotonic()
        self._number += 1
        wire: Wire | None
        if carry is not None:
            wire = carry((receiver, pack(self._command(keys, make_args)), self._within_s))
        elif (wire := self._door.open_wire) is not None:
            wire.send_to(receiver, pack(self._command(keys, make_args)), within_s=self._within_s)
        return _new_flight((keys, make_args, sent_at, wire))

    def _command(self, keys: Sequence[str | bytes], make_args: MakeArguments) -> tuple[Any, ...]:
        return ("EVALSHA", self._script.sha1, len(keys), *keys, *make_args(self._number))

    async def recover(
        self, flight: Flight, error: BaseException | None, *, queue: str, deadline_s: float | None
    ) -> Any:
        """The reply to a call that was not sent, or ended with this error, however often it must be sent again. Raises
        as `call`."""
        may_have_run = False
        if error is not None and flight.wire is not None:
            may_have_run = await self.may_have_run(error, flight.wire)
        return await self.repeat(
            flight.keys,
            flight.make_args,
            queue=queue,
            deadline_s=deadline_s,
            since=flight.sent_at,
            may_have_run=may_have_run,
        )

    @property
    def number(self) -> int:
        """Of the latest call."""
        return self._number

    def next_number(self) -> int:
        """Begin a new call."""
        self._number += 1
        return self._number

    async def may_have_run(self, error: BaseException, wire: Wire) -> bool:
        """Whether a call that ended with this error may have been executed. Raises what the server refused it with."""
        if not isinstance(error, ReplyError):
            return True
        if str(error).startswith("NOSCRIPT"):
            return False
        refusal = await self._door.script_refusal(error, wire)
        if not isinstance(refusal, ServerUnavailable):
            raise refusal
        return False

    async def repeat(
        self,
        keys: Sequence[str | bytes],
        make_args: MakeArguments,
        *,
        queue: str,
        deadline_s: float | None,
        since: float | None = None,
        may_have_run: bool = True,
    ) -> Any:
        """Send the call with the present number, again and again until it is answered, or `deadline_s` after `since`
        (now). Connecting and waiting for the answer end then, too; but a call whose time is up when it begins is tried
        once, since the server may be back."""
        args = make_args(self._number)
        give_up_at = None if deadline_s is None else (time.monotonic() if since is None else since) + deadline_s
        patience = Patience(until=give_up_at, last_try=True)
        while True:
            opened = False
            try:
                async with until(give_up_at):
                    await self._door.wire()
                    opened = True
                    try:
                        return await self._door.evaluate(self._script, keys, args)
                    except ServerUnavailable:
                        raise  # the server said that it did nothing
                    except (ConnectionLost, asyncio.CancelledError):
                        may_have_run = True
                        raise
            except (ConnectionLost, ServerRefused) as error:
                if isinstance(error, ServerRefused) and (opened or deadline_s is not None):
                    raise
                # A server that refuses to let us in (its password was changed) cannot have executed anything. Who
                # waits for ever, waits for that too: outcomes of jobs are worth more than a quick error.
                if self._door.closed:
                    raise
                if not await patience.pause(self._door.reconnect_wait_s()):
                    if not may_have_run:
                        raise ConnectionLost(f"queue {queue!r}: nothing was written; {error}") from error
                    raise outcome_unknown(queue, deadline_s or 0) from error


def outcome_unknown(queue: str, deadline_s: float, job_id: str | None = None) -> OutcomeUnknown:
    """The error of a call that may have been executed. `job_id`: of its only job, if the caller gave it one."""
    why = f"queue {queue!r}: no answer within {deadline_s:g} s, the outcome is unknown"
    if job_id:
        text = f"{why}; look up job {job_id!r} before adding it again"
    else:
        text = f"{why}; it may be stored. Give jobs a `job_id`: then repeating an add is safe"
    return OutcomeUnknown(text, queue=queue, job_id=job_id or None)


@contextlib.asynccontextmanager
async def until(give_up_at: float | None) -> AsyncIterator[None]:
    """Raises ConnectionLost at that time (`time.monotonic`), or a moment from now when it has passed already."""
    left_s = None if give_up_at is None else max(_LAST_TRY_S, give_up_at - time.monotonic())
    try:
        async with asyncio.timeout(left_s) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise ConnectionLost("the server did not answer in time") from error

"""What a handler gets: the run it works on, and steps that are never paid twice.

In: a run whose attempt has begun. Out: results of steps, stored under the run's fence; progress; keys for providers. A
step that is done is not done again, by whichever attempt. A crash between the effect and its storing repeats the step
with the same key, so the provider must take the key: that is the most anybody can promise.
Elsewhere: beginning and ending attempts (`processor`), the rows (`bullpen.ledger.runs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar, overload

from bullpen._kernel import json, telemetry
from bullpen._kernel.duration import is_text
from bullpen._kernel.execute import call_in_thread, is_async
from bullpen._kernel.ids import is_encodable
from bullpen._kernel.patience import Patience
from bullpen.errors import ConnectionLost, DatabaseUnavailable, DelayJob, InvalidOption, PermanentError
from bullpen.ledger import RunRow, TenantRuns, TransactionManager
from bullpen.queue import Job, Queue
from bullpen.runs.handlers import MAX_RESULT_BYTES
from bullpen.runs.payload import RunPayload
from bullpen.runs.providers import ProviderLimits
from bullpen.wire.records import check_progress

__all__ = ["Run", "RunInterrupted", "encode_result"]

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0


class RunInterrupted(Exception):
    """The run is no longer this attempt's: it was cancelled, or another worker has taken it over. Stop working."""


class Run:
    """One attempt at a run, as the handler sees it."""

    def __init__(
        self,
        transactions: TransactionManager,
        row: RunRow,
        payload: RunPayload,
        job: Job,
        *,
        done_steps: Mapping[str, int] | None = None,
        queue: Queue | None = None,
        providers: ProviderLimits | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self._transactions, self._row = transactions, row
        self.payload = payload
        """What the run was submitted with."""
        self.job = job
        self._done, self._used = done_steps or {}, set[str]()  # names with their prices
        self._spent = sum(self._done.values())
        self._queue, self._providers = queue, providers
        self._patience_s = patience_s

    @property
    def id(self) -> str:
        return self._row.id

    @property
    def tenant_id(self) -> str:
        return self._row.tenant_id

    @property
    def is_test_run(self) -> bool:
        """True when nothing may be charged: call the provider's sandbox, or no provider."""
        return self._row.is_test_run

    @property
    def attempt(self) -> int:
        """1 in the first attempt."""
        return self._row.attempts + 1

    @property
    def fence(self) -> int:
        """Grows with every attempt: store it with writes of your own and refuse smaller ones."""
        return self._row.fence

    def key(self, step: str) -> str:
        """The same for every attempt at this step, also after a redrive, and for no other: give it to the provider."""
        return f"{self.id}/{step}"

    @overload
    async def step(self, name: str, work: Callable[[str], Awaitable[T]], *, price: int = 0) -> T: ...
    @overload
    async def step(self, name: str, work: Callable[[str], T], *, price: int = 0) -> T: ...
    async def step(self, name: str, work: Callable[[str], Any], *, price: int = 0) -> Any:
        """Do `work` once: a later attempt gets the stored result and does not call it.

            receipt = await run.step("charge", lambda key: payments.charge(100, idempotency_key=key))

        `work` may be `async def`, a plain `def`, which runs in a thread, or a lambda, which runs on the event loop.
        `name` is unique in a run; the result is JSON of at most 1 MiB. `price` is the part of the run's cost that is
        spent when the result is stored, whatever happens to the run afterwards. Raises PermanentError for what no other
        attempt can do better, before `work` is called where that is possible: the run fails at once. Raises
        RunInterrupted when the run is no longer ours: before `work` is called when another worker has the job's lock;
        afterwards the result is not stored, and the next attempt asks the provider again with the same key.
        """
        _check_step(name, work)
        if name in self._used:
            raise PermanentError(f"step {name!r}: expected a name of its own for each step of a run")
        self._used.add(name)
        if name in self._done:
            done, result = await self.persist(lambda runs: runs.step_result(self.id, name))
            if done:
                return result
        self._spend(name, price)
        await self._confirm_lock(name)
        telemetry.emit("runs.step_begins", run_id=self.id, step=name)
        result_json = encode_result(await _call(work, self.key(name)), f"result of step {name!r}")
        telemetry.emit("runs.step_done", run_id=self.id, step=name)
        kept = await self.change(lambda runs: runs.save_step(self.id, name, self.fence, result_json, price=price))
        if not kept:
            raise RunInterrupted(f"step {name!r} of run {self.id} ended after the run had been cancelled or taken over")
        telemetry.emit("runs.step_kept", run_id=self.id, step=name)
        return json.decode(result_json)  # the same in this attempt and in later ones

    def _spend(self, step: str, price: int) -> None:
        """Count the price before the call: of steps that run side by side no two count on the same credits."""
        if not isinstance(price, int) or isinstance(price, bool) or price < 0:
            raise PermanentError(f"step {step!r}: expected a price of 0 or more credits, got {price!r:.200}")
        left = self._row.cost - self._spent
        if price > left and not self.is_test_run:
            raise PermanentError(
                f"step {step!r} has the price {price}, but only {left} of the run's cost {self._row.cost} are left: "
                "submit runs with the sum of the prices of their steps"
            )
        self._spent += price

    async def _confirm_lock(self, step: str) -> None:
        """Return when the job's lock is ours; raise RunInterrupted when another take has it.

        A process that was frozen for longer than the lock wakes up here and does not know it. A lock that ran out is
        taken again or given up by whoever renews locks, who then cancels us. While the server is away nobody can tell,
        and nothing is paid for.
        """
        while self._queue is not None:
            with contextlib.suppress(ConnectionLost):
                holder = await self._queue.lock_holder(self.job.id)
                if holder == self.job.token:
                    return
                if holder is not None:
                    raise RunInterrupted(f"step {step!r} of run {self.id} was not started: another worker has its job")
            await asyncio.sleep(_FIRST_PAUSE_S)

    async def progress(self, value: int | float | str | bool | dict[str, Any]) -> None:
        """Show how far it is: 0 to 100, or any JSON object of at most 1 MiB. Counts as a sign of life. Raises
        RunInterrupted; PermanentError for what cannot be stored."""
        text = _encode_progress(value)
        if not await self.change(lambda runs: runs.beat(self.id, self.fence, progress_json=text)):
            raise RunInterrupted(f"run {self.id} was cancelled or taken over")

    @asynccontextmanager
    async def provider(self, name: str) -> AsyncIterator[None]:
        """Around each call of a provider: waits its turn under `rate_limit_rpm` and stops while it is known to be down.

        When there is no room the run goes back to the queue until there is; no attempt is counted.
        """
        if self._providers is None:
            raise InvalidOption("provider", "a configured provider", name)
        async with self._providers.call(name):
            yield

    async def persist(self, fn: Callable[[TenantRuns], Awaitable[T]]) -> T:
        """Write or read the ledger, patiently: work that is done and paid must not be lost to a database restart.

        Raises DelayJob when it stays away: the run comes back later with no attempt counted.
        """
        return await self._patiently(self._transactions.run, fn)

    async def change(self, fn: Callable[[TenantRuns], Awaitable[T]]) -> T:
        """As `persist`, for one change."""
        return await self._patiently(self._transactions.run_alone, fn)

    async def _patiently(
        self,
        run: Callable[[str, Callable[[TenantRuns], Awaitable[T]]], Awaitable[T]],
        fn: Callable[[TenantRuns], Awaitable[T]],
    ) -> T:
        patience = Patience(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, within_s=self._patience_s)
        while True:
            try:
                return await run(self.tenant_id, fn)
            except DatabaseUnavailable as error:
                if not await patience.pause():
                    raise DelayJob(int(_LONGEST_PAUSE_S * 1000), "the database does not answer") from error


def _check_step(name: str, work: object) -> None:
    """Refuse what would fail in every attempt, before anything is called."""
    if not is_text(name) or len(name) > 120 or "\0" in name or not is_encodable(name):
        raise PermanentError(f"step {name!r:.200}: expected a name of 1 to 120 characters, without NUL")
    wanted = f"step {name!r}: a function of one argument, the key, is expected"
    if inspect.iscoroutine(work):
        work.close()  # it will never run, and a warning about that would come from nowhere
        raise PermanentError(f"{wanted}, not a coroutine that was called")
    if not callable(work):
        raise PermanentError(f"{wanted}, not {type(work).__name__}")
    try:
        inspect.signature(work).bind("key")
    except TypeError as error:
        raise PermanentError(f"{wanted}: {error}") from None
    except ValueError:
        pass  # a function that is not written in Python does not tell


async def _call(work: Callable[[str], Any], key: str) -> Any:
    """What `work` returns. A lambda stays on the loop: nearly all only make the coroutine that is awaited here."""
    plain: Any = inspect.unwrap(work)
    while isinstance(plain, partial):
        plain = plain.func
    on_loop = is_async(plain) or getattr(plain, "__name__", "") == "<lambda>"
    value = work(key) if on_loop else await call_in_thread(work, key, name="bullpen-step")
    return await value if inspect.isawaitable(value) else value


def encode_result(value: Any, what: str, limit_bytes: int = MAX_RESULT_BYTES) -> str:
    """JSON of a result. What cannot be stored fails for good: running again would end here again."""
    try:
        encoded = json.encode(value, what=what)
    except InvalidOption as error:
        raise PermanentError(f"{what} cannot be stored: {error}") from error
    return _storable(encoded, what, limit_bytes)


def _encode_progress(value: Any) -> str:
    try:
        encoded = check_progress(value)
    except InvalidOption as error:
        raise PermanentError(str(error)) from error  # the next attempt would end here again
    return _storable(encoded, "progress", MAX_RESULT_BYTES)


def _storable(encoded: bytes, what: str, limit_bytes: int) -> str:
    if len(encoded) > limit_bytes:
        raise PermanentError(f"{what} has {len(encoded)} bytes, more than {limit_bytes}; store it elsewhere")
    if json.holds_nul(encoded):
        raise PermanentError(f"{what} holds the character U+0000, which PostgreSQL cannot store")
    return encoded.decode()

"""Group commit: what arrives while one transaction is under way shares the next.

In: items of many callers. Out: each caller's own result. No timer: alone an item goes at once, under load batches grow
by themselves.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Final, Generic, TypeVar

from bullpen._kernel.logs import get_logger

_log = get_logger("bullpen.batches")

Item = TypeVar("Item")
Result = TypeVar("Result")

_Receiver = Callable[[Result | None, BaseException | None], None]

_MOST: Final = 500


class Batches(Generic[Item, Result]):
    """Runs `flush` for the items of one key at a time. `flush` gives one result per item, in order, or raises for
    all."""

    def __init__(self, flush: Callable[[Hashable, Sequence[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._flush = flush
        self._waiting: dict[Hashable, list[tuple[Item, _Receiver[Result]]]] = defaultdict(list)
        self._running: dict[Hashable, asyncio.Task[None]] = {}

    async def submit(self, item: Item, key: Hashable = None) -> Result:
        """Put an item into the next batch of its key and wait for its result.

        Cancelling the caller does not take the item back: what was handed in is done.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.put(item, _waiter(future), key)
        return await asyncio.shield(future)

    def put(self, item: Item, receive: _Receiver[Result], key: Hashable = None) -> None:
        """Put an item into the next batch of its key, and go on. `receive` gets its result or the error; only an end
        of the loop keeps it from being called."""
        self._waiting[key].append((item, receive))
        if key not in self._running:
            self._running[key] = asyncio.create_task(self._drain(key), name="bullpen batch")

    async def idle(self) -> None:
        """Wait until everything that was handed in is done."""
        while self._running:
            await asyncio.wait(list(self._running.values()))

    async def _drain(self, key: Hashable) -> None:
        try:
            while batch := self._waiting[key][:_MOST]:
                del self._waiting[key][: len(batch)]
                await self._do(key, batch)
        finally:
            del self._running[key]
            for _, receive in self._waiting.pop(key):
                _deliver(
                    receive, None, asyncio.CancelledError()
                )  # the loop is being shut down: nobody would ever answer

    async def _do(self, key: Hashable, batch: list[tuple[Item, _Receiver[Result]]]) -> None:
        try:
            results = await self._flush(key, [item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - it belongs to the callers that wait
            for _, receive in batch:
                _deliver(receive, None, error)
            return
        except BaseException:
            for _, receive in batch:
                _deliver(receive, None, asyncio.CancelledError())
            raise
        for (_, receive), result in zip(batch, results, strict=True):
            _deliver(receive, result, None)


def _deliver(receive: _Receiver[Result], result: Result | None, error: BaseException | None) -> None:
    """One receiver that fails must not keep the others from their results."""
    try:
        receive(result, error)
    except Exception:  # noqa: BLE001 - somebody else's function; it is reported
        _log.exception("a result could not be received; please report this")


def _waiter(future: asyncio.Future[Result]) -> _Receiver[Result]:
    def receive(result: Result | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # None only beside an error, or where it is the result
        elif isinstance(error, asyncio.CancelledError):
            future.cancel()
        else:
            future.set_exception(error)
            future.exception()  # a caller that was cancelled does not ask; that is no bug

    return receive

"""Group commit: everyone gets an own answer, whatever becomes of the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

import pytest

from bullpen._kernel.batches import Batches


class Flush:
    """Answers with what it was given, once its gate is open."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls: list[tuple[Hashable, list[int]]] = []
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, key: Hashable, items: Sequence[int]) -> list[int]:
        self.calls.append((key, list(items)))
        self.begun.set()
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        return [item * 10 for item in items]


async def test_what_comes_while_a_batch_is_under_way_shares_the_next() -> None:
    flush = Flush()
    flush.gate.clear()
    batches: Batches[int, int] = Batches(flush)

    first = asyncio.create_task(batches.submit(1))
    await flush.begun.wait()
    others = [asyncio.create_task(batches.submit(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    flush.gate.set()

    assert await asyncio.gather(first, *others) == [10, 20, 30]
    assert flush.calls == [(None, [1]), (None, [2, 3])]


async def test_keys_do_not_share_a_batch() -> None:
    flush = Flush()
    batches: Batches[int, int] = Batches(flush)

    assert list(await asyncio.gather(batches.submit(1, "a"), batches.submit(2, "b"))) == [10, 20]
    assert sorted(str(key) for key, _ in flush.calls) == ["a", "b"]


async def test_an_error_belongs_to_its_batch_alone() -> None:
    batches: Batches[int, int] = Batches(Flush(ValueError("no")))

    with pytest.raises(ValueError, match="no"):
        await batches.submit(1)
    assert await batches.submit(2) == 20


async def test_a_caller_that_is_cancelled_does_not_take_its_item_back() -> None:
    flush = Flush()
    flush.gate.clear()
    batches: Batches[int, int] = Batches(flush)
    caller = asyncio.create_task(batches.submit(1))
    await flush.begun.wait()

    caller.cancel()
    await asyncio.wait([caller])
    flush.gate.set()
    await batches.idle()

    assert flush.calls == [(None, [1])]


async def test_nobody_waits_for_ever_when_the_flush_itself_is_cancelled() -> None:
    """A driver can let a cancellation through that nobody asked for; what waits then must learn of it."""
    flush = Flush(asyncio.CancelledError())
    flush.gate.clear()
    batches: Batches[int, int] = Batches(flush)
    first = asyncio.create_task(batches.submit(1))
    await flush.begun.wait()
    second = asyncio.create_task(batches.submit(2))
    await asyncio.sleep(0)

    flush.gate.set()
    ended, waiting = await asyncio.wait([first, second], timeout=5)

    assert not waiting
    assert all(task.cancelled() for task in ended)
    assert await batches.submit(3) == 30


async def test_a_receiver_that_fails_keeps_no_result_from_others(caplog: pytest.LogCaptureFixture) -> None:
    async def flush(_: Hashable, items: Sequence[int]) -> list[int]:
        return [item * 2 for item in items]

    batches: Batches[int, int] = Batches(flush)
    received: list[int | None] = []

    def broken(result: int | None, _: BaseException | None) -> None:
        raise KeyError(result)

    batches.put(1, broken)
    batches.put(2, lambda result, _: received.append(result))
    third = batches.submit(3)
    assert await third == 6
    await batches.idle()

    assert received == [4]
    assert "could not be received" in caplog.text

"""One wire for several doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from bullpen.errors import ConnectionLost
from bullpen.redis.address import NodeAddress
from bullpen.redis.shared import Share, SharedWire, take_share
from bullpen.redis.socket import pack
from tests.queue._kit import soon

PING = pack(("PING",))


@pytest.fixture
async def node(redis_url: str) -> AsyncIterator[Node]:
    opened = Node(redis_url)
    yield opened
    for wire in opened.wires:
        wire.close()


class Node:
    """A server, and what was opened to it."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("redis://").partition("/")[0].rpartition(":")
        self._endpoint = NodeAddress(host=host, port=int(port))
        self.wires: list[SharedWire] = []
        self.beside = list[asyncio.Task[Share]]()

    async def open(self) -> SharedWire:
        make = lambda: SharedWire(self._endpoint)  # noqa: E731
        _, wire = await asyncio.get_running_loop().create_connection(make, self._endpoint.host, self._endpoint.port)
        self.wires.append(wire)
        return wire

    async def open_while_another_comes(self) -> SharedWire:
        """It comes between the end of the opening and the moment when somebody hears of that end."""
        wire = await self.open()
        self.beside.append(asyncio.create_task(take_share(self, self.open)))
        return wire

    async def fail(self) -> SharedWire:
        await asyncio.sleep(0.01)
        raise ConnectionLost("nobody is there")


async def test_the_last_who_leaves_closes_it(node: Node) -> None:
    first, second = [await take_share(node, node.open) for _ in range(2)]
    assert await soon(first.send(PING, within_s=5)) == b"PONG"

    first.close()
    assert await soon(second.send(PING, within_s=5)) == b"PONG"
    second.close()

    (wire,) = node.wires
    assert wire.broken
    with pytest.raises(ConnectionLost):
        await soon(first.send(PING, within_s=5))
    third = await take_share(node, node.open)
    assert await soon(third.send(PING, within_s=5)) == b"PONG"
    assert len(node.wires) == 2


async def test_who_comes_while_it_is_being_opened_gets_the_same(node: Node) -> None:
    shares = await soon(asyncio.gather(*(take_share(node, node.open) for _ in range(5))))

    assert len(shares) == 5
    assert len(node.wires) == 1


async def test_who_comes_in_the_moment_it_is_open_gets_the_same(node: Node) -> None:
    share = await soon(take_share(node, node.open_while_another_comes))
    (beside,) = node.beside
    assert await soon((await soon(beside)).send(PING, within_s=5)) == b"PONG"
    assert await soon(share.send(PING, within_s=5)) == b"PONG"
    assert len(node.wires) == 1


async def test_all_who_wait_hear_of_a_failure(node: Node) -> None:
    """One after another each would wait for its own."""
    outcomes = await asyncio.gather(*(take_share(node, node.fail) for _ in range(3)), return_exceptions=True)

    assert [type(outcome) for outcome in outcomes] == [ConnectionLost] * 3
    assert isinstance(await take_share(node, node.open), Share)


async def test_an_opening_that_nobody_waits_for_ends(node: Node) -> None:
    is_ended = asyncio.Event()

    async def open_never() -> SharedWire:
        try:
            await asyncio.Event().wait()
        finally:
            is_ended.set()
        raise AssertionError("unreachable")

    waiting = [asyncio.create_task(take_share(node, open_never)) for _ in range(2)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    await asyncio.sleep(0.01)
    assert not is_ended.is_set()
    waiting[1].cancel()
    await soon(is_ended.wait())
    assert isinstance(await take_share(node, node.open), Share)


async def test_a_broken_one_is_broken_for_all_and_opened_once(node: Node) -> None:
    shares = [await take_share(node, node.open) for _ in range(2)]
    awaited = [share.send(pack(("BLPOP", "nothing:here", 0)), within_s=5) for share in shares]

    node.wires[0].close("cut by the test")

    for share, answer in zip(shares, awaited, strict=True):
        with pytest.raises(ConnectionLost, match="cut by the test"):
            await soon(answer)
        assert (share.broken, share.why_broken) == (True, "cut by the test")
    await asyncio.gather(*(take_share(node, node.open) for _ in range(2)))
    assert len(node.wires) == 2


async def test_who_leaves_ends_its_own_calls_and_hears_nothing_later(node: Node) -> None:
    """The reply to what it sent comes all the same, and is for nobody."""
    goes, stays = [await take_share(node, node.open) for _ in range(2)]
    told: list[object] = []

    class Telling:
        def done(self) -> bool:
            return False

        def set_result(self, reply: object, /) -> None:
            told.append(reply)

        def set_exception(self, error: BaseException, /) -> None:
            told.append(type(error))

    goes.send_to(Telling(), PING, within_s=5)
    answer = stays.send(PING, within_s=5)
    goes.close()

    assert await soon(answer) == b"PONG"
    assert told == [ConnectionLost]


async def test_who_retires_still_gets_its_answers(node: Node) -> None:
    retires, stays = [await take_share(node, node.open) for _ in range(2)]
    answer = retires.send(PING, within_s=5)

    retires.retire()

    assert (retires.is_in_use, retires.is_over) == (False, False)
    assert await soon(answer) == b"PONG"
    assert (retires.is_over, stays.is_in_use) == (True, True)

"""What gets a reply, from within the loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bullpen.errors import ConnectionLost
from bullpen.redis import Connection
from bullpen.redis.socket import HOLE, Form, Wire, pack


class TestForm:
    """Commands that are packed once, but for what differs."""

    @pytest.mark.parametrize("value", [b"", b"7", b"100%d", "ä\r\n".encode(), bytes(range(256))], ids=repr)
    def test_it_is_what_packing_gives(self, value: bytes) -> None:
        form = Form(("GET", HOLE), ("SET", "50%", HOLE, "PX", 100, 0.5, b"%s", HOLE))

        filled = form.fill(value, value, b"end")

        assert filled == pack(("GET", value)) + pack(("SET", "50%", value, "PX", 100, 0.5, b"%s", b"end"))

    def test_a_hole_that_is_forgotten_is_noticed(self) -> None:
        with pytest.raises(TypeError, match="not enough arguments"):
            Form(("GET", HOLE)).fill()


class Closer:
    """A receiver that gives up the wire."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self.wire.close("closed by a receiver")

    def set_exception(self, error: BaseException, /) -> None:
        raise AssertionError(error)


async def test_a_receiver_may_close_the_wire(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Receivers act where replies are read, and a worker's callback may do anything. What was read behind that reply is
    lost like what was not read yet."""
    wire = await Connection(redis_url).open()
    second: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    wire.send_all((Closer(wire), b"", 5), (second, pack(("ECHO", "1")) + pack(("ECHO", "2")), 5))

    with pytest.raises(ConnectionLost, match="closed by a receiver"):
        await second
    await asyncio.sleep(0)
    assert [record for record in caplog.records if record.name == "asyncio"] == []

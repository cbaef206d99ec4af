"""What gets a reply, from within the loop."""

from __future__ import annotations

import asyncio

import pytest

from bullpen.errors import ConnectionLost
from bullpen.queue._wire import Prompt


class TestPrompt:
    async def test_it_acts_at_once_and_wakes_behind_what_the_act_has_started(self) -> None:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        future.add_done_callback(lambda _: order.append("woken"))

        def act(reply: str) -> None:
            order.append(f"acted on {reply}")
            loop.call_soon(order.append, "started")

        Prompt(act, future).set_result("reply")

        assert order == ["acted on reply"]
        assert await future == "reply"
        assert order == ["acted on reply", "started", "woken"]

    async def test_an_act_that_raises_is_told_to_who_waits(self) -> None:
        """And not to the wire, whose other replies are nobody's fault."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def act(reply: str) -> None:
            raise RuntimeError("a bug")

        Prompt(act, future).set_result("reply")

        with pytest.raises(RuntimeError, match="a bug"):
            await future

    async def test_a_lost_reply_is_not_acted_on(self) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        acted: list[str] = []

        Prompt(acted.append, future).set_exception(ConnectionLost("cut"))

        with pytest.raises(ConnectionLost, match="cut"):
            await future
        assert acted == []

    async def test_nobody_waits_any_more(self) -> None:
        """Between the reply and the waking: then nothing is left to tell."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        acted: list[str] = []
        prompt = Prompt(acted.append, future)

        prompt.set_result("reply")
        future.cancel()
        await asyncio.sleep(0)  # the waking itself

        assert (acted, prompt.done()) == (["reply"], True)

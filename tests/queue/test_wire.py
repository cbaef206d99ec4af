"""What gets a reply, from within the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bullpen.errors import ConnectionLost
from bullpen.queue._wire import Prompt


class TestPrompt:
    async def test_it_acts_at_once_and_wakes_when_the_act_says_so(self) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        acted: list[tuple[str, Callable[[], None]]] = []

        Prompt(lambda reply, wake: acted.append((reply, wake)), future).set_result("reply")

        ((reply, wake),) = acted
        await asyncio.sleep(0.01)
        assert (reply, future.done()) == ("reply", False)
        wake()
        assert await future == "reply"

    async def test_an_act_that_raises_is_told_to_who_waits(self) -> None:
        """And not to the wire, whose other replies are nobody's fault."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def act(reply: str, wake: Callable[[], None]) -> None:
            raise RuntimeError("a bug")

        Prompt(act, future).set_result("reply")

        with pytest.raises(RuntimeError, match="a bug"):
            await future

    async def test_a_lost_reply_is_not_acted_on(self) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        acted: list[str] = []

        Prompt(lambda reply, _: acted.append(reply), future).set_exception(ConnectionLost("cut"))

        with pytest.raises(ConnectionLost, match="cut"):
            await future
        assert acted == []

    async def test_nobody_waits_any_more(self) -> None:
        """Between the reply and the waking: then nothing is left to tell."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        wakes: list[Callable[[], None]] = []
        prompt = Prompt(lambda _, wake: wakes.append(wake), future)

        prompt.set_result("reply")
        future.cancel()
        wakes[0]()

        assert prompt.done()

"""What gets a reply, from within the loop."""

from __future__ import annotations

import asyncio

import pytest

from bullpen.errors import ConnectionLost
from bullpen.redis import Connection
from bullpen.redis.socket import HOLE, Form, Prompt, Sending, pack


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


class TestPrompt:
    async def test_it_acts_at_once_and_wakes_when_the_act_says_so(self) -> None:
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        acted: list[tuple[str, Prompt]] = []

        Prompt(lambda reply, prompt: acted.append((reply, prompt)), future).set_result("reply")

        ((reply, prompt),) = acted
        await asyncio.sleep(0.01)
        assert (reply, future.done()) == ("reply", False)
        prompt.wake()
        assert await future == "reply"

    async def test_an_act_that_raises_is_told_to_who_waits(self) -> None:
        """And not to the wire, whose other replies are nobody's fault."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def act(reply: str, prompt: Prompt) -> None:
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
        prompt = Prompt(lambda *_: None, future)

        prompt.set_result("reply")
        future.cancel()
        prompt.wake()

        assert prompt.done()

    async def test_two_commands_are_sent_again_until_it_is_woken(self, redis_url: str) -> None:
        """With the same receivers: whoever waits hears of the last ones only."""
        wire = await Connection(redis_url).open()
        acted: list[bytes] = []
        carried: list[asyncio.Future[bytes]] = []

        def ahead(number: int) -> Sending | None:
            if number == 1:
                return None
            carried.append(asyncio.get_running_loop().create_future())
            return carried[0], pack(("ECHO", "carried")), 5.0

        def act(reply: bytes, prompt: Prompt) -> None:
            acted.append(reply)
            if len(acted) < 3:
                assert prompt.can_repeat()
                number = len(acted)
                both = pack(("ECHO", f"first {number}")) + pack(("ECHO", f"second {number}"))
                assert prompt.repeat(both, within_s=5, ahead=ahead(number)) is wire
            else:
                prompt.wake()

        first, second = wire.send_two(pack(("ECHO", "first 0")), pack(("ECHO", "second 0")), within_s=5, act=act)

        assert await second == b"second 2"
        assert first.reply == b"first 2"
        assert acted == [b"second 0", b"second 1", b"second 2"]
        assert [await reply for reply in carried] == [b"carried"]
        wire.close()

    @pytest.mark.parametrize("end", ["close", "retire", "cancel"])
    async def test_nothing_is_sent_again_where_nobody_reads_the_answer(self, redis_url: str, end: str) -> None:
        """On a wire that is broken or will be, or for one that waits no more."""
        wire = await Connection(redis_url).open()
        acting: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()
        _, second = wire.send_two(
            pack(("PING",)), pack(("PING",)), within_s=5, act=lambda _, prompt: acting.set_result(prompt)
        )
        prompt = await acting
        assert prompt.can_repeat()

        (second.cancel if end == "cancel" else getattr(wire, end))()

        assert not prompt.can_repeat()
        wire.close()

    async def test_a_first_command_that_was_refused_is_told(self, redis_url: str) -> None:
        """Sent again, it would be refused again, without a pause and without a word."""
        wire = await Connection(redis_url).open()
        acting: asyncio.Future[Prompt] = asyncio.get_running_loop().create_future()

        first, _ = wire.send_two(
            pack(("BZPOPMIN",)), pack(("PING",)), within_s=5, act=lambda _, prompt: acting.set_result(prompt)
        )

        assert not (await acting).can_repeat()
        assert "wrong number of arguments" in str(first.reply)
        wire.close()

    async def test_without_a_wire_nothing_is_sent_again(self) -> None:
        """As for the answer to a call that was repeated elsewhere."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        assert not Prompt(lambda *_: None, future).can_repeat()

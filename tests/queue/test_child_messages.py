"""The link between a worker and its children: whole messages in order, however the bytes come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen.worker.children.frames import BlockingLink, EndOfMessages, LoopLink, NoMessage, Splitter, frame

MESSAGES = st.lists(st.dictionaries(st.text(max_size=5), st.none() | st.integers(0, 9) | st.binary(max_size=50)))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class TestSplitter:
    @pytest.mark.requirement("W-86")
    @given(messages=MESSAGES, cuts=st.lists(st.integers(0, 300)))
    def test_messages_survive_any_cutting(self, messages: list[dict[str, Any]], cuts: list[int]) -> None:
        sent = b"".join(map(frame, messages))
        bounds = [0, *sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
        splitter = Splitter()

        got = [message for begin, end in pairwise(bounds) for message in splitter.feed(sent[begin:end])]

        assert got == messages

    def test_a_message_is_there_with_its_last_byte_and_not_before(self) -> None:
        sent = frame({"kind": "ready"})
        splitter = Splitter()

        assert [splitter.feed(sent[at : at + 1]) for at in range(len(sent))] == [
            *([[]] * (len(sent) - 1)),
            [{"kind": "ready"}],
        ]

    def test_what_is_no_message_is_refused(self) -> None:
        """Somebody else writes into the socket: better the end than a job with strange fields."""
        for sent in (b"\x00\x00\x00\x01\x07", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\x81\xc1"):
            with pytest.raises(NoMessage):
                Splitter().feed(sent)

    @given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=5))
    def test_whatever_comes_is_messages_or_refused(self, sent: bytes, cuts: list[int]) -> None:
        """Nothing else is raised, and nothing that was announced is waited for without a bound."""
        splitter = Splitter()
        with contextlib.suppress(NoMessage):
            for begin, end in pairwise(sorted({0, len(sent), *(cut % (len(sent) + 1) for cut in cuts)})):
                for message in splitter.feed(sent[begin:end]):
                    assert isinstance(message, dict)

    def test_a_large_message_is_not_joined_again_for_each_piece(self) -> None:
        """16 MB in pieces of 1 KB would be copied for minutes."""
        body = frame({"value": bytes(16_000_000)})
        splitter = Splitter()

        *early, last = [splitter.feed(body[at : at + 1024]) for at in range(0, len(body), 1024)]

        assert not any(early)
        assert len(last[0]["value"]) == 16_000_000


class TestBlockingLink:
    def test_messages_that_come_together_are_received_one_by_one(
        self, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        ours, theirs = pair
        theirs.sendall(frame({"n": 1}) + frame({"n": 2}))
        link = BlockingLink(ours)

        assert [link.receive(), link.receive()] == [{"n": 1}, {"n": 2}]

    @pytest.mark.requirement("W-86")
    @pytest.mark.parametrize("sent", [b"", frame({"n": 1})[:-1]], ids=["nothing", "half a message"])
    def test_the_end_is_told(self, pair: tuple[socket.socket, socket.socket], sent: bytes) -> None:
        ours, theirs = pair
        theirs.sendall(sent)
        theirs.close()

        with pytest.raises(EndOfMessages):
            BlockingLink(ours).receive()


class TestLoopLink:
    @pytest.fixture
    async def link(self, pair: tuple[socket.socket, socket.socket]) -> AsyncIterator[LoopLink]:
        link = await LoopLink.open(pair[0])
        yield link
        link.close()
        with contextlib.suppress(EndOfMessages):
            while True:
                await link.receive()

    async def test_both_ends_understand_each_other(
        self, link: LoopLink, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        """Also when a message is larger than what a socket holds, so that it goes out in pieces."""
        other, large = BlockingLink(pair[1]), {"value": bytes(3_000_000)}
        thread = threading.Thread(target=lambda: other.send(other.receive()))
        thread.start()

        link.send(large)
        answer = await link.receive()
        thread.join()

        assert answer == large

    @pytest.mark.requirement("W-86")
    async def test_messages_before_the_end_are_received_first(
        self, link: LoopLink, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        """A child that tells its result and dies has told it."""
        pair[1].sendall(frame({"n": 1}) + frame({"n": 2}))
        pair[1].close()

        assert [await link.receive(), await link.receive()] == [{"n": 1}, {"n": 2}]
        with pytest.raises(EndOfMessages):
            await link.receive()

    async def test_one_that_waits_is_told_of_the_end(
        self, link: LoopLink, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        waiting = asyncio.create_task(link.receive())
        await asyncio.sleep(0)  # it waits now
        pair[1].close()

        with pytest.raises(EndOfMessages):
            await waiting

    async def test_sending_to_one_that_is_gone_is_no_error(
        self, link: LoopLink, pair: tuple[socket.socket, socket.socket]
    ) -> None:
        """Whoever sends learns it where it waits for the answer, in one place."""
        pair[1].close()
        with pytest.raises(EndOfMessages):
            await link.receive()

        link.send({"n": 1})

        with pytest.raises(EndOfMessages):
            await link.receive()

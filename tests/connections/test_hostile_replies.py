"""Whatever a server answers: a call ends, with a value or an error of ours, and the next connection works.

It may be no Redis at all (a wrong port), a proxy that cuts in the middle of a reply, or one that answers with the
replies of somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bullpen.errors import BullpenError
from bullpen.queue import Queue
from bullpen.redis import Connection
from tests.connections._scripted import scripted

pytestmark = pytest.mark.requirement("X-101")

LINES = st.text("abcdefABCDEF 0123456789:-", max_size=20).map(str.encode)
SCALARS = st.one_of(
    st.integers().map(lambda number: b":%d\r\n" % number),
    LINES.map(lambda line: b"+" + line + b"\r\n"),
    st.sampled_from(
        [
            b"-ERR no\r\n",
            b"-MOVED 1 127.0.0.1:1\r\n",
            b"-NOSCRIPT no\r\n",
            b"-LOADING x\r\n",
            b"-\r\n",
            b"-BPSTALE x\r\n",
        ]
    ),
    st.binary(max_size=20).map(lambda raw: b"$%d\r\n%b\r\n" % (len(raw), raw)),
    st.sampled_from(
        [b"$-1\r\n", b"*-1\r\n", b"_\r\n", b",inf\r\n", b"#t\r\n", b"(12\r\n", b"%1\r\n+a\r\n:1\r\n", b"~0\r\n"]
    ),
)
REPLIES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4).map(lambda items: b"*%d\r\n%b" % (len(items), b"".join(items))),
    max_leaves=8,
)
NO_REPLIES = st.one_of(
    st.binary(max_size=40).map(lambda raw: b"H" + raw),
    st.sampled_from([b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-5\r\n", b":1e5\r\n", b"\x16\x03\x01"]),
)
CUT = REPLIES.flatmap(lambda reply: st.integers(0, max(0, len(reply) - 1)).map(lambda end: reply[:end]))


@given(st.lists(NO_REPLIES, min_size=1, max_size=3))
@example([b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
def test_bytes_that_are_no_reply_end_the_connection_and_every_call_with_an_error_of_ours(answers: list[bytes]) -> None:
    """A wrong port, or a proxy that cuts in the middle: no stack trace of the event loop, no call that hangs."""
    asyncio.run(ask(itertools.cycle(answers), BullpenError))


@given(st.lists(REPLIES | CUT, min_size=1, max_size=3))
@example([b"+OK\r\n+OK\r\n"])
@example([b"*2\r\n$0\r\n\r\n*0\r\n"])
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
def test_a_reply_of_something_else_ends_the_call(answers: list[bytes]) -> None:
    """What it is called is of less interest than that it comes to the caller, and that nobody waits for ever."""
    asyncio.run(ask(itertools.cycle(answers), Exception))


async def ask(answers: Iterator[bytes], expected: type[Exception]) -> None:
    unhandled: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    def answer(command: list[bytes]) -> bytes | None:
        return next(answers) if command[0] in (b"EVALSHA", b"HGETALL", b"HMGET", b"LLEN") else None

    async with scripted(answer) as server:
        connection = Connection(server.url, command_timeout_ms=200)
        async with Queue("q", connection=connection, add_deadline=200) as queue:
            for ask_for in (partial(queue.add, "a"), queue.counts, partial(queue.get_job, "1")):
                with contextlib.suppress(expected):
                    await ask_for()
    assert not unhandled

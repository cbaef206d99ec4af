"""Publish many messages with one write, and wait for all their confirms together.

In: a channel with confirms, and messages whose ids differ. Out: for each what became of it. The driver's own publish
makes a task, a timer and a write per message, which costs more than everything else that happens to a scheduled
message. Here they share one write; numbering, confirms and returns stay the driver's.
That reaches into what the driver does not promise to keep: where a part of it is missing nothing is sent, and whoever
asked publishes one by one. Elsewhere: which channel, and what an error means (`_link`), one message at a time
(`transport`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from aio_pika.exceptions import ChannelNotFoundEntity
from aiormq.abc import ChannelFrame
from pamqp import frame
from pamqp.body import ContentBody
from pamqp.commands import Basic
from pamqp.header import ContentHeader

from bullpen.errors import BullpenError
from bullpen.plugins.transports.rabbitmq._link import TRANSLATED, Link, translate, translated

__all__ = ["MOST", "OutgoingMessage", "send_all"]

MOST: Final = 500
"""Messages in one write: about 200 kB, and a broker that confirms them in one go."""
_NEEDED: Final = (
    "confirmations",
    "create_future",
    "delivery_tag",
    "lock",
    "max_content_size",
    "message_id_delivery_tag",
    "number",
    "write_queue",
)


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """One message, ready to be written."""

    exchange: str
    routing_key: str
    properties: Basic.Properties
    body: bytes


async def send_all(
    link: Link, messages: Sequence[OutgoingMessage], *, timeout_s: float
) -> list[BullpenError | None] | None:
    """Publish with the mandatory flag; the ids of the messages differ from each other and from all under way.

    One result per message: None when the broker has it, else why not. None for all: this driver cannot do it, and
    nothing was sent.
    """
    if not messages:
        return []
    found: list[BaseException | None]
    try:
        with translated():
            async with link.publishing() as channel:
                underlay: Any = await channel.get_underlay_channel()
                if not all(hasattr(underlay, name) for name in _NEEDED):
                    return None
                try:
                    found = await _publish(underlay, messages, timeout_s)
                except TRANSLATED as error:
                    found = [error] * len(messages)
                for problem in found:
                    link.note_refusal(channel, problem)
    except BullpenError as error:
        return [error] * len(messages)
    if any(isinstance(problem, TimeoutError) for problem in found):
        unconfirmed = await link.silent("a publish was not confirmed in time")
        found = [unconfirmed if isinstance(problem, TimeoutError) else problem for problem in found]
    if any(isinstance(problem, ChannelNotFoundEntity) for problem in found):
        link.forget_topology()  # somebody deleted an exchange
    return [None if problem is None else translate(problem) for problem in found]


async def _publish(channel: Any, messages: Sequence[OutgoingMessage], timeout_s: float) -> list[BaseException | None]:
    async with asyncio.timeout(timeout_s):
        confirms = await _write(channel, messages)
    try:
        await asyncio.wait(confirms, timeout=timeout_s)
    finally:
        for message in messages:
            channel.message_id_delivery_tag.pop(message.properties.message_id, None)
    return [_result(confirm) for confirm in confirms]


async def _write(channel: Any, messages: Sequence[OutgoingMessage]) -> list[asyncio.Future[Any]]:
    async with channel.lock:  # the number of a message is its place in the stream
        heads: dict[tuple[str, str], bytes] = {}
        parts: list[bytes] = []
        for one in messages:
            key = (one.exchange, one.routing_key)
            if key not in heads:
                publish = Basic.Publish(exchange=one.exchange, routing_key=one.routing_key, mandatory=True)
                heads[key] = frame.marshal(publish, channel.number)
            header = ContentHeader(properties=one.properties, body_size=len(one.body))
            parts += (heads[key], frame.marshal(header, channel.number))
            for at in range(0, len(one.body), channel.max_content_size):
                parts.append(frame.marshal(ContentBody(one.body[at : at + channel.max_content_size]), channel.number))
        await channel.write_queue.put(ChannelFrame(payload=b"".join(parts), should_close=False))
        # No await from here to the end: the writer and the broker's answers must find the numbers known, and a number
        # that was given and not written would shift all later ones.
        confirms = [channel.create_future() for _ in messages]
        first = channel.delivery_tag + 1
        channel.delivery_tag += len(messages)
        for tag, (one, confirm) in enumerate(zip(messages, confirms, strict=True), first):
            channel.confirmations[tag] = confirm
            channel.message_id_delivery_tag[one.properties.message_id] = tag
    return confirms


def _result(confirm: asyncio.Future[Any]) -> BaseException | None:
    if not confirm.done():
        return TimeoutError("no confirm in time")
    if confirm.cancelled():
        return ConnectionError("its channel was closed before it was confirmed")
    return confirm.exception()

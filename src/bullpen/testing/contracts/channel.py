"""What every channel promises. Subclass it and give it a `target` fixture.

    class TestPigeon(ChannelContract):
        @pytest.fixture
        async def target(self): ...yield PigeonTarget()

A target is a real server at the edge of the system, which can be told how to behave, together with the channel that
delivers to it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from bullpen._kernel.log_formats import TELLS_PAYLOADS
from bullpen.ports.channel import (
    Accepted,
    Channel,
    Message,
    NotTried,
    Refused,
    SendResult,
    Unavailable,
    Unknown,
    when_unknown,
)

__all__ = ["Arrived", "ChannelContract", "ChannelTarget", "send"]

_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Arrived:
    """One message as the target saw it."""

    key: str
    """What the target would recognise a repetition by."""
    text: str
    """All of it, headers included."""


class ChannelTarget(ABC):
    """A channel and where it leads to."""

    channel: Channel
    integration_type: str
    payload: ClassVar[Any]
    """One that the channel takes as it is."""
    carries_ids: bool = True
    """Whether correlation and tenant ids travel; a text message has no place for them."""
    secrets: tuple[str, ...] = ()
    """What must be shown nowhere."""

    @abstractmethod
    async def arrived(self) -> list[Arrived]:
        """Everything the target has, in any order."""

    @abstractmethod
    def refuse_next(self) -> None:
        """Let the target say "never" to the next message."""

    @abstractmethod
    def put_off_next(self) -> None:
        """Let the target say "not now" to the next message."""

    @abstractmethod
    def go_silent(self) -> None:
        """Let the target take what comes and not answer."""

    @abstractmethod
    def away(self) -> AbstractAsyncContextManager[None]:
        """The target cannot be reached for the length of a block."""

    @abstractmethod
    def hopeless(self) -> Message:
        """A message that the channel itself refuses, before anything leaves."""

    def message(self, number: int = 1, **changes: Any) -> Message:
        fields = {
            "id": f"0f9d4f3e-0000-4000-8000-{number:012d}",
            "integration_type": self.integration_type,
            "event_type": "order.paid.v1",
            "payload": self.payload,
            "headers": {"idempotencyKey": f"event-{number}"},
            "idempotency_key": f"event-{number}",
            "source_stream_id": "order-1",
            "source_event_id": f"event-{number}",
            "tenant_id": "acme",
            "user_id": "u-7",
            "correlation_id": f"c-{number}",
            "created_ms": 1_700_000_000_000,
            **changes,
        }
        return Message(**fields)


async def send(target: ChannelTarget, message: Message, timeout_s: float = _PATIENCE_S) -> SendResult:
    """Send through the channel of a target, within a time that no test should need."""
    async with asyncio.timeout(timeout_s):
        return await target.channel.send(message)


class ChannelContract:
    """A channel translates and nothing more: it answers, and it never decides."""

    @pytest.mark.requirement("O-3", "O-54", "O-57", "O-71", "O-85")
    async def test_a_message_arrives_with_its_key_and_ids(self, target: ChannelTarget) -> None:
        result = await send(target, target.message())

        (arrived,) = await target.arrived()
        assert isinstance(result, Accepted)
        assert arrived.key
        if target.carries_ids:
            assert "acme" in arrived.text
            assert "c-1" in arrived.text

    @pytest.mark.requirement("O-4", "O-7", "O-57", "X-16")
    async def test_the_same_message_is_the_same_for_the_target(self, target: ChannelTarget) -> None:
        """Nothing may depend on when or how often it is sent, or the target cannot know it again."""
        await send(target, target.message(1))
        await send(target, target.message(1, attempt=2))
        await send(target, target.message(2))

        keys = {arrived.key for arrived in await target.arrived()}
        assert len(keys) == 2

    async def test_many_messages_at_the_same_time_all_arrive(self, target: ChannelTarget) -> None:
        results = await asyncio.gather(*(send(target, target.message(number)) for number in range(1, 21)))

        assert all(isinstance(result, Accepted) for result in results)
        assert len({arrived.key for arrived in await target.arrived()}) == 20

    @pytest.mark.requirement("O-52")
    async def test_never_means_never(self, target: ChannelTarget) -> None:
        target.refuse_next()

        result = await send(target, target.message())

        assert isinstance(result, Refused)
        assert result.code

    @pytest.mark.requirement("O-55")
    async def test_not_now_is_no_end(self, target: ChannelTarget) -> None:
        target.put_off_next()

        result = await send(target, target.message())
        again = await send(target, target.message())

        assert isinstance(result, Unavailable | NotTried)
        assert isinstance(again, Accepted)

    async def test_a_target_that_is_away_is_told_and_found_again(self, target: ChannelTarget) -> None:
        async with target.away():
            result = await send(target, target.message())

        assert isinstance(result, Unavailable | NotTried | Unknown)
        assert isinstance(await send(target, target.message()), Accepted)

    @pytest.mark.requirement("X-17")
    async def test_without_an_answer_nobody_claims_to_know(self, target: ChannelTarget) -> None:
        """NotTried is allowed only where trying again changes nothing: the target knows the id."""
        target.go_silent()

        try:
            result: SendResult | None = await send(target, target.message(), timeout_s=3.0)
        except TimeoutError:
            result = None  # whoever delivers has a deadline of its own, and calls it unknown

        assert result is None or isinstance(result, Unknown | NotTried)

    async def test_what_cannot_be_sent_is_refused_before_anything_leaves(self, target: ChannelTarget) -> None:
        result = await send(target, target.hopeless())

        assert isinstance(result, Refused)
        assert await target.arrived() == []

    async def test_a_cancelled_send_leaves_the_channel_usable(self, target: ChannelTarget) -> None:
        sending = asyncio.create_task(target.channel.send(target.message(1)))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

        assert isinstance(await send(target, target.message(2)), Accepted)

    @pytest.mark.requirement("O-70")
    async def test_hostile_ids_stay_values(self, target: ChannelTarget) -> None:
        """Whoever chooses a correlation id must not choose headers with it."""
        hostile = "x\r\nEvil: 1\r\n\r\nbody\u2028ü"

        result = await send(
            target, target.message(correlation_id=hostile, tenant_id=hostile, event_type="e\r\nEvil: 2")
        )

        assert isinstance(result, Accepted | Refused)
        lines = [line for arrived in await target.arrived() for line in arrived.text.splitlines()]
        assert bool(lines) == isinstance(result, Accepted)
        assert not any(line.lower().startswith("evil:") for line in lines)

    async def test_looking_whether_it_works_sends_nothing(self, target: ChannelTarget) -> None:
        health = await target.channel.check()

        assert health.ok, health.reason
        assert await target.arrived() == []

    @pytest.mark.requirement("O-64", "O-70")
    async def test_nothing_shows_the_secrets(self, target: ChannelTarget, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        for library in TELLS_PAYLOADS:  # as `bullpen run` does; in another program whoever asks for them gets them
            caplog.set_level("INFO", logger=library)
        target.refuse_next()

        shown = [repr(target.channel)]
        shown += [str(await send(target, target.message())) for _ in range(2)]
        async with target.away():
            shown.append(str(await send(target, target.message())))
            shown.append(str(await target.channel.check()))
        shown.append(caplog.text)

        for secret in target.secrets:
            assert not any(secret in text for text in shown)

    async def test_closing_twice_is_closing(self, target: ChannelTarget) -> None:
        await send(target, target.message())

        await target.channel.aclose()
        await target.channel.aclose()

    async def test_it_has_a_rule_for_what_is_unknown(self, target: ChannelTarget) -> None:
        assert when_unknown(target.channel) in {"resend", "look_up", "park"}

"""Scheduled messages as a program holds them: kinds of occasions, channels, recipients, and what runs.

In: a ledger, and a messaging client on any transport. Out: `recipients` for the program that knows people; `scheduler`
and `sender` for the processes that plan and send, or both as one service for an app. Elsewhere: each of these parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import time
from time import monotonic
from typing import Any, Final, TypeVar, Unpack, overload

from bullpen._kernel import telemetry
from bullpen._kernel.duration import check_int, check_many, check_texts
from bullpen._kernel.ending import to_its_end
from bullpen._kernel.ids import worker_name
from bullpen._kernel.logs import get_logger
from bullpen._kernel.rates import RateLimit
from bullpen._kernel.service import BaseService
from bullpen._kernel.ticker import Ticker
from bullpen.errors import InvalidOption, NotConfigured, require
from bullpen.ledger import Ledger
from bullpen.ledger.messages import SqlMessages
from bullpen.messages.calendar import (
    Gap,
    LeapDay,
    Overlap,
    QuietHours,
    Repeats,
    Rule,
    ShortMonth,
    TimePolicy,
    read_time,
)
from bullpen.messages.doubts import Doubt, Doubts
from bullpen.messages.enqueuer import MessageEnqueuer, Scheduler, SchedulerHealth, SchedulerOptions, read_health
from bullpen.messages.imports import ImportArguments, Imported, import_csv
from bullpen.messages.kinds import StoredKinds
from bullpen.messages.occasions import Late, OccasionKind, Occasions
from bullpen.messages.pace import Pace
from bullpen.messages.planner import Planner
from bullpen.messages.recipients import Recipients
from bullpen.messages.routes import USUAL_LIMIT_MS, AfterCrash, ChannelRoute, FunctionChannel, SendFunction, rule_of
from bullpen.messages.sender import Sender, SenderOptions
from bullpen.messages.templates import Text
from bullpen.ports.channel import Channel
from bullpen.ports.messaging import Consumer, Messaging

__all__ = ["QUEUE", "MessageSender", "Messages"]

QUEUE: Final = "birthday.messages.queue"
_SAMPLE_MS: Final = 15_000
_PACE_MS: Final = 1_000
_LINT_BATCH: Final = 500
_LINT_AT_START: Final = 10_000
logger = get_logger("bullpen.messages")

AnyFunction = TypeVar("AnyFunction", bound=SendFunction)
MakeMessaging = Callable[[tuple[str, ...]], Messaging[Any]]


class Messages(BaseService):
    """Messages at nine in the morning where the recipient lives.

        messages = Messages(ledger, client)

        @messages.channel("email", after_crash="same_key")
        async def send(message: Message) -> str: ...

        await messages.recipients.save(
            Recipient(id="ada", name="Ada", zone="Europe/Paris", channel="email", address="ada@example.com",
                      occasions={"birthday": "1815-12-10"})
        )

    `messaging` is a client, or a function that makes one from the names of the kinds, called on first use: the names
    are routing keys. Belongs to one event loop.
    """

    def __init__(
        self,
        ledger: Ledger,
        messaging: Messaging[Any] | MakeMessaging,
        *,
        queue: str = QUEUE,
        concurrency: int | None = None,
        max_concurrency: int | None = None,
        scheduler: SchedulerOptions | None = None,
        sender: SenderOptions | None = None,
        roles: Iterable[str] = ("scheduler", "sender"),
    ) -> None:
        """`roles` is what `run` runs; two machines may have one each. A sender sends `concurrency` at the same time; up
        to `max_concurrency` while messages are late and their providers keep up (None: never more)."""
        super().__init__("messages")
        self.roles = frozenset(check_texts("roles", roles))
        self._ledger, self._given, self._queue = ledger, messaging, queue
        self._concurrency = concurrency
        self._max_concurrency = max_concurrency and check_int("max_concurrency", max_concurrency, minimum=1)
        self._scheduler_options = scheduler or SchedulerOptions()
        self._sender_options = sender or SenderOptions(lost_after_ms=self._scheduler_options.lost_after_ms)
        for role in self.roles:
            require("roles", role in ("scheduler", "sender"), "'scheduler' and 'sender'", role)
        ledger.use("messages")
        self.store = SqlMessages(ledger.database)
        self.occasions = Occasions()
        self.routes: dict[str, ChannelRoute] = {}
        self.recipients = Recipients(self.store, self.occasions, self.routes)
        self.kinds = StoredKinds(self.store, ledger.checkpoints, self.recipients, self.occasions)
        self._messaging: Messaging[Any] | None = None

    @property
    def made_messaging(self) -> Messaging[Any] | None:
        """The client that carries orders, if somebody has needed it."""
        return self._messaging

    @property
    def messaging(self) -> Messaging[Any]:
        """The client that carries orders."""
        if self._messaging is None:
            given = self._given
            is_client = hasattr(given, "produce")
            self._messaging = given if is_client else given(self.occasions.names)  # type: ignore[operator,assignment]  # one of the two
        assert self._messaging is not None
        return self._messaging

    # ---- saying what there is -----------------------------------------------------------------------------------

    def occasion(
        self,
        name: str,
        *,
        text: str | Text | Mapping[str, Text],
        subject: str = "",
        send_at: str | time = "09:00",
        repeats: Repeats = "yearly",
        leap_day: LeapDay = "feb28",
        short_month: ShortMonth = "last",
        gap: Gap = "forward",
        overlap: Overlap = "first",
        late: Late | None = None,
        quiet_hours: tuple[str | time, str | time] | None = None,
    ) -> OccasionKind:
        """Register a kind of occasion, or replace one. `text` may differ by locale: `{"": …, "de": …}`."""
        if self._messaging is not None and name not in self.occasions:
            raise InvalidOption("occasion", "registration before the first message is sent", name)
        if isinstance(text, str):
            text = Text(text, subject=subject)
        elif subject:
            raise InvalidOption("subject", "none, because the texts have their own", subject)
        quiet = None
        if quiet_hours is not None:
            quiet = QuietHours(*(read_time("quiet_hours", each) for each in quiet_hours))
        return self.occasions.register(
            OccasionKind(
                name=name,
                rule=Rule(repeats=repeats, leap_day=leap_day, short_month=short_month),
                send_at=read_time("send_at", send_at),
                clock=TimePolicy(gap=gap, overlap=overlap),
                late=late or Late.expire(),
                quiet_hours=quiet,
                texts={"": text} if isinstance(text, Text) else dict(text),
            )
        )

    @overload
    def channel(
        self, name: str, channel: Channel, *, after_crash: AfterCrash | None = ..., rate_limit: RateLimit | None = ...,
        timeout: int | None = ...,
    ) -> ChannelRoute: ...  # fmt: skip

    @overload
    def channel(
        self, name: str, channel: None = ..., *, after_crash: AfterCrash, rate_limit: RateLimit | None = ...,
        timeout: int | None = ...,
    ) -> Callable[[AnyFunction], AnyFunction]: ...  # fmt: skip

    def channel(
        self,
        name: str,
        channel: Channel | None = None,
        *,
        after_crash: AfterCrash | None = None,
        rate_limit: RateLimit | None = None,
        timeout: int | None = None,
    ) -> ChannelRoute | Callable[[AnyFunction], AnyFunction]:
        """Say how recipients of this channel are reached; without a channel it decorates a function that sends.

        `after_crash` (see `ChannelRoute`) must be said for a function, because only you know your provider; a channel
        has a rule of its own, which it replaces. `timeout` is how long one send may take, instead of the channel's own
        limit; None: as that says, at most 10 s.
        """
        require("channel", isinstance(name, str) and 0 < len(name) <= 60, "a name of 1 to 60 characters", name)
        # Shorter than the lease, or a second sender would begin while the first still waits for its answer.
        limit_ms = USUAL_LIMIT_MS if timeout is None else timeout
        fits = isinstance(limit_ms, int) and 0 < limit_ms <= self._sender_options.lease_ms // 2
        require("timeout", fits, f"at most half of the sender's lease of {self._sender_options.lease_ms} ms", limit_ms)

        def register(given: Channel) -> ChannelRoute:
            rule = after_crash if after_crash is not None else rule_of(given)
            route = ChannelRoute(channel=given, after_crash=rule, rate_limit=rate_limit, timeout_ms=timeout)
            self.routes[name] = route
            return route

        if channel is not None:
            return register(channel)
        if after_crash is None:
            raise InvalidOption(
                "after_crash", "'same_key', 'resend' or 'park', because a function has no default", None
            )

        def decorate(function: AnyFunction) -> AnyFunction:
            register(FunctionChannel(function))
            return function

        return decorate

    async def import_csv(self, lines: Iterable[str], **options: Unpack[ImportArguments]) -> Imported:
        """Save recipients from the lines of a CSV file; see `imports.import_csv`."""
        check_many("lines", lines, "an open file or a list of lines")
        return await import_csv(self.recipients, lines, self.occasions, **options)

    # ---- running ------------------------------------------------------------------------------------------------

    def planner(self) -> Planner:
        return Planner(self.store, self.occasions, horizon_ms=self._scheduler_options.horizon_ms)

    def enqueuer(self) -> MessageEnqueuer:
        return MessageEnqueuer(self.store, self.messaging, queue=self._queue, options=self._scheduler_options)

    def scheduler(self) -> Scheduler:
        """Something to run that plans and publishes every minute. Any number may run."""
        return Scheduler(self.store, self.kinds, self.planner(), self.enqueuer(), checkpoints=self._ledger.checkpoints)

    def sender(self, *, name: str | None = None) -> MessageSender:
        """Something to run that sends what was published. Any number may run."""
        if not self.routes:
            raise NotConfigured("no channel is registered: @messages.channel(name, after_crash=…)")
        sender = Sender(
            self.store, self.occasions, self.routes, worker=name or worker_name(), options=self._sender_options
        )
        return MessageSender(
            self.messaging,
            sender,
            queue=self._queue,
            concurrency=self._concurrency,
            max_concurrency=self._max_concurrency,
        )

    async def health(self) -> SchedulerHealth:
        """How the scheduler is, whichever process it runs in."""
        return await read_health(self.store, self._ledger.checkpoints, self._scheduler_options)

    async def lint(self, *, most: int | None = None) -> list[Doubt]:
        """What will not be sent as things are: recipients whose channel is not registered here, or who lack what a text
        needs. Looks at everybody, or at `most` recipients. `run` logs what it finds among the first 10,000."""
        doubts, after, seen = Doubts(self.occasions, self.routes), ("", ""), 0
        while most is None or seen < most:
            batch = await self.recipients.find(after=after, limit=_LINT_BATCH)
            if not batch:
                break
            doubts.look_at(batch)
            after, seen = batch[-1].key, seen + len(batch)
        return doubts.found

    async def _begin(self) -> None:
        if "sender" in self.roles and self.routes:
            for doubt in await to_its_end(self.lint(most=_LINT_AT_START)):
                logger.warning("messages: %s", doubt)
        if "sender" in self.roles:
            await self._host(self.sender())
        if "scheduler" in self.roles:
            await self._host(self.scheduler())

    async def aclose(self) -> None:
        """Stop, and close channels and client. The ledger belongs to whoever made it."""
        await self.close()
        if self._messaging is not None:
            await self._messaging.close()
        for route in self.routes.values():
            await route.channel.aclose()


class MessageSender(BaseService):
    """Consumes orders until closed, as many at a time as the client's concurrency says; up to `max_concurrency` while
    messages are late."""

    def __init__(
        self,
        messaging: Messaging[Any],
        sender: Sender,
        *,
        queue: str,
        concurrency: int | None = None,
        max_concurrency: int | None = None,
    ) -> None:
        super().__init__(f"sender of {queue!r}")
        self._messaging, self._sender, self._queue = messaging, sender, queue
        self._concurrency, self._max_concurrency = concurrency, max_concurrency
        self._pace: Pace | None = None
        self._consumer: Consumer | None = None
        self._tickers = (
            Ticker("message queue depth", messaging.sample, every=_SAMPLE_MS),  # for gauges
            Ticker("pace of the sender", self._adapt, every=_PACE_MS),
        )

    async def _begin(self) -> None:
        self._consumer = await self._messaging.consume(self._queue, self._sender.handle, concurrency=self._concurrency)
        start = self._consumer.concurrency
        if self._max_concurrency is not None and self._max_concurrency > start:
            pace = self._pace = Pace(start, self._max_concurrency, monotonic())
            self._sender.on_answer = lambda late_s, is_pushed_back: pace.note(
                late_s=late_s, is_pushed_back=is_pushed_back
            )
        telemetry.emit("messages.sender_started", queue=self._queue)

    async def _on_run(self, signals: bool | None) -> None:
        for ticker in self._tickers:
            await ticker.start()

    async def _adapt(self) -> None:
        consumer, pace = self._consumer, self._pace
        if consumer is None or pace is None or self._closing.is_set():
            return
        size = consumer.concurrency
        wanted = pace.next(size, monotonic(), is_full=2 * consumer.running >= size)
        if wanted != size:
            await consumer.resize(wanted)
            telemetry.emit("messages.pace", queue=self._queue, concurrency=consumer.concurrency)
            logger.debug("the sender of %s sends %s at the same time", self._queue, consumer.concurrency)

    async def _hurry(self) -> None:
        if self._consumer is not None:
            await self._consumer.close(self._close_timeout)

    async def _end(self) -> None:
        for ticker in self._tickers:
            await ticker.stop()
        if self._consumer is not None:
            await self._consumer.close(self._close_timeout)
            await self._sender.idle()

"""How many messages a sender sends at a time: more while they are late and the provider keeps up, and not more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bullpen import Bullpen
from bullpen.messages import Message
from bullpen.messages.pace import Pace
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from bullpen.ports.transport import Delivery
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.wiring.messages import make_client
from tests.messages.conftest import MakeMessages
from tests.messages.kit import PATIENCE_S, QUICK, Provider, Told, at, person, set_clock, until_status
from tests.messages.test_app import load, running


class Sending:
    """A sender as its pace sees it: seconds go by, each with so many sends."""

    def __init__(self, start: int = 5, most: int = 200) -> None:
        self.pace, self.size, self.now = Pace(start, most, 0.0), start, 0.0

    def second(
        self, *, rate: float = 2.0, limit: float = 1e9, late_s: float = 60.0, errors: float = 0.0, is_full: bool = True
    ) -> int:
        """`rate` sends per place, at most `limit` in all."""
        count = round(min(self.size * rate, limit))
        for number in range(count):
            self.pace.note(late_s=late_s, is_pushed_back=number < count * errors)
        self.now += 1.0
        self.size = self.pace.next(self.size, self.now, is_full=is_full)
        return self.size


class TestDeciding:
    def test_it_doubles_up_to_its_bound_while_messages_are_late(self) -> None:
        sending = Sending()
        assert [sending.second() for _ in range(8)] == [10, 20, 40, 80, 160, 200, 200, 200]

    def test_it_stays_where_it_is_while_nothing_is_late(self) -> None:
        sending = Sending()
        assert {sending.second(late_s=0.1) for _ in range(100)} == {5}

    def test_it_stays_where_it_is_while_places_are_free(self) -> None:
        """Retries are late without a backlog."""
        sending = Sending()
        assert {sending.second(is_full=False) for _ in range(20)} == {5}

    def test_it_goes_back_when_the_provider_pushes_back(self) -> None:
        sending = Sending()
        for _ in range(5):
            sending.second()
        assert sending.size == 160

        assert sending.second(errors=0.2) == 80
        assert {sending.second() for _ in range(29)} == {80}  # and tries more half a minute later
        assert sending.second() == 160

    def test_a_few_errors_are_no_sign(self) -> None:
        sending = Sending()
        sending.second()
        assert sending.second(errors=0.05) == 20

    def test_it_never_goes_below_its_beginning(self) -> None:
        sending = Sending()
        assert {sending.second(errors=1.0) for _ in range(10)} == {5}

    def test_more_at_a_time_that_get_no_more_done_are_given_up(self) -> None:
        """A rate limit, a busy processor, or a provider that is slower the more it is asked."""
        sending = Sending()
        sizes = [sending.second(limit=30) for _ in range(20)]
        assert sizes[:6] == [10, 20, 40, 40, 20, 20]
        assert set(sizes[4:]) == {20}

    def test_slow_answers_are_waited_for(self) -> None:
        sending = Sending()
        assert [sending.second(rate=0.2) for _ in range(4)] == [5] * 4
        assert sending.second(rate=0.2) == 10

    def test_after_a_calm_minute_it_is_back_at_its_beginning(self) -> None:
        sending = Sending()
        for _ in range(4):
            sending.second()
        assert sending.size == 80

        sizes = [sending.second(late_s=0.0, limit=0) for _ in range(90)]

        assert sizes[0] == 80 and sizes[-1] == 5


@pytest.fixture(params=["memory", "bullmq", "rabbitmq"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    environ = {"BULLPEN_MESSAGES_TRANSPORT": request.param, "CRON_MINUTE_SCHEDULE": "* * * * * *"}
    if request.param == "bullmq":
        environ["BULLPEN_REDIS_URL"] = request.getfixturevalue("redis_url")
    if request.param == "rabbitmq":
        environ["RABBITMQ_URL"] = request.getfixturevalue("rabbit").url
        environ["RABBITMQ_QUEUE_NAME"] = f"pace-{tmp_path.name}"
    return load(tmp_path, **environ)


async def test_a_consumer_grows_and_shrinks_and_loses_nothing(settings: Settings, redis_url: str) -> None:
    connection = Connection(redis_url)
    client = make_client(settings, ("birthday",), lambda: connection, "bull")
    queue = settings.rabbitmq.queue_name
    entered, release, done = asyncio.Semaphore(0), asyncio.Event(), list[str]()

    async def handle(delivery: Delivery) -> None:
        entered.release()
        await release.wait()
        done.append(delivery.urn)

    consumer = await client.consume(queue, handle, concurrency=2)
    for number in range(40):
        await client.produce(queue, "birthday", {"urn": f"urn:{number}"})
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            await entered.acquire()
        assert consumer.running == 2
        await consumer.resize(8)
        for _ in range(6):
            await entered.acquire()
        assert (consumer.running, consumer.concurrency) == (8, 8)

        await consumer.resize(2)
        assert consumer.concurrency == 2
        release.set()
        while len(done) < 40:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
        release.clear()
        for number in range(40, 50):
            await client.produce(queue, "birthday", {"urn": f"urn:{number}"})
        while consumer.running < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        assert consumer.running == 2  # the six places are gone
        release.set()
        while len(done) < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    assert sorted(done) == sorted(f"urn:{number}" for number in range(50))
    assert await client.is_healthy()
    await client.close(1_000)
    await connection.aclose()


async def test_late_messages_are_sent_many_at_a_time_with_nothing_configured(settings: Settings, told: Told) -> None:
    app = Bullpen(settings=settings)
    provider = Provider()

    @app.use_messages().channel("email", after_crash="same_key")
    async def send(message: Message) -> str:
        await provider.send(message)
        await asyncio.sleep(0.2)
        return "taken"

    app.use_messages().occasion("birthday", text="Happy {number}, {name}!")
    await app.prepare()
    set_clock(app.ledger, at("2026-03-14 08:00"))
    for number in range(120):
        await app.use_messages().recipients.save(person(number, zone="UTC"))
    set_clock(app.ledger, at("2026-03-14 09:05"))  # nobody was there for five minutes
    async with running(app):
        await told.wait("messages.pace")
        await until_status(app.use_messages(), 120)
    await app.aclose()

    # How far it goes depends on what this machine gets done; the next step is tried where no clock runs.
    assert told.of("messages.pace")[0]["concurrency"] == 10
    assert len(provider.delivered) == len(provider.calls) == 120


@pytest.mark.parametrize(
    ("environ", "most"),
    [
        ({}, 200),
        ({"QUEUE_CONCURRENCY": "5"}, 5),
        ({"BULLPEN_MESSAGES_CONCURRENCY": "50"}, 50),
        ({"QUEUE_CONCURRENCY": "5", "BULLPEN_MESSAGES_MAX_CONCURRENCY": "40"}, 40),
        ({"BULLPEN_MESSAGES_MAX_CONCURRENCY": "5"}, 5),
    ],
)
async def test_whoever_says_how_many_means_it(
    tmp_path: Path, redis_url: str, environ: dict[str, str], most: int
) -> None:
    app = Bullpen(settings=load(tmp_path, BULLPEN_REDIS_URL=redis_url, **environ))
    assert app.use_messages()._max_concurrency == most
    await app.aclose()


async def test_a_fixed_sender_stays_as_it_is(make_messages: MakeMessages, told: Told, broker: MemoryBroker) -> None:
    """As many at a time as the client says, however late messages are."""
    provider = Provider()
    provider.gate.clear()
    messages = make_messages(provider, client=MemoryClient(broker, policy=QUICK, concurrency=5))
    sender = messages.sender()
    running = asyncio.create_task(sender.run())
    await told.wait("messages.sender_started")
    assert sender._pace is None
    await sender.close(0)
    await running

"""KurrentDB: persistent subscriptions, outages, silence, events of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kurrentdbclient import AsyncKurrentDBClient, StreamState
from kurrentdbclient import NewEvent as Raw
from kurrentdbclient.common import construct_recorded_event
from kurrentdbclient.protos.v1 import shared_pb2, streams_pb2

from bullpen.errors import InvalidOption, SourceUnavailable, WrongVersion
from bullpen.ledger import Ledger
from bullpen.outbox import EventRoutes, Projector, ProjectorOptions
from bullpen.plugins.sources.kurrent import KurrentSource, _event, _repaired
from bullpen.ports.source import BEGINNING, NO_STREAM, NewEvent
from bullpen.testing.contracts.source import an_event, take
from bullpen.testing.kurrent import KurrentServer
from tests.outbox.kit import PATIENCE_S, Told, rows, telling

QUICK = ProjectorOptions(retry_pause_ms=1, standby_ms=100, parked_interval_ms=50, max_tries=2)


@pytest.fixture
def server() -> Iterator[KurrentServer]:
    with KurrentServer() as running:
        yield running


@pytest.fixture
def told() -> Iterator[Told]:
    with telling() as listening:
        yield listening


@contextlib.asynccontextmanager
async def opened(server: KurrentServer, **options: Any) -> AsyncIterator[KurrentSource]:
    source = KurrentSource(server.url, timeout_ms=5_000, **options)
    yield source
    await source.aclose()


def routes(to: str = "webhook:partnerX") -> EventRoutes:
    made = EventRoutes()
    made.on("payment.*", to=to, since="beginning", name="payment")(lambda event: {"orderId": event.data["number"]})
    return made


@contextlib.asynccontextmanager
async def projecting(ledger: Ledger, source: KurrentSource, **options: Any) -> AsyncIterator[Projector]:
    projector = Projector(ledger, source, options.pop("routes", None) or routes(), options=QUICK, **options)
    await projector.start()
    yield projector
    await projector.close(1_000)


async def until_rows(ledger: Ledger, count: int) -> list[int]:
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await rows(ledger)) < count:  # noqa: ASYNC110 - the database tells nobody
            await asyncio.sleep(0.01)
    return sorted(row.payload["orderId"] for row in found)


# Following ----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-28", "O-31", "O-36", "O-85", "O-3")
async def test_events_become_rows_with_their_ids(server: KurrentServer, ledger: Ledger) -> None:
    async with opened(server, prefixes=["payment."]) as source, projecting(ledger, source):
        event = an_event(1, tenant_id="acme", user_id="u-7", headers={"traceparent": "00-ab-cd-01"})
        await source.append("payment-1", [event])
        await until_rows(ledger, 1)

    (row,) = await rows(ledger)
    assert (row.source_stream_id, row.source_event_id) == ("payment-1", event.id)
    assert (row.correlation_id, row.tenant_id, row.user_id) == ("c-1", "acme", "u-7")
    assert row.headers == {"traceparent": "00-ab-cd-01", "idempotencyKey": event.id}


@pytest.mark.requirement("O-28", "O-36", "X-75", "O-4")
async def test_after_an_outage_the_projector_goes_on_from_its_own_checkpoint(
    server: KurrentServer, ledger: Ledger, told: Told
) -> None:
    async with opened(server) as source, opened(server) as writer, projecting(ledger, source) as projector:
        await writer.append("payment-1", [an_event(n) for n in range(5)])
        await until_rows(ledger, 5)
        server.kill()
        await told.wait("projector.interrupted")
        assert projector.state == "waiting"
        assert not (await source.check()).ok

        server.restart()
        await writer.append("payment-1", [an_event(n) for n in range(5, 9)])
        found = await until_rows(ledger, 9)

    assert found == list(range(9))
    assert projector.projected.duplicates == 0  # it did not begin at the beginning
    assert projector.state == "stopped"


@pytest.mark.requirement("X-75", "O-28")
async def test_the_checkpoint_follows_the_servers_over_events_that_nobody_wants(
    server: KurrentServer, ledger: Ledger
) -> None:
    async with opened(server, prefixes=["payment."], checkpoint_window=4) as source, projecting(ledger, source):
        await source.append("noise", [an_event(n, "noise.v1") for n in range(100)])
        async with asyncio.timeout(PATIENCE_S):
            while await ledger.checkpoints.read("projector/default") is None:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)

    assert int(await ledger.checkpoints.read("projector/default") or 0) > 1_000
    assert await rows(ledger) == []


@pytest.mark.requirement("O-32", "O-82", "O-4")
async def test_a_replay_from_an_old_checkpoint_changes_nothing(server: KurrentServer, ledger: Ledger) -> None:
    async with opened(server) as source:
        await source.append("payment-1", [an_event(n) for n in range(20)])
        async with projecting(ledger, source):
            await until_rows(ledger, 20)
        before = await rows(ledger)
        async with ledger.database.transaction() as connection:
            await ledger.checkpoints.write(connection, "projector/default", str(BEGINNING))

        async with projecting(ledger, source) as again, asyncio.timeout(PATIENCE_S):
            while again.projected.duplicates < 20:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)

    assert await rows(ledger) == before


@pytest.mark.requirement("O-28")
async def test_a_connection_that_went_silent_ends_the_subscription(server: KurrentServer) -> None:
    """Nothing is closed, and nothing comes any more: without a sign of life the reader would wait for ever."""
    flowing = asyncio.Event()
    flowing.set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                await flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    talks: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", server.port)
        for one, other in ((reader, far_writer), (far_reader, writer)):
            talks.append(asyncio.create_task(relay(one, other)))

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = server.url.replace(str(server.port), str(listener.sockets[0].getsockname()[1]))
    source = KurrentSource(url.replace("=1000", "=300"), timeout_ms=5_000)
    async with opened(server) as writer:
        await writer.append("payment-1", [an_event(1)])
    async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
        await take(batches, 1)
        flowing.clear()

        with pytest.raises(SourceUnavailable):
            await take(batches, 1)

    flowing.set()
    await source.aclose()
    listener.close()
    await asyncio.gather(*talks)


@pytest.mark.requirement("X-74", "O-27")
async def test_events_of_others_are_parked_in_sight_and_nothing_stops_for_them(
    server: KurrentServer, ledger: Ledger
) -> None:
    """No JSON, no metadata: what other programs wrote long before."""
    foreign = [
        Raw(type="payment.completed.v1", data=b"\x00\xff", metadata=b"", content_type="application/octet-stream"),
        Raw(type="payment.completed.v1", data=b'{"number": 2}', metadata=b""),
        Raw(type="payment.completed.v1", data=b'{"number": 3}', metadata=b"{broken"),
    ]
    async with opened(server) as source, AsyncKurrentDBClient(server.url) as client:
        await client.append_to_stream("payment-9", events=foreign, current_version=StreamState.ANY)
        await source.append("payment-1", [an_event(4)])
        async with projecting(ledger, source):
            assert await until_rows(ledger, 1) == [4]

    reasons = [parked.error for parked in await ledger.parked.find()]
    assert [reason.partition(":")[0] for reason in reasons] == ["UnreadableEvent"] * 3
    assert "data is not JSON" in reasons[0]
    assert "lacks correlationId, source, occurredAt" in reasons[1]
    assert "metadata is not JSON" in reasons[2]


# Persistent subscriptions -------------------------------------------------------------------------------------------


@pytest.mark.requirement("O-28", "O-29", "O-36", "X-75")
async def test_a_persistent_subscription_hands_out_what_is_wanted_until_it_is_confirmed(server: KurrentServer) -> None:
    async with opened(server, group="outbox", prefixes=["payment.", "account."]) as source:
        await source.append("mixed", [an_event(1), an_event(2, "order.paid.v1"), an_event(3, "account.opened.v1")])
        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            batch = await anext(batches)
            await take(batches, 2 - len(batch.events))
            assert batch.position is None
        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            again, _ = await take(batches, 2)  # they were not confirmed
        assert sorted(event.data["number"] for event in again) == [1, 3]

        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            seen = 0
            while seen < 2:
                batch = await anext(batches)
                seen += len(batch.events)
                await source.confirm(batch)
            await asyncio.sleep(0.3)  # confirmations travel together, a moment later
        await source.append("mixed", [an_event(5)])
        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            rest, _ = await take(batches, 1)

    assert [event.data["number"] for event in rest] == [5]


@pytest.mark.requirement("O-2", "O-4", "O-28", "O-32")
async def test_projectors_share_a_persistent_subscription_and_outages_lose_nothing(
    server: KurrentServer, ledger: Ledger, told: Told
) -> None:
    count = 120
    async with (
        opened(server, group="outbox", batch_size=10) as one,
        opened(server, group="outbox", batch_size=10) as two,
        opened(server) as writer,
        projecting(ledger, one) as first,
        projecting(ledger, two) as second,
    ):
        for begin in range(0, count, 40):
            await writer.append(f"payment-{begin}", [an_event(n) for n in range(begin, begin + 40)])
            await until_rows(ledger, begin + 20)
            server.kill()
            await told.wait("projector.interrupted")
            server.restart()
        found = await until_rows(ledger, count)

        assert first.projected.created + second.projected.created == count
        assert server.parked("outbox") == 0

    assert found == list(range(count))


@pytest.mark.requirement("X-74")
async def test_what_a_persistent_subscription_cannot_store_is_parked_by_us_and_confirmed(
    server: KurrentServer, ledger: Ledger
) -> None:
    broken = EventRoutes()
    broken.on("payment.*", to="webhook:x", since="beginning", name="broken")(lambda event: event.data["no such key"])
    async with opened(server, group="outbox") as source:
        await source.append("payment-1", [an_event(1)])
        async with projecting(ledger, source, routes=broken) as projector, asyncio.timeout(PATIENCE_S):
            while not await ledger.parked.count():  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)  # confirmations travel together, a moment later
            assert (await projector.status()).position is None
        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            await source.append("payment-1", [an_event(2)])
            rest, _ = await take(batches, 1)

    assert [event.data["number"] for event in rest] == [2]
    assert server.parked("outbox") == 0


# Small things -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["", "redis://x", "esdb:", "esdb://host with space", None])
def test_an_address_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match=r"esdb\+discover"):
        KurrentSource(wrong)


def test_the_name_has_no_password() -> None:
    assert KurrentSource("esdb://admin:secret@host:2113?tls=false").name == "esdb://***@host:2113"
    with pytest.raises(InvalidOption, match=r"\*\*\*@host"):
        KurrentSource("http://admin:secret@host")


async def test_appending_checks_version_and_ids(server: KurrentServer) -> None:
    async with opened(server) as source:
        await source.append("payment-1", [an_event(1)], expected_version=NO_STREAM)

        with pytest.raises(WrongVersion, match="at version 0, not at version 7"):
            await source.append("payment-1", [an_event(2)], expected_version=7)
        odd = NewEvent(type="t", data={}, metadata=an_event().metadata, id="not-a-uuid")
        with pytest.raises(InvalidOption, match="a UUID"):
            await source.append("payment-1", [odd])


async def test_a_server_that_is_not_there_is_said_to_be_away() -> None:
    source = KurrentSource("esdb://127.0.0.1:1?tls=false", timeout_ms=2_000)

    with pytest.raises(SourceUnavailable, match="does not answer"):
        await source.head()

    assert not (await source.check()).ok
    await source.aclose()


if os.environ.get("BULLPEN_TEST_KURRENT"):

    async def test_a_real_server_does_the_same() -> None:
        url, kind = os.environ["BULLPEN_TEST_KURRENT"], f"t{uuid.uuid4().hex}."
        source = KurrentSource(url, prefixes=[kind])
        stream, begin = f"s-{uuid.uuid4().hex}", await KurrentSource(url).head()
        await source.append(stream, [an_event(1, f"{kind}a"), an_event(2, "other")], expected_version=NO_STREAM)
        with pytest.raises(WrongVersion):
            await source.append(stream, [an_event(3, f"{kind}b")], expected_version=7)
        await source.append(stream, [an_event(3, f"{kind}b")], expected_version=1)

        async with contextlib.aclosing(source.subscribe(begin)) as batches:
            got, position = await take(batches, 2)
        read = [event async for batch in source.read(begin, until=await source.head()) for event in batch.events]
        grouped = KurrentSource(url, prefixes=[kind], group=f"g-{uuid.uuid4().hex}")
        async with contextlib.aclosing(grouped.subscribe(BEGINNING)) as batches:
            handed, _ = await take(batches, 2)

        assert [event.data["number"] for event in got] == [1, 3]
        assert [event.id for event in read] == [event.id for event in got]
        assert {event.id for event in handed} == {event.id for event in got}
        assert position >= got[-1].position
        await source.aclose()
        await grouped.aclose()


# What the client cannot decode --------------------------------------------------------------------------------------

DAMAGES: list[dict[str, Any]] = [
    {"stream": "payment-\udcff"},
    {"created": 10**40},
    {"created": -(10**30)},
    {"id": "no uuid"},
]


@pytest.mark.parametrize("group", [None, "outbox"])
async def test_an_event_that_the_client_cannot_decode_is_parked_and_its_neighbours_are_stored(
    server: KurrentServer, ledger: Ledger, group: str | None
) -> None:
    """It ended the projector at its place, and again after each start."""
    damages = DAMAGES if group is None else DAMAGES[:-1]  # without its id nobody can confirm an event
    async with opened(server, group=group) as source:
        await source.append("payment-1", [an_event(n) for n in range(2 * len(damages) + 1)])
        for number, damage in enumerate(damages):
            server.damage(2 * number + 1, **damage)
        for added in (0, 1):
            if added:
                await source.append("payment-1", [an_event(99)])
            async with projecting(ledger, source):
                found = await until_rows(ledger, len(damages) + 1 + added)
        parked = await ledger.parked.find()

    assert found == [*range(0, 2 * len(damages) + 1, 2), 99]
    assert len(parked) == len(damages)
    assert all("cannot be decoded" in each.error for each in parked)


async def test_reading_and_asking_for_the_head_survive_what_cannot_be_decoded(server: KurrentServer) -> None:
    async with opened(server) as source:
        position = await source.append("payment-1", [an_event(n) for n in range(3)])
        server.damage(1, stream="payment-\udcff")
        server.damage(2, created=10**40)

        assert await source.head() == position
        assert (await source.check()).ok
        events = [event async for batch in source.read(BEGINNING, until=position) for event in batch.events]

    assert [event.problem is None for event in events] == [True, False, False]


@given(
    stream=st.binary(max_size=12),
    created=st.text(max_size=40) | st.integers().map(str),
    event_id=st.text(min_size=1, max_size=40) | st.uuids().map(str),
    type=st.text(max_size=10),
    content=st.binary(max_size=20),
    has_position=st.booleans(),
)
def test_whatever_the_server_sends_becomes_an_event(
    stream: bytes, created: str, event_id: str, type: str, content: bytes, has_position: bool
) -> None:
    recorded = streams_pb2.ReadResp.ReadEvent.RecordedEvent(
        id=shared_pb2.UUID(string=event_id),
        stream_identifier=shared_pb2.StreamIdentifier(stream_name=stream),
        commit_position=7,
        metadata={"type": type, "created": created},
        custom_metadata=content,
        data=content,
    )
    position: dict[str, Any] = {"commit_position": 7} if has_position else {"no_position": shared_pb2.Empty()}
    response = streams_pb2.ReadResp(event=streams_pb2.ReadResp.ReadEvent(event=recorded, **position))

    decoded = construct_recorded_event(_repaired(response).event)
    assert decoded is not None
    event = _event(decoded)

    assert (event.position, event.data_bytes, event.type) == (7, content, type)
    assert event.problem is not None or event.metadata_bytes == content
    uuid.UUID(event.id)

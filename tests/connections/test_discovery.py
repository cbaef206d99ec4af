"""How the answers of sentinels and clusters are read."""

from __future__ import annotations

from typing import Any

import pytest

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.queue._address import ClusterAddress, Endpoint, SentinelAddress
from bullpen.queue._discovery import Directory, Shard, Unavailable, pick
from bullpen.wire.keys import slot

ONE, TWO, THREE = (Endpoint(host=host, port=7000) for host in ("one", "two", "three"))
SENTINELS = SentinelAddress(seeds=(ONE, TWO), service="orders", node=Endpoint(db=2, password="secret"))
CLUSTER = ClusterAddress(seeds=(ONE, TWO))


def watched(host: str, port: int, flags: str = "master") -> list[bytes]:
    return [b"name", b"orders", b"ip", host.encode(), b"port", b"%d" % port, b"flags", flags.encode()]


def owned(first: int, last: int, host: bytes | None, port: int) -> list[Any]:
    return [first, last, [host, port, b"id"], [b"replica", 1, b"id"]]


class TestSentinel:
    def test_the_primary_gets_the_introduction_of_the_address(self) -> None:
        """Host and port are the sentinels', database and password the user's."""
        (shard,) = Directory(SENTINELS).read(ONE, watched("10.0.0.7", 6380))

        assert shard.primary == Endpoint(host="10.0.0.7", port=6380, db=2, password="secret")
        assert pick([shard], "bull:orders:wait") is shard.primary

    @pytest.mark.parametrize("flags", ["s_down,master", "s_down,o_down,master,disconnected"])
    def test_a_primary_that_is_down_is_not_tried(self, flags: str) -> None:
        """Connecting to a machine that is off costs the whole time-out."""
        with pytest.raises(Unavailable, match=r"10\.0\.0\.7:6380 is down"):
            Directory(SENTINELS).read(ONE, watched("10.0.0.7", 6380, flags))

    def test_who_answered_is_asked_first_next_time(self) -> None:
        directory = Directory(SENTINELS)

        directory.read(TWO, watched("10.0.0.7", 6380))

        assert directory.candidates() == [TWO, ONE]


class TestCluster:
    def test_a_key_is_looked_for_at_the_owner_of_its_slot(self) -> None:
        shards = Directory(CLUSTER).read(ONE, [owned(0, 8000, b"one", 7000), owned(8001, 16383, b"three", 7000)])

        assert slot("{bull}:orders:wait") == 9263
        assert pick(shards, "{bull}:orders:wait") == THREE
        assert pick(shards, None) == ONE

    @pytest.mark.parametrize("host", [b"", None, b"?"])
    def test_a_node_that_does_not_know_its_name_has_the_one_we_came_by(self, host: bytes | None) -> None:
        """Redis 7 answers so behind some proxies; the name that worked is the best guess."""
        (shard,) = Directory(CLUSTER).read(TWO, [owned(0, 16383, host, 7001)])

        assert shard == Shard(0, 16383, Endpoint(host="two", port=7001))

    def test_nodes_that_were_learned_outlive_the_seeds(self) -> None:
        """Seeds are written down once; nodes come and go over the years."""
        directory = Directory(CLUSTER)

        directory.read(TWO, [owned(0, 16383, b"three", 7000)])

        assert directory.candidates() == [TWO, THREE, ONE]

    def test_a_slot_without_owner_is_waited_for(self) -> None:
        shards = Directory(CLUSTER).read(ONE, [owned(0, 100, b"one", 7000)])

        with pytest.raises(Unavailable, match="slot 9263 of the cluster is served by nobody now"):
            pick(shards, "{bull}:orders:wait")

    def test_a_node_without_slots_is_no_answer(self) -> None:
        with pytest.raises(Unavailable, match="the cluster is not set up"):
            Directory(CLUSTER).read(ONE, [])


@pytest.mark.parametrize("reply", [None, [], [b"ip"], b"PONG", [b"ip", b"one", b"port", b"?"], [[1, 2]], [[1, 2, 3]]])
@pytest.mark.parametrize("address", [SENTINELS, CLUSTER])
def test_an_answer_that_makes_no_sense_is_refused(address: SentinelAddress | ClusterAddress, reply: Any) -> None:
    """Some other server listens there, or a proxy."""
    with pytest.raises((ServerRefused, Unavailable)):
        Directory(address).read(ONE, reply)


def test_when_all_refuse_waiting_is_pointless() -> None:
    """A wrong password is told at once, a sentinel that is away is waited for."""
    directory = Directory(SENTINELS)
    refused = directory.nobody([(ONE, ServerRefused("NOAUTH")), (TWO, ServerRefused("ERR No such master"))])
    away = directory.nobody([(ONE, ServerRefused("NOAUTH")), (TWO, ConnectionLost("cannot connect"))])

    assert type(refused) is ServerRefused
    assert type(away) is ConnectionLost
    assert str(refused) == (
        "service 'orders' of sentinels one:7000, two:7000: nobody tells where the primary is "
        "(one:7000: NOAUTH; two:7000: ERR No such master)"
    )

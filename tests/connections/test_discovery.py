"""How the answers of sentinels and clusters are read."""

from __future__ import annotations

from typing import Any

import pytest

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.redis.address import ClusterAddress, NodeAddress, SentinelAddress
from bullpen.redis.discovery import Directory, ServerUnavailable, Shard, pick
from bullpen.wire.keys import slot

ONE, TWO, THREE = (NodeAddress(host=host, port=7000) for host in ("one", "two", "three"))
SENTINELS = SentinelAddress(seeds=(ONE, TWO), service="orders", node=NodeAddress(db=2, password="secret"))
CLUSTER = ClusterAddress(seeds=(ONE, TWO))


def told(host: str, port: int = 6380, flags: str = "master", epoch: int = 1, named: str | None = None) -> list[Any]:
    """A sentinel's answers: the address it gives, and what it knows of the primary it was configured with."""
    fields = {"name": "orders", "ip": host, "port": str(port), "flags": flags, "config-epoch": str(epoch)}
    flat = [word.encode() for pair in fields.items() for word in pair]
    return [[(named or host).encode(), b"%d" % port], flat]


def owned(first: int, last: int, host: bytes | None, port: int) -> list[Any]:
    return [first, last, [host, port, b"id"], [b"replica", 1, b"id"]]


class TestSentinel:
    @staticmethod
    def decide(*answers: list[Any]) -> str:
        directory = Directory(SENTINELS)
        (shard,) = directory.decide([directory.read(ONE, answer) for answer in answers])
        return shard.primary.host

    def test_the_primary_gets_the_introduction_of_the_address(self) -> None:
        """Host and port are the sentinels', database and password the user's."""
        directory = Directory(SENTINELS)
        (shard,) = directory.decide([directory.read(ONE, told("10.0.0.7", 6380))])

        assert shard.primary == NodeAddress(host="10.0.0.7", port=6380, db=2, password="secret")
        assert pick([shard], "bull:orders:wait") is shard.primary

    @pytest.mark.parametrize("flags", ["s_down,master", "s_down,o_down,master,disconnected"])
    def test_a_primary_that_is_down_is_not_tried(self, flags: str) -> None:
        """Connecting to a machine that is off costs the whole time-out."""
        with pytest.raises(ServerUnavailable, match=r"10\.0\.0\.7:6380 is down"):
            self.decide(told("10.0.0.7", flags=flags))
        assert self.decide(told("10.0.0.7", flags=flags), told("10.0.0.7")) == "10.0.0.7"

    def test_the_newest_configuration_wins(self) -> None:
        """Sentinels that were cut off, or have not heard of it yet, name the old primary."""
        assert self.decide(told("old", epoch=1), told("old", epoch=1), told("new", epoch=2)) == "new"

    def test_during_a_failover_the_old_primary_is_not_used(self) -> None:
        """Only the sentinel that leads it knows; what the old primary takes is thrown away."""
        leading = told("old", flags="master,failover_in_progress")

        with pytest.raises(ServerUnavailable, match="a failover is under way"):
            self.decide(told("old"), leading, told("old"))

    def test_the_new_primary_is_used_as_soon_as_there_is_one(self) -> None:
        leading = told("old", flags="master,failover_in_progress", named="new")

        assert self.decide(told("old"), told("old"), leading) == "new"

    def test_one_of_the_questions_may_be_forbidden(self) -> None:
        named, fields = told("10.0.0.7")

        assert self.decide([ServerRefused("NOPERM"), fields]) == "10.0.0.7"
        assert self.decide([named, ServerRefused("NOPERM")]) == "10.0.0.7"
        with pytest.raises(ServerRefused, match="NOPERM"):
            self.decide([ServerRefused("NOPERM"), ServerRefused("NOPERM")])


class TestCluster:
    def test_a_key_is_looked_for_at_the_owner_of_its_slot(self) -> None:
        shards = (
            Directory(CLUSTER).read(ONE, [[owned(0, 8000, b"one", 7000), owned(8001, 16383, b"three", 7000)]]).shards
        )

        assert slot("{bull}:orders:wait") == 9263
        assert pick(shards, "{bull}:orders:wait") == THREE
        assert pick(shards, None) == ONE

    @pytest.mark.parametrize("host", [b"", None, b"?"])
    def test_a_node_that_does_not_know_its_name_has_the_one_we_came_by(self, host: bytes | None) -> None:
        """Redis 7 answers so behind some proxies; the name that worked is the best guess."""
        (shard,) = Directory(CLUSTER).read(TWO, [[owned(0, 16383, host, 7001)]]).shards

        assert shard == Shard(0, 16383, NodeAddress(host="two", port=7001))

    def test_nodes_that_were_learned_outlive_the_seeds(self) -> None:
        """Seeds are written down once; nodes come and go over the years."""
        directory = Directory(CLUSTER)

        directory.read(TWO, [[owned(0, 16383, b"three", 7000)]])

        assert directory.candidates() == [TWO, THREE, ONE]

    def test_a_slot_without_owner_is_waited_for(self) -> None:
        shards = Directory(CLUSTER).read(ONE, [[owned(0, 100, b"one", 7000)]]).shards

        with pytest.raises(ServerUnavailable, match="slot 9263 of the cluster is served by no node now"):
            pick(shards, "{bull}:orders:wait")

    def test_a_node_without_slots_is_no_answer(self) -> None:
        with pytest.raises(ServerUnavailable, match="the cluster is not set up"):
            Directory(CLUSTER).read(ONE, [[]])


@pytest.mark.parametrize("reply", [None, [], [b"ip"], b"PONG", [b"ip", b"one", b"port", b"?"], [[1, 2]], [[1, 2, 3]]])
@pytest.mark.parametrize("address", [SENTINELS, CLUSTER])
def test_an_answer_that_makes_no_sense_is_refused(address: SentinelAddress | ClusterAddress, reply: Any) -> None:
    """Some other server listens there, or a proxy."""
    with pytest.raises((ServerRefused, ServerUnavailable)):
        Directory(address).read(ONE, [reply, reply] if address is SENTINELS else [reply])


def test_when_all_refuse_waiting_is_pointless() -> None:
    """A wrong password is told at once, a sentinel that is away is waited for."""
    directory = Directory(SENTINELS)
    refused = directory.nobody([(ONE, ServerRefused("NOAUTH")), (TWO, ServerRefused("ERR No such master"))])
    away = directory.nobody([(ONE, ServerRefused("NOAUTH")), (TWO, ConnectionLost("cannot connect"))])

    assert type(refused) is ServerRefused
    assert type(away) is ConnectionLost
    assert str(refused) == (
        "service 'orders' of sentinels one:7000, two:7000: no sentinel knows the primary "
        "(one:7000: NOAUTH; two:7000: ERR No such master)"
    )

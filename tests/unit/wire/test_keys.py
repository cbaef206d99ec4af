"""The Redis keys of a queue."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.ids import check_job_id
from bullpen.errors import InvalidOption
from bullpen.wire.keys import EXTENSION_KEYS, JOB_SUFFIXES, RESERVED, QueueKeys, client_name, hash_tag, slot

KEYS = QueueKeys("bull", "orders")

# What BullMQ writes, typed once more: a slip in the table of names must not confirm itself.
QUEUE_LEVEL = {
    "meta": "bull:orders:meta",
    "id": "bull:orders:id",
    "wait": "bull:orders:wait",
    "paused": "bull:orders:paused",
    "active": "bull:orders:active",
    "prioritized": "bull:orders:prioritized",
    "pc": "bull:orders:pc",
    "delayed": "bull:orders:delayed",
    "waiting_children": "bull:orders:waiting-children",
    "completed": "bull:orders:completed",
    "failed": "bull:orders:failed",
    "stalled": "bull:orders:stalled",
    "stalled_check": "bull:orders:stalled-check",
    "limiter": "bull:orders:limiter",
    "marker": "bull:orders:marker",
    "events": "bull:orders:events",
    "repeat": "bull:orders:repeat",
    "metrics_completed": "bull:orders:metrics:completed",
    "metrics_completed_data": "bull:orders:metrics:completed:data",
    "metrics_failed": "bull:orders:metrics:failed",
    "metrics_failed_data": "bull:orders:metrics:failed:data",
    "delay": "bull:orders:delay",
    "priority": "bull:orders:priority",
}


@pytest.mark.requirement("Q-28", "Q-31", "Q-32", "Q-33", "Q-34", "Q-35", "X-97")
@pytest.mark.parametrize(("attribute", "key"), QUEUE_LEVEL.items())
def test_queue_keys_are_named_as_in_the_protocol(attribute: str, key: str) -> None:
    """Node looks for exactly these; braces in the protocol's text are placeholders."""
    assert getattr(KEYS, attribute) == key


@pytest.mark.requirement("Q-28", "Q-36")
def test_job_keys_are_the_base_and_the_id() -> None:
    """Scripts build job keys the same way."""
    assert KEYS.base == "bull:orders:"
    assert KEYS.job("7") == "bull:orders:7"
    assert KEYS.lock("7") == "bull:orders:7:lock"
    assert KEYS.logs("7") == "bull:orders:7:logs"
    assert KEYS.dependencies("7") == "bull:orders:7:dependencies"
    assert KEYS.processed("7") == "bull:orders:7:processed"
    assert KEYS.failed_children("7") == "bull:orders:7:failed"
    assert KEYS.unsuccessful("7") == "bull:orders:7:unsuccessful"


def test_all_keys_of_a_job_are_listed_for_its_removal() -> None:
    """A key that is forgotten here would stay for ever."""
    expected = {"bull:orders:7", *(f"bull:orders:7:{suffix}" for suffix in JOB_SUFFIXES)}

    assert set(KEYS.job_keys("7")) == expected
    assert len(expected) == 7


def test_scheduler_and_deduplication_keys() -> None:
    """Jobs of Node carry these ids, and settling them touches these keys."""
    assert KEYS.scheduler("nightly") == "bull:orders:repeat:nightly"
    assert KEYS.deduplication("a") == "bull:orders:de:a"
    assert KEYS.deduplication_next("a") == "bull:orders:dn:a"


def test_keys_of_ours_have_a_second_colon_and_stand_in_the_table() -> None:
    """Node's cleaner of orphans deletes `bull:orders:x`, not `bull:orders:x:y`."""
    ours = [
        KEYS.audit,
        KEYS.call("w1"),
        KEYS.letters("index"),
        KEYS.synced("w1"),
        KEYS.turns("open:ai"),
        KEYS.users("ledgers"),
    ]

    assert ours == [
        "bull:orders:bp:audit:log",
        "bull:orders:bp:call:w1",
        "bull:orders:bp:letters:index",
        "bull:orders:bp:synced:w1",
        "bull:orders:bp:turns:open%3Aai",
        "bull:orders:bp:users:ledgers",
    ]
    for key in ours:
        assert any(key.removeprefix(KEYS.base).startswith(kind) for kind in EXTENSION_KEYS)


@pytest.mark.requirement("X-45")
def test_every_word_after_the_base_is_reserved_for_the_queue() -> None:
    """No job id can be made that is a key of the queue."""
    for key in QUEUE_LEVEL.values():
        suffix = key.removeprefix(KEYS.base)
        assert suffix.partition(":")[0] in RESERVED
        with pytest.raises(InvalidOption):
            check_job_id(suffix)


@pytest.mark.requirement("X-45")
@given(st.lists(st.sampled_from([*sorted(RESERVED), "a", "0", "data", "7"]), min_size=1, max_size=4).map(":".join))
def test_an_accepted_id_never_names_another_key_of_the_queue(job_id: str) -> None:
    """Nor one that another job owns."""
    try:
        check_job_id(job_id)
    except InvalidOption:
        return

    others = {*QUEUE_LEVEL.values(), KEYS.scheduler("a"), KEYS.deduplication("a"), KEYS.call("a")}
    others |= {key for other in ("a", "7", "a:a:a") if other != job_id for key in KEYS.job_keys(other)}
    assert others.isdisjoint(KEYS.job_keys(job_id))


def test_the_id_behind_a_job_key() -> None:
    """Scheduler jobs have colons in their ids."""
    assert KEYS.job_id_of("bull:orders:repeat:x:5") == "repeat:x:5"
    assert KEYS.job_id_of("bull:other:7") is None
    assert KEYS.job_id_of("bull:orders:") is None


def test_keys_are_frozen_values() -> None:
    """They are shared by everything that touches the queue."""
    with pytest.raises(AttributeError, match="frozen: wait cannot be set"):
        KEYS.wait = "x"
    with pytest.raises(AttributeError, match="frozen: wait cannot be deleted"):
        del KEYS.wait

    assert KEYS == QueueKeys("bull", "orders") != QueueKeys("bull", "other")
    assert hash(KEYS) == hash(QueueKeys("bull", "orders"))
    assert KEYS != "bull:orders:"
    assert repr(KEYS) == "QueueKeys('bull', 'orders')"
    assert pickle.loads(pickle.dumps(KEYS)) == KEYS


def test_names_are_checked_when_keys_are_made() -> None:
    """Nobody looks again later."""
    with pytest.raises(InvalidOption, match=r"queue: .*did you mean 'a-b'"):
        QueueKeys("bull", "a:b")
    with pytest.raises(InvalidOption, match="prefix"):
        QueueKeys("", "a")


@pytest.mark.requirement("W-24")
def test_the_dead_letter_queue_keeps_the_cluster_tag() -> None:
    """One script writes to both queues, so they must share a slot."""
    tagged = QueueKeys("bull", "{orders}")

    assert KEYS.dead_letter_name() == "orders-dlq"
    assert tagged.dead_letter_name("-dead") == "{orders}-dead"
    assert slot(tagged.wait) == slot(QueueKeys("bull", tagged.dead_letter_name()).wait)
    with pytest.raises(InvalidOption, match="queue"):
        KEYS.dead_letter_name(":dlq")


@pytest.mark.requirement("X-97")
@pytest.mark.parametrize(
    ("key", "tag"),
    [
        ("bull:orders:wait", None),
        ("{bull}:orders:wait", "bull"),
        ("bull:{orders}:wait", "orders"),
        ("a{}b{c}", None),
        ("a{b", None),
        ("a}b{c}", "c"),
        ("{{a}}", "{a"),
    ],
)
def test_the_hash_tag_is_found_as_the_servers_find_it(key: str, tag: str | None) -> None:
    """The first brace and the next closing one, if anything stands between."""
    assert hash_tag(key) == tag


@pytest.mark.parametrize(("key", "number"), [("123456789", 12739), ("foo", 12182), ("{foo}bar", 12182), ("", 0)])
def test_slots_are_computed_as_the_servers_compute_them(key: str, number: int) -> None:
    """0x31C3 for "123456789" is the check value of the checksum."""
    assert slot(key) == number


@pytest.mark.requirement("X-97")
def test_with_a_tag_every_key_of_a_queue_is_in_one_slot() -> None:
    """A script may only touch keys of one slot."""
    keys = QueueKeys("{bull}", "orders")

    slots = {slot(getattr(keys, name)) for name in QUEUE_LEVEL} | {slot(key) for key in keys.job_keys("x{y}z")}

    assert len(slots) == 1
    assert (keys.hash_tag, KEYS.hash_tag) == ("bull", None)


def test_the_connection_of_a_worker_tells_queue_and_worker() -> None:
    """Node finds workers by this name; it cannot hold spaces."""
    assert client_name("bull", "orders") == "bull:b3JkZXJz"
    assert client_name("bull", "orders", "my host:1-2") == "bull:b3JkZXJz:w:myhost1-2"

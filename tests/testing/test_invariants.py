"""The checker of queue structures: it accepts what the protocol allows and names what it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from bullpen.testing import RedisServer, Violation, assert_sound, check_queue, check_server, find_queues

pytestmark = [pytest.mark.leaves_queue_broken]

BASE = "bull:orders:"
Client = redis.Redis


@pytest.fixture
def client(redis_server: RedisServer, redis_url: str) -> Iterator[Client]:
    client = redis.Redis.from_url(redis_url, protocol=2)
    yield client
    client.close()


def _job(client: Client, job_id: str) -> None:
    client.hset(BASE + job_id, mapping={"name": "n", "data": "{}", "opts": "{}", "timestamp": "1"})


def _sound_queue(client: Client) -> None:
    """One job in each state, with everything that may belong to it."""
    client.hset(f"{BASE}meta", mapping={"opts.maxLenEvents": "10000", "version": "bullmq:6.7.0"})
    client.set(f"{BASE}id", 9)
    for job_id in ["1", "2", "3", "4", "5", "6", "7", "repeat:tick:1700000000000"]:
        _job(client, job_id)
    client.lpush(f"{BASE}wait", "1")
    client.zadd(f"{BASE}marker", {"0": 0, "1": 1_700_000_000_000})
    client.lpush(f"{BASE}active", "2")
    client.set(f"{BASE}2:lock", "token", px=60_000)
    client.sadd(f"{BASE}stalled", "2")
    client.zadd(f"{BASE}prioritized", {"3": 5 * 2**32 + 1})
    client.set(f"{BASE}pc", 1)
    client.zadd(f"{BASE}delayed", {"4": 1, "repeat:tick:1700000000000": 2})
    client.zadd(f"{BASE}repeat", {"tick": 1_700_000_000_000})
    client.hset(f"{BASE}repeat:tick", mapping={"name": "n", "ic": "1", "every": "1000"})
    client.zadd(f"{BASE}waiting-children", {"5": 1})
    client.sadd(f"{BASE}5:dependencies", f"{BASE}1")
    client.hset(f"{BASE}5:processed", f"{BASE}8", "null")
    client.hset(f"{BASE}5:failed", f"{BASE}8", "reason")
    client.zadd(f"{BASE}5:unsuccessful", {f"{BASE}8": 1})
    client.zadd(f"{BASE}completed", {"6": 1})
    client.rpush(f"{BASE}6:logs", "line")
    client.zadd(f"{BASE}failed", {"7": 1})
    client.xadd(f"{BASE}events", {"event": "added", "jobId": "1"})
    client.set(f"{BASE}de:unique", "1")
    client.set(f"{BASE}de:throttled", "gone", px=60_000)
    client.hset(f"{BASE}dn:unique", "name", "n")
    client.set(f"{BASE}stalled-check", 1, px=60_000)
    client.hset(f"{BASE}metrics:completed", "count", 1)
    client.rpush(f"{BASE}metrics:completed:data", 1)
    client.set(f"{BASE}bp:call:me", "1", px=60_000)


def _somebody_works(client: Client) -> None:
    _job(client, "2")
    client.lpush(f"{BASE}active", "2")
    client.set(f"{BASE}2:lock", "token")


def _rules(found: list[Violation]) -> set[str]:
    return {violation.rule for violation in found}


def test_a_sound_queue_has_no_violations(client: Client) -> None:
    """Every structure that Node and we write is known."""
    _sound_queue(client)

    assert check_queue(client, "bull", "orders") == []
    assert check_server(client) == []
    assert_sound(client, "bull", "orders")


Damage = Callable[[Client], object]
DAMAGES: list[tuple[str, str, Damage]] = [
    ("id in several states", "'1' is in wait, delayed", lambda c: c.zadd(f"{BASE}delayed", {"1": 5})),
    ("id in several states", "'1' is in wait ×2", lambda c: c.lpush(f"{BASE}wait", "1")),
    ("ghost", "'1' is in wait, but has no job hash", lambda c: c.delete(f"{BASE}1")),
    ("ghost", "scheduler 'tick' is listed", lambda c: c.delete(f"{BASE}repeat:tick")),
    ("job in no state", "'6' has a hash", lambda c: c.zrem(f"{BASE}completed", "6")),
    ("job in no state", "'repeat:tick' has a hash", lambda c: c.zrem(f"{BASE}repeat", "tick")),
    ("lock without active", "'1' is locked", lambda c: c.set(f"{BASE}1:lock", "token")),
    ("orphan", "is left of job '99'", lambda c: c.rpush(f"{BASE}99:logs", "line")),
    ("orphan", "is left of job '99'", lambda c: c.set(f"{BASE}99:lock", "token")),
    ("orphan", "is left of job '99'", lambda c: c.hset(f"{BASE}99:processed", "a", "b")),
    ("unknown key", "'bull:orders:surprise' (string)", lambda c: c.set(f"{BASE}surprise", 1)),
    ("unknown key", "'bull:orders:' (string)", lambda c: c.set(BASE, 1)),
    ("wrong type", "'limiter' is a hash", lambda c: c.hset(f"{BASE}limiter", "a", "b")),
    ("wrong type", "'wait' is a set", lambda c: [c.delete(f"{BASE}wait"), c.sadd(f"{BASE}wait", "1")]),
    ("wrong type", "'1:logs' is a string", lambda c: c.set(f"{BASE}1:logs", "line")),
    ("foreign marker", "a member '2'", lambda c: c.zadd(f"{BASE}marker", {"2": 0})),
    ("foreign marker", "score 7.0", lambda c: c.zadd(f"{BASE}marker", {"0": 7})),
    ("priority counter", "pc is 0", lambda c: c.set(f"{BASE}pc", 0)),
    ("extension without TTL", "bp:call:me", lambda c: c.persist(f"{BASE}bp:call:me")),
    ("stale deduplication", "'de:unique' is held", lambda c: c.set(f"{BASE}de:unique", "gone")),
]


@pytest.mark.parametrize(("rule", "detail", "damage"), DAMAGES, ids=[f"{d[0]}: {d[1]}" for d in DAMAGES])
def test_each_kind_of_damage_is_named(client: Client, rule: str, detail: str, damage: Damage) -> None:
    """A checker that misses something is worse than none."""
    _sound_queue(client)

    damage(client)

    found = check_queue(client, "bull", "orders")
    assert any(violation.rule == rule and detail in violation.detail for violation in found), list(map(str, found))
    with pytest.raises(AssertionError, match="structures are broken"):
        assert_sound(client, "bull", "orders")


def test_an_active_job_without_lock_is_accepted_only_if_marked_or_in_flight(client: Client) -> None:
    """Between the death of a worker and the stalled check a job has no lock, and that is legal."""
    _sound_queue(client)
    client.delete(f"{BASE}2:lock")

    marked = check_queue(client, "bull", "orders")
    client.delete(f"{BASE}stalled")
    unmarked = check_queue(client, "bull", "orders")

    assert marked == []
    assert _rules(unmarked) == {"active without lock"}
    assert check_queue(client, "bull", "orders", in_flight=True) == []


def test_nothing_may_be_active_at_rest(client: Client) -> None:
    """At the end of a whole run even a proper lock is a leftover."""
    _sound_queue(client)

    assert _rules(check_queue(client, "bull", "orders", at_rest=True)) == {"active at rest"}


@pytest.mark.parametrize(
    ("reason", "excuse"),
    [
        ("paused", lambda c: c.hset(f"{BASE}meta", "paused", 1)),
        ("limited", lambda c: c.set(f"{BASE}limiter", 9, px=60_000)),
        ("at its concurrency", lambda c: c.hset(f"{BASE}meta", "concurrency", 0)),
        ("somebody works", _somebody_works),
    ],
)
def test_ready_work_needs_a_marker_unless_nobody_may_take_it(client: Client, reason: str, excuse: Damage) -> None:
    """Without a marker an idle worker sleeps for seconds; a stopped queue must not wake it."""
    _job(client, "1")
    client.lpush(f"{BASE}wait", "1")

    assert _rules(check_queue(client, "bull", "orders")) == {"missing marker"}
    excuse(client)
    assert check_queue(client, "bull", "orders") == [], reason


def test_jobs_at_the_front_of_their_class_took_no_number(client: Client) -> None:
    """A returned prioritized job has the bare score of its class, so the counter may be below the count."""
    for job_id in ("1", "2"):
        _job(client, job_id)
    client.zadd(f"{BASE}prioritized", {"1": 3 * 2**32, "2": 3 * 2**32 + 1})
    client.zadd(f"{BASE}marker", {"0": 0})
    client.set(f"{BASE}pc", 1)

    assert check_queue(client, "bull", "orders") == []


def test_ids_with_colons_and_odd_bytes_are_understood(client: Client) -> None:
    """Three-segment ids are legal, also when they look like a queue of their own; foreign ids may be any bytes."""
    client.set(f"{BASE}id", 1)
    _job(client, "a:b:meta")
    client.hset(BASE.encode() + b"\xff", "name", "n")
    client.zadd(f"{BASE}completed", {b"a:b:meta": 1, b"\xff": 1})

    assert find_queues(client) == [("bull", "orders")]
    assert check_server(client) == []


def test_queues_are_found_by_prefix_and_without(client: Client) -> None:
    """Tests use prefixes of their own, also with characters that mean something to SCAN."""
    client.set("bull:orders:id", 1)
    client.set("{bull}:emails:id", 1)
    client.set("a[b]*:odd:id", 1)
    client.set("lonely", 1)

    assert find_queues(client) == [("a[b]*", "odd"), ("bull", "orders"), ("{bull}", "emails")]
    assert find_queues(client, "a[b]*") == [("a[b]*", "odd")]
    assert check_server(client) == [Violation("", "stray key", "'lonely' belongs to no queue")]
    assert str(check_server(client)[0]) == "(no queue): stray key: 'lonely' belongs to no queue"


def test_a_decoding_client_is_welcome(redis_url: str) -> None:
    """Whoever has a client with decode_responses may use it."""
    with redis.Redis.from_url(redis_url, protocol=3, decode_responses=True) as client:
        _sound_queue(client)

        assert check_server(client) == []

"""`bullpen bench`: it measures, loses nothing, leaves nothing behind and asks before it disturbs others."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from bullpen.cli.bench.measure import Bench, JobsMissing, Sizes
from bullpen.redis import Connection
from bullpen.testing import RedisServer
from tests.flows._cli import Terminal, cli
from tests.flows._warm import Warm

FIGURES = [
    *("round_trip_p50", "round_trip_p99", "add_one_by_one", "add_in_flight", "add_bulk", "drain"),
    *("latency_start_p50", "latency_start_p99", "latency_result_p50", "latency_result_p99"),
]


def test_all_figures_are_found_and_nothing_stays(redis_url: str, redis_server: RedisServer, tmp_path: Path) -> None:
    """Whoever tries it on a server of theirs finds it as it was."""
    arguments = ("--jobs", "300", "--concurrency", "7", "--payload", "200", "--json")

    answer = cli("bench", *arguments, "--redis", redis_url, cwd=tmp_path)

    found = json.loads(answer.out)
    assert answer.code == 0
    assert [figure["name"] for figure in found["figures"]] == FIGURES
    assert all(figure["value"] > 0 for figure in found["figures"])
    assert (found["jobs"], found["concurrency"], found["payloadBytes"]) == (300, 7, 200)
    assert "concurrency 7" in found["figures"][5]["title"]
    assert redis_server.client().keys("*") == []


def test_a_table_is_printed_for_people(redis_url: str, tmp_path: Path) -> None:
    terminal = Terminal("bench", "--jobs", "100", "--redis", redis_url, cwd=tmp_path)

    assert terminal.end() == 0
    assert "add in bulk" in terminal.text
    assert "latency" in terminal.text  # the bar names the step


def test_options_change_what_is_stored(redis_url: str, redis_server: RedisServer, tmp_path: Path, warm: Warm) -> None:
    """Prefix, number and size of the jobs are those that were asked for, seen while it runs."""
    terminal = warm.start(
        *("bench", "--jobs", "20000", "--payload", "500", "--prefix", "shop", "--redis", redis_url), cwd=tmp_path
    )
    client: Any = redis_server.client()
    base = wait_for_queue(client, "shop:bullpen-bench-*:1").removesuffix(b"1")

    stored = client.hget(base + b"1", "data")

    terminal.type("\x03")
    terminal.end()
    assert len(stored) == 500


def wait_for_queue(client: Any, pattern: str) -> bytes:
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at:
        for key in client.scan_iter(pattern, count=10_000):
            assert isinstance(key, bytes)
            return key
    raise AssertionError(f"no key like {pattern}")


def test_an_interrupted_run_removes_its_queue(
    redis_url: str, redis_server: RedisServer, tmp_path: Path, warm: Warm
) -> None:
    """Ctrl-C in the middle of 100 000 jobs must not leave them to the owner of the server."""
    terminal = warm.start("bench", "--jobs", "100000", "--redis", redis_url, cwd=tmp_path)
    wait_for_queue(redis_server.client(), "bull:bullpen-bench-*:1")

    terminal.type("\x03")

    assert terminal.end() == 130
    assert redis_server.client().keys("*") == []


@pytest.mark.leaves_queue_broken  # the foreign key belongs to no queue
class TestServerInUse:
    def test_without_a_terminal_it_must_be_agreed_to_by_option(
        self, redis_url: str, redis_server: RedisServer, tmp_path: Path
    ) -> None:
        """A script must not put load on a production server by accident."""
        redis_server.client().set("somebody:else", "1")

        refused = cli("bench", "--jobs", "100", "--redis", redis_url, cwd=tmp_path)
        agreed = cli("bench", "--jobs", "100", "--yes", "--redis", redis_url, cwd=tmp_path)

        assert refused.code == 2
        assert "holds 1 keys; the benchmark puts load on it and needs --yes" in refused.err
        assert agreed.code == 0
        assert redis_server.client().keys("*") == [b"somebody:else"]

    @pytest.mark.parametrize(("typed", "code"), [("n\n", 130), ("y\n", 0)])
    def test_a_person_is_asked(
        self, redis_url: str, redis_server: RedisServer, tmp_path: Path, warm: Warm, typed: str, code: int
    ) -> None:
        redis_server.client().set("somebody:else", "1")
        terminal = warm.start("bench", "--jobs", "100", "--redis", redis_url, cwd=tmp_path)
        terminal.wait_for_either(r"Continue\?")

        terminal.type(typed)

        assert terminal.end() == code
        assert ("jobs/s" in terminal.text) is (code == 0)

    def test_a_server_that_does_not_tell_is_asked_about(
        self, redis_url: str, redis_server: RedisServer, tmp_path: Path
    ) -> None:
        """Managed servers may forbid INFO; nobody knows then whether it is empty."""
        redis_server.command("ACL", "SETUSER", "mute", "reset", "on", ">secret", "~*", "+@all", "-info")
        url = redis_url.replace("redis://", "redis://mute:secret@")

        refused = cli("bench", "--jobs", "100", "--redis", url, cwd=tmp_path)

        assert refused.code == 2
        assert "does not show whether it is empty" in refused.err

    def test_a_server_without_room_is_left_alone(
        self, redis_url: str, redis_server: RedisServer, tmp_path: Path
    ) -> None:
        """A benchmark that fills the memory of a server stops everybody's jobs."""
        redis_server.client().config_set("maxmemory", "20mb")
        try:
            refused = cli("bench", "--jobs", "100000", "--redis", redis_url, cwd=tmp_path)
        finally:
            redis_server.client().config_set("maxmemory", "0")

        assert refused.code == 1
        assert "take fewer --jobs or another server" in refused.err


async def test_on_a_cluster_all_keys_share_a_slot() -> None:
    connection = Connection("redis+cluster://127.0.0.1:1")

    bench = Bench(connection, "bull", Sizes(jobs=100, concurrency=1, payload_bytes=8))

    assert bench.queue_name.startswith("{bullpen-bench-")
    assert bench.queue_name.endswith("}")


async def test_a_lost_job_spoils_all_figures(redis_url: str) -> None:
    """A benchmark that loses jobs and prints numbers would be a lie."""
    connection = Connection(redis_url)
    bench = Bench(connection, "bull", Sizes(jobs=100, concurrency=1, payload_bytes=8))

    async def lose_one() -> None:
        async for step, _ in bench.run():
            if step == "drain":
                bench._completed.pop()

    with pytest.raises(JobsMissing, match="jobs were added and"):
        await lose_one()

    await connection.aclose()

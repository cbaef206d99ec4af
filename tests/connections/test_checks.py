"""What an operator is told about a server, and that nothing else is held against it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen.errors import ServerRefused
from bullpen.queue import Queue
from bullpen.redis import Connection
from bullpen.redis.checks import Facts, ServerFinding, ServerVerdict, judge_facts
from bullpen.redis.inspection import inspect_server
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.connections._scripted import array, bulk, scripted
from tests.queue._kit import nothing

SOUND = {"redis_version": "7.2.11", "maxmemory_policy": "noeviction", "aof_enabled": "1"}


def judged(check: str, *, save: str | None = "", skew_ms: int | None = 0, **info: str) -> ServerFinding:
    facts = Facts(server="cache:6379", info={**SOUND, **info}, save=save, skew_ms=skew_ms)
    return next(finding for finding in judge_facts(facts) if finding.check == check)


class TestJudging:
    def test_a_sound_server_gives_no_cause_for_alarm(self) -> None:
        facts = Facts(server="cache:6379", info=dict(SOUND), save=None, skew_ms=3)

        assert {finding.verdict for finding in judge_facts(facts)} == {ServerVerdict.GOOD}

    @pytest.mark.requirement("W-75")
    @pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random", "volatile-ttl"])
    def test_every_policy_that_evicts_is_a_warning(self, policy: str) -> None:
        """Evicted keys are lost jobs; keys with a TTL are locks and the memory of calls."""
        finding = judged("eviction", maxmemory_policy=policy)

        assert finding.verdict is ServerVerdict.WARNING
        assert str(finding) == (
            f"cache:6379: eviction: maxmemory-policy is {policy}: when memory runs out, the server deletes jobs. "
            "Set `maxmemory-policy noeviction`"
        )

    @pytest.mark.requirement("W-75")
    @pytest.mark.parametrize(
        ("aof", "save", "verdict"),
        [
            ("1", None, ServerVerdict.GOOD),
            ("0", "3600 1 300 100", ServerVerdict.GOOD),
            ("0", "", ServerVerdict.WARNING),
            ("0", None, ServerVerdict.CANNOT_TELL),
        ],
    )
    def test_data_must_be_kept_on_disk_in_some_way(self, aof: str, save: str | None, verdict: ServerVerdict) -> None:
        """AOF or snapshots; where CONFIG is forbidden, nobody is accused."""
        assert judged("persistence", aof_enabled=aof, save=save).verdict is verdict

    @pytest.mark.parametrize(
        ("told", "verdict"),
        [
            ({"redis_version": "6.2.19"}, ServerVerdict.WARNING),
            ({"redis_version": "6.2.20"}, ServerVerdict.GOOD),
            ({"redis_version": "7.0.15"}, ServerVerdict.WARNING),
            ({"redis_version": "7.2.10"}, ServerVerdict.WARNING),
            ({"redis_version": "7.4.6"}, ServerVerdict.GOOD),
            ({"redis_version": "8.2.1"}, ServerVerdict.WARNING),
            ({"redis_version": "8.4.0"}, ServerVerdict.GOOD),
            ({"redis_version": "7.2.4", "valkey_version": "8.1.3"}, ServerVerdict.WARNING),
            ({"redis_version": "7.2.4", "valkey_version": "8.1.4"}, ServerVerdict.GOOD),
            ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, ServerVerdict.GOOD),
        ],
    )
    def test_versions_with_a_hole_in_the_script_sandbox_are_known(
        self, told: dict[str, str], verdict: ServerVerdict
    ) -> None:
        """Valkey claims to be a Redis of 2024; its own number counts."""
        facts = Facts(server="cache:6379", info=told, save=None, skew_ms=0)

        assert next(finding for finding in judge_facts(facts) if finding.check == "scripts").verdict is verdict

    @pytest.mark.parametrize(
        ("version", "verdict"),
        [
            ("5.0.14", ServerVerdict.REFUSED),
            ("6.0.16", ServerVerdict.REFUSED),
            ("6.2.0", ServerVerdict.GOOD),
            ("8.0.4", ServerVerdict.GOOD),
        ],
    )
    def test_the_floor_is_6_2(self, version: str, verdict: ServerVerdict) -> None:
        """Our scripts pop several members at once, which older servers cannot."""
        assert judged("version", redis_version=version).verdict is verdict

    @pytest.mark.parametrize(("skew_ms", "verdict"), [(1_000, ServerVerdict.GOOD), (1_001, ServerVerdict.WARNING),
                                                      (-7_200_000, ServerVerdict.WARNING)])  # fmt: skip
    def test_clocks_that_disagree_are_told(self, skew_ms: int, verdict: ServerVerdict) -> None:
        finding = judged("clock", skew_ms=skew_ms)

        assert finding.verdict is verdict
        assert "7200.0 s behind" in finding.message or skew_ms > 0

    def test_a_server_that_tells_nothing_is_not_accused(self) -> None:
        """An ACL may forbid INFO, CONFIG and TIME altogether."""
        facts = Facts(server="cache:6379", info=None, save=None, skew_ms=None)

        assert {finding.verdict for finding in judge_facts(facts)} == {ServerVerdict.CANNOT_TELL}

    def test_a_slow_answer_is_not_blamed_on_the_clock(self) -> None:
        """With 4 s between question and answer the server's time can be anywhere in between."""
        skew = Facts.read("cache:6379", None, None, [b"1000", b"0"], 999.0, 1003.0).skew_ms

        assert skew == 0


class TestFirstContact:
    @pytest.mark.requirement("W-75")
    async def test_what_is_wrong_is_logged_once_per_connection(
        self, start_server: StartServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A worker opens several connections and opens them again; the log says it once, and work goes on."""
        server = start_server(args=("--maxmemory-policy", "allkeys-lru"))
        told: list[tuple[str, str]] = []
        unsubscribe = telemetry.subscribe(lambda event, fields: told.append((event, fields.get("check", ""))))
        connection = Connection(server.url)

        with caplog.at_level(logging.WARNING, "bullpen.redis"):
            async with Queue("mail", connection=connection) as queue:
                async with Worker("mail", nothing, connection=connection):
                    await (await queue.add("welcome")).result(timeout=10_000)
                server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                await queue.add("welcome")
        unsubscribe()
        await connection.aclose()

        warned = [record.getMessage() for record in caplog.records if "maxmemory-policy" in record.getMessage()]
        assert len(warned) == 1
        assert warned[0].startswith(f"127.0.0.1:{server.port}: eviction: maxmemory-policy is allkeys-lru: when memory")
        assert told.count(("server.finding", "eviction")) == 1
        assert told.count(("server.finding", "persistence")) == 1

    async def test_a_server_that_keeps_data_is_not_mentioned(
        self, start_server: StartServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        server = start_server("valkey", persistent=True)

        with caplog.at_level(logging.WARNING, "bullpen.redis"):
            async with Queue("mail", connection=server.url) as queue:
                await queue.add("welcome")

        assert caplog.messages == []

    async def test_a_server_that_is_too_old_is_refused_at_the_start(self) -> None:
        """Before a job was taken that could not be settled."""

        def answer(command: list[bytes]) -> bytes | None:
            return bulk("redis_version:5.0.14\r\n") if command[0] == b"INFO" else None

        async with scripted(answer) as old:
            worker = Worker("mail", nothing, connection=old.url)
            with pytest.raises(ServerRefused, match=r"redis 5\.0\.14 is too old; bullpen needs Redis 6\.2"):
                await worker.start()
            await worker.close()
            async with Queue("mail", connection=old.url) as queue:
                with pytest.raises(ServerRefused, match="too old"):
                    await queue.add("welcome")

    async def test_scripts_that_may_not_write_after_asking_the_time_are_refused(
        self, start_server: StartServer
    ) -> None:
        """Redis 6.2 can be told so; our scripts would fail in the middle."""
        server = start_server("redis-6.2", args=("--lua-replicate-commands", "no"))
        worker = Worker("mail", nothing, connection=server.url)

        with pytest.raises(ServerRefused):
            await worker.start()
        await worker.close()

    async def test_a_clock_that_is_an_hour_off_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        def answer(command: list[bytes]) -> bytes | None:
            return array(bulk(str(int(time.time()) - 3600)), bulk("0")) if command[0] == b"TIME" else None

        async with scripted(answer) as server:
            with caplog.at_level(logging.WARNING, "bullpen.redis"):
                await Connection(server.url).meet()

        (message,) = caplog.messages
        assert "clock is 36" in message and "behind this machine's" in message

    async def test_a_server_that_forbids_all_questions_is_used(self) -> None:
        def answer(command: list[bytes]) -> bytes | None:
            return b"-NOPERM not for you\r\n" if command[0] in (b"INFO", b"TIME", b"CONFIG", b"CLIENT") else None

        async with scripted(answer) as server:
            await Connection(server.url).meet()

            assert server.names().count("INFO") == 1


class TestInspecting:
    async def test_a_person_gets_all_answers(self, start_server: StartServer) -> None:
        server = start_server("valkey", args=("--maxmemory-policy", "volatile-ttl"))
        connection = Connection(server.url)

        findings = await inspect_server(connection)
        await connection.aclose()

        assert {finding.check: finding.verdict for finding in findings} == {
            "version": ServerVerdict.GOOD,
            "scripts": ServerVerdict.GOOD,
            "eviction": ServerVerdict.WARNING,
            "persistence": ServerVerdict.WARNING,
            "clock": ServerVerdict.GOOD,
        }
        assert {finding.server for finding in findings} == {f"127.0.0.1:{server.port}"}

    async def test_a_server_that_is_away_is_an_answer_too(self) -> None:
        connection = Connection("redis://127.0.0.1:1")

        (finding,) = await inspect_server(connection)
        await connection.aclose()

        assert finding.verdict is ServerVerdict.CANNOT_TELL
        assert "cannot connect to 127.0.0.1:1" in finding.message

    async def test_nothing_is_written(self, start_server: StartServer) -> None:
        server = start_server()
        connection = Connection(server.url)

        await inspect_server(connection)
        await connection.aclose()

        keys: Any = server.client().keys("*")
        assert keys == []

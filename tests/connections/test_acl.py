"""The documented least rights are enough, and not more than is used."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from bullpen.cli.commands import run
from bullpen.errors import InvalidOption, JobFailed, ServerRefused
from bullpen.ops.exporter import Exporter, ServerSource
from bullpen.ops.exposition import render
from bullpen.queue import Deduplication, Durability, Flow, JobState, Queue, QueueEvents, RateLimit
from bullpen.redis import Connection
from bullpen.redis.acl import _DIRECT, _of_scripts, acl_rule
from bullpen.redis.checks import ServerVerdict
from bullpen.redis.inspection import inspect_server
from bullpen.testing import RedisServer
from bullpen.worker import Worker
from tests.conftest import StartServer
from tests.queue._kit import Failing, nothing, soon

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.requirement("W-71")


def login(server: RedisServer, rule: str) -> str:
    server.command("ACL", "SETUSER", "least", "reset", "on", ">secret", *rule.split())
    return server.url.replace("redis://", "redis://least:secret@")


@pytest.mark.parametrize("kind", ["valkey", "redis-7", "redis-6.2"])
async def test_a_user_limited_to_one_queue_does_all_work_on_it(kind: str, start_server: StartServer) -> None:
    """Producing, working, retrying, dead letters, redrive, events, pausing: on every server, without CONFIG and
    CLIENT LIST, as managed ones are."""
    server = start_server(kind)
    url = login(server, acl_rule(queues=["orders"]))
    handler = Failing(ValueError("no"), value="done")
    async with Queue("orders", connection=url, attempts=1) as queue, QueueEvents("orders", connection=url) as events:
        async with Worker("orders", handler, connection=url, dead_letters=True):
            job = await queue.add("charge", {"cents": 5})
            seen = {(await soon(anext(events))).event for _ in range(4)}
            (letter,) = [letter async for letter in queue.dead_letters]
            await queue.dead_letters.redrive(letter.id)
            assert await job.result(timeout=10_000) == "done"
        await queue.pause()
        await queue.resume()
        assert (await queue.counts()).completed == 1
        assert await queue.is_healthy()

    assert seen == {"added", "waiting", "active", "failed"}
    # Whether snapshots are on was asked and refused once; nothing else was tried in vain.
    assert {entry[entry.index(b"object") + 1][:6] for entry in server.command("ACL", "LOG")} == {b"config"}
    connection = Connection(url)
    assert await connection.is_healthy()  # asks for no queue in particular
    await connection.aclose()


@pytest.mark.parametrize("kind", ["valkey", "redis-6.2"])
async def test_the_same_user_has_lanes_flows_schedules_and_the_numbers(kind: str, start_server: StartServer) -> None:
    """Whatever a queue can do that touches no other: nothing of it is tried in vain."""
    server = start_server(kind)
    url = login(server, acl_rule(queues=["orders"]))
    async with Queue("salaries", connection=server.url) as theirs:
        await theirs.add("secret")
    server.command("ACL", "LOG", "RESET")

    async with Queue("orders", connection=url) as queue:
        await queue.lanes.set("acme", concurrency=1, size=9, rate=RateLimit(max=9, duration_ms=1_000))
        leaves = [Flow("a", on_failure="wait", lane="acme"), Flow("b", on_failure="ignore", delay=50)]
        flow = await queue.add_flow(Flow("top", children=leaves))
        await queue.add("n", deduplication=Deduplication("once", keep_last_if_active=True))
        await queue.upsert_scheduler("s", every=60_000)
        await queue.pause_scheduler("s")
        await queue.resume_scheduler("s")
        later = await queue.add("later", delay=60_000)
        await queue.cancel(later.id, "no need")
        async with Worker("orders", nothing, connection=url, dead_letters=True):
            await flow.job.result(timeout=20_000)
        for reading in (queue.heads(JobState.COMPLETED), queue.lanes.list(), queue.metrics("completed")):
            await reading
        await queue.get_flow(flow.job.id)
        await queue.prometheus_metrics()
        await queue.payload_report()
        assert await queue.find_orphans() == []
        assert await queue.restore_orphans() == 0
        await queue.dead_letters.sweep()
    refused = {entry[entry.index(b"object") + 1][:6] for entry in server.command("ACL", "LOG")}
    connection = Connection(url)
    exporter = Exporter([ServerSource(connection, "bull")])
    page = render(await exporter.collect())
    await exporter.aclose()
    await connection.aclose()

    assert refused <= {b"config"}
    assert 'bullpen_source_up{source="redis"} 1' in page
    assert "salaries" not in page


async def test_other_queues_are_out_of_reach(start_server: StartServer) -> None:
    server = start_server()
    url = login(server, acl_rule(queues=["orders"]))

    async with Queue("salaries", connection=url) as queue:
        with pytest.raises(ServerRefused, match="NOPERM"):
            await soon(queue.add("raise", {}))


async def test_what_is_forbidden_cannot_be_told(start_server: StartServer) -> None:
    """Managed servers forbid CONFIG; that is an answer, and no reason to alarm anybody."""
    server = start_server()
    verdicts = {}
    for who, url in (("least", login(server, acl_rule(inspection=True))), ("default", server.url)):
        connection = Connection(url)
        findings = await inspect_server(connection)
        await connection.aclose()
        verdicts[who] = {finding.check: finding.verdict for finding in findings}["persistence"]

    assert verdicts == {"least": ServerVerdict.CANNOT_TELL, "default": ServerVerdict.WARNING}


async def test_inspection_shows_who_works_and_no_password(start_server: StartServer) -> None:
    """CONFIG GET would tell the password of the default user, who may do everything."""
    server = start_server()
    url = login(server, acl_rule(queues=["orders"], inspection=True))
    async with Worker("orders", Failing(), connection=url), Queue("orders", connection=url) as queue:
        assert len(await queue.workers() or ()) == 1
        door = queue.connection.shared_door("bull:orders:meta")
        for secret in ("requirepass", "masterauth", "*"):
            with pytest.raises(ServerRefused, match="NOPERM"):
                await door.call("CONFIG", "GET", secret)


def test_a_rule_names_queues_literally() -> None:
    """A queue called `a*` must not open all queues that begin with an a."""
    rule = acl_rule("{bull}", queues=["a*", "b[1]"], cluster=True, durability=True)

    assert rule.startswith(
        r"resetkeys ~{bull}:a\*:* ~{bull}:a\*-dlq:* ~{bull}:b\[1\]:* ~{bull}:b\[1\]-dlq:* resetchannels -@all +"
    )
    assert {"+cluster|slots", "+wait", "+waitaof"} <= set(rule.split())


@pytest.mark.parametrize("blank", [" nopass ~*", "\t+@all", "\nallkeys", "\x0bx", "\x00x"])
def test_a_name_cannot_bring_rules_of_its_own(blank: str) -> None:
    """A rule is words with blanks between them; a blank in a name would make words of it."""
    with pytest.raises(InvalidOption, match="without spaces"):
        acl_rule(queues=[f"a{blank}"])
    with pytest.raises(InvalidOption, match="without spaces"):
        acl_rule(f"bull{blank}")


def test_no_right_is_asked_for_that_nothing_uses() -> None:
    """Each direct command stands somewhere in the code; those of scripts are read from the scripts."""
    rooms = (ROOT / "src/bullpen" / room for room in ("redis", "queue", "worker"))
    code = "".join(path.read_text() for room in rooms for path in room.rglob("*.py") if path.name != "acl.py")
    unused = [name for name in _DIRECT if not re.search(rf'"{name.split("|")[-1].upper()}"', code)]

    assert unused == []
    assert {"del", "hset", "xinfo|stream"} <= _of_scripts()


def test_the_guide_shows_the_rule_as_it_is() -> None:
    """Who copies it from the page gets what the suite runs with."""
    page = (ROOT / "docs/guides/connections.md").read_text()

    shown = re.search(r"```\nACL SETUSER orders on >\S+ \\\n(.*?)```", page, re.DOTALL)

    assert shown is not None
    assert " ".join(shown[1].replace("\\\n", " ").split()) == acl_rule(queues=["orders"])


async def test_letters_of_a_tenant_and_users_of_a_queue_need_no_other_right(start_server: StartServer) -> None:
    """What is looked up in sets that we keep beside the queue."""
    server = start_server()
    url = login(server, acl_rule(queues=["orders"]))
    async with Queue("orders", connection=url, attempts=1) as queue:
        await _fail(url, "orders", ["bad"])
        assert (await queue.dead_letters.of_tenant("acme")).depth == 0
        assert await queue.note_user("program", "one") == []
        assert await queue.note_user("program", "two") == ["one"]


async def test_the_rule_for_durability_serves_every_level(start_server: StartServer) -> None:
    server = start_server(args=("--repl-diskless-sync-delay", "0"))
    replica = start_server(args=("--replicaof", f"127.0.0.1 {server.port}"))
    async with asyncio.timeout(20):
        while replica.command("INFO", "replication")["master_link_status"] != "up":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
    url = login(server, acl_rule(queues=["orders"], durability=True))
    async with Queue("orders", connection=url) as queue:
        job = await soon(queue.add("charge", durability=Durability.replicated(1)))

    assert job.durability == "replicated(1)"


async def _fail(url: str, name: str, ids: list[str]) -> list[str]:
    """The dead letters of jobs that failed, oldest first."""
    async with Queue(name, connection=url, attempts=1) as queue:
        async with Worker(name, Failing(*(ValueError("no") for _ in ids)), connection=url, dead_letters=True):
            for job_id in ids:
                job = await queue.add("charge", {"cents": 5}, job_id=job_id)
                with pytest.raises(JobFailed):
                    await job.result(timeout=10_000)
        return [letter.id async for letter in queue.dead_letters]


async def _one_of_each(url: str, mine: str, theirs: str) -> None:
    """Two queues with jobs, the second of somebody else."""
    for name in (mine, theirs):
        async with Queue(name, connection=url) as queue:
            await queue.add("waits", {}, job_id="waits")
            await queue.add("later", {}, job_id="later", delay=3_600_000)


COMMANDS = (
    *("queues", "queues list", "queues show orders", "queues follow --timeout 100", "doctor"),
    *("queues pause orders", "queues resume orders", "queues restore orders"),
    *("jobs list orders", "jobs show orders waits", "jobs add orders more", "jobs promote orders later"),
    *("jobs follow orders --timeout 100", "jobs logs orders waits", "jobs explain orders waits"),
    *("jobs change orders waits --priority 2", "jobs cancel orders waits --reason test", "jobs retry orders waits"),
    *("jobs add orders shared --lane acme --id shared", "jobs add orders one --deduplication once"),
    *("jobs add orders child --parent orders:shared --on-failure wait", "jobs remove orders waits"),
    *("queues lanes set orders acme --weight 2 --concurrency 1", "queues lanes list orders"),
    *("queues lanes pause orders acme", "queues lanes resume orders acme", "queues lanes remove orders acme"),
    *("queues limits show orders", "queues limits set orders --concurrency 2"),
    *("schedules add orders nightly --cron @daily", "schedules show orders nightly", "schedules run orders nightly"),
    *("schedules pause orders nightly", "schedules resume orders nightly", "schedules remove orders nightly"),
    "payloads list orders",
    *("schedules list orders", "dead-letters stats", "dead-letters groups", "dead-letters list orders"),
    *("dead-letters redrive orders {0}", "dead-letters discard orders {1}", "dead-letters show orders {2}"),
    *("dead-letters edit orders {2} --data {{}} --yes --why test", "dead-letters redrive orders --all"),
    *("queues clean orders --state completed --yes", "queues drain orders --yes"),
    "queues obliterate orders --force --yes",
)


@pytest.mark.many
def test_every_command_serves_a_user_of_one_queue(
    start_server: StartServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another queue under the same prefix is neither shown nor a reason to end."""
    monkeypatch.setenv("NO_COLOR", "1")
    server = start_server()
    letters = asyncio.run(_fail(server.url, "orders", ["one", "two", "three", "four"]))
    asyncio.run(_one_of_each(server.url, "orders", "salaries"))
    url = login(server, acl_rule(queues=["orders"]))
    told = {}
    for command in COMMANDS:
        code = run([*command.format(*letters).split(), "--redis", url])
        out, err = capsys.readouterr()
        told[command] = (code, out + err)

    refused = {command: (code, text) for command, (code, text) in told.items() if code or "NOPERM" in text}
    assert refused == {}
    assert "orders" in told["queues list"][1]
    assert not [command for command, (_, text) in told.items() if "salaries" in text]

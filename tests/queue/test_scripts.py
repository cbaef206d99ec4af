"""The Lua scripts: their headers can be trusted, and they touch nothing but their own queue."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen.errors import DelayJob, PermanentError, ReturnToWait
from bullpen.queue import Job
from bullpen.wire.scripts import SCRIPTS, Script
from tests.queue._kit import Failing, Kit, nothing
from tests.queue.test_locks_and_stalls import check_stalled

LUA = resources.files("bullpen.wire") / "lua"


def source(name: str) -> str:
    return (LUA / f"{name}.lua").read_text(encoding="utf-8")


def header_section(text: str, begin: str, end: str) -> str:
    matched = re.search(rf"^  {begin}\b(.*?)(?=^  {end}\b|^\]\])", text, re.DOTALL | re.MULTILINE)
    assert matched is not None, f"no {begin} in the header"
    return matched[1]


def numbered(section: str) -> tuple[str, ...]:
    """The names after 1, 2, 3, …; other numbers in remarks are passed over."""
    names: list[str] = []
    for number, name in re.findall(r"(?<!\S)(\d+) ([a-z_0-9]+)", section):
        if int(number) == len(names) + 1:
            names.append(name)
    return tuple(names)


class TestTable:
    def test_every_file_has_an_entry(self) -> None:
        """A script that is not in the table is never sent."""
        files = {entry.name.removesuffix(".lua") for entry in LUA.iterdir() if entry.name.endswith(".lua")}

        assert files == set(SCRIPTS)

    @pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
    def test_an_entry_equals_the_header_of_its_file(self, script: Script) -> None:
        """Names and order of keys and leading arguments: what Python packs is what Lua unpacks."""
        text = source(script.name)

        assert text.startswith(f"--[[ {script.name}: ")
        assert numbered(header_section(text, "KEYS", "ARGV")) == script.keys
        leading = header_section(text, "ARGV", "Reply").split("then per", 1)[0]
        assert numbered(leading) == script.args

    @pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
    def test_keys_are_bound_to_names_in_the_first_lines(self, script: Script) -> None:
        """`KEYS[7]` in mid-script is unreadable, and wrong after the next insertion."""
        code = source(script.name).split("]]\n", 1)[1]
        lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("--")]
        bound = 0
        while bound < len(lines) and lines[bound].startswith("local ") and "function" not in lines[bound]:
            bound += 1

        later = [line for line in lines[bound:] if re.search(r"KEYS\[\d+\]", line)]
        used = {int(number) for number in re.findall(r"KEYS\[(\d+)\]", code)}
        if all_at_once := re.search(r"^local ([\w\s,]+) = unpack\(KEYS\)$", code, re.MULTILINE):
            names = [name.strip() for name in all_at_once[1].split(",")]
            assert names == [f"{key}_key" for key in script.keys]
            used = set(range(1, len(names) + 1))

        assert later == []
        assert used == set(range(1, len(script.keys) + 1))

    @pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
    def test_includes_stand_in_the_text_that_is_sent(self, script: Script) -> None:
        """The server knows no files; what it gets is whole, and its name is the digest of exactly that."""
        import hashlib

        assert b"--#include" not in script.body
        assert script.sha1.decode() == hashlib.sha1(script.body).hexdigest()


class Spy:
    """Every command that the server executed, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, list[str]]] = []

    @property
    def by_scripts(self) -> list[list[str]]:
        return [words for source, words in self.lines if source.endswith("lua]")]

    @property
    def calls(self) -> list[list[str]]:
        return [
            words for source, words in self.lines if words[0].upper() in ("EVALSHA", "EVAL") and "lua]" not in source
        ]


@contextmanager
def spying(kit: Kit) -> Iterator[Spy]:
    spy = Spy()
    with kit.redis.monitor() as monitor:  # type: ignore[no-untyped-call]  # redis-py leaves it untyped
        yield spy
        kit.command("ECHO", "the end")
        while True:
            raw = monitor.connection.read_response(disable_decoding=True)
            _, origin, rest = re.split(rb" (\[[^\]]*\]) ", raw, maxsplit=1)
            words = shlex.split(rest.decode("utf-8", "replace"))
            if words == ["ECHO", "the end"]:
                return
            spy.lines.append((origin.decode(), words))


async def eventful_life(kit: Kit) -> None:
    """A bit of everything that the scripts do."""
    queue = kit.queue(backoff=Backoff.fixed(1))
    jobs = await queue.add_many([("retry", 1), ("permanent", 2), ("returned", 3), ("delayed", 4), ("fine", 5)])
    await queue.add("later", delay=60_000)
    await queue.add("ranked", priority=3, job_id="own", remove_on_complete=20)
    await queue.add("again", job_id="own")
    await queue.pause()
    await queue.resume()
    await jobs[0].progress(5)
    await jobs[0].log("line")
    await jobs[0].update_data(6)
    seen: set[str] = set()

    async def handle(job: Job) -> None:
        first = job.id not in seen
        seen.add(job.id)
        if job.name == "permanent":
            raise PermanentError("no")
        if first and job.name == "retry":
            raise RuntimeError("again")
        if first and job.name == "returned":
            raise ReturnToWait
        if first and job.name == "delayed":
            raise DelayJob(1)

    await kit.drain(handle, 6, concurrency=3, dead_letters=True)
    [letter] = await queue.dead_letters.list()
    await queue.dead_letters.redrive(letter.id)
    await kit.drain(Failing(PermanentError("no")), 1, dead_letters=True)
    [letter] = await queue.dead_letters.list()
    await queue.dead_letters.discard(letter.id)
    check_stalled(kit)
    await queue.counts()
    assert await queue.get_job(jobs[0].id)


class TestKeys:
    async def test_scripts_touch_only_keys_of_their_queue_and_its_dead_letters(self, kit: Kit) -> None:
        """In a cluster a key of another slot makes the whole call fail; on one server nobody would notice."""
        with spying(kit) as spy:
            await eventful_life(kit)

        keys = {key for words in spy.by_scripts for key in keys_of(kit, words)}
        foreign = {key for key in keys if not key.startswith((kit.base, f"bull:{kit.name}-dlq:"))}

        assert len(keys) > 20
        assert foreign == set()

    async def test_calls_carry_the_keys_that_the_table_names(self, kit: Kit) -> None:
        """A key in the wrong place would be found by Lua under the wrong name."""
        by_digest = {script.sha1.decode(): script for script in SCRIPTS.values()}
        endings = {"waiting_children": "waiting-children", "stalled_check": "stalled-check", "job": "", "entry": ""}

        with spying(kit) as spy:
            await eventful_life(kit)

        used = set()
        for words in spy.calls:
            script = by_digest.get(words[1])
            if script is None:
                continue  # the text of a script that the server did not know, or another client's
            used.add(script.name)
            count = int(words[2])
            assert count == len(script.keys), script.name
            for name, key in zip(script.keys, words[3 : 3 + count], strict=True):
                ending = endings.get(name, name.removeprefix("entry_"))
                if name in ("call", "scheduler", "state_key"):
                    continue
                assert key.startswith("bull:"), (script.name, name, key)
                assert key.endswith(ending), (script.name, name, key)
        assert used >= {"add", "exchange", "pause", "resume", "redrive", "discard", "update_progress"}

    async def test_nothing_of_ours_lives_without_an_end(self, kit: Kit) -> None:
        """Keys that BullMQ does not know have a time to live, or Node's cleaners would never find them."""
        await eventful_life(kit)

        ours: list[Any] = list(kit.redis.scan_iter(f"{kit.base}bp:*"))

        assert ours
        assert all(int(kit.command("PTTL", key)) > 0 for key in ours)

    async def test_a_server_that_forgot_the_scripts_gets_them_again(self, kit: Kit) -> None:
        """SCRIPT FLUSH, a restart, a failover: each call runs exactly once all the same."""
        queue = kit.queue()
        told = await kit.work(nothing)

        for number in range(5):
            kit.command("SCRIPT", "FLUSH")
            await queue.add("a")
            kit.command("SCRIPT", "FLUSH")
            await told.finished(number + 1)

        assert len(kit.zset("completed")) == 5
        assert kit.redis.get(kit.base + "id") == b"5"


def keys_of(kit: Kit, words: list[str]) -> list[str]:
    """The keys of one command, by the server's own table."""
    if words[0].upper() in ("TIME", "ECHO", "PING"):
        return []
    found: Any = kit.redis.command_getkeys(*words)
    return list(map(str, found))


class TestDefences:
    @pytest.mark.requirement("Q-65")
    async def test_a_late_copy_of_an_old_call_is_refused(self, kit: Kit) -> None:
        """A packet that the network kept back must not add its jobs a second time."""
        queue = kit.queue()
        with spying(kit) as spy:
            await queue.add("first")
        [call] = [words for words in spy.calls if words[0].upper() == "EVALSHA" and "first" in words][-1:]
        await queue.add("second")

        with pytest.raises(Exception, match="BPSTALE"):
            kit.command(*call)

        assert len(kit.ids("wait")) == 2

    async def test_a_repeated_call_is_answered_from_memory(self, kit: Kit) -> None:
        """The reply was lost; asked again, the server says the same and writes nothing."""
        queue = kit.queue()
        with spying(kit) as spy:
            await queue.add_many([("a", 1), ("b", 2)])
        call = [words for words in spy.calls if words[0].upper() == "EVALSHA"][-1]
        before = {key: kit.command("DUMP", key) for key in kit.redis.scan_iter(f"{kit.base}*")}

        again = kit.command(*call)

        assert again.split(b" ")[1] == b"1"
        assert {key: kit.command("DUMP", key) for key in kit.redis.scan_iter(f"{kit.base}*")} == before

    @pytest.mark.parametrize("key", ["marker", "events", "stalled", "limiter"])
    @pytest.mark.leaves_queue_broken
    async def test_a_foreign_key_in_an_auxiliary_place_tears_no_settle(self, kit: Kit, key: str) -> None:
        """Somebody's job id or script has put a string where a stream or set belongs: jobs are still settled."""
        queue = kit.queue()
        await queue.add("retry", attempts=2, backoff=Backoff.fixed(1))
        await queue.add("fine")
        kit.redis.delete(kit.base + key)
        kit.redis.set(kit.base + key, "in the way")

        told = await kit.work(Failing(RuntimeError("again")), drain_delay=50)
        await told.finished(2)

        assert set(kit.zset("completed")) == {"1", "2"}
        assert kit.ids("active") == []

"""What others stored never reaches the operator's terminal as a command: a name can clear the screen, write to the
clipboard or turn the direction of writing only where it is printed as it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bullpen._kernel.printable import printable, printable_json
from bullpen.testing import RedisServer, need
from tests.flows._cli import Answer, Terminal, cli
from tests.flows._world import prepared
from tests.flows.test_terminal import COMMANDS, USES

pytestmark = pytest.mark.requirement("X-40")

EVIL = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202e\x7f"
"""Writes to the clipboard, clears the screen, colours with an 8-bit sequence, turns the writing, rubs out."""

FREE_TEXT = {
    *("last_error", "error", "error_message", "reason", "message", "fix", "name", "address", "actor", "subject"),
    *("label", "detail", "locked_by", "worker", "receipt", "correlation_id", "event_type", "event_name", "error_code"),
}
MUST_SHOW = {
    *("jobs list", "jobs show", "jobs logs", "jobs follow", "schedules list", "schedules show"),
    *("dead-letters list", "dead-letters show", "dead-letters groups", "outbox list", "outbox show", "outbox follow"),
    *("messages list", "messages show", "messages recipients list", "projectors parked list", "doctor"),
}
"""Commands that certainly print something that was stored: the test would see nothing else."""
NOT_HERE = {
    "run": "its lines are logs, see below",
    "exporter": "it serves numbers",
    "serve": "it serves a program of the user",
    "bench": "it prints what it measured",
    "demo": "it prints its own jobs",
    "migrate": "it prints no stored value",
    "top": "it prints numbers, and names of queues, which have no such characters",
}


def spoil(server: RedisServer, database: Path) -> None:
    """Put such a text wherever any text may stand."""
    client = server.client()
    for key in list(client.scan_iter("bull:*")):
        # What counts dead letters is no record of one.
        if (
            client.type(key) != b"hash"
            or b":bp:" in key
            or key.endswith((b":meta", b"metrics:completed", b"metrics:failed"))
        ):
            continue
        fields: dict[Any, Any] = client.hgetall(key)
        spoilt: dict[Any, Any] = {
            name: fields[name] + EVIL.encode() for name in (b"name", b"failedReason", b"bpx") if name in fields
        }
        spoilt[b"progress"] = json.dumps({"at": EVIL}).encode()
        if b"data" in fields and b":emails-dlq:" not in key and b"workflow-execution" not in key:
            spoilt[b"data"] = json.dumps({"x": EVIL}).encode()
        if b":emails-dlq:" in key and b"data" in fields:
            entry = json.loads(fields[b"data"])
            entry |= {"originalJobName": EVIL, "errorMessage": EVIL, "error": {"message": EVIL, "stack": EVIL}}
            spoilt[b"data"] = json.dumps(entry).encode()
        if b"returnvalue" in fields:
            spoilt[b"returnvalue"] = json.dumps(EVIL).encode()
        if b"stacktrace" in fields:
            spoilt[b"stacktrace"] = json.dumps([EVIL]).encode()
        client.hset(key, mapping=spoilt)
        client.rpush(key + b":logs", EVIL)
    client.lpush("bull:emails:wait", f"id{EVIL}")
    client.hset(f"bull:emails:id{EVIL}", mapping={"name": EVIL, "data": EVIL, "opts": "{}", "timestamp": "1"})
    with sqlite3.connect(database) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            for _, column, kind, *_ in connection.execute(f"PRAGMA table_info({table})").fetchall():
                if column in FREE_TEXT and kind.upper().startswith(("VARCHAR", "TEXT")):
                    with contextlib.suppress(sqlite3.IntegrityError):  # what the database itself keeps as it is
                        connection.execute(f"UPDATE {table} SET {column} = {column} || ?", (EVIL,))


@pytest.fixture(scope="module")
def evil(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    need("valkey")
    directory = tmp_path_factory.mktemp("evil")
    shutil.copy(sqlite_template, directory / "ledger.sqlite3")
    with RedisServer.start("valkey") as server:
        known = prepared(server, f"sqlite:///{directory}/ledger.sqlite3", directory)
        filled = ask(known, "projectors backfill", "shop payment --since beginning --yes")
        assert filled.code == 0, filled
        spoil(server, directory / "ledger.sqlite3")
        yield known


def ask(known: dict[str, str], command: str, words: str, *more: str) -> Answer:
    env = {
        "BULLPEN_REDIS_URL": known["redis"],
        "BULLPEN_DATABASE_URL": known["database"],
        "BULLPEN_DATA_DIR": f"{known['directory']}/data",
        "BULLPEN_EMBEDDED": "never",
        "BULLPEN_TRANSPORT": "memory",
    }
    arguments = [word.format(**known) for word in words.split()]
    return cli(*command.split(), *arguments, *more, cwd=Path(known["directory"]), env=env)


def obeyed(text: str) -> set[str]:
    """What a terminal would not just show."""
    return {char for char in text if not char.isprintable() and char not in "\n\t"}


@pytest.mark.many
def test_no_command_prints_what_a_terminal_would_obey(evil: dict[str, str]) -> None:
    """Every command that there is, as a table and as JSON. It takes a while because there are so many."""
    shown = set()
    for command, use in USES.items():
        takes_json = any("--json" in each.opts for each in COMMANDS[command].params)
        if command in NOT_HERE or use.asks or use.typed:
            continue
        for form in ([], ["--json"]) if takes_json else ([],):
            answer = ask(evil, command, use.words, *form)
            assert not obeyed(answer.out + answer.err), f"{command} {form}: {answer}"
            assert "Traceback" not in answer.err, f"{command} {form}: {answer}"
            if re.search(r"\\(x|u00)1b", answer.out + answer.err):
                shown.add(command)
    assert shown >= MUST_SHOW, MUST_SHOW - shown


def test_an_error_about_something_stored_is_printable(evil: dict[str, str]) -> None:
    for command, words in (
        ("jobs show", f"emails no{EVIL}"),
        ("jobs retry", f"emails id{EVIL}"),
        ("queues show", f"no{EVIL}"),
        ("dead-letters show", f"emails no{EVIL}"),
        ("runs show", f"no{EVIL}"),
    ):
        answer = ask(evil, command, "", *words.split(" "))

        assert answer.code != 0
        assert answer.err and not obeyed(answer.out + answer.err), answer


def test_events_that_are_followed_are_printable(evil: dict[str, str]) -> None:
    async def add() -> None:
        from bullpen.queue import Queue

        async with Queue("emails", connection=evil["redis"]) as queue:
            await queue.add(f"x{EVIL}")

    env = {"BULLPEN_REDIS_URL": evil["redis"], "BULLPEN_EMBEDDED": "never"}
    terminal = Terminal("queues", "follow", "emails", cwd=Path(evil["directory"]), env=env)
    terminal.wait_for("following emails")
    asyncio.run(add())
    terminal.wait_for(r"x\\x1b\]52")
    terminal.type("\x03")
    terminal.end()

    assert b"\x1b]52" not in terminal.raw and b"\x1b[2J" not in terminal.raw


def test_log_lines_are_printable(tmp_path: Path) -> None:
    import io
    import logging

    from bullpen._kernel.log_formats import ConsoleFormatter, JsonFormatter

    for formatter in (ConsoleFormatter(colour=False), JsonFormatter()):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger = logging.getLogger(f"test.printable.{type(formatter).__name__}")
        logger.addHandler(handler)
        logger.propagate = False
        try:
            raise ValueError(f"because {EVIL}")
        except ValueError:
            logger.exception("job %s failed", f"id{EVIL}", extra={"jobName": EVIL})

        assert "job id" in stream.getvalue() and not obeyed(stream.getvalue())


def test_printable_json_is_the_same_value() -> None:
    value = {"a": [EVIL, "é 日本", "\udc80\ud800", 1.5, None], EVIL: "\n\t"}

    assert json.loads(printable_json(value)) == value
    assert not obeyed(printable_json(value, indent=2))
    assert printable("é 日本\n\tx") == "é 日本\n\tx"
    assert printable("\x1b\x9b\u202e\udc80\U000e0001") == "\\x1b\\x9b\\u202e\\udc80\\U000e0001"


def test_nothing_in_the_command_prints_past_the_guard() -> None:
    """Whoever adds an output uses what `show` has."""
    allowed = {
        "show.py": {"print(", "Console("},
        "context.py": {"typer.confirm("},
        "top.py": {"print(", "Console("},  # lines of `show.Table`, and a heading made printable
        "edit.py": {"print("},  # a difference made printable
        "commands.py": {"print("},  # the version, and errors made printable
        "completion.py": {"print("},  # scripts of ours
        "workflows.py": {"print("},  # a diagram made printable
        "migrate.py": {"print("},  # SQL of ours
        "__init__.py": {"print("},  # a line of ours
    }
    for file in sorted((Path(__file__).parents[2] / "src/bullpen/cli").rglob("*.py")):
        found = re.findall(r"(?<![\w.])(?:print|Console|typer\.echo|typer\.secho|typer\.confirm)\(", file.read_text())

        assert set(found) <= allowed.get(file.name, set()), file

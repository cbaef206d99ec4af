"""Following rows of the ledger until they settle, and what the exit code then says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen.cli.commands import run
from bullpen.ledger import Ledger
from tests.databases import item
from tests.flows._cli import Answer, cli
from tests.flows._warm import Warm

pytestmark = pytest.mark.requirement("X-40")

Type = Callable[..., Answer]


@pytest.fixture
def type_(sqlite_url: str, tmp_path: Path) -> Type:
    def typed(*words: str) -> Answer:
        return cli(*words, cwd=tmp_path, env={"BULLPEN_DATABASE_URL": sqlite_url, "NO_COLOR": "1"})

    return typed


def act(url: str, work: Callable[[Ledger], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with Ledger(url, dead_letter_type=None) as ledger:
            return await work(ledger)

    return asyncio.run(main())


def enqueue(url: str) -> str:
    async def work(ledger: Ledger) -> str:
        (stored,) = await ledger.outbox.enqueue_many([item(1)])
        return str(stored.id)

    found: str = act(url, work)
    return found


async def claimed(ledger: Ledger) -> Any:
    (row,) = await ledger.outbox.claim_due_batch("w", 1)
    return row


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_row_is_followed_to_its_end(ends_well: bool, sqlite_url: str, tmp_path: Path, warm: Warm) -> None:
    row_id = enqueue(sqlite_url)
    terminal = warm.start("outbox", "follow", row_id, "--interval", "100", "--database", sqlite_url, cwd=tmp_path)
    terminal.wait_for("PENDING")

    async def end(ledger: Ledger) -> None:
        row = await claimed(ledger)
        if ends_well:
            await ledger.outbox.mark_sent(row)
        else:
            await ledger.outbox.dead_letter(row, "the target answered 400", code="HTTP_400")

    act(sqlite_url, end)

    assert terminal.end() == (0 if ends_well else 1)
    assert ("SENT" if ends_well else "DEAD") in terminal.text
    assert terminal.error == ("" if ends_well else f"bullpen: row {row_id} is DEAD: the target answered 400\n")


def test_a_row_that_stays_is_given_up_in_time(sqlite_url: str, type_: Type) -> None:
    row_id = enqueue(sqlite_url)

    late = type_("outbox", "follow", row_id, "--interval", "50", "--timeout", "120")
    lines = type_("outbox", "follow", row_id, "--interval", "50", "--timeout", "120", "--json")
    nobody = type_("outbox", "follow", "0" * 32)

    assert (late.code, late.err) == (4, f"bullpen: row {row_id} is still PENDING after 0.12 s\n")
    assert late.out.count("\n") == 1, "nothing has changed, so nothing more is told"
    assert json.loads(lines.out)["status"] == "PENDING"
    assert nobody.code == 1


@pytest.mark.parametrize(
    ("status", "code"), [("SENT", 0), ("FAILED", 1), ("PARKED", 1), ("EXPIRED", 1), ("CANCELLED", 1)]
)
def test_a_message_is_followed_to_its_end(status: str, code: int, sqlite_url: str, type_: Type) -> None:
    from tests.messages.test_cli import with_status

    message = with_status(sqlite_url, status)

    answer = type_("messages", "follow", message)
    lines = type_("messages", "follow", message, "--json")

    assert answer.code == lines.code == code
    assert status in answer.out
    assert json.loads(lines.out)["status"] == status
    assert lines.err == ""


def test_a_message_that_waits_is_given_up_in_time(sqlite_url: str, type_: Type) -> None:
    from tests.messages.test_cli import with_status

    message = with_status(sqlite_url, "CREATED")

    late = type_("messages", "follow", message, "--interval", "50", "--timeout", "100")

    assert late.code == 4
    assert "is still CREATED" in late.err


def test_a_run_is_followed_to_its_end(sqlite_url: str, redis_url: str, type_: Type, tmp_path: Path, warm: Warm) -> None:
    env = {"BULLPEN_DATABASE_URL": sqlite_url, "BULLPEN_REDIS_URL": redis_url}
    order = ("runs", "start", "--tenant", "alice", "--version", "v1", "--definition", "{}", "--json")
    run_id = json.loads(cli(*order, cwd=tmp_path, env=env).out)["id"]

    late = type_("runs", "follow", run_id, "--interval", "50", "--timeout", "100")
    stranger = type_("runs", "follow", run_id, "--tenant", "bob")
    terminal = warm.start("runs", "follow", run_id, "--tenant", "alice", "--interval", "100", cwd=tmp_path, env=env)
    terminal.wait_for("QUEUED")
    cli("runs", "cancel", run_id, "--tenant", "alice", cwd=tmp_path, env=env)

    assert terminal.end() == 1
    assert "CANCELLED" in terminal.text
    assert f"run {run_id} is CANCELLED" in terminal.error
    assert (late.code, "is still QUEUED" in late.err) == (4, True)
    assert stranger.code == 1


def test_dead_rows_are_counted_limited_and_redriven_slowly(sqlite_url: str, type_: Type) -> None:
    async def bury(ledger: Ledger) -> None:
        await ledger.outbox.enqueue_many([item(number) for number in range(5)])
        for row in await ledger.outbox.claim_due_batch("w", 5):
            await ledger.outbox.dead_letter(row, "no", code="HTTP_400")

    act(sqlite_url, bury)

    assert type_("outbox", "redrive", "--all", "--dry-run").out == "would be redriven: 5\n"
    assert json.loads(type_("outbox", "redrive", "--all", "--dry-run", "--code", "X", "--json").out) == {"matched": 0}
    assert type_("outbox", "redrive", "--all", "--limit", "2").out == "redriven: 2\n"
    assert type_("outbox", "redrive", "--all", "--rate", "5").out == "redriven: 3\n"
    assert type_("outbox", "redrive", "--all", "--dry-run").out == "would be redriven: 0\n"
    wrong = type_("outbox", "redrive", "some-row", "--limit", "2")
    assert (wrong.code, wrong.err) == (2, "bullpen: filters, --limit, --rate and --dry-run go with --all\n")
    assert run(["outbox", "redrive", "--all", "--rate", "0"]) == 2

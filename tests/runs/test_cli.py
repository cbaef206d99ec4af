"""`bullpen runs`, as somebody types it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen.cli.commands import run
from bullpen.errors import PermanentError
from bullpen.ledger import Ledger, RunStatus
from bullpen.queue import JobState
from bullpen.redis import Connection
from bullpen.runs import Run
from tests.runs.kit import ALICE, Stage

Type = Callable[..., tuple[int, str, str]]


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, redis_url: str, sqlite_url: str) -> Type:
    """Types a command with the servers of this test configured."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("BULLPEN_REDIS_URL", redis_url)
    monkeypatch.setenv("BULLPEN_DATABASE_URL", sqlite_url)

    def typed(*words: str) -> tuple[int, str, str]:
        code = run(["runs", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return typed


def with_stage(redis_url: str, sqlite_url: str, work: Callable[[Stage], Any]) -> Any:
    """Something that programs do between two commands."""

    async def main() -> Any:
        connection = Connection(redis_url)
        async with Ledger(sqlite_url) as ledger:
            stage = Stage(ledger, connection)
            try:
                return await work(stage)
            finally:
                await stage.aclose()
                await connection.aclose()

    return asyncio.run(main())


async def fail_all(stage: Stage) -> None:
    """Run everything that waits; all of it fails for good."""

    async def refuse(job: Run) -> None:
        raise PermanentError("token=abcdef the model refused")

    async with stage.working(refuse):
        for row in await stage.service.find(ALICE):
            await stage.until(row.id, RunStatus.FAILED)
            await stage.until_job(row.id, JobState.FAILED)


@pytest.mark.requirement("X-40", "R-15", "R-54")
def test_runs_are_started_looked_at_retried_and_cancelled(type_: Type, redis_url: str, sqlite_url: str) -> None:
    assert type_("credits", "grant", "50", "--tenant", ALICE, "--reference", "invoice-1")[1] == "alice: 50 credits\n"
    _, text, err = type_("credits", "grant", "50", "--tenant", ALICE, "--reference", "invoice-1")
    assert text == "alice: 50 credits\n" and "granted before" in err
    order = ("start", "--tenant", ALICE, "--version", "v1", "--definition", '{"a": 1}', "--key", "order-1")

    code, started, _ = type_(*order, "--cost", "20", "--json")
    made = json.loads(started)
    assert code == 0 and made["created"] and made["status"] == "QUEUED"
    assert type_(*order, "--cost", "20")[1] == f"known already: {made['id']}\n"
    assert json.loads(type_("credits", "show", "--tenant", ALICE, "--json")[1]) == {"tenant": ALICE, "balance": 30}

    with_stage(redis_url, sqlite_url, fail_all)
    assert made["id"] in type_("list")[1]
    listed = json.loads(type_("list", "--tenant", ALICE, "--status", "failed", "--json")[1])
    assert [row["errorMessage"] for row in listed] == [
        "Workflow execution failed after 1 attempts: token=*** the model refused"
    ]
    assert json.loads(type_("list", "--tenant", "bob", "--json")[1]) == []
    assert "retryHistory" in type_("show", made["id"])[1]
    assert json.loads(type_("show", made["id"], "--tenant", ALICE, "--json")[1])["steps"] == []
    assert type_("dead-letters")[1] == "depth of workflow-execution-dlq: 1\n"
    letters = json.loads(type_("dead-letters", "--tenant", ALICE, "--json")[1])
    assert (letters["depth"], letters["deadLetters"][0]["runId"]) == (1, made["id"])
    assert "the model refused" in type_("dead-letters", "--tenant", ALICE)[1]

    assert type_("retry", made["id"], "--tenant", "bob")[0] == 1
    assert type_("retry", made["id"], "--tenant", ALICE)[1] == "retried: 1\n"
    code, answer, _ = type_("retry", made["id"], "--tenant", ALICE, "--json")
    assert code == 1 and json.loads(answer)["retried"] == []
    assert type_("cancel", made["id"], "--tenant", ALICE)[1] == f"cancelled: {made['id']}\n"
    assert json.loads(type_("cancel", made["id"], "--tenant", ALICE, "--json")[1])["status"] == "CANCELLED"


@pytest.mark.requirement("X-40")
def test_all_failed_runs_with_an_error_are_retried_at_once(type_: Type, redis_url: str, sqlite_url: str) -> None:
    for number in range(3):
        type_("start", "--tenant", ALICE, "--version", "v1", "--definition", "{}", "--key", str(number))
    with_stage(redis_url, sqlite_url, fail_all)

    nothing = type_("retry", "--all", "--tenant", ALICE, "--error", "another error")
    everything = type_("retry", "--all", "--tenant", ALICE, "--error", "the model refused", "--json")

    assert nothing[1] == "retried: 0\n"
    assert len(json.loads(everything[1])["retried"]) == 3
    assert type_("dead-letters", "--json")[1] == '{"depth": 0}\n'


@pytest.mark.requirement("X-109")
def test_lost_jobs_are_found_by_a_sweep(type_: Type) -> None:
    type_("start", "--tenant", ALICE, "--version", "v1", "--definition", "{}", "--test")

    assert type_("sweep")[1] == "examined 0, failed 0, given a job 0\n"
    assert json.loads(type_("sweep", "--idle", "0", "--json")[1]) == {"examined": 1, "failed": 0, "givenJobs": 1}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "--status", "lost"), "no such status"),
        (("show", "no-uuid"), "a UUID"),
        (("show", "4fd7f5b4-9b4e-4c39-8f3c-3d2b1c0a9e77"), "there is no run"),
        (("retry", "--tenant", ALICE), "name the runs"),
        (("credits", "grant", "5", "--tenant", ALICE), "missing option '--reference'"),
        (("start", "--tenant", ALICE, "--version", "v", "--definition", "{"), "not JSON"),
        (("start", "--tenant", ALICE, "--version", "v", "--definition", "{}", "--inputs", "[]"), "JSON object"),
        (("start", "--tenant", "", "--version", "v", "--definition", "{}"), "tenant_id"),
        (("start", "--tenant", ALICE, "--version", "v", "--definition", "{}", "--cost", "5"), "0 credits"),
    ],
)
def test_what_makes_no_sense_is_told(type_: Type, words: tuple[str, ...], said: str) -> None:
    code, _, err = type_(*words)

    assert code in (1, 2)
    assert said in err


def test_nothing_is_listed_where_nothing_is(type_: Type) -> None:
    assert type_("list")[2].startswith("no such runs; ")


PROGRAM = """
from bullpen import Bullpen

app = Bullpen()


@app.use_runs().handler("report", queue="reports", price=4)
async def report(run):
    raise ValueError("no paper")
"""


def test_handlers_with_a_name_are_started_listed_and_their_letters_shown(
    type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str, sqlite_url: str
) -> None:
    (tmp_path / "reports_program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    common = ("--tenant", ALICE, "--version", "v1", "--definition", "{}", "--json")
    type_("credits", "grant", "10", "--tenant", ALICE, "--reference", "r")

    code, _, err = type_("start", *common, "--handler", "report")
    assert code == 2 and "--app" in err
    code, _, err = type_("start", *common, "--handler", "raport", "--app", "reports_program")
    assert code != 0 and "report" in err
    code, out, _ = type_("start", *common, "--handler", "report", "--app", "reports_program")
    started = json.loads(out)
    assert (code, started["handler"], started["cost"]) == (0, "report", 4)
    assert json.loads(type_("list", "--handler", "report", "--json")[1])[0]["id"] == started["id"]
    assert json.loads(type_("list", "--handler", "other", "--json")[1]) == []
    assert " report " in type_("list")[1]

    async def fail(stage: Stage) -> None:
        async def refuse(run: Run) -> None:
            raise PermanentError("no paper")

        stage.runs.handler("report", queue="reports")(refuse)
        async with stage.working(name="report"):
            await stage.until(started["id"], RunStatus.FAILED)

    with_stage(redis_url, sqlite_url, fail)

    code, out, _ = type_("dead-letters", "--tenant", ALICE, "--handler", "report", "--app", "reports_program", "--json")
    shown = json.loads(out)
    assert (shown["handler"], shown["depth"]) == ("report", 1)
    assert [(each["runId"], each["handler"]) for each in shown["deadLetters"]] == [(started["id"], "report")]
    assert "depth of reports-dlq: 1" in type_("dead-letters", "--handler", "report", "--app", "reports_program")[1]
    assert "depth of workflow-execution.report-dlq: 0" in type_("dead-letters", "--handler", "report")[1]
    assert type_("retry", started["id"], "--tenant", ALICE)[0] == 0

"""The runbook says what is true, and every command on it works."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from bullpen.cli import commands
from bullpen.http.runs import Principal, Tokens, runs_api
from bullpen.ledger import RunStatus
from bullpen.queue import JobState
from bullpen.runs import Run
from bullpen.testing import RedisServer
from tests import forks
from tests.docs.run_page import blocks_of
from tests.runs.kit import ALICE, Stage
from tests.runs.test_lifecycle import submit_impatient

PAGE = Path(__file__).parents[2] / "docs" / "operations-runbook.md"
TOKEN = "a-token-of-the-runbook"


@pytest.mark.requirement("R-38", "R-39", "R-40", "R-42", "X-118")
def test_the_runbook_names_what_there_is() -> None:
    text = PAGE.read_text()

    for wanted in (
        *("`workflow-execution`", "`workflow-execution-dlq`", "`WORKER_CONCURRENCY` | 100", "`REDIS_HOST`"),
        *("`REDIS_PORT`", "`jobId`", "`runId`", "`tenantId`", "`error`", "`attemptsMade`", "lock plus two"),
        *("What puts runs into the dead-letter queue", "`exhausted`", "`permanent`", "`security`", "`poison`"),
    ):
        assert wanted in text, wanted


@pytest.mark.requirement("R-39")
def test_messages_of_the_runbook_are_those_that_are_logged() -> None:
    """A reader searches the log for what the page says."""
    sources = "".join(path.read_text() for path in (PAGE.parents[1] / "src" / "bullpen" / "runs").glob("*.py"))
    rows = re.findall(r"^\| `((?:Run|Job|Recovering|The) [^`]+)` \|", PAGE.read_text(), re.MULTILINE)

    assert len(rows) == 9
    # What is written between braces in the source is … or the name of a status on the page.
    flat = re.sub(r"\{[^{}]*\}", "…", sources).replace("…", "")
    for row in rows:
        pieces = [piece.strip() for piece in re.split(r"…|QUEUED", row) if len(piece.strip()) > 3]
        assert all(piece in flat for piece in pieces), row


class Commands:
    """Runs lines of the page as a person would, with the servers of this test."""

    def __init__(self, redis: RedisServer, port: int) -> None:
        self._redis, self._port = redis, port

    def __call__(self, line: str) -> str:
        program, *words = shlex.split(line)
        match program:
            case "redis-cli":
                return self._redis_cli(words)
            case "bullpen":
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    code = commands.run(words)
                assert code == 0, f"{line} ended with {code}"
                return printed.getvalue()
            case "python":
                answer = forks.run(words, env=os.environ, cwd=Path.cwd())
                assert answer.returncode == 0, answer.stderr
                return answer.stdout
            case "curl":
                header, url = words[words.index("-H") + 1], words[-1]
                name, _, value = header.partition(": ")
                request = urllib.request.Request(url.replace(":8000", f":{self._port}"), headers={name: value})
                with urllib.request.urlopen(request, timeout=20) as reply:
                    return str(reply.read().decode())
        raise AssertionError(f"nobody runs {line!r}")

    def _redis_cli(self, words: list[str]) -> str:
        if (program := shutil.which("redis-cli")) is not None:
            command = [program, "-p", str(self._redis.port), *words]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        reply = self._redis.command(*words)  # where the program is missing its words still must be right
        return reply.decode() if isinstance(reply, bytes) else str(reply)


@pytest.mark.requirement("R-41", "X-40")
async def test_every_command_of_the_runbook_works(
    lite: Stage, redis_server: RedisServer, sqlite_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(run: Run) -> None:
        raise ValueError("the model refused")

    run_id = await submit_impatient(lite)
    async with lite.working(refuse, dispatch=False):
        await lite.until(run_id, RunStatus.FAILED)
        await lite.until_job(run_id, JobState.FAILED)
    monkeypatch.setenv("BULLPEN_REDIS_URL", redis_url)
    monkeypatch.setenv("BULLPEN_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("NO_COLOR", "1")
    api = runs_api(lite.service, Tokens({TOKEN: Principal(tenant_id=ALICE, actor="ada")}))
    server = uvicorn.Server(uvicorn.Config(api, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(20):
        while not server.started:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    run_line = Commands(redis_server, server.servers[0].sockets[0].getsockname()[1])

    printed: dict[str, str] = {}
    for block in blocks_of(PAGE.read_text()):
        for line in block.source.splitlines() if block.language == "sh" else ():
            ready = line.replace("$RUN", run_id).replace("$TENANT", ALICE).replace("$TOKEN", TOKEN)
            printed[line] = await asyncio.to_thread(run_line, ready)
    server.should_exit = True
    await serving

    depths: dict[str, Any] = {
        line: int(found[0])
        for line, text in printed.items()
        if (found := re.findall(r"\d+", text)) and ("LLEN" in line or "counts()" in line)
    }
    assert set(depths.values()) == {1} and len(depths) == 2
    assert printed["bullpen runs dead-letters list"] == "depth of workflow-execution-dlq: 1\n"
    assert "workflow-execution" in printed["bullpen dead-letters stats --json"]
    (curl,) = [text for line, text in printed.items() if line.startswith("curl")]
    assert json.loads(curl)["depth"] == 1
    assert "the model refused" in printed["bullpen runs show $RUN"]
    assert printed["redis-cli HGET bull:workflow-execution:$RUN failedReason"].strip() == "the model refused"
    assert printed["bullpen runs retry $RUN --tenant $TENANT"] == "retried: 1\n"
    assert printed["bullpen runs cancel $RUN --tenant $TENANT"].startswith("cancelled: ")
    assert (await lite.service.get(ALICE, run_id)).status is RunStatus.CANCELLED
    assert await lite.service.balance(ALICE) == 100

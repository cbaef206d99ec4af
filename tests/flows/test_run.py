"""`bullpen run`: one process, several of them, signals, crashes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bullpen import Bullpen
from bullpen._kernel.lifecycle import AlreadyStopped
from bullpen.cli import supervisor
from bullpen.queue import Queue
from bullpen.testing import Child
from tests.conftest import StartServer
from tests.flows._cli import Terminal, child, cli, cli_process

SHOP = """
import asyncio, os, time
from bullpen import Bullpen, Job

app = Bullpen()
empty = Bullpen()
number = 5

@app.handler("emails", concurrency=3)
async def send(job: Job) -> int:
    print("running", job.name, flush=True)
    await asyncio.sleep(job.data.get("seconds", 0))
    if job.data.get("die"):
        os._exit(9)
    return os.getpid()

@app.handler("reports")
def report(job: Job) -> str:
    print("running", job.name, flush=True)
    time.sleep(job.data.get("seconds", 0))
    return "done"
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "broken.py").write_text("print(1 / 0)\n")
    (tmp_path / "needy.py").write_text("import a_module_that_nobody_has\n")
    (tmp_path / "wrong.py").write_text("from bullpen import Bullpen\nBullpen(prefix='bull:')\n")
    return tmp_path


@pytest.fixture
def _modules_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command puts the working directory on the path and imports from it, here into the process of the tests."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name in ("shop", "broken", "needy", "wrong"):
        sys.modules.pop(name, None)


def add(redis_url: str, queue: str, name: str, data: object = None, *, prefix: str = "bull", **options: Any) -> str:
    async def run() -> str:
        async with Queue(queue, connection=redis_url, prefix=prefix) as opened:
            return (await opened.add(name, data or {}, **options)).id

    return asyncio.run(run())


def result(redis_url: str, queue: str, job_id: str, *, prefix: str = "bull") -> object:
    async def run() -> object:
        async with Queue(queue, connection=redis_url, prefix=prefix) as opened:
            job = await opened.get_job(job_id)
            assert job is not None
            return await job.result(timeout=20_000)

    return asyncio.run(run())


def fill_both(redis_url: str) -> None:
    """A job for tomorrow in each queue: workers on a queue that nobody ever filled leave keys that belong to none."""
    for queue in ("emails", "reports"):
        add(redis_url, queue, "tomorrow", delay=86_400_000)


def started(shop: Path, redis_url: str, *options: str) -> Child:
    fill_both(redis_url)
    return child("run", "shop:app", "--redis", redis_url, *options, cwd=shop)


def wait_for_end_of(pid: int) -> None:
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)  # not our child: the system tells us only when we ask
    raise AssertionError(f"process {pid} is still there")


# Which server -------------------------------------------------------------------------------------------------------

NAMED = """
from bullpen import Bullpen, Connection, Job
from bullpen.settings import Settings

NOWHERE = "redis://127.0.0.1:1"
by_url = Bullpen(NOWHERE, prefix="code")
by_connection = Bullpen(Connection(NOWHERE), prefix="code")
by_settings = Bullpen(settings=Settings.load(redis_url=NOWHERE, redis_prefix="code"))

for app in (by_url, by_connection, by_settings):
    @app.handler("emails")
    async def send(job: Job) -> str:
        return "done"
"""


@pytest.mark.parametrize(("app", "processes"), [("by_url", 2), ("by_connection", 1), ("by_settings", 1)])
def test_the_command_line_wins_over_the_code(tmp_path: Path, redis_url: str, app: str, processes: int) -> None:
    """It was ignored without a word, and work was taken from another server than the one that was named."""
    (tmp_path / "named.py").write_text(NAMED)
    url = f"{redis_url}/0"

    with child(
        *("run", f"named:{app}", "--redis", url, "--prefix", "told", "--processes", str(processes)), cwd=tmp_path
    ) as command:
        line = command.wait_for("taking jobs")
        assert result(url, "emails", add(url, "emails", "hello", prefix="told"), prefix="told") == "done"

    host = redis_url.removeprefix("redis://")
    assert f"taking jobs from emails on {host}, database 0, prefix told" in line
    assert "--redis is used instead of Connection(127.0.0.1:1), which is in the code" in command.output


def test_the_start_says_which_ledger_is_used(shop: Path, redis_url: str) -> None:
    (shop / "paid.py").write_text("from bullpen import Bullpen\napp = Bullpen()\napp.use_outbox()\n")
    env = {"BULLPEN_DATABASE_URL": f"sqlite:///{shop / 'ledger.sqlite3'}"}

    with child("run", "paid:app", "--redis", redis_url, "--concurrency", "auto", cwd=shop, env=env) as command:
        line = command.wait_for("taking jobs")

    assert f"ledger sqlite:///{shop / 'ledger.sqlite3'}" in line
    assert "instead of" not in command.output


# Finding the app ----------------------------------------------------------------------------------------------------


@pytest.mark.measures_children
def test_a_part_alone_says_what_it_does_and_a_missing_one_what_to_do(shop: Path, redis_url: str) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DATABASE_URL": f"sqlite:///{shop / 'ledger.sqlite3'}"}
    (shop / "parts.py").write_text(f"{SHOP}\n_ = app.use_outbox()\n")
    with child("run", "parts:app", "--only", "outbox", cwd=shop, env=env) as command:
        line = command.wait_for(" on 127")
        assert "taking jobs from the outbox on" in line, "queues of other parts are not named"
    missing = cli_process("run", "parts:app", "--only", "alerts", cwd=shop, env=env)
    assert (missing.code, "BULLPEN_ALERTS_WEBHOOK_URL" in missing.err) == (2, True)
    assert "taking jobs" not in missing.err


@pytest.mark.parametrize(
    ("target", "code", "told"),
    [
        ("nowhere", 2, "there is no module 'nowhere'"),
        ("shop:nothing", 2, "'shop' has no Bullpen object named 'nothing'; it has shop:app, shop:empty"),
        ("shop:number", 2, "'shop' has no Bullpen object named 'number'"),
        ("shop:empty", 2, "the app has nothing to run"),
        (":app", 2, "expected MODULE:APP"),
        ("wrong", 2, "--prefix: expected"),
        ("broken", 1, "importing 'broken' failed: division by zero"),
        ("needy", 1, "importing 'needy' failed: No module named 'a_module_that_nobody_has'"),
    ],
)
@pytest.mark.usefixtures("_modules_are_forgotten")
def test_what_cannot_be_run_is_told_in_one_line(target: str, code: int, told: str, shop: Path) -> None:
    answer = cli("run", target, "--redis", "redis://127.0.0.1:1", cwd=shop)

    assert answer.code == code
    assert answer.err.splitlines()[-1].startswith("bullpen: ")
    assert told in answer.err.splitlines()[-1]


def test_a_program_that_fails_while_it_is_imported_shows_where(shop: Path) -> None:
    """Unlike a wrong command this is the user's own program: its author needs the line."""
    with child("run", "broken", cwd=shop) as command:
        assert command.wait() == 1

    assert 'broken.py", line 1' in command.output
    assert command.output.splitlines()[-1] == "bullpen: importing 'broken' failed: division by zero"


def test_an_unknown_log_level_is_refused(shop: Path) -> None:
    answer = cli("run", "shop", "--log-level", "loud", cwd=shop)

    assert (answer.code, answer.err) == (2, "bullpen: 'loud' is not a log level; write debug, info, warning or error\n")


# One process --------------------------------------------------------------------------------------------------------


def test_the_first_signal_lets_running_jobs_finish(shop: Path, redis_url: str) -> None:
    with started(shop, redis_url) as command:
        command.wait_for("taking jobs from emails, reports")
        slow = add(redis_url, "emails", "slow", {"seconds": 0.7})
        command.wait_for("running slow")

        command.terminate()
        code = command.wait()

    assert code == 0
    assert "no more jobs are taken, waiting for 1 running" in command.output
    assert result(redis_url, "emails", slow) == command.pid


@pytest.mark.requirement("X-121")
def test_a_second_signal_gives_running_jobs_back(shop: Path, redis_url: str) -> None:
    with started(shop, redis_url) as command:
        endless = add(redis_url, "emails", "endless", {"seconds": 600})
        command.wait_for("running endless")

        command.interrupt()
        command.wait_for("no more jobs are taken")
        command.interrupt()
        code = command.wait(timeout=10)

    async def look() -> tuple[str, int]:
        async with Queue("emails", connection=redis_url) as queue:
            job = await queue.get_job(endless)
            assert job is not None
            return (await job.state()).value, job.attempts_made

    assert code == 0
    assert asyncio.run(look()) == ("waiting", 0)


@pytest.mark.leaves_jobs_active
def test_a_thread_that_does_not_stop_does_not_keep_the_process(shop: Path, redis_url: str) -> None:
    """Python would wait for it for ever; its job returns when the lock has run out."""
    with started(shop, redis_url) as command:
        add(redis_url, "reports", "stuck", {"seconds": 600})
        command.wait_for("running stuck")

        command.terminate()
        command.wait_for("no more jobs are taken")
        command.terminate()

        assert command.wait(timeout=15) == 0
    assert "exiting although 1 handler thread" in command.output


def test_a_thread_that_is_about_to_end_is_no_thread_that_does_not_stop(shop: Path, redis_url: str) -> None:
    (shop / "shop.py").write_text(
        (shop / "shop.py").read_text()
        + """
import logging, threading

class Ends(logging.Handler):
    def emit(self, record):
        if record.getMessage() == "stopped":
            has_stopped.set()

has_stopped = threading.Event()
logging.getLogger("bullpen.run").addHandler(Ends())
threading.Thread(target=lambda: (has_stopped.wait(), time.sleep(0.2))).start()
"""
    )
    with started(shop, redis_url) as command:
        add(redis_url, "emails", "first")
        command.wait_for("running first")
        command.terminate()

        assert command.wait(timeout=15) == 0
    assert command.output.splitlines()[-1].endswith("stopped")


def test_concurrency_of_the_command_line_wins(shop: Path, redis_url: str) -> None:
    with started(shop, redis_url, "--concurrency", "1") as command:
        command.wait_for("taking jobs")
        first = add(redis_url, "emails", "first", {"seconds": 0.4})
        second = add(redis_url, "emails", "second")
        command.wait_for("running first")
        result(redis_url, "emails", first)
        command.wait_for("running second")
        command.terminate()
        command.wait()

    async def order() -> list[int]:
        async with Queue("emails", connection=redis_url) as queue:
            jobs = [await queue.get_job(job_id) for job_id in (first, second)]
            return [when for job in jobs if job is not None for when in (job.processed_on, job.finished_on)]

    began, ended, began_second, _ = asyncio.run(order())
    assert began < ended <= began_second


# Several processes --------------------------------------------------------------------------------------------------


@pytest.mark.leaves_jobs_active
@pytest.mark.measures_children
def test_a_worker_process_that_dies_is_started_again(shop: Path, redis_url: str) -> None:
    with started(shop, redis_url, "--processes", "2") as command:
        pids = {int(_number(command.wait_for(r"worker process \d is pid"))) for _ in range(2)}
        command.wait_for("taking jobs")
        command.wait_for("taking jobs")
        add(redis_url, "emails", "deadly", {"die": True})
        command.wait_for("ended with exit code 9; starting it again in 0.5 s")
        replacement = int(_number(command.wait_for(r"worker process \d is pid")))
        command.wait_for("taking jobs")

        job = add(redis_url, "emails", "fine")
        ran = result(redis_url, "emails", job)
        command.terminate()
        code = command.wait()

    assert replacement not in pids
    assert ran in {*pids, replacement}
    assert code == 0
    assert "all worker processes have ended" in command.output


def test_a_wrong_command_is_not_started_again_and_again(shop: Path) -> None:
    with child("run", "shop:nothing", "--processes", "2", cwd=shop) as command:
        assert command.wait() == 2

    assert "has no Bullpen object named 'nothing'" in command.output
    assert "starting it again" not in command.output


def test_worker_processes_stop_when_their_supervisor_is_killed(shop: Path, redis_url: str) -> None:
    """Nobody would ever stop them: they would go on with old code after the next deployment."""
    with started(shop, redis_url, "--processes", "2") as command:
        pids = [int(_number(command.wait_for(r"worker process \d is pid"))) for _ in range(2)]
        command.wait_for("taking jobs")
        command.wait_for("taking jobs")

        command.kill()

        for pid in pids:
            wait_for_end_of(pid)


@pytest.mark.measures_children
def test_signals_from_a_terminal_reach_the_supervisor_alone(shop: Path, redis_url: str) -> None:
    """Ctrl-C goes to all processes of a terminal; counted twice, the first one would already cancel running jobs."""
    fill_both(redis_url)
    terminal = Terminal("run", "shop:app", "--redis", redis_url, "--processes", "2", cwd=shop)
    terminal.wait_for("(?s)taking jobs.*taking jobs")
    slow = add(redis_url, "emails", "slow", {"seconds": 0.7})
    terminal.wait_for("running slow")

    terminal.type("\x03")
    code = terminal.end()

    assert code == 0
    assert isinstance(result(redis_url, "emails", slow), int)
    assert "SIGINT: worker processes finish their jobs" in terminal.text


@pytest.mark.parametrize("turns", range(1, 6))
async def test_an_app_that_is_stopped_while_it_starts_has_stopped(turns: int, redis_url: str) -> None:
    """Ctrl-C in the first moment is no error, whichever part has begun by then."""
    app = Bullpen(redis_url)
    for queue in ("emails", "reports"):
        await app.queue(queue).add("first")
        app.worker(queue, lambda job: None)
    running = asyncio.create_task(app.run(signals=False))
    for _ in range(turns):
        await asyncio.sleep(0)

    await app.stop()
    await asyncio.wait_for(running, 20)

    with pytest.raises(AlreadyStopped):
        await app.run(signals=False)


@pytest.mark.leaves_jobs_active
def test_a_third_signal_kills(shop: Path, redis_url: str) -> None:
    with started(shop, redis_url, "--processes", "2") as command:
        command.wait_for("taking jobs")
        add(redis_url, "reports", "stuck", {"seconds": 600})
        command.wait_for("running stuck")

        command.terminate()
        command.wait_for("a second signal hurries")
        command.terminate()
        command.wait_for("another signal kills")
        command.terminate()
        command.wait_for("the check for stalled jobs gives their running jobs back")

        assert command.wait(timeout=10) == 128 + signal.SIGTERM


def test_a_third_signal_does_not_wait_for_a_server_that_is_away(shop: Path, start_server: StartServer) -> None:
    """Giving jobs back to a server that does not answer takes seconds; who asks three times has none."""
    server = start_server()
    with started(shop, server.url) as command:
        command.wait_for("taking jobs")
        add(server.url, "reports", "stuck", {"seconds": 600})
        command.wait_for("running stuck")

        with server.paused():
            command.terminate()
            command.wait_for("waiting for 1 running")
            command.terminate()
            command.wait_for("SIGTERM again")
            began = time.monotonic()
            command.terminate()
            command.wait_for("the check for stalled jobs gives 1 running jobs back")

            assert command.wait(timeout=10) == 128 + signal.SIGTERM
            assert time.monotonic() - began < 4  # six and more with the second alone


def test_pauses_between_starts_grow_and_end_at_half_a_minute() -> None:
    assert [supervisor.pause_after(deaths) for deaths in (1, 2, 3, 7, 50)] == [0.5, 1.0, 2.0, 30.0, 30.0]


@pytest.mark.parametrize(("code", "told"), [(3, "exit code 3"), (-signal.SIGKILL, "SIGKILL"), (-99, "signal 99")])
def test_how_a_process_ended_is_told_in_words(code: int, told: str) -> None:
    assert supervisor.describe(code) == told


def _number(line: str) -> str:
    found = re.search(r"is pid (\d+)", line)
    assert found is not None
    return found[1]

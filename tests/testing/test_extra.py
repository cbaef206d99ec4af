"""`bullpen.testing` in an environment that holds its own extra and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bullpen._version import DISTRIBUTION
from tests.environments import ROOT, clean_environ, closure, make_environment

USE_EVERYTHING = """
import asyncio

import bullpen
from bullpen import Queue, Worker
from bullpen.testing import (
    Child, ClockOffset, FaultProxy, JobBook, RedisServer, assert_sound, check_server, find_queues, need,
)

async def work(server, books):
    async def handler(job):
        books.ran(job.id, fence=job.fence)
        return "done"

    with FaultProxy(server) as proxy:
        async with Queue("mails", connection=proxy.url) as queue, Worker("mails", handler, connection=proxy.url):
            job = await queue.add("welcome")
            books.accepted(job.id)
            assert await job.result(timeout=20_000) == "done"

need("valkey")
assert ClockOffset(5).advance(5) == 10
with RedisServer.start(persistent=True) as server:
    books = JobBook("books")
    with books.following(server.client(), "bull", "mails"):
        asyncio.run(work(server, books))
    client = server.client()
    books.read_events(client, "bull", "mails")
    books.read_states(client, "bull", "mails")
    books.check()
    assert find_queues(client) == [("bull", "mails")]
    assert check_server(client) == []
    server.kill()
    server.restart()
    assert_sound(server.client(), "bull", "mails", at_rest=True)
with Child.code("print('ready')") as child:
    child.wait_for("ready")
print(bullpen.__file__, "and everything worked")
"""


def test_the_extra_brings_everything_that_the_helpers_use(tmp_path: Path) -> None:
    """A user has `pip install "bullpen-mq[testing]"`, and none of the packages that our own tests have besides."""
    python = make_environment(tmp_path / "venv", ["testing"])

    answer = subprocess.run(
        [python, "-c", USE_EVERYTHING], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=False
    )

    assert answer.returncode == 0, answer.stderr
    assert "and everything worked" in answer.stdout
    assert "pytest" not in closure(f"{DISTRIBUTION}[testing]")


def test_without_the_extra_its_pip_line_is_printed(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv", ["embedded"])
    code = "from bullpen.testing import RedisServer\nwith RedisServer.start() as server: server.command('PING')"

    answer = subprocess.run([python, "-c", code], env=clean_environ(), capture_output=True, text=True, check=False)

    assert answer.stderr.splitlines()[-1].endswith(
        'the client of a test server needs the extra "testing": pip install "bullpen-mq[testing]"'
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_pip_brings_everything_that_the_helpers_use(tmp_path: Path) -> None:
    """The same with what the registry really delivers."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", f"{ROOT}[testing]"]
    subprocess.run(install, cwd=tmp_path, env=clean_environ(), check=True)

    answer = subprocess.run(
        [python, "-c", USE_EVERYTHING], cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, check=False
    )

    assert answer.returncode == 0, answer.stderr
    assert Path(answer.stdout.split()[0]).is_relative_to(tmp_path)

"""The examples run, print what they say, and are typed."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import forks
from tests.docs.test_pages import node_environment
from tests.flows._cli import child, environment

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

ADD_ONE_MAIL = """
import asyncio
from shop import app, emails

async def main() -> None:
    async with app:
        job = await emails.add("hi", {"to": "ada"})
        print(await job.result(timeout=20_000))

asyncio.run(main())
"""

SAYS = {
    "first_job.py": ["Hello Ada"],
    "many_jobs.py 2000": ["1,000 completed", "2,000 added, 2,000 completed, 0 left"],
    "retries_and_dead_letters.py": [
        "job 1: service away, again in 100 ms",
        "job 2 failed for good: 'url'",
        "called https://example.com in take 4",
    ],
    "blocking_work.py": ["1 pages, 2 pages, 3 pages", "1229 primes", "its process was killed"],
    "idempotent_payment.py": ["the first worker ended with 1", "run 2, was charged already", "charges: [100]"],
}


@pytest.mark.parametrize("command", SAYS)
def test_an_example_prints_what_it_should(command: str, tmp_path: Path) -> None:
    name, *arguments = command.split()

    answer = forks.run(
        [str(EXAMPLES / name), *arguments], cwd=tmp_path, env=environment({"BULLPEN_DATA_DIR": str(tmp_path / "data")})
    )

    assert answer.returncode == 0, answer.stderr
    assert [text for text in SAYS[command] if text not in answer.stdout] == []


def test_the_application_and_its_producer(tmp_path: Path) -> None:
    env = {"BULLPEN_DATA_DIR": str(tmp_path / "data")}
    with child("run", "shop:app", cwd=EXAMPLES, env=env) as workers:
        workers.wait_for("taking jobs from emails, invoices")

        answer = forks.run(["shop_producer.py"], cwd=EXAMPLES, env=environment(env))
        workers.terminate()
        workers.wait()

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines() == [
        "{'sent to': 'ada@example.com'}",
        "invoice 1 over 120",
        "dead letter: nothing to pay",
    ]


def test_node_runs_a_job_of_the_application(redis_url: str, tmp_path: Path) -> None:
    """The same job, added by Python and run by the worker in node_worker.cjs."""
    node = node_environment()
    env = {"BULLPEN_REDIS_URL": redis_url, **node}
    with subprocess.Popen(
        [node["PAGE_NODE"], str(EXAMPLES / "node_worker.cjs")], env=environment(env), stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
        answer = forks.run(["-c", ADD_ONE_MAIL], cwd=EXAMPLES, env=environment(env))
        worker.terminate()

    assert answer.stdout == "{'sent to': 'ada, by Node'}\n", answer.stderr


def test_every_example_is_listed_and_tested() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".cjs")}

    assert {name for name in files if f"`{name}`" not in page} == set()
    assert files == {
        *(command.split()[0] for command in SAYS),
        "shop.py",
        "shop_producer.py",
        "node_worker.cjs",
        "order_workflow.py",
    }


def test_the_examples_are_among_what_the_type_checker_reads() -> None:
    """`make test` runs it once for everything."""
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]

    assert checked["strict"] is True
    assert EXAMPLES.name in checked["files"]

"""`bullpen demo`: it must run anywhere, and its sum must be true."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from bullpen.cli.demo import load
from bullpen.queue import JobCounts
from bullpen.redis import Connection
from bullpen.testing import RedisServer
from tests.flows._cli import Terminal, child, cli_process

display, scenario, play, stage = (load(name) for name in ("display", "jobs", "play", "stage"))
Report = play.Report


@pytest.mark.measures_children
def test_every_job_is_accounted_for_although_a_worker_is_killed(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    answer = cli_process("demo", "--json", "--jobs", "400", "--duration", "2", cwd=tmp_path, env=env, timeout=110)

    assert (answer.code, answer.err) == (0, "")
    told = json.loads(answer.out)
    names = Counter(job.name for job in scenario.make_jobs(400, 1, random.Random(7)))
    dead = sum(names[name] for name in scenario.DEAD)
    assert told["addsUp"]
    assert (told["added"], told["completed"], told["deadLettered"]) == (400, 400 - dead, dead)
    assert told["killedWorker"] is not None
    assert told["handlerRuns"] == 400 + told["retries"] + told["recovered"]
    assert told["recovered"] >= told["inItsHands"]
    assert [(line["system"], line["isRight"]) for line in told["systems"]] == [
        ("tasks", True),
        ("workflow", True),
        ("outbox", True),
        ("run", True),
        ("message", True),
    ]
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_it_draws_a_picture_and_leaves_nothing_on_a_server_of_ones_own(
    redis_url: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    terminal = Terminal("demo", "--jobs", "60", "--duration", "1", "--redis", redis_url, cwd=tmp_path)
    terminal.wait_for("SIGKILL for worker", timeout=60)

    assert terminal.end(timeout=60) == 0
    assert "dead letters" in terminal.text
    assert "bullpen demo --dashboard" in terminal.text
    assert "✓ 60 added = " in terminal.text
    # The line for Node is copied from the screen: no frame and no line break may stand in it.
    (line,) = [each for each in terminal.text.splitlines() if each.startswith("node -e '")]
    assert line.endswith("'")
    assert f'{{url: "{redis_url}"}}' in line
    assert redis_server.client().keys("*") == []


def test_it_can_be_interrupted_and_leaves_no_process(tmp_path: Path) -> None:
    with child("demo", "--plain", "--jobs", "3000", "--duration", "30", "--jobs-only", cwd=tmp_path) as command:
        command.wait_for("worker processes are ready", timeout=60)

        command.interrupt()

        assert command.wait(timeout=30) == 130
    assert command.output.splitlines()[-1] == "bullpen: interrupted"


def test_it_goes_on_for_a_visitor_until_interrupted(tmp_path: Path) -> None:
    with child("demo", "--stay", "--plain", "--jobs-only", "--jobs", "20", "--duration", "1", cwd=tmp_path) as command:
        command.wait_for("^node -e", timeout=60)
        command.wait_for("One job a second", timeout=60)
        command.wait_for("^node -e")
        command.wait_for(r"job \d+ was run by python")
        assert "other systems" not in command.output, "they were left out"

        command.interrupt()

        assert command.wait(timeout=30) == 0


def test_it_is_seen_in_a_browser_until_interrupted(tmp_path: Path) -> None:
    given = ("--dashboard", "--plain", "--jobs-only", "--jobs", "20", "--duration", "1")
    with child("demo", *given, cwd=tmp_path) as command:
        command.wait_for("^in the browser: http://127.0.0.1:", timeout=60)
        command.wait_for("^The pages stay until Ctrl-C: http://127.0.0.1:", timeout=60)
        url = command.output.rstrip().rpartition(" ")[2]
        with urllib.request.urlopen(f"{url}/queues/demo", timeout=30) as answer:
            assert b"dead letters" in answer.read()

        command.interrupt()

        assert command.wait(timeout=30) == 0


async def test_a_worker_that_cannot_start_ends_the_demo_with_its_last_words(redis_url: str, tmp_path: Path) -> None:
    connection = Connection(redis_url)
    broken = play.Play(connection, url="redis://[", queue="demo", prefix="bull", jobs=10, seconds=1, directory=tmp_path)

    with pytest.raises(play.PlayFailed, match=r"(?s)worker-1 ended with 1 although nobody asked it to:.*Invalid"):
        await broken.run()

    await connection.aclose()


def test_every_kind_of_job_is_in_a_small_demo_too() -> None:
    names = [job.name for job in scenario.make_jobs(8, 1, random.Random(1))]

    assert sorted(names) == sorted(scenario.KINDS)
    assert len(list(scenario.make_jobs(3, 1, random.Random(1)))) == 3


@pytest.mark.parametrize(
    ("added", "counts", "dead", "holds"),
    [
        (10, JobCounts(0, 0, 0, 0, 0, 8, 2), 2, True),
        (10, JobCounts(0, 0, 0, 0, 0, 8, 2), 1, False),
        (10, JobCounts(0, 0, 0, 0, 0, 9, 2), 2, False),
        (10, JobCounts(1, 0, 0, 0, 0, 8, 2), 2, False),
        (9, JobCounts(0, 0, 0, 0, 0, 8, 1), 1, False),
    ],
)
def test_the_sum_is_only_right_when_nothing_is_lost_doubled_or_left(
    added: int, counts: JobCounts, dead: int, holds: bool
) -> None:
    report = Report("demo", 10, counts=counts, dead_letters=dead, added=added)

    assert report.adds_up is holds
    assert next(iter(display.summary(report))).startswith("✓" if holds else "✗")


def test_a_sum_that_is_wrong_says_what_is_missing() -> None:
    report = Report("demo", 10, counts=JobCounts(2, 0, 0, 0, 0, 5, 1), dead_letters=1, added=10)

    assert "2 unfinished, 2 unaccounted for" in "\n".join(display.summary(report))


async def test_without_a_picture_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    showing = asyncio.ensure_future(display.Nothing().show(Report("demo", 1)))
    await asyncio.sleep(0)
    showing.cancel()

    assert capsys.readouterr().out == ""


def test_the_line_for_node_is_one_word_of_a_shell() -> None:
    line = stage.node_command("it's", "redis://:p%40ss@127.0.0.1:7000", "bull")

    assert line.startswith("node -e ")
    assert "\n" not in line

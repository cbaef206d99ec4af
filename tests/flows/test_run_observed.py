"""`bullpen run` as a monitoring system sees it: pages over HTTP, one JSON object per log line."""

from __future__ import annotations

import json
import socket
import urllib.request
from pathlib import Path

import pytest

from bullpen import sync
from tests.flows._cli import child, cli

APP = """
from bullpen import Bullpen

app = Bullpen()


@app.handler("mails")
async def send(job):
    return "sent"
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.requirement("W-77", "W-82", "X-24")
def test_pages_are_served_and_logs_are_json(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "observed.py").write_text(APP)
    port = free_port()
    words = ("run", "observed:app", "--http", f"127.0.0.1:{port}", "--log-format", "json", "--redis", redis_url)
    with child(*words, cwd=tmp_path) as command:
        line = command.wait_for("taking jobs", 60)
        with sync.Queue("mails", connection=redis_url) as queue:
            assert queue.add("welcome").result(timeout=60_000) == "sent"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            metrics = page.read().decode()

    assert json.loads(line)["logger"] == "bullpen.run"
    assert 'bullpen_jobs_completed_total{queue="mails"} 1' in metrics


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--log-format", "yaml"), "'yaml' is not a log format; write console or json"),
        (("--http", "nowhere"), "HOST:PORT, such as 127.0.0.1:9464"),
    ],
)
def test_a_wrong_word_is_one_line(words: tuple[str, ...], message: str, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "observed_wrong.py").write_text(APP)
    answer = cli("run", "observed_wrong:app", *words, "--redis", redis_url, cwd=tmp_path)

    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1

"""Completion: the right candidates in every place, in a real shell, fast and silent when the server is not there."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from bullpen.cli.commands import tree
from bullpen.queue import Queue
from tests.flows._cli import cli, environment

pytestmark = pytest.mark.requirement("X-40")

SHELLS = [shell for shell in ("bash", "zsh", "fish") if shutil.which(shell)]


def complete(line: str) -> list[str]:
    """What a shell is offered: the program is asked as the shells' scripts ask it."""
    asked = BashComplete(tree(), {}, "bullpen", "_BULLPEN_COMPLETE")
    *before, word = line.split(" ")
    return [item.value for item in asked.get_completions(before, word)]


@pytest.fixture
def with_queues(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    async def add() -> None:
        for name in ("emails", "emails-slow", "reports", "odd$(name)", "odd`name", "odd\\$name"):
            async with Queue(name, connection=redis_url) as queue:
                await queue.add("a")

    asyncio.run(add())
    monkeypatch.setenv("BULLPEN_REDIS_URL", redis_url)
    return redis_url


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A directory for PATH with the command in it."""
    place = tmp_path / "bin"
    place.mkdir()
    script = place / "bullpen"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bullpen.cli "$@"\n')
    script.chmod(0o755)
    return place


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("que", ["queues"]),
        ("dead-letters red", ["redrive"]),
        ("projectors parked s", ["show", "skip"]),
        ("queues list --re", ["--redis"]),
        ("queues list --redis redis://x --p", ["--prefix"]),
        ("queues list --json --js", []),
        ("jobs list emails --state f", ["failed"]),
        ("jobs follow emails --event stal", ["stalled"]),
        ("jobs follow emails --event failed --ev", ["--event"]),
        ("top --sort o", ["oldest"]),
        ("run module:app --only out", ["outbox"]),
        ("completion z", ["zsh"]),
        ("queues limits s", ["show", "set"]),
        ("nonsense ", []),
        ("jobs add emails hello --data ", []),
    ],
)
def test_every_place_has_its_candidates(line: str, found: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULLPEN_REDIS_URL", "redis://127.0.0.1:1")

    assert [value for value in complete(line) if line != "nonsense " or value not in tree().commands] == found


def test_every_noun_is_completed_and_nothing_that_is_hidden() -> None:
    assert set(complete("")) == set(tree().commands)
    assert "--lifeline" not in complete("run --")


def test_names_of_queues_come_from_the_server(with_queues: str) -> None:
    assert complete("queues pause em") == ["emails", "emails-slow"]
    assert complete("jobs show rep") == ["reports"]
    assert complete("dead-letters list em") == ["emails", "emails-slow"]
    assert complete("top emails rep") == ["reports"]
    assert complete("queues pause --prefix other em") == []


def test_a_name_that_a_shell_would_run_is_not_offered(with_queues: str) -> None:
    """Whoever presses Tab must not run what somebody else stored."""
    assert complete("queues pause odd") == []


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "nonsense://x", "redis://10.255.255.1"])
def test_without_a_server_there_are_no_names_no_words_and_no_waiting(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BULLPEN_REDIS_URL", url)
    began = time.monotonic()

    found = complete("queues pause ")

    assert found == []
    assert time.monotonic() - began < 10  # it asks for less than a second; a call may try for a minute
    assert capfd.readouterr() == ("", "")


def test_tab_starts_no_embedded_server_and_uses_one_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bullpen import embedded

    monkeypatch.delenv("BULLPEN_REDIS_URL", raising=False)
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))

    assert complete("queues pause ") == []
    assert not (tmp_path / "data").exists()

    with embedded.acquire(tmp_path / "data") as server:

        async def add() -> None:
            async with Queue("emails", connection=server.url) as queue:
                await queue.add("a")

        asyncio.run(add())
        assert complete("queues pause ") == ["emails"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_printed_for_every_shell(shell: str, tmp_path: Path) -> None:
    script = cli("completion", shell, cwd=tmp_path)

    assert (script.code, script.err) == (0, "")
    assert f"_BULLPEN_COMPLETE={shell}_complete" in script.out


def test_a_shell_that_nobody_knows_is_told(tmp_path: Path) -> None:
    answer = cli("completion", "tcsh", cwd=tmp_path)

    assert answer.code == 2
    assert "'tcsh' is not one of" in answer.err


def test_bash_fills_its_replies(program: Path, with_queues: str, tmp_path: Path) -> None:
    """As Readline calls it; names of files are left to bash."""
    (tmp_path / "script").write_text(cli("completion", "bash", cwd=tmp_path).out)
    ask = """
        source ./script
        ask() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            compopt() { echo "[$1 $2]"; }  # only Readline has it
            _bullpen_completion bullpen
            echo "[${COMPREPLY[*]}]"
        }
        ask bullpen queues pause em
        ask bullpen jobs list x --state del
        ask bullpen messages recipients import al
    """
    env = environment({"PATH": f"{program}:{os.environ['PATH']}", "BULLPEN_REDIS_URL": with_queues})

    answer = subprocess.run(["bash", "-c", ask], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    assert (answer.stdout, answer.stderr) == (
        "[emails emails-slow]\n[delayed]\n[-o default]\n[]\n",
        "",
    )


@pytest.mark.parametrize("shell", SHELLS)
def test_a_person_at_a_real_shell_presses_tab(shell: str, program: Path, tmp_path: Path) -> None:
    commands = {
        "bash": ["bash", "--norc", "--noprofile", "-i"],
        "zsh": ["zsh", "-f", "-i"],
        "fish": ["fish", "--no-config", "-i"],
    }
    (tmp_path / "script").write_text(cli("completion", shell, cwd=tmp_path).out)
    ours, theirs = pty.openpty()
    env = environment({"PATH": f"{program}:{os.environ['PATH']}", "PS1": "$ ", "HOME": str(tmp_path), "TERM": "xterm"})
    process = subprocess.Popen(commands[shell], stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=tmp_path,
                               start_new_session=True)  # fmt: skip
    os.close(theirs)
    seen = b""

    def until(text: bytes) -> None:
        nonlocal seen
        give_up = time.monotonic() + 50
        while text not in seen:
            assert select.select([ours], [], [], max(0, give_up - time.monotonic()))[0], seen
            seen += os.read(ours, 65_536)

    try:
        os.write(ours, b"source ./script; echo rea''dy\n")
        until(b"ready")
        os.write(ours, b"bullpen schedules prev\t")
        until(b"preview")
    finally:
        process.kill()
        process.wait()
        os.close(ours)

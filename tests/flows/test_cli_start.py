"""What commands load before they do anything: a shell completes, explains and lists without a pause."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.requirement("X-40")

_RUN = """
import sys
import bullpen.cli
try:
    bullpen.cli.main()
except SystemExit as end:
    code = end.code
loaded = sorted(sys.modules)
print("\\n".join(["", "loaded:", *loaded]), file=sys.stderr)
sys.exit(code)
"""
HEAVY = ("alembic", "cryptography", "jinja2", "rich", "sqlalchemy", "starlette", "uvicorn")
"""Each of them alone takes as long as the rest of a command."""
FEATURES = ("dashboard", "http", "ledger", "messages", "outbox", "plugins", "runs", "testing", "worker", "workflow")


def loaded(words: str, redis_url: str, cwd: Path) -> list[str]:
    """The modules that a command has loaded when it ends."""
    ended = subprocess.run(
        [sys.executable, "-c", _RUN, *words.split()],
        cwd=cwd,
        env={**os.environ, "BULLPEN_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    modules = ended.stderr.split("\nloaded:\n")[1].split()
    assert "bullpen.cli.commands" in modules
    return modules


def unwanted(modules: list[str], forbidden: tuple[str, ...]) -> list[str]:
    return [name for name in modules if name.startswith(tuple(f"{each}." for each in forbidden)) or name in forbidden]


@pytest.mark.parametrize("words", ["--version", "--help", "jobs --help", "queues list --help"])
def test_help_loads_neither_an_event_loop_nor_the_queue(words: str, redis_url: str, tmp_path: Path) -> None:
    """Help and completion need names and texts only."""
    modules = loaded(words, redis_url, tmp_path)

    heavy = (*HEAVY, "asyncio", "msgspec", "ssl", "bullpen.app", "bullpen.queue", "bullpen.redis", "bullpen.settings")
    assert unwanted(modules, heavy) == []


@pytest.mark.parametrize("words", ["queues list", "workers list", "jobs list mails", "schedules list mails"])
def test_a_list_loads_the_queue_and_nothing_of_the_other_features(words: str, redis_url: str, tmp_path: Path) -> None:
    """A command pays for what it reads, not for what an application may do besides."""
    subprocess.run(
        [sys.executable, "-m", "bullpen", "jobs", "add", "mails", "hi", "--new-queue"],
        env={**os.environ, "BULLPEN_REDIS_URL": redis_url},
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        check=True,
    )

    modules = loaded(words, redis_url, tmp_path)

    assert unwanted(modules, (*HEAVY, *(f"bullpen.{name}" for name in FEATURES))) == []

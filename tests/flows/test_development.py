"""What a developer uses: a new project, a prompt with the app at hand, workers that follow the code."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bullpen.cli.code_changes import CodeChanges
from bullpen.sync import Queue
from tests.flows._cli import child, cli, environment

# ---- bullpen init -----------------------------------------------------------------------------------------------


def test_the_tests_of_a_new_project_pass_and_its_commands_work(tmp_path: Path, redis_url: str) -> None:
    written = cli("init", "My Shop", cwd=tmp_path)
    project = tmp_path / "My Shop"

    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "bullpen.testing.pytest_plugin", "-p", "no:bullpen"],
        cwd=project,
        env={**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    with child("run", "jobs:app", "--redis", redis_url, cwd=project) as running:
        running.wait_for("taking jobs")
        data = '{"to": "ada@example.com"}'
        added = cli("jobs", "add", "emails", "send_welcome", "--data", data, "--redis", redis_url, cwd=project)
        running.wait_for(r"mail to \S+: Welcome, there!")

    assert written.code == 0
    assert "bullpen run jobs:app --reload" in written.out
    assert 'name = "my-shop"' in (project / "pyproject.toml").read_text()
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "2 passed" in tests.stdout
    assert added.code == 0, added.err


def test_a_new_project_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("mine")
    (tmp_path / "file").write_text("mine")

    here = cli("init", cwd=tmp_path)
    on_file = cli("init", "file", cwd=tmp_path)
    elsewhere = cli("init", "new", "--json", cwd=tmp_path)

    assert (here.code, on_file.code, elsewhere.code) == (2, 2, 0)
    assert "jobs.py exists in .; nothing was written" in here.err
    assert "file is not a directory" in on_file.err
    assert (tmp_path / "jobs.py").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["file", "jobs.py", "new"]


# ---- bullpen shell ----------------------------------------------------------------------------------------------

SHOP = """
from bullpen import Bullpen

app = Bullpen("redis://127.0.0.1:1")

@app.task("emails")
async def send(to: str) -> str:
    return f"{VERSION}: {to}"

VERSION = "first"
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def test_a_prompt_has_the_app_and_awaits(shop: Path, redis_url: str) -> None:
    typed = textwrap.dedent("""\
        job = await send.add(to="ada")
        print(job.name, job.data, VERSION)
        1 / 0
        if True:
            counts = await queue("emails").counts()

        print("waiting:", counts.waiting, app.tasks)
    """)

    done = subprocess.run(
        [sys.executable, "-m", "bullpen.cli", "shell", "shop:app", "--redis", redis_url],
        cwd=shop,
        env=environment(),
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "send {'to': 'ada'} first" in done.stdout
    assert "ZeroDivisionError" in done.stderr
    assert "waiting: 1 {'emails': ('send',)}" in done.stdout


# ---- bullpen run --reload ---------------------------------------------------------------------------------------


def change(shop: Path, text: str) -> None:
    """In one step, as editors do: half a file is no program."""
    (shop / "new").write_text(text)
    os.replace(shop / "new", shop / "shop.py")


def test_workers_start_again_when_the_code_changes(shop: Path, redis_url: str) -> None:
    def result() -> object:
        with Queue("emails", connection=redis_url) as queue:
            return queue.add("send", {"to": "ada"}).result(timeout=30_000)

    with child("run", "shop:app", "--reload", "--redis", redis_url, cwd=shop) as running:
        running.wait_for("taking jobs")
        assert result() == "first: ada"

        change(shop, SHOP.replace('"first"', '"second"'))
        running.wait_for(r"shop\.py changed; starting again")
        running.wait_for("taking jobs")
        assert result() == "second: ada"

        change(shop, "this is no Python")
        running.wait_for("it starts again when the code changes")
        change(shop, SHOP.replace('"first"', '"third"'))
        running.wait_for("taking jobs")
        assert result() == "third: ada"
        running.terminate()
        assert running.wait() == 0


def test_changes_of_code_are_noticed_and_those_of_other_files_are_not(tmp_path: Path) -> None:
    for directory in (".venv", "environment/lib", "__pycache__", "node_modules", "package"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "environment" / "pyvenv.cfg").write_text("")
    (tmp_path / "removed.py").write_text("")
    changes = CodeChanges(tmp_path)

    for path in (".venv/a.py", "environment/lib/a.py", "__pycache__/a.py", "node_modules/a.py", "notes.txt"):
        (tmp_path / path).write_text("new")
    assert changes.look() == []

    (tmp_path / "package" / "module.py").write_text("new")
    (tmp_path / "removed.py").unlink()
    assert changes.look() == ["package/module.py", "removed.py"]
    assert changes.look() == []

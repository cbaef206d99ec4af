"""What the pages say about the program, held against the program."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bullpen._kernel import telemetry
from bullpen.app import ROLES
from bullpen.cli import commands
from bullpen.ops import doctor
from bullpen.queue.late_wakeups import LATE_FIELDS
from bullpen.wire.keys import EXTENSION_KEYS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "bullpen"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
)
# Files, a group of entry points, an exchange of RabbitMQ.
NO_PYTHON = {
    "bullpen.toml",
    "bullpen.service",
    "bullpen.transports",
    "bullpen.delay",
    "bullpen.worker",
    "bullpen.redis",
    "bullpen.messaging",
}


def every_command(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], set[str]]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, (*path, name))
    if path and (not hasattr(command, "commands") or command.invoke_without_command):
        yield path, {option for parameter in command.params for option in parameter.opts}


def test_every_key_in_the_table_is_made_and_used() -> None:
    """A key that nothing writes is a promise to whoever reads the server."""
    source = (SOURCES / "wire" / "keys.py").read_text()
    method = r'def (\w+)\(self(?:, [^)]+)?\) -> str:\n(?: {8}""".*\n)? {8}return f"\{self\.base\}(bp:\w+:)'
    makers = dict(re.findall(method, source))
    callers = "".join(path.read_text() for path in SOURCES.rglob("*.py") if path != SOURCES / "wire" / "keys.py")

    assert set(makers.values()) == set(EXTENSION_KEYS)
    assert {name for name in makers if not re.search(rf"(?:keys|queue)\.{name}\b", callers)} == set()


def test_every_loop_that_can_be_woken_late_is_named_everywhere() -> None:
    """The counter shows it from the first scrape on, doctor has words for it, and the page lists it."""
    sources = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    page = (ROOT / "docs" / "operate" / "monitoring.md").read_text()

    counted = set(re.findall(r'late_wakeup\(\s*"(\w+)"', sources))

    assert counted == {*telemetry.WAITING_LOOPS} == {*doctor._LATE_WAKEUPS}
    assert not re.search(r"telemetry\.late_wakeup\((?!\s*\")", sources)  # its name stands where it is counted
    assert {*LATE_FIELDS} < counted
    row = re.search(r"^\| `bullpen_late_wakeups_total\{where\}` .*$", page, re.MULTILINE)
    assert row is not None
    assert {*re.findall(r"`(\w+)`", row[0])} >= counted


def test_the_start_page_says_which_commands_take_another_server() -> None:
    text = " ".join((ROOT / "docs" / "start.md").read_text().split())
    about_queues = re.search(
        r"`--redis` and `--prefix` name another server for the commands about queues \((.+?)\)", text
    )
    about_rows = re.search(r"`--database` names another ledger for (.+?)\.", text)
    assert about_queues is not None
    assert about_rows is not None
    tree = [*every_command(commands.tree())]
    with_redis = {path[0] for path, options in tree if {"--redis", "--prefix"} <= options}
    with_database = {path[0] for path, options in tree if "--database" in options}

    # `run` and `runs` are named in the sentences beside.
    assert {words.split()[0] for words in re.findall(r"`([a-z -]+)`", about_queues[1])} == with_redis - {"run", "runs"}
    assert {words.split()[0] for words in re.findall(r"`([a-z -]+)`", about_rows[1])} == with_database


def test_the_start_page_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "start.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    rows = "".join(re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE))

    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(set(extras) - {"dev", "docs"})


def test_the_deployment_page_says_what_runs_in_the_kubernetes_file() -> None:
    page = (ROOT / "docs" / "operate" / "deployment.md").read_text()
    (row,) = re.findall(r"^\| `deploy/kubernetes\.yml` \| (.+?) and a job", page, re.MULTILINE)
    file = (ROOT / "deploy" / "kubernetes.yml").read_text()

    assert set(re.findall(r"`(\w+)`", row)) == set(re.findall(r'"--only", "(\w+)"', file)) == set(ROLES)


def test_the_map_of_the_code_is_the_one_that_imports_are_checked_against() -> None:
    """Rooms that are not built yet stand in the contract only."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [each["layers"] for each in contracts if each["id"] == "layers"]
    built = [
        [room for room in re.findall(r"\w+", layer) if importlib.util.find_spec(f"bullpen.{room}")] for layer in layers
    ]
    drawn = (ROOT / "docs" / "internals.md").read_text().partition("keeps it so.")[2].partition("`_kernel`")[0].rstrip()

    assert [line.split(" | ") for line in drawn.split("\n    ")[1:]] == [layer for layer in built if layer]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_ours_in_a_text_exist(page: Path) -> None:
    """`bullpen.testing.contracts` was recommended for months and never existed."""
    if page.name == "requirements.md":
        return
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(bullpen(?:\.\w+)+)", text)) - NO_PYTHON

    assert {name for name in named if not _exists(name)} == set()


def _exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_npm_is_asked_for_the_client_that_bullmq_leaves_out(page: Path) -> None:
    """`ioredis` is an optional peer of bullmq: without it the first require fails."""
    text = page.read_text()

    assert re.findall(r"npm install bullmq(?! ioredis)", text) == []
    for found in re.finditer(r"```js\n", text):
        assert "npm install bullmq ioredis" in text[: found.start()]

"""Every piece of code in the documentation runs, in the order in which it stands on its page."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from bullpen.settings import Settings
from tests.docs._forks import Forks
from tests.docs.run_page import blocks_of
from tests.interop._node import NODE_DIR, NodeMissing, find_node, install_packages

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 100
PAGES = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if {"python", "js"} & {each.language for each in blocks_of(page.read_text())}
)


def node_environment() -> dict[str, str]:
    try:
        tools = find_node()
    except NodeMissing as missing:
        pytest.skip(str(missing))
    install_packages(tools)
    return {"PAGE_NODE": tools.node[0], "NODE_PATH": str(NODE_DIR / "node_modules")}


def environment() -> dict[str, str]:
    """Not measured: what a page shows is covered by the tests of its part, and measuring doubles the time."""
    left_out = ("BULLPEN_", "REDIS_", "COVERAGE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**clean, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def run_page(page: Path, forks: Forks) -> None:
    """Run its code in a new process. Where there is JavaScript on it, Node is needed."""
    node = node_environment() if "```js" in page.read_text() else {}
    process = forks.page(page, env={**environment(), **node}, cwd=ROOT)
    try:
        ended = process.read(PATIENCE_S)
        said = (process.output + process.errors).decode()
        assert ended, f"the page does not end: {said}"
        assert process.code() == 0, said
    finally:
        process.signal(signal.SIGKILL, group=True)
        process.close()


@pytest.mark.requirement("W-69")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_code_of_a_page_runs(page: Path, forks: Forks) -> None:
    run_page(page, forks)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_variables_in_commands_exist(page: Path) -> None:
    """A misspelt variable is silently ignored by every program; a reader would look for the mistake elsewhere."""
    shown = list(Settings().describe())
    known = {name for setting in shown for name in (setting.variable, setting.general)} | {"REDIS_HOST", "REDIS_PORT"}

    exported = re.findall(r"^export (\w+)=", page.read_text(), re.MULTILINE)

    assert set(exported) <= known

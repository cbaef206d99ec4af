"""Every piece of code in the documentation runs, in the order in which it stands on its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bullpen.settings import Settings
from tests.docs.run_page import blocks_of
from tests.interop._node import NODE_DIR, NodeMissing, find_node, install_packages

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).parent / "run_page.py"
PAGES = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if {"python", "js"} & {each.language for each in blocks_of(page.read_text())}
)

pytestmark = pytest.mark.timeout(120)


def node_environment() -> dict[str, str]:
    try:
        tools = find_node()
    except NodeMissing as missing:
        pytest.skip(str(missing))
    install_packages(tools)
    return {"PAGE_NODE": tools.node[0], "NODE_PATH": str(NODE_DIR / "node_modules")}


def run_page(page: Path) -> None:
    """Run its code in a new process. Where there is JavaScript on it, Node is needed."""
    # Not measured either: what a page shows is covered by the tests of its part, and measuring doubles the time.
    left_out = ("BULLPEN_", "REDIS_", "COVERAGE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    node = node_environment() if "```js" in page.read_text() else {}
    answer = subprocess.run(
        [sys.executable, str(RUNNER), str(page)],
        env={**clean, **node, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.requirement("W-69")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_code_of_a_page_runs(page: Path) -> None:
    run_page(page)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_variables_in_commands_exist(page: Path) -> None:
    """A misspelt variable is silently ignored by every program; a reader would look for the mistake elsewhere."""
    known = {setting.variable for setting in Settings().describe()} | {"REDIS_HOST", "REDIS_PORT"}

    exported = re.findall(r"^export (\w+)=", page.read_text(), re.MULTILINE)

    assert set(exported) <= known

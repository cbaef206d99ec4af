"""The name that users install us by, and the extras: one constant, and everything that speaks of them agrees."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from bullpen._version import DISTRIBUTION, install_line
from bullpen.errors import MissingExtra

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def tracked_texts() -> dict[str, str]:
    """Every text of the repository but the history of changes, by path."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts: dict[str, str] = {}
    for name in listed.split("\0"):
        path = ROOT / name
        if name and name != "CHANGELOG.md" and path.is_file() and path.suffix in {".md", ".py", ".toml", ".yml", ".sh"}:
            texts[name] = path.read_text()
    return texts


def test_the_project_has_the_name_of_the_constant() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert list(PROJECT["scripts"]) == ["bullpen"]


def test_nobody_is_told_to_install_the_package_of_a_stranger() -> None:
    """`bullpen` on the registry is another project's: the line would download and build it."""
    strangers = re.compile(r"pip3? install\b[^\n`]*?[ \"'=]bullpen(?![-\w/])|\bbullpen\[(?!\^)[a-z,]+\]")

    found = {name: strangers.findall(text) for name, text in tracked_texts().items()}

    assert {name: lines for name, lines in found.items() if lines} == {}


def test_an_extra_that_is_named_anywhere_exists() -> None:
    named: set[str] = set()
    for name, text in tracked_texts().items():
        for extras in re.findall(rf"{DISTRIBUTION}\[([a-z,]+)\]", text):
            named |= set(extras.split(","))
        if name.startswith("src/"):
            named |= set(re.findall(r"MissingExtra\(\s*\"(\w+)\"", text))

    assert {"cli", "embedded", "kafka", "testing", "tracing"} <= named
    assert named <= set(EXTRAS)


def test_all_means_all_of_the_product() -> None:
    """What developers need, and what only tests need, stays out."""
    (reference,) = EXTRAS["all"]

    assert Requirement(reference).name == DISTRIBUTION
    assert Requirement(reference).extras == set(EXTRAS) - {"all", "dev", "docs", "testing"}


def test_a_missing_extra_prints_the_line_that_adds_it() -> None:
    error = MissingExtra("kafka", "the topic")

    assert str(error) == f'the topic needs the extra "kafka": {install_line("kafka")}'
    assert install_line("sqlite", "http") == f'pip install "{DISTRIBUTION}[sqlite,http]"'


def test_the_printed_line_asks_no_registry_for_us() -> None:
    """Without a release the line must work too, wherever an error prints it: pip sees what is installed."""
    printed = install_line("cli", "embedded")
    pip, *arguments = re.sub('"', "", printed).split()
    offline = [sys.executable, "-m", pip, *arguments, "--no-index", "--dry-run", "--disable-pip-version-check"]

    answer = subprocess.run(offline, capture_output=True, text=True, check=False)

    assert answer.returncode == 0, answer.stderr
    assert f"Requirement already satisfied: {DISTRIBUTION}[cli,embedded]" in answer.stdout
    assert "Would install" not in answer.stdout

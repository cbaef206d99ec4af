"""Run the long form of every test that has one: more jobs, more examples, more kills.

In: the tests themselves. Out: the result of pytest. A test has a long form when its file reads one of the variables
below, imports from a file that does, or draws examples with Hypothesis, whose number `tests/conftest.py` sets. So no
list can fall behind. Arguments are passed on to pytest: `make chaos CHAOS="-k kafka"`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
LONG = {"BULLPEN_CHAOS": "long", "BULLPEN_TEST_LONG": "1"}
_READS = re.compile(rf"environ.*[\"'](?:{'|'.join(LONG)})[\"']|^(?:import|from) hypothesis\b", re.MULTILINE).search
_IMPORTS = re.compile(r"^from (\.*)([\w.]*) import (.+)$", re.MULTILINE).findall


def has_long_form(file: Path) -> bool:
    """Whether the variables change what the tests of this file do."""
    folders = [folder for folder in file.parents if folder.is_relative_to(TESTS)]
    return _is_changed(file) or any(_is_changed(folder / "conftest.py") for folder in folders)


@cache
def _is_changed(file: Path) -> bool:
    if not file.is_file() or file == TESTS / "conftest.py":
        return False
    text = file.read_text()
    return _READS(text) is not None or any(_is_changed(each) for each in _imported(text, file))


def _imported(text: str, file: Path) -> Iterator[Path]:
    """Files of the tests that a file imports from."""
    for dots, module, names in _IMPORTS(text):
        folder = file.parents[len(dots) - 1] if dots else ROOT
        place = folder.joinpath(*module.split("."))
        if dots or module.startswith("tests"):
            yield place.with_suffix(".py") if module else place
            yield from (place / f"{name.strip()}.py" for name in names.split(","))


def files() -> list[str]:
    """All of them, as pytest takes them."""
    found = list[Path]()
    for folder, inner, names in os.walk(TESTS):
        inner[:] = [name for name in inner if name != "node_modules"]
        found += [Path(folder, name) for name in names if name.startswith("test_") and name.endswith(".py")]
    return [str(file.relative_to(ROOT)) for file in sorted(found) if has_long_form(file)]


def command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *files(), *arguments]


def main() -> int:
    return subprocess.run(command(sys.argv[1:]), cwd=ROOT, env={**os.environ, **LONG}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""The public face, as type checkers see it: right programs pass, and each wrong line is reported.

`right` and `wrong` hold small programs for mypy and pyright, both strict. In `wrong` a line that ends with `# error`
must be reported by both, and no other may be. One process of each checker reads them all.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop._node import NODE_DIR, NodeMissing, find_node, install_packages
from tests.static.test_public_face import MODULES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Lines = dict[str, dict[int, str]]
"""Per file, the number of a line and what is said of it."""


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All programs, and one that names everything public: what has no known type is an error under pyright."""
    folder = tmp_path_factory.mktemp("programs")
    for kind in ("right", "wrong"):
        shutil.copytree(HERE / kind, folder / kind, ignore=shutil.ignore_patterns("__pycache__"))
    uses = "".join(
        f"import {module} as m{number}\nprint({', '.join(f'm{number}.{name}' for name in names_of(module))})\n"
        for number, module in enumerate(MODULES)
    )
    (folder / "right" / "face.py").write_text(uses)
    return folder


def names_of(module: str) -> list[str]:
    names: list[str] = importlib.import_module(module).__all__
    return names


def by_mypy(folder: Path) -> Lines:
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-version=3.11"]
    command += ["--explicit-package-bases", "--follow-imports=silent", "--no-error-summary", "--no-color-output"]
    command += [f"--cache-dir={ROOT / 'build' / 'typing-cache'}", "right", "wrong"]
    environ = {**os.environ, "MYPYPATH": f"{folder}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    found: Lines = defaultdict(dict)
    for file, line, text in re.findall(r"^(\S+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        found[file][int(line)] = text
    return found


def by_pyright(folder: Path) -> Lines:
    try:
        tools = find_node()
    except NodeMissing as missing:
        if os.environ.get("CI") == "true":
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))
    install_packages(tools)
    settings = {
        "typeCheckingMode": "strict",
        "include": ["right", "wrong"],
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.11",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    pyright = NODE_DIR / "node_modules" / "pyright" / "index.js"
    command = [*tools.node, str(pyright), "--pythonpath", sys.executable, "--outputjson", "-p", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    found: Lines = defaultdict(dict)
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            file = str(Path(each["file"]).relative_to(folder))
            found[file].setdefault(each["range"]["start"]["line"] + 1, each["message"])
    return found


def marked(folder: Path) -> dict[str, set[int]]:
    return {
        str(file.relative_to(folder)): {
            number for number, line in enumerate(file.read_text().splitlines(), 1) if line.endswith("  # error")
        }
        for file in sorted(folder.glob("wrong/*.py"))
    }


@pytest.mark.parametrize("check", [by_mypy, by_pyright])
def test_each_wrong_line_is_reported_and_no_right_one(check: Callable[[Path], Lines], programs: Path) -> None:
    """A misspelt option is a red line in the editor, not an exception in production."""
    found, expected = check(programs), marked(programs)

    missed = [f"{file}:{line}" for file, lines in expected.items() for line in sorted(lines - set(found[file]))]
    assert missed == [], "not reported"
    said = [
        f"{file}:{line}: {text}"
        for file, lines in found.items()
        for line, text in sorted(lines.items())
        if line not in expected.get(file, set())
    ]
    assert said == [], "reported, though right"


def test_there_are_enough_programs() -> None:
    wrong = sum(len(lines) for lines in marked(HERE).values())
    right = sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for file in HERE.glob("right/*.py")
        for node in ast.parse(file.read_text()).body
    )

    assert wrong >= 60
    assert right >= 60


@pytest.mark.parametrize(
    "line",
    [
        'Queue("a", attemps=5)',
        'add("x", {}, prioritty=3)',
        'add("x", {}, attempts="many")',
        'app.worker("a", handle, concurency=5)',
        '@app.task("b", attemps=1)',
        'enqueue(session, integration_type="a:b", event_type="c", tenant="t")',
    ],
)
def test_the_mistakes_that_once_passed_are_among_them(line: str) -> None:
    text = "".join(file.read_text() for file in HERE.glob("wrong/*.py"))

    assert f"{line}  # error\n" in text

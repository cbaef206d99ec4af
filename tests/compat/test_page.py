"""The page about BullMQ lists every name of both packages, and what it says about ours exists."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import bullpen
from bullpen.queue import Metrics
from bullpen.queue.flows import ChildrenPage
from tests.compat._declarations import exported
from tests.compat.test_names import MODULES, NOT_BUILT, package, public_functions  # noqa: F401 - a fixture
from tests.interop._node import NODE_DIR

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "bullmq.md").read_text()
NPM, _, PYPI = PAGE.partition("\n## npm `bullmq`\n")[2].partition("\n## PyPI `bullmq`\n")


def sections(text: str) -> dict[str, str]:
    """What stands below each heading of the third level."""
    parts = re.split(r"^### (.*)$", text, flags=re.MULTILINE)[1:]
    return {title.strip("`"): body for title, body in zip(parts[::2], parts[1::2], strict=True)}


def listed(body: str) -> list[str]:
    """The names in backticks that open the rows of a table."""
    return re.findall(r"^\| `([^`]+)` \|", body, re.MULTILINE)


@pytest.fixture(scope="session")
def declared() -> dict[str, tuple[str, ...]]:
    folder = NODE_DIR / "node_modules" / "bullmq"
    if not folder.exists():
        pytest.skip("npm bullmq is not installed: `make test` installs it")
    return exported(folder)


def test_every_member_of_npm_bullmq_is_on_the_page(declared: dict[str, tuple[str, ...]]) -> None:
    tables = {title: listed(body) for title, body in sections(NPM).items() if title in declared}

    assert {title: names for title, names in tables.items() if names != list(declared[title])} == {}


def test_every_other_name_of_npm_bullmq_is_on_the_page(declared: dict[str, tuple[str, ...]]) -> None:
    """One is named once: in a table of its own, in the table of other names, or in a list of what is not built."""
    rest = {title: body for title, body in sections(NPM).items() if title not in declared}
    named = listed(rest.pop("Other names"))
    named += [name for body in rest.values() for name in re.findall(r"`(\w+)`(?:,|$)", body.strip(), re.MULTILINE)]
    tables = [title for title in sections(NPM) if title in declared]

    assert sorted([*named, *tables]) == sorted(declared)


def test_every_method_of_pypi_bullmq_is_on_the_page(package: Path) -> None:  # noqa: F811 - a fixture
    tables = {title.removeprefix("PyPI `"): body for title, body in sections(PYPI).items()}
    theirs: dict[str, list[str]] = {}
    for module in MODULES:
        for name in public_functions(package, module):
            owner, _, method = name.partition(".")
            theirs.setdefault(owner, [])
            theirs[owner] += [method] if method not in ("", "__init__") else []
    wrong = {
        owner: methods
        for owner, methods in theirs.items()
        if owner not in tables or (owner not in NOT_BUILT and listed(tables[owner]) != methods)
    }

    assert wrong == {}


def test_what_is_not_built_says_so() -> None:
    """The shim's list of gaps and the page are one."""
    said = {
        f"{title.removeprefix('PyPI `')}.{name}"
        for title, body in sections(PYPI).items()
        for name, here in re.findall(r"^\| `([^`]+)` \| (.*) \|$", body, re.MULTILINE)
        if here.startswith("not built")
    }

    assert said - {"PyPI's other names.LockManager"} == {name for name in NOT_BUILT if "." in name}


def test_what_the_page_names_here_exists() -> None:
    kinds = {name: getattr(bullpen, name) for name in bullpen.__all__} | {
        "Metrics": Metrics,
        "ChildrenPage": ChildrenPage,
        "QueueEvent": bullpen.QueueEvent,
    }
    rows = re.findall(r"^\| `[^`]+` \| (.*) \|$", PAGE, re.MULTILINE)
    named = [pair for row in rows for pair in re.findall(r"`([A-Z]\w+)\.(\w+)`", row)]
    assert len(named) > 300

    wrong = [
        f"{kind}.{member}"
        for kind, member in named
        if not hasattr(kinds[kind], member) and member not in _fields(kinds[kind])
    ]

    assert wrong == []


def _fields(kind: type) -> set[str]:
    """Attributes that are set when an object is made."""
    source = "".join(inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith("bullpen"))
    return set(re.findall(r"self\.(\w+)(?:, self\.\w+)* = ", source)) | set(getattr(kind, "__annotations__", ()))

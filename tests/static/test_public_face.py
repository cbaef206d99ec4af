"""What users see: a dozen modules to import from, one tree of errors, one class for each name."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import bullpen
from bullpen import errors
from bullpen.errors import BullpenError, JobSignal
from tests.static.public import DJANGO, public_modules

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    "bullpen",
    "bullpen.channels",
    "bullpen.compat.arq",
    "bullpen.compat.bullmq",
    "bullpen.compat.celery",
    "bullpen.compat.rq",
    "bullpen.dashboard",
    "bullpen.integrations.django",
    "bullpen.integrations.fastapi",
    "bullpen.integrations.sentry",
    "bullpen.integrations.starlette",
    "bullpen.messages",
    "bullpen.middleware",
    "bullpen.outbox",
    "bullpen.runs",
    "bullpen.sources",
    "bullpen.sync",
    "bullpen.testing",
    "bullpen.transports",
    "bullpen.workflow",
)
"""All that a program imports from. A name that a page needs and that none of them has is added to one of them."""

# How it is built inside, and tables made from the code.
ABOUT_THE_INSIDE = ("docs/internals.md", "docs/reference/requirements.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [
    page
    for page in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.*")])
    if page.suffix in (".md", ".py") and str(page.relative_to(ROOT)) not in ABOUT_THE_INSIDE
]


def imports(text: str) -> Iterator[tuple[str, list[str]]]:
    """Modules of ours, with the names that are imported from them."""
    for module, names in re.findall(r"^\s*from (bullpen[\w.]*) import (\([^)]*\)|[^\n#;]+)", text, re.MULTILINE):
        yield module, re.findall(r"\w+", re.sub(r" as \w+", "", names))
    for module in re.findall(r"^\s*import (bullpen[\w.]*)", text, re.MULTILINE):
        yield module, []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_import_from_these_modules(page: Path) -> None:
    unknown = [
        f"from {module} import {name}"
        for module, names in imports(page.read_text())
        for name in names or ["*"]
        if module not in MODULES or not (name == "*" or name in exported(module))
    ]

    assert unknown == []


def exported(module: str) -> set[str]:
    loaded = importlib.import_module(module)
    return {*loaded.__all__, *(name.rpartition(".")[2] for name in MODULES if name.startswith(f"{module}."))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_no_other_module(page: Path) -> None:
    """A name in the text is where a reader imports it from."""
    rooms = {found.name for found in pkgutil.walk_packages(bullpen.__path__, "bullpen.")} - {
        *MODULES,
        *loggers(),
        "bullpen.compat",
        "bullpen.integrations",
    }
    named = re.findall(r"`(bullpen(?:\.\w+)+)", page.read_text())

    assert [name for name in named if any(name == room or name.startswith(f"{room}.") for room in rooms)] == []


def loggers() -> set[str]:
    return {
        name
        for file in (ROOT / "src").rglob("*.py")
        for name in re.findall(r'get_logger\("([\w.]+)"\)', file.read_text())
    }


# ---- errors ---------------------------------------------------------------------------------------------------------

NOT_FOR_USERS = {
    # Answered inside: another server is asked, the job goes on elsewhere.
    *("FailoverUnderWay", "ForeignRun", "Moved", "NoPassword", "OtherHandler", "ServerUnavailable"),
}


def all_errors() -> Iterator[type[BaseException]]:
    for found in pkgutil.walk_packages(bullpen.__path__, "bullpen."):
        if not found.name.endswith(("__main__", ".supervisor")) and not re.search(
            r"\.migrations|^" + DJANGO, found.name
        ):
            importlib.import_module(found.name)
    waiting: list[type[BaseException]] = [BullpenError, JobSignal]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        yield kind


def test_public_errors_are_defined_in_one_module() -> None:
    elsewhere = {
        kind.__name__
        for kind in all_errors()
        if kind.__module__.startswith("bullpen.")
        and kind.__module__ != errors.__name__
        and not any(part.startswith("_") for part in (*kind.__module__.split("."), kind.__name__))
    }

    assert elsewhere == NOT_FOR_USERS


def defined() -> dict[str, type[BaseException]]:
    return {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, BaseException) and kind.__module__ == errors.__name__
    }


def test_the_tree_of_errors_is_true() -> None:
    """Every error once, below its first base."""
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]  # it has one
        found = re.match(r"((?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)(?:$|  )", line)
        if found is not None and (found[2] in defined() or found[1]):
            depth = len(found[1]) // 4
            parents[found[2]] = path[depth - 1] if depth else None
            path[depth:] = [found[2]]

    bases = {name: kind.__bases__[0].__name__ for name, kind in defined().items()}
    assert parents == {name: None if base == "Exception" else base for name, base in bases.items()}


def test_every_error_comes_from_the_package() -> None:
    assert [name for name in defined() if name not in bullpen.__all__] == []


# ---- names ----------------------------------------------------------------------------------------------------------

TWINS = {"DeadLetters", "FailedSetStore", "Job", "Lanes", "Queue"}
"""`bullpen.sync` has the same names on purpose: a program uses one of the two."""


def test_one_class_stands_behind_one_name() -> None:
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for module in public_modules():
        if module.startswith(("bullpen.cli", "bullpen.compat")):  # the second has another library's names on purpose
            continue
        for name, value in vars(importlib.import_module(module)).items():
            if inspect.isclass(value) and value.__module__.startswith("bullpen") and not name.startswith("_"):
                homes[value.__name__].add(value.__module__)

    assert {name: sorted(places) for name, places in homes.items() if len(places) > 1 and name not in TWINS} == {}


def test_one_class_stands_behind_one_name_inside_too() -> None:
    """Private classes and modules included: who searches for a name finds one thing."""
    # Django finds its commands by the name of the class.
    twins = ("compat/bullmq/", "queue/blocking_faces.py", "queue/sync.py", "integrations/django/management/")
    homes: defaultdict[str, list[str]] = defaultdict(list)
    package = ROOT / "src/bullpen"
    for path in sorted(package.rglob("*.py")):
        place = str(path.relative_to(package))
        if not place.startswith(twins):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes[node.name].append(place)

    assert len(homes) > 700
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


@pytest.mark.parametrize("module", MODULES)
def test_what_checkers_see_is_what_is_loaded(module: str) -> None:
    """Names that are loaded late stand in three lists: for checkers, for readers, for loading."""
    loaded = importlib.import_module(module)
    homes = getattr(loaded, "_HOMES", None)
    if homes is None:
        return
    tree = ast.parse(Path(str(loaded.__file__)).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {
        (node.module, alias.name)
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is None
    }

    assert seen == {(home, name) for home, names in homes.items() for name in names}
    assert {name for _, name in seen} <= set(loaded.__all__)

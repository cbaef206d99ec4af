"""Write docs/reference/requirements.md: every requirement, and the tests that cite it.

In: tests/requirements.toml and the source of the tests, which is read and not run. Out: the page, or with `--check` the
verdict whether it is up to date. An id that no requirement has is an error in both cases.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.check import QUICK_FOLDERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/reference/requirements.md")
CONTRACTS = Path("src/bullpen/testing/contracts")

INTRODUCTION = """\
# Requirements and their tests

Made by `make docs-table` from `tests/requirements.toml` and the tests; do not edit it by hand. A test names the
requirements it proves with `@pytest.mark.requirement("Q-17")`. A requirement that no test names is marked *open*.

The suite tells which command runs the tests: *quick* is `make test-quick`, *test* is `make test`, which runs the quick
ones too, and *long* is `make test-long`.
"""
SUITES = ("quick", "test", "long")


class CannotTell(Exception):
    """A citation that cannot be read without running the test, or that names no requirement."""


@dataclass(frozen=True, slots=True)
class Requirement:
    id: str
    sentence: str

    @property
    def section(self) -> str:
        return self.id.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Ledger:
    titles: dict[str, str]
    requirements: tuple[Requirement, ...]


@dataclass(frozen=True, slots=True)
class Citation:
    requirement: str
    test: str
    """In the form that pytest takes: file::Class::function."""
    is_long: bool = False
    """Whether only `make test-long` runs it."""

    @property
    def suite(self) -> str:
        if self.is_long:
            return "long"
        return "quick" if self.test.startswith(tuple(f"{folder}/" for folder in QUICK_FOLDERS)) else "test"


def read_ledger(path: Path) -> Ledger:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    requirements = tuple(Requirement(entry["id"], entry["sentence"]) for entry in content["requirements"])
    titles = {key: section["title"] for key, section in content["sections"].items()}
    return Ledger(titles, requirements)


def citations(tests: Path, root: Path) -> Iterator[Citation]:
    """Of the tests, and of the contract suites that some test class inherits."""
    bases: set[str] = set()
    for path in sorted(tests.rglob("*.py")):
        if "node_modules" not in path.parts:
            module = ast.parse(path.read_text(encoding="utf-8"))
            bases |= {ast.unparse(base) for node in module.body for base in getattr(node, "bases", ())}
            yield from _cited_in(module, str(path.relative_to(root)))
    for path in sorted((root / CONTRACTS).glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        module.body = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in bases]
        yield from _cited_in(module, str(path.relative_to(root)))


def _cited_in(
    scope: ast.Module | ast.ClassDef, name: str, inherited: tuple[str, ...] = (), is_long: bool = False
) -> Iterator[Citation]:
    """Citations of the tests in a module or class. What stands on the module or class counts for each test in it."""
    marks = [statement for statement in scope.body if _is_pytestmark(statement)]
    marked = (*inherited, *(id_ for statement in marks for id_ in _ids(statement, name)))
    is_long = is_long or any(map(_says_long, marks))
    for statement in scope.body:
        if not isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inner = f"{name}::{statement.name}"
        ids = (*marked, *(id_ for decorator in statement.decorator_list for id_ in _ids(decorator, inner)))
        long = is_long or any(map(_says_long, statement.decorator_list))
        if isinstance(statement, ast.ClassDef):
            yield from _cited_in(statement, inner, ids, long)
        elif statement.name.startswith("test"):
            yield from (Citation(id_, inner, long) for id_ in dict.fromkeys(ids))


def _is_pytestmark(statement: ast.stmt) -> bool:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _says_long(node: ast.AST) -> bool:
    """Whether a decorator or a `pytestmark` is `….mark.long`; one long case of many does not make the test long."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.parametrize"):
        return False
    return any(
        isinstance(part, ast.Attribute) and part.attr == "long" and ast.unparse(part).endswith("mark.long")
        for part in ast.walk(node)
    )


def _ids(node: ast.AST, where: str) -> Iterator[str]:
    """Ids of every `….mark.requirement(…)` below a node; marks inside `pytest.param` are found too."""
    for call in ast.walk(node):
        if not (isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.requirement")):
            continue
        for argument in call.args:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise CannotTell(f"{where}: requirement({ast.unparse(argument)}): write the id as a literal")
            yield argument.value


def tests_by_id(ledger: Ledger, cited: Iterable[Citation]) -> dict[str, list[Citation]]:
    known = {requirement.id for requirement in ledger.requirements}
    found: dict[str, list[Citation]] = defaultdict(list)
    unknown: list[str] = []
    for citation in cited:
        if citation.requirement in known:
            found[citation.requirement].append(citation)
        else:
            unknown.append(f"{citation.test}: there is no requirement {citation.requirement!r}")
    if unknown:
        raise CannotTell("\n".join(unknown))
    return found


def page(ledger: Ledger, tests: dict[str, list[Citation]]) -> str:
    blocks = [INTRODUCTION]
    for section, title in ledger.titles.items():
        rows = [requirement for requirement in ledger.requirements if requirement.section == section]
        done = sum(requirement.id in tests for requirement in rows)
        head = ["| id | requirement | suite | tests |", "|---|---|---|---|"]
        table = [*head, *(_row(row, tests.get(row.id, [])) for row in rows)]
        blocks += [f"## {section}. {title}\n", f"{done} of {len(rows)} are cited by tests.\n", "\n".join(table) + "\n"]
    return "\n".join(blocks)


def _row(requirement: Requirement, tests: list[Citation]) -> str:
    sentence = requirement.sentence.replace("|", "\\|")
    short = [each.test.removeprefix("tests/").removeprefix("src/bullpen/testing/") for each in tests]
    cited = "<br>".join(f"`{test}`" for test in short) or "*open*"
    suites = ", ".join(suite for suite in SUITES if any(each.suite == suite for each in tests))
    return f"| {requirement.id} | {sentence} | {suites} | {cited} |"


def make_page(root: Path = ROOT) -> str:
    ledger = read_ledger(root / "tests" / "requirements.toml")
    return page(ledger, tests_by_id(ledger, citations(root / "tests", root)))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Keep the page of requirements in step with the tests.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    check = parser.parse_args(arguments).check
    try:
        wanted = make_page(root)
    except CannotTell as error:
        print(error, file=sys.stderr)
        return 1
    path = root / PAGE
    if not check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
        print(f"{PAGE} is out of date: run `make docs-table` and commit the result", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

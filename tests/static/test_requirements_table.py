"""The page of requirements is in step with the tests, and the reader of citations sees all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import requirements_table

LEDGER = """\
[sections.Q]
title = "Queues"
[[requirements]]
id = "Q-1"
sentence = "One | two."
[[requirements]]
id = "Q-2"
sentence = "Three."
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "requirements.toml").write_text(LEDGER)
    return tmp_path


def cited(project: Path, source: str) -> list[tuple[str, str]]:
    (project / "tests" / "test_it.py").write_text(source)
    found = requirements_table.citations(project / "tests", project)
    return [(citation.requirement, citation.test.removeprefix("tests/test_it.py::")) for citation in found]


@pytest.fixture(scope="module")
def ours() -> list[requirements_table.Citation]:
    """What our own tests cite; reading them all takes seconds."""
    root = requirements_table.ROOT
    return list(requirements_table.citations(root / "tests", root))


@pytest.mark.requirement("R-47")
def test_the_page_is_up_to_date(ours: list[requirements_table.Citation]) -> None:
    root = requirements_table.ROOT
    ledger = requirements_table.read_ledger(root / "tests" / "requirements.toml")

    wanted = requirements_table.page(ledger, requirements_table.tests_by_id(ledger, ours))

    is_up_to_date = (root / requirements_table.PAGE).read_text(encoding="utf-8") == wanted
    assert is_up_to_date, "run `make docs-table` and commit the result"


ONLY_LONG: dict[str, str] = {}
"""Requirements that no quick test can prove, and why."""


def test_every_requirement_is_proven_by_make_test(ours: list[requirements_table.Citation]) -> None:
    """The long suite repeats and enlarges; what it alone proves would be broken for days before anybody knew."""
    only_long = {each.requirement for each in ours} - {each.requirement for each in ours if not each.is_long}

    assert only_long == set(ONLY_LONG)


def test_ids_are_unique_and_counted_without_gaps() -> None:
    """Ids are permanent: a gap means that one was renumbered or lost."""
    ledger = requirements_table.read_ledger(requirements_table.ROOT / "tests" / "requirements.toml")

    for section in ledger.titles:
        numbers = [int(each.id.partition("-")[2]) for each in ledger.requirements if each.section == section]
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize(
    "source",
    [
        '@pytest.mark.requirement("Q-1", "Q-2")\ndef test_a(): ...',
        '@pytest.mark.requirement("Q-1")\n@pytest.mark.requirement("Q-2")\nasync def test_a(): ...',
        'pytestmark = pytest.mark.requirement("Q-1", "Q-2")\ndef test_a(): ...',
        'pytestmark = [pytest.mark.requirement("Q-1"), mark.requirement("Q-2")]\ndef test_a(): ...',
        (
            '@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.requirement("Q-1")), '
            'pytest.param(2, marks=[pytest.mark.requirement("Q-2")])])\ndef test_a(x): ...'
        ),
        'pytestmark = pytest.mark.requirement("Q-1")\n@pytest.mark.requirement("Q-1", "Q-2")\ndef test_a(): ...',
    ],
)
def test_every_way_to_cite_is_seen(project: Path, source: str) -> None:
    assert cited(project, source) == [("Q-1", "test_a"), ("Q-2", "test_a")]


def test_a_class_passes_its_citations_on_to_its_tests(project: Path) -> None:
    source = (
        '@pytest.mark.requirement("Q-1")\n'
        "class TestOuter:\n"
        "    class TestInner:\n"
        '        pytestmark = pytest.mark.requirement("Q-2")\n'
        "        def test_a(self): ...\n"
        "    def test_b(self): ...\n"
        "    def helper(self): ...\n"
    )

    assert cited(project, source) == [
        ("Q-1", "TestOuter::TestInner::test_a"),
        ("Q-2", "TestOuter::TestInner::test_a"),
        ("Q-1", "TestOuter::test_b"),
    ]


def test_the_page_lists_tests_and_what_is_open(project: Path) -> None:
    cited(project, '@pytest.mark.requirement("Q-1")\ndef test_a(): ...')

    assert requirements_table.main([], project) == 0

    page = (project / requirements_table.PAGE).read_text()
    assert "## Q. Queues\n\n1 of 2 are cited by tests.\n" in page
    assert "| Q-1 | One \\| two. | test | `test_it.py::test_a` |\n| Q-2 | Three. |  | *open* |\n" in page


@pytest.mark.parametrize(
    ("folder", "source", "suites"),
    [
        ("unit", '@pytest.mark.requirement("Q-1")\ndef test_a(): ...', "quick"),
        ("flows", '@pytest.mark.requirement("Q-1")\ndef test_a(): ...', "test"),
        ("flows", '@pytest.mark.long\n@pytest.mark.requirement("Q-1")\ndef test_a(): ...', "long"),
        ("unit", '@pytest.mark.long\n@pytest.mark.requirement("Q-1")\ndef test_a(): ...', "long"),
        ("flows", 'pytestmark = [mark.long, mark.timeout(9)]\n@mark.requirement("Q-1")\ndef test_a(): ...', "long"),
        (
            "flows",
            '@pytest.mark.long\nclass TestIt:\n    @pytest.mark.requirement("Q-1")\n    def test_a(self): ...',
            "long",
        ),
        (
            "flows",
            '@mark.parametrize("x", [param(2, marks=mark.long)])\n@mark.requirement("Q-1")\ndef test_a(x): ...',
            "test",
        ),
        (
            "queue",
            '@mark.requirement("Q-1")\ndef test_a(): ...\n@mark.long\n@mark.requirement("Q-1")\ndef test_b(): ...',
            "quick, long",
        ),
    ],
)
def test_the_page_tells_which_suite_proves_a_requirement(project: Path, folder: str, source: str, suites: str) -> None:
    (project / "tests" / folder).mkdir()
    (project / "tests" / folder / "test_it.py").write_text(source)

    assert requirements_table.main([], project) == 0

    assert f"| Q-1 | One \\| two. | {suites} | `" in (project / requirements_table.PAGE).read_text()


def test_a_page_out_of_date_is_a_failure(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert requirements_table.main(["--check"], project) == 1
    assert "run `make docs-table`" in capsys.readouterr().err

    requirements_table.main([], project)
    assert requirements_table.main(["--check"], project) == 0


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ('"Q-99"', "tests/test_it.py::test_a: there is no requirement 'Q-99'"),
        ("NAME", "tests/test_it.py::test_a: requirement(NAME): write the id as a literal"),
    ],
)
def test_a_citation_that_cannot_be_resolved_is_a_failure(
    project: Path, capsys: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    (project / "tests" / "test_it.py").write_text(f"@pytest.mark.requirement({argument})\ndef test_a(): ...")

    assert requirements_table.main([], project) == 1

    assert capsys.readouterr().err.strip() == message
    assert not (project / requirements_table.PAGE).exists()


def test_a_contract_counts_when_a_test_class_inherits_it(project: Path) -> None:
    """Suites that are part of the product have their tests there; each subclass in the tests runs them."""
    contracts = project / requirements_table.CONTRACTS
    contracts.mkdir(parents=True)
    suite = '    @pytest.mark.requirement("Q-1")\n    def test_a(self): ...\n'
    (contracts / "suite.py").write_text(f"class OneContract:\n{suite}class OtherContract:\n{suite}")

    found = cited(project, "class TestIt(OneContract): ...")

    assert found == [("Q-1", f"{requirements_table.CONTRACTS}/suite.py::OneContract::test_a")]

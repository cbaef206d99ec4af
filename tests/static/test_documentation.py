"""Pages that list things list all of them, and links lead somewhere."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from bullpen import errors
from bullpen.settings import Settings
from bullpen.wire.keys import EXTENSION_KEYS
from bullpen.wire.options import JobOptions

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def first_column(page: str) -> list[str]:
    """Names in backticks that open the rows of a page's tables."""
    return re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)


def test_every_setting_and_its_variable_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()

    shown = [(setting.key, setting.variable) for setting in Settings().describe()]

    assert re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE) == shown
    also = [setting.general for setting in Settings().describe() if setting.general is not None]
    found = re.findall(r"^\| `[^`]+` \| `[^`]+` \| (`[A-Z_`, ]+`) \|", page, re.MULTILINE)
    assert [" and ".join(re.findall(r"`(\w+)`", cell)) for cell in found] == also


def test_every_job_option_is_on_the_page() -> None:
    # Callers write `delay` and `timestamp`; inside, the name says the unit.
    options = [field.name.removesuffix("_ms") for field in dataclasses.fields(JobOptions) if field.init]

    assert first_column("reference/options.md") == options


def test_every_error_is_on_the_page() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()

    defined = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}

    assert set(re.findall(r"^ *- `(\w+)`", page, re.MULTILINE)) == defined


def test_every_key_of_ours_is_on_the_page() -> None:
    assert [name for name in first_column("reference/wire-extensions.md") if ":" in name] == list(EXTENSION_KEYS)


def test_every_border_names_tests_that_exist() -> None:
    """A border without a proof is a claim."""
    page = (ROOT / "docs" / "operate" / "security.md").read_text()
    borders = page.split("\n## ")[1:]

    assert [border.splitlines()[0] for border in borders if not re.search(r"^Tests?: ", border, re.MULTILINE)] == []
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_project_lead_to_a_file(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # `list[int](…)` is no link
    targets = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)

    assert [target for target in targets if not (page.parent / target).exists()] == []

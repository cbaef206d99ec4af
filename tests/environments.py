"""Environments that hold bullpen and what some of its extras bring, and nothing else, made without a registry.

In: names of extras. Out: a new environment whose packages are links into the one that runs the tests, chosen by
following what each distribution says it requires; or a directory of wheels, made of the same packages, that pip can
install from.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bullpen._version import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[1]


def closure(requirement: str) -> dict[str, Distribution]:
    """Every distribution that pip would install for a requirement, by its canonical name."""
    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    pending = [Requirement(requirement)]
    while pending:
        wanted = pending.pop()
        name = canonicalize_name(wanted.name)
        held = found.setdefault(name, distribution(wanted.name))
        for extra in ("", *wanted.extras):
            if (name, extra) in done:
                continue
            done.add((name, extra))
            for text in held.requires or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    pending.append(needed)
    return found


def make_environment(target: Path, extras: Iterable[str], *, also: Iterable[str] = ()) -> Path:
    """Make an environment with bullpen, these extras and other requirements; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(target), "platbase": str(target)}))
    held = closure(f"{DISTRIBUTION}[{','.join(extras)}]")
    for requirement in also:
        held |= closure(requirement)
    for name, each in held.items():
        if name == canonicalize_name(DISTRIBUTION):
            (packages / "bullpen").symlink_to(ROOT / "src" / "bullpen")
        _link(each, packages)
    return target / "bin" / "python"


def make_wheels(target: Path, *requirements: str) -> Path:
    """Pack what pip would install for these requirements into wheels, without bullpen itself."""
    target.mkdir()
    for requirement in requirements:
        for name, held in closure(requirement).items():
            if name != canonicalize_name(DISTRIBUTION):
                _pack(held, target)
    return target


def _pack(held: Distribution, target: Path) -> None:
    # Programs beside the interpreter, and compiled files, are made again by pip.
    kept = [file for file in held.files or () if file.parts[0] != ".." and "__pycache__" not in file.parts]
    info = next(file.parts[0] for file in kept if file.parts[0].endswith(".dist-info"))
    tags = re.findall(r"^Tag: (\S+)", held.read_text("WHEEL") or "", re.MULTILINE)
    # `py2-none-any` and `py3-none-any` are one name: `py2.py3-none-any`.
    name = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*(tag.split("-") for tag in tags), strict=True))
    wheel = target / f"{info.removesuffix('.dist-info')}-{name}.whl"
    rows = [file for file in kept if file.name not in {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}]
    with zipfile.ZipFile(wheel, "w") as packed:
        for file in rows:
            packed.write(str(held.locate_file(file)), str(file))
        packed.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in rows) + f"{info}/RECORD,,\n")


def _link(held: Distribution, packages: Path) -> None:
    for first in {file.parts[0] for file in held.files or () if file.parts[0] not in {"..", "__pycache__"}}:
        source = Path(str(held.locate_file(first)))
        if source.suffix != ".pth" and not (packages / first).exists():
            (packages / first).symlink_to(source)


def clean_environ() -> dict[str, str]:
    """The variables of this process without those that would show a program more than its own environment."""
    left_out = ("PYTHON", "COVERAGE", "BULLPEN", "REDIS_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(left_out)}

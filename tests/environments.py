"""Environments that hold bullpen and what some of its extras bring, and nothing else, made without a registry.

In: names of extras. Out: a new environment whose packages are links into the one that runs the tests, chosen by
following what each distribution says it requires; or a directory of wheels, made of the same packages, that pip can
install from.
"""

from __future__ import annotations

import fcntl
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


class EnvironmentMissing(Exception):
    """It could not be made: tests that need it skip at home and fail in CI."""


def other_environment(name: str, *requirements: str, interpreter: str = sys.executable, extras: str = "") -> Path:
    """The interpreter of an environment in `.venvs` that holds another library and what bullpen needs, in the versions
    of the other tests. It is made on first use, from the registry, and anew when the requirements change."""
    environment = ROOT / ".venvs" / name
    environment.parent.mkdir(exist_ok=True)
    python, stamp = environment / "bin" / "python", environment / "requirements"
    ours = [each for each in closure(f"{DISTRIBUTION}{extras}") if each != canonicalize_name(DISTRIBUTION)]
    pinned = [f"{each}=={distribution(each).version}" for each in ours]
    wanted = "\n".join([*requirements, *pinned])
    with (environment.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs at once make it one after the other
        if not stamp.exists() or stamp.read_text() != wanted:
            # With the pip that is there: a new one takes longer to install than what it is wanted for.
            pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
            commands = (
                (interpreter, "-m", "venv", "--clear", "--without-pip", str(environment)),
                (*pip, "install", "--quiet", *requirements, *pinned),
            )
            try:
                for command in commands:
                    subprocess.run(command, check=True, capture_output=True, timeout=600)
            except (subprocess.SubprocessError, OSError) as error:
                output = getattr(error, "stderr", None) or b""
                raise EnvironmentMissing(f"needs `pip install {requirements[0]}`: {output.decode()[-500:]}") from error
            stamp.write_text(wanted)
    return python

"""The wheel that users install: complete, and working without anything of the checkout."""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bullpen._version import __version__ as VERSION  # noqa: N812 - a constant here
from tools.install import PYTHONS

ROOT = Path(__file__).resolve().parents[2]

# Building and installing take longer than a test may, on a busy machine.


def run(*command: str | Path, cwd: Path) -> str:
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE", "BULLPEN"))
    }
    answer = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", target, ROOT, cwd=target)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel and what it depends on, nothing else."""
    target = tmp_path_factory.mktemp("empty") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", target, cwd=target.parent)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", target / "bin" / "python")
    constraints = ("-c", ROOT / "constraints.txt")
    run(*pip, "install", "--quiet", *constraints, f"{wheel}[embedded,cli]", cwd=target.parent)
    return target


def test_the_wheel_holds_the_package_with_its_scripts_and_types_and_nothing_else(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()

    assert {
        "bullpen/py.typed",
        "bullpen/_demo/stage.py",
        "bullpen/wire/lua/exchange.lua",
        "bullpen/wire/lua/lib/clock.lua",
    } <= set(files)
    assert [name for name in files if not name.startswith(("bullpen/", f"bullpen_mq-{VERSION}.dist-info/"))] == []


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", target, cwd=ROOT)
    (built,) = target.glob("*.tar.gz")
    return built


def test_the_sdist_holds_what_the_wheel_is_built_from_and_nothing_of_the_workshop(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        packed.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=unpacked)
    (again,) = tmp_path.glob("*.whl")

    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"} <= names
    strangers = ("src/", "examples/demo/", "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO")
    assert [name for name in names if not name.startswith((*strangers, ".gitignore"))] == []
    assert contents(again) == contents(wheel)


def contents(wheel: Path) -> dict[str, int]:
    """Its files with their checksums, but the list of them, whose lines have no order."""
    return {
        each.filename: each.CRC for each in zipfile.ZipFile(wheel).infolist() if not each.filename.endswith("RECORD")
    }


def test_the_registry_is_told_who_we_are_and_where_we_run(wheel: Path) -> None:
    """What cannot be corrected without another release."""
    with zipfile.ZipFile(wheel) as packed:
        told = email.message_from_bytes(packed.read(f"bullpen_mq-{VERSION}.dist-info/METADATA"))
        entries = packed.read(f"bullpen_mq-{VERSION}.dist-info/entry_points.txt").decode()

    assert (told["Name"], told["Version"], told["License-Expression"]) == ("bullpen-mq", VERSION, "MIT")
    assert told["Author"] == "the bullpen authors"
    assert not told.get_all("Author-email") and not told.get_all("Project-URL")  # none that nobody answers
    versions = {text.rpartition(" ")[2] for text in told.get_all("Classifier") or [] if ":: Python :: 3." in text}
    assert versions == {*PYTHONS}
    assert told["Requires-Python"] == ">=3.11"
    assert told["Description-Content-Type"] == "text/markdown"
    assert "# bullpen" in told.get_payload()
    assert "bullpen = bullpen.cli:main" in entries
    assert "bullpen = bullpen.testing.pytest_plugin" in entries


def test_the_changelog_has_a_section_for_the_version() -> None:
    """A release without one is a surprise for everybody who upgrades."""
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert sections[0] == "Unreleased"
    assert sections[1].split()[0] == VERSION


@pytest.mark.long
def test_the_registry_would_take_both_files(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
    run(*pip, "--target", tmp_path / "tools", "twine", cwd=tmp_path)
    program = "import sys; sys.path.insert(0, 'tools'); from twine.__main__ import main; sys.exit(main())"

    told = run(sys.executable, "-c", program, "check", "--strict", wheel, sdist, cwd=tmp_path)

    assert told.count("PASSED") == 2


@pytest.mark.long
def test_every_module_can_be_imported_that_needs_no_further_extra(environment: Path, tmp_path: Path) -> None:
    """A name that only the development environment has would be noticed by the first user otherwise."""
    modules = "bullpen, bullpen.errors, bullpen.queue, bullpen.settings, bullpen.testing, bullpen.wire.scripts"
    script = f"import {modules}; print(bullpen.__file__)"

    found = run(environment / "bin" / "python", "-c", script, cwd=tmp_path)

    assert Path(found.strip()).is_relative_to(environment)


@pytest.mark.long
def test_the_command_says_its_version(environment: Path, tmp_path: Path) -> None:
    answer = run(environment / "bin" / "bullpen", "--version", cwd=tmp_path)

    assert VERSION in answer


@pytest.mark.long
def test_the_demo_runs_from_the_installed_wheel(environment: Path, tmp_path: Path) -> None:
    """What a user does first, with nothing there but what pip installed."""
    answer = run(environment / "bin" / "bullpen", "demo", "--json", "--jobs", "60", "--duration", "2", cwd=tmp_path)

    told = json.loads(answer)
    assert told["addsUp"]
    assert (told["added"], told["completed"] + told["deadLettered"]) == (60, 60)
    assert list(tmp_path.iterdir()) == []

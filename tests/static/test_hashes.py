"""The files that `make demo` and `make test` install are checked by their hashes, or it is said that they are not."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import hashes, install

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("target", install.EXTRAS)
def test_the_list_has_every_package_at_its_version(target: str) -> None:
    """After a change of a version or of a dependency: `make hashes`."""
    assert hashes.checked_page(target) == hashes.expected_page(target)


@pytest.mark.parametrize("target", install.EXTRAS)
def test_every_package_has_hashes_and_nothing_names_a_host(target: str) -> None:
    text = install.hashes_of(target).read_text()

    packages = re.split(r"\n(?=\S)", text.split("by hand.\n")[1].strip())
    assert len(packages) == len(hashes.expected_page(target))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}$", package) for package in packages)
    assert "//" not in text


def test_a_condition_is_as_short_as_it_can_be() -> None:
    every = set(hashes.ENVIRONMENTS)
    old = {one for one in every if one.python == "3.11"}

    assert hashes._condition(every) == ""
    assert hashes._condition(old) == 'python_version == "3.11"'
    assert "platform_machine" in hashes._condition({one for one in old if one.machine == "arm64"})


def test_a_covered_platform_never_installs_what_is_not_checked() -> None:
    """No second try without hashes: a file that was exchanged would only have to fail the first."""
    packages, ours = install.commands("demo", checked=True)

    assert "--require-hashes" in packages
    assert packages[packages.index("--only-binary") + 1] == ":all:"
    assert {"--no-deps", "--no-build-isolation"} <= set(ours)


def test_another_platform_is_told_that_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert install.why_not_checked() is None or sys.version_info >= (3, 15)

    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in str(install.why_not_checked())
    (command,) = install.commands("demo", checked=False)
    assert command[command.index("-c") + 1].endswith("constraints.txt")


def test_a_file_that_was_exchanged_ends_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = a_wheel(tmp_path / "bullpen_example-1.0-py3-none-any.whl")
    listed = tmp_path / "demo.txt"
    monkeypatch.setattr(install, "hashes_of", lambda _: listed)
    command, _ = install.commands("demo", checked=True)
    offline = [*command, "--no-index", "--find-links", str(tmp_path), "--target", str(tmp_path / "there"), "--no-deps"]

    outcomes = []
    for digest in (hashlib.sha256(wheel.read_bytes()).hexdigest(), "0" * 64):
        listed.write_text(f"bullpen-example==1.0 --hash=sha256:{digest}\n")
        outcomes.append(subprocess.run(offline, capture_output=True, text=True, check=False))

    assert outcomes[0].returncode == 0, outcomes[0].stderr
    assert outcomes[1].returncode != 0
    assert "DO NOT MATCH THE HASHES" in outcomes[1].stderr


def a_wheel(path: Path) -> Path:
    information = "bullpen_example-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bullpen_example.py", "")
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: bullpen-example\nVersion: 1.0\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    return path

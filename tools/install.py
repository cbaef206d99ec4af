"""Install what one of the commands needs into the environment that runs this: `python -m tools.install demo`.

In: the file of hashes/ for that target, which names every package with its version and the hashes of its files (made by
`make hashes`), and this checkout. Out: all of them, checked file by file, and the checkout itself, editable and built
with what has just been checked. A file with another hash ends it: nothing is ever installed without its hash on a
platform that is covered. Elsewhere, which is said, versions come from constraints.txt and files are not checked. Needs
the standard library only.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
_PRODUCT: Final = (
    *("embedded", "cli", "postgres", "sqlite", "kafka", "rabbitmq", "kurrent"),
    *("http", "dashboard", "email", "metrics", "fast", "tracing", "sentry", "encryption", "s3"),
)
EXTRAS: Final = {
    "demo": ("embedded", "cli", "sqlite", "http", "dashboard"),
    # The API reference is made of every module, so every module has to be importable.
    "docs": (*_PRODUCT, "testing", "docs"),
    # What the tests use today; an optional part of the product joins when it has tests.
    "test": (*_PRODUCT, "docs", "dev"),
}
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
MACHINES: Final = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "x86_64"), ("darwin", "arm64"))
"""With Python of CPython and, on Linux, the GNU C library: there every package has a wheel."""
_PIP: Final = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def hashes_of(target: str) -> Path:
    return ROOT / "hashes" / f"{target}.txt"


def why_not_checked() -> str | None:
    """What makes this platform one without hashes; None: it has them."""
    version = ".".join(platform.python_version_tuple()[:2])
    if platform.python_implementation() != "CPython" or version not in PYTHONS:
        return f"{platform.python_implementation()} {version}"
    if (sys.platform, platform.machine()) not in MACHINES:
        return f"{platform.system()} on {platform.machine()}"
    if sys.platform == "linux" and platform.libc_ver()[0] != "glibc":
        return "a Linux without the GNU C library"
    return None


def commands(target: str, *, checked: bool) -> list[list[str]]:
    """The calls of pip, in order."""
    if checked:
        # Wheels only: an unchecked source would run code, and what builds it is not in the list.
        wanted = ["--require-hashes", "--only-binary", ":all:", "-r", str(hashes_of(target))]
        # What has no file has no hash: this checkout, built by what was installed before it.
        ours = ["--no-deps", "--no-build-isolation", "-e", str(ROOT)]
        return [[sys.executable, *_PIP, *wanted], [sys.executable, *_PIP, *ours]]
    ours = ["-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[{','.join(EXTRAS[target])}]"]
    return [[sys.executable, *_PIP, *ours]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Install what a command of the Makefile needs, files checked.")
    parser.add_argument("target", choices=EXTRAS)
    target = parser.parse_args().target
    reason = why_not_checked()
    if reason is not None:
        print(f"no hashes for {reason}: versions are those of constraints.txt, files are not checked", flush=True)
    for command in commands(target, checked=reason is None):
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())

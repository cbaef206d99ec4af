"""Run `make demo` and `make test` on a fresh machine: a minimal Debian 12 in a directory of its own, by debootstrap.

In: which of the runs, all without a name. Each gets a clone of this checkout (what is committed) in a system of its
own, so that nothing one run installs helps the next. Package sources, proxies, certificates and the settings of apt,
pip and npm are those of the machine it runs on. Out: 0 when all passed, 1 when one failed, 2 when this machine does
not allow it. Mounts and processes live in a namespace and end with their run, however it ends; the directory goes too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "bookworm"
PACKAGES = ("python3", "python3-venv", "make", "git", "ca-certificates")
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
COMMAND = "make demo && make test"
USER = "tester"

# What tells pip, npm and TLS where and how to fetch. Nothing else of the caller's environment comes along.
_PASSED = re.compile(
    r"(https?|ftp|all|no)_proxy|PIP_\w+|UV_\w+|npm_config_\w+|NODE_EXTRA_CA_CERTS|SSL_CERT_(FILE|DIR)|\w+_CA_BUNDLE",
    re.IGNORECASE,
)
_SETTINGS_OF_MACHINE = ("/etc/pip.conf", "/etc/npmrc", "/etc/hosts", "/etc/resolv.conf")
_SETTINGS_OF_ACCOUNT = (".config/pip/pip.conf", ".pip/pip.conf", ".npmrc", ".m2/settings.xml")
_NAMESPACE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
# Runs in the new namespaces of mounts and processes; both end with the command that takes its place.
_INSIDE = """
mount -t proc proc "$0/proc"
mount --rbind /sys "$0/sys"
mount --rbind /dev "$0/dev"
mount -t tmpfs -o mode=1777 tmpfs "$0/dev/shm"
exec chroot "$@"
"""


class NotAllowed(Exception):
    """This machine does not let us make a fresh one; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Run:
    """Who runs it, and where the clone lies."""

    name: str
    account: str
    parent: str
    about: str

    @property
    def home(self) -> str:
        return "/root" if self.account == "root" else self.parent

    @property
    def path(self) -> str:
        ordinary = "/usr/local/bin:/usr/bin:/bin"
        return f"/usr/local/sbin:/usr/sbin:/sbin:{ordinary}" if self.account == "root" else ordinary


RUNS = (
    Run("root-closed", "root", "/root", "root, in a directory that no other account can enter"),
    Run("root-open", "root", "/srv", "root, in a directory that is open to all"),
    Run("user", USER, f"/home/{USER}", "an ordinary user without sudo: what is missing skips with its reason"),
)


def main() -> int:
    names = [run.name for run in RUNS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("runs", nargs="*", metavar="run", help=f"{', '.join(names)}; all of them when none is named")
    parser.add_argument("--command", default=COMMAND, help=f"what to run in the clone instead of: {COMMAND}")
    parser.add_argument("--directory", type=Path, help="where the systems are made; by default in a new one")
    parser.add_argument("--keep", action="store_true", help="leave the directory; --directory then uses it again")
    options = parser.parse_args()
    unknown = [name for name in options.runs if name not in names]
    if unknown:
        parser.error(f"no run is called {unknown[0]!r}; there are {', '.join(names)}")
    # A run that is told to end must take its processes and its directory along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _workplace(options.directory, keep=options.keep) as workplace:
            base = make_base(workplace)
            chosen = [run for run in RUNS if run.name in (options.runs or names)]
            return _report([(run, *perform(run, base, workplace, options.command)) for run in chosen])
    except NotAllowed as error:
        print(f"no fresh machine can be made here: {error}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _workplace(directory: Path | None, *, keep: bool) -> Iterator[Path]:
    if directory is not None and directory.is_dir() and any(directory.iterdir()) and not (directory / "base").is_dir():
        raise NotAllowed(f"{directory} holds something else; name an empty directory")
    _check_machine()
    if directory is None:
        workplace = Path(tempfile.mkdtemp(prefix="bullpen-fresh-", dir="/var/tmp"))
    else:
        workplace = directory.resolve()
        workplace.mkdir(parents=True, exist_ok=True)
    # Other accounts pass through it: a closed directory above the system would close every directory inside.
    workplace.chmod(0o755)
    try:
        yield workplace
    finally:
        if keep:
            print(f"left: {workplace}")
        else:
            _remove(workplace)


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise NotAllowed("it needs root, for debootstrap and chroot")
    for program, package in (("debootstrap", "debootstrap"), ("unshare", "util-linux"), ("chroot", "coreutils")):
        if shutil.which(program) is None:
            raise NotAllowed(f"{program} is missing (apt-get install {package})")
    tried = subprocess.run([*_NAMESPACE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        raise NotAllowed(f"no namespace of mounts and processes: {tried.stderr.strip()}")


def make_base(workplace: Path) -> Path:
    """A minimal Debian with the settings of this machine; made once for all runs."""
    base, complete = workplace / "base", workplace / "base.complete"
    if complete.exists():
        print(f"using the Debian in {base}", flush=True)
        return base
    _remove(base)
    source = _package_source()
    print(f"making a minimal Debian ({RELEASE}) in {base}", flush=True)
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", RELEASE, str(base)]
    made = subprocess.run([*bootstrap, *source], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise NotAllowed(f"debootstrap failed:\n{(made.stdout + made.stderr)[-3000:]}")
    _take_settings(base)
    subprocess.run(["chroot", base, "useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
    for home in (base / "root", base / "home" / USER):
        home.chmod(0o700)  # as Debian's installer leaves them
    complete.touch()
    return base


def _package_source() -> list[str]:
    """Where this machine gets the release from; nothing, that is debootstrap's own default, on another system."""
    if shutil.which("apt-get") is None:
        return []
    wanted = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)", "Identifier: Packages"]
    targets = subprocess.run(wanted, capture_output=True, text=True, check=True).stdout
    found = [line.split()[0] for line in targets.splitlines() if line.split()[1:] == [RELEASE, "main"]]
    return found[:1]


def _take_settings(base: Path) -> None:
    for name in _SETTINGS_OF_MACHINE:
        _copy(Path(name), base / name[1:])
    if shutil.which("apt-config"):
        lines = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=True).stdout
        (base / "etc/apt/apt.conf.d/90machine").write_text(lines)
    authorities = Path("/usr/local/share/ca-certificates")
    if authorities.is_dir():
        shutil.copytree(authorities, base / "usr/local/share/ca-certificates", dirs_exist_ok=True)
        subprocess.run(["chroot", base, "update-ca-certificates"], check=True, capture_output=True)
    _copy(Path("/") / CERTIFICATES, base / CERTIFICATES)
    for value in _environment().values():
        # A variable may name a file or a directory (certificates, wheels): it must be there too.
        if value.startswith("/") and not (base / value[1:]).exists():
            _copy(Path(value), base / value[1:])


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    elif source.is_file():
        shutil.copyfile(source, target)


def perform(run: Run, base: Path, workplace: Path, command: str) -> tuple[int, float]:
    """One run in a copy of the base: (exit code, seconds)."""
    print(f"\n=== {run.name}: {run.about}", flush=True)
    system = workplace / run.name
    _remove(system)
    subprocess.run(["cp", "--archive", "--reflink=auto", base, system], check=True)
    clone = Path(run.parent) / "bullpen"
    _clone(system / str(clone)[1:])
    _hand_over(system, run)
    # CI=true makes every skip a failure, and root can install everything.
    ci = {"CI": os.environ["CI"]} if "CI" in os.environ and run.account == "root" else {}
    own = {"HOME": run.home, "USER": run.account, "LOGNAME": run.account, "PATH": run.path}
    variables = {**_environment(), **own, **ci}
    started = time.monotonic()
    inside = subprocess.Popen(
        [
            *(*_NAMESPACE, "sh", "-ec", _INSIDE, str(system), f"--userspec={run.account}:{run.account}"),
            *(str(system), "/usr/bin/env", "-i", *(f"{name}={value}" for name, value in variables.items())),
            *("/bin/bash", "-c", f"cd {shlex.quote(str(clone))} && {{ {command}\n}}"),
        ],
        stdin=subprocess.DEVNULL,
    )
    try:
        code = inside.wait()
    finally:
        inside.kill()  # takes all processes of its namespace along
        inside.wait()
    return code, time.monotonic() - started


def _clone(target: Path) -> None:
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, check=True, capture_output=True).stdout:
        print("what is not committed is not part of the clone", flush=True)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, target], check=True)


def _hand_over(system: Path, run: Run) -> None:
    """Give the account its settings and its clone."""
    for name in _SETTINGS_OF_ACCOUNT:
        _copy(Path.home() / name, system / run.home[1:] / name)
    if run.account != "root":
        subprocess.run(["chroot", system, "chown", "--recursive", f"{run.account}:{run.account}", run.home], check=True)


def _report(results: list[tuple[Run, int, float]]) -> int:
    print("\nrun           result   seconds")
    for run, code, seconds in results:
        print(f"{run.name:<13} {'ok' if code == 0 else f'exit {code}':<8} {seconds:>7.1f}")
    sys.stdout.flush()
    return int(any(code != 0 for _, code, _ in results))


def _remove(directory: Path) -> None:
    """Remove a system; never through a mount, which would remove what is mounted."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [point for point in mounted if Path(point).is_relative_to(directory)]
    if inside:
        raise NotAllowed(f"{inside[0]} is still mounted; umount it, then remove {directory}")
    shutil.rmtree(directory, ignore_errors=not directory.exists())


if __name__ == "__main__":
    sys.exit(main())

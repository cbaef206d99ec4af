"""The data directory of a project: where it is, that it is ours alone, and where its socket fits.

The SQLite ledger lies in the same directory. Elsewhere: what the directory says about its server (`stamp`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen._kernel.ownership import prepare_directory
from bullpen.embedded.stamp import ELSEWHERE, STAMP_FILE, Stamp
from bullpen.errors import EmbeddedError, NotConfigured, require

_log = get_logger("bullpen.embedded")

_PROJECT_MARKS = ("pyproject.toml", ".git", ".bullpen")
_NAME = ".bullpen"
LEDGER_FILE = "ledger.sqlite3"
_OUR_FILES = frozenset(
    {
        ".gitignore",
        "server.conf",
        "server.log",
        "server.log.1",
        "start.lock",
        "users.lock",
        "supervisor.lock",
        "server.lock",
        "nearby",
    }
)
_LONGEST_SOCKET_PATH_BYTES = 100  # the servers refuse 108 and more


def data_directory(start: Path | None = None) -> Path:
    """Where the embedded server and the SQLite ledger of this project live.

    `BULLPEN_DATA_DIR`, else `.bullpen` in the nearest of `start` (the working directory) and its parents that holds
    `pyproject.toml`, `.git` or `.bullpen`, else `.bullpen` in `start`.
    """
    named = os.environ.get("BULLPEN_DATA_DIR")
    start = Path.cwd() if start is None else start.absolute()
    if named:
        return (start / Path(named).expanduser()).absolute()
    for parent in (start, *start.parents):
        if any((parent / mark).exists() for mark in _PROJECT_MARKS):
            return parent / ".bullpen"
    return start / ".bullpen"


def ledger_path(directory: Path | None = None) -> Path:
    """The SQLite file that lies beside the server's data. The directory may not exist yet."""
    return (data_directory() if directory is None else directory) / LEDGER_FILE


_reported: set[Path] = set()


USED: Final = "using the embedded server in %s; set BULLPEN_REDIS_URL for another server, or BULLPEN_EMBEDDED=never"
"""The line that a process writes before it uses a directory."""
NEARBY: Final = (
    "another embedded server has its data in %s; its jobs are not visible here (in %s); "
    "to share one, name its directory with BULLPEN_DATA_DIR, or mark the common directory by a pyproject.toml"
)
"""The line that a process writes when a directory near by has a server of its own."""
_MOST_SIBLINGS: Final = 200
_REPORTED_FILE: Final = "nearby"
_REPORTED_AGAIN_S: Final = 24 * 3600


def announce(place: Path) -> bool:
    """Say which directory this process uses; False if it has been said."""
    if place in _reported:
        return False
    _reported.add(place)
    _log.info(USED, place)
    return True


def warn_of_nearby(place: Path) -> None:
    """Once a day, whatever processes use the directory: it remembers what was told. It must have been prepared."""
    other = _nearby(place)
    if other is not None and not _was_reported(place / _REPORTED_FILE, str(other)):
        _log.warning(NEARBY, other, place)


def _was_reported(note: Path, what: str) -> bool:
    """Whether this was noted within a day; then it is."""
    try:
        age_s = time.time() - note.stat().st_mtime
        # A note of tomorrow is one of a clock that went wrong.
        if abs(age_s) < _REPORTED_AGAIN_S and note.read_text("utf-8", "surrogateescape") == what:
            return True
    except OSError:
        pass  # nothing was told so far
    with contextlib.suppress(OSError):  # a full disk: told again, then
        note.write_text(what, "utf-8", "surrogateescape")
    return False


def _nearby(place: Path) -> Path | None:
    """A used directory of a parent or a sibling, where somebody may believe that it is this one.

    A place that was named is meant. A project is apart from those beside it, but not from one that it lies in.
    """
    if place.name != _NAME or os.environ.get("BULLPEN_DATA_DIR"):
        return None
    home = place.parent
    candidates = [parent / _NAME for parent in home.parents]
    is_project = any((home / mark).exists() for mark in _PROJECT_MARKS if mark != _NAME)
    if not is_project and not _is_shared(home.parent):
        with contextlib.suppress(OSError), os.scandir(home.parent) as entries:  # advice only: it may be unreadable
            candidates += [Path(entry.path) / _NAME for entry in itertools.islice(entries, _MOST_SIBLINGS)]
    return next((each for each in candidates if each != place and _is_mine(each)), None)


def _is_shared(directory: Path) -> bool:
    """Whether everybody puts something there, as in /tmp: what lies side by side has nothing in common."""
    try:
        return bool(directory.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return True


def _is_mine(directory: Path) -> bool:
    try:
        return (directory / STAMP_FILE).stat().st_uid == os.geteuid()
    except OSError:
        return False


def was_used(directory: str | Path) -> bool:
    """Whether a server has been started there before."""
    return (Path(directory) / STAMP_FILE).exists()


def refuse_if_forbidden(*, is_named: bool) -> None:
    mode = os.environ.get("BULLPEN_EMBEDDED", "").strip() or "auto"
    if mode == "never" and not is_named:
        raise NotConfigured(
            "the embedded server is forbidden by BULLPEN_EMBEDDED=never; give `connection=` or set BULLPEN_REDIS_URL"
        )
    require("BULLPEN_EMBEDDED", mode in ("auto", "never"), "'auto' or 'never'", mode)
    if platform.system() == "Windows":
        raise EmbeddedError("the embedded server does not run on Windows; set BULLPEN_REDIS_URL to a server you run")


def prepare(directory: Path) -> None:
    """Make the directory ours: private, ignored by git, and refused if it holds what is not ours."""
    try:
        prepare_directory(directory)
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise EmbeddedError(f"{directory} belongs to another user (uid {status.st_uid}); {ELSEWHERE}")
        if Stamp.read(directory) is None:
            _refuse_foreign(directory)
        if stat.S_IMODE(status.st_mode) & 0o077:
            directory.chmod(0o700)
        with contextlib.suppress(FileExistsError), (directory / ".gitignore").open("x") as file:
            file.write("*\n")
    except OSError as error:
        raise EmbeddedError(f"{directory} cannot be used ({error.strerror or error}); {ELSEWHERE}") from error


def _refuse_foreign(directory: Path) -> None:
    foreign = sorted(
        name
        for name in os.listdir(directory)
        if name not in _OUR_FILES and not name.startswith((LEDGER_FILE, f"{STAMP_FILE}.")) and not _is_socket_name(name)
    )
    # Another starter may have written the stamp after we looked for it, and its server the rest.
    if foreign and not (directory / STAMP_FILE).exists():
        named = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise EmbeddedError(f"{directory} holds files that are not ours ({named}); {ELSEWHERE}")


def place_for_socket(directory: Path, stamp: Stamp | None) -> Path:
    # Clients that wait for the server to come back look where it was, whatever our own TMPDIR says.
    if stamp is not None and _fits(Path(stamp.socket)) and _make_private(Path(stamp.socket).parent):
        return Path(stamp.socket)
    # A name of its own for each new directory: when one is removed and made again while its server runs, that server
    # will remove the socket it once made, and must not meet the socket of its successor.
    name = f"server-{secrets.token_hex(4)}.sock"
    if _fits(directory / name):
        return directory / name
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    for base in (tempfile.gettempdir(), "/tmp"):  # noqa: S108 - its owner and mode are checked below
        path = Path(base).resolve() / f"bullpen-{os.geteuid()}-{digest}" / name
        if _fits(path):
            break
    if not _make_private(path.parent):
        raise EmbeddedError(
            f"{path.parent} is needed for the socket, because {directory} is too long a path, but it belongs to "
            f"somebody else or is open to others; remove it, or {ELSEWHERE}"
        )
    return path


def _is_socket_name(name: str) -> bool:
    return name.startswith("server-") and name.endswith(".sock")


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH_BYTES


def _make_private(directory: Path) -> bool:
    """Make it unless it exists; False unless it is a directory (no link to one) that only we can enter."""
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077

"""Another user of the machine chooses neither our server nor the place of our data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bullpen import embedded
from bullpen._kernel.ownership import prepare_file
from bullpen.errors import EmbeddedError, LedgerError
from bullpen.ledger import Ledger
from bullpen.settings import Settings

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
NOBODY = pwd.getpwnam("nobody").pw_uid
pytestmark = pytest.mark.requirement("O-64")


def load(start: Path) -> Settings:
    return Settings.load(environ={}, start=start)


def settings_in(directory: Path, name: str = "bullpen.toml") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(OURS if name == "bullpen.toml" else f"[tool.bullpen.{OURS[1:]}")
    return path


OURS = '[redis]\nurl = "redis://evil.example"\n'


@as_root
@pytest.mark.parametrize("name", ["bullpen.toml", "pyproject.toml"])
@pytest.mark.parametrize("what", ["file", "directory"])
def test_settings_of_another_user_are_not_read(
    tmp_path: Path, name: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in a parent directory set root's Redis address."""
    path = settings_in(tmp_path / "shared", name)
    below = tmp_path / "shared" / "mine"
    below.mkdir()
    os.chown(path if what == "file" else path.parent, NOBODY, -1)

    assert load(below).redis.url is None
    assert "settings in" in caplog.text
    assert f"belongs to another user (uid {NOBODY})" in caplog.text


@pytest.mark.parametrize("what", ["file", "directory"])
def test_settings_that_others_may_write_are_not_read(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = settings_in(tmp_path / "shared")
    (path if what == "file" else path.parent).chmod(0o666 if what == "file" else 0o777)

    assert load(tmp_path / "shared").redis.url is None
    assert "can be written by others" in caplog.text


def test_settings_of_our_own_are_read(tmp_path: Path) -> None:
    """Also where all may write and each can remove only his own, as in /tmp, and through a link, as from a volume."""
    path = settings_in(tmp_path / "shared")
    (tmp_path / "shared").chmod(0o1777)
    below = tmp_path / "below"
    below.mkdir()
    (below / "bullpen.toml").symlink_to(path)

    assert load(tmp_path / "shared").redis.url == "redis://evil.example"
    assert load(below).redis.url == "redis://evil.example"


@as_root
@pytest.mark.parametrize("whose", ["nobody", "ours"])
def test_a_link_in_a_directory_of_all_leads_nowhere(
    tmp_path: Path, whose: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody can put one there that leads to a file of ours, and make it lead elsewhere when it was looked at."""
    settings_in(tmp_path / "other")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    link = shared / "bullpen.toml"
    link.symlink_to(tmp_path / "other" / "bullpen.toml")
    if whose == "nobody":
        os.lchown(link, NOBODY, NOBODY)

    assert load(shared).redis.url is None
    assert "is a link in a directory that others may write" in caplog.text


@as_root
def test_the_file_that_is_read_is_the_one_that_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody puts another file in its place as soon as anybody has looked at it, by name or open."""
    ours, theirs = settings_in(tmp_path), tmp_path / "theirs"
    theirs.write_text('[redis]\nurl = "redis://theirs.example"\n')
    os.chown(theirs, NOBODY, -1)

    def swap() -> None:
        if theirs.exists():
            theirs.rename(ours)

    for name in ("stat", "fstat"):
        look = getattr(os, name)

        def swapping(what: Any, *args: Any, look: Any = look, **options: Any) -> os.stat_result:
            found: os.stat_result = look(what, *args, **options)
            if stat.S_ISREG(found.st_mode) and found.st_size == len(OURS):
                swap()
            return found

        monkeypatch.setattr(os, name, swapping)
    url = load(tmp_path).redis.url

    assert not theirs.exists()
    assert url == "redis://evil.example"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_in_place_of_settings_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "bullpen.toml")

    assert load(tmp_path).redis.url is None


@as_root
@pytest.mark.parametrize(
    ("group", "is_read"),
    [("nobody", True), ("users", False), ("crowd", False), (None, True)],
    ids=["of our name", "of another name", "of our name, with others in it", "without a name"],
)
def test_a_group_that_others_are_in_makes_a_file_theirs(tmp_path: Path, group: str | None, is_read: bool) -> None:
    """Debian makes a group for each user, and editors write files that it may write; the group `users` is everybody."""
    program = tmp_path / "program.py"
    program.write_text(
        "import grp, os, pwd, sys\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        f"group, gid = {group!r}, {NOBODY}\n"
        "import bullpen.settings, tomllib\n"
        "os.setgroups([]); os.setgid(gid); os.setuid(gid)\n"
        "def getgrgid(asked):\n"
        "    if group is None: raise KeyError(asked)\n"
        "    others = ['eve'] if group == 'crowd' else []\n"
        "    return SimpleNamespace(gr_name='nobody' if group == 'crowd' else group, gr_mem=others)\n"
        "grp.getgrgid = getgrgid\n"
        "print(bullpen.settings.Settings.load(environ={}, start=Path(sys.argv[1])).redis.url)\n"
    )
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        path = settings_in(directory)
        for each in (directory, path):
            os.chown(each, NOBODY, NOBODY)
        path.chmod(0o664)
        directory.chmod(0o775)
        words = [sys.executable, str(program), made]
        told = subprocess.run(words, capture_output=True, text=True, check=True)

    assert told.stdout == ("redis://evil.example\n" if is_read else "None\n")
    assert is_read or "can be written by others (mode 0775)" in told.stderr


@as_root
def test_the_data_directory_is_not_put_beside_the_project_of_another_user(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "mine").mkdir(parents=True)
    (project / "pyproject.toml").write_text("")
    os.chown(project, NOBODY, -1)

    assert load(project / "mine").embedded.data_dir == project / "mine" / ".bullpen"


@as_root
@pytest.mark.parametrize("below", ["", "deeper"])
async def test_no_ledger_is_made_in_the_directory_of_another_user(tmp_path: Path, below: str) -> None:
    """Whoever owns a directory above can put another one in its place."""
    theirs = tmp_path / "theirs"
    (theirs / below).mkdir(parents=True)
    os.chown(theirs, NOBODY, -1)

    with pytest.raises(LedgerError, match="belongs to another user"):
        async with Ledger(f"sqlite:///{theirs / below / 'ledger.sqlite3'}") as ledger:
            await ledger.migrate()

    assert not list(theirs.rglob("*.sqlite3*"))


@as_root
async def test_no_server_is_started_in_the_directory_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, -1)

    with pytest.raises(EmbeddedError, match="belongs to another user"):
        await asyncio.to_thread(embedded.acquire, theirs / ".bullpen")


async def test_a_directory_that_others_may_write_holds_no_ledger(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    with pytest.raises(LedgerError, match="can be written by others"):
        async with Ledger(f"sqlite:///{shared / 'ledger.sqlite3'}") as ledger:
            await ledger.migrate()


async def test_the_files_of_a_ledger_are_private_from_their_first_moment(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir(mode=0o700)
    before = os.umask(0)
    try:
        async with Ledger(f"sqlite:///{tmp_path / 'new' / 'ledger.sqlite3'}") as ledger:
            await ledger.migrate()
            files = sorted((tmp_path / "new").iterdir())
            modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in files}
    finally:
        os.umask(before)

    assert "ledger.sqlite3" in modes
    assert all(mode & 0o077 == 0 for mode in modes.values()), modes


async def test_a_ledger_that_all_could_read_is_taken_away_from_them(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite3"
    file.touch()
    file.chmod(0o644)

    async with Ledger(f"sqlite:///{file}") as ledger:
        await ledger.migrate()

    assert stat.S_IMODE(file.stat().st_mode) == 0o640


async def test_a_link_in_place_of_the_ledger_is_not_followed(tmp_path: Path) -> None:
    """It could lead to any file that we may write."""
    (tmp_path / "ledger.sqlite3").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(LedgerError, match="is a link"):
        async with Ledger(f"sqlite:///{tmp_path / 'ledger.sqlite3'}") as ledger:
            await ledger.migrate()

    assert not (tmp_path / "elsewhere").exists()


def test_preparing_a_file_keeps_the_locks_that_this_process_has_on_it(tmp_path: Path) -> None:
    """A descriptor that is closed ends all locks of its process on the file; SQLite would go on without its own."""
    file = tmp_path / "ledger.sqlite3"
    prepare_file(file)
    script = f"import sqlite3; sqlite3.connect({str(file)!r}, timeout=0).execute('BEGIN IMMEDIATE')"
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")

        prepare_file(file)

        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "database is locked" in other.stderr

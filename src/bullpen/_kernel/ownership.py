"""Whom a file or directory belongs to, and whether somebody else could have written it.

In: a path. Out: why it cannot be trusted, in words, or None. A settings file says which server gets our jobs, and a
data directory holds them: neither may be chosen by another user of the machine. Where there are no such users
(Windows), everything is ours.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

NO_FOLLOW: Final[int] = getattr(os, "O_NOFOLLOW", 0)
_HAS_USERS: Final = hasattr(os, "geteuid")


def distrust(status: os.stat_result) -> str | None:
    """Why what has this status may be somebody else's: it belongs neither to us nor to root, or others may write it.

    A directory like /tmp, which all may write and in which each can remove only his own, is no reason.
    """
    if not _HAS_USERS:
        return None
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user (uid {status.st_uid})"
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX:
        return None
    return f"can be written by others (mode {mode:04o})" if _others_write(status) else None


def _others_write(status: os.stat_result) -> bool:
    by_group = status.st_mode & 0o020 and status.st_gid != 0 and not _is_ours_alone(status.st_gid)
    return bool(status.st_mode & 0o002 or by_group)


def _is_ours_alone(gid: int) -> bool:
    """Whether nobody else is in this group: our own has our name and no other member, as Debian makes one per user. A
    group that many have, such as `users`, is others. In a container it may have no name at all, and no other user."""
    if gid != os.getegid():
        return False
    import grp
    import pwd

    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return True
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == name and {*group.gr_mem} <= {name, "root"}


def read_trusted(path: Path) -> bytes | None:
    """What stands in a file; None where there is none. Raises Distrusted when somebody else may have written it.

    Looking at it and reading it is about one open file: a name can lead elsewhere a moment later. In a directory like
    /tmp anybody can put a link to a file of ours, so links there lead nowhere; elsewhere they are as good as their
    directory, which the caller has looked at.
    """
    try:
        is_shared = _HAS_USERS and _others_write(path.parent.stat())
        # Not blocking: opening a pipe would wait for its writer.
        flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        descriptor = os.open(path, flags | (NO_FOLLOW if is_shared else 0))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Distrusted("is a link in a directory that others may write") from None
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if (reason := distrust(status)) is not None:
            raise Distrusted(reason)
        return file.read()


class Distrusted(Exception):
    """Somebody else may have written it; the text says why."""


def distrust_directory(directory: Path) -> str | None:
    """The same for a directory. On a file system that nobody can write, its mode means nothing."""
    try:
        reason = distrust(directory.stat())
        if reason is not None and "written" in reason and os.statvfs(directory).f_flag & os.ST_RDONLY:
            return None
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return reason


def prepare_directory(directory: Path) -> Path:
    """Make a directory for what we store, with all above it, private where it is new. Returns its real path.

    Raises PermissionError when it, or one above it, can be replaced by somebody else: what we store there would be his.
    """
    check_directory(next(each for each in (directory, *directory.absolute().parents) if each.exists()))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return check_directory(directory)


def check_directory(directory: Path) -> Path:
    """The same for one that exists."""
    real = directory.resolve()
    for each in (real, *real.parents):
        if (reason := distrust_directory(each)) is not None:
            raise PermissionError(f"{each} {reason}")
    return real


def prepare_file(path: Path) -> None:
    """Make a private file before somebody less careful does, and take a file of ours away from all others.

    Raises PermissionError when it is a link, or can be written by somebody else.
    """
    # One that exists is never opened here: closing it would end every lock that this process has on the file by other
    # descriptors, and SQLite keeps its data whole by such locks. Nobody else can change the name between: the directory
    # is ours.
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | NO_FOLLOW, 0o600))
    except FileExistsError:
        pass
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a link; name the file itself")
    if _HAS_USERS and status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o007:
        path.chmod(stat.S_IMODE(status.st_mode) & ~0o007)
        status = path.lstat()
    if (reason := distrust(status)) is not None:
        raise PermissionError(f"{path} {reason}")

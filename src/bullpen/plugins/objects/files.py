"""Payloads as files below one directory, which all producers and workers must share.

In: keys and bytes. Out: files that only this user can read; each appears under its name when it is complete and on the
disk. A directory that another user of the machine could replace or write is refused: a link of his would say what is
read, written and swept away. Elsewhere: the port (`bullpen.ports.objects`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from bullpen._kernel.ownership import check_directory, prepare_directory
from bullpen.errors import InvalidOption, ObjectStoreFailed, PayloadTooLarge
from bullpen.ports.objects import StoredObject
from bullpen.wire.envelope import is_object_key

__all__ = ["FileStore"]


class FileStore:
    """Keeps payloads as files below `directory`, which is made when it is first needed."""

    def __init__(self, directory: str | Path) -> None:
        if not isinstance(directory, str | Path) or not str(directory) or "\0" in str(directory):
            raise InvalidOption("directory", "the path of a directory", directory)
        self._root = Path(directory)
        self._is_ours = False

    def __repr__(self) -> str:
        return f"FileStore({str(self._root)!r})"

    async def put(self, key: str, content: bytes) -> None:
        await asyncio.to_thread(self._put, self._path(key), content)

    async def get(self, key: str, *, max_bytes: int) -> bytes | None:
        return await asyncio.to_thread(self._get, self._path(key), max_bytes)

    async def delete(self, key: str) -> None:
        await asyncio.to_thread(self._delete, self._path(key))

    async def list(self, directory: str) -> AsyncIterator[StoredObject]:
        for found in await asyncio.to_thread(self._found, self._path(directory)):
            yield found

    async def aclose(self) -> None:
        """Nothing is open."""

    def _path(self, key: str) -> Path:
        # Keys are checked where envelopes are read; here once more, because a path must never leave the directory.
        if not is_object_key(key):
            raise InvalidOption("key", "letters, digits, '=', '.', '_' and '-', with '/' between segments", key)
        return self._root.joinpath(*key.split("/"))

    def _check(self) -> None:
        """Raises PermissionError when the directory, or one above it, may be somebody else's."""
        if not self._is_ours and self._root.exists():
            check_directory(self._root)
            self._is_ours = True  # then nobody else can change that

    def _put(self, path: Path, content: bytes) -> None:
        # Beside its place, so that it can be renamed. A crash leaves a file that a sweep finds like any other.
        beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            self._check()
            self._make_directory(path.parent)
            number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with open(number, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(number)
                os.replace(beside, path)
            except OSError:
                with contextlib.suppress(OSError):
                    beside.unlink()
                raise
            _sync_directory(path.parent)
        except OSError as error:
            raise _failed(self._root, error) from error

    def _make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        if path != self._root:
            self._make_directory(path.parent)
        else:
            prepare_directory(path)
        path.mkdir(mode=0o700, exist_ok=True)
        _sync_directory(path.parent)

    def _get(self, path: Path, max_bytes: int) -> bytes | None:
        try:
            self._check()
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                content = file.read(max_bytes + 1)
        except FileNotFoundError:
            if not self._root.is_dir():  # a volume that is not mounted is no proof that the file is gone
                raise ObjectStoreFailed(f"the directory {str(self._root)!r} does not exist") from None
            return None
        except OSError as error:
            raise _failed(self._root, error) from error
        if len(content) > max_bytes:
            raise PayloadTooLarge(
                f"the object has more than {max_bytes} bytes", size_bytes=len(content), limit_bytes=max_bytes
            )
        return content

    def _delete(self, path: Path) -> None:
        try:
            self._check()
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _failed(self._root, error) from error

    def _found(self, directory: Path) -> Iterable[StoredObject]:
        found = []
        try:
            self._check()
        except OSError as error:
            raise _failed(self._root, error) from error
        for folder, _, names in os.walk(directory):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    state = path.stat()
                    key = path.relative_to(self._root).as_posix()
                    found.append(StoredObject(key, state.st_size, state.st_mtime_ns // 1_000_000))
        return found


def _sync_directory(directory: Path) -> None:
    """So that the name, too, is on the disk."""
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _failed(root: Path, error: OSError) -> ObjectStoreFailed:
    return ObjectStoreFailed(f"the object store below {str(root)!r} failed: {error.strerror or error}")

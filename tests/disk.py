"""Know which bytes a server has brought to the disk, to cut the rest off as a power failure does.

What was *written* survives the death of a process; only what was *synced* survives that of the machine. A library that
is preloaded into the server notes the length of each file after it was synced.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from bullpen.testing import need

# Without headers and without the C library's files for linking: then the compiler alone is enough.
_RECORDER = r"""
extern void *dlsym(void *, const char *);
extern long lseek(int, long, int);
extern long readlink(const char *, char *, unsigned long);
extern int open(const char *, int, ...);
extern int close(int);
extern long write(int, const void *, unsigned long);
extern int snprintf(char *, unsigned long, const char *, ...);
extern char *getenv(const char *);

static int synced(const char *name, int fd) {
    long length = lseek(fd, 0, 2);
    int (*real)(int) = (int (*)(int))dlsym((void *)-1L, name);
    int code = real(fd);
    if (code == 0 && length >= 0) {
        char link[64], path[4096], line[4200];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        long size = readlink(link, path, sizeof path - 1);
        int log = open(getenv("SYNCED_LOG"), 02001, 0600); /* O_WRONLY | O_APPEND */
        if (size > 0 && log >= 0) {
            path[size] = 0;
            write(log, line, (unsigned long)snprintf(line, sizeof line, "%ld %s\n", length, path));
            close(log);
        }
    }
    return code;
}

int fdatasync(int fd) { return synced("fdatasync", fd); }
int fsync(int fd) { return synced("fsync", fd); }
"""


class RecordedDisk:
    """A server binary whose syncs are recorded, and the power cut."""

    def __init__(self, directory: Path, kind: str = "valkey") -> None:
        source, library, self.binary = directory / "synced.c", directory / "synced.so", directory / "recorded-server"
        self._log = directory / "synced.log"
        self._log.touch()
        source.write_text(_RECORDER)
        build: list[str | Path] = [need("cc"), "-shared", "-fPIC", "-nostdlib", "-O1", "-w", source, "-o", library]
        subprocess.run(build, check=True, capture_output=True)
        preload = f"export LD_PRELOAD={library} SYNCED_LOG={self._log}"
        self.binary.write_text(f'#!/bin/sh\n{preload}\nexec {need(kind)} "$@"\n')
        self.binary.chmod(0o700)

    def synced_bytes(self, path: Path) -> int:
        """How much of a file is on the disk."""
        lines = (line.split(" ", 1) for line in self._log.read_text().splitlines())
        return max((int(length) for length, name in lines if name == os.path.realpath(path)), default=0)

    def cut_power(self, directory: Path) -> int:
        """What a machine that lost its power finds in the append-only files of a server that was killed: all that was
        synced, and no more. Returns how many bytes are lost."""
        lost = 0
        for path in directory.rglob("*.incr.aof"):
            synced = self.synced_bytes(path)
            lost += path.stat().st_size - synced
            os.truncate(path, synced)
        return lost

"""Faults inside a server's machine that nobody can make from outside: a clock that jumps, a disk that is full.

A library that is preloaded into the server asks, before it does what the system would do, whether the fault is there.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from bullpen.testing import need

# Without headers and without the C library's files for linking: then the compiler alone is enough.
_FAULTS = r"""
struct pair { long seconds, part; };
extern void *dlsym(void *, const char *);
extern int access(const char *, int);
extern int *__errno_location(void);
extern long readlink(const char *, char *, unsigned long);
extern int snprintf(char *, unsigned long, const char *, ...);
#define NEXT(name) dlsym((void *)-1L, name)

static long shift(void) { return access(CLOCK_FILE, 0) == 0 ? 3600 : 0; }

int gettimeofday(struct pair *now, void *zone) {
    static int (*real)(struct pair *, void *);
    if (!real) real = (int (*)(struct pair *, void *))NEXT("gettimeofday");
    int code = real(now, zone);
    now->seconds += shift();
    return code;
}

int clock_gettime(int clock, struct pair *now) {
    static int (*real)(int, struct pair *);
    if (!real) real = (int (*)(int, struct pair *))NEXT("clock_gettime");
    int code = real(clock, now);
    if (clock == 0) now->seconds += shift();
    return code;
}

long time(long *where) {
    struct pair now;
    gettimeofday(&now, 0);
    if (where) *where = now.seconds;
    return now.seconds;
}

long write(int fd, const void *data, unsigned long size) {
    static long (*real)(int, const void *, unsigned long);
    if (!real) real = (long (*)(int, const void *, unsigned long))NEXT("write");
    if (access(FULL_FILE, 0) == 0) {
        char link[64], path[4096];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        long length = readlink(link, path, sizeof path);
        if (length > 4 && path[length - 4] == '.' && path[length - 3] == 'a' && path[length - 1] == 'f') {
            *__errno_location() = 28; /* ENOSPC */
            return -1;
        }
    }
    return real(fd, data, size);
}
"""


class FaultyMachine:
    """A server binary whose clock and disk obey the test."""

    def __init__(self, directory: Path, kind: str = "valkey") -> None:
        source, library, self.binary = directory / "faults.c", directory / "faults.so", directory / "faulty-server"
        self._clock, self._full = directory / "clock", directory / "full"
        source.write_text(_FAULTS)
        files = (f'-DCLOCK_FILE="{self._clock}"', f'-DFULL_FILE="{self._full}"')
        build: list[str | Path] = [need("cc"), "-shared", "-fPIC", "-nostdlib", "-O1", "-w", *files]
        subprocess.run([*build, source, "-o", library], check=True, capture_output=True)
        self.binary.write_text(f'#!/bin/sh\nexport LD_PRELOAD={library}\nexec {need(kind)} "$@"\n')
        self.binary.chmod(0o700)

    def clock_jumps(self) -> None:
        """The server's clock is an hour ahead from now on."""
        self._clock.touch()

    @contextlib.contextmanager
    def disk_full(self) -> Iterator[None]:
        """Nothing can be written to append-only files for the length of a block."""
        self._full.touch()
        try:
            yield
        finally:
            self._full.unlink()

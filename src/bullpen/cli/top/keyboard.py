"""Single keys of a terminal, without waiting for Enter; the terminal is put back as it was, however we end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """Call `on_key` for each key while the block runs. Does nothing where nobody can type."""
    try:
        import termios
        import tty
    except ImportError:  # a system without terminals of this kind: Ctrl-C ends the program there
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, 64)
        if not typed:  # the terminal is gone
            loop.remove_reader(descriptor)
        for key in typed.decode(errors="replace"):
            on_key(key)

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor, termios.TCSADRAIN)  # keeps what was typed already; Ctrl-C still interrupts
    try:
        loop.add_reader(descriptor, read)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

"""Let SIGTERM and SIGINT reach a worker, where the program has no handlers of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable


def install(on_signal: Callable[[signal.Signals], None], *, wanted: bool | None) -> Callable[[], None]:
    """Call `on_signal` in the running loop; returns the function that takes the handlers out again.

    `wanted` None: only for signals that nobody else handles. Outside of the main thread nothing can be installed.
    """
    loop = asyncio.get_running_loop()
    installed: list[signal.Signals] = []
    if wanted is not False and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if wanted or _is_unhandled(number):
                with contextlib.suppress(NotImplementedError):  # loops of some platforms cannot
                    loop.add_signal_handler(number, on_signal, number)
                    installed.append(number)

    def remove() -> None:
        for number in installed:
            loop.remove_signal_handler(number)

    return remove


def _is_unhandled(number: signal.Signals) -> bool:
    current = signal.getsignal(number)
    # asyncio.run puts a handler of its own in the place of Python's; that counts as none of the program's.
    return current in (signal.SIG_DFL, signal.default_int_handler) or "Runner._on_sigint" in str(current)

"""`bullpen completion SHELL`: click's own completion, and the names that only a server knows.

Names of queues come from the server if it answers at once, and from no server that would have to be started: whoever
presses Tab wants neither to wait nor to read errors.
"""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Final, Literal

import click

from bullpen.cli.tree import Argument, Complete

VARIABLE: Final = "_BULLPEN_COMPLETE"
"""Says that a shell asks for candidates, and which."""
_SERVER_MAY_TAKE_S: Final = 0.7
_SAFE: Final = re.compile(r"[\w.@%+=/{}-]+")
"""Names that no shell reads as anything else: what others stored must not be run by whoever presses Tab."""


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"],
        Argument("SHELL", "Name of the shell: bash, zsh or fish."),
    ],
) -> None:
    """Print the shell script for command completion: eval "$(bullpen completion bash)" in ~/.bashrc.

    For zsh, add the same line to ~/.zshrc. For fish: bullpen completion fish > ~/.config/fish/completions/bullpen.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    if shell == "zsh":
        print("(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }")
    print(kind(click.Command("bullpen"), {}, "bullpen", VARIABLE).source())


def words(*known: str) -> Complete:
    """Completes one of these words, where others are possible too."""
    return lambda _ctx, incomplete: [word for word in known if word.startswith(incomplete)]


def event_names(_ctx: click.Context, incomplete: str) -> list[str]:
    from bullpen.wire.events import EventName

    return [name for name in EventName if name.startswith(incomplete)]


def queue_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Names from a server that is there. Whatever goes wrong, there are none."""
    import asyncio
    import logging

    from bullpen import embedded
    from bullpen.errors import BullpenError
    from bullpen.settings import Settings

    logging.disable(logging.CRITICAL)
    try:
        with contextlib.suppress(BullpenError, OSError, TimeoutError, ValueError):
            settings = Settings.load(redis_url=ctx.params.get("redis"), redis_prefix=ctx.params.get("prefix"))
            url = settings.connection_url()
            if not url.startswith("embedded:") or embedded.is_running(settings.embedded.data_dir):
                found = asyncio.run(_find(url, settings.redis.prefix))
                return [name for name in found if name.startswith(incomplete) and _SAFE.fullmatch(name)]
        return []
    finally:
        logging.disable(logging.NOTSET)


async def _find(url: str, prefix: str) -> list[str]:
    import asyncio

    from bullpen.app import connect
    from bullpen.queue import find_queues

    connection = connect(url)
    try:
        async with asyncio.timeout(_SERVER_MAY_TAKE_S):
            return await find_queues(connection, prefix)
    finally:
        await connection.aclose()

"""Who does something to a queue by hand: the name that is noted with it."""

from __future__ import annotations

import getpass
import socket
from typing import Any

from bullpen.errors import require


def who() -> str:
    """User and host of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def check_actor(by: Any) -> str:
    """The name of the actor, by default user and host of this process; refuses an invalid name."""
    require("by", by is None or (isinstance(by, str) and by != ""), "non-empty text", by)
    return who() if by is None else str(by)

"""Start, share and reap the bundled server, so that a queue works with nothing installed but Python.

In: a directory. Out: a real Valkey server on a unix socket in it, shared by every process that acquires the same
directory, ended when the last of them is gone, started again when it was killed. The SQLite ledger lies in the same
directory (`ledger_path`). Elsewhere: whether it is used at all (`bullpen.settings`), talking to it (`bullpen.redis`).

How processes agree, all of it by `flock`, because the system drops a lock however its holder dies:

    start.lock        exclusive, while a process decides whether a server runs, and starts one
    users.lock        shared, by every process that uses the server, for as long as it does
    supervisor.lock   exclusive, by the supervisor: a server without one would never be reaped
    server.lock       exclusive, inherited by the server itself: two servers on one append-only file damage it

The starter spawns a supervisor (`supervisor`), a small process of its own session, which runs the server as its child
and asks for `users.lock` exclusively. It gets it when the last user is gone, and ends the server.
"""

from bullpen.embedded.directory import USED, data_directory, ledger_path, was_used
from bullpen.embedded.server import EmbeddedServer, acquire, is_running
from bullpen.embedded.stamp import Sync

__all__ = [
    "USED",
    "EmbeddedServer",
    "Sync",
    "acquire",
    "data_directory",
    "is_running",
    "ledger_path",
    "was_used",
]

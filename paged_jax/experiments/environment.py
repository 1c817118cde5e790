"""Where and with what an experiment ran: what a reader of its numbers needs to know."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("paged-jax", "jax", "jaxlib", "flax", "numpy")

COMPARABLE = ("git_commit", "versions", "platform", "device", "cpu")
"""Parts that must agree between runs for their timings to belong in one table."""


def describe() -> dict[str, Any]:
    """Start time, commit, versions, platform, device and CPU, as plain values for JSON."""
    import jax  # starts the backend, so only when an experiment really runs

    devices = jax.devices()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **git_state(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "platform": platform.platform(),
        "device": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "cpu": {"model": cpu_model(), "count": os.cpu_count()},
    }


def git_state() -> dict[str, Any]:
    """Commit of the checkout that this package is in and whether it has changes; None outside of one."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    # an environment may lie inside somebody else's repository, whose commit says nothing about this package
    if git("ls-files", "--error-unmatch", here.name) is None:
        return {"git_commit": None, "git_changes": None}
    return {"git_commit": git("rev-parse", "HEAD"), "git_changes": bool(git("status", "--porcelain"))}


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def available_memory() -> int | None:
    """Bytes of main memory that may be used without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return free[0] if free else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

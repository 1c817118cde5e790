"""The run itself: everything is checked, then everything is timed."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench.candidates import check, prepare
from pallas_kernels.bench.cases import FOREIGN, Point, Settings, bytes_per_call, flops_per_call, groups, kernel_of
from pallas_kernels.bench.report import append
from pallas_kernels.bench.timing import calibrate, copier, multiplier, seconds_per_call

_COPY, _MATMUL = (Point(name, 0, 0, None) for name in ("copy", "matmul"))


class Progress:
    """Lines on standard error: what is being done, how far that is, and how much time is left at this pace."""

    def __init__(self, total: int) -> None:
        self.done, self.total, self.began = 0, total, time.monotonic()

    def step(self, text: str) -> None:
        """Say what begins."""
        gone = time.monotonic() - self.began
        left = f", about {gone / self.done * (self.total - self.done):.0f} s left" if self.done else ""
        print(f"[{self.done}/{self.total}, {gone:.0f} s{left}] {text}", file=sys.stderr, flush=True)
        self.done += 1


def check_all(cells: Sequence[Point], settings: Settings, progress: Progress) -> tuple[list[Point], str | None]:
    """The points whose implementations agree with the reference, and a sentence about the first that does not.

    An implementation that is not ours may also refuse to run here, or be wrong: it is left out.
    """
    broken: set[str] = set()
    answers: dict[Any, np.ndarray] = {}
    for point in {(p.implementation, p.page_size, p.tiles): p for p in cells}.values():
        where = f"{point.implementation}, page {point.page_size}, tiles {_tiles(point)}"
        progress.step(f"checking {where}")
        if point.implementation in broken:
            continue
        try:
            problem = check(point, settings, answers)
        except Exception as error:
            if point.implementation not in FOREIGN:
                raise
            broken.add(point.implementation)
            _leave_out(point.implementation, error)
            continue
        if problem is None:
            continue
        if point.implementation not in FOREIGN:
            return [], f"{where}: {problem}"
        broken.add(point.implementation)
        print(f"not timed: {where}: {problem}", file=sys.stderr)
    return [p for p in cells if p.implementation not in broken], None


def num_checks(cells: Sequence[Point]) -> int:
    """How many steps `check_all` takes."""
    return len({(p.implementation, p.page_size, p.tiles) for p in cells})


def time_all(cells: Sequence[Point], settings: Settings, progress: Progress, path: Path) -> None:
    """Append the trials of all points to the file `path`, and as many of the two roofs for each batch and context."""
    rng = np.random.default_rng(settings.seed)
    copy, copy_bytes = copier(settings.copy_bytes)
    matmul, matmul_flops = multiplier(settings.platform, settings.matmul_size)
    work = {_COPY: (copy_bytes, 0), _MATMUL: (0, matmul_flops)}
    work |= {p: (bytes_per_call(p, settings), flops_per_call(p, settings)) for p in cells}
    roofs = {_COPY: copy, _MATMUL: matmul}
    roof_calls = {point: calibrate(run, settings.trial_seconds) for point, run in roofs.items()}
    for number, group in enumerate(groups(cells, settings.seed)):
        runs, calls, batches = dict(roofs), dict(roof_calls), {}
        for point in group:
            progress.step(f"compiling and timing {point}")
            try:
                run = prepare(point, settings, batches).run
                calls[point] = calibrate(run, settings.trial_seconds)
            except jax.errors.JaxRuntimeError as error:  # out of memory, or a tile that does not fit the chip
                _leave_out(str(point), error)
                continue
            runs[point] = run
        order = list(runs)
        for trial in range(settings.repeats):
            for point in (order[i] for i in rng.permutation(len(order))):
                seconds = seconds_per_call(runs[point], calls[point])
                repeat = trial + (number * settings.repeats if point in roofs else 0)
                ours = point not in roofs and point.implementation not in FOREIGN
                moved, flops = work[point]
                record = {
                    "key": f"{point}, trial {repeat}",
                    "setting": {**asdict(point), "kernel": kernel_of(point, settings) if ours else None},
                    "repeat": repeat,
                    "run": 0,
                    "metrics": {
                        "seconds_per_call": seconds,
                        "calls": calls[point],
                        "bytes_per_call": moved,
                        "flops_per_call": flops,
                    },
                }
                append(path, record)


def _tiles(point: Point) -> str:
    return "{},{}".format(*point.tiles) if point.tiles else "default"


def _leave_out(what: str, error: Exception) -> None:
    text = " ".join(str(error).split())
    print(f"not timed: {what}: {type(error).__name__}: {text[:300]}", file=sys.stderr)

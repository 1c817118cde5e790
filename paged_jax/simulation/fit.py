"""Fits constants of a device to measured times, and says how well they predict shapes that the fit has not seen."""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from paged_jax.simulation.hardware import Hardware

HELD_OUT = 5
"""One shape in so many is kept from the fit."""
OUTLIER = 0.1
"""Relative error from which a sample counts less than its square: a measurement that something else disturbed."""


class Sample(NamedTuple):
    """One measured time, and what the cost model says about it."""

    part: str
    """Of the step, as tables name it."""
    shape: tuple[int, ...]
    """What the time depends on; samples of one shape are held out together."""
    seconds: float
    predict: Callable[[Hardware], float]


class Parameter(NamedTuple):
    """A constant to fit: a field of Hardware, such as `overlap`, or `gemm_tiles.1.efficiency`."""

    path: str
    low: float
    high: float


class Stage(NamedTuple):
    """Parameters that the samples of some parts decide."""

    parts: tuple[str, ...]
    parameters: tuple[Parameter, ...]


class PartError(NamedTuple):
    """Mean absolute percentage errors of one part."""

    part: str
    num_fitted: int
    fitted: float
    num_held_out: int
    held_out: float


def is_held_out(sample: Sample, seed: int) -> bool:
    """Whether the fit may not see this sample; decided by its shape, so that all of a shape go together."""
    digest = sha256(f"{seed}:{sample.shape}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT == 0


def fit(
    hardware: Hardware,
    samples: Sequence[Sample],
    stages: Iterable[Stage],
    *,
    seed: int = 0,
    on_stage: Callable[[Stage], None] = lambda stage: None,
) -> Hardware:
    """The device with each stage's parameters fitted in turn, by least squares of log errors.

    Raises ValueError when a stage has fewer samples to fit than parameters.
    """
    for stage in stages:
        on_stage(stage)
        seen = [s for s in samples if s.part in stage.parts and not is_held_out(s, seed)]
        hardware = _fit_stage(hardware, seen, stage)
    return hardware


def _fit_stage(hardware: Hardware, samples: Sequence[Sample], stage: Stage) -> Hardware:
    parameters = stage.parameters
    if len(samples) < len(parameters):
        raise ValueError(
            f"{len(samples)} shapes of {', '.join(stage.parts)} cannot decide {len(parameters)} constants: "
            "measure more shapes"
        )
    measured = np.log([s.seconds for s in samples])
    low, high = (np.array(bound) for bound in zip(*((p.low, p.high) for p in parameters), strict=True))
    start = np.clip(
        [constant(hardware, p.path) for p in parameters], low + 1e-3 * (high - low), high - 1e-3 * (high - low)
    )

    def residuals(scaled: np.ndarray) -> np.ndarray:
        candidate = _with(hardware, parameters, scaled * start)
        return np.log([s.predict(candidate) for s in samples]) - measured

    found = least_squares(
        residuals,
        np.ones(len(start)),
        bounds=(low / start, high / start),
        loss="soft_l1",
        f_scale=OUTLIER,
        x_scale="jac",
    )
    return _with(hardware, parameters, found.x * start)


def part_errors(hardware: Hardware, samples: Sequence[Sample], *, seed: int = 0) -> list[PartError]:
    """How far predictions are from measurements, part by part, in percent of what was measured."""
    rows = []
    for part in dict.fromkeys(s.part for s in samples):
        both: dict[bool, list[float]] = {False: [], True: []}
        for sample in samples:
            if sample.part == part:
                error = 100.0 * abs(sample.predict(hardware) / sample.seconds - 1.0)
                both[is_held_out(sample, seed)].append(error)
        fitted, held_out = both[False], both[True]
        rows.append(PartError(part, len(fitted), _mean(fitted), len(held_out), _mean(held_out)))
    return rows


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def constant(hardware: Hardware, path: str) -> float:
    """What a parameter's path names."""
    value: object = hardware
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, tuple) else getattr(value, name)
    return float(value)  # type: ignore[arg-type]


def _with(hardware: Hardware, parameters: Sequence[Parameter], values: np.ndarray) -> Hardware:
    """The device with these constants."""
    changes: dict[str, object] = {}
    tiles = list(hardware.gemm_tiles)
    for parameter, value in zip(parameters, values, strict=True):
        field, _, rest = parameter.path.partition(".")
        if rest:
            index, name = rest.split(".")
            tiles[int(index)] = tiles[int(index)].model_copy(update={name: float(value)})
            changes[field] = tuple(tiles)
        else:
            changes[field] = float(value)
    return hardware.model_copy(update=changes)

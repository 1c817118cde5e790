"""Which implementation serves a call, and why."""

import importlib
import logging
import os
from types import ModuleType
from typing import NamedTuple

from pallas_kernels.paged_attention.shapes import AttentionShapes
from pallas_kernels.platforms import Platform, target_platform

_LOG = logging.getLogger("pallas_kernels")

type Tiles = tuple[int, int]

IMPLEMENTATIONS = {
    "reference": "pallas_kernels.paged_attention.reference",
    "xla": "pallas_kernels.paged_attention.xla",
    "mosaic_tpu": "pallas_kernels.paged_attention.tpu",
    "mosaic_gpu": "pallas_kernels.paged_attention.gpu",
    "triton": "pallas_kernels.paged_attention.gpu_triton",
}
"""Modules by name, imported when they are first used: a machine need not have what another's kernel imports."""

PLATFORM_KERNELS = {"tpu": ("mosaic_tpu",), "gpu": ("mosaic_gpu", "triton"), "cpu": ()}
"""The kernels of a platform, the preferred one first."""

_INTERPRETER_THREADS = 4

KERNELS = tuple(name for names in PLATFORM_KERNELS.values() for name in names)


class Choice(NamedTuple):
    """An implementation's name, and one sentence that says why it is the one."""

    name: str
    reason: str


def load_implementation(name: str) -> ModuleType:
    """The module of an implementation: its `ragged_paged_attention`, and a kernel's `refusal`.

    Raises ValueError for an unknown name.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return importlib.import_module(IMPLEMENTATIONS[name])


def page_backend(implementation: str | None) -> str:
    """The backend whose physical page shape an implementation reads: its own, or the target's for None and for
    those that read any shape."""
    for backend, kernels in PLATFORM_KERNELS.items():
        if implementation in kernels:
            return backend
    return target_platform().name


def pick_implementation(
    shapes: AttentionShapes,
    *,
    implementation: str | None = None,
    tiles: Tiles | None = None,
    interpret: object = False,
    platform: Platform | None = None,
) -> Choice:
    """Choose for a call of these shapes on `platform` (None: what is being compiled for).

    An implementation that is asked for by name is the choice or an error; None takes the first kernel of the platform
    that serves the shapes, else "xla", and says what was passed over and why.

    Raises:
        ValueError: for an unknown name, or one that cannot serve the shapes here, with the reason.
    """
    if tiles is not None and min(tiles) < 1:
        raise ValueError(f"tiles are (query tokens, key tokens), each at least 1, not {tiles}")
    platform = target_platform() if platform is None else platform
    if implementation is not None:
        load_implementation(implementation)
        problem = _problem(implementation, shapes, tiles, interpret, platform)
        if problem is not None:
            raise ValueError(f"attention implementation {implementation!r} cannot serve this call: {problem}")
        return Choice(implementation, "asked for by name")
    if interpret:
        raise ValueError("interpret has no effect unless implementation names a kernel: leave it unset")
    passed_over = []
    for name in PLATFORM_KERNELS.get(platform.name, ()):
        problem = _problem(name, shapes, tiles, False, platform)
        if problem is None:
            choice = Choice(name, "; ".join([f"the kernel for {platform.name}", *passed_over]))
            break
        passed_over.append(f"not {name}: {problem}")
    else:
        choice = Choice("xla", "; ".join(passed_over) or f"no kernel is for {platform.name}: XLA operations")
    _LOG.log(logging.WARNING if passed_over else logging.INFO, "attention: %s (%s)", *choice)
    return choice


def _problem(
    name: str, shapes: AttentionShapes, tiles: Tiles | None, interpret: object, platform: Platform
) -> str | None:
    if name not in KERNELS:
        if interpret:
            return "it is no Pallas kernel, so interpret has no effect on it: leave it unset"
        if tiles is not None and name == "reference":
            return "tiles have no effect on the reference implementation: leave them unset"
        return None
    if interpret and name == "mosaic_gpu":
        set_by_hand = os.environ.get("NPROC", "")
        threads = int(set_by_hand) if set_by_hand.isdecimal() else os.cpu_count() or 1
        if threads < _INTERPRETER_THREADS:
            return (
                f"its interpreter wants {_INTERPRETER_THREADS} threads of XLA's, one for each warp group that waits, "
                f"and there are {threads} here: set the environment variable NPROC to 16 before Python starts"
            )
    home = page_backend(name)
    if not interpret:
        if platform.name != home:
            return (
                f"it is for a {home.upper()}, not a {platform.name.upper()} (a call with interpret=True is for checks)"
            )
        capability = platform.compute_capability
        if name == "mosaic_gpu" and capability is not None and not 9.0 <= capability < 10.0:
            return f"its wgmma instructions are those of compute capability 9.x (Hopper), this GPU has {capability}"
        if name == "triton" and capability is not None and capability < 8.0:
            return f"XLA's Triton backend needs compute capability 8.0 (Ampere), this GPU has {capability}"
    return load_implementation(name).refusal(shapes, tiles)

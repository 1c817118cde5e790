"""Typed entry points of the page operations. Each returns the pages it was given, updated in place when donated."""

from __future__ import annotations

import contextlib
import importlib
from types import ModuleType

from pallas_kernels.platforms import target_platform

with contextlib.suppress(ImportError):  # a bare machine has only jax and numpy: annotations are not looked at there
    from jaxtyping import Array, Float, Int, Shaped

IMPLEMENTATIONS = {
    "reference": "pallas_kernels.kv_pages.reference",
    "xla": "pallas_kernels.kv_pages.xla",
    "mosaic_tpu": "pallas_kernels.kv_pages.tpu",
}
"""Modules by name. XLA's scatters are in place everywhere; on a TPU, which scatters row after row, writes are copies of
ours that overlap."""


def write_kv_pages(
    kv_pages: Shaped[Array, "N B KV Dp"],
    keys: Shaped[Array, "T Hkv D"],
    values: Shaped[Array, "T Hkv D"],
    block_ids: Int[Array, "T"],
    offsets: Int[Array, "T"],
    *,
    layer: int | Int[Array, ""],
    blocks_per_layer: int,
    implementation: str | None = None,
    interpret: object = False,
) -> Shaped[Array, "N B KV Dp"]:
    """Store token t's key and value in slot `offsets[t]` of block `block_ids[t]` of `layer`.

    A slot is written whole: rows and lanes that the backend pads become zeros. Padded tokens name the null block, 0,
    which nobody reads; all other (block, offset) pairs must differ. `interpret` as in `ragged_paged_attention`.

    Raises:
        ValueError: for pages that are too small for the keys, for quantised pages given other numbers (see
            `quantize_rows`), and for a kernel that is asked for by name and cannot write these pages here.
    """
    _, num_kv_heads, head_dim = keys.shape
    if kv_pages.shape[2] < 2 * num_kv_heads or kv_pages.shape[3] < head_dim:
        raise ValueError(
            f"a slot of the pages has shape {kv_pages.shape[2:]}, too small for keys and values of {num_kv_heads} "
            f"heads of {head_dim}"
        )
    if kv_pages.dtype.itemsize == 1 and keys.dtype != kv_pages.dtype:
        raise ValueError(f"pages of {kv_pages.dtype} hold what quantize_rows returns, not {keys.dtype}")
    platform = target_platform().name
    is_tpu = platform == "tpu"
    name, options = implementation, {}
    if name is None:
        name = "mosaic_tpu" if is_tpu and _load("mosaic_tpu").refusal(kv_pages, keys) is None else "xla"
    if name == "mosaic_tpu":
        problem = _load(name).refusal(kv_pages, keys)
        if problem is None and not (is_tpu or interpret):
            problem = f"it is for a TPU, not a {platform.upper()} (a call with interpret=True is for checks)"
        if problem is not None:
            raise ValueError(f"page implementation {name!r} cannot serve this call: {problem}")
        options["interpret"] = interpret
    elif interpret:
        raise ValueError("interpret has no effect unless implementation names a kernel: leave it unset")
    return _load(name).write_kv_pages(
        kv_pages, keys, values, block_ids, offsets, layer=layer, blocks_per_layer=blocks_per_layer, **options
    )


def write_kv_scales(
    kv_scales: Float[Array, "N B KV"],
    key_scales: Float[Array, "T Hkv"],
    value_scales: Float[Array, "T Hkv"],
    block_ids: Int[Array, "T"],
    offsets: Int[Array, "T"],
    *,
    layer: int | Int[Array, ""],
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Float[Array, "N B KV"]:
    """Store the scales of quantised keys and values where `write_kv_pages` stores the rows."""
    return _load(implementation or "xla").write_kv_scales(
        kv_scales, key_scales, value_scales, block_ids, offsets, layer=layer, blocks_per_layer=blocks_per_layer
    )


def copy_pages(
    kv_pages: Shaped[Array, "N B KV Dp"],
    sources: Int[Array, "P"],
    targets: Int[Array, "P"],
    *,
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Shaped[Array, "N B KV Dp"]:
    """Copy blocks in every layer, all sources read before any target is written. Padding copies 0 to 0."""
    return _load(implementation or "xla").copy_pages(kv_pages, sources, targets, blocks_per_layer=blocks_per_layer)


def gather_pages(
    kv_pages: Shaped[Array, "N B KV Dp"],
    block_ids: Int[Array, "P"],
    *,
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Shaped[Array, "L P B KV Dp"]:
    """Take blocks out of every layer: what a swap to the host moves."""
    return _load(implementation or "xla").gather_pages(kv_pages, block_ids, blocks_per_layer=blocks_per_layer)


def scatter_pages(
    kv_pages: Shaped[Array, "N B KV Dp"],
    block_ids: Int[Array, "P"],
    blocks: Shaped[Array, "L P B KV Dp"],
    *,
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Shaped[Array, "N B KV Dp"]:
    """Put blocks back into every layer: the inverse of `gather_pages`."""
    return _load(implementation or "xla").scatter_pages(kv_pages, block_ids, blocks, blocks_per_layer=blocks_per_layer)


def _load(name: str) -> ModuleType:
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown page implementation {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return importlib.import_module(IMPLEMENTATIONS[name])

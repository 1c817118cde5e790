"""Typed entry points of the page operations. Each returns the pages it was given, updated in place when donated."""

from types import ModuleType

from jaxtyping import Array, Float, Int

from pallas_kernels.kv_pages import reference, xla

IMPLEMENTATIONS = {"reference": reference, "xla": xla}


def _pick(implementation: str | None) -> ModuleType:
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown page implementation {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    return IMPLEMENTATIONS[name]


def write_kv_pages(
    kv_pages: Float[Array, "N B KV D"],
    keys: Float[Array, "T Hkv D"],
    values: Float[Array, "T Hkv D"],
    block_ids: Int[Array, "T"],
    offsets: Int[Array, "T"],
    *,
    layer: int | Int[Array, ""],
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Float[Array, "N B KV D"]:
    """Store token t's key and value in slot `offsets[t]` of block `block_ids[t]` of `layer`.

    Padded tokens name the null block, 0, which nobody reads; all other (block, offset) pairs must differ.
    """
    return _pick(implementation).write_kv_pages(
        kv_pages, keys, values, block_ids, offsets, layer=layer, blocks_per_layer=blocks_per_layer
    )


def copy_pages(
    kv_pages: Float[Array, "N B KV D"],
    sources: Int[Array, "P"],
    targets: Int[Array, "P"],
    *,
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Float[Array, "N B KV D"]:
    """Copy blocks in every layer, all sources read before any target is written. Padding copies 0 to 0."""
    return _pick(implementation).copy_pages(kv_pages, sources, targets, blocks_per_layer=blocks_per_layer)


def gather_pages(
    kv_pages: Float[Array, "N B KV D"],
    block_ids: Int[Array, "P"],
    *,
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Float[Array, "L P B KV D"]:
    """Take blocks out of every layer: what a swap to the host moves."""
    return _pick(implementation).gather_pages(kv_pages, block_ids, blocks_per_layer=blocks_per_layer)


def scatter_pages(
    kv_pages: Float[Array, "N B KV D"],
    block_ids: Int[Array, "P"],
    blocks: Float[Array, "L P B KV D"],
    *,
    blocks_per_layer: int,
    implementation: str | None = None,
) -> Float[Array, "N B KV D"]:
    """Put blocks back into every layer: the inverse of `gather_pages`."""
    return _pick(implementation).scatter_pages(kv_pages, block_ids, blocks, blocks_per_layer=blocks_per_layer)

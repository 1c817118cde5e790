"""The page operations one element at a time: the executable specification."""

import jax.numpy as jnp
from jax import lax


def write_kv_pages(kv_pages, keys, values, block_ids, offsets, *, layer, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.write_kv_pages`."""

    def write(t, pages):
        row = layer * blocks_per_layer + block_ids[t]
        for head in range(keys.shape[1]):
            pages = pages.at[row, offsets[t], 2 * head].set(keys[t, head].astype(pages.dtype))
            pages = pages.at[row, offsets[t], 2 * head + 1].set(values[t, head].astype(pages.dtype))
        return pages

    return lax.fori_loop(0, keys.shape[0], write, kv_pages)


def copy_pages(kv_pages, sources, targets, *, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.copy_pages`."""
    before = kv_pages
    for first in range(0, kv_pages.shape[0], blocks_per_layer):
        for i in range(sources.shape[0]):
            kv_pages = kv_pages.at[first + targets[i]].set(before[first + sources[i]])
    return kv_pages


def gather_pages(kv_pages, block_ids, *, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.gather_pages`."""
    layers = range(0, kv_pages.shape[0], blocks_per_layer)
    return jnp.stack([jnp.stack([kv_pages[first + b] for b in block_ids]) for first in layers])


def scatter_pages(kv_pages, block_ids, blocks, *, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.scatter_pages`."""
    for layer, first in enumerate(range(0, kv_pages.shape[0], blocks_per_layer)):
        for i in range(block_ids.shape[0]):
            kv_pages = kv_pages.at[first + block_ids[i]].set(blocks[layer, i])
    return kv_pages

"""The page operations one element at a time: the executable specification."""

import jax.numpy as jnp
from jax import lax


def write_kv_pages(kv_pages, keys, values, block_ids, offsets, *, layer, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.write_kv_pages`."""

    head_dim = keys.shape[2]

    def write(t, pages):
        slot = pages.at[layer * blocks_per_layer + block_ids[t], offsets[t]]
        row = jnp.zeros(kv_pages.shape[2:], pages.dtype)
        for head in range(keys.shape[1]):
            row = row.at[2 * head, :head_dim].set(keys[t, head].astype(pages.dtype))
            row = row.at[2 * head + 1, :head_dim].set(values[t, head].astype(pages.dtype))
        return slot.set(row)

    return lax.fori_loop(0, keys.shape[0], write, kv_pages)


def write_kv_scales(kv_scales, key_scales, value_scales, block_ids, offsets, *, layer, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.write_kv_scales`."""

    def write(t, scales):
        slot = scales.at[layer * blocks_per_layer + block_ids[t], offsets[t]]
        row = jnp.zeros(kv_scales.shape[2], scales.dtype)
        for head in range(key_scales.shape[1]):
            row = row.at[2 * head].set(key_scales[t, head]).at[2 * head + 1].set(value_scales[t, head])
        return slot.set(row)

    return lax.fori_loop(0, key_scales.shape[0], write, kv_scales)


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

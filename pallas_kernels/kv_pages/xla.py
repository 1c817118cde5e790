"""The page operations as XLA gathers and scatters, in place when the pages are donated."""

import jax.numpy as jnp


def write_kv_pages(kv_pages, keys, values, block_ids, offsets, *, layer, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.write_kv_pages`."""
    kv = slots_of(kv_pages, keys, values)
    # two-dimensional indices: a flat one would overflow 32 bits past 2^31 elements
    return kv_pages.at[layer * blocks_per_layer + block_ids, offsets].set(kv, mode="promise_in_bounds")


def slots_of(kv_pages, keys, values):
    """Keys and values [T, Hkv, D] as whole slots of the pages [T, KV, Dp]: zeros in rows and lanes of padding."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    kv = jnp.stack([keys, values], axis=2).reshape(num_tokens, 2 * num_kv_heads, head_dim)
    rows, lanes = kv_pages.shape[2:]
    kv = jnp.pad(kv, ((0, 0), (0, rows - 2 * num_kv_heads), (0, lanes - head_dim)))
    return kv.astype(kv_pages.dtype)


def write_kv_scales(kv_scales, key_scales, value_scales, block_ids, offsets, *, layer, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.write_kv_scales`."""
    num_tokens, num_kv_heads = key_scales.shape
    scales = jnp.stack([key_scales, value_scales], axis=2).reshape(num_tokens, 2 * num_kv_heads)
    scales = jnp.pad(scales, ((0, 0), (0, kv_scales.shape[2] - 2 * num_kv_heads)))
    return kv_scales.at[layer * blocks_per_layer + block_ids, offsets].set(scales, mode="promise_in_bounds")


def copy_pages(kv_pages, sources, targets, *, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.copy_pages`."""
    first = _layer_starts(kv_pages, blocks_per_layer)
    return kv_pages.at[first + targets[None]].set(kv_pages[first + sources[None]], mode="promise_in_bounds")


def gather_pages(kv_pages, block_ids, *, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.gather_pages`."""
    return kv_pages[_layer_starts(kv_pages, blocks_per_layer) + block_ids[None]]


def scatter_pages(kv_pages, block_ids, blocks, *, blocks_per_layer):
    """See `pallas_kernels.kv_pages.api.scatter_pages`."""
    rows = _layer_starts(kv_pages, blocks_per_layer) + block_ids[None]
    return kv_pages.at[rows].set(blocks, mode="promise_in_bounds")


def _layer_starts(kv_pages, blocks_per_layer):
    return (jnp.arange(kv_pages.shape[0] // blocks_per_layer, dtype=jnp.int32) * blocks_per_layer)[:, None]

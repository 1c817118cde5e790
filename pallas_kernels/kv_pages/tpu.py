"""Writing keys and values into pages as a Mosaic TPU kernel: one asynchronous copy a token, in place.

The other operations are XLA's: compiled for TPUs, they need no temporary as large as the pages either.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pages.shape import page_shape
from pallas_kernels.kv_pages.xla import copy_pages, gather_pages, scatter_pages, slots_of, write_kv_scales

__all__ = ["copy_pages", "gather_pages", "scatter_pages", "write_kv_pages", "write_kv_scales"]

IN_FLIGHT = 16
"""Copies that are under way at once."""
MAX_TOKENS = 65536
"""Of one call: each takes 12 bytes of the scalar memory's 1 MiB."""


def refusal(kv_pages: jax.Array, keys: jax.Array) -> str | None:
    """Why the kernel cannot write these keys [T, Hkv, D] into these pages: one sentence with the remedy, or None."""
    _, num_kv_heads, head_dim = keys.shape
    block_size = kv_pages.shape[1]
    wanted = page_shape(
        "tpu", block_size=block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=jnp.dtype(kv_pages.dtype)
    )
    if kv_pages.dtype == jnp.float16:
        return "a TPU's kernels have no float16: use pages of bfloat16 or float32"
    if kv_pages.shape[1:] != wanted:
        return (
            f"a page has shape {kv_pages.shape[1:]} where a TPU's has {wanted}: allocate pages with the shape that "
            "page_shape('tpu', ...) returns"
        )
    if keys.shape[0] > MAX_TOKENS:
        return (
            f"{keys.shape[0]} tokens are more than the {MAX_TOKENS} whose slots fit the scalar memory (SMEM) of a TPU: "
            "write them in several calls"
        )
    return None


def write_kv_pages(kv_pages, keys, values, block_ids, offsets, *, layer, blocks_per_layer, interpret):
    """See `pallas_kernels.kv_pages.api.write_kv_pages`. Padded tokens are not written at all."""
    kv = slots_of(kv_pages, keys, values)
    first_row = jnp.asarray(layer * blocks_per_layer, jnp.int32)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SMEM((keys.shape[0],), jnp.int32), pltpu.SemaphoreType.DMA((IN_FLIGHT,))],
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={4: 0},
        interpret=interpret,
        name="write_kv_pages",
    )(first_row[None], block_ids.astype(jnp.int32), offsets.astype(jnp.int32), kv, kv_pages)


def _kernel(first_row, block_ids, offsets, kv, _, pages, real_tokens, done):
    def count(t, num_real):
        # the next real token overwrites a padded one
        real_tokens[num_real] = t
        return num_real + (block_ids[t] != 0).astype(jnp.int32)

    num_real = lax.fori_loop(0, kv.shape[0], count, jnp.int32(0))

    def copy(i):
        t = real_tokens[i]
        target = pages.at[first_row[0] + block_ids[t], offsets[t]]
        return pltpu.make_async_copy(kv.at[t], target, done.at[lax.rem(i, jnp.int32(IN_FLIGHT))])

    def start(i, _):
        copy(i).start()

    def wait(i, _):
        copy(i).wait()

    def wait_and_start(i, _):
        copy(i - IN_FLIGHT).wait()
        copy(i).start()

    lax.fori_loop(0, jnp.minimum(num_real, IN_FLIGHT), start, None)
    lax.fori_loop(IN_FLIGHT, num_real, wait_and_start, None)
    lax.fori_loop(jnp.maximum(num_real - IN_FLIGHT, 0), num_real, wait, None)

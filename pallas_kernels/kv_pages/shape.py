"""The physical shape of a page, by backend: whoever allocates or counts pages uses it."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp

with contextlib.suppress(ImportError):  # a bare machine has only jax and numpy: annotations are not looked at there
    from jaxtyping import Array, Shaped


def page_shape(
    backend: str, *, block_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> tuple[int, int, int]:
    """Physical shape of one layer's page of one block: (block_size, rows, lanes).

    Rows are K and V interleaved by head, `2 * num_kv_heads`, and lanes are `head_dim`; both padded where the backend's
    kernels need it. What lies in the padding has no meaning, but for the lanes of a written row, which are zeros.

    "cpu" pads nothing. "gpu" wants lanes in multiples of 64, the width of a swizzled tile. "tpu" wants lanes
    in multiples of 128 and rows that fill a tile: 2 (not for one-byte types), 4, or a multiple of 8. With any other
    number XLA keeps the pages in another layout than Mosaic reads, and copies the whole cache at each call.

    Raises:
        ValueError: for a backend that has no page shape.
    """
    rows = 2 * num_kv_heads
    if backend == "cpu":
        return block_size, rows, head_dim
    if backend == "gpu":
        return block_size, rows, _round_up(head_dim, 64)
    if backend == "tpu":
        if rows > 4:
            rows = _round_up(rows, 8)
        elif jnp.dtype(dtype).itemsize == 1:
            rows = 4
        return block_size, rows, _round_up(head_dim, 128)
    raise ValueError(f"no page shape for backend {backend!r}; known: cpu, gpu, tpu")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def allocate_pages(
    num_rows: int,
    shape: tuple[int, int, int],
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None = None,
) -> Shaped[Array, "N B KV D"]:
    """Zeroed pages: `num_rows` is layers times (1 + num_blocks), the null block of each layer included."""
    return jnp.zeros((num_rows, *shape), dtype, device=sharding)

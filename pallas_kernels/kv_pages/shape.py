"""The physical shape of a page, by backend: whoever allocates or counts pages uses it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def page_shape(backend: str, *, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Shape of one layer's page of one block: (block_size, 2 * num_kv_heads, head_dim).

    K and V are interleaved by head. Backends whose tiles want padding get it here and nowhere else.
    """
    del backend  # no backend that is served yet pads
    return block_size, 2 * num_kv_heads, head_dim


def allocate_pages(
    num_rows: int,
    shape: tuple[int, int, int],
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding | None = None,
) -> Float[Array, "N B KV D"]:
    """Zeroed pages: `num_rows` is layers times (1 + num_blocks), the null block of each layer included."""
    return jnp.zeros((num_rows, *shape), dtype, device=sharding)

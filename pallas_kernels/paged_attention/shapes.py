"""What is static about one call of attention: what an implementation looks at to say whether it can serve it."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class AttentionShapes:
    """Shapes and types of a call."""

    num_tokens: int
    """T, padding included."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Of the queries: the true one."""
    dtype: jnp.dtype
    num_sequences: int
    """S, rows of the block tables, padding included."""
    table_width: int
    """W, blocks of a sequence."""
    num_pages: int
    """N, the pages of all layers."""
    block_size: int
    page_rows: int
    """Rows of a token in the pages: 2 * num_kv_heads, or more where the backend pads."""
    page_head_dim: int
    """Elements of a row in the pages: head_dim, or more where the backend pads."""
    kv_dtype: jnp.dtype

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_elements(self) -> int:
        """Of the pages."""
        return self.num_pages * self.block_size * self.page_rows * self.page_head_dim

    @property
    def is_quantized(self) -> bool:
        """Whether the pages hold integers or fp8, which only have a meaning together with their scales."""
        return self.kv_dtype.itemsize == 1


def attention_shapes(
    q: jax.Array, kv_pages: jax.Array, block_tables: jax.Array, num_kv_heads: int | None
) -> AttentionShapes:
    """Read them off the arguments of `ragged_paged_attention`, and refuse those that do not belong together."""
    num_tokens, num_heads, head_dim = q.shape
    num_pages, block_size, page_rows, page_head_dim = kv_pages.shape
    heads = page_rows // 2 if num_kv_heads is None else num_kv_heads
    if page_head_dim < head_dim:
        raise ValueError(f"q has head_dim {head_dim}, the pages have {page_head_dim}")
    if page_rows < 2 * heads:
        raise ValueError(f"the pages have {page_rows} rows a token, too few for keys and values of {heads} heads")
    if num_heads % heads:
        raise ValueError(f"{num_heads} query heads do not divide into groups over {heads} KV heads")
    return AttentionShapes(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=jnp.dtype(q.dtype),
        num_sequences=block_tables.shape[0],
        table_width=block_tables.shape[1],
        num_pages=num_pages,
        block_size=block_size,
        page_rows=page_rows,
        page_head_dim=page_head_dim,
        kv_dtype=jnp.dtype(kv_pages.dtype),
    )

"""Ragged paged attention in plain jnp, one query at a time: the executable specification. Slow on purpose."""

import jax
import jax.numpy as jnp
from jax import lax


def ragged_paged_attention(
    q,
    kv_pages,
    kv_lens,
    block_tables,
    cu_q_lens,
    num_seqs,
    *,
    layer,
    blocks_per_layer,
    scale,
    sliding_window,
    logit_soft_cap,
):
    """See `pallas_kernels.paged_attention.api.ragged_paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, kv_rows, _ = kv_pages.shape
    num_kv_heads = kv_rows // 2
    max_len = block_tables.shape[1] * block_size
    key_positions = jnp.arange(max_len)

    def one_query(t):
        is_real = t < cu_q_lens[num_seqs[0]]
        s = jnp.clip(jnp.searchsorted(cu_q_lens, t, side="right") - 1, 0, num_seqs[0] - 1)
        position = kv_lens[s] - cu_q_lens[s + 1] + t
        visible = (key_positions <= position) & is_real
        if sliding_window is not None:
            visible &= key_positions > position - sliding_window
        kv = kv_pages[layer * blocks_per_layer + block_tables[s]].reshape(max_len, num_kv_heads, 2, head_dim)
        kv = jnp.where(visible[:, None, None, None], kv.astype(jnp.float32), 0.0)
        queries = q[t].astype(jnp.float32).reshape(num_kv_heads, -1, head_dim)
        scores = jnp.einsum("hgd,khd->hgk", queries, kv[:, :, 0], precision=lax.Precision.HIGHEST) * scale
        if logit_soft_cap is not None:
            scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
        probabilities = jax.nn.softmax(scores, axis=-1, where=visible[None, None])
        out = jnp.einsum("hgk,khd->hgd", probabilities, kv[:, :, 1], precision=lax.Precision.HIGHEST)
        return jnp.where(is_real, out, 0.0).reshape(num_heads, head_dim).astype(q.dtype)

    return lax.map(one_query, jnp.arange(num_tokens))

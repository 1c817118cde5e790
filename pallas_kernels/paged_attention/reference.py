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
    num_kv_heads,
    scale,
    sliding_window,
    logit_soft_cap,
    sinks,
    alibi_slopes,
    kv_scales,
):
    """See `pallas_kernels.paged_attention.api.ragged_paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    used = 2 * num_kv_heads
    max_len = block_tables.shape[1] * kv_pages.shape[1]
    key_positions = jnp.arange(max_len)

    def one_query(t):
        is_real = t < cu_q_lens[num_seqs[0]]
        s = jnp.clip(jnp.searchsorted(cu_q_lens, t, side="right") - 1, 0, num_seqs[0] - 1)
        position = kv_lens[s] - cu_q_lens[s + 1] + t
        visible = (key_positions <= position) & is_real
        if sliding_window is not None:
            visible &= key_positions > position - sliding_window
        rows = layer * blocks_per_layer + block_tables[s]
        kv = kv_pages[rows][:, :, :used, :head_dim].astype(jnp.float32)
        if kv_scales is not None:
            kv = kv * kv_scales[rows][:, :, :used, None]
        kv = jnp.where(visible[:, None, None, None], kv.reshape(max_len, num_kv_heads, 2, head_dim), 0.0)
        queries = q[t].astype(jnp.float32).reshape(num_kv_heads, -1, head_dim)
        scores = jnp.einsum("hgd,khd->hgk", queries, kv[:, :, 0], precision=lax.Precision.HIGHEST) * scale
        if logit_soft_cap is not None:
            scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
        if alibi_slopes is not None:
            distances = (key_positions - position).astype(jnp.float32)
            scores = scores + alibi_slopes.astype(jnp.float32).reshape(num_kv_heads, -1, 1) * distances[None, None]
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1), (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
            visible = jnp.append(visible, is_real)
        probabilities = jax.nn.softmax(scores, axis=-1, where=visible[None, None])[..., :max_len]
        out = jnp.einsum("hgk,khd->hgd", probabilities, kv[:, :, 1], precision=lax.Precision.HIGHEST)
        return jnp.where(is_real, out, 0.0).reshape(num_heads, head_dim).astype(q.dtype)

    return lax.map(one_query, jnp.arange(num_tokens))

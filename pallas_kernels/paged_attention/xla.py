"""Ragged paged attention in XLA operations: the fast path on CPUs, and on any backend without a kernel.

Two loops with online softmax (Milakov and Gimelshein, 2018): one over key tiles for all sequences with a single query
at once, one over query tiles and key tiles for each sequence with several. Both loops' lengths depend on the data, not
on the width of the block tables, so that a wide table costs nothing.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.tiles import DEFAULT_TILES


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
    tiles,
):
    """See `pallas_kernels.paged_attention.api.ragged_paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    block_size = kv_pages.shape[1]
    used = 2 * num_kv_heads
    num_rows = kv_lens.shape[0]
    tiles = DEFAULT_TILES["xla"] if tiles is None else tiles
    pages_per_tile = max(1, tiles[1] // block_size)
    key_tile = pages_per_tile * block_size
    # whole tiles only: a slice past the table's end would be shifted back by XLA
    tables = jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % pages_per_tile)))
    tables = tables + layer * blocks_per_layer
    q_lens = jnp.where(jnp.arange(num_rows) < num_seqs[0], cu_q_lens[1:] - cu_q_lens[:-1], 0)
    q = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)

    def by_head(values):
        return values.astype(jnp.float32).reshape(1, num_kv_heads, -1)

    slopes = None if alibi_slopes is None else by_head(alibi_slopes)

    def key_tiles(queries, positions, rows, first, last, state):
        """Fold key tiles first..last of tables `rows` [R, W] into the state of `queries` [R, Q, Hkv, G, D]."""
        num = rows.shape[0]

        def fold(j, state):
            peak, total, out = state
            pages = lax.dynamic_slice(rows, (0, j * pages_per_tile), (num, pages_per_tile))
            kv = kv_pages[pages][..., :used, :head_dim]
            if kv_scales is not None:
                kv = kv.astype(jnp.float32) * kv_scales[pages][..., :used, None]
            kv = kv.reshape(num, key_tile, num_kv_heads, 2, head_dim)
            keys, values = kv[..., 0, :], kv[..., 1, :]
            key_positions = (j * key_tile + jnp.arange(key_tile))[None, None, :]
            visible = key_positions <= positions[:, :, None]  # [R, Q, K]
            if sliding_window is not None:
                visible &= key_positions > positions[:, :, None] - sliding_window
            scores = jnp.einsum(
                "rqhgd,rkhd->rhgqk",
                queries,
                keys,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            scores = scores * scale
            if logit_soft_cap is not None:
                scores = logit_soft_cap * jnp.tanh(scores / logit_soft_cap)
            if slopes is not None:
                distances = key_positions - positions[:, :, None]  # [R, Q, K]
                scores = scores + slopes[..., None, None] * distances.astype(jnp.float32)[:, None, None]
            scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
            # what no query sees may be NaN, and 0 * NaN is NaN
            values = jnp.where(visible.any(axis=1)[:, :, None, None], values, jnp.zeros((), values.dtype))
            new_peak = jnp.maximum(peak, scores.max(axis=-1))
            # a row that has seen no key yet has peak -inf, and -inf - -inf is NaN
            base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
            weights = jnp.exp(scores - base[..., None])
            rescale = jnp.exp(peak - base)
            part = jnp.einsum(
                "rhgqk,rkhd->rhgqd",
                weights.astype(values.dtype),
                values,
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            return new_peak, total * rescale + weights.sum(axis=-1), out * rescale[..., None] + part

        return lax.fori_loop(first, last, fold, state)

    def attend(queries, positions, rows, first, last):
        """Attention of queries [R, Q, Hkv, G, D] at `positions` [R, Q]; returns the same shape."""
        num, num_queries, _, group, _ = queries.shape
        shape = (num, num_kv_heads, group, num_queries)
        # a sink is a key that was seen before all others, and has no value
        state = (
            jnp.full(shape, -jnp.inf, jnp.float32)
            if sinks is None
            else jnp.broadcast_to(by_head(sinks)[..., None], shape),
            jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )
        _, total, out = key_tiles(queries, positions, rows, first, last, state)
        out = out / jnp.where(total == 0.0, 1.0, total)[..., None]
        return jnp.moveaxis(out, 3, 1).astype(q.dtype)

    def first_tile(position):
        if sliding_window is None:
            return 0
        return jnp.maximum(position - sliding_window + 1, 0) // key_tile

    # Sequences with one query, all at once.
    is_single = q_lens == 1
    single_positions = jnp.where(is_single, kv_lens - 1, -1)
    singles = attend(
        q[jnp.minimum(cu_q_lens[:-1], num_tokens - 1)][:, None],
        single_positions[:, None],
        tables,
        jnp.min(jnp.where(is_single, first_tile(single_positions), tables.shape[1])),
        (jnp.max(single_positions) + key_tile) // key_tile,
    )
    out = jnp.zeros_like(q)
    out = out.at[jnp.where(is_single, cu_q_lens[:-1], num_tokens)].set(singles[:, 0], mode="drop")
    if num_tokens == 1:
        return out.reshape(num_tokens, num_heads, head_dim)

    # Sequences with several, one after the other.
    query_tile = min(tiles[0], num_tokens)
    padded_q = jnp.pad(q, ((0, query_tile), (0, 0), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, query_tile), (0, 0), (0, 0), (0, 0)))

    def one_sequence(s, out):
        start, length = cu_q_lens[s], q_lens[s]
        row = lax.dynamic_slice(tables, (s, 0), (1, tables.shape[1]))

        def one_tile(i, out):
            at = (start + i * query_tile, 0, 0, 0)
            size = (query_tile, *q.shape[1:])
            index = i * query_tile + jnp.arange(query_tile)
            position = kv_lens[s] - length + index
            is_own = index < length
            last_position = kv_lens[s] - length + jnp.minimum((i + 1) * query_tile, length) - 1
            result = attend(
                lax.dynamic_slice(padded_q, at, size)[None],
                jnp.where(is_own, position, -1)[None],
                row,
                first_tile(position[0]),
                last_position // key_tile + 1,
            )[0]
            kept = lax.dynamic_slice(out, at, size)
            return lax.dynamic_update_slice(out, jnp.where(is_own[:, None, None, None], result, kept), at)

        num_tiles = jnp.where(length > 1, (length + query_tile - 1) // query_tile, 0)
        return lax.fori_loop(0, num_tiles, one_tile, out)

    out = lax.fori_loop(0, num_seqs[0], one_sequence, out)
    return out[:num_tokens].reshape(num_tokens, num_heads, head_dim)

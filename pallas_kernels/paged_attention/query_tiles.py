"""A ragged batch laid out in query tiles, which is how every Pallas kernel sees it.

A tile holds up to `tokens_per_tile` consecutive queries of one sequence, for all their heads. Real tiles come first, in
the order of the batch; the rest have `num_tokens` 0 and a kernel leaves them at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class QueryTiles(NamedTuple):
    """Tiles of queries, and which keys each of them sees. N tiles, R rows a tile; all integers are int32."""

    q: jax.Array
    """[N, Hkv, R, D]: row i * G + g is the query of token i of the tile and head g of the group; the rest are zeros."""
    sequences: jax.Array
    """[N]: the row of the block table."""
    first_positions: jax.Array
    """[N]: position of the tile's first token in its sequence."""
    num_tokens: jax.Array
    """[N]: tokens of the tile; 0 for a tile that is not real."""
    key_begins: jax.Array
    """[N]: first position that any query of the tile sees."""
    key_ends: jax.Array
    """[N]: one past the last position that any query of the tile sees; 0 for a tile that is not real."""
    token_tiles: jax.Array
    """[T]: the tile of each token, and"""
    token_offsets: jax.Array
    """[T]: its place in the tile; -1 for a token that belongs to no sequence."""


def num_query_tiles(num_tokens: int, num_rows: int, tokens_per_tile: int) -> int:
    """The most tiles that `num_tokens` queries of `num_rows` sequences can need."""
    return min(num_tokens, num_tokens // tokens_per_tile + num_rows)


def make_query_tiles(
    q: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    num_kv_heads: int,
    tokens_per_tile: int,
    num_rows: int,
    head_dim: int,
    sliding_window: int | jax.Array | None,
) -> QueryTiles:
    """Lay q [T, Hq, D'] into tiles of `num_rows` >= tokens_per_tile * G rows of `head_dim` >= D', zeros elsewhere."""
    total, num_heads, true_dim = q.shape
    group = num_heads // num_kv_heads
    rows_of_table = kv_lens.shape[0]
    is_real = jnp.arange(rows_of_table, dtype=jnp.int32) < num_seqs[0]
    q_lens = jnp.where(is_real, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    tiles_of = (q_lens + tokens_per_tile - 1) // tokens_per_tile
    ends = jnp.cumsum(tiles_of, dtype=jnp.int32)
    begins = ends - tiles_of

    tiles = jnp.arange(num_query_tiles(total, rows_of_table, tokens_per_tile), dtype=jnp.int32)
    sequences = jnp.minimum(jnp.searchsorted(ends, tiles, side="right"), rows_of_table - 1).astype(jnp.int32)
    first_tokens = (tiles - begins[sequences]) * tokens_per_tile
    num_tokens = jnp.where(tiles < ends[-1], jnp.clip(q_lens[sequences] - first_tokens, 0, tokens_per_tile), 0)
    first_positions = kv_lens[sequences] - q_lens[sequences] + first_tokens
    key_ends = jnp.where(num_tokens > 0, first_positions + num_tokens, 0)
    key_begins = jnp.zeros_like(key_ends)
    if sliding_window is not None:
        key_begins = jnp.maximum(first_positions - sliding_window + 1, 0)

    offsets = jnp.arange(tokens_per_tile, dtype=jnp.int32)[None]
    taken = (cu_q_lens[sequences] + first_tokens)[:, None] + offsets
    own = q[jnp.clip(taken, 0, total - 1)]
    own = jnp.where((offsets < num_tokens[:, None])[..., None, None], own, jnp.zeros((), own.dtype))
    own = own.reshape(len(tiles), tokens_per_tile, num_kv_heads, group, true_dim)
    own = jnp.moveaxis(own, 2, 1).reshape(len(tiles), num_kv_heads, tokens_per_tile * group, true_dim)
    own = jnp.pad(own, ((0, 0), (0, 0), (0, num_rows - tokens_per_tile * group), (0, head_dim - true_dim)))

    tokens = jnp.arange(total, dtype=jnp.int32)
    owner = jnp.clip(jnp.searchsorted(cu_q_lens, tokens, side="right") - 1, 0, rows_of_table - 1)
    in_sequence = tokens - cu_q_lens[owner]
    owned = tokens < cu_q_lens[num_seqs[0]]
    token_tiles = jnp.where(owned, begins[owner] + in_sequence // tokens_per_tile, 0)
    token_offsets = jnp.where(owned, in_sequence % tokens_per_tile, -1)
    return QueryTiles(own, sequences, first_positions, num_tokens, key_begins, key_ends, token_tiles, token_offsets)


def take_tokens(out: jax.Array, tiles: QueryTiles, *, num_heads: int, tokens_per_tile: int, head_dim: int) -> jax.Array:
    """Outputs [N, Hkv, R, D] of the tiles as [T, Hq, head_dim]; zeros for tokens that belong to no sequence."""
    num_tiles, num_kv_heads = out.shape[:2]
    group = num_heads // num_kv_heads
    out = out[:, :, : tokens_per_tile * group, :head_dim]
    out = out.reshape(num_tiles, num_kv_heads, tokens_per_tile, group, head_dim)
    owned = (tiles.token_offsets >= 0)[:, None, None, None]
    taken = out[tiles.token_tiles, :, jnp.maximum(tiles.token_offsets, 0)]
    return jnp.where(owned, taken, jnp.zeros((), out.dtype)).reshape(-1, num_heads, head_dim)


def head_rows(values: jax.Array, *, num_kv_heads: int, tokens_per_tile: int, num_rows: int) -> jax.Array:
    """A value of each query head [Hq], such as its sink, as float32 for each row of a tile [Hkv, R]."""
    by_head = values.astype(jnp.float32).reshape(num_kv_heads, -1)
    rows = jnp.tile(by_head, (1, tokens_per_tile))
    return jnp.pad(rows, ((0, 0), (0, num_rows - rows.shape[1])))


def sequence_scales(
    kv_scales: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    *,
    num_kv_heads: int,
    key_tile: int,
    layer: int | jax.Array,
    blocks_per_layer: int,
) -> jax.Array:
    """Scales of quantised pages [N, B, KV], gathered by sequence: float32 [S, 2, Hkv, L], K's and then V's.

    L is the table's width in tokens, rounded up to whole key tiles. Scales past a sequence's end are 0, whatever the
    pages hold there. A kernel multiplies scores by K's and probabilities by V's, so that the pages enter the products
    as they are. On a TPU XLA may copy all of `kv_scales` into another layout for this gather, at every call.
    """
    rows, width = block_tables.shape
    block_size = kv_scales.shape[1]
    length = width * block_size
    scales = kv_scales[layer * blocks_per_layer + block_tables][..., : 2 * num_kv_heads].astype(jnp.float32)
    scales = scales.reshape(rows, length, num_kv_heads, 2).transpose(0, 3, 2, 1)
    visible = jnp.arange(length, dtype=jnp.int32)[None] < kv_lens[:, None]
    scales = jnp.where(visible[:, None, None], scales, 0.0)
    return jnp.pad(scales, ((0, 0), (0, 0), (0, 0), (0, -length % key_tile)))

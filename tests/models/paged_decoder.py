"""A decoder over pages laid by hand: what the engine does for one sequence, with NaN wherever nobody may look."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from paged_jax.models.attention import AttentionBatch, AttentionOptions, GroupBatch
from paged_jax.models.decoder import Decoder


@partial(jax.jit, static_argnames=("graph", "options"))
def forward(graph, state, token_ids, pages, batch, options):
    model = nnx.merge(graph, state)
    hidden, pages = model(token_ids, pages, batch, options)
    return model.logits(hidden), pages


@jax.jit
def poisoned(pages: jax.Array, rows: jax.Array) -> jax.Array:
    """NaN in the rows of pages that are marked."""
    return jnp.where(rows[:, None, None, None], jnp.nan, pages)


def num_given_up(window: int | None, start: int, block_size: int) -> int:
    """Leading blocks of which a token at `start`, and so all after it, see nothing."""
    return 0 if window is None else max(0, start - window + 1) // block_size


def run(
    model: Decoder,
    tokens: np.ndarray,
    chunks: Sequence[int],
    implementation: str | None = None,
    block_size: int = 16,
) -> np.ndarray:
    """Logits [length, vocab] of one sequence that is computed in chunks, each padded to the longest.

    Before each chunk all blocks are NaN in every layer, the null block too, but for those of the group's own table
    that hold tokens in its window. In the table 0 stands for those that fell out of it.
    """
    length, padded = len(tokens), max(chunks)
    num_blocks = -(-length // block_size)
    options = AttentionOptions(1 + num_blocks, implementation)
    graph, state = nnx.split(model)
    groups = model.cache_groups
    pages = tuple(
        jnp.full((g.num_layers * (1 + num_blocks), block_size, 2 * g.num_kv_heads, g.head_dim), jnp.nan) for g in groups
    )
    rng = np.random.default_rng(0)
    tables = [(1 + rng.permutation(num_blocks)).astype(np.int32) for _ in groups]
    logits, start = [], 0
    for chunk in chunks:
        is_poison = [np.ones(1 + num_blocks, bool) for _ in groups]
        for group, table, rows in zip(groups, tables, is_poison, strict=True):
            count = num_given_up(group.sliding_window, start, block_size)
            table[:count] = 0
            rows[table[count : -(-start // block_size)]] = False
        pages = tuple(
            poisoned(own, np.tile(rows, g.num_layers)) for g, own, rows in zip(groups, pages, is_poison, strict=True)
        )
        positions = np.zeros(padded, np.int32)
        token_ids, offsets = positions.copy(), positions.copy()
        positions[:chunk] = np.arange(start, start + chunk)
        token_ids[:chunk] = tokens[start : start + chunk]
        offsets[:chunk] = positions[:chunk] % block_size
        blocks = [positions * 0 for _ in groups]
        for table, own in zip(tables, blocks, strict=True):
            own[:chunk] = table[positions[:chunk] // block_size]
        batch = AttentionBatch(
            positions=positions,
            write_offsets=offsets,
            kv_lens=np.array([start + chunk], np.int32),
            cu_q_lens=np.array([0, chunk], np.int32),
            num_seqs=np.array([1], np.int32),
            groups=tuple(GroupBatch(t[None], b) for t, b in zip(tables, blocks, strict=True)),
        )
        out, pages = forward(graph, state, token_ids, pages, batch, options)
        logits.append(np.asarray(out)[:chunk])
        start += chunk
    assert start == length
    return np.concatenate(logits)

"""What debug mode refuses: block ids that name no block."""

import jax
import numpy as np


def check_block_tables(
    block_tables: jax.Array, kv_lens: jax.Array, num_seqs: jax.Array, block_size: int, blocks_per_layer: int
) -> None:
    """Raise ValueError if an id that a sequence needs is not in [0, blocks_per_layer), or its table is too narrow.

    Under jit the check is a callback, and its ValueError arrives inside JAX's own runtime error.
    """

    def check(*arrays: jax.Array) -> None:
        tables, lens, count = (np.asarray(array) for array in arrays)
        width = tables.shape[1]
        for s in range(int(count[0])):
            needed = -(-int(lens[s]) // block_size)
            if needed > width:
                raise ValueError(f"sequence {s} has {lens[s]} tokens, its block table holds {width * block_size}")
            bad = np.flatnonzero((tables[s, :needed] < 0) | (tables[s, :needed] >= blocks_per_layer))
            if bad.size:
                raise ValueError(
                    f"entry {bad[0]} of sequence {s}'s block table is {tables[s, bad[0]]}: "
                    f"block ids are 0 to {blocks_per_layer - 1}"
                )

    arrays = (block_tables, kv_lens, num_seqs)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        jax.debug.callback(check, *arrays)
    else:
        check(*arrays)

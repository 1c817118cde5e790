"""Tokens of prompts of which a trace tells only which blocks are equal."""

from collections.abc import Sequence

import numpy as np

from paged_jax.experiments.token_ids import shared_ids


def block_ids(hash_ids: Sequence[int], block_size: int, count: int, vocab_size: int, key: int) -> tuple[int, ...]:
    """The first `count` token ids of these blocks; a block's ids depend on its hash id and on `key`, nothing else.

    They are the output of a counter-based generator (SplitMix64: Steele, Lea and Flood, OOPSLA 2014) at the block's
    place in a stream: none has to be remembered, however many blocks a trace has. Every id of the vocabulary is equally
    likely, but for 1 in 2**64 / vocab_size.
    """
    firsts = np.array(hash_ids, np.uint64) * np.uint64(block_size)
    places = (firsts[:, None] + np.arange(block_size, dtype=np.uint64)).ravel()[:count]
    mixed = places * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return tuple(shared_ids(vocab_size)[mixed % np.uint64(vocab_size)].tolist())

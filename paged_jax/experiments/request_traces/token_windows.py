"""Made-up contents of prompts: each is a window of one random stream, which is the cheapest tuple to make.

A trace has tens of millions of prompt tokens. To draw and box each takes a tenth of a microsecond, to slice a tuple a
tenth of that, if the ints in it are so few that their reference counts stay in a core's cache. Windows begin at
different places, so that no two of them begin alike but by chance: prefix caches see independent prompts.
"""

import numpy as np

_DIFFERENT_IDS = 4096
"""Ids of the vocabulary that are used: 128 KiB of int objects."""
_LEAST_PLACES = 2**18
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio, odd: its multiples modulo a power of two are all different, and far apart."""


class TokenWindows:
    """Windows number 0 to `count` - 1, each of up to `longest` random token ids below `vocab_size`."""

    def __init__(self, count: int, longest: int, vocab_size: int, rng: np.random.Generator) -> None:
        # four places for each window: few of them overlap by much
        self._places = 1 << (max(_LEAST_PLACES, 4 * count) - 1).bit_length()
        self._step = (_GOLDEN >> (64 - self._places.bit_length() + 1)) | 1
        ids = rng.choice(vocab_size, size=min(vocab_size, _DIFFERENT_IDS), replace=False)
        stream = rng.integers(len(ids), size=self._places)
        ids = np.array(ids.tolist(), dtype=object)
        self._stream = tuple(ids[stream].tolist())
        while len(self._stream) < self._places + longest:
            self._stream += self._stream[:longest]

    def window(self, number: int, length: int) -> tuple[int, ...]:
        """The first `length` ids of a window: the same for the same number."""
        start = number * self._step % self._places
        return self._stream[start : start + length]

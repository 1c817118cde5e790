"""The best padded sizes for steps that are known, under a limit on how many programs are compiled."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np


class StepSize(NamedTuple):
    """What a step asks of its bucket."""

    num_tokens: int
    """Tokens that are computed."""
    num_rows: int
    """Rows for sequences, for samples and for admitted requests: `buckets.num_rows`."""


@dataclass(frozen=True)
class StepHistogram:
    """How many steps there are of each size.

    A bucket of T tokens has min(T, max_num_seqs) rows and no step needs more than max_num_seqs of them, so that a step
    fits if T is at least the larger one of its tokens and rows.
    """

    counts: dict[StepSize, int]
    max_num_batched_tokens: int
    """Size that every set of buckets must end with."""

    @classmethod
    def of(cls, steps: Iterable[StepSize], max_num_batched_tokens: int) -> "StepHistogram":
        """Count steps. Raises ValueError for one that no bucket holds, and if there is none."""
        counts = Counter(steps)
        if not counts:
            raise ValueError("there is no step to choose buckets for")
        largest = max(map(max, counts))
        if largest > max_num_batched_tokens:
            raise ValueError(
                f"a step needs {largest} tokens or rows, more than max_num_batched_tokens ({max_num_batched_tokens})"
            )
        return cls(dict(counts), max_num_batched_tokens)

    @property
    def num_steps(self) -> int:
        """Steps of all sizes."""
        return sum(self.counts.values())

    @property
    def computed_tokens(self) -> int:
        """Tokens of all steps, padding excluded."""
        return sum(size.num_tokens * count for size, count in self.counts.items())

    @cached_property
    def needs(self) -> tuple[np.ndarray, np.ndarray]:
        """The bucket sizes that steps need, int64, ascending and distinct, and how many steps need each.

        max_num_batched_tokens comes last, also where no step needs it.
        """
        by_need: Counter[int] = Counter({self.max_num_batched_tokens: 0})
        for size, count in self.counts.items():
            by_need[max(size)] += count
        sizes = sorted(by_need)
        return np.array(sizes, dtype=np.int64), np.array([by_need[size] for size in sizes], dtype=np.int64)

    def total(self, buckets: Sequence[int], cost: Callable[[int], float] = float) -> float:
        """The cost of all steps, each in the smallest of these ascending sizes that holds it; by default its tokens."""
        sizes, counts = self.needs
        picked = np.searchsorted(np.array(buckets), sizes)
        return float(np.array([cost(bucket) for bucket in buckets])[picked] @ counts)

    def padded_tokens(self, buckets: Sequence[int]) -> int:
        """Tokens of padding that these sizes cost."""
        return round(self.total(buckets)) - self.computed_tokens

    def padding_fraction(self, buckets: Sequence[int]) -> float:
        """Padding / all tokens that go through the model, as the metric of that name."""
        return 1 - self.computed_tokens / self.total(buckets)

    def num_programs(self, buckets: Sequence[int]) -> int:
        """How many of these sizes any step uses: what is compiled where buckets are compiled as they are needed."""
        sizes, counts = self.needs
        return len(set(np.searchsorted(np.array(buckets), sizes[counts > 0]).tolist()))


def best_buckets(
    histogram: StepHistogram, max_programs: int, cost: Callable[[int], float] = float
) -> list[tuple[int, ...]]:
    """For 1 to `max_programs` programs: the ascending sizes, at most so many, whose steps cost least together.

    `cost` is that of one step of a bucket, by default its tokens, so that padding is least. Each set is a value for
    `EngineConfig.token_buckets`: the last size is max_num_batched_tokens, which counts as a program too. Raises
    ValueError for a budget below 1.

    Sizes are chosen among those that a step needs, and the last: where costs do not fall as buckets grow, the next
    smaller need costs no more than a size between two needs, and holds the same steps. With n_0 < n_1 < ... the needs,
    and C_i the number of steps that need less than n_i, the least cost of the steps up to n_j in k programs, n_j being
    the largest, is

        best[k, j] = min over i <= j of best[k - 1, i - 1] + cost(n_j) * (C_(j+1) - C_i).
    """
    if max_programs < 1:
        raise ValueError(f"a budget of {max_programs} programs compiles nothing: give 1 or more")
    sizes, counts = histogram.needs
    costs = np.array([cost(int(size)) for size in sizes], dtype=np.float64)
    below = np.concatenate([[0], np.cumsum(counts)])
    num_sizes, budget = len(sizes), min(max_programs, len(sizes))
    # best[k, i]: the steps of the first i sizes in exactly k programs, the largest of them being the last of these
    best = np.full((budget + 1, num_sizes + 1), np.inf)
    best[0, 0] = 0.0
    group_begins = np.zeros((budget + 1, num_sizes + 1), dtype=np.int64)
    for end in range(1, num_sizes + 1):
        together = costs[end - 1] * (below[end] - below[:end])  # if a program of this size begins after size i
        candidates = best[:budget, :end] + together
        begins = candidates.argmin(axis=1)
        group_begins[1:, end] = begins
        best[1:, end] = candidates[np.arange(budget), begins]
    sets = []
    for allowed in range(1, max_programs + 1):
        programs = 1 + int(best[1 : allowed + 1, num_sizes].argmin())  # fewer, if more gain nothing
        sets.append(_sizes(sizes, group_begins, programs))
    return sets


def powers_of_two(max_num_batched_tokens: int) -> tuple[int, ...]:
    """1, 2, 4, ... below the limit, and the limit: the usual choice, to compare with."""
    powers = [2**i for i in range(max_num_batched_tokens.bit_length()) if 2**i < max_num_batched_tokens]
    return (*powers, max_num_batched_tokens)


def _sizes(sizes: np.ndarray, group_begins: np.ndarray, programs: int) -> tuple[int, ...]:
    """Walk back from the last program to the first."""
    end, chosen = len(sizes), []
    for k in range(programs, 0, -1):
        chosen.append(int(sizes[end - 1]))
        end = int(group_begins[k, end])
    return tuple(reversed(chosen))

"""A pairwise covering array of all policies: few configurations in which any two choices meet.

Most failures of a system of options come from one option or from two together (Kuhn, Wallace & Gallo, TSE 2004). The
rows are made greedily, as AETG does (Cohen et al., TSE 1997). Which values go together is nowhere written down here:
the config and the engine are asked.
"""

import functools
import random
from collections.abc import Iterator, Mapping
from itertools import combinations, product

from host_executor import host_engine
from pydantic import ValidationError

from paged_jax.kv_cache.group import CacheGroup

type Value = str | int | float | bool | None
type Row = dict[str, Value]
type Pair = tuple[tuple[str, Value], tuple[str, Value]]

DIMENSIONS: dict[str, tuple[Value, ...]] = {
    "batching": ("continuous", "static"),
    "budget_order": ("decode_first", "prefill_first"),
    "allocator": ("paged", "reserve_max", "reserve_pow2", "reserve_oracle"),
    "prefix_cache": ("hash", "radix", "none"),
    "eviction": (None, "lru", "lfu", "fifo", "cost"),
    "scheduling_policy": ("fcfs", "priority", "sjf", "srpt", "longest_prefix_match", "fair"),
    "aging_s": (None, 6.0),
    "length_predictor": (None, "given", "oracle", "prompt_length", "constant"),
    "preemption_mode": ("recompute", "swap", "auto"),
    "num_swap_blocks": (None, 3, 200),
    "victim_policy": ("last_arrived", "longest_remaining", "most_blocks", "fewest_tokens_lost", "lowest_priority"),
    "enable_chunked_prefill": (True, False),
    "block_size": (1, 3, 4, 16),
    "watermark": (0.0, 0.2),
    "windows": ("full", "full+windowed", "windowed"),
}
"""Every field that chooses a policy, and some numbers that policies depend on; None is a field left unset.

All are fields of `EngineConfig` but `windows`, the kinds of the model's layers: see `cache_groups`. Without
`num_swap_blocks` there is no host memory.
"""

SEED = 14
CANDIDATES = 3
"""Rows tried for each row that is kept."""

_SIZES = {"num_blocks": 64, "max_model_len": 32}
"""Of the engine that is asked: large enough to hold anything."""


def engine_fields(row: Mapping[str, Value]) -> dict[str, object]:
    """The fields of `EngineConfig` that a row, or a part of one, stands for."""
    fields: dict[str, object] = {k: v for k, v in row.items() if k != "windows" and v is not None}
    if fields.get("preemption_mode", "recompute") != "recompute":
        fields.setdefault("num_swap_blocks", 0)
    return fields


def cache_groups(row: Mapping[str, Value], window: int = 5) -> tuple[CacheGroup, ...]:
    """The kinds of layers that a row stands for, of one head of one dimension."""
    full, windowed = CacheGroup(1, 1, 1), CacheGroup(2, 1, 1, sliding_window=window)
    return {"full": (full,), "full+windowed": (full, windowed), "windowed": (windowed,)}[row.get("windows", "full")]


def refusal(row: Mapping[str, Value]) -> str | None:
    """Why the config or the engine refuses a row, or a part of one with defaults for the rest; None if it is taken."""
    return _refusal(frozenset(row.items()))


@functools.cache
def _refusal(items: frozenset[tuple[str, Value]]) -> str | None:
    row = dict(items)
    try:
        host_engine(**_SIZES, groups=cache_groups(row), **engine_fields(row))
    except ValidationError as error:
        return str(error.errors()[0]["msg"])
    except ValueError as error:
        return str(error)
    return None


def pairs_of(row: Mapping[str, Value]) -> Iterator[Pair]:
    """Every two choices of a row."""
    return combinations(((name, row[name]) for name in DIMENSIONS if name in row), 2)


def all_pairs() -> Iterator[Pair]:
    """Every two values of every two dimensions."""
    for (first, values), (second, others) in combinations(DIMENSIONS.items(), 2):
        yield from (((first, value), (second, other)) for value, other in product(values, others))


def witness(pair: Pair) -> Row | None:
    """The pair, and the fewest other choices, two at most, with which it is taken; None if there are none.

    A refusal names one thing: a further choice that changes nothing about it is not followed up.
    """
    rows = [dict(pair)]
    for _ in range(3):
        for row in rows:
            if refusal(row) is None:
                return row
        rows = [
            more
            for row in rows
            for name, values in DIMENSIONS.items()
            for value in values
            if name not in row and refusal({name: value}) is None
            for more in [{**row, name: value}]
            if refusal(more) != refusal(row)
        ]
    return None


@functools.cache
def covering_array(seed: int = SEED) -> tuple[Row, ...]:
    """Rows in which every pair of values that can go together does, the same ones for the same seed."""
    rng = random.Random(seed)
    witnesses = {pair: found for pair in all_pairs() if (found := witness(pair)) is not None}
    uncovered = dict.fromkeys(witnesses)
    rows: list[Row] = []
    while uncovered:
        # what takes most company is the hardest to place: it comes first
        first = max(uncovered, key=lambda pair: len(witnesses[pair]))
        candidates = [_complete(witnesses[first], uncovered, rng) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda row: sum(pair in uncovered for pair in pairs_of(row)))
        for pair in pairs_of(best):
            uncovered.pop(pair, None)
        rows.append({name: best[name] for name in DIMENSIONS})
    return tuple(rows)


def _complete(part: Row, uncovered: Mapping[Pair, None], rng: random.Random) -> Row:
    """A whole row with these choices: dimension by dimension the value that covers most and is taken."""
    row = dict(part)
    names = [name for name in DIMENSIONS if name not in row]
    rng.shuffle(names)
    order = {name: place for place, name in enumerate(DIMENSIONS)}
    for name in names:
        gains = {}
        for value in DIMENSIONS[name]:
            pairs = (
                ((other, row[other]), (name, value))
                if order[other] < order[name]
                else ((name, value), (other, row[other]))
                for other in row
            )
            gains[value] = sum(pair in uncovered for pair in pairs) + rng.random()
        by_gain = sorted(gains, key=gains.__getitem__, reverse=True)
        row[name] = next(value for value in by_gain if refusal({**row, name: value}) is None)
    return row


def row_name(row: Mapping[str, Value]) -> str:
    """A row in short, for test ids: the choices that are not the defaults."""
    return "-".join(str(value) for key, value in row.items() if value != DIMENSIONS[key][0]) or "defaults"

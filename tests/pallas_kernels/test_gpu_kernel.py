"""What is special to the Mosaic GPU kernel: races, both ways into shared memory, split keys, layouts and refusals.

The interpreter simulates the TMA, barriers and warp groups, and takes seconds for each new shape: few and small ones.
"""

import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import gpu, reference
from pallas_kernels.paged_attention.gpu_plan import num_splits, plan_call
from pallas_kernels.paged_attention.shapes import AttentionShapes, attention_shapes

TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}
DTYPES = {name: jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")}


@dataclass(frozen=True)
class Case:
    """A call. `sequences` are (queries, keys)."""

    sequences: tuple[tuple[int, int], ...] = ((1, 5), (3, 150))
    block_size: int = 16
    head_dim: int = 64
    heads: tuple[int, int] = (2, 1)
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    table_width: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    by_head: bool = False
    """Whether there are sinks and slopes."""
    tiles: tuple[int, int] | None = None


CASES = {
    "tma": Case(),
    "tma_window_128_keys": Case(((1, 200), (40, 170)), window=90, heads=(3, 3), tiles=(20, 128), dtype="float16"),
    "tma_more_tiles_than_slots": Case(((1, 750),), head_dim=128),
    "repacked_page_5": Case(block_size=5, head_dim=80, by_head=True),
    "repacked_int8": Case(block_size=32, kv_dtype="int8", by_head=True, soft_cap=4.0, window=90),
    "repacked_fp8_page_1": Case(((1, 3), (2, 70)), block_size=1, kv_dtype="float8_e4m3fn"),
    "wide_head": Case(head_dim=256, by_head=True),
    "wide_head_float32": Case(((3, 40),), head_dim=200, dtype="float32", window=30),
    "float32_int8": Case(((1, 5), (3, 40)), block_size=12, dtype="float32", kv_dtype="int8", by_head=True),
    "split": Case(((1, 1100), (2, 30)), table_width=72, by_head=True),
    "split_wide_head": Case(((1, 1100), (1, 30)), table_width=72, head_dim=256, by_head=True),
}


def call_of(case: Case):
    """Arguments of the function, keywords for it, and the answer. NaN wherever no query looks."""
    rng = np.random.default_rng(0)
    num_heads, num_kv_heads = case.heads
    page_dim = -(-case.head_dim // 64) * 64
    width = case.table_width or 1 + max(-(-keys // case.block_size) for _, keys in case.sequences)
    rows = len(case.sequences) + 1
    blocks_per_layer = 2 + rows * width
    dtype, kv_dtype = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    quantized = kv_dtype.itemsize == 1
    table = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    pages = rng.standard_normal((2 * blocks_per_layer, case.block_size, 2 * num_kv_heads, page_dim))
    pages[..., case.head_dim :] = 0
    if kv_dtype == jnp.int8:
        pages = np.clip(np.round(pages * 40), -127, 127)
    scales = rng.uniform(0.5, 1.5, pages.shape[:3]) / (40 if kv_dtype == jnp.int8 else 1)
    used = np.zeros(pages.shape[:2], bool)
    for s, (queries, keys) in enumerate(case.sequences):
        seen = np.arange(max(0, keys - queries + 1 - case.window) if case.window else 0, keys)
        used[blocks_per_layer + table[s, seen // case.block_size], seen % case.block_size] = True
    hidden = np.where(used[:, :, None], scales, np.nan)
    if kv_dtype != jnp.int8:
        pages = np.where(used[:, :, None, None], pages, np.nan)
    q_lens = [queries for queries, _ in case.sequences]
    total = sum(q_lens)
    arguments = (
        jnp.asarray(rng.standard_normal((total + 2, num_heads, case.head_dim)), jnp.float32).astype(dtype),
        jnp.asarray(pages, jnp.float32).astype(kv_dtype),
        jnp.asarray([keys for _, keys in case.sequences] + [0], jnp.int32),
        jnp.asarray(table),
        jnp.asarray(np.cumsum([0, *q_lens, 0]), jnp.int32),
        jnp.asarray([len(q_lens)], jnp.int32),
    )
    options = {
        "layer": 1,
        "blocks_per_layer": blocks_per_layer,
        "num_kv_heads": num_kv_heads,
        "scale": case.head_dim**-0.5,
        "sliding_window": case.window,
        "logit_soft_cap": case.soft_cap,
        "sinks": jnp.asarray(rng.standard_normal(num_heads), jnp.float32) if case.by_head else None,
        "alibi_slopes": jnp.asarray(0.05 * rng.standard_normal(num_heads), jnp.float32) if case.by_head else None,
        "kv_scales": jnp.asarray(hidden, jnp.float32) if quantized else None,
    }
    exact = (arguments[0].astype(jnp.float32), *arguments[1:])
    expected = jax.jit(lambda *args: reference.ragged_paged_attention(*args, **options))(*exact)
    return arguments, options, np.asarray(expected), total


def shapes_of(arguments, num_kv_heads: int) -> AttentionShapes:
    q, pages, _, table, _, _ = arguments
    return attention_shapes(q, pages, table, num_kv_heads)


class TestInterpreted:
    @pytest.mark.parametrize("name", CASES)
    def test_is_the_specification_and_has_no_races(self, name):
        case = CASES[name]
        arguments, options, expected, total = call_of(case)
        shapes = shapes_of(arguments, case.heads[1])
        assert gpu.refusal(shapes, case.tiles) is None
        plan = plan_call(shapes, case.tiles)
        assert plan.splits == (2 if name.startswith("split") else 1)
        assert plan.repack == name.startswith("repacked")
        assert plan.wgmma == ("float32" not in name)
        run = jax.jit(
            lambda *args: gpu.ragged_paged_attention(
                *args, **options, tiles=case.tiles, interpret=plgpu.InterpretGPUParams(detect_races=True)
            )
        )
        got = np.asarray(run(*arguments).astype(jnp.float32))
        np.testing.assert_allclose(got[:total], expected[:total], rtol=0, atol=TOLERANCE[case.dtype])


class TestSplitKeys:
    def test_parts_merge_into_the_whole(self):
        rng = np.random.default_rng(1)
        scores, values = rng.standard_normal((2, 3, 64, 30)), rng.standard_normal((2, 3, 30, 8))
        outs, rows = [], []
        for keys in (slice(0, 7), slice(7, 30)):
            peak = scores[..., keys].max(-1)
            weights = np.exp2(scores[..., keys] - peak[..., None])
            outs.append(weights @ values[..., keys, :])
            rows.append(np.stack([peak, weights.sum(-1)], axis=-2))
        outs.append(np.full_like(outs[0], np.nan))
        rows.append(np.stack([np.full_like(peak, -1e30), np.zeros_like(peak)], axis=-2))
        merged = gpu.merge_parts(jnp.asarray(np.stack(outs), jnp.float32), jnp.asarray(np.stack(rows), jnp.float32))
        weights = np.exp2(scores)
        np.testing.assert_allclose(merged, weights @ values / weights.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)

    def test_only_few_and_long_sequences_are_split(self):
        assert num_splits(64, 8, 256, 16, 64) == 1  # the device is full
        assert num_splits(1, 8, 8, 16, 64) == 1  # there is nothing to share
        assert num_splits(1, 8, 2048, 16, 64) == 33  # two blocks for each multiprocessor
        assert num_splits(1, 8, 128, 16, 64) == 4


SHAPES = AttentionShapes(
    num_tokens=64,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype=DTYPES["bfloat16"],
    num_sequences=64,
    table_width=256,
    num_pages=1000,
    block_size=16,
    page_rows=16,
    page_head_dim=128,
    kv_dtype=DTYPES["bfloat16"],
)


class TestPlan:
    def test_every_documented_shape_is_served(self):
        head_dims, block_sizes = (64, 80, 96, 112, 128, 192, 256), (1, 5, 7, 8, 12, 16, 24, 64, 128, 512)
        for dtype, kv_dtype, head_dim, block_size in itertools.product(
            ("bfloat16", "float16", "float32"), DTYPES, head_dims, block_sizes
        ):
            shapes = replace(
                SHAPES,
                dtype=DTYPES[dtype],
                kv_dtype=DTYPES[kv_dtype],
                head_dim=head_dim,
                page_head_dim=-(-head_dim // 64) * 64,
                block_size=block_size,
            )
            assert gpu.refusal(shapes, None) is None
            plan = plan_call(shapes, None)
            assert plan.key_tile % plan.unit == 0
            assert block_size % plan.unit == 0
            # The TMA wants copies of whole 128 bytes, and of whole groups of 8 tokens if it swizzles.
            assert plan.unit * 2 * plan.head_dim * plan.kv_dtype.itemsize % 128 == 0
            assert plan.reads_raw or plan.unit % 8 == 0

    def test_a_decode_of_common_shape_keeps_enough_bytes_on_the_way(self):
        plan = plan_call(SHAPES, None)
        assert plan.stages * 2 * plan.key_tile * plan.head_dim * plan.kv_dtype.itemsize >= 128 * 1024
        assert not plan.reads_raw

    @pytest.mark.parametrize(
        ("changes", "tiles", "sentence"),
        [
            ({"dtype": jnp.dtype("float64")}, None, "cast them"),
            ({"kv_dtype": jnp.dtype("uint8")}, None, "convert the pages"),
            ({"num_heads": 65 * 8}, None, "at most 64 query heads"),
            ({"head_dim": 96, "page_head_dim": 96}, None, 'allocate the pages with page_shape("gpu", ...)'),
            ({"head_dim": 320, "page_head_dim": 320}, None, "at most 256 elements"),
            ({}, (17, 64), "1 to 16 query tokens, not 17"),
            ({}, (0, 64), "1 to 16 query tokens, not 0"),
            ({}, (16, 32), "64 or 128 tokens, not 32"),
            ({"page_head_dim": 256}, (16, 128), "choose tiles with fewer keys"),
            (
                {"page_head_dim": 256, "dtype": DTYPES["float32"], "kv_dtype": DTYPES["float32"]},
                (16, 128),
                "choose tiles with fewer keys",
            ),
        ],
    )
    def test_refusals_name_the_limit_and_the_remedy(self, changes, tiles, sentence):
        problem = gpu.refusal(replace(SHAPES, **changes), tiles)
        assert problem is not None
        assert sentence in problem

    def test_tiles_of_the_caller(self):
        assert gpu.refusal(SHAPES, (1, 128)) is None
        plan = plan_call(SHAPES, (4, 128))
        assert (plan.query_tokens, plan.key_tile) == (4, 128)
        assert plan.unit == math.gcd(16, 128)

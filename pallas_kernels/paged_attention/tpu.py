"""Ragged paged attention as one Mosaic TPU kernel.

One launch and one program: a flat loop over (query tile, key tile) steps with online softmax (Milakov and Gimelshein,
2018). Each step first starts the copies of the next one, of the next query tile's first keys too, so that the copies
never wait for a sequence to end; chunks of prefill and decodes go through the same loop.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_pages.shape import page_shape
from pallas_kernels.paged_attention.query_tiles import (
    head_rows,
    make_query_tiles,
    num_query_tiles,
    sequence_scales,
    take_tokens,
)
from pallas_kernels.paged_attention.shapes import AttentionShapes, attention_shapes
from pallas_kernels.paged_attention.tiles import DEFAULT_TILES
from pallas_kernels.paged_attention.tpu_kernel import LANES, LOWEST, attention_kernel

PAGE_TYPES = (jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn)
MATRIX_ROWS = 128
"""Rows of queries that fill the matrix unit."""
VMEM_BUDGET = 32 * 2**20
"""Bytes of buffers a call may need, out of VMEM_LIMIT; the rest is the compiler's. The chips have 64 or 128 MiB."""
VMEM_LIMIT = 48 * 2**20
SMEM_BUDGET = 960 * 2**10
"""Bytes of block tables and tile metadata a call may need, out of the scalar memory's 1 MiB."""


class _Plan(NamedTuple):
    """The static sizes of one call."""

    compute_dtype: jnp.dtype
    tokens_per_tile: int
    num_tiles: int
    rows: int
    """Of a query tile: tokens_per_tile * G, padded to whole registers."""
    decode_rows: int
    """Of a tile with one token."""
    key_tile: int
    """Tokens of a key tile: whole pages where a page fits."""
    key_lanes: int
    """key_tile, padded to whole registers; what is past it is zero in the buffers and masked in the scores."""
    unit: int
    """Tokens of one copy."""
    scale_rows: int
    """Rows of a tile of scales: keys' and values' heads, padded."""


def _plan(shapes: AttentionShapes, tiles: tuple[int, int] | None) -> _Plan:
    """The sizes for tiles of (query, key) tokens; None: the largest of the default and smaller ones that fit VMEM."""
    if tiles is not None:
        return _plan_of_tiles(shapes, *tiles)
    query_tokens, key_tokens = DEFAULT_TILES["mosaic_tpu"]
    # As many tokens as sequences are most often decodes only. Chunks among them are served too, slowly: each of their
    # queries reads the keys for itself.
    is_decode = shapes.num_tokens == shapes.num_sequences
    query_tokens = 1 if is_decode else query_tokens or max(1, MATRIX_ROWS // shapes.group)
    for shrunk in (1, 2, 4, 8):
        plan = _plan_of_tiles(shapes, max(1, query_tokens // shrunk), max(LANES, key_tokens // shrunk))
        if _vmem_bytes(shapes, plan) <= VMEM_BUDGET:
            break
    return plan


def _plan_of_tiles(shapes: AttentionShapes, query_tokens: int, key_tokens: int) -> _Plan:
    # queries of float16, a type that the chip does not have, become float32 outside the kernel
    both_bfloat16 = shapes.dtype == jnp.bfloat16 and (shapes.is_quantized or shapes.kv_dtype == jnp.bfloat16)
    compute_dtype = jnp.dtype(jnp.bfloat16 if both_bfloat16 else jnp.float32)
    sublanes = 16 if both_bfloat16 else 8
    tokens_per_tile = min(query_tokens, shapes.num_tokens)
    key_tile = key_tokens // shapes.block_size * shapes.block_size or key_tokens
    return _Plan(
        compute_dtype=compute_dtype,
        tokens_per_tile=tokens_per_tile,
        num_tiles=num_query_tiles(shapes.num_tokens, shapes.num_sequences, tokens_per_tile),
        rows=_round_up(tokens_per_tile * shapes.group, sublanes),
        decode_rows=_round_up(shapes.group, sublanes),
        key_tile=key_tile,
        key_lanes=_round_up(key_tile, LANES),
        unit=math.gcd(shapes.block_size, key_tile),
        scale_rows=_round_up(2 * shapes.num_kv_heads, 8),
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _vmem_bytes(shapes: AttentionShapes, plan: _Plan) -> int:
    heads, rows, lanes = shapes.num_kv_heads, plan.rows, shapes.page_head_dim
    keys = 2 * plan.key_lanes * max(shapes.page_rows, 8) * lanes * shapes.kv_dtype.itemsize
    queries_and_outputs = 4 * heads * rows * lanes * plan.compute_dtype.itemsize
    sums = heads * rows * (lanes + 2 * LANES) * 4
    by_row = (1 + 2 * heads) * rows * LANES * 4  # tokens, sinks, slopes
    scales = 2 * plan.scale_rows * plan.key_lanes * 4 if shapes.is_quantized else 0
    working = 4 * rows * plan.key_lanes * 4 + 2 * plan.key_lanes * lanes * 4
    return keys + queries_and_outputs + sums + by_row + scales + working


def _smem_bytes(shapes: AttentionShapes, plan: _Plan) -> int:
    return sum(_round_up(4 * n, 1024) for n in (shapes.num_sequences * shapes.table_width, *[plan.num_tiles] * 3, 4))


def refusal(shapes: AttentionShapes, tiles: tuple[int, int] | None) -> str | None:
    """Why this kernel cannot serve a call of these shapes: one sentence with the limit and the remedy, or None."""
    wanted = page_shape(
        "tpu",
        block_size=shapes.block_size,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        dtype=shapes.kv_dtype,
    )
    if (shapes.page_rows, shapes.page_head_dim) != wanted[1:]:
        return (
            f"its pages have {wanted[1]} rows of {wanted[2]} elements a token where these have {shapes.page_rows} of "
            f"{shapes.page_head_dim}: allocate them with the shape that page_shape('tpu', ...) returns"
        )
    if shapes.kv_dtype not in PAGE_TYPES:
        return (
            f"pages of {shapes.kv_dtype} are none that a TPU's vector unit loads: "
            f"use pages of {', '.join(str(jnp.dtype(t)) for t in PAGE_TYPES)}"
        )
    plan = _plan(shapes, tiles)
    smem = _smem_bytes(shapes, plan)
    if smem > SMEM_BUDGET:
        return (
            f"block tables of {shapes.num_sequences} sequences of {shapes.table_width} blocks, and the query tiles' "
            f"metadata, need {smem} bytes of scalar memory (SMEM) of the {SMEM_BUDGET} there are: use a larger "
            "block_size, fewer sequences or a shorter max_model_len"
        )
    vmem = _vmem_bytes(shapes, plan)
    if vmem > VMEM_BUDGET:
        return (
            f"its buffers need {vmem} bytes of vector memory (VMEM) of the {VMEM_BUDGET} there are, with tiles of "
            f"{plan.tokens_per_tile} query and {plan.key_tile} key tokens: pass smaller tiles, or use fewer heads"
        )
    return None


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
    interpret,
):
    """See `pallas_kernels.paged_attention.api.ragged_paged_attention`."""
    shapes = attention_shapes(q, kv_pages, block_tables, num_kv_heads)
    plan = _plan(shapes, tiles)
    lanes = shapes.page_head_dim
    query_tiles = make_query_tiles(
        q.astype(plan.compute_dtype),
        kv_lens,
        cu_q_lens,
        num_seqs,
        num_kv_heads=num_kv_heads,
        tokens_per_tile=plan.tokens_per_tile,
        num_rows=plan.rows,
        head_dim=lanes,
        sliding_window=sliding_window,
    )
    first_steps = query_tiles.key_begins // plan.key_tile
    steps = -(-query_tiles.key_ends // plan.key_tile) - first_steps
    is_real = query_tiles.num_tokens > 0
    scalars = (
        layer * blocks_per_layer,
        0 if sliding_window is None else sliding_window,
        jnp.sum(steps, where=is_real),
        jnp.sum(is_real),
    )
    by_row = functools.partial(
        head_rows, num_kv_heads=num_kv_heads, tokens_per_tile=plan.tokens_per_tile, num_rows=plan.rows
    )
    # a value of each row, in all lanes: vectors of integers are not divided on the chip
    operands = {"row_tokens": _in_all_lanes(jnp.arange(plan.rows, dtype=jnp.int32) // shapes.group)}
    if sinks is not None:
        operands["sinks"] = _in_all_lanes(jnp.maximum(by_row(sinks), LOWEST))
    if alibi_slopes is not None:
        operands["slopes"] = _in_all_lanes(by_row(alibi_slopes))
    scratch = {
        "q_buffer": pltpu.VMEM((2, num_kv_heads, plan.rows, lanes), plan.compute_dtype),
        "out_buffer": pltpu.VMEM((2, num_kv_heads, plan.rows, lanes), plan.compute_dtype),
        "kv_buffer": pltpu.VMEM((2, plan.key_lanes, *kv_pages.shape[2:]), kv_pages.dtype),
        "peak": pltpu.VMEM((num_kv_heads, plan.rows, LANES), jnp.float32),
        "total": pltpu.VMEM((num_kv_heads, plan.rows, LANES), jnp.float32),
        "sum": pltpu.VMEM((num_kv_heads, plan.rows, lanes), jnp.float32),
        "q_arrived": pltpu.SemaphoreType.DMA((2,)),
        "out_left": pltpu.SemaphoreType.DMA((2,)),
        "kv_arrived": pltpu.SemaphoreType.DMA((2,)),
    }
    in_hbm = {"q_tiles": query_tiles.q, "kv_pages": kv_pages}
    if kv_scales is not None:
        in_hbm["scales"] = _scale_tiles(kv_scales, kv_lens, block_tables, plan, num_kv_heads, layer, blocks_per_layer)
        scratch["scale_buffer"] = pltpu.VMEM((2, plan.scale_rows, plan.key_lanes), jnp.float32)
        scratch["scales_arrived"] = pltpu.SemaphoreType.DMA((2,))
    prefetched = {
        "scalars": jnp.stack([jnp.asarray(x, jnp.int32) for x in scalars]),
        "sequences": query_tiles.sequences,
        "first_positions": query_tiles.first_positions,
        "num_tokens": query_tiles.num_tokens,
        "block_tables": block_tables.astype(jnp.int32).reshape(-1),
    }
    names = (*prefetched, *in_hbm, *operands, "out_tiles", *scratch)
    out = pl.pallas_call(
        functools.partial(
            attention_kernel,
            names=names,
            plan=plan,
            table_width=shapes.table_width,
            block_size=shapes.block_size,
            scale=scale,
            has_window=sliding_window is not None,
            soft_cap=logit_soft_cap,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(in_hbm)
            + [pl.BlockSpec(memory_space=pltpu.VMEM)] * len(operands),
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=jax.ShapeDtypeStruct(query_tiles.q.shape, plan.compute_dtype),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_LIMIT),
        interpret=interpret,
        name="ragged_paged_attention",
    )(*prefetched.values(), *in_hbm.values(), *operands.values())
    return take_tokens(
        out.astype(q.dtype),
        query_tiles,
        num_heads=shapes.num_heads,
        tokens_per_tile=plan.tokens_per_tile,
        head_dim=shapes.head_dim,
    )


def _in_all_lanes(values):
    return jnp.broadcast_to(values[..., None], (*values.shape, LANES))


def _scale_tiles(kv_scales, kv_lens, block_tables, plan, num_kv_heads, layer, blocks_per_layer):
    """Scales as [S, key tiles of a sequence, rows, key_lanes]: one copy brings those of a key tile."""
    scales = sequence_scales(
        kv_scales,
        kv_lens,
        block_tables,
        num_kv_heads=num_kv_heads,
        key_tile=plan.key_tile,
        layer=layer,
        blocks_per_layer=blocks_per_layer,
    )
    scales = scales.reshape(scales.shape[0], 2 * num_kv_heads, -1, plan.key_tile).transpose(0, 2, 1, 3)
    rows, lanes = plan.scale_rows - 2 * num_kv_heads, plan.key_lanes - plan.key_tile
    return jnp.pad(scales, ((0, 0), (0, 0), (0, rows), (0, lanes)))

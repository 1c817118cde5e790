"""Ragged paged attention as one Mosaic TPU kernel.

One launch and one program: a flat loop over (query tile, key tile) steps with online softmax (Milakov and Gimelshein,
2018). Each step first starts the copies of the next one, of the next query tile's first keys too, so that the copies
never wait for a sequence to end; chunks of prefill and decodes go through the same loop.
"""

import functools
import math
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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

LANES = 128
MATRIX_ROWS = 128
"""Rows of queries that fill the matrix unit."""
ZEROED_AT_ONCE = 16
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
    query_tokens, key_tokens = tiles or DEFAULT_TILES["mosaic_tpu"]
    # 16-bit floats other than bfloat16 are none of the matrix unit's types
    both_bfloat16 = shapes.dtype == jnp.bfloat16 and (shapes.is_quantized or shapes.kv_dtype == jnp.bfloat16)
    compute_dtype = jnp.dtype(jnp.bfloat16 if both_bfloat16 else jnp.float32)
    sublanes = 16 if both_bfloat16 else 8
    group = shapes.group
    if shapes.num_tokens == shapes.num_sequences:  # decodes only, but for padding
        tokens_per_tile = 1
    else:
        tokens_per_tile = min(query_tokens or max(1, MATRIX_ROWS // group), shapes.num_tokens)
    block_size = shapes.block_size
    key_tile = key_tokens // block_size * block_size or key_tokens
    return _Plan(
        compute_dtype=compute_dtype,
        tokens_per_tile=tokens_per_tile,
        num_tiles=num_query_tiles(shapes.num_tokens, shapes.num_sequences, tokens_per_tile),
        rows=_round_up(tokens_per_tile * group, sublanes),
        decode_rows=_round_up(group, sublanes),
        key_tile=key_tile,
        key_lanes=_round_up(key_tile, LANES),
        unit=math.gcd(block_size, key_tile),
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
        operands["sinks"] = _in_all_lanes(by_row(sinks))
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
            _kernel,
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


def _kernel(*refs, names, plan, table_width, block_size, scale, has_window, soft_cap):
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    layer_start, window, num_steps = (r.scalars[i] for i in range(3))
    num_kv_heads, num_rows, lanes = r.q_buffer.shape[1:]
    key_tile, key_lanes, unit = plan.key_tile, plan.key_lanes, plan.unit
    has_scales, has_sinks, has_slopes = ("scales" in names, "sinks" in names, "slopes" in names)
    precision = lax.Precision.HIGHEST if plan.compute_dtype == jnp.float32 else lax.Precision.DEFAULT

    def first_position_seen(tile):
        return jnp.maximum(r.first_positions[tile] - window + 1, 0) if has_window else jnp.int32(0)

    def end_of_keys(tile):
        return r.first_positions[tile] + r.num_tokens[tile]

    def places_seen(tile, step):
        """Which places [begin, end) of key tile `step` any query of the tile sees."""
        origin = step * key_tile
        return (
            jnp.maximum(first_position_seen(tile) - origin, 0),
            jnp.minimum(end_of_keys(tile) - origin, key_tile),
        )

    def copy_keys(tile, step, slot, act):
        sequence = r.sequences[tile]
        begin, end = places_seen(tile, step)

        def copy_unit(i, _):
            position = step * key_tile + i * unit
            block = r.block_tables[sequence * table_width + lax.div(position, jnp.int32(block_size))]
            source = r.kv_pages.at[layer_start + block, pl.ds(lax.rem(position, jnp.int32(block_size)), unit)]
            target = r.kv_buffer.at[slot, pl.ds(i * unit, unit)]
            act(pltpu.make_async_copy(source, target, r.kv_arrived.at[slot]))

        lax.fori_loop(lax.div(begin, jnp.int32(unit)), lax.div(end + (unit - 1), jnp.int32(unit)), copy_unit, None)
        if has_scales:
            source, target = r.scales.at[sequence, step], r.scale_buffer.at[slot]
            act(pltpu.make_async_copy(source, target, r.scales_arrived.at[slot]))

    def by_size(tile, act):
        """Act on the rows that are in use: in a launch of chunks, a tile with one token has few."""
        if plan.decode_rows >= num_rows:
            act(num_rows)
            return
        is_decode = r.num_tokens[tile] == 1
        pl.when(is_decode)(lambda: act(plan.decode_rows))
        pl.when(jnp.logical_not(is_decode))(lambda: act(num_rows))

    def copy_queries(tile, act):
        def copy(rows):
            source = r.q_tiles.at[tile, :, pl.ds(0, rows)]
            target = r.q_buffer.at[tile % 2, :, pl.ds(0, rows)]
            act(pltpu.make_async_copy(source, target, r.q_arrived.at[tile % 2]))

        by_size(tile, copy)

    def copy_outputs(tile, act):
        def copy(rows):
            source = r.out_buffer.at[tile % 2, :, pl.ds(0, rows)]
            target = r.out_tiles.at[tile, :, pl.ds(0, rows)]
            act(pltpu.make_async_copy(source, target, r.out_left.at[tile % 2]))

        by_size(tile, copy)

    def zero_places(slot, begin, end):
        """Zero what no query of the tile sees, since 0 times a NaN is NaN."""
        whole = ZEROED_AT_ONCE

        def zero_one(i, _):
            r.kv_buffer[slot, i] = jnp.zeros(r.kv_buffer.shape[2:], r.kv_buffer.dtype)

        def zero_many(i, _):
            at = pl.ds(pl.multiple_of(i * whole, whole), whole)
            r.kv_buffer[slot, at] = jnp.zeros((whole, *r.kv_buffer.shape[2:]), r.kv_buffer.dtype)

        before, after = begin // whole, (end + whole - 1) // whole
        lax.fori_loop(0, before, zero_many, None)
        lax.fori_loop(before * whole, begin, zero_one, None)
        lax.fori_loop(end, after * whole, zero_one, None)
        lax.fori_loop(after, key_lanes // whole, zero_many, None)

    def begin_tile(tile):
        def clear(rows):
            for h in range(num_kv_heads):
                at = (h, pl.ds(0, rows))
                # finite, so that a row that sees no key of a key tile adds exp(-inf - peak) = 0
                lowest = jnp.full((rows, LANES), jnp.finfo(jnp.float32).min, jnp.float32)
                r.peak[at] = r.sinks[at] if has_sinks else lowest
                r.total[at] = jnp.full((rows, LANES), 1.0 if has_sinks else 0.0, jnp.float32)
                r.sum[at] = jnp.zeros((rows, lanes), jnp.float32)

        copy_queries(tile, wait)
        by_size(tile, clear)

    def attend(tile, step, slot, rows):
        places = lax.broadcasted_iota(jnp.int32, (rows, key_lanes), 1)
        positions = r.first_positions[tile] + r.row_tokens[pl.ds(0, rows), :1]
        distances = step * key_tile + places - positions
        visible = distances <= 0
        if has_window:
            visible &= distances > -window
        if key_lanes > key_tile:
            visible &= places < key_tile
        if has_scales:
            begin, end = places_seen(tile, step)
            seen = (places[:1] >= begin) & (places[:1] < end)
        for h in range(num_kv_heads):
            at = (h, pl.ds(0, rows))
            scores = _product(r.q_buffer[tile % 2, h, pl.ds(0, rows)], keys(slot, 2 * h), 1, precision) * scale
            if has_scales:
                scores = scores * r.scale_buffer[slot, pl.ds(h, 1)]
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            if has_slopes:
                scores = scores + r.slopes[at][:, :1] * distances.astype(jnp.float32)
            scores = jnp.where(visible, scores, -jnp.inf)
            old_peak = r.peak[at]
            peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - peak[:, :1])
            rescale = jnp.exp(old_peak - peak)
            r.peak[at] = peak
            r.total[at] = r.total[at] * rescale + jnp.sum(weights, axis=1, keepdims=True)
            if has_scales:
                weights = weights * jnp.where(seen, r.scale_buffer[slot, pl.ds(num_kv_heads + h, 1)], 0.0)
            part = _product(weights.astype(plan.compute_dtype), keys(slot, 2 * h + 1), 0, precision)
            r.sum[at] = r.sum[at] * rescale[:, :1] + part

    def keys(slot, row):
        """The keys, or values, of a head in the compute type."""
        return _convert(r.kv_buffer[slot, :, row], plan.compute_dtype)

    def end_tile(tile):
        # the buffer is free once the outputs of the tile before the last have left
        pl.when(tile >= 2)(lambda: copy_outputs(tile - 2, wait))

        def divide(rows):
            for h in range(num_kv_heads):
                at = (h, pl.ds(0, rows))
                r.out_buffer[tile % 2, h, pl.ds(0, rows)] = (r.sum[at] / r.total[at][:, :1]).astype(plan.compute_dtype)

        by_size(tile, divide)
        copy_outputs(tile, start)

    def first_step(tile):
        return first_position_seen(tile) // key_tile

    def start_step(tile, step, slot, is_first):
        pl.when(is_first)(lambda: copy_queries(tile, start))
        copy_keys(tile, step, slot, start)

    def one_step(i, state):
        tile, step = state
        slot = i % 2
        is_last = (step + 1) * key_tile >= end_of_keys(tile)
        next_tile = jnp.minimum(tile + is_last.astype(jnp.int32), plan.num_tiles - 1)
        next_step = jnp.where(is_last, first_step(next_tile), step + 1)
        pl.when(i + 1 < num_steps)(lambda: start_step(next_tile, next_step, 1 - slot, is_last))
        pl.when(step == first_step(tile))(lambda: begin_tile(tile))
        copy_keys(tile, step, slot, wait)
        zero_places(slot, *places_seen(tile, step))
        by_size(tile, lambda rows: attend(tile, step, slot, rows))
        pl.when(is_last)(lambda: end_tile(tile))
        return next_tile, next_step

    pl.when(num_steps > 0)(lambda: start_step(jnp.int32(0), first_step(0), 0, True))
    lax.fori_loop(0, num_steps, one_step, (jnp.int32(0), first_step(0)))
    num_tiles = r.scalars[3]
    for back in (2, 1):
        pl.when(num_tiles >= back)(lambda back=back: copy_outputs(num_tiles - back, wait))


def _product(a, b, contracted, precision):
    dimensions = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _convert(values, dtype):
    return values.astype(dtype)


def start(copy):
    """Start a copy."""
    copy.start()


def wait(copy):
    """Wait for a copy."""
    copy.wait()

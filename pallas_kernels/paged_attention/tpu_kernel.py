"""The body of the TPU kernel of ragged paged attention; `tpu.py` sizes its buffers and launches it."""

from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
LOWEST = float(jnp.finfo(jnp.float32).min)
ZEROED_AT_ONCE = 16
"""Tokens; divides LANES."""


def attention_kernel(*refs, names, plan, table_width, block_size, scale, has_window, soft_cap):
    """Attend to all tiles in one flat loop of (query tile, key tile) steps.

    `refs` are named by `names`: what is in scalar memory, in HBM, whole in VMEM, the output, and scratch. Two slots of
    every buffer take turns: a step copies into one while the one before computes on the other.
    """
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    layer_start, window, num_steps = (r.scalars[i] for i in range(3))
    num_kv_heads, num_rows, lanes = r.q_buffer.shape[1:]
    key_tile, key_lanes, unit = plan.key_tile, plan.key_lanes, plan.unit
    has_scales, has_sinks, has_slopes = ("scales" in names, "sinks" in names, "slopes" in names)
    # each head of few is compiled by itself, many in a loop: the compiler's time grows with what it unrolls
    heads_at_once = num_kv_heads if num_kv_heads <= 8 else 4
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

    def for_heads(act):
        """Act on each head, given by its number, its group's, and its place in the group."""

        def act_on_group(group, _):
            for place in range(heads_at_once):
                act(group * heads_at_once + place, group, place)

        if heads_at_once == num_kv_heads:
            act_on_group(0, None)
            return
        groups, rest = divmod(num_kv_heads, heads_at_once)
        lax.fori_loop(0, groups, act_on_group, None)
        for place in range(rest):
            act(groups * heads_at_once + place, groups, place)

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
                lowest = jnp.full((rows, LANES), LOWEST, jnp.float32)
                r.peak[at] = r.sinks[at] if has_sinks else lowest
                r.total[at] = jnp.full((rows, LANES), 1.0 if has_sinks else 0.0, jnp.float32)
                r.sum[at] = jnp.zeros((rows, lanes), jnp.float32)

        copy_queries(tile, _wait)
        by_size(tile, clear)

    def row_of_keys(slot, group, row):
        """Keys, or values, of a head: a row of its group's."""
        rows = r.kv_buffer.at[slot]
        if heads_at_once < num_kv_heads:
            first = pl.multiple_of(jnp.int32(2 * heads_at_once) * group, 2 * heads_at_once)
            rows = rows.at[:, pl.ds(first, 2 * heads_at_once)]
        return rows[:, row].astype(plan.compute_dtype)

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

        def attend_head(h, group, place):
            at = (h, pl.ds(0, rows))
            queries = r.q_buffer[tile % 2, h, pl.ds(0, rows)]
            scores = _product(queries, row_of_keys(slot, group, 2 * place), 1, precision) * scale
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
            part = _product(weights.astype(plan.compute_dtype), row_of_keys(slot, group, 2 * place + 1), 0, precision)
            r.sum[at] = r.sum[at] * rescale[:, :1] + part

        for_heads(attend_head)

    def end_tile(tile):
        # the buffer is free once the outputs of the tile before the last have left
        pl.when(tile >= 2)(lambda: copy_outputs(tile - 2, _wait))

        def divide(rows):
            for h in range(num_kv_heads):
                at = (h, pl.ds(0, rows))
                r.out_buffer[tile % 2, h, pl.ds(0, rows)] = (r.sum[at] / r.total[at][:, :1]).astype(plan.compute_dtype)

        by_size(tile, divide)
        copy_outputs(tile, _start)

    def first_step(tile):
        return first_position_seen(tile) // key_tile

    def start_step(tile, step, slot, is_first):
        pl.when(is_first)(lambda: copy_queries(tile, _start))
        copy_keys(tile, step, slot, _start)

    def one_step(i, state):
        tile, step = state
        slot = i % 2
        is_last = (step + 1) * key_tile >= end_of_keys(tile)
        next_tile = jnp.minimum(tile + is_last.astype(jnp.int32), plan.num_tiles - 1)
        next_step = jnp.where(is_last, first_step(next_tile), step + 1)
        pl.when(i + 1 < num_steps)(lambda: start_step(next_tile, next_step, 1 - slot, is_last))
        pl.when(step == first_step(tile))(lambda: begin_tile(tile))
        copy_keys(tile, step, slot, _wait)
        zero_places(slot, *places_seen(tile, step))
        by_size(tile, lambda rows: attend(tile, step, slot, rows))
        pl.when(is_last)(lambda: end_tile(tile))
        return next_tile, next_step

    pl.when(num_steps > 0)(lambda: start_step(jnp.int32(0), first_step(0), 0, True))
    lax.fori_loop(0, num_steps, one_step, (jnp.int32(0), first_step(0)))
    num_tiles = r.scalars[3]
    for back in (2, 1):
        pl.when(num_tiles >= back)(lambda back=back: copy_outputs(num_tiles - back, _wait))


def _product(a, b, contracted, precision):
    dimensions = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _start(copy):
    copy.start()


def _wait(copy):
    copy.wait()

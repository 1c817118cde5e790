"""The body of the Mosaic GPU attention kernel: one query tile, one KV head, one part of its keys.

The last warp group is the producer: it looks pages up and has the TMA copy key tiles into a ring of shared memory. Two
others are consumers, with an online softmax in base 2 (Milakov and Gimelshein, 2018; Dao, 2023), so that the products
of one overlap the exponentials of the other. Up to 192 elements a head, they take turns with the tiles, and in the end
the first takes over what the second has. Wider outputs do not fit into registers: there both see every tile, and each
accumulates half of the columns.

Key tiles arrive in units of `unit` tokens, which never straddle a page. Units without a visible key are not copied: the
producer arrives in their place, so that every tile is the same number of arrivals.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_fold import (
    BY_ROW,
    LOG2_E,
    WIDE,
    across,
    constant,
    fold_keys,
    fold_tile,
    meet,
    own_piece,
)
from pallas_kernels.paged_attention.gpu_plan import NUM_CONSUMERS, NUM_KEYS, NUM_ROWS

LOOKUPS = 4
"""Table entries that the producer has on the way at once."""
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
LOW = -1e30
"""The running maximum before the first key: finite, so that a masked score (-inf) is always farther away."""


class Span(NamedTuple):
    """Scalars of this block: which queries and keys it looks at."""

    tile: Any
    head: Any
    sequence: Any
    first: Any
    begin: Any
    end: Any
    first_row: Any
    window: Any
    key_tile: Any
    steps: Any


def attend(plan, refs, *outs, **scratch):
    """The kernel: `refs` are the inputs by name, then the outputs, the scratch by name."""
    meta = refs["meta"]
    tile, head, split = lax.axis_index("tile"), lax.axis_index("head"), lax.axis_index("split")
    sequence, first, count, begin, end, first_row, window = (meta[tile, i] for i in range(7))
    key_tile = lax.div(begin, jnp.int32(plan.key_tile))
    num_key_tiles = pl.cdiv(end, plan.key_tile) - key_tile
    share = pl.cdiv(num_key_tiles, plan.splits)
    steps = jnp.clip(num_key_tiles - split * share, 0, share)
    span = Span(
        tile, head, sequence, first, begin, end, first_row, window, key_tile=key_tile + split * share, steps=steps
    )
    thread = lax.axis_index("thread")

    @pl.when((steps > 0) & (count > 0) & (thread == NUM_CONSUMERS))
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        _produce_tiles(plan, span, refs, scratch)

    @pl.when((steps > 0) & (count > 0) & (thread < NUM_CONSUMERS))
    def _consume():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        acc, peak, total = _consume_tiles(plan, span, refs, scratch, thread)

        if plan.by_columns:
            meet(scratch)  # The other one is done with the queries, too.
            _write(plan, span, acc, peak, total, outs, scratch, thread)
        else:

            @pl.when(thread == 1)
            def _send():
                _send_to_peer(acc, peak, total, scratch)

            @pl.when(thread == 0)
            def _finish():
                merged = _merge_with_peer(acc, peak, total, scratch)
                _write(plan, span, *merged, outs, scratch, jnp.int32(0))

    if plan.splits > 1:

        @pl.when((steps == 0) & (count > 0) & (thread == 0))
        def _nothing_seen():
            rows = outs[1].at[split, tile, head]
            plgpu.store(rows.at[0], constant((NUM_ROWS,), LOW, BY_ROW), optimized=False)
            plgpu.store(rows.at[1], constant((NUM_ROWS,), 0.0, BY_ROW), optimized=False)


def _slot(plan, i, scratch):
    """Where key tile number `i` is in the ring, and the barrier of its arrival."""
    return lax.rem(i, jnp.int32(plan.stages)), scratch["full"].at[lax.rem(i, jnp.int32(plan.barriers))]


def _produce_tiles(plan, span, refs, scratch):
    pages, consumed = refs["pages"], scratch["consumed"]
    columns = [pl.ds(c * plan.piece, plan.piece) for c in range(plan.pieces)]
    for c, piece in enumerate(columns):
        queries = refs["q"].at[span.tile, span.head, :, piece]
        plgpu.copy_gmem_to_smem(queries, scratch["q_smem"].at[c], scratch["q_full"])
    at_once = math.gcd(plan.units, LOOKUPS)
    groups = plan.units // at_once

    def look_up(token):
        blocks = [lax.div(token + j * plan.unit, jnp.int32(plan.block_size)) for j in range(at_once)]
        last = plan.table_width - 1
        return tuple(span.first_row + refs["tables"][span.sequence, jnp.minimum(block, last)] for block in blocks)

    def copy_unit(row, token, slot, barrier, offset):
        tokens = pl.ds(lax.rem(token, jnp.int32(plan.block_size)), plan.unit)
        to = pl.ds(offset, plan.unit)
        wanted = (token < span.end) & (token + plan.unit > span.begin)

        @pl.when(wanted)
        def _copy():
            if plan.reads_raw:
                both = pages.at[row, tokens, pl.ds(2 * span.head, 2)]
                plgpu.copy_gmem_to_smem(both, scratch["raw"].at[slot, to], barrier)
            else:
                for kv, smem in enumerate((scratch["k_smem"], scratch["v_smem"])):
                    for c, piece in enumerate(columns):
                        own = pages.at[row, tokens, 2 * span.head + kv, piece]
                        plgpu.copy_gmem_to_smem(own, smem.at[slot, c, to], barrier)

        @pl.when(jnp.logical_not(wanted))
        def _skip():
            for _ in range(plan.copies):
                plgpu.barrier_arrive(barrier)

    def step(i, rows):
        slot, barrier = _slot(plan, i, scratch)
        start = (span.key_tile + i) * plan.key_tile
        # The next tile's pages are looked up while this one waits for its slot.
        next_rows = look_up(start + plan.key_tile)

        @pl.when(i >= plan.stages)
        def _wait():
            plgpu.barrier_wait(consumed.at[slot])

        if plan.quantized:
            scales = refs["scales"].at[span.sequence, :, span.head, pl.ds(start, plan.key_tile)]
            plgpu.copy_gmem_to_smem(scales, scratch["scale_smem"].at[slot], barrier)
        for j in range(at_once):
            copy_unit(rows[j], start + j * plan.unit, slot, barrier, j * plan.unit)
        if groups > 1:

            @pl.loop(1, groups)
            def _group(g):
                offset = g * at_once * plan.unit
                later = look_up(start + offset)
                for j in range(at_once):
                    copy_unit(later[j], start + offset + j * plan.unit, slot, barrier, offset + j * plan.unit)

        return next_rows

    lax.fori_loop(0, span.steps, step, look_up(span.key_tile * plan.key_tile))


def _consume_tiles(plan, span, refs, scratch, thread):
    """This warp group's share: output [R, Dp] in pieces, unnormalised, and the maximum and the sum of each row."""
    offsets = plgpu.broadcasted_iota(jnp.int32, (NUM_ROWS,), 0, layout=BY_ROW)
    query_pos = span.first + lax.div(offsets, jnp.full_like(offsets, plan.group))
    slopes = None
    if "slopes" in refs:
        slopes = plgpu.load(refs["slopes"].at[span.head], layout=BY_ROW, optimized=False) * LOG2_E
    peak, total = constant((NUM_ROWS,), LOW, BY_ROW), constant((NUM_ROWS,), 0.0, BY_ROW)
    if "sinks" in refs:
        # The sink enters once: into the first part, and there into one of two consumers that divide the keys.
        has_sink = lax.axis_index("split") == 0
        if not plan.by_columns:
            has_sink = has_sink & (thread == 0)
        sinks = plgpu.load(refs["sinks"].at[span.head], layout=BY_ROW, optimized=False) * LOG2_E
        sinks = jnp.maximum(sinks, jnp.full_like(sinks, LOW))
        peak, total = lax.cond(has_sink, lambda: (sinks, jnp.ones_like(total)), lambda: (peak, total))
    acc = tuple(constant((NUM_ROWS, plan.piece), 0.0, WIDE) for _ in range(plan.own_pieces))
    stride, offset = (1, 0) if plan.by_columns else (NUM_CONSUMERS, thread)
    plgpu.barrier_wait(scratch["q_full"])

    def step(j, carry):
        i = j * stride + offset
        slot, barrier = _slot(plan, i, scratch)
        start = (span.key_tile + i) * plan.key_tile
        plgpu.barrier_wait(barrier)
        if plan.wgmma:
            for part in range(plan.key_tile // NUM_KEYS):
                carry = fold_tile(plan, span, scratch, thread, slot, start, part, query_pos, slopes, carry)
        else:
            carry = fold_keys(plan, span, scratch, thread, slot, start, query_pos, slopes, carry)
        plgpu.barrier_arrive(scratch["consumed"].at[slot])
        return carry

    return lax.fori_loop(0, pl.cdiv(span.steps - offset, stride), step, (acc, peak, total))


def _send_to_peer(acc, peak, total, scratch):
    sent, taken = scratch["peers"].at[1], scratch["peers"].at[0]
    scratch["peer_rows"][0] = peak
    scratch["peer_rows"][1] = total
    for c, part in enumerate(acc):
        if c > 0:
            plgpu.barrier_wait(taken)
        scratch["peer_out"][...] = part
        plgpu.barrier_arrive(sent)


def _merge_with_peer(acc, peak, total, scratch):
    sent, taken = scratch["peers"].at[1], scratch["peers"].at[0]
    merged = []
    for c, part in enumerate(acc):
        plgpu.barrier_wait(sent)
        if c == 0:
            peer_peak, peer_total = (
                plgpu.load(scratch["peer_rows"].at[i], layout=BY_ROW, optimized=False) for i in range(2)
            )
            best = jnp.maximum(peak, peer_peak)
            own, peer = jnp.exp2(peak - best), jnp.exp2(peer_peak - best)
            total = total * own + peer_total * peer
        theirs = plgpu.load(scratch["peer_out"], layout=WIDE)
        merged.append(part * across(own, part.shape) + theirs * across(peer, part.shape))
        if c + 1 < len(acc):
            plgpu.barrier_arrive(taken)
    return tuple(merged), best, total


def _write(plan, span, acc, peak, total, outs, scratch, thread):
    """Write the columns that this consumer has; both are done with the queries, whose place is free."""
    split = lax.axis_index("split")
    inverse = 1.0 / jnp.where(total > 0, total, jnp.ones_like(total))
    for i, part in enumerate(acc):
        c = own_piece(plan, thread, i)
        if plan.splits == 1:
            scratch["q_smem"][c] = (part * across(inverse, part.shape)).astype(plan.dtype)
        else:
            columns = pl.ds(c * plan.piece, plan.piece)
            plgpu.store(outs[0].at[split, span.tile, span.head, :, columns], part, optimized=False)
    if plan.splits == 1:
        plgpu.commit_smem()
        for i in range(len(acc)):
            c = own_piece(plan, thread, i)
            columns = pl.ds(c * plan.piece, plan.piece)
            plgpu.copy_smem_to_gmem(scratch["q_smem"].at[c], outs[0].at[span.tile, span.head, :, columns])
        plgpu.wait_smem_to_gmem(0)
    else:

        @pl.when(thread == 0)
        def _rows():
            rows = outs[1].at[split, span.tile, span.head]
            plgpu.store(rows.at[0], peak, optimized=False)
            plgpu.store(rows.at[1], total, optimized=False)

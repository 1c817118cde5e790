"""What a consumer of the Mosaic GPU attention kernel does with a key tile: one step of the online softmax."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_plan import NUM_KEYS, NUM_ROWS

LOG2_E = math.log2(math.e)
WIDE = plgpu.Layout.WGMMA
BY_ROW = WIDE.reduce(1)
BY_COLUMN = WIDE.reduce(0)


def constant(shape, value, layout):
    """A float32 array of one value in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def across(rows, shape):
    """A value of each row, for all columns."""
    return lax.broadcast_in_dim(rows, shape, (0,))


def down(columns, shape):
    """A value of each column, for all rows."""
    return lax.broadcast_in_dim(columns, shape, (1,))


def own_piece(plan, thread, c):
    """Which piece of the output is number `c` of this consumer's."""
    return thread * plan.own_pieces + c if plan.by_columns else c


def meet(scratch):
    """Wait for the other consumer.

    Both wait for one barrier that both arrive at, so that neither can be at the next meeting while the other still
    looks for the end of this one.
    """
    plgpu.barrier_arrive(scratch["meeting"])
    plgpu.barrier_wait(scratch["meeting"])


def _weigh(plan, products, distance, slopes):
    """Scores in base 2 from products q.k; `distance` is key position - query position."""
    if plan.soft_cap is None:
        scores = products * (plan.scale * LOG2_E)
    elif plan.wgmma:
        # tanh to within 1e-7: the hardware's own is a thousand times coarser, the library's takes too many registers.
        powers = jnp.exp2(products * (2 * LOG2_E * plan.scale / plan.soft_cap))
        scores = plan.soft_cap * LOG2_E - (2 * plan.soft_cap * LOG2_E) / (powers + 1.0)
    else:
        scores = jnp.tanh(products * (plan.scale / plan.soft_cap)) * (plan.soft_cap * LOG2_E)
    return scores if slopes is None else scores + slopes * distance.astype(jnp.float32)


def fold_tile(plan, span, scratch, thread, slot, start, part, query_pos, slopes, carry):
    """Take NUM_KEYS keys, part number `part` of a key tile, into the online softmax, with wgmma."""
    acc, peak, total = carry
    rows = pl.ds(part * NUM_KEYS, NUM_KEYS)
    start = start + part * NUM_KEYS
    p_smem = scratch["p_smem"].at[thread]
    # Slots that no query sees may hold anything, and 0 * NaN is NaN: they become zeros before the products.
    ragged = (start < span.begin) | (start + NUM_KEYS > span.end)

    def cleared(values):
        pos = start + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=WIDE)
        return jnp.where((pos >= span.begin) & (pos < span.end), values, jnp.zeros_like(values))

    def unpack(kv, first, count):
        packed = scratch["packed"].at[thread]

        # A loop and not unrolled: addresses of all pieces at once would not fit into registers.
        @pl.loop(0, count)
        def _piece(c):
            columns = pl.ds((first + c) * plan.piece, plan.piece)
            values = plgpu.load(scratch["raw"].at[slot, rows, kv, columns], layout=WIDE, optimized=False)
            if plan.quantized:
                values = values.astype(jnp.float32).astype(plan.dtype)
            packed[c] = cleared(values)

        plgpu.commit_smem()
        return packed

    own = [own_piece(plan, thread, c) for c in range(plan.own_pieces)]
    if plan.repack:
        keys = unpack(0, 0, plan.pieces)
    else:
        keys, values = (scratch[name].at[slot, :, rows] for name in ("k_smem", "v_smem"))

        @pl.when(ragged)
        def _clear():
            for smem in (keys, values):
                for c in own:
                    for half in range(plan.piece // 64):
                        columns = pl.ds(half * 64, 64)
                        smem[c, :, columns] = cleared(plgpu.load(smem.at[c, :, columns], layout=WIDE))
            plgpu.commit_smem()
            if plan.by_columns:
                meet(scratch)

    def multiply(ref):
        if plan.repack or plan.pieces > 2:
            # A loop here, too: descriptors of all pieces would be kept in registers from tile to tile.
            @pl.loop(0, plan.pieces)
            def _piece(c):
                plgpu.wgmma(ref, scratch["q_smem"].at[c], keys.at[c].transpose((1, 0)))
                plgpu.wgmma_wait(0)

        else:
            for c in range(plan.pieces):
                plgpu.wgmma(ref, scratch["q_smem"].at[c], keys.at[c].transpose((1, 0)))
        return ref[...]

    products = pl.run_scoped(multiply, plgpu.ACC((NUM_ROWS, NUM_KEYS), jnp.float32))
    shape = products.shape
    if plan.quantized:
        k_scales = plgpu.load(scratch["scale_smem"].at[slot, 0, rows], layout=BY_COLUMN, optimized=False)
        products = products * down(k_scales, shape)

    def distances():
        return start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WIDE) - across(query_pos, shape)

    if slopes is None:
        scores = _weigh(plan, products, None, None)
    else:
        scores = _weigh(plan, products, distances(), across(slopes, shape))

    def masked(scores):
        distance = distances()
        visible = distance <= 0
        if plan.windowed:
            visible = visible & (distance > -span.window)
        return jnp.where(visible, scores, -jnp.inf)

    partial = start + NUM_KEYS > span.first + 1
    if plan.windowed:
        partial = partial | (start <= span.end - 1 - span.window)
    scores = lax.cond(partial, masked, lambda x: x, scores)

    new_peak = jnp.maximum(peak, scores.max(axis=1))
    alpha = jnp.exp2(peak - new_peak)
    p = jnp.exp2(scores - across(new_peak, shape))
    total = total * alpha + p.sum(axis=1)
    if plan.quantized:
        v_scales = plgpu.load(scratch["scale_smem"].at[slot, 1, rows], layout=BY_COLUMN, optimized=False)
        # Scales of slots that no query sees may be NaN, too.
        p = jnp.where(p > 0.0, p * down(v_scales, shape), 0.0)
    p_smem[...] = p.astype(plan.dtype)
    if plan.repack:
        values = unpack(1, own[0], plan.own_pieces)
        own = range(plan.own_pieces)
    else:
        plgpu.commit_smem()

    def accumulate(c, out):
        def apply(ref):
            plgpu.wgmma(ref, p_smem, values.at[c])
            return ref[...]

        product = pl.run_scoped(apply, plgpu.ACC(out.shape, jnp.float32))
        return out * across(alpha, out.shape) + product

    return tuple(accumulate(c, out) for c, out in zip(own, acc, strict=True)), new_peak, total


def fold_keys(plan, span, scratch, thread, slot, start, query_pos, slopes, carry):
    """The same without wgmma, key by key: exact in float32, and slow."""
    raw = scratch["raw"]
    shape = (NUM_ROWS, plan.piece)

    def row(key, kv, c):
        piece = raw.at[slot, key, kv, pl.ds(c * plan.piece, plan.piece)]
        values = plgpu.load(piece, layout=BY_COLUMN, optimized=False)
        return down(values.astype(jnp.float32), shape)

    def fold(key, carry):
        acc, peak, total = carry
        products = constant((NUM_ROWS,), 0.0, BY_ROW)
        for c in range(plan.pieces):
            queries = plgpu.load(scratch["q_smem"].at[c], layout=WIDE)
            products = products + jnp.sum(queries * row(key, 0, c), axis=1)
        if plan.quantized:
            products = products * scratch["scale_smem"][slot, 0, key]
        distance = start + key - query_pos
        scores = _weigh(plan, products, distance, slopes)
        visible = distance <= 0
        if plan.windowed:
            visible = visible & (distance > -span.window)
        scores = jnp.where(visible, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, scores)
        alpha, p = jnp.exp2(peak - new_peak), jnp.exp2(scores - new_peak)
        total = total * alpha + p
        if plan.quantized:
            p = p * scratch["scale_smem"][slot, 1, key]
        acc = tuple(
            part * across(alpha, shape) + across(p, shape) * row(key, 1, own_piece(plan, thread, c))
            for c, part in enumerate(acc)
        )
        return acc, new_peak, total

    lower = jnp.maximum(span.begin - start, 0)
    upper = jnp.minimum(span.end - start, plan.key_tile)
    return lax.fori_loop(lower, upper, fold, carry)

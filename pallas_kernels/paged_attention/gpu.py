"""Ragged paged attention as a Pallas Mosaic GPU kernel (Hopper, sm_90a): TMA page copies and wgmma.

`gpu_plan.py` decides how a call is laid out and which calls are refused; `gpu_kernel.py` is the kernel's skeleton with
the copies and the merge of its two consumers, `gpu_fold.py` what a consumer does with a key tile. This module launches
it and merges the parts when the keys are split (flash-decoding, Dao et al., 2023).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_kernel import attend
from pallas_kernels.paged_attention.gpu_plan import NUM_CONSUMERS, NUM_KEYS, NUM_ROWS, Plan, plan_call, refusal
from pallas_kernels.paged_attention.query_tiles import head_rows, make_query_tiles, sequence_scales, take_tokens
from pallas_kernels.paged_attention.shapes import attention_shapes

__all__ = ["ragged_paged_attention", "refusal"]


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    block_tables: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    layer: int | jax.Array,
    blocks_per_layer: int,
    num_kv_heads: int,
    scale: float,
    sliding_window: int | jax.Array | None,
    logit_soft_cap: float | None,
    sinks: jax.Array | None,
    alibi_slopes: jax.Array | None,
    kv_scales: jax.Array | None,
    tiles: tuple[int, int] | None,
    interpret: Any,
) -> jax.Array:
    """Attention of q [T, Hq, D] through physical pages [N, B, KVp, Dp]; see `api.ragged_paged_attention`.

    Any page size; up to 64 query heads for each KV head; Dp a multiple of 64 up to 256. Pages of the queries' 16-bit
    type in whole groups of 8 tokens go straight to wgmma; other page sizes and quantised pages are repacked first, and
    slower; float32 queries, or pages of another float type, are multiplied without wgmma, which is slow.

    `tiles` is (query tokens, key tokens), with at most 64 // G query tokens and 64 or 128 keys. `interpret` is False,
    True or a `plgpu.InterpretGPUParams`.
    """
    shapes = attention_shapes(q, kv_pages, block_tables, num_kv_heads)
    plan = plan_call(shapes, tiles)._replace(scale=scale, soft_cap=logit_soft_cap)
    laid = make_query_tiles(
        q.astype(plan.dtype),
        kv_lens,
        cu_q_lens,
        num_seqs,
        num_kv_heads=num_kv_heads,
        tokens_per_tile=plan.query_tokens,
        num_rows=NUM_ROWS,
        head_dim=plan.head_dim,
        sliding_window=sliding_window,
    )
    first_row = jnp.asarray(layer, jnp.int32) * jnp.int32(blocks_per_layer)
    window = jnp.asarray(0 if sliding_window is None else sliding_window, jnp.int32)
    columns = [laid.sequences, laid.first_positions, laid.num_tokens, laid.key_begins, laid.key_ends]
    columns += [jnp.broadcast_to(x, laid.sequences.shape) for x in (first_row, window)]
    inputs = {"meta": jnp.stack(columns, axis=1), "tables": block_tables, "q": laid.q, "pages": kv_pages}
    by_row = partial(head_rows, num_kv_heads=num_kv_heads, tokens_per_tile=plan.query_tokens, num_rows=NUM_ROWS)
    if sinks is not None:
        inputs["sinks"] = by_row(sinks)
    if alibi_slopes is not None:
        inputs["slopes"] = by_row(alibi_slopes)
    if kv_scales is not None:
        inputs["scales"] = sequence_scales(
            kv_scales,
            kv_lens,
            block_tables,
            num_kv_heads=num_kv_heads,
            key_tile=plan.key_tile,
            layer=layer,
            blocks_per_layer=blocks_per_layer,
        )
    out = _launch(plan._replace(windowed=sliding_window is not None), inputs, interpret)
    out = take_tokens(
        out, laid, num_heads=shapes.num_heads, tokens_per_tile=plan.query_tokens, head_dim=shapes.head_dim
    )
    return out.astype(q.dtype)


def _launch(plan: Plan, inputs: dict[str, jax.Array], interpret: Any) -> jax.Array:
    """Outputs [N, Hkv, R, Dp] of the tiles."""
    shape = (plan.num_tiles, plan.num_kv_heads, NUM_ROWS, plan.head_dim)
    out_type = (jax.ShapeDtypeStruct(shape, plan.dtype),)
    if plan.splits > 1:
        out_type = (
            jax.ShapeDtypeStruct((plan.splits, *shape), jnp.float32),
            jax.ShapeDtypeStruct((plan.splits, *shape[:2], 2, NUM_ROWS), jnp.float32),
        )
    outs = plgpu.kernel(
        partial(attend, plan),
        out_type=out_type,
        grid=(plan.splits, plan.num_tiles, plan.num_kv_heads),
        grid_names=("split", "tile", "head"),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="thread",
        scratch_types=_scratch(plan),
        compiler_params=plgpu.CompilerParams(approx_math=plan.wgmma, reduction_scratch_bytes=512),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
        kernel_name="ragged_paged_attention",
    )(inputs)
    return outs[0] if plan.splits == 1 else merge_parts(*outs).astype(plan.dtype)


def _scratch(plan: Plan) -> dict[str, Any]:
    def swizzled(*shape: int, dtype: Any = plan.dtype) -> Any:
        row = 128 // jnp.dtype(dtype).itemsize
        return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(128)))

    tile = (plan.pieces, plan.key_tile, plan.piece)
    scratch = {
        "q_smem": swizzled(plan.pieces, NUM_ROWS, plan.piece),
        "q_full": plgpu.Barrier(num_arrivals=plan.pieces),
        "full": plgpu.Barrier(num_arrivals=plan.arrivals, num_barriers=plan.barriers),
        "consumed": plgpu.Barrier(num_arrivals=NUM_CONSUMERS if plan.by_columns else 1, num_barriers=plan.stages),
    }
    if plan.by_columns:
        scratch["meeting"] = plgpu.Barrier(num_arrivals=NUM_CONSUMERS)
    else:
        scratch["peers"] = plgpu.Barrier(num_barriers=NUM_CONSUMERS)
        scratch["peer_out"] = swizzled(NUM_ROWS, plan.piece, dtype=jnp.float32)
        scratch["peer_rows"] = plgpu.SMEM((2, NUM_ROWS), jnp.float32)
    if plan.wgmma:
        scratch["p_smem"] = swizzled(NUM_CONSUMERS, NUM_ROWS, NUM_KEYS)
    if plan.reads_raw:
        scratch["raw"] = plgpu.SMEM((plan.stages, plan.key_tile, 2, plan.head_dim), plan.kv_dtype)
    else:
        scratch["k_smem"] = swizzled(plan.stages, *tile)
        scratch["v_smem"] = swizzled(plan.stages, *tile)
    if plan.repack:
        scratch["packed"] = swizzled(NUM_CONSUMERS, plan.pieces, NUM_KEYS, plan.piece)
    if plan.quantized:
        scratch["scale_smem"] = plgpu.SMEM((plan.stages, 2, plan.key_tile), jnp.float32)
    return scratch


def merge_parts(outs: jax.Array, rows: jax.Array) -> jax.Array:
    """Join unnormalised parts [P, N, Hkv, R, Dp] with their (maximum, sum) rows [P, N, Hkv, 2, R], base 2.

    A part that saw no key has the sum 0 and says nothing, whatever its output holds.
    """
    maxima, sums = rows[..., 0, :], rows[..., 1, :]
    weights = jnp.exp2(maxima - maxima.max(axis=0, keepdims=True))
    total = jnp.sum(weights * sums, axis=0)
    outs = jnp.where((sums > 0)[..., None], outs, 0.0)
    return jnp.sum(outs * weights[..., None], axis=0) / total[..., None]

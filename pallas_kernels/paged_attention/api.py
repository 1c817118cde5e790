"""The typed entry point of ragged paged attention."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.checks import check_block_tables
from pallas_kernels.paged_attention.pick import KERNELS, load_implementation, pick_implementation
from pallas_kernels.paged_attention.shapes import attention_shapes

with contextlib.suppress(ImportError):  # a bare machine has only jax and numpy: annotations are not looked at there
    from jaxtyping import Array, Float, Int, Shaped


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    kv_pages: Shaped[Array, "N B KV Dp"],
    kv_lens: Int[Array, "S"],
    block_tables: Int[Array, "S W"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, "1"],
    *,
    layer: int | Int[Array, ""],
    blocks_per_layer: int,
    scale: float,
    num_kv_heads: int | None = None,
    sliding_window: int | Int[Array, ""] | None = None,
    logit_soft_cap: float | None = None,
    sinks: Float[Array, "Hq"] | None = None,
    alibi_slopes: Float[Array, "Hq"] | None = None,
    kv_scales: Float[Array, "N B KV"] | None = None,
    implementation: str | None = None,
    tiles: tuple[int, int] | None = None,
    interpret: object = False,
    debug: bool = False,
) -> Float[Array, "T Hq D"]:
    """Causal attention of a flat batch of queries through the pages (Kwon et al., 2023).

    Sequence s owns queries `cu_q_lens[s]:cu_q_lens[s+1]`, which are the last ones of its `kv_lens[s]` tokens, whose
    keys and values are already in the pages: prefill chunks and decodes alike. Key t of sequence s is in block
    `block_tables[s, t // B]` at slot `t % B`; block b of layer l is row `l * blocks_per_layer + b` of `kv_pages`,
    with K and V interleaved by head (K0, V0, K1, V1, ...). Pages are allocated in the backend's physical shape
    (`kv_pages.page_shape`), whose KV rows and lanes may be more than `2 * num_kv_heads` and D; lanes from D on hold
    zeros in slots that were written, as `write_kv_pages` leaves them.

    Args:
        q: queries, T tokens of all sequences in one row.
        kv_pages: pages of all layers of the cache group. Pages of int8 or float8_e4m3fn need `kv_scales`.
        kv_lens: tokens of each sequence, this step's included.
        block_tables: block ids within a layer; entries past a sequence's end may be anything in range.
        cu_q_lens: offsets of the sequences' queries; entries past `num_seqs` repeat the last.
        num_seqs: how many sequences are real; the rows of queries that belong to none hold unspecified values.
        layer: which layer's pages, an int or a traced scalar.
        blocks_per_layer: rows of `kv_pages` per layer, the null block included.
        scale: multiplies the scores, usually `D ** -0.5`.
        num_kv_heads: how many of the pages' rows are keys (and as many values); None: half of them, no row is padding.
        sliding_window: a query sees at most this many keys, its own included: at least 1.
        logit_soft_cap: scores become `cap * tanh(score / cap)` before the mask.
        sinks: a logit of each query head that takes its share of the softmax and has no value (GPT-OSS).
        alibi_slopes: adds `slope * (key position - query position)` to the capped score (Press et al., 2022).
        kv_scales: what each token's row of quantised pages is multiplied with.
        implementation: "reference", "xla", "mosaic_tpu", "mosaic_gpu" or "triton"; None picks by platform and shapes
            and logs why (`pick_implementation` returns the same choice with its reason).
        tiles: (query, key) tokens per compute tile, independent of the page size; None: `tiles.DEFAULT_TILES`.
        interpret: run a kernel in Pallas' interpreter on any platform, slowly: True, or the parameters of the TPU or
            Mosaic GPU interpreter, which can look for races.
        debug: refuse block ids that are out of range: an array that is at hand at once, a traced one when it runs.

    Returns:
        Attention outputs in q's dtype; scores and sums are float32. NaN or Inf in slots that no query of
        the sequence sees in this call never reach an output.

    Raises:
        ValueError: for shapes that do not belong together, or an implementation that cannot serve them here.
    """
    shapes = attention_shapes(q, kv_pages, block_tables, num_kv_heads)
    if kv_pages.shape[0] % blocks_per_layer:
        raise ValueError(f"{kv_pages.shape[0]} page rows are not whole layers of {blocks_per_layer} blocks")
    if shapes.is_quantized != (kv_scales is not None):
        raise ValueError(
            f"pages of {shapes.kv_dtype} need kv_scales: quantised values mean nothing without them"
            if shapes.is_quantized
            else f"kv_scales have no effect on pages of {shapes.kv_dtype}: leave them unset"
        )
    if isinstance(sliding_window, int) and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}: a query sees at least itself; None is no window")
    if sliding_window is not None and not isinstance(sliding_window, int):
        sliding_window = jnp.maximum(sliding_window, 1)  # what is traced cannot be refused
    if logit_soft_cap is not None and logit_soft_cap <= 0:
        raise ValueError(f"logit_soft_cap is {logit_soft_cap}, which is not above 0: None is no cap")
    choice = pick_implementation(shapes, implementation=implementation, tiles=tiles, interpret=interpret)
    if debug:
        check_block_tables(block_tables, kv_lens, num_seqs, shapes.block_size, blocks_per_layer)
    options = {} if choice.name == "reference" else {"tiles": tiles}
    if choice.name in KERNELS:
        options["interpret"] = interpret
    with jax.named_scope(f"ragged_paged_attention_{choice.name}"):
        return load_implementation(choice.name).ragged_paged_attention(
            q,
            kv_pages,
            kv_lens,
            block_tables,
            cu_q_lens,
            num_seqs,
            layer=layer,
            blocks_per_layer=blocks_per_layer,
            num_kv_heads=shapes.num_kv_heads,
            scale=scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            kv_scales=kv_scales,
            **options,
        )

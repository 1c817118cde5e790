"""The typed entry point of ragged paged attention; picks an implementation."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention import reference, xla

IMPLEMENTATIONS = {
    "reference": reference.ragged_paged_attention,
    "xla": xla.ragged_paged_attention,
}


def ragged_paged_attention(
    q: Float[Array, "T Hq D"],
    kv_pages: Float[Array, "N B KV D"],
    kv_lens: Int[Array, "S"],
    block_tables: Int[Array, "S W"],
    cu_q_lens: Int[Array, "S+1"],
    num_seqs: Int[Array, "1"],
    *,
    layer: int | Int[Array, ""],
    blocks_per_layer: int,
    scale: float,
    sliding_window: int | Int[Array, ""] | None = None,
    logit_soft_cap: float | None = None,
    implementation: str | None = None,
    tiles: tuple[int, int] | None = None,
) -> Float[Array, "T Hq D"]:
    """Causal attention of a flat batch of queries through the pages (Kwon et al., 2023).

    Sequence s owns queries `cu_q_lens[s]:cu_q_lens[s+1]`, which are the last ones of its `kv_lens[s]` tokens, whose
    keys and values are already in the pages: prefill chunks and decodes alike. Key t of sequence s is in block
    `block_tables[s, t // B]` at slot `t % B`; block b of layer l is row `l * blocks_per_layer + b` of `kv_pages`,
    with K and V interleaved by head (K0, V0, K1, V1, ...).

    Args:
        q: queries, T tokens of all sequences in one row.
        kv_pages: pages of all layers of the cache group.
        kv_lens: tokens of each sequence, this step's included.
        block_tables: block ids within a layer; entries past a sequence's end may be anything in range.
        cu_q_lens: offsets of the sequences' queries; entries past `num_seqs` repeat the last.
        num_seqs: how many sequences are real; the rows of queries that belong to none hold unspecified values.
        layer: which layer's pages, an int or a traced scalar.
        blocks_per_layer: rows of `kv_pages` per layer, the null block included.
        scale: multiplies the scores, usually `D ** -0.5`.
        sliding_window: a query sees at most this many keys, its own included.
        logit_soft_cap: scores become `cap * tanh(score / cap)` before the mask.
        implementation: "reference" or "xla"; None picks "xla".
        tiles: (query, key) tokens per compute tile, independent of the page size; "xla" only.

    Returns:
        Attention outputs in q's dtype; scores and sums are float32. NaN or Inf in slots that no query of
        the sequence sees in this call never reach an output.

    Raises:
        ValueError: for shapes that do not belong together or an unknown implementation.
    """
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv_pages.shape[2] // 2
    if kv_pages.shape[3] != head_dim:
        raise ValueError(f"q has head_dim {head_dim}, the pages have {kv_pages.shape[3]}")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide into groups over {num_kv_heads} KV heads")
    if kv_pages.shape[0] % blocks_per_layer:
        raise ValueError(f"{kv_pages.shape[0]} page rows are not whole layers of {blocks_per_layer} blocks")
    name = implementation or "xla"
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"unknown attention implementation {name!r}; known: {', '.join(IMPLEMENTATIONS)}")
    options = {} if tiles is None else {"tiles": tiles}
    if options and name == "reference":
        raise ValueError("tiles have no effect on the reference implementation: leave them unset")
    with jax.named_scope(f"ragged_paged_attention_{name}"):
        return IMPLEMENTATIONS[name](
            q,
            kv_pages,
            kv_lens,
            block_tables,
            cu_q_lens,
            num_seqs,
            layer=layer,
            blocks_per_layer=blocks_per_layer,
            scale=scale,
            sliding_window=sliding_window,
            logit_soft_cap=logit_soft_cap,
            **options,
        )

"""Ragged paged attention as a Pallas Triton kernel, for GPUs from Ampere on that are not Hopper: thin, without tuning.

One program holds a tile of queries and one KV head. It walks the keys that the tile sees in tiles of their own, gathers
each token's row through the block table (so that any page size serves), and folds it in with online softmax (Milakov
and Gimelshein, 2018).
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.paged_attention.query_tiles import head_rows, make_query_tiles, sequence_scales, take_tokens
from pallas_kernels.paged_attention.shapes import AttentionShapes, attention_shapes
from pallas_kernels.paged_attention.tiles import DEFAULT_TILES

_DECODE_ROWS, _MIXED_ROWS = 16, 64
"""The most rows (tokens times the group) of a query tile where `tiles` is None. 16 are the fewest that a matrix
instruction takes."""
_QUERY_BYTES, _KEY_BYTES = 32 * 1024, 16 * 1024
"""Of those tiles. Two stages of keys and values and one of queries fill 96 KiB, what a block has on Ampere and Ada."""
_MAX_TILE_BYTES = 32 * 1024
"""Of a tile that is asked for: the largest at which Hopper's and an A100's shared memory hold them all."""
_MAX_ROWS, _MAX_KEY_TILE, _MAX_HEAD_DIM = 128, 128, 256
_LOWEST = float(jnp.finfo(jnp.float32).min)
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_ONE_BYTE = (jnp.int8, jnp.float8_e4m3fn)


def refusal(shapes: AttentionShapes, tiles: tuple[int, int] | None) -> str | None:
    """Why this kernel cannot serve a call of these shapes: one sentence with the limit and the remedy, or None."""
    if shapes.dtype not in _FLOATS:
        return f"the triton kernel takes queries in float32, bfloat16 or float16, not {shapes.dtype}: use 'xla'"
    if shapes.kv_dtype not in _FLOATS + _ONE_BYTE:
        return (
            "the triton kernel reads pages in float32, bfloat16, float16, int8 or float8_e4m3fn, not "
            f"{shapes.kv_dtype}: use 'xla'"
        )
    if shapes.head_dim > _MAX_HEAD_DIM:
        return f"the triton kernel serves head_dim up to {_MAX_HEAD_DIM}, not {shapes.head_dim}: use 'xla'"
    if shapes.group > _MAX_ROWS:
        return f"the triton kernel serves up to {_MAX_ROWS} query heads per KV head, not {shapes.group}: use 'xla'"
    # Pallas computes offsets in elements: in 32 bits for arrays of up to 2^32 bytes, in 64 bits above. Elements of two
    # bytes and more are safe on both sides; of one byte, offsets past 2^31 turn negative.
    if shapes.is_quantized and 2**31 < shapes.num_elements <= 2**32:
        return (
            f"the triton kernel cannot address {shapes.kv_dtype} pages of 2 to 4 GiB, and these are "
            f"{shapes.num_elements / 2**30:.1f} GiB: take num_blocks outside of that range, or use 'xla'"
        )
    tokens, key_tile = _tiles(shapes, tiles)
    if tokens < 1 or not 16 <= key_tile <= _MAX_KEY_TILE or key_tile & (key_tile - 1):
        return (
            f"the triton kernel wants tiles of at least 1 query token and of 16, 32, 64 or {_MAX_KEY_TILE} keys, not "
            f"{(tokens, key_tile)}: change them or leave tiles unset"
        )
    num_rows = _num_rows(shapes, tokens)
    if num_rows > _MAX_ROWS:
        return (
            f"a query tile of the triton kernel has up to {_MAX_ROWS} rows, and {tokens} tokens of {shapes.group} "
            f"heads need {num_rows}: take fewer query tokens, or leave tiles unset"
        )
    row_bytes = _width(shapes) * _compute_type(shapes.dtype, shapes.kv_dtype).itemsize
    if max(num_rows, key_tile) * row_bytes > _MAX_TILE_BYTES:
        return (
            f"a tile of the triton kernel has up to {_MAX_TILE_BYTES} bytes, and the larger one of {num_rows} rows of "
            f"queries and {key_tile} keys has {max(num_rows, key_tile) * row_bytes}: take smaller tiles or use 'xla'"
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
    tokens_per_tile, key_tile = _tiles(shapes, tiles)
    num_rows, width = _num_rows(shapes, tokens_per_tile), _width(shapes)
    tile_bytes = num_rows * width * _compute_type(shapes.dtype, shapes.kv_dtype).itemsize
    queries = make_query_tiles(
        q,
        kv_lens,
        cu_q_lens,
        num_seqs,
        num_kv_heads=num_kv_heads,
        tokens_per_tile=tokens_per_tile,
        num_rows=num_rows,
        head_dim=width,
        sliding_window=sliding_window,
    )
    rows = partial(head_rows, num_kv_heads=num_kv_heads, tokens_per_tile=tokens_per_tile, num_rows=num_rows)
    scales = None
    if kv_scales is not None:
        scales = sequence_scales(
            kv_scales,
            kv_lens,
            block_tables,
            num_kv_heads=num_kv_heads,
            key_tile=key_tile,
            layer=layer,
            blocks_per_layer=blocks_per_layer,
        )
    inputs = {
        "sequences": queries.sequences,
        "first_positions": queries.first_positions,
        "key_begins": queries.key_begins,
        "key_ends": queries.key_ends,
        "tables": block_tables + jnp.asarray(layer * blocks_per_layer, jnp.int32),
        "q": queries.q,
        "pages": kv_pages,
        "window": None if sliding_window is None else jnp.asarray(sliding_window, jnp.int32).reshape(1),
        "sinks": None if sinks is None else rows(sinks),
        "slopes": None if alibi_slopes is None else rows(alibi_slopes),
        "scales": scales,
    }
    inputs = {name: value for name, value in inputs.items() if value is not None}
    tile_spec = pl.BlockSpec((None, None, num_rows, width), lambda tile, head: (tile, head, 0, 0))
    row_spec = pl.BlockSpec((None, num_rows), lambda tile, head: (head, 0))
    blocked = {"q": tile_spec, "sinks": row_spec, "slopes": row_spec}
    if not interpret:
        _accept_deprecation()
    out = pl.pallas_call(
        partial(
            _kernel,
            names=tuple(inputs),
            group=shapes.group,
            head_dim=shapes.head_dim,
            key_tile=key_tile,
            scale=scale,
            soft_cap=logit_soft_cap,
        ),
        grid=(len(queries.sequences), num_kv_heads),
        in_specs=[blocked.get(name, pl.BlockSpec()) for name in inputs],
        out_specs=tile_spec,
        out_shape=jax.ShapeDtypeStruct(queries.q.shape, q.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=8 if tile_bytes > 8 * 1024 else 4, num_stages=2),
        interpret=interpret,
        name="ragged_paged_attention_triton",
    )(*inputs.values())
    return take_tokens(
        out, queries, num_heads=shapes.num_heads, tokens_per_tile=tokens_per_tile, head_dim=shapes.head_dim
    )


def _kernel(*refs, names, group, head_dim, key_tile, scale, soft_cap):
    inputs, out_ref = dict(zip(names, refs, strict=False)), refs[-1]
    tile, head = pl.program_id(0), pl.program_id(1)
    num_rows, width = out_ref.shape
    pages_ref = inputs["pages"]
    block_size = pages_ref.shape[1]
    sequence, first_position, key_begin, key_end = (
        inputs[name][tile] for name in ("sequences", "first_positions", "key_begins", "key_ends")
    )
    queries = inputs["q"][...]
    compute_type = _compute_type(queries.dtype, pages_ref.dtype)
    queries = queries.astype(compute_type)
    positions = first_position + lax.div(jnp.arange(num_rows, dtype=jnp.int32), jnp.int32(group))
    lanes = jnp.arange(width, dtype=jnp.int32)
    product = partial(jnp.dot, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

    def gather(pages, slots, seen, row):
        """Row `row` of tokens, [key_tile, width]; zeros, which are no NaN, for those that nobody sees."""
        shape = (key_tile, width)
        index = (
            jnp.broadcast_to(pages[:, None], shape),
            jnp.broadcast_to(slots[:, None], shape),
            jnp.full(shape, row, jnp.int32),
            jnp.broadcast_to(lanes[None], shape),
        )
        mask = jnp.broadcast_to(seen[:, None], shape)
        if width != head_dim:
            mask &= jnp.broadcast_to((lanes < head_dim)[None], shape)
        found = plgpu.load(pages_ref.at[index], mask=mask, other=jnp.zeros((), pages_ref.dtype))
        return _widen(found).astype(compute_type)

    def fold(j, state):
        peak, total, out = state
        keys_at = j * key_tile + jnp.arange(key_tile, dtype=jnp.int32)
        seen = (keys_at >= key_begin) & (keys_at < key_end)
        blocks = lax.div(keys_at, jnp.int32(block_size))
        slots = lax.rem(keys_at, jnp.int32(block_size))
        pages = plgpu.load(inputs["tables"].at[sequence, blocks], mask=seen, other=jnp.int32(0))
        scores = product(queries, gather(pages, slots, seen, 2 * head).T) * scale
        if "scales" in inputs:
            of_tile = pl.ds(j * key_tile, key_tile)
            own = (inputs["scales"][sequence, i, head, of_tile] for i in (0, 1))
            key_scales, value_scales = (jnp.where(seen, scales, 0.0) for scales in own)
            scores = scores * key_scales[None]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if "slopes" in inputs:
            distance = (keys_at[None] - positions[:, None]).astype(jnp.float32)
            scores = scores + inputs["slopes"][...][:, None] * distance
        visible = seen[None] & (keys_at[None] <= positions[:, None])
        if "window" in inputs:
            visible &= keys_at[None] > positions[:, None] - inputs["window"][0]
        scores = jnp.where(visible, scores, _LOWEST)
        new_peak = jnp.maximum(peak, scores.max(axis=1))
        # a row that has seen no key yet would give its masked ones the weight exp(0)
        weights = jnp.where(visible, jnp.exp(scores - new_peak[:, None]), 0.0)
        rescale = jnp.exp(peak - new_peak)
        total = total * rescale + weights.sum(axis=1)
        if "scales" in inputs:
            weights = weights * value_scales[None]
        part = product(weights.astype(compute_type), gather(pages, slots, seen, 2 * head + 1))
        return new_peak, total, out * rescale[:, None] + part

    if "sinks" in inputs:
        peak, total = inputs["sinks"][...], jnp.ones(num_rows, jnp.float32)
    else:
        peak, total = jnp.full(num_rows, _LOWEST, jnp.float32), jnp.zeros(num_rows, jnp.float32)
    first, last = lax.div(key_begin, jnp.int32(key_tile)), lax.div(key_end + key_tile - 1, jnp.int32(key_tile))
    _, total, out = lax.fori_loop(first, last, fold, (peak, total, jnp.zeros((num_rows, width), jnp.float32)))
    out_ref[...] = (out / jnp.where(total == 0.0, 1.0, total)[:, None]).astype(out_ref.dtype)


def _widen(x):
    """float8_e4m3fn as float32, by its bits: there is no instruction for it before compute capability 8.9."""
    if x.dtype != jnp.float8_e4m3fn:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint16)
    magnitude = bits & 0x7F
    # as float16 its exponent is too small by 8, also for subnormals; all ones is the one NaN
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | (magnitude << 7), jnp.float16)
    return jnp.where(magnitude == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)


def _tiles(shapes: AttentionShapes, tiles: tuple[int, int] | None) -> tuple[int, int]:
    """Query tokens and keys of a tile."""
    if tiles is not None:
        return tiles
    itemsize = _compute_type(shapes.dtype, shapes.kv_dtype).itemsize
    row_bytes = _width(shapes) * itemsize
    only_decodes = shapes.num_tokens <= shapes.num_sequences
    rows = min(_DECODE_ROWS if only_decodes else _MIXED_ROWS, _QUERY_BYTES // row_bytes)
    # float32 goes without matrix instructions, whose unrolled products spill registers at 64 keys
    key_tile = DEFAULT_TILES["triton"][1] * 2 // itemsize
    return max(1, rows // shapes.group), min(key_tile, _KEY_BYTES // row_bytes)


def _num_rows(shapes: AttentionShapes, tokens_per_tile: int) -> int:
    return max(16, _power_of_two(tokens_per_tile * shapes.group))


def _width(shapes: AttentionShapes) -> int:
    """Elements of a row on the chip: what is past head_dim is not read, and zero."""
    return max(16, _power_of_two(shapes.head_dim))


def _compute_type(dtype: jnp.dtype, kv_dtype: jnp.dtype) -> jnp.dtype:
    """Of the products' operands: the queries' if that is the pages', or bfloat16 over one-byte pages; else float32.

    float16 does not hold a small probability times the scale of a value.
    """
    narrow = kv_dtype == dtype or (kv_dtype.itemsize == 1 and dtype == jnp.bfloat16)
    return jnp.dtype(dtype if narrow else jnp.float32)


def _power_of_two(size: int) -> int:
    """The next one that is no smaller."""
    return 1 << (size - 1).bit_length()


def _accept_deprecation() -> None:
    """Silence JAX's notice that its Triton backend will go; this kernel goes with it, "mosaic_gpu" stays.

    The notice comes when the surrounding program is lowered, long after this call, so only a filter can hold it back.
    """
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

"""Random ragged batches laid into pages, for the tests of every implementation of attention."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.kv_pages import page_shape
from pallas_kernels.paged_attention import page_backend, ragged_paged_attention
from pallas_kernels.paged_attention.pick import IMPLEMENTATIONS, KERNELS

IMPLEMENTATION_NAMES = sorted(IMPLEMENTATIONS)
FAST = [name for name in IMPLEMENTATION_NAMES if name != "reference"]
EXAMPLES = {"xla": 25, "mosaic_tpu": 5, "mosaic_gpu": 2, "triton": 6}
"""Random batches for each case: interpreters are slow, Mosaic GPU's above all."""
POISONS = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
# Inputs are standard normal. float32 differs by the order of sums only; the 16-bit types round the
# probabilities and the result, each within half a unit of their last place, on values of up to about 4.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}


@dataclass(frozen=True)
class Case:
    """What is compiled: shapes and options. `window` "traced" passes the window as an array."""

    block_size: int
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    num_tokens: int = 48
    num_rows: int = 6
    max_len: int = 80
    layers: int = 2
    window: int | str | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    tiles: tuple[int, int] | None = None
    """Of "xla"; kernels run these cases with their default tiles."""
    dtype: str = "float32"
    kv_dtype: str | None = None

    @property
    def table_width(self) -> int:
        return -(-self.max_len // self.block_size)

    @property
    def blocks_per_layer(self) -> int:
        return 1 + self.num_rows * self.table_width + 3

    @property
    def page_dtype(self) -> np.dtype:
        return jnp.dtype(self.kv_dtype or self.dtype)

    @property
    def is_quantized(self) -> bool:
        return self.page_dtype.itemsize == 1

    @property
    def tolerance(self) -> float:
        """By the coarser of the types: quantised pages are exact in bfloat16."""
        if self.kv_dtype == "bfloat16":
            return TOLERANCE["bfloat16"]
        return TOLERANCE[self.dtype]


CASES = {
    "page_1": Case(1, (2, 2)),
    "page_1_tiles_7_5": Case(1, (3, 1), tiles=(7, 5), window=5),
    "page_3_tiles_16_16": Case(3, (6, 2), tiles=(16, 16), window=4),
    "page_3_tiles_7_5": Case(3, (3, 1), tiles=(7, 5), layers=3, soft_cap=3.0),
    "page_4_traced_window": Case(4, (8, 2), tiles=(7, 5), window="traced"),
    "page_4_window_1": Case(4, (3, 3), tiles=(16, 16), window=1, layers=1),
    "page_16_tiles_64_64": Case(16, (9, 3), 64, num_tokens=140, max_len=200, tiles=(64, 64)),
    "page_16_soft_cap_window": Case(16, (4, 1), tiles=(32, 128), soft_cap=2.0, window=5),
    "page_128": Case(128, (4, 1), 64, num_tokens=70, num_rows=3, max_len=256, tiles=(32, 128)),
    "page_128_small_tiles": Case(128, (2, 2), num_rows=3, max_len=256, tiles=(16, 16), window="traced"),
    "one_token": Case(4, (4, 1), num_tokens=1, num_rows=1),
    "decodes_only": Case(8, (8, 2), 16, num_tokens=6, num_rows=6, max_len=150),
    "bfloat16": Case(16, (9, 3), 64, dtype="bfloat16"),
    "float16": Case(4, (4, 4), dtype="float16", tiles=(16, 16)),
    "bfloat16_pages": Case(4, (6, 2), kv_dtype="bfloat16", tiles=(16, 16), window=4),
    "sinks": Case(5, (6, 2), tiles=(16, 16), sinks=True),
    "sinks_soft_cap_window": Case(16, (4, 2), dtype="bfloat16", sinks=True, soft_cap=4.0, window=5),
    "alibi": Case(8, (6, 2), tiles=(16, 16), alibi=True, sinks=True),
    "int8_pages": Case(16, (4, 2), 16, dtype="bfloat16", kv_dtype="int8", window=20),
    "int8_pages_float32": Case(3, (4, 2), 16, kv_dtype="int8", tiles=(16, 16), soft_cap=4.0),
    "fp8_pages": Case(8, (6, 2), 16, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
}


@dataclass(frozen=True)
class Sequence:
    q_len: int
    kv_len: int


@dataclass(frozen=True)
class Inputs:
    """One call's arguments on the host, and the answer in float64 for the tokens that are real."""

    q: np.ndarray
    kv_pages: np.ndarray
    """Logical: no row or lane is padding."""
    kv_scales: np.ndarray | None
    is_used: np.ndarray
    """[rows of kv_pages, block_size]: slots that hold a token which some query sees."""
    kv_lens: np.ndarray
    block_tables: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray
    layer: np.ndarray
    window: np.ndarray | None
    sinks: np.ndarray | None
    alibi_slopes: np.ndarray | None
    poison: float
    expected: np.ndarray


def dense_attention(q, keys, values, offset, scale, window, soft_cap, sinks, slopes):
    """float64 attention of q [L, Hq, D] at positions offset.. over keys [K, Hkv, D]; a loop, and no masks."""
    group = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape)
    for i, head in np.ndindex(q.shape[:2]):
        position = offset + i
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        scores = keys[seen, head // group] @ q[i, head] * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if slopes is not None:
            scores = scores + slopes[head] * (np.arange(seen.start, seen.stop) - position)
        peak = max(scores.max(), -np.inf if sinks is None else sinks[head])
        weights = np.exp(scores - peak)
        total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[head] - peak))
        out[i, head] = weights @ values[seen, head // group] / total
    return out


def quantize(kv: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Rows of kv [..., D] as integers or fp8, and the scale of each row."""
    largest = float((ml_dtypes.iinfo if dtype == np.int8 else ml_dtypes.finfo)(dtype).max)
    scales = (np.abs(kv).max(axis=-1) / largest).astype(np.float32)
    scaled = kv / scales[..., None]
    return (np.rint(scaled) if dtype == np.int8 else scaled).astype(dtype), scales


def poison_of(dtype: np.dtype, poison: float) -> float:
    """Integers have no NaN: their poison is a large number."""
    return 127 if dtype == np.int8 else poison


def make_inputs(case: Case, sequences: list[Sequence], seed: int, poison: float, window: int | None) -> Inputs:
    """Sequences laid into shuffled pages; slots that no query sees, and padded queries, hold `poison`."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = case.heads
    dtype, kv_dtype = jnp.dtype(case.dtype), case.page_dtype
    shape = (case.layers * case.blocks_per_layer, case.block_size, 2 * kv_heads, case.head_dim)
    pages = np.full(shape, poison_of(kv_dtype, poison)).astype(kv_dtype)
    scales = np.full(shape[:3], poison, np.float32) if case.is_quantized else None
    is_used = np.zeros(shape[:2], bool)
    sinks = rng.standard_normal(heads).astype(np.float32) if case.sinks else None
    slopes = (2.0 ** -np.arange(1, heads + 1)).astype(np.float32) if case.alibi else None
    free = list(rng.permutation(np.arange(1, case.blocks_per_layer)))
    # entries past a sequence's end may be anything in range, and rows past num_seqs may hold anything at all
    tables = rng.integers(0, case.blocks_per_layer, (case.num_rows, case.table_width)).astype(np.int32)
    kv_lens = rng.integers(0, case.max_len, case.num_rows).astype(np.int32)
    q = np.full((case.num_tokens, heads, case.head_dim), poison, dtype)
    cu_q_lens = np.zeros(case.num_rows + 1, np.int32)
    layer = int(rng.integers(case.layers))
    expected, start = [], 0
    for s, sequence in enumerate(sequences):
        end, length = start + sequence.q_len, sequence.kv_len
        q[start:end] = rng.standard_normal((sequence.q_len, heads, case.head_dim))
        kv = rng.standard_normal((length, kv_heads, 2, case.head_dim))
        if case.is_quantized:
            kv, kv_scales = quantize(kv, kv_dtype)
            wide = kv.astype(np.float64) * kv_scales[..., None]
        else:
            kv = kv.astype(kv_dtype)
            wide = kv.astype(np.float64)
        offset = length - sequence.q_len
        first_seen = 0 if window is None else max(0, offset - window + 1)
        kv_lens[s], cu_q_lens[s + 1] = length, end
        for index in range(-(-length // case.block_size)):
            tables[s, index] = free.pop()
        for t in range(first_seen, length):
            slot = layer * case.blocks_per_layer + tables[s, t // case.block_size], t % case.block_size
            is_used[slot] = True
            pages[slot] = kv[t].reshape(2 * kv_heads, case.head_dim)
            if case.is_quantized:
                scales[slot] = kv_scales[t].reshape(-1)
        own = q[start:end].astype(np.float64)
        scale = case.head_dim**-0.5
        expected.append(
            dense_attention(own, wide[:, :, 0], wide[:, :, 1], offset, scale, window, case.soft_cap, sinks, slopes)
        )
        start = end
    cu_q_lens[len(sequences) + 1 :] = start
    return Inputs(
        q=q,
        kv_pages=pages,
        kv_scales=scales,
        is_used=is_used,
        kv_lens=kv_lens,
        block_tables=tables,
        cu_q_lens=cu_q_lens,
        num_seqs=np.array([len(sequences)], np.int32),
        layer=np.int32(layer),
        window=np.int32(window) if case.window == "traced" else None,
        sinks=sinks,
        alibi_slopes=slopes,
        poison=poison,
        expected=np.concatenate(expected) if expected else np.zeros((0, heads, case.head_dim)),
    )


def physical(
    implementation: str, pages: np.ndarray, scales: np.ndarray | None, is_used: np.ndarray, poison: float
) -> tuple[np.ndarray, np.ndarray | None]:
    """Pages and scales in the shape that the implementation's backend allocates: `poison` wherever nothing was
    written, zeros in the lanes that `write_kv_pages` fills up."""
    _, block_size, rows, head_dim = pages.shape
    shape = page_shape(
        page_backend(implementation),
        block_size=block_size,
        num_kv_heads=rows // 2,
        head_dim=head_dim,
        dtype=pages.dtype,
    )
    out = np.full((len(pages), *shape), poison_of(pages.dtype, poison)).astype(pages.dtype)
    out[..., :rows, :head_dim] = pages
    lanes = out[..., :rows, head_dim:]
    lanes[is_used] = np.zeros((), pages.dtype)
    if scales is None:
        return out, None
    wide = np.full((*scales.shape[:2], shape[1]), poison, np.float32)
    wide[..., :rows] = scales
    return out, wide


@cache
def compiled(case: Case, implementation: str, tiles: tuple[int, int] | None = None, interpret: object = True):
    """The op jitted for a case: layer, and a traced window, are arguments."""
    is_kernel = implementation in KERNELS
    if implementation == "xla" and tiles is None:
        tiles = case.tiles

    def run(q, kv_pages, kv_lens, block_tables, cu_q_lens, num_seqs, layer, window, sinks, alibi_slopes, kv_scales):
        return ragged_paged_attention(
            q,
            kv_pages,
            kv_lens,
            block_tables,
            cu_q_lens,
            num_seqs,
            layer=layer,
            blocks_per_layer=case.blocks_per_layer,
            num_kv_heads=case.heads[1],
            scale=case.head_dim**-0.5,
            sliding_window=window if case.window == "traced" else case.window,
            logit_soft_cap=case.soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            kv_scales=kv_scales,
            implementation=implementation,
            tiles=tiles,
            interpret=interpret if is_kernel else False,
        )

    return jax.jit(run)


def run(case: Case, implementation: str, inputs: Inputs, **options: object) -> np.ndarray:
    """Outputs of the real tokens as float64."""
    pages, scales = physical(implementation, inputs.kv_pages, inputs.kv_scales, inputs.is_used, inputs.poison)
    out = compiled(case, implementation, **options)(
        inputs.q,
        pages,
        inputs.kv_lens,
        inputs.block_tables,
        inputs.cu_q_lens,
        inputs.num_seqs,
        inputs.layer,
        inputs.window,
        inputs.sinks,
        inputs.alibi_slopes,
        scales,
    )
    assert out.dtype == inputs.q.dtype
    return np.asarray(out, np.float64)[: inputs.cu_q_lens[-1]]


def check(case: Case, implementation: str, inputs: Inputs, **options: object) -> None:
    """The reference against float64, and the implementation against the reference."""
    reference = run(case, "reference", inputs)
    np.testing.assert_allclose(reference, inputs.expected, rtol=0, atol=case.tolerance)
    if implementation != "reference":
        fast = run(case, implementation, inputs, **options)
        np.testing.assert_allclose(fast, reference, rtol=0, atol=case.tolerance)


@st.composite
def batches(draw, case: Case) -> list[Sequence]:
    """Decodes and prefill chunks in any order, their lengths often at the edges of pages and tiles."""
    tile = case.tiles or (64, 64)
    edges = {1, 2, case.max_len}
    for unit in (case.block_size, *tile):
        edges |= {n for n in (unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1) if 1 <= n <= case.max_len}
    lengths = st.one_of(st.just(1), st.sampled_from(sorted(edges)), st.integers(1, case.max_len))
    sequences, left = [], case.num_tokens
    for _ in range(draw(st.integers(1, case.num_rows))):
        if left == 0:
            break
        q_len = max(1, min(draw(lengths), left))
        kv_len = min(case.max_len, max(q_len, draw(lengths)))
        sequences.append(Sequence(q_len, kv_len))
        left -= q_len
    return sequences

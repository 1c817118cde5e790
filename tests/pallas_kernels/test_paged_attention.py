"""Every implementation against the specification, and the specification against float64 in numpy."""

import inspect
import json
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS

FAST = sorted(set(IMPLEMENTATIONS) - {"reference"})
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
    tiles: tuple[int, int] | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None

    @property
    def table_width(self) -> int:
        return -(-self.max_len // self.block_size)

    @property
    def blocks_per_layer(self) -> int:
        return 1 + self.num_rows * self.table_width + 3


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
    "bfloat16": Case(16, (9, 3), 64, dtype="bfloat16"),
    "float16": Case(4, (4, 4), dtype="float16", tiles=(16, 16)),
    "bfloat16_pages": Case(4, (6, 2), kv_dtype="bfloat16", tiles=(16, 16), window=4),
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
    kv_lens: np.ndarray
    block_tables: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray
    layer: np.ndarray
    window: np.ndarray | None
    expected: np.ndarray


def dense_attention(q, keys, values, offset, scale, window, soft_cap):
    """float64 attention of q [L, Hq, D] at positions offset.. over keys [K, Hkv, D]; a loop, and no masks."""
    group = q.shape[1] // keys.shape[1]
    out = np.zeros(q.shape)
    for i, head in np.ndindex(q.shape[:2]):
        position = offset + i
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        scores = keys[seen, head // group] @ q[i, head] * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores - scores.max())
        out[i, head] = weights @ values[seen, head // group] / weights.sum()
    return out


def make_inputs(case: Case, sequences: list[Sequence], seed: int, poison: float, window: int | None) -> Inputs:
    """Sequences laid into shuffled pages; slots that no query sees, and padded queries, hold `poison`."""
    rng = np.random.default_rng(seed)
    heads, kv_heads = case.heads
    dtype, kv_dtype = jnp.dtype(case.dtype), jnp.dtype(case.kv_dtype or case.dtype)
    pages = np.full(
        (case.layers * case.blocks_per_layer, case.block_size, 2 * kv_heads, case.head_dim), poison, kv_dtype
    )
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
        kv = rng.standard_normal((length, kv_heads, 2, case.head_dim)).astype(kv_dtype)
        offset = length - sequence.q_len
        first_seen = 0 if window is None else max(0, offset - window + 1)
        kv_lens[s], cu_q_lens[s + 1] = length, end
        for index in range(-(-length // case.block_size)):
            tables[s, index] = free.pop()
        for t in range(first_seen, length):
            row = layer * case.blocks_per_layer + tables[s, t // case.block_size]
            pages[row, t % case.block_size, 0::2] = kv[t, :, 0]
            pages[row, t % case.block_size, 1::2] = kv[t, :, 1]
        wide = kv.astype(np.float64)
        own = q[start:end].astype(np.float64)
        expected.append(
            dense_attention(own, wide[:, :, 0], wide[:, :, 1], offset, case.head_dim**-0.5, window, case.soft_cap)
        )
        start = end
    cu_q_lens[len(sequences) + 1 :] = start
    return Inputs(
        q,
        pages,
        kv_lens,
        tables,
        cu_q_lens,
        np.array([len(sequences)], np.int32),
        np.int32(layer),
        np.int32(window) if case.window == "traced" else None,
        np.concatenate(expected) if expected else np.zeros((0, heads, case.head_dim)),
    )


@cache
def compiled(case: Case, implementation: str):
    """The op jitted for a case: layer, and a traced window, are arguments."""

    def run(q, kv_pages, kv_lens, block_tables, cu_q_lens, num_seqs, layer, window):
        return ragged_paged_attention(
            q,
            kv_pages,
            kv_lens,
            block_tables,
            cu_q_lens,
            num_seqs,
            layer=layer,
            blocks_per_layer=case.blocks_per_layer,
            scale=case.head_dim**-0.5,
            sliding_window=window if case.window == "traced" else case.window,
            logit_soft_cap=case.soft_cap,
            implementation=implementation,
            tiles=None if implementation == "reference" else case.tiles,
        )

    return jax.jit(run)


def run(case: Case, implementation: str, inputs: Inputs) -> np.ndarray:
    """Outputs of the real tokens as float64."""
    out = compiled(case, implementation)(
        inputs.q,
        inputs.kv_pages,
        inputs.kv_lens,
        inputs.block_tables,
        inputs.cu_q_lens,
        inputs.num_seqs,
        inputs.layer,
        inputs.window,
    )
    assert out.dtype == inputs.q.dtype
    return np.asarray(out, np.float64)[: inputs.cu_q_lens[-1]]


def check(case: Case, implementation: str, inputs: Inputs) -> None:
    tolerance = TOLERANCE["float32" if case.dtype == "float32" and not case.kv_dtype else case.dtype]
    if case.kv_dtype == "bfloat16":
        tolerance = TOLERANCE["bfloat16"]
    reference = run(case, "reference", inputs)
    np.testing.assert_allclose(reference, inputs.expected, rtol=0, atol=tolerance)
    if implementation != "reference":
        fast = run(case, implementation, inputs)
        np.testing.assert_allclose(fast, reference, rtol=0, atol=tolerance)


@st.composite
def batches(draw, case: Case) -> list[Sequence]:
    """Decodes and prefill chunks in any order, their lengths often at the edges of pages and tiles."""
    tile = case.tiles or (64, 64)
    edges = {1, 2, case.max_len}
    for unit in (case.block_size, *tile):
        edges |= {unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1}
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


IMPLEMENTATION_NAMES = ["reference", *FAST]


@pytest.mark.parametrize("implementation", FAST)
class TestImplementation:
    """One class for every implementation by name: a kernel that is added is tested by being in the table.

    `check` holds the reference itself to the float64 answer on the same inputs.
    """

    @pytest.mark.parametrize("name", CASES)
    def test_any_batch(self, name, implementation):
        case = CASES[name]

        @settings(max_examples=25)
        @given(
            batches(case),
            st.integers(0, 2**32 - 1),
            st.sampled_from(sorted(POISONS)),
            st.sampled_from([1, 4, 5, 1000]),
        )
        def test(sequences, seed, poison, traced_window):
            window = traced_window if case.window == "traced" else case.window
            check(case, implementation, make_inputs(case, sequences, seed, POISONS[poison], window))

        test()

    @pytest.mark.parametrize("window", [None, 1, 4, 5])
    def test_every_short_chunk_in_one_call(self, window, implementation):
        pairs = [Sequence(q, kv) for kv in range(1, 10) for q in range(1, kv + 1)]
        rng = np.random.default_rng(0)
        sequences = [pairs[i] for i in rng.permutation(len(pairs))]
        case = Case(
            4,
            num_tokens=sum(s.q_len for s in pairs) + 5,
            num_rows=len(pairs) + 3,
            max_len=12,
            tiles=(4, 8),
            window=window,
        )
        check(case, implementation, make_inputs(case, sequences, 1, np.nan, window))

    def test_decodes_of_every_length_around_two_tiles(self, implementation):
        case = Case(4, num_tokens=70, num_rows=70, max_len=68, tiles=(16, 32))
        sequences = [Sequence(1, length) for length in range(1, 69)]
        check(case, implementation, make_inputs(case, sequences, 2, np.nan, None))

    @pytest.mark.parametrize("poison", POISONS)
    def test_poison_in_unused_slots_stays_there(self, poison, implementation):
        """G14: the context lengths of the report, as decodes, as chunks, and mixed, in one padded batch."""
        lengths = (1, 3, 4, 5, 8, 9)
        case = Case(4, num_tokens=64, num_rows=16, max_len=16, tiles=(4, 8))
        decodes = [Sequence(1, n) for n in lengths]
        chunks = [Sequence(n, n) for n in lengths]
        mixed = [Sequence(3, 5), Sequence(1, 9), Sequence(2, 8), Sequence(1, 1), Sequence(4, 4)]
        for sequences in (decodes, chunks, mixed):
            check(case, implementation, make_inputs(case, sequences, 4, POISONS[poison], None))

    def test_a_sequence_does_not_depend_on_its_batch_mates(self, implementation):
        case = Case(4, num_tokens=40, num_rows=5, max_len=32, tiles=(16, 16))
        sequences = [Sequence(9, 21), Sequence(1, 30), Sequence(17, 17), Sequence(1, 4)]
        inputs = make_inputs(case, sequences, 5, np.nan, None)
        together = run(case, implementation, inputs)
        for s, sequence in enumerate(sequences):
            start = inputs.cu_q_lens[s]
            alone = replace(
                inputs,
                q=np.roll(inputs.q, -start, axis=0),
                kv_lens=np.roll(inputs.kv_lens, -s),
                block_tables=np.roll(inputs.block_tables, -s, axis=0),
                cu_q_lens=np.array([0] + [sequence.q_len] * case.num_rows, np.int32),
                num_seqs=np.array([1], np.int32),
            )
            np.testing.assert_allclose(
                run(case, implementation, alone), together[start : start + sequence.q_len], rtol=0, atol=2e-6
            )

    def test_no_sequences_at_all(self, implementation):
        case = Case(4, num_tokens=8, num_rows=2, max_len=8)
        assert run(case, implementation, make_inputs(case, [], 6, np.nan, None)).shape == (0, 4, 8)

    def test_static_layer_equals_traced_layer(self, implementation):
        case = Case(4, num_tokens=8, num_rows=2, max_len=16, layers=3)
        inputs = make_inputs(case, [Sequence(4, 9), Sequence(1, 3)], 7, np.nan, None)
        out = ragged_paged_attention(
            *(jnp.asarray(getattr(inputs, n)) for n in ("q", "kv_pages", "kv_lens", "block_tables", "cu_q_lens")),
            jnp.asarray(inputs.num_seqs),
            layer=int(inputs.layer),
            blocks_per_layer=case.blocks_per_layer,
            scale=case.head_dim**-0.5,
            implementation=implementation,
        )
        np.testing.assert_allclose(np.asarray(out)[:5], inputs.expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATION_NAMES)
@pytest.mark.parametrize("window", [1, 4, 5])
def test_a_window_of_w_shows_exactly_w_keys(window, implementation):
    """S02. With queries of 0 all weights are equal, and one-hot values tell which keys had one."""
    case = Case(3, (2, 1), 32, num_tokens=64, num_rows=4, max_len=32, layers=1, tiles=(7, 5), window=window)
    sequences = [Sequence(20, 20), Sequence(1, 9), Sequence(1, 2), Sequence(6, 17)]
    inputs = make_inputs(case, sequences, 3, np.nan, window)
    for s, sequence in enumerate(sequences):
        for t in range(sequence.kv_len):
            row = inputs.block_tables[s, t // case.block_size]
            inputs.kv_pages[row, t % case.block_size, 1] = np.eye(32)[t]
    out = run(case, implementation, replace(inputs, q=np.zeros_like(inputs.q)))
    token = 0
    for sequence in sequences:
        for position in range(sequence.kv_len - sequence.q_len, sequence.kv_len):
            count = min(position + 1, window)
            seen = np.zeros(32)
            seen[position - count + 1 : position + 1] = 1 / count
            np.testing.assert_allclose(out[token], np.stack([seen, seen]), atol=1e-6)
            token += 1


@pytest.mark.parametrize("implementation", IMPLEMENTATION_NAMES)
def test_poison_that_a_later_query_sees_does_not_reach_earlier_ones(implementation, request):
    """One chunk, whose query at position 4 sees a NaN that those before it do not."""
    if implementation == "xla":
        reason = "guards whole tiles: what one query of a chunk sees, its earlier ones multiply by 0"
        request.applymarker(pytest.mark.xfail(strict=True, reason=reason))
    case = Case(4, num_tokens=6, num_rows=1, max_len=8, layers=1, tiles=(16, 16))
    inputs = make_inputs(case, [Sequence(6, 6)], 8, np.nan, None)
    inputs.kv_pages[inputs.block_tables[0, 1], 0] = np.nan
    out = run(case, implementation, inputs)
    assert np.isnan(out[4:]).all()
    np.testing.assert_allclose(out[:4], inputs.expected[:4], rtol=0, atol=2e-5)


def read_vector(vectors, case: str, entry: dict, name: str) -> np.ndarray:
    """One array of an ONNX case; bfloat16 is stored as its bits."""
    array = vectors[f"{case}/{name}"]
    return array.view(jnp.bfloat16) if entry["dtypes"][name] == "bfloat16" else array


def call(*, q=(4, 4, 8), pages=(6, 4, 4, 8), blocks_per_layer=3, **options):
    # unwrapped: the tests' shape checker would answer first
    return inspect.unwrap(ragged_paged_attention)(
        jnp.zeros(q),
        jnp.zeros(pages),
        jnp.ones(2, jnp.int32),
        jnp.zeros((2, 2), jnp.int32),
        jnp.array([0, 1, 2], jnp.int32),
        jnp.array([2], jnp.int32),
        layer=0,
        blocks_per_layer=blocks_per_layer,
        scale=1.0,
        **options,
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"q": (4, 4, 16)}, "q has head_dim 16, the pages have 8"),
        ({"q": (4, 3, 8)}, "3 query heads do not divide into groups over 2 KV heads"),
        ({"blocks_per_layer": 4}, "6 page rows are not whole layers of 4 blocks"),
        ({"implementation": "cuda"}, "unknown attention implementation 'cuda'; known: reference, xla"),
        (
            {"implementation": "reference", "tiles": (16, 16)},
            "tiles have no effect on the reference implementation",
        ),
    ],
)
def test_refusals_are_sentences(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(**arguments)


# Of the 137 cases, one of each kind that is this op: no masks, values of the keys' size, no empty rows.
ONNX_CASES = [
    "test_attention_3d_gqa",
    "test_attention_3d_gqa_causal",
    "test_attention_4d_causal_bf16",
    "test_attention_4d_causal_fp16",
    "test_attention_4d_causal_nonpad_batch_prefill",
    "test_attention_4d_causal_nonpad_continued_prefill",
    "test_attention_4d_causal_with_past_and_present",
    "test_attention_4d_fp16",
    "test_attention_4d_gqa_causal_nonpad_decode",
    "test_attention_4d_gqa_causal_nonpad_decode_fp16",
    "test_attention_4d_gqa_scaled",
    "test_attention_4d_gqa_softcap",
    "test_attention_local_window",
]


def heads_apart(x: np.ndarray, count: int | None) -> np.ndarray:
    """[batch, heads, length, D], or [batch, length, count * D], as [batch, length, heads, D]."""
    return np.moveaxis(x, 1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], count, -1)


@pytest.mark.parametrize("implementation", IMPLEMENTATION_NAMES)
@pytest.mark.parametrize("name", ONNX_CASES)
def test_onnx_attention_vectors(shared, name, implementation):
    """The ONNX reference's outputs, from contiguous keys and values that are laid into shuffled pages.

    Causal queries are one sequence for each batch entry; queries that see all keys are decodes that share
    a table.
    """
    folder = shared / "reference" / "onnx_attention"
    entry = json.loads((folder / "index.json").read_text())[name]
    attrs = entry["attrs"]
    with np.load(folder / "vectors.npz") as vectors:
        inputs = {n: read_vector(vectors, name, entry, n) for n in [*entry["node_inputs"], "out:Y"] if n}
    q, expected = (heads_apart(inputs[n], attrs.get("q_num_heads")) for n in ("Q", "out:Y"))
    k, v = (heads_apart(inputs[n], attrs.get("kv_num_heads")) for n in ("K", "V"))
    num, length, heads, head_dim = q.shape
    past = inputs["past_key"].shape[2] if "past_key" in inputs else 0
    if past:
        k = np.concatenate([heads_apart(inputs["past_key"], None), k], axis=1)
        v = np.concatenate([heads_apart(inputs["past_value"], None), v], axis=1)
    causal = attrs.get("is_causal", 0) == 1
    # without a length of its own, a causal query i sees the past and keys 0..i
    lens = inputs.get("nonpad_kv_seqlen", np.full(num, past + length if causal else k.shape[1]))
    block_size, rng = 3, np.random.default_rng(8)
    width = -(-k.shape[1] // block_size)
    pages = np.full((1 + num * width, block_size, 2 * k.shape[2], head_dim), np.nan, k.dtype)
    tables = (1 + rng.permutation(num * width)).reshape(num, width).astype(np.int32)
    for b, t in np.ndindex(k.shape[:2]):
        pages[tables[b, t // block_size], t % block_size, 0::2] = k[b, t]
        pages[tables[b, t // block_size], t % block_size, 1::2] = v[b, t]
    q_lens = [length] * num if causal else [1] * (num * length)
    repeat = 1 if causal else length
    options = {
        "scale": attrs.get("scale", head_dim**-0.5),
        "sliding_window": attrs["left_window_size"] + 1 if "left_window_size" in attrs else None,
        "logit_soft_cap": attrs.get("softcap"),
        "implementation": implementation,
    }
    out = jax.jit(partial(ragged_paged_attention, layer=0, blocks_per_layer=len(pages), **options))(
        q.reshape(num * length, heads, head_dim),
        pages,
        np.repeat(lens, repeat).astype(np.int32),
        np.repeat(tables, repeat, axis=0),
        np.cumsum([0, *q_lens], dtype=np.int32),
        np.array([len(q_lens)], np.int32),
    )
    # theirs rounds bfloat16 scores and weights, too
    tolerance = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 3e-2}[entry["dtypes"]["Q"]]
    np.testing.assert_allclose(
        np.asarray(out, np.float64).reshape(expected.shape),
        expected.astype(np.float64),
        rtol=0,
        atol=tolerance,
    )

"""Every implementation against the specification, and the specification against float64 in numpy."""

import inspect
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import (
    CASES,
    EXAMPLES,
    FAST,
    IMPLEMENTATION_NAMES,
    POISONS,
    Case,
    Sequence,
    batches,
    check,
    make_inputs,
    physical,
    run,
)

from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.pick import KERNELS

QUICK_CASES = [
    "page_1_tiles_7_5",
    "page_4_traced_window",
    "page_16_soft_cap_window",
    "page_128",
    "one_token",
    "decodes_only",
    "bfloat16",
    "float16",
    "bfloat16_pages",
    "sinks_soft_cap_window",
    "alibi",
    "int8_pages",
    "fp8_pages",
]
REFUSED = {("mosaic_tpu", "float16"): "pages of float16 are none that a TPU's vector unit loads"}
"""Cases that an implementation does not serve, and what it says."""
TILES = {
    "xla": [(7, 5), (16, 16), (32, 128)],
    "mosaic_tpu": [(1, 16), (8, 64), (16, 256)],
    "mosaic_gpu": [(8, 128)],
    "triton": [(1, 16), (8, 32), (16, 128)],
}


def each(*, quick, names=FAST, **values):
    """The test with each value and each implementation. Mosaic GPU's interpreter takes many seconds for each: there all
    but the `quick` values are slow tests."""
    ((name, all_values),) = values.items()
    parameters = [
        pytest.param(value, implementation, marks=pytest.mark.slow if is_slow else ())
        for implementation in names
        for value in all_values
        for is_slow in [implementation == "mosaic_gpu" and value not in quick]
    ]
    return pytest.mark.parametrize((name, "implementation"), parameters)


class TestImplementation:
    """One class for every implementation by name: a kernel that is added is tested by being in the table.

    `check` holds the reference itself to the float64 answer on the same inputs.
    """

    @each(name=CASES, quick=QUICK_CASES)
    def test_any_batch(self, name, implementation):
        case = CASES[name]
        if (implementation, name) in REFUSED:
            with pytest.raises(ValueError, match=REFUSED[implementation, name]):
                check(case, implementation, make_inputs(case, [Sequence(3, 5)], 0, np.nan, None))
            return

        @settings(max_examples=EXAMPLES[implementation])
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

    @each(window=[None, 1, 4, 5], quick=[5])
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

    @each(block_size=[4], quick=[])
    def test_decodes_of_every_length_around_two_tiles(self, block_size, implementation):
        case = Case(block_size, num_tokens=70, num_rows=70, max_len=68, tiles=(16, 32))
        sequences = [Sequence(1, length) for length in range(1, 69)]
        check(case, implementation, make_inputs(case, sequences, 2, np.nan, None))

    @each(poison=POISONS, quick=["nan"])
    def test_poison_in_unused_slots_stays_there(self, poison, implementation):
        """G14: the context lengths of the report, as decodes, as chunks, and mixed, in one padded batch."""
        lengths = (1, 3, 4, 5, 8, 9)
        case = Case(4, num_tokens=64, num_rows=16, max_len=16, tiles=(4, 8))
        decodes = [Sequence(1, n) for n in lengths]
        chunks = [Sequence(n, n) for n in lengths]
        mixed = [Sequence(3, 5), Sequence(1, 9), Sequence(2, 8), Sequence(1, 1), Sequence(4, 4)]
        for sequences in (decodes, chunks, mixed):
            check(case, implementation, make_inputs(case, sequences, 4, POISONS[poison], None))

    @each(block_size=[4], quick=[])
    def test_a_sequence_does_not_depend_on_its_batch_mates(self, block_size, implementation):
        case = Case(block_size, num_tokens=40, num_rows=5, max_len=32, tiles=(16, 16))
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

    @pytest.mark.parametrize("implementation", FAST)
    def test_no_sequences_at_all(self, implementation):
        case = Case(4, num_tokens=8, num_rows=2, max_len=8)
        assert run(case, implementation, make_inputs(case, [], 6, np.nan, None)).shape == (0, 4, 8)

    @pytest.mark.parametrize("implementation", FAST)
    def test_static_layer_equals_traced_layer(self, implementation):
        case = Case(4, num_tokens=8, num_rows=2, max_len=16, layers=3)
        inputs = make_inputs(case, [Sequence(4, 9), Sequence(1, 3)], 7, np.nan, None)
        pages, _ = physical(implementation, inputs.kv_pages, None, inputs.is_used, inputs.poison)
        out = ragged_paged_attention(
            *map(jnp.asarray, (inputs.q, pages, inputs.kv_lens, inputs.block_tables, inputs.cu_q_lens)),
            jnp.asarray(inputs.num_seqs),
            layer=int(inputs.layer),
            blocks_per_layer=case.blocks_per_layer,
            num_kv_heads=2,
            scale=case.head_dim**-0.5,
            implementation=implementation,
            interpret=implementation in KERNELS,
        )
        np.testing.assert_allclose(np.asarray(out)[:5], inputs.expected, rtol=0, atol=2e-5)

    @each(dtype=["float32", "bfloat16"], quick=["bfloat16"])
    def test_lengths_around_a_tile_of_64(self, dtype, implementation):
        """G16: chunks that are shorter than their keys by nothing, one token, almost a tile, and more than one."""
        lengths = (1, 63, 64, 65, 127, 192)
        sequences = [Sequence(n - less, n) for n in lengths for less in (0, 1, 63, 100) if less < n]
        total = sum(s.q_len for s in sequences)
        case = Case(
            16,
            (1, 1),
            16,
            num_tokens=total,
            num_rows=len(sequences),
            max_len=192,
            layers=1,
            tiles=(64, 64),
            dtype=dtype,
        )
        inputs = make_inputs(case, sequences, 9, np.nan, None)
        first = run(case, implementation, inputs)
        np.testing.assert_allclose(first, inputs.expected, rtol=0, atol=case.tolerance)
        for _ in range(2):
            np.testing.assert_array_equal(run(case, implementation, inputs), first)

    @each(head_dim=[64, 80, 96, 112, 128, 192, 256], quick=[80, 256])
    def test_head_dims(self, head_dim, implementation):
        """G17: the softmax scale is that of the true size, whatever the pages are padded to."""
        case = Case(16, (2, 1), head_dim, num_tokens=9, num_rows=3, max_len=48)
        inputs = make_inputs(case, [Sequence(5, 21), Sequence(1, 33), Sequence(3, 3)], 10, np.nan, None)
        check(case, implementation, inputs)

    @each(block_size=[1, 2, 5, 7, 12, 24, 32, 64, 100, 256, 509, 512], quick=[7, 24, 512])
    def test_page_sizes(self, block_size, implementation):
        case = Case(
            block_size, (2, 1), 16, num_tokens=24, num_rows=3, max_len=max(80, block_size + 3), dtype="bfloat16"
        )
        sequences = [Sequence(17, min(70, case.max_len)), Sequence(1, case.max_len), Sequence(2, 2)]
        check(case, implementation, make_inputs(case, sequences, 11, np.nan, None))


@pytest.mark.parametrize(("implementation", "tiles"), [(name, tiles) for name in TILES for tiles in TILES[name]])
def test_tiles_change_nothing(implementation, tiles):
    case = Case(16, (4, 2), 16, num_tokens=60, num_rows=4, max_len=300, window="traced")
    sequences = [Sequence(1, 290), Sequence(40, 130), Sequence(17, 17), Sequence(2, 129)]
    for window in (1000, 64):
        check(case, implementation, make_inputs(case, sequences, 12, np.nan, window), tiles=tiles)


@each(window=[1, 4, 5], quick=[5], names=IMPLEMENTATION_NAMES)
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
def test_a_long_tail_of_small_weights_is_not_lost_in_float16(implementation):
    """Values with a small scale, behind one strong key of value 0: a weight times the scale underflows."""
    case = Case(64, (1, 1), 16, num_tokens=1, num_rows=1, max_len=1024, layers=1, dtype="float16", kv_dtype="int8")
    inputs = make_inputs(case, [Sequence(1, 1000)], 13, np.nan, None)
    pages, scales = inputs.kv_pages, inputs.kv_scales
    rows = inputs.block_tables[0]
    pages[rows], scales[rows, :, 0], scales[rows, :, 1] = 0, 1.0, 1e-4
    pages[rows, :, 1] = 100
    pages[rows[0], 0, 0], pages[rows[0], 0, 1] = 36, 0
    q = np.zeros_like(inputs.q)
    q[..., :] = 0.0625  # 36 * 16 * 0.0625 / 4 = 9
    expected = 999 * 100 * 1e-4 / (999 + np.exp(9.0))
    out = run(case, implementation, replace(inputs, q=q))
    np.testing.assert_allclose(out, expected, rtol=5e-3)


def test_poison_that_a_later_query_sees_does_not_reach_earlier_ones():
    """The reference alone promises it. The others guard whole tiles: what one query of a chunk sees, its earlier
    ones multiply by 0."""
    case = Case(4, num_tokens=6, num_rows=1, max_len=8, layers=1)
    inputs = make_inputs(case, [Sequence(6, 6)], 8, np.nan, None)
    inputs.kv_pages[inputs.block_tables[0, 1], 0] = np.nan
    out = run(case, "reference", inputs)
    assert np.isnan(out[4:]).all()
    np.testing.assert_allclose(out[:4], inputs.expected[:4], rtol=0, atol=2e-5)


class TestDebug:
    """Block ids that are out of range are refused, and only those that a sequence needs."""

    @pytest.mark.parametrize(
        ("tables", "sentence"),
        [
            ([[1, 3], [2, 0]], "entry 1 of sequence 0's block table is 3: block ids are 0 to 2"),
            ([[1, 0], [-1, 0]], "entry 0 of sequence 1's block table is -1: block ids are 0 to 2"),
        ],
    )
    def test_out_of_range(self, tables, sentence):
        tables, lens = jnp.array(tables, jnp.int32), jnp.array([5, 3], jnp.int32)
        with pytest.raises(ValueError, match=sentence):
            call(tables=tables, kv_lens=lens, debug=True)
        traced = jax.jit(lambda t: call(tables=t, kv_lens=lens, debug=True))
        with pytest.raises(Exception, match=sentence):  # JAX's own runtime error around it
            jax.block_until_ready([traced(tables), jax.effects_barrier()])

    def test_what_no_sequence_needs_may_be_anything(self):
        tables = np.array([[1, 99], [2, 99]], np.int32)
        assert np.isfinite(call(tables=tables, kv_lens=np.array([4, 3], np.int32), debug=True)).all()

    def test_a_table_that_is_too_narrow(self):
        with pytest.raises(ValueError, match="sequence 1 has 9 tokens, its block table holds 8"):
            call(kv_lens=np.array([1, 9], np.int32), debug=True)


def call(
    *, q=(4, 4, 8), pages=(6, 4, 4, 8), blocks_per_layer=3, kv_dtype="float32", tables=None, kv_lens=None, **options
):
    # unwrapped: the tests' shape checker would answer first
    return inspect.unwrap(ragged_paged_attention)(
        jnp.zeros(q),
        jnp.zeros(pages, kv_dtype),
        jnp.ones(2, jnp.int32) if kv_lens is None else jnp.asarray(kv_lens),
        jnp.zeros((2, 2), jnp.int32) if tables is None else jnp.asarray(tables),
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
        ({"implementation": "cuda"}, "unknown attention implementation 'cuda'; known: reference, xla, mosaic_tpu"),
        (
            {"implementation": "reference", "tiles": (16, 16)},
            "tiles have no effect on the reference implementation",
        ),
        ({"num_kv_heads": 4}, "the pages have 4 rows a token, too few for keys and values of 4 heads"),
        ({"kv_dtype": "int8"}, "pages of int8 need kv_scales"),
        ({"kv_scales": jnp.zeros((6, 4, 4))}, "kv_scales have no effect on pages of float32"),
        (
            {"implementation": "mosaic_tpu"},
            "cannot serve this call: it is for a TPU, not a CPU",
        ),
        ({"implementation": "mosaic_gpu"}, "cannot serve this call: it is for a GPU, not a CPU"),
        ({"implementation": "triton"}, "cannot serve this call: it is for a GPU, not a CPU"),
        ({"implementation": "xla", "interpret": True}, "it is no Pallas kernel, so interpret has no effect on it"),
        ({"tiles": (0, 16)}, r"tiles are \(query tokens, key tokens\), each at least 1, not \(0, 16\)"),
        ({"sliding_window": -1}, "sliding_window is -1: a query sees at least itself; None is no window"),
        ({"logit_soft_cap": 0.0}, "logit_soft_cap is 0.0, which is not above 0: None is no cap"),
        ({"interpret": True}, "interpret has no effect unless implementation names a kernel"),
    ],
)
def test_refusals_are_sentences(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(**arguments)

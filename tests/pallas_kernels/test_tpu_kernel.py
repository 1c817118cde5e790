"""What is special to the TPU kernels: their copies do not race, what they read they have written, what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from ragged_batches import Case, Sequence, check, make_inputs, run

from pallas_kernels.kv_pages import page_shape, write_kv_pages
from pallas_kernels.paged_attention import tpu
from pallas_kernels.paged_attention.shapes import AttentionShapes

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
"""Raises on a race; what a kernel has not written is NaN. Hundreds of times slower than interpret=True: tiny shapes."""


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


class TestStrictInterpreter:
    @pytest.mark.parametrize(
        ("case", "sequences"),
        [
            pytest.param(
                Case(4, (4, 2), num_tokens=16, num_rows=6, max_len=24),
                [Sequence(3, 20), Sequence(1, 17), Sequence(1, 1), Sequence(5, 5), Sequence(1, 8)],
                id="mixed",
            ),
            pytest.param(
                Case(4, (2, 1), num_tokens=12, num_rows=4, max_len=40, window=5, sinks=True, alibi=True),
                [Sequence(1, 37), Sequence(6, 29), Sequence(2, 2)],
                id="window",
            ),
            pytest.param(
                Case(3, (4, 2), num_tokens=4, num_rows=4, max_len=24),
                [Sequence(1, 17), Sequence(1, 24), Sequence(1, 3)],
                id="decodes",
            ),
            pytest.param(
                Case(4, (4, 2), num_tokens=8, num_rows=3, max_len=24, window=7, dtype="bfloat16", kv_dtype="int8"),
                [Sequence(3, 20), Sequence(1, 17)],
                id="int8_pages",
            ),
            pytest.param(
                Case(16, (2, 1), num_tokens=8, num_rows=2, max_len=48, soft_cap=3.0),
                [Sequence(3, 33), Sequence(1, 17)],
                id="pages_larger_than_tiles",
            ),
            pytest.param(
                Case(4, (9, 9), num_tokens=4, num_rows=2, max_len=16),
                [Sequence(3, 11)],
                id="heads_in_a_loop_and_one_more",
            ),
        ],
    )
    def test_attention(self, case, sequences):
        inputs = make_inputs(case, sequences, 0, np.nan, case.window)
        check(case, "mosaic_tpu", inputs, tiles=(4, 8), interpret=STRICT)

    def test_a_block_id_that_is_out_of_range_is_noticed(self):
        """Interpret=True would read some other page."""
        case = Case(4, (2, 1), num_tokens=2, num_rows=2, max_len=24)
        inputs = make_inputs(case, [Sequence(1, 17)], 0, np.nan, None)
        inputs.block_tables[0, 4] = case.layers * case.blocks_per_layer
        with pytest.raises(Exception, match="Out-of-bounds read"):  # JAX's own runtime error around it
            run(case, "mosaic_tpu", inputs, tiles=(4, 8), interpret=STRICT)

    @pytest.mark.parametrize("num_tokens", [3, 40])
    def test_write_kv_pages(self, num_tokens):
        """More tokens than copies are under way at once, and fewer; padded ones all name one slot."""
        rng = np.random.default_rng(num_tokens)
        block_size, blocks_per_layer, heads, head_dim = 4, 16, 3, 16
        page = page_shape(
            "tpu", block_size=block_size, num_kv_heads=heads, head_dim=head_dim, dtype=jnp.dtype("bfloat16")
        )
        pages = jnp.asarray(rng.standard_normal((2 * blocks_per_layer, *page)), jnp.bfloat16)
        keys, values = jnp.asarray(rng.standard_normal((2, num_tokens, heads, head_dim)), jnp.float32)
        slots = rng.permutation(np.arange(block_size, blocks_per_layer * block_size))[:num_tokens].astype(np.int32)
        slots[rng.random(num_tokens) < 0.3] = 0
        where = jnp.asarray(slots // block_size), jnp.asarray(slots % block_size)
        options = {"layer": jnp.int32(1), "blocks_per_layer": blocks_per_layer}
        out = write_kv_pages(pages, keys, values, *where, **options, implementation="mosaic_tpu", interpret=STRICT)
        expected = write_kv_pages(pages, keys, values, *where, **options, implementation="xla")
        # padded tokens are not written at all
        expected = expected.at[blocks_per_layer].set(pages[blocks_per_layer])
        np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(expected, np.float32))


def shapes_of(*, page=None, dtype="bfloat16", kv_dtype="bfloat16", **options) -> AttentionShapes:
    values = {
        "num_tokens": 64,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "num_sequences": 8,
        "table_width": 128,
        "num_pages": 1000,
        "block_size": 16,
    }
    values |= options
    names = ("block_size", "num_kv_heads", "head_dim")
    page = page or page_shape("tpu", **{name: values[name] for name in names}, dtype=jnp.dtype(kv_dtype))
    return AttentionShapes(
        **values, page_rows=page[1], page_head_dim=page[2], dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(kv_dtype)
    )


class TestRefusal:
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 256])
    @pytest.mark.parametrize("kv_dtype", ["bfloat16", "float32", "int8", "float8_e4m3fn"])
    @pytest.mark.parametrize("block_size", [1, 7, 16, 512])
    def test_serves(self, head_dim, kv_dtype, block_size):
        assert tpu.refusal(shapes_of(head_dim=head_dim, kv_dtype=kv_dtype, block_size=block_size), None) is None

    @pytest.mark.parametrize("page", [(16, 4, 64), (16, 8, 128)])
    def test_pages_of_another_shape(self, page):
        problem = tpu.refusal(shapes_of(page=page), None)
        assert problem.startswith("its pages have 4 rows of 128 elements a token where these have ")
        assert "page_shape('tpu', ...)" in problem

    def test_pages_of_a_type_that_the_chip_does_not_have(self):
        problem = tpu.refusal(shapes_of(kv_dtype="float16"), None)
        assert problem.startswith("pages of float16 are none that a TPU's vector unit loads: use pages of bfloat16,")
        assert tpu.refusal(shapes_of(dtype="float16"), None) is None

    def test_block_tables_that_do_not_fit_scalar_memory(self):
        assert tpu.refusal(shapes_of(num_sequences=64, table_width=3000), None) is None
        problem = tpu.refusal(shapes_of(num_sequences=64, table_width=4096), None)
        assert "block tables of 64 sequences of 4096 blocks" in problem
        assert "scalar memory (SMEM)" in problem
        assert "larger block_size, fewer sequences or a shorter max_model_len" in problem

    def test_tiles_that_do_not_fit_vector_memory(self):
        wide = shapes_of(num_heads=64, num_kv_heads=32, head_dim=256, dtype="float32", kv_dtype="float32")
        assert tpu.refusal(wide, None) is None  # smaller tiles by default
        problem = tpu.refusal(wide, (64, 128))
        assert "vector memory (VMEM)" in problem
        assert "with tiles of 64 query and 128 key tokens: pass smaller tiles" in problem

    def test_tokens_that_do_not_fit_scalar_memory(self):
        keys = jax.ShapeDtypeStruct((65537, 1, 128), jnp.bfloat16)
        slots = jax.ShapeDtypeStruct((65537,), jnp.int32)
        pages = jax.ShapeDtypeStruct((8, 16, 2, 128), jnp.bfloat16)

        def write(*arrays):
            return write_kv_pages(*arrays, layer=0, blocks_per_layer=8, implementation="mosaic_tpu", interpret=True)

        with pytest.raises(ValueError, match=r"65537 tokens are more than the 65536 .* write them in several calls"):
            jax.eval_shape(write, pages, keys, keys, slots, slots)


class TestPageShape:
    @pytest.mark.parametrize(
        ("backend", "num_kv_heads", "head_dim", "dtype", "expected"),
        [
            ("cpu", 3, 80, "bfloat16", (6, 80)),
            ("gpu", 3, 80, "bfloat16", (6, 128)),
            ("tpu", 1, 64, "bfloat16", (2, 128)),
            ("tpu", 1, 64, "int8", (4, 128)),
            ("tpu", 2, 128, "float32", (4, 128)),
            ("tpu", 3, 80, "float8_e4m3fn", (8, 128)),
            ("tpu", 5, 192, "bfloat16", (16, 256)),
        ],
    )
    def test_by_backend(self, backend, num_kv_heads, head_dim, dtype, expected):
        shape = page_shape(backend, block_size=12, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=jnp.dtype(dtype))
        assert shape == (12, *expected)

    def test_unknown_backend(self):
        with pytest.raises(ValueError, match="no page shape for backend 'rocm'; known: cpu, gpu, tpu"):
            page_shape("rocm", block_size=1, num_kv_heads=1, head_dim=64, dtype=jnp.dtype("bfloat16"))

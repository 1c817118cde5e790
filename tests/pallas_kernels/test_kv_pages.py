"""The page operations against numpy, and in place when the pages are donated."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_pages import (
    allocate_pages,
    copy_pages,
    gather_pages,
    page_shape,
    quantize_rows,
    scatter_pages,
    write_kv_pages,
    write_kv_scales,
)
from pallas_kernels.kv_pages.api import IMPLEMENTATIONS

LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 3, 9, 3, 2, 4  # BLOCKS: null block included
TOKENS = 8
seeds = st.integers(0, 2**32 - 1)


def random_pages(seed: int, implementation: str) -> np.ndarray:
    """In the physical shape of the implementation's backend, rubbish in the padding."""
    backend = "tpu" if implementation == "mosaic_tpu" else "cpu"
    page = page_shape(
        backend, block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.dtype("float32")
    )
    return np.random.default_rng(seed).standard_normal((LAYERS * BLOCKS, *page), dtype=np.float32)


def writer(implementation: str):
    return partial(write_kv_pages, implementation=implementation, interpret=implementation == "mosaic_tpu")


def null_blocks() -> np.ndarray:
    """Rows whose content is nobody's business."""
    return np.arange(LAYERS) * BLOCKS


def assert_equal_outside_null(actual: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.delete(actual, null_blocks(), 0), np.delete(expected, null_blocks(), 0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
class TestImplementation:
    def test_write(self, implementation):
        """Real tokens go to distinct slots, and any number of padded ones to the null block."""
        write = jax.jit(partial(writer(implementation), blocks_per_layer=BLOCKS))

        @settings(max_examples=20)
        @given(seeds, st.integers(0, TOKENS), st.integers(0, LAYERS - 1))
        def test(seed, num_real, layer):
            rng = np.random.default_rng(seed)
            pages = random_pages(seed, implementation)
            keys, values = rng.standard_normal((2, TOKENS, KV_HEADS, HEAD_DIM), dtype=np.float32)
            slots = BLOCK_SIZE + rng.permutation((BLOCKS - 1) * BLOCK_SIZE)[:TOKENS].astype(np.int32)
            is_real = rng.permutation(TOKENS) < num_real
            blocks = np.where(is_real, slots // BLOCK_SIZE, 0).astype(np.int32)
            offsets = np.where(is_real, slots % BLOCK_SIZE, 0).astype(np.int32)
            out = write(pages, keys, values, blocks, offsets, layer=np.int32(layer))
            expected = pages.copy()
            for t in range(TOKENS):
                slot = expected[layer * BLOCKS + blocks[t], offsets[t]]
                slot[:] = 0.0
                for head in range(KV_HEADS):
                    slot[2 * head, :HEAD_DIM] = keys[t, head]
                    slot[2 * head + 1, :HEAD_DIM] = values[t, head]
            assert_equal_outside_null(out, expected)

        test()

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_write_rounds_to_the_pages_dtype(self, dtype, implementation):
        keys = jnp.full((1, KV_HEADS, HEAD_DIM), 1.001)
        where = jnp.ones(1, jnp.int32)
        empty = jnp.zeros((BLOCKS, *random_pages(0, implementation).shape[1:]), dtype)
        if (implementation, dtype) == ("mosaic_tpu", "float16"):
            with pytest.raises(ValueError, match="a TPU's kernels have no float16: use pages of bfloat16 or float32"):
                writer(implementation)(empty, keys, -keys, where, where, layer=0, blocks_per_layer=BLOCKS)
            return
        pages = writer(implementation)(empty, keys, -keys, where, where, layer=0, blocks_per_layer=BLOCKS)
        assert pages.dtype == dtype
        slot = pages[1, 1, : 2 * KV_HEADS, :HEAD_DIM]
        np.testing.assert_array_equal(slot[0::2], keys[0].astype(dtype))
        np.testing.assert_array_equal(slot[1::2], -keys[0].astype(dtype))

    @pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
    def test_write_quantized_rows_and_their_scales(self, dtype, implementation):
        dtype, rng = jnp.dtype(dtype), np.random.default_rng(3)
        keys, values = 3.0 * rng.standard_normal((2, TOKENS, KV_HEADS, HEAD_DIM)).astype(np.float32)
        keys[0, 0] = 0.0
        (k, k_scales), (v, v_scales) = (quantize_rows(jnp.asarray(x), dtype) for x in (keys, values))
        slots = BLOCK_SIZE + rng.permutation((BLOCKS - 1) * BLOCK_SIZE)[:TOKENS]
        blocks, offsets = (jnp.asarray(x, jnp.int32) for x in (slots // BLOCK_SIZE, slots % BLOCK_SIZE))
        where = {"layer": 1, "blocks_per_layer": BLOCKS}
        shape = random_pages(0, implementation).shape
        pages = writer(implementation)(jnp.ones(shape, dtype), k, v, blocks, offsets, **where)
        scales = write_kv_scales(
            jnp.full(shape[:3], jnp.nan),
            k_scales,
            v_scales,
            blocks,
            offsets,
            implementation="reference" if implementation == "reference" else "xla",
            **where,
        )
        stored = np.asarray(pages, np.float32)[BLOCKS + np.asarray(blocks), offsets]
        stored = stored * np.asarray(scales)[BLOCKS + np.asarray(blocks), offsets][..., None]
        # half a unit of the last place: of 127 steps, or of four bits
        bound = np.abs(keys).max() / 254 if dtype == jnp.int8 else np.abs(keys).max() / 31
        np.testing.assert_allclose(stored[:, : 2 * KV_HEADS : 2, :HEAD_DIM], keys, rtol=0, atol=bound)
        np.testing.assert_allclose(stored[:, 1 : 2 * KV_HEADS : 2, :HEAD_DIM], values, rtol=0, atol=bound)
        np.testing.assert_array_equal(stored[0, 0], 0.0)

    def test_copy_reads_all_sources_first(self, implementation):
        """Chains, swaps and one source for many targets; padding copies the null block onto itself."""
        copy = jax.jit(partial(copy_pages, blocks_per_layer=BLOCKS, implementation=implementation))

        @settings(max_examples=20)
        @given(seeds, st.integers(0, 5))
        def test(seed, num_real):
            rng = np.random.default_rng(seed)
            pages = random_pages(seed, implementation)
            sources, targets = np.zeros((2, 5), np.int32)
            sources[:num_real] = rng.integers(1, BLOCKS, num_real)
            targets[:num_real] = 1 + rng.permutation(BLOCKS - 1)[:num_real]
            expected = pages.copy()
            for first in null_blocks():
                expected[first + targets] = pages[first + sources]
            np.testing.assert_array_equal(copy(pages, sources, targets), expected)

        test()

        pages = random_pages(0, implementation)
        chain = copy(pages, np.array([1, 2, 3, 0, 0], np.int32), np.array([2, 3, 1, 0, 0], np.int32))
        np.testing.assert_array_equal(np.asarray(chain)[[2, 3, 1]], pages[[1, 2, 3]])

    def test_gather_then_scatter_elsewhere(self, implementation):
        options = {"blocks_per_layer": BLOCKS, "implementation": implementation}
        gather, scatter = (
            jax.jit(partial(gather_pages, **options)),
            jax.jit(partial(scatter_pages, **options)),
        )

        @settings(max_examples=20)
        @given(seeds)
        def test(seed):
            rng = np.random.default_rng(seed)
            pages, others = random_pages(seed, implementation), random_pages(seed + 1, implementation)
            taken, given_back = (1 + rng.permutation(BLOCKS - 1)[:4].astype(np.int32) for _ in range(2))
            blocks = gather(pages, taken)
            layered = pages.reshape(LAYERS, BLOCKS, *pages.shape[1:])
            np.testing.assert_array_equal(blocks, layered[:, taken])
            expected = others.reshape(layered.shape).copy()
            expected[:, given_back] = layered[:, taken]
            np.testing.assert_array_equal(scatter(others, given_back, blocks), expected.reshape(pages.shape))
            np.testing.assert_array_equal(scatter(pages, taken, blocks), pages)

        test()


def test_unknown_implementation_is_named():
    pages = jnp.zeros((4, 2, 2, 2))
    ids = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="unknown page implementation 'cuda'; known: reference, xla, mosaic_tpu"):
        gather_pages(pages, ids, blocks_per_layer=4, implementation="cuda")


def test_allocated_pages_are_zero_and_of_the_physical_shape():
    shape = page_shape("cpu", block_size=16, num_kv_heads=3, head_dim=64, dtype=jnp.dtype("bfloat16"))
    pages = allocate_pages(5, shape, jnp.dtype("bfloat16"))
    assert pages.shape == (5, 16, 6, 64)
    assert pages.dtype == jnp.bfloat16
    assert not pages.any()


def test_quantised_pages_refuse_other_numbers():
    pages, ids = jnp.zeros((4, 2, 2, 2), jnp.int8), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="pages of int8 hold what quantize_rows returns, not float32"):
        write_kv_pages(pages, jnp.ones((1, 1, 2)), jnp.ones((1, 1, 2)), ids, ids, layer=0, blocks_per_layer=4)
    with pytest.raises(ValueError, match="float16 is no quantised type: use int8 or float8_e4m3fn"):
        quantize_rows(jnp.ones((1, 1, 2)), jnp.dtype("float16"))


def test_the_kernel_is_refused_where_it_cannot_run():
    pages, ids = jnp.zeros((4, 16, 2, 128)), jnp.zeros(1, jnp.int32)
    rows = jnp.ones((1, 1, 64))
    options = {"layer": 0, "blocks_per_layer": 4, "implementation": "mosaic_tpu"}
    with pytest.raises(ValueError, match="cannot serve this call: it is for a TPU, not a CPU"):
        write_kv_pages(pages, rows, rows, ids, ids, **options)
    with pytest.raises(ValueError, match=r"a page has shape \(16, 2, 64\) where a TPU's has \(16, 2, 128\)"):
        write_kv_pages(pages[..., :64], rows, rows, ids, ids, interpret=True, **options)


def test_pages_that_are_too_small():
    pages, ids = jnp.zeros((4, 2, 4, 8)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=r"shape \(4, 8\), too small for keys and values of 3 heads of 8"):
        write_kv_pages(pages, jnp.ones((1, 3, 8)), jnp.ones((1, 3, 8)), ids, ids, layer=0, blocks_per_layer=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("operation", ["write", "copy", "scatter"])
def test_donated_pages_are_updated_in_place(operation, dtype):
    """The result is the argument's own buffer, and nothing beside it comes near its size."""
    per_layer, block_size, heads, head_dim = 512, 16, 3, 64
    pages = jnp.zeros((2 * per_layer, block_size, 2 * heads, head_dim), dtype)
    ids = jnp.arange(1, 9, dtype=jnp.int32)
    token = jnp.zeros((8, heads, head_dim), dtype)
    blocks = jnp.zeros((2, 8, *pages.shape[1:]), dtype)
    function, rest = {
        "write": (partial(write_kv_pages, layer=1), (token, token, ids, ids)),
        "copy": (copy_pages, (ids, ids + 8)),
        "scatter": (scatter_pages, (ids, blocks)),
    }[operation]
    step = jax.jit(partial(function, blocks_per_layer=per_layer), donate_argnums=0).lower(pages, *rest).compile()
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes < pages.nbytes / 16
    address = pages.unsafe_buffer_pointer()
    assert step(pages, *rest).unsafe_buffer_pointer() == address

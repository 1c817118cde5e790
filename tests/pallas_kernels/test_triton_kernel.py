"""What only the Triton kernel has: its refusals, the width of its addresses, and JAX's notice about its backend.

Its numbers are checked with every other implementation's in `test_paged_attention.py`.
"""

import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.paged_attention import AttentionShapes
from pallas_kernels.paged_attention.gpu_triton import _widen, ragged_paged_attention, refusal

SHAPES = AttentionShapes(
    num_tokens=300,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype=jnp.dtype("bfloat16"),
    num_sequences=16,
    table_width=64,
    num_pages=1000,
    block_size=16,
    page_rows=16,
    page_head_dim=128,
    kv_dtype=jnp.dtype("bfloat16"),
)


@pytest.mark.parametrize("block_size", [1, 5, 7, 16, 24, 128, 512])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("types", ["bfloat16 int8", "float16 float16", "float32 float32", "bfloat16 float32"])
def test_any_page_size_and_head_dim_is_served(block_size, head_dim, types):
    dtype, kv_dtype = map(jnp.dtype, types.split())
    shapes = replace(
        SHAPES,
        block_size=block_size,
        head_dim=head_dim,
        page_head_dim=-(-head_dim // 64) * 64,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    assert refusal(shapes, None) is None
    assert refusal(replace(shapes, num_tokens=16), None) is None


@pytest.mark.parametrize(
    ("changes", "tiles", "sentence"),
    [
        (
            {"dtype": jnp.dtype("float64")},
            None,
            "takes queries in float32, bfloat16 or float16, not float64: use 'xla'",
        ),
        ({"kv_dtype": jnp.dtype("uint8")}, None, "int8 or float8_e4m3fn, not uint8: use 'xla'"),
        ({"kv_dtype": jnp.dtype("float8_e5m2")}, None, "not float8_e5m2: use 'xla'"),
        ({"head_dim": 320, "page_head_dim": 320}, None, "serves head_dim up to 256, not 320: use 'xla'"),
        ({"num_heads": 130, "num_kv_heads": 1}, None, "up to 128 query heads per KV head, not 130: use 'xla'"),
        ({"num_heads": 128, "num_kv_heads": 1, "head_dim": 256}, None, "has up to 32768 bytes"),
        ({}, (8, 48), "at least 1 query token and of 16, 32, 64 or 128 keys, not (8, 48)"),
        ({}, (8, 256), "16, 32, 64 or 128 keys, not (8, 256)"),
        ({}, (0, 64), "at least 1 query token"),
        ({}, (33, 64), "33 tokens of 4 heads need 256: take fewer query tokens"),
        ({"head_dim": 256}, (8, 128), "of 32 rows of queries and 128 keys has 65536: take smaller tiles"),
        ({"dtype": jnp.dtype("float32")}, (8, 128), "has 65536: take smaller tiles"),
    ],
)
def test_refusals_are_sentences(changes, tiles, sentence):
    assert sentence in refusal(replace(SHAPES, **changes), tiles)


def attend(num_pages: int, kv_dtype: str, dtype: str = "bfloat16") -> jax.stages.Lowered:
    """The kernel over pages of 8192 elements, lowered for an A100."""
    shape = jax.ShapeDtypeStruct
    q, pages = shape((8, 4, 64), jnp.dtype(dtype)), shape((num_pages, 16, 8, 64), jnp.dtype(kv_dtype))
    scales = shape((num_pages, 16, 8), jnp.float32) if pages.dtype.itemsize == 1 else None
    ints = [shape(s, jnp.int32) for s in ((4,), (4, 8), (5,), (1,))]
    call = partial(
        ragged_paged_attention,
        layer=0,
        blocks_per_layer=num_pages,
        num_kv_heads=4,
        scale=0.125,
        sliding_window=None,
        logit_soft_cap=None,
        sinks=None,
        alibi_slopes=None,
        tiles=None,
        interpret=False,
    )
    device = AbstractDevice(device_kind="NVIDIA A100-SXM4-40GB", num_cores=108, platform="gpu")
    with use_abstract_mesh(AbstractMesh((1,), ("d",), abstract_device=device)):
        return jax.jit(call).trace(q, pages, *ints, kv_scales=scales).lower(lowering_platforms=("cuda",))


def triton_module(lowered: jax.stages.Lowered) -> str:
    """The Triton IR inside a lowered program, as text."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.triton import dialect

    found = []

    def visit(op):
        if op.name == "stablehlo.custom_call" and "triton" in str(op.attributes["call_target_name"]):
            found.append(op.attributes["mhlo.backend_config"]["ir"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    with ir.Context() as context:
        dialect.register_dialect(context)
        return str(ir.Module.parse(found[0]))


def page_offsets(num_pages: int, kv_dtype: str) -> set[str]:
    """Integer types in which the addresses inside the pages are computed."""
    element = {"bfloat16": "bf16", "int8": "i8"}[kv_dtype]
    lines = triton_module(attend(num_pages, kv_dtype)).splitlines()
    gathers = [line for line in lines if "tt.addptr" in line and f"tensor<64x64x!tt.ptr<{element}>>" in line]
    return {line.rpartition("x")[2].rstrip("> ") for line in gathers if f"{element}>>, tensor<64x64x" in line}


def test_addresses_hold_the_last_element_of_pages_on_either_side_of_2_to_the_31():
    """JAX switches to 64 bits above 2^32 bytes: 2^31 elements of two bytes, whose last index fits into 31 bits."""
    elements = 16 * 8 * 64
    assert "i64" not in page_offsets(2**31 // elements, "bfloat16")
    assert "i64" in page_offsets(2**31 // elements + 1, "bfloat16")
    assert "i64" not in page_offsets(2**31 // elements, "int8")
    assert "i64" in page_offsets(2**32 // elements + 1, "int8")


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_one_byte_pages_that_32_bits_cannot_address_are_refused(kv_dtype):
    elements = 16 * 8 * 64
    for num_pages in (2**31 // elements + 1, 2**32 // elements):
        shapes = replace(SHAPES, num_pages=num_pages, page_rows=8, page_head_dim=64, kv_dtype=jnp.dtype(kv_dtype))
        assert f"cannot address {kv_dtype} pages of 2 to 4 GiB, and these are" in refusal(shapes, None)


def test_the_notice_about_the_backend_and_nothing_else_is_silenced():
    attend(8, "bfloat16")  # warnings are errors here
    with pytest.raises(DeprecationWarning, match="something else"):
        warnings.warn("something else", DeprecationWarning, stacklevel=1)


def test_float8_is_decoded_exactly():
    codes = np.arange(256, dtype=np.uint8)
    x = jax.lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(_widen(x), np.asarray(x).astype(np.float32))


def test_float32_products_are_ieee_and_not_tf32():
    module = triton_module(attend(64, "float32", "float32"))
    dots = [line for line in module.splitlines() if "tt.dot" in line]
    assert len(dots) == 2
    assert not any("tf32" in line for line in dots)

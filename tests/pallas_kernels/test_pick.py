"""Which implementation is picked, and that it is never another than the one that was asked for."""

import logging
import math
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels.kv_pages import page_shape
from pallas_kernels.paged_attention import AttentionShapes, page_backend, pick_implementation
from pallas_kernels.paged_attention.pick import IMPLEMENTATIONS
from pallas_kernels.platforms import Platform


def shapes(backend: str, **changes: object) -> AttentionShapes:
    dtype = jnp.dtype("bfloat16")
    page = page_shape(backend, block_size=16, num_kv_heads=8, head_dim=128, dtype=dtype)
    return replace(
        AttentionShapes(
            num_tokens=64,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            dtype=dtype,
            num_sequences=64,
            table_width=128,
            num_pages=1000,
            block_size=16,
            page_rows=page[1],
            page_head_dim=page[2],
            kv_dtype=dtype,
        ),
        **changes,
    )


@pytest.mark.parametrize(
    ("platform", "name", "reason"),
    [
        (Platform("cpu"), "xla", "no kernel is for cpu"),
        (Platform("gpu", 9.0), "mosaic_gpu", "the kernel for gpu"),
        (Platform("gpu"), "mosaic_gpu", "the kernel for gpu"),
        (Platform("gpu", 8.0), "triton", "not mosaic_gpu: its wgmma instructions are those of compute capability 9.x"),
        (Platform("gpu", 10.0), "triton", "this GPU has 10.0"),
        (Platform("gpu", 7.5), "xla", "not triton: XLA's Triton backend needs compute capability 8.0"),
        (Platform("tpu"), "mosaic_tpu", "the kernel for tpu"),
    ],
)
def test_the_platform_decides(platform, name, reason, caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        choice = pick_implementation(shapes(platform.name), platform=platform)
    assert choice.name == name
    assert reason in choice.reason
    assert f"attention: {choice.name} ({choice.reason})" in caplog.text


def test_what_is_passed_over_is_a_warning_with_the_reason(caplog):
    """A table that does not fit a TPU's scalar memory, and a head that does not fit a GPU's registers."""
    wide = shapes("tpu", num_sequences=256, num_tokens=256, table_width=4096)
    choice = pick_implementation(wide, platform=Platform("tpu"))
    assert choice.name == "xla"
    assert "not mosaic_tpu: block tables of 256 sequences of 4096 blocks" in choice.reason
    choice = pick_implementation(shapes("gpu", page_head_dim=320, head_dim=320), platform=Platform("gpu", 9.0))
    assert choice.name != "mosaic_gpu"
    assert "not mosaic_gpu: the GPU kernel keeps at most 256 elements of a head" in choice.reason
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


@pytest.mark.parametrize(
    ("name", "platform", "changes", "reason"),
    [
        ("mosaic_gpu", Platform("gpu", 8.0), {}, "its wgmma instructions are those of compute capability 9.x"),
        ("mosaic_gpu", Platform("tpu"), {}, "it is for a GPU, not a TPU"),
        ("mosaic_gpu", Platform("gpu", 9.0), {"num_heads": 65 * 8}, "at most 64 query heads for each KV head, not 65"),
        ("mosaic_gpu", Platform("gpu", 9.0), {"page_head_dim": 96, "head_dim": 96}, r'page_shape\("gpu"'),
        ("mosaic_tpu", Platform("tpu"), {"table_width": 8192}, "use a larger block_size, fewer sequences"),
        ("mosaic_tpu", Platform("tpu"), {"page_rows": 18}, r"page_shape\('tpu'"),
    ],
)
def test_a_name_is_the_choice_or_an_error(name, platform, changes, reason):
    with pytest.raises(ValueError, match=reason):
        pick_implementation(shapes(platform.name, **changes), implementation=name, platform=platform)


def test_too_few_threads_for_the_interpreter(monkeypatch):
    monkeypatch.setenv("NPROC", "2")
    with pytest.raises(ValueError, match="there are 2 here: set the environment variable NPROC to 16"):
        pick_implementation(shapes("gpu"), implementation="mosaic_gpu", interpret=True)


def test_every_name_can_be_had_somewhere():
    for name in IMPLEMENTATIONS:
        backend = page_backend(name)
        platform = Platform(backend, 9.0 if backend == "gpu" else None)
        assert pick_implementation(shapes(backend), implementation=name, platform=platform).name == name


def test_page_backends():
    assert [page_backend(name) for name in ("mosaic_tpu", "mosaic_gpu", "triton")] == ["tpu", "gpu", "gpu"]
    assert {page_backend(name) for name in (None, "xla", "reference")} == {"cpu"}


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_page_shapes_hold_what_they_must(heads, head_dim, dtype):
    """G17: pages are padded, never cut, and by less than their size, but for the smallest."""
    dtype = jnp.dtype(dtype)
    for backend in ("cpu", "gpu", "tpu"):
        block, rows, lanes = page_shape(backend, block_size=16, num_kv_heads=heads, head_dim=head_dim, dtype=dtype)
        assert block == 16
        assert rows >= 2 * heads
        assert lanes >= head_dim
        assert lanes % {"cpu": 1, "gpu": 64, "tpu": 128}[backend] == 0
        assert rows * lanes <= {"cpu": 1, "gpu": 2, "tpu": 4}[backend] * math.prod((2 * heads, head_dim))

"""The ONNX attention vectors through the paged path."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_batches import IMPLEMENTATION_NAMES, physical

from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.pick import KERNELS


def read_vector(vectors, case: str, entry: dict, name: str) -> np.ndarray:
    """One array of an ONNX case; bfloat16 is stored as its bits."""
    array = vectors[f"{case}/{name}"]
    return array.view(jnp.bfloat16) if entry["dtypes"][name] == "bfloat16" else array


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
    is_used = np.zeros(pages.shape[:2], bool)
    tables = (1 + rng.permutation(num * width)).reshape(num, width).astype(np.int32)
    for b, t in np.ndindex(k.shape[:2]):
        slot = tables[b, t // block_size], t % block_size
        is_used[slot] = True
        pages[slot][0::2], pages[slot][1::2] = k[b, t], v[b, t]
    q_lens = [length] * num if causal else [1] * (num * length)
    repeat = 1 if causal else length
    options = {
        "scale": attrs.get("scale", head_dim**-0.5),
        "sliding_window": attrs["left_window_size"] + 1 if "left_window_size" in attrs else None,
        "logit_soft_cap": attrs.get("softcap"),
        "implementation": implementation,
        "interpret": implementation in KERNELS,
        "num_kv_heads": k.shape[2],
    }
    pages, _ = physical(implementation, pages, None, is_used, np.nan)
    if implementation == "mosaic_tpu" and pages.dtype == np.float16:
        pages = pages.astype(np.float32)  # a TPU has no pages of float16
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

"""The engine's step, compiled for accelerators that are not here: nothing of the pages' size is copied there either."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from paged_jax.execution.batch import BatchBuilder
from paged_jax.execution.buckets import Bucket
from paged_jax.execution.step import engine_step, group_page_shape
from paged_jax.models.attention import AttentionOptions
from paged_jax.models.config import ModelConfig
from paged_jax.models.decoder import stack_layers
from paged_jax.models.weights import dummy_decoder
from paged_jax.sampling.state import init_sampling_state
from pallas_kernels.aot import compile_for, unavailable

NUM_SLOTS = 8
MAX_LOGPROBS = 20


@pytest.mark.parametrize("target", ["h200", "v5e", "v6e"])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (3, 128), (4, 128), (8, 64)])
@pytest.mark.parametrize("num_tokens", [64, pytest.param(NUM_SLOTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scanned", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_pages_are_never_copied(target, heads, head_dim, num_tokens, scanned):
    """bfloat16, two query heads for each KV head, 256 MB of pages, the implementation that the platform picks."""
    problem = unavailable(target)
    if problem is not None:
        pytest.skip(f"{target}: {problem}")
    model = ModelConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=2 * heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    dtype, block_size = jnp.dtype("bfloat16"), 16
    decoder = dummy_decoder(model, 0, dtype)
    graph, weights = nnx.split(stack_layers(decoder) if scanned else decoder)
    (group,) = decoder.cache_groups
    page = group_page_shape(group, block_size, dtype, "gpu" if target == "h200" else "tpu")
    rows = (256 << 20) // (math.prod(page) * dtype.itemsize) // model.num_layers * model.num_layers
    pages = jax.ShapeDtypeStruct((rows, *page), dtype)
    builder = BatchBuilder(num_slots=NUM_SLOTS, block_size=block_size, max_request_len=512, num_groups=1)
    batch = builder.empty(Bucket(num_tokens, NUM_SLOTS))
    options = AttentionOptions(blocks_per_layer=rows // model.num_layers)

    def step(weights, pages, sampling, batch):
        return engine_step(graph, options, MAX_LOGPROBS, weights, pages, sampling, batch)

    compiled = compile_for(target, step, weights, (pages,), init_sampling_state(NUM_SLOTS), batch, donate=(1, 2))
    memory = compiled.memory_analysis()
    page_bytes = math.prod(pages.shape) * dtype.itemsize
    assert memory.alias_size_in_bytes >= page_bytes
    assert memory.temp_size_in_bytes < page_bytes / 8
    kernel = "mosaic_gpu" if target == "h200" else "mosaic_tpu"
    assert f"ragged_paged_attention_{kernel}" in compiled.as_text(), "another implementation was picked"

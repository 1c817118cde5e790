"""Whole generations through the kernels, in Pallas' interpreters: the same tokens as through the specification."""

import json
from functools import cache
from pathlib import Path

import pytest

from paged_jax.llm import LLM
from paged_jax.outputs import RequestOutput
from paged_jax.sampling.params import SamplingParams
from pallas_kernels.paged_attention.pick import KERNELS

RANDOM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
NEW_TOKENS = 5


def folder_of(config: dict, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def engine(model: str, implementation: str, **settings: object) -> LLM:
    """Chunks of at most 8 tokens, and a pool of 24 slots for two requests that need 29: interpreters are slow."""
    return LLM(
        model,
        attention_implementation=implementation,
        attention_interpret=implementation in KERNELS,
        block_size=4,
        num_blocks=6,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        token_buckets=(8,),
        max_model_len=24,
        **settings,
    )


def generate(llm: LLM) -> list[list[RequestOutput]]:
    """Twice the same prompts, which begin alike: the second time more of their blocks are in the prefix cache."""
    prompts = [[3, 10, 17, 24, 31, 38, 45, 52, 59, 2], [3, 10, 17, 24, 5, 9, 2, 7, 1]]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [llm.generate(inputs, params, use_tqdm=False) for _ in range(2)]


def tokens(rounds: list[list[RequestOutput]]) -> list[list[list[int]]]:
    return [[output.outputs[0].token_ids for output in outputs] for outputs in rounds]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(RANDOM_MODEL, tmp_path_factory.mktemp("random"))


@cache
def expected(model: str, load_format: str) -> list[list[list[int]]]:
    rounds = generate(engine(model, "reference", load_format=load_format))
    everyone = [output.metrics for outputs in rounds for output in outputs]
    assert sum(metrics.num_preemptions for metrics in everyone) > 0, "nobody is preempted: this tests too little"
    assert sum(metrics.num_cached_tokens for metrics in everyone) > 0, "no prefix is found: this tests too little"
    return tokens(rounds)


@pytest.mark.parametrize("implementation", [*KERNELS, "xla"])
def test_a_random_model_with_grouped_queries(random_model, implementation):
    llm = engine(random_model, implementation, load_format="dummy", debug=implementation != "mosaic_gpu")
    assert tokens(generate(llm)) == expected(random_model, "dummy")


@pytest.mark.parametrize(
    "implementation", ["mosaic_tpu", pytest.param("mosaic_gpu", marks=pytest.mark.slow), "triton", "xla"]
)
def test_a_real_model(shared, implementation):
    model = str(shared / "reference" / "stories260K")
    assert tokens(generate(engine(model, implementation))) == expected(model, "auto")


@pytest.mark.parametrize(("implementation", "padded"), [("xla", 1), ("mosaic_gpu", 1), ("mosaic_tpu", 2)])
def test_the_budget_holds_the_padded_pages(random_model, implementation, padded):
    """G17: heads of 64 are padded to 128 on a TPU, and a block's bytes with them, wherever blocks are counted."""
    block, budget = 2 * 4 * 2 * 2 * 64 * 4 * padded, 1 << 20  # layers, block_size, K and V, heads, head_dim, float32
    llm = LLM(
        random_model,
        load_format="dummy",
        attention_implementation=implementation,
        attention_interpret=implementation in KERNELS,
        block_size=4,
        kv_cache_memory=budget,
        max_num_seqs=2,
        max_num_batched_tokens=8,
    )
    executor = llm.engine.executor
    assert executor.num_blocks == budget // block - 1  # and the null block
    assert executor.page_bytes == budget


@pytest.mark.parametrize(
    ("implementation", "head_dim", "reason"),
    [
        ("mosaic_gpu", 320, "at most 256 elements of a head in registers, not 320"),
        ("mosaic_tpu", 64, "is for a TPU, not a CPU: choose 'auto', or set attention_interpret"),
    ],
)
def test_what_a_kernel_cannot_serve_is_refused_when_the_model_loads(tmp_path, implementation, head_dim, reason):
    model = folder_of({**RANDOM_MODEL, "head_dim": head_dim}, tmp_path)
    with pytest.raises(ValueError, match=reason):
        LLM(
            model,
            load_format="dummy",
            attention_implementation=implementation,
            attention_interpret=head_dim == 320,
            num_blocks=4,
        )

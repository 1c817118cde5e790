"""The facade on a tiny checkpoint: samples, beams, log-probabilities, salts, priorities and other weights."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dense_reference import DenseReference
from random_llama import random_weights
from safetensors.numpy import save_file
from tiny_engines import PoolView, best_beams, greedy, log_softmax, sampled

import paged_jax.llm
from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.llm import LLM, EngineFactory
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
ENGINE = {
    "block_size": 4,
    "num_blocks": 32,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "token_buckets": (32,),
    "dtype": "float32",
}

type MakeLLM = Callable[..., LLM]


def _checkpoint(folder: Path, seed: int, **fields: object) -> str:
    config = CONFIG | fields
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(config, seed), folder / "model.safetensors")
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _checkpoint(tmp_path_factory.mktemp("llm") / "one", 1)


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    """For all tests that leave it as it is."""
    return LLM(model, **ENGINE)


@pytest.fixture(scope="module")
def reference(model: str) -> DenseReference:
    return _reference(model)


def _reference(model: str) -> DenseReference:
    return DenseReference(EngineFactory(model).decoder(EngineConfig(**ENGINE)))


@pytest.fixture
def make_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> MakeLLM:
    """Makes facades over the same executor, which is compiled once; fields are those of `EngineConfig`."""

    def make(**fields: object) -> LLM:
        def build_engine(model: str, config: EngineConfig) -> Engine:
            return Engine(
                config,
                PoolView(llm.engine.executor, config.num_blocks, config.num_swap_blocks or 0),
                clock=VirtualClock(),
                tokenizer=None,
                max_model_len=64,
                vocab_size=CONFIG["vocab_size"],
                eos_token_ids=(),
            )

        monkeypatch.setattr(paged_jax.llm, "build_engine", build_engine)
        return LLM("any", **(ENGINE | fields))

    return make


def _tokens(*prompts: tuple[int, ...]) -> list[dict[str, object]]:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def test_samples_come_by_index_and_as_if_alone(llm: LLM, reference: DenseReference) -> None:
    prompts = reference.prompts([5, 9, 6], seed=1, count=8)
    params = [
        SamplingParams(n=3, seed=7, max_tokens=8),
        greedy(8),
        SamplingParams(n=2, seed=7, temperature=0.6, top_k=12, max_tokens=5),
    ]
    outputs = llm.generate(_tokens(*prompts), params, use_tqdm=False)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == list(prompt)
        assert output.finished
        assert [completion.index for completion in output.outputs] == list(range(own.n))
        expected = [sampled(reference, prompt, own, i) for i in range(own.n)]
        assert [completion.token_ids for completion in output.outputs] == expected
        assert {completion.finish_reason for completion in output.outputs} == {"length"}
    assert outputs[1].outputs[0].token_ids == reference.greedy(prompts[1], 8)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_are_those_of_the_dense_reference(llm: LLM, reference: DenseReference, count: int) -> None:
    prompts = reference.prompts([5, 11], seed=2, count=6)
    params = [
        SamplingParams(n=2, seed=3, logprobs=count, max_tokens=6),
        SamplingParams(temperature=0, logprobs=count, max_tokens=6),
    ]
    for prompt, output in zip(prompts, llm.generate(_tokens(*prompts), params, use_tqdm=False), strict=True):
        for completion in output.outputs:
            tokens = completion.token_ids
            expected = log_softmax(reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :])
            assert len(completion.logprobs) == 6
            for token, found, row in zip(tokens, completion.logprobs, expected, strict=True):
                best = np.argsort(-row)[:count].tolist()
                assert set(found) == {token, *best}
                for other, entry in found.items():
                    assert abs(entry.logprob - row[other]) < 1e-4
                    assert entry.rank == 1 + int((row > row[other]).sum())
                    assert entry.decoded_token is None
            total = sum(row[token] for token, row in zip(tokens, expected, strict=True))
            assert abs(completion.cumulative_logprob - total) < 1e-3
    (plain,) = llm.generate(_tokens(prompts[0]), greedy(3), use_tqdm=False)
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("width", [2, 3])
def test_beam_search_is_that_of_its_definition(llm: LLM, reference: DenseReference, width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=4)
    cases = {}
    for first in range(89):
        prompt = tuple((first + 7 * i) % 89 for i in range(1 + first % 9))
        with contextlib.suppress(AssertionError):  # a near tie
            cases[prompt] = best_beams(reference, prompt, params)
        if len(cases) == 3:
            break
    outputs = llm.beam_search(_tokens(*cases), params, use_tqdm=False)
    for output, expected in zip(outputs, cases.values(), strict=True):
        assert [tuple(beam.token_ids) for beam in output.outputs] == [beam[0] for beam in expected]
        assert [beam.index for beam in output.outputs] == list(range(width))
        for beam, (_, reason, total) in zip(output.outputs, expected, strict=True):
            assert beam.finish_reason == reason
            assert abs(beam.cumulative_logprob - total) < 1e-3
    (single,) = llm.beam_search({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)
    assert [beam.token_ids for beam in single.outputs] == [beam.token_ids for beam in outputs[2].outputs]


def test_urgent_prompts_go_first(make_llm: MakeLLM, reference: DenseReference) -> None:
    llm = make_llm(scheduling_policy="priority", max_num_seqs=1)
    prompts = reference.prompts([5, 9, 6, 4], seed=4, count=5)
    outputs = llm.generate(_tokens(*prompts), greedy(5), use_tqdm=False, priority=[2, -1, 2, 0])
    assert [output.outputs[0].token_ids for output in outputs] == [reference.greedy(p, 5) for p in prompts]
    order = [plan.admitted[0].prompt_token_ids for plan in llm.engine.executor.plans if plan.admitted]
    assert order == [prompts[i] for i in (1, 3, 0, 2)]


def test_prefixes_are_shared_within_a_salt_only(make_llm: MakeLLM, reference: DenseReference) -> None:
    llm = make_llm()
    (prompt,) = reference.prompts([13], seed=5, count=4)
    cached = []
    for salt in ("", "a", "b", "a", ""):
        asked = {"prompt_token_ids": list(prompt), "cache_salt": salt}
        (output,) = llm.generate(asked, greedy(4), use_tqdm=False)
        assert output.outputs[0].token_ids == reference.greedy(prompt, 4)
        cached.append(output.metrics.num_cached_tokens)
    assert cached == [0, 0, 0, 12, 12]


def test_users_and_true_lengths_reach_the_policies(make_llm: MakeLLM) -> None:
    llm = make_llm(scheduling_policy="sjf", length_predictor="oracle", max_num_seqs=1)
    prompts = [
        {"prompt_token_ids": [1, 2], "expected_output_len": 6, "user": "a"},
        {"prompt_token_ids": [3], "expected_output_len": 2, "user": "b"},
    ]
    llm.generate(prompts, [greedy(6), greedy(2)], use_tqdm=False)
    order = [plan.admitted[0] for plan in llm.engine.executor.plans if plan.admitted]
    assert [(request.user, request.expected_output_len) for request in order] == [("b", 2), ("a", 6)]
    with pytest.raises(ValueError, match=r"prompt 1: .*expected_output_len"):
        llm.generate([prompts[0], {"prompt_token_ids": [3]}], greedy(2), use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda llm: llm.generate(_tokens((1,), (2,)), greedy(2), priority=[1]), "2 prompts but 1 priorities"),
        (lambda llm: llm.generate(_tokens((1,), (2,)), [greedy(2)]), "2 prompts but 1 sampling params"),
        (
            lambda llm: llm.generate({"prompt_token_ids": [1], "cache_salt": 3}, greedy(2)),
            "cache_salt must be a string, got 3",
        ),
        (
            lambda llm: llm.generate({"prompt_token_ids": [1], "salt": "x"}, greedy(2)),
            "a prompt is a string, .* cache_salt",
        ),
        (
            lambda llm: llm.generate({"prompt_token_ids": [1], "expected_output_len": 0}, greedy(2)),
            "expected_output_len must be None or a whole number, 1 or more, got 0",
        ),
        (lambda llm: llm.beam_search(_tokens((1,)), greedy(2)), "beam_search takes BeamSearchParams"),
        (
            lambda llm: llm.beam_search(_tokens((1,)), BeamSearchParams(beam_width=7, max_tokens=2)),
            r"7 samples or beams of a prompt run at once, more than max_num_seqs \(6\)",
        ),
        (
            lambda llm: llm.generate(_tokens((1,), (2,)), [greedy(2), SamplingParams(n=7)]),
            "prompt 1: 7 samples or beams of a prompt run at once",
        ),
        (lambda llm: llm.generate(_tokens((1,)), SamplingParams(logprobs=21)), r"logprobs \(21\) is more than"),
        (
            lambda llm: list(llm.stream({"prompt_token_ids": [1]}, SamplingParams(n=2))),
            "a stream is the text of one sample: for n or logprobs use generate",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_whole(llm: LLM, call: Callable[[LLM], object], sentence: str) -> None:
    steps = llm.engine.last_step
    with pytest.raises(ValueError, match=sentence):
        call(llm)
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.last_step is steps, "something ran"


def test_other_weights_empty_the_cache(model: str, tmp_path: Path) -> None:
    other = _checkpoint(tmp_path / "two", 2)
    llm = LLM(model, **ENGINE)
    before, after = _reference(model), _reference(other)
    shared = [p for p in before.prompts([13] * 6, seed=6, count=8) if after._greedy(p, 8)[1] > 1e-3][:3]
    assert len(shared) == 3

    def outputs() -> tuple[list[list[int]], list[int]]:
        found = llm.generate(_tokens(*shared), greedy(8), use_tqdm=False)
        return [o.outputs[0].token_ids for o in found], [o.metrics.num_cached_tokens for o in found]

    old, new = ([reference.greedy(p, 8) for p in shared] for reference in (before, after))
    assert old != new
    assert outputs() == (old, [0, 0, 0])
    assert outputs() == (old, [12, 12, 12])
    compilations = llm.engine.executor.num_compilations
    llm.update_weights(other)
    assert outputs() == (new, [0, 0, 0])
    assert outputs() == (new, [12, 12, 12])
    fresh = LLM(other, **ENGINE).generate(_tokens(*shared), greedy(8), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in fresh] == new
    assert llm.engine.executor.num_compilations == compilations

    request = llm.engine.add_request("x", shared[0], greedy(8))
    llm.engine.step()
    with pytest.raises(ValueError, match="1 requests are unfinished, and the old weights began them"):
        llm.update_weights(model)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert request.output_token_ids == new[0]
    for name, fields in {"wider": {"intermediate_size": 96}, "deeper": {"num_hidden_layers": 3}}.items():
        with pytest.raises(ValueError, match=r"parameter '.*' is .*"):
            llm.update_weights(_checkpoint(tmp_path / name, 3, **fields))
        assert outputs() == (new, [12, 12, 12]), "a refusal changed something"
    llm.update_weights(model)
    assert outputs() == (old, [0, 0, 0])

"""Other engines' outages, retold as tests. Names such as G01 are entries of the project's list of them."""

from dataclasses import replace

import pytest
import tokenizers
from host_executor import check_accounting, drain, host_engine
from tiny_engines import Bench, MakeEngine, greedy, run
from tokenizers import models, pre_tokenizers, processors

import paged_jax.llm
from paged_jax.checkpoints.tokenizer import Tokenizer
from paged_jax.engine.engine import Engine
from paged_jax.sampling.params import SamplingParams


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_g01_whole_prompt_is_cached(bench: Bench, prefix_cache: str) -> None:
    engine = bench.engine(prefix_cache=prefix_cache)
    prompts = bench.prompts([4, 7, 8, 9])
    for prompt in prompts:
        for attempt in ("first", "second"):
            (request,) = run(engine, (prompt, greedy(6)))
            assert request.output_token_ids == bench.expected(prompt, 6)
            cached = request.metrics.num_cached_tokens
            assert cached == (0 if attempt == "first" else (len(prompt) - 1) // 4 * 4)
    together = run(engine, (prompts[2], greedy(6)), (prompts[2], greedy(6)))
    assert [r.output_token_ids for r in together] == [bench.expected(prompts[2], 6)] * 2
    assert [r.metrics.num_cached_tokens for r in together] == [4, 4]


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_g01_same_new_prompt_twice_in_one_step(bench: Bench, prefix_cache: str) -> None:
    engine = bench.engine(prefix_cache=prefix_cache)
    (prompt,) = bench.prompts([8])
    requests = run(engine, (prompt, greedy(6)), (prompt, greedy(6)))
    assert [r.output_token_ids for r in requests] == [bench.expected(prompt, 6)] * 2


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_g02_cached_blocks_are_not_counted_as_free_as_well(bench: Bench, prefix_cache: str) -> None:
    engine = bench.engine(num_blocks=8, prefix_cache=prefix_cache)
    a, b, c_tail = bench.prompts([16, 13, 8])
    run(engine, (a, greedy(1)))
    pool = engine.scheduler.kv_cache.pools[0]
    assert (pool.num_cached, pool.num_free) == (4, 4)
    request_b = engine.add_request("b", b, greedy(3))
    engine.step()
    request_c = engine.add_request("c", a + c_tail, greedy(6))
    for _ in range(2):  # the rest of B
        assert not request_b.is_finished
        assert pool.num_available == 4
        engine.step()
        check_accounting(engine)
        assert request_c.slot is None
    assert request_b.output_token_ids == bench.expected(b, 3)
    drain(engine, 50)
    # C's prompt was not chosen free of near ties for R: a run of its own decides
    (alone,) = run(bench.engine(prefix_cache="none"), (a + c_tail, greedy(6)))
    assert request_c.output_token_ids == alone.output_token_ids
    assert request_c.metrics.num_cached_tokens == 16


ALLOCATIONS = [
    {},
    {"preemption_mode": "swap", "num_swap_blocks": 8},
    {"prefix_cache": "radix", "watermark": 0.2},
    {"allocator": "reserve_max"},
    {"allocator": "reserve_max", "batching": "static"},
]


@pytest.mark.parametrize("fields", ALLOCATIONS)
def test_g06_a_request_that_no_pool_holds_is_refused_at_the_door(bench: Bench, fields: dict[str, object]) -> None:
    engine = bench.engine(num_blocks=8, max_model_len=64, **fields)
    (prompt,) = bench.prompts([5])
    with pytest.raises(
        ValueError, match=r"prompt has 40 tokens and the KV cache of 8 blocks holds 32 tokens of a request"
    ):
        engine.add_request("long", tuple(range(40)), greedy(4))
    (request,) = run(engine, (prompt, greedy(6)))
    assert request.output_token_ids == bench.expected(prompt, 6)


@pytest.mark.parametrize("fields", ALLOCATIONS)
def test_g06_b_request_that_outgrows_the_pool_ends_with_length(bench: Bench, fields: dict[str, object]) -> None:
    engine = bench.engine(num_blocks=8, max_model_len=64, **fields)
    long, short = bench.prompts([28, 5])
    requests = run(engine, (long, greedy(20)), (short, greedy(6)))
    assert requests[0].output_token_ids == bench.expected(long, 4)
    assert requests[0].finish_reason == "length"
    assert requests[0].metrics.num_preemptions == 0
    assert requests[1].output_token_ids == bench.expected(short, 6)


@pytest.mark.parametrize("victims", ["victim_policies:FirstArrivedVictim", "victim_policies:LongestVictim"])
@pytest.mark.parametrize("budget", [64, 7])
def test_g07_victim_that_had_its_turn_in_this_step_does_not_run(bench: Bench, victims: str, budget: int) -> None:
    engine = bench.engine(num_blocks=5, max_num_batched_tokens=budget, victim_policy=victims)
    prompts = bench.prompts([6, 4, 5])
    requests = run(engine, *((prompt, greedy(9)) for prompt in prompts))
    assert [r.output_token_ids for r in requests] == [bench.expected(prompt, 9) for prompt in prompts]
    assert sum(r.metrics.num_preemptions for r in requests) > 0


def test_g08_id_is_unique_among_the_living(bench: Bench) -> None:
    engine = bench.engine()
    first, other = bench.prompts([5, 6])
    request = engine.add_request("x", first, greedy(20))
    engine.step()
    engine.step()
    with pytest.raises(ValueError, match="request id 'x' is in use by a request that has not ended"):
        engine.add_request("x", other, greedy(3))
    drain(engine)
    assert request.output_token_ids == bench.expected(first, 20)
    again = engine.add_request("x", other, greedy(3))
    drain(engine)
    assert again.output_token_ids == bench.expected(other, 3)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_s17_id_is_free_as_soon_as_its_request_is_aborted(bench: Bench, steps: int) -> None:
    engine = bench.engine(max_num_batched_tokens=6)
    first, other = bench.prompts([9, 6])
    aborted = engine.add_request("x", first, greedy(20))
    for _ in range(steps):
        engine.step()
    engine.abort("x")
    engine.abort("x")  # does nothing
    engine.abort("never heard of")
    again = engine.add_request("x", other, greedy(8))
    check_accounting(engine)
    drain(engine)
    assert aborted.finish_reason == "abort"
    assert aborted.output_token_ids == bench.expected(first, 20)[: max(0, steps - 1)]
    assert again.output_token_ids == bench.expected(other, 8)


def _tokenizer(bos: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "<s>": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend)


def _set_tokenizer(engine: Engine, bos: bool) -> None:
    engine.tokenizer = _tokenizer(bos)
    engine._door = replace(engine._door, tokenizer=engine.tokenizer)


def test_g11_empty_prompts_are_refused_while_others_run(bench: Bench) -> None:
    engine = bench.engine()
    _set_tokenizer(engine, bos=False)
    (prompt,) = bench.prompts([5])
    neighbour = engine.add_request("neighbour", prompt, greedy(8))
    engine.step()
    for empty in ("", [], (), iter(())):
        with pytest.raises(ValueError, match="the prompt is empty: give at least one token"):
            engine.add_request("empty", empty, greedy(4))
        engine.step()
    _set_tokenizer(engine, bos=True)
    with_bos = engine.add_request("with-bos", "", greedy(4))
    assert with_bos.prompt_token_ids == (1,)
    drain(engine)
    assert with_bos.output_token_ids == bench.expected((1,), 4)
    assert neighbour.output_token_ids == bench.expected(prompt, 8)


def test_g11_batch_with_an_empty_prompt_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = host_engine()
    _set_tokenizer(engine, bos=False)
    monkeypatch.setattr(paged_jax.llm, "build_engine", lambda model, config: engine)
    llm = paged_jax.llm.LLM("any")
    with pytest.raises(ValueError, match="prompt 0: the prompt is empty"):
        llm.generate(["", "hello"], greedy(4), use_tqdm=False)
    assert not engine.has_unfinished_requests()
    (output,) = llm.generate("hello", greedy(4), use_tqdm=False)
    assert output.prompt_token_ids == [0]
    assert len(output.outputs[0].token_ids) == 4


@pytest.mark.parametrize("block_size", [4, 3])  # the last block of 32 tokens is full, or partly full
def test_g12_prompt_must_leave_room_for_a_token(bench: Bench, block_size: int) -> None:
    engine = bench.engine(max_model_len=32, block_size=block_size)
    prompt, fits, full, over = bench.prompts([5, 31, 32, 33])
    for bad in (full, over):
        with pytest.raises(ValueError, match=f"the prompt has {len(bad)} tokens and max_model_len is 32"):
            engine.add_request("bad", bad, greedy(5))
    requests = run(engine, (fits, greedy(5)), (prompt, greedy(5)))
    assert requests[0].output_token_ids == bench.expected(fits, 1)
    assert requests[0].finish_reason == "length"
    assert requests[1].output_token_ids == bench.expected(prompt, 5)
    ends = [part.start + part.num_tokens for plan in engine.executor.plans for part in plan.scheduled]
    assert max(ends) <= 32


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ((1, 97), r"prompt token id 97 is not in the vocabulary \(0 to 96\)"),
        ((-1, 1), r"prompt token id -1 is not in the vocabulary \(0 to 96\)"),
        ((2**40,), "prompt token id 1099511627776 is not in the vocabulary"),
        ((1.0,), "a prompt must be a string or a list of whole token ids"),
        (None, "a prompt must be a string or a list of whole token ids"),
        ("words", "this model has no tokenizer: give the prompt as token ids"),
    ],
)
def test_g22_bad_prompt_is_refused_beside_a_neighbour(bench: Bench, prompt: object, sentence: str) -> None:
    engine, neighbour, expected = _with_neighbour(bench)
    with pytest.raises(ValueError, match=sentence):
        engine.add_request("bad", prompt, greedy(4))
    drain(engine)
    assert neighbour.output_token_ids == expected
    _check_alive(bench, engine)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stop_token_ids": [97]}, "stop_token_ids holds 97, but the vocabulary ends at 96"),
        (
            {"stop_token_ids": [-1]},
            "stop_token_ids must be a list of token ids, whole numbers from 0, got -1",
        ),
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"logit_bias": {97: 5}}, "SamplingParams has no field 'logit_bias'"),
        ({"logprobs": 98}, r"logprobs \(98\) is more than max_logprobs \(20\) or the vocabulary \(97\)"),
        ({"n": 5}, r"5 samples or beams of a prompt run at once, more than max_num_seqs \(4\)"),
        (
            {"min_tokens": 3, "stop_token_ids": range(17)},
            "min_tokens works with at most 16 tokens that end a request, and this one has 17",
        ),
        ({"presence_penalty": 1.5}, "SamplingParams has no field 'presence_penalty'"),
    ],
)
def test_g22_bad_parameters_are_refused_beside_a_neighbour(
    bench: Bench, fields: dict[str, object], sentence: str
) -> None:
    engine, neighbour, expected = _with_neighbour(bench)
    with pytest.raises(ValueError, match=sentence):
        engine.add_request("bad", (1, 2), SamplingParams(**fields))
    drain(engine)
    assert neighbour.output_token_ids == expected
    _check_alive(bench, engine)


def test_g22_top_k_beyond_the_vocabulary_is_off(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine()
    params = [SamplingParams(seed=3, top_k=top_k, max_tokens=8) for top_k in (0, -1, 97, 10**7)]
    outputs = [r.output_token_ids for r in run(engine, *(((1, 2, 3), own) for own in params))]
    assert outputs == [outputs[0]] * 4


def _with_neighbour(bench: Bench) -> tuple[Engine, object, list[int]]:
    engine = bench.engine()
    (prompt,) = bench.prompts([5])
    neighbour = engine.add_request("neighbour", prompt, greedy(8))
    engine.step()
    return engine, neighbour, bench.expected(prompt, 8)


def _check_alive(bench: Bench, engine: Engine) -> None:
    (prompt,) = bench.prompts([6])
    (request,) = run(engine, (prompt, greedy(4)))
    assert request.output_token_ids == bench.expected(prompt, 4)


def test_s11_prompt_beyond_the_budget_without_chunks_is_refused_when_the_engine_starts() -> None:
    with pytest.raises(ValueError, match=r"raise max_num_batched_tokens \(16\) to the longest request \(32\)"):
        host_engine(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=32)


def test_s11_prompt_as_long_as_the_budget_runs_without_chunks(bench: Bench) -> None:
    engine = bench.engine(enable_chunked_prefill=False, max_num_batched_tokens=32, max_model_len=32)
    prompts = bench.prompts([20, 31, 5])
    requests = run(engine, *((prompt, greedy(6)) for prompt in prompts))
    assert [r.output_token_ids for r in requests] == [
        bench.expected(prompt, min(6, 32 - len(prompt))) for prompt in prompts
    ]
    for plan in engine.executor.plans:
        assert all(part.samples for part in plan.scheduled)


@pytest.mark.parametrize("bad", [{"temperature": 0}, [SamplingParams(), {"temperature": 0}], 3])
def test_what_is_not_sampling_params_is_refused_and_nothing_stays_queued(
    bad: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = host_engine()
    monkeypatch.setattr(paged_jax.llm, "build_engine", lambda model, config: engine)
    llm = paged_jax.llm.LLM("any")
    prompts = [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        llm.generate(prompts, bad, use_tqdm=False)
    assert not engine.has_unfinished_requests()

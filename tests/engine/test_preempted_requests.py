"""What a preempted request brings back: its pages, bit by bit, its tokens, log-probabilities and text."""

import dataclasses

import numpy as np
import pytest
import tokenizers
from dense_reference import DenseReference
from host_executor import VOCAB_SIZE
from tiny_engines import (
    MakeEngine,
    PoolView,
    Windows,
    check_logprobs,
    greedy,
    log_softmax,
    make_reference,
    run,
    sampled,
)
from tokenizers import models

from paged_jax.checkpoints.tokenizer import Tokenizer
from paged_jax.engine.request import Request
from paged_jax.execution.jax_executor import JaxStepHandle
from paged_jax.execution.plan import SchedulerOutput, Swap
from paged_jax.sampling.params import SamplingParams


@dataclasses.dataclass
class SwapWatch(PoolView):
    """Compares the pages of each request that is swapped in with what they were when it was swapped out."""

    block_size: int = 4
    saved: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    num_compared: int = 0
    num_reused: int = 0
    """Plans that give blocks of a request that is swapped out to others."""

    def submit(self, plan: SchedulerOutput) -> JaxStepHandle:
        for swap in plan.swap_outs:
            self.saved[id(swap.request)] = self._content(swap)
            written = [
                {block for part in plan.scheduled for block in part.request.block_tables[group].block_ids}
                for group in range(len(self.cache_groups))
            ]
            self.num_reused += any(
                others & set(blocks) for others, blocks in zip(written, swap.device_blocks, strict=True)
            )
        handle = super().submit(plan)
        counts = {id(part.request): part.num_tokens for part in plan.scheduled}
        for swap in plan.swap_ins:
            computed = swap.request.num_computed_tokens
            new = counts.get(id(swap.request), 0)
            for before, after in zip(self.saved.pop(id(swap.request)), self._content(swap), strict=True):
                # [layers, tokens, ...]: all but those that this step computes
                size, first = before.shape[1], before.shape[1] - self._tail(computed)
                kept = [t for t in range(size) if not first <= t < first + new]
                np.testing.assert_array_equal(before[:, kept], after[:, kept])
                assert len(kept) >= first
                self.num_compared += 1
        return handle

    def _tail(self, computed: int) -> int:
        """Slots of the last block that hold no token yet."""
        return -computed % self.block_size

    def _content(self, swap: Swap) -> list[np.ndarray]:
        """Per cache group [layers, tokens, KV, D] of the request's blocks, one after the other."""
        contents = []
        for pages, blocks in zip(self.executor._pages, swap.device_blocks, strict=True):
            layers = np.asarray(pages).reshape(-1, 1 + self.executor.num_blocks, *pages.shape[1:])
            rows = layers[:, list(blocks)]
            contents.append(rows.reshape(rows.shape[0], -1, *rows.shape[3:]))
        return contents


@pytest.mark.parametrize(("windows", "debug"), [("full", False), ("full", True), ("full+windowed", False)])
def test_swap_is_bit_exact(tiny_engine: MakeEngine, windows: Windows, debug: bool) -> None:
    """Also where the blocks are given to somebody else, and written, in the very step that swaps them out."""
    reference = make_reference(windows)
    engine = tiny_engine(
        windows=windows,
        num_blocks=12,
        preemption_mode="swap",
        num_swap_blocks=40,
        max_num_batched_tokens=9,
        debug=debug,
        prefix_cache="none",
    )
    view = engine.executor
    engine.executor = watch = SwapWatch(view.executor, view.num_blocks, view.num_swap_blocks, block_size=4)
    prompts = reference.prompts([6, 7, 9, 13, 4, 17], seed=2, count=12)
    params = SamplingParams(n=2, seed=4, max_tokens=12)
    first = engine.add_request("samples", prompts[0], params)
    requests = run(engine, *((prompt, greedy(12)) for prompt in prompts))
    assert [r.output_token_ids for r in requests] == [reference.greedy(prompt, 12) for prompt in prompts]
    assert [r.output_token_ids for r in first.samples] == [sampled(reference, prompts[0], params, i) for i in (0, 1)]
    assert not watch.saved
    assert watch.num_compared >= 3
    assert watch.num_reused >= 3


def _word_tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")))


def _snapshot(request: Request) -> tuple[list[int], list[float], str]:
    return list(request.token_ids), [entry.logprob for entry in request.logprobs], request.text.text


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "none"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_tokens_logprobs_and_text_survive(
    tiny_engine: MakeEngine, reference: DenseReference, mode: str, prefix_cache: str
) -> None:
    tokenizer = _word_tokenizer()
    fields = {"num_swap_blocks": 40} if mode == "swap" else {}
    engine = tiny_engine(
        num_blocks=9,
        preemption_mode=mode,
        max_num_batched_tokens=9,
        prefix_cache=prefix_cache,
        tokenizer=tokenizer,
        **fields,
    )
    prompts = reference.prompts([5, 9, 12, 16], seed=1, count=12)
    greedy_tokens = [reference.greedy(prompt, 12) for prompt in prompts]
    all_params = [SamplingParams(temperature=0, logprobs=i, max_tokens=12) for i in (0, 1, 5, 20)]
    # ends with its tenth token, by a string that three tokens make
    stop = " ".join(f"w{token}" for token in greedy_tokens[1][7:10])
    all_params[1] = dataclasses.replace(all_params[1], stop=[stop])
    all_params.append(SamplingParams(seed=9, temperature=0.9, top_k=30, logprobs=3, max_tokens=12))
    prompts.append(prompts[3])
    expected = [*greedy_tokens, sampled(reference, prompts[4], all_params[4])]
    expected[1] = expected[1][:10]
    preempted = set()
    for chosen in (range(5), range(5), [3], [3]):  # the last one alone, so that nothing is evicted before it
        requests = [engine.add_request(str(i), prompts[i], all_params[i]) for i in chosen]
        while engine.has_unfinished_requests():
            before = {request: _snapshot(request) for request in requests}
            engine.step()
            for request, (tokens, logprobs, text) in before.items():
                now = _snapshot(request)
                assert now[0][: len(tokens)] == tokens
                assert now[1][: len(logprobs)] == logprobs
                assert now[2].startswith(text) or request.stop_reason == stop
                if request.metrics.num_preemptions and request.slot is None and request.num_output_tokens:
                    preempted.add(request)
        for i, request in zip(chosen, requests, strict=True):
            tokens = expected[i]
            assert request.output_token_ids == tokens
            logits = reference.logits(request.token_ids[:-1])[request.num_prompt_tokens - 1 :]
            check_logprobs(request, log_softmax(logits))
            words = [f"w{token}" for token in tokens]
            assert request.stop_reason == (stop if i == 1 else None)
            assert request.text.text.split() == (words[:7] if i == 1 else words)
    assert requests[0].metrics.num_cached_tokens == (0 if prefix_cache == "none" else 12)
    assert len(preempted) >= 2, "nobody was preempted after its first token: this tests nothing"
    swaps = sum(len(plan.swap_ins) for plan in engine.executor.plans)
    assert (swaps > 0) == (mode == "swap")


def test_victim_whose_copy_was_planned_in_this_very_step_is_swapped_out_from_the_source(
    tiny_engine: MakeEngine, reference: DenseReference
) -> None:
    """A sample gets a copy of the tail that it shares, then gives way to a sample after it, before the copy is made."""
    planned = 0
    for num_blocks in (6, 7, 8):  # beside the prompts 1, 2 and 3 blocks are left for copies
        engine = tiny_engine(
            num_blocks=num_blocks,
            max_num_seqs=6,
            preemption_mode="swap",
            num_swap_blocks=60,
            prefix_cache="none",
            victim_policy="victim_policies:FirstArrivedVictim",
        )
        kv_cache = engine.scheduler.kv_cache
        swap_out = kv_cache.swap_out

        def watch(request: Request, kv_cache=kv_cache, swap_out=swap_out) -> object:
            nonlocal planned
            copied = set(request.block_tables[0].block_ids) & set(kv_cache._copies[0])
            swapped = swap_out(request)
            planned += bool(copied and swapped)
            return swapped

        kv_cache.swap_out = watch
        prompts = [(5, 6, 7, 8, 9), tuple(range(20, 29))]
        params = [SamplingParams(n=3, seed=1, max_tokens=10), SamplingParams(n=1, seed=2, max_tokens=10)]
        requests = run(engine, *zip(prompts, params, strict=True))
        for prompt, own, request in zip(prompts, params, requests, strict=True):
            expected = [sampled(reference, prompt, own, index) for index in range(own.n)]
            assert [sample.output_token_ids for sample in request.samples] == expected
    assert planned, "no planned copy was ever given up: this tests nothing"

"""Trained models give their references' tokens, whatever the engine's settings."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from paged_decoder import run as decoder_logits
from tiny_engines import PoolView

from paged_jax.checkpoints.resolve import resolve
from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.llm import EngineFactory
from paged_jax.models.weights import load_decoder
from paged_jax.sampling.params import SamplingParams


@dataclass(frozen=True)
class Setting:
    """What must not matter."""

    block_size: int
    prefix_cache: str
    budget: int
    tight: bool
    """A pool in which the requests do not fit side by side."""

    def __str__(self) -> str:
        return "-".join(map(str, (self.block_size, self.prefix_cache, self.budget, "tight" * self.tight or "roomy")))

    def config(self, longest: int, total: int) -> EngineConfig:
        """For requests of at most `longest` tokens, `total` in all."""
        tokens = longest + longest // 2 if self.tight else 2 * total
        return EngineConfig(
            block_size=self.block_size,
            prefix_cache=self.prefix_cache,
            num_blocks=-(-tokens // self.block_size) + self.tight,
            max_num_seqs=4,
            max_num_batched_tokens=self.budget,
            token_buckets=(4, self.budget),
            dtype="float32",
            # the other half of the settings compiles faster, and has this among what must not matter
            layer_loop="scanned" if self.prefix_cache == "none" else "unrolled",
            debug=True,
        )


GRID = [Setting(*s) for s in itertools.product((1, 5, 16, 128), ("hash", "none"), (7, 512), (False, True))]
STORIES_IN_CI = [  # every pair of values
    Setting(1, "hash", 7, False),
    Setting(1, "none", 512, True),
    Setting(5, "hash", 512, True),
    Setting(5, "none", 7, False),
    Setting(16, "hash", 7, True),
    Setting(16, "none", 512, False),
    Setting(128, "hash", 512, False),
    Setting(128, "none", 7, True),
]
SMOLLM2_IN_CI = [Setting(5, "hash", 7, True), Setting(16, "none", 512, True), Setting(1, "hash", 512, False)]
"""Every value but 128: a step of SmolLM2 takes 10 s to compile."""


def grid(in_ci: list[Setting]) -> pytest.MarkDecorator:
    """All settings, those that are not in CI marked slow."""
    params = [pytest.param(s, marks=() if s in in_ci else pytest.mark.slow, id=str(s)) for s in GRID]
    return pytest.mark.parametrize("setting", params)


def generate(engine: Engine, prompts: list[list[int]], max_tokens: int, max_len: int = 10**6) -> list[Request]:
    """`max_tokens` of each, but no more than `max_len` together with the prompt."""
    requests = []
    for i, prompt in enumerate(prompts):
        count = min(max_tokens, max_len - len(prompt))
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        requests.append(engine.add_request(str(i), prompt, params))
    while engine.has_unfinished_requests():
        engine.step()
    return requests


@cache
def factory(model: str) -> EngineFactory:
    """One for all tests of a process, so that weights are loaded once."""
    return EngineFactory(model)


@pytest.fixture(scope="session")
def stories(shared) -> tuple[Path, dict]:
    folder = shared / "reference" / "stories260K"
    return folder, json.loads((folder / "reference.json").read_text())


@grid(STORIES_IN_CI)
def test_stories_golden_text(stories, setting):
    """The golden text, and requests that begin with parts of it, which greedy decoding continues alike."""
    folder, reference = stories
    ids = reference["greedy_ids"]
    starts = (1, 40, 71)
    config = setting.config(len(ids), len(starts) * len(ids))
    requests = generate(factory(str(folder))(config), [ids[:n] for n in starts], len(ids), max_len=len(ids))
    for request in requests:
        assert request.token_ids == ids
    assert (sum(r.metrics.num_preemptions for r in requests) > 0) == setting.tight
    text = factory(str(folder))(config).tokenizer.decode(requests[0].token_ids)
    assert text == reference["text"] == reference["upstream_expected"]


@pytest.fixture(scope="session")
def smollm2_reference(shared) -> list[dict]:
    return json.loads((shared / "reference" / "smollm2" / "reference.json").read_text())["items"]


@grid(SMOLLM2_IN_CI)
def test_smollm2_greedy_tokens(smollm2_path, smollm2_reference, setting):
    """All 64 tokens of each prompt, and the text up to the end of sequence, special tokens left out."""
    items = smollm2_reference
    lengths = [len(item["prompt_ids"]) + 64 for item in items]
    engine = factory(str(smollm2_path))(setting.config(max(lengths), sum(lengths)))
    requests = generate(engine, [item["prompt_ids"] for item in items], 64)
    for item, request in zip(items, requests, strict=True):
        assert request.output_token_ids == item["greedy_ids"]
        shown = item["greedy_ids"][: item["first_eos_index"]]
        assert engine.tokenizer.decode(shown) == item["text"]
    # a request that never needs a second block is never in the way of another
    grows = setting.block_size < min(lengths)
    assert (sum(r.metrics.num_preemptions for r in requests) > 0) == (setting.tight and grows)


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_path, smollm2_reference) -> Callable[..., Engine]:
    """Makes engines that share one executor, which is compiled once; fields are those of `EngineConfig`."""
    lengths = [len(item["prompt_ids"]) + 64 for item in smollm2_reference]
    tokens = max(lengths) + max(lengths) // 2
    fixed = {
        "block_size": 8,
        "num_blocks": -(-tokens // 8) + 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "token_buckets": (4, 32),
        "dtype": "float32",
    }
    swaps = {"preemption_mode": "swap", "num_swap_blocks": 100}
    first = factory(str(smollm2_path))(EngineConfig(**fixed, **swaps))

    def make(**fields: object) -> Engine:
        config = EngineConfig(**fixed, **fields)
        view = PoolView(first.executor, first.num_blocks, config.num_swap_blocks or 0)
        return Engine(
            config,
            view,
            clock=VirtualClock(),
            tokenizer=first.tokenizer,
            max_model_len=max(lengths),
            vocab_size=first.vocab_size,
            eos_token_ids=(),
        )

    return make


SMOLLM2_POLICIES = {
    "swap": {"preemption_mode": "swap", "num_swap_blocks": 100},
    "radix": {"prefix_cache": "radix"},
    "priority": {"scheduling_policy": "priority", "victim_policy": "lowest_priority"},
    "static": {"batching": "static"},
    "reserve_max": {"allocator": "reserve_max"},
    "n": {"preemption_mode": "auto", "num_swap_blocks": 100, "eviction": "lfu"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "swap" else pytest.mark.slow) for name in SMOLLM2_POLICIES]
)
def test_smollm2_greedy_tokens_under_policies(smollm2_engine, smollm2_reference, name):
    """The reference's tokens in a pool for one and a half requests; some twice, so that prompts are cached."""
    engine = smollm2_engine(**SMOLLM2_POLICIES[name])
    sampled = []
    for _ in range(1 + (name in ("radix", "n"))):
        requests = []
        for i, item in enumerate(smollm2_reference):
            params = SamplingParams(temperature=0, max_tokens=64)
            requests.append(engine.add_request(str(i), item["prompt_ids"], params, priority=-i))
            if name == "priority":  # what is more urgent comes when others run
                for _ in range(4):
                    engine.step()
        if name == "n":
            params = SamplingParams(n=2, seed=3, temperature=0.7, max_tokens=24)
            sampled.append(engine.add_request("n", smollm2_reference[0]["prompt_ids"], params))
        while engine.has_unfinished_requests():
            engine.step()
        for item, request in zip(smollm2_reference, requests, strict=True):
            assert request.output_token_ids == item["greedy_ids"]
    plans = engine.executor.plans
    preemptions = sum(r.metrics.num_preemptions for r in requests)
    assert (preemptions > 0) == (name != "reserve_max"), "nobody had to give way"
    if name == "swap":
        assert any(plan.swap_ins for plan in plans)
    if name == "radix":
        assert sum(r.metrics.num_cached_tokens for r in requests) > 0
    if name == "static":
        assert any(plan.idle for plan in plans)
    if name == "n":
        first, second = [[sample.output_token_ids for sample in leader.samples] for leader in sampled]
        assert first == second
        assert first[0] != first[1]
        assert any(copies for plan in plans for copies in plan.copies)


def test_smollm2_prompts_become_the_reference_ids(smollm2_path, smollm2_reference):
    tokenizer = resolve(str(smollm2_path), "auto").tokenizer
    for item in smollm2_reference:
        if item["kind"] == "chat":
            ids = tokenizer.encode_chat([{"role": "user", "content": item["prompt"]}])
        else:
            ids = tokenizer.encode(item["prompt"])
        assert ids == item["prompt_ids"]


def test_smollm2_logits(smollm2_path, smollm2_reference):
    """Each step's five best tokens, their logits and the normalizer, from one prefill of the whole text."""
    checkpoint = resolve(str(smollm2_path), "auto")
    model = load_decoder(checkpoint.config, checkpoint.tensors, np.dtype("float32"))
    item = smollm2_reference[1]
    tokens = np.array([*item["prompt_ids"], *item["greedy_ids"]][:-1], np.int32)
    logits = decoder_logits(model, tokens, [len(tokens)])[len(item["prompt_ids"]) - 1 :]
    steps = item["steps"]
    best = np.array([step["top5_logits"] for step in steps])
    np.testing.assert_allclose(-np.sort(-logits, axis=1)[:, :5], best, rtol=0, atol=2e-3)
    ids = np.array([step["top5_ids"] for step in steps])
    np.testing.assert_allclose(np.take_along_axis(logits, ids, axis=1), best, rtol=0, atol=2e-3)
    normalizers = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(normalizers, [step["logsumexp"] for step in steps], rtol=0, atol=2e-3)

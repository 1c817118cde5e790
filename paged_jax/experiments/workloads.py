"""Workloads: which requests arrive when. The same settings and seed always give the same requests.

Three kinds: `prompts` (real text, shipped with the package), `lognormal` (random token ids whose lengths
follow a lognormal law) and `shared_prefix` (random token ids, groups of requests that begin alike). All go on after
end-of-sequence, so that output lengths are exactly as drawn, and policies may be told them; requests of one sample are
greedy. Pure NumPy: no JAX here.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from paged_jax.config import StrictModel
from paged_jax.engine.engine import Arrival
from paged_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.checkpoints.tokenizer import Tokenizer

Count = Annotated[int, Field(ge=1)]


class Lengths(StrictModel):
    """Token counts drawn from a lognormal law, rounded, then clipped to [min, max]."""

    mean: Annotated[float, Field(gt=0)]
    """Mean of the law before clipping, in tokens."""
    sigma: Annotated[float, Field(ge=0, le=5)]
    """Standard deviation of the logarithm of the length; 0: every length is the mean."""
    min: Count = 1
    max: Count

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.min <= self.mean <= self.max:
            raise ValueError(f"the mean ({self.mean:g}) must lie between min ({self.min}) and max ({self.max})")
        return self

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` lengths: exp(N(ln mean - sigma^2 / 2, sigma)), rounded and clipped."""
        lengths = np.exp(rng.normal(np.log(self.mean) - self.sigma**2 / 2, self.sigma, count))
        return np.clip(np.rint(lengths), self.min, self.max).astype(int).tolist()


class _Workload(StrictModel):
    output: Lengths
    """Output tokens of each request."""
    request_rate: Annotated[float, Field(gt=0)] | None = None
    """Requests per second of a Poisson process; unset, all arrive at once."""
    n: Count = 1
    """Samples of each prompt; more than 1 are drawn at temperature 1, with a seed for each request."""
    users: Count | None = None
    """Users "0", "1", ..., of which each request has one: user k with probability proportional to 1 / (k + 1) (Zipf's
    law), so that a few ask for most; unset, all requests are of one user."""
    priorities: Annotated[int, Field(ge=2)] | None = None
    """Levels of priority, 0 (most urgent) to priorities - 1, drawn uniformly; unset, all are equal."""
    cache_salts: bool = False
    """Whether cached prefixes are shared only between requests of the same user."""

    @model_validator(mode="after")
    def _check_users(self) -> Self:
        if self.cache_salts and self.users is None:
            raise ValueError("cache_salts keeps the prefixes of users apart, and there is one user: set users, too")
        return self


class PromptsWorkload(_Workload):
    """Real prompts of 5 to 250 tokens, in an order drawn by the seed; seven share a long instruction."""

    kind: Literal["prompts"]
    num_requests: Count | None = None
    """How many of the prompts; unset, all."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        available = len(shipped_prompts())
        if self.num_requests is not None and self.num_requests > available:
            raise ValueError(
                f"num_requests ({self.num_requests}) is more than the {available} prompts of the package: "
                "ask for fewer, or use kind 'lognormal'"
            )
        return self


class LognormalWorkload(_Workload):
    """Random token ids; prompt and output lengths are independent lognormals."""

    kind: Literal["lognormal"]
    num_requests: Count
    prompt: Lengths


class SharedPrefixWorkload(_Workload):
    """Random token ids; each request begins with one of `num_prefixes` prefixes, drawn uniformly."""

    kind: Literal["shared_prefix"]
    num_requests: Count
    num_prefixes: Count
    prefix_len: Count
    """Tokens of each prefix."""
    suffix: Lengths
    """Tokens after the prefix, different for each request."""


type Workload = PromptsWorkload | LognormalWorkload | SharedPrefixWorkload

WORKLOADS: dict[str, type[PromptsWorkload] | type[LognormalWorkload] | type[SharedPrefixWorkload]] = {
    "prompts": PromptsWorkload,
    "lognormal": LognormalWorkload,
    "shared_prefix": SharedPrefixWorkload,
}


def shipped_prompts() -> tuple[str, ...]:
    """The prompts that come with the package."""
    text = files("paged_jax.experiments").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line)["prompt"] for line in text.splitlines())


def longest_request(spec: Workload) -> int | None:
    """Most tokens a request can have, prompt and output; None if only the tokenizer can tell."""
    match spec:
        case LognormalWorkload():
            return spec.prompt.max + spec.output.max
        case SharedPrefixWorkload():
            return spec.prefix_len + spec.suffix.max + spec.output.max
        case _:
            return None


def make_workload(spec: Workload, seed: int, tokenizer: "Tokenizer | None", vocab_size: int) -> tuple[Arrival, ...]:
    """The requests of one trial, by arrival time.

    What is drawn comes from separate streams (but prompt and output lengths share one): changing `request_rate` moves
    the same requests in time, and setting `users` gives the same requests users. `tokenizer` is needed by kind
    `prompts` only; `vocab_size` bounds random token ids.
    Raises ValueError when the model has no tokenizer but the kind needs one.
    """
    contents, lengths, gaps, owners, levels, samples = (np.random.default_rng([seed, i]) for i in range(6))
    match spec:
        case PromptsWorkload():
            prompts = _real_prompts(spec, tokenizer, contents)
        case LognormalWorkload():
            prompts = [_tokens(n, vocab_size, contents) for n in spec.prompt.draw(spec.num_requests, lengths)]
        case SharedPrefixWorkload():
            prefixes = [_tokens(spec.prefix_len, vocab_size, contents) for _ in range(spec.num_prefixes)]
            chosen = contents.integers(spec.num_prefixes, size=spec.num_requests)
            suffixes = spec.suffix.draw(spec.num_requests, lengths)
            prompts = [prefixes[i] + _tokens(n, vocab_size, contents) for i, n in zip(chosen, suffixes, strict=True)]
    times = np.zeros(len(prompts))
    if spec.request_rate is not None:
        times[1:] = np.cumsum(gaps.exponential(1 / spec.request_rate, len(prompts) - 1))
    count = len(prompts)
    outputs = spec.output.draw(count, lengths)
    users = _users(spec.users, count, owners)
    priorities = [0] * count if spec.priorities is None else levels.integers(spec.priorities, size=count).tolist()
    seeds = samples.integers(2**32, size=count).tolist() if spec.n > 1 else [None] * count
    return tuple(
        Arrival(
            time=float(times[i]),
            prompt_token_ids=prompts[i],
            params=SamplingParams(
                n=spec.n,
                temperature=1.0 if spec.n > 1 else 0.0,
                seed=seeds[i],
                max_tokens=outputs[i],
                ignore_eos=True,
            ),
            request_id=f"seed{seed}-{i}",
            priority=priorities[i],
            user=users[i],
            cache_salt=users[i] if spec.cache_salts else "",
            expected_output_len=outputs[i],
        )
        for i in range(count)
    )


def check_fits(arrivals: Sequence[Arrival], max_model_len: int, max_request_len: int) -> None:
    """Raise ValueError for the first request that the model's context or the whole KV pool could not hold.

    `max_request_len` is the most tokens of a request that the empty pool has room for, as the allocator gives it out.
    """
    for arrival in arrivals:
        prompt, output = len(arrival.prompt_token_ids), arrival.params.max_tokens or 0
        request = f"the workload has a request of {prompt} prompt and {output} output tokens"
        if prompt + output > max_model_len:
            raise ValueError(
                f"{request}, more than max_model_len ({max_model_len}): lower workload.output.max or the "
                "prompt lengths, or raise engine.max_model_len"
            )
        if prompt + output > max_request_len:
            raise ValueError(
                f"{request}, more than the whole KV pool holds ({max_request_len}): lower workload.output.max "
                "or the prompt lengths, or raise engine.kv_cache_memory or engine.num_blocks"
            )


def _real_prompts(
    spec: PromptsWorkload, tokenizer: "Tokenizer | None", rng: np.random.Generator
) -> list[tuple[int, ...]]:
    if tokenizer is None:
        raise ValueError(
            "workload.kind 'prompts' needs a model with a tokenizer, and this one has none: use kind 'lognormal'"
        )
    texts = shipped_prompts()
    order = rng.permutation(len(texts))[: spec.num_requests]
    return [tuple(tokenizer.encode(texts[i])) for i in order]


def _users(num_users: int | None, count: int, rng: np.random.Generator) -> list[str]:
    if num_users is None:
        return [""] * count
    shares = 1 / np.arange(1, num_users + 1)
    return [str(user) for user in rng.choice(num_users, size=count, p=shares / shares.sum())]


def _tokens(count: int, vocab_size: int, rng: np.random.Generator) -> tuple[int, ...]:
    return tuple(rng.integers(vocab_size, size=count).tolist())

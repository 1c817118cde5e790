"""Workloads: which requests arrive when. The same settings and seed always give the same requests.

The kinds `lognormal`, `uniform`, `zipf` and `bimodal` are random token ids whose lengths follow that law;
`shared_prefix`, `few_shot`, `tree` and `chat` are requests that begin alike; `prompts` is real text, shipped with the
package; `trace` is a recorded trace (see `request_traces`). All go on after end-of-sequence, so that output lengths are
exactly as drawn, and policies may be told them; requests of one sample are greedy. Pure NumPy: no JAX here.
"""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from paged_jax.engine.engine import Arrival
from paged_jax.experiments.arrival_times import Start, starts
from paged_jax.experiments.chat import ChatWorkload, chat_arrivals
from paged_jax.experiments.lengths import Count, Lengths
from paged_jax.experiments.prefix_tree import TreeWorkload, tree_prompts
from paged_jax.experiments.request_traces.spec import TraceWorkload
from paged_jax.experiments.request_traces.workload import trace_requests
from paged_jax.experiments.shared_prefixes import (
    FewShotWorkload,
    SharedPrefixWorkload,
    few_shot_prompts,
    shared_prefix_prompts,
)
from paged_jax.experiments.token_ids import random_ids
from paged_jax.experiments.workload_spec import Streams, WorkloadSpec, as_arrivals

if TYPE_CHECKING:
    import numpy as np

    from paged_jax.checkpoints.tokenizer import Tokenizer


class PromptsWorkload(WorkloadSpec):
    """Real prompts of 5 to 250 tokens, in an order drawn by the seed; seven share a long instruction."""

    kind: Literal["prompts"]
    num_requests: Count | None = None
    """How many of the prompts; unset, all."""
    output: Lengths
    """Output tokens of each request."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        available = len(shipped_prompts())
        if self.num_requests is not None and self.num_requests > available:
            raise ValueError(
                f"num_requests ({self.num_requests}) is more than the {available} prompts of the package: "
                "ask for fewer, or use kind 'lognormal'"
            )
        return self


class SyntheticWorkload(WorkloadSpec):
    """Random token ids; prompt and output lengths are independent, and follow the law `kind` unless they name one."""

    kind: Literal["lognormal", "uniform", "zipf", "bimodal"]
    num_requests: Count
    output: Lengths
    """Output tokens of each request."""
    prompt: Lengths
    """Prompt tokens of each request."""


type Workload = Annotated[
    PromptsWorkload
    | SyntheticWorkload
    | SharedPrefixWorkload
    | FewShotWorkload
    | TreeWorkload
    | ChatWorkload
    | TraceWorkload,
    Field(discriminator="kind"),
]

_MODELS: tuple[type[WorkloadSpec], ...] = get_args(get_args(Workload.__value__)[0])

WORKLOADS: dict[str, type[WorkloadSpec]] = {
    kind: model for model in _MODELS for kind in get_args(model.model_fields["kind"].annotation)
}
"""The model of each kind."""


def shipped_prompts() -> tuple[str, ...]:
    """The prompts that come with the package."""
    text = files("paged_jax.experiments").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line)["prompt"] for line in text.splitlines())


def longest_request(spec: Workload) -> int | None:
    """Most tokens a request can have, prompt and output; None if only the tokenizer or the trace can tell."""
    match spec:
        case SyntheticWorkload():
            return spec.prompt.longest + spec.output.longest
        case SharedPrefixWorkload():
            return spec.prefix_len + spec.suffix.longest + spec.output.longest
        case FewShotWorkload():
            return spec.max_shots * spec.example.longest + spec.question.longest + spec.output.longest
        case TreeWorkload():
            return spec.root.longest + spec.depth * spec.node.longest + spec.output.longest
        case ChatWorkload():
            return spec.longest
        case TraceWorkload():
            return spec.max_total_tokens
        case _:
            return None


def make_workload(spec: Workload, seed: int, tokenizer: "Tokenizer | None", vocab_size: int) -> tuple[Arrival, ...]:
    """The requests of one trial, by arrival time; one that waits for another comes after it.

    What is drawn comes from separate streams (but prompt and output lengths share one): changing `request_rate` moves
    the same requests in time, and setting `users` gives the same requests users. `tokenizer` is needed by kind
    `prompts` and by traces of texts; `vocab_size` bounds random token ids.
    Raises ValueError when the model has no tokenizer but the kind needs one, or a trace is not what the spec says.
    """
    streams = Streams.of(seed)
    match spec:
        case PromptsWorkload():
            prompts = _real_prompts(spec, tokenizer, streams.contents)
        case SyntheticWorkload():
            lengths = spec.prompt.draw(spec.num_requests, streams.lengths)
            prompts = [random_ids(n, vocab_size, streams.contents) for n in lengths]
        case SharedPrefixWorkload():
            prompts = shared_prefix_prompts(spec, streams, vocab_size)
        case FewShotWorkload():
            prompts = few_shot_prompts(spec, streams, vocab_size)
        case TreeWorkload():
            prompts = tree_prompts(spec, streams, vocab_size)
        case ChatWorkload():
            return chat_arrivals(spec, seed, streams, vocab_size)
        case TraceWorkload():
            requests = trace_requests(spec, seed, vocab_size, tokenizer)
            prompts = [request.prompt_token_ids for request in requests]
            times = [Start(request.time) for request in requests if request.time is not None]
            begin = times or starts(spec, len(prompts), streams.gaps)
            return as_arrivals(spec, seed, streams, prompts, [request.output_len for request in requests], begin)
    begin = starts(spec, len(prompts), streams.gaps)
    return as_arrivals(spec, seed, streams, prompts, spec.output.draw(len(prompts), streams.lengths), begin)


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
                "prompt lengths (of a trace: set workload.max_total_tokens), or raise engine.max_model_len"
            )
        if prompt + output > max_request_len:
            raise ValueError(
                f"{request}, more than the whole KV pool holds ({max_request_len}): lower workload.output.max "
                "or the prompt lengths (of a trace: set workload.max_total_tokens), or raise engine.kv_cache_memory "
                "or engine.num_blocks"
            )


def _real_prompts(
    spec: PromptsWorkload, tokenizer: "Tokenizer | None", rng: "np.random.Generator"
) -> list[tuple[int, ...]]:
    if tokenizer is None:
        raise ValueError(
            "workload.kind 'prompts' needs a model with a tokenizer, and this one has none: use kind 'lognormal'"
        )
    texts = shipped_prompts()
    order = rng.permutation(len(texts))[: spec.num_requests]
    return [tuple(tokenizer.encode(texts[i])) for i in order]

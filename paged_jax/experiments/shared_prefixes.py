"""Workloads whose requests begin alike: system prompts, few-shot examples, trees of thoughts."""

from typing import Literal

from paged_jax.experiments.lengths import Count, Lengths
from paged_jax.experiments.token_ids import random_ids
from paged_jax.experiments.workload_spec import Streams, WorkloadSpec


class SharedPrefixWorkload(WorkloadSpec):
    """Random token ids; each request begins with one of `num_prefixes` prefixes, drawn uniformly."""

    kind: Literal["shared_prefix"]
    num_requests: Count
    num_prefixes: Count
    prefix_len: Count
    """Tokens of each prefix."""
    suffix: Lengths
    """Tokens after the prefix, different for each request."""
    output: Lengths
    """Output tokens of each request."""


def shared_prefix_prompts(spec: SharedPrefixWorkload, streams: Streams, vocab_size: int) -> list[tuple[int, ...]]:
    """A prefix and a suffix for each request."""
    contents = streams.contents
    prefixes = [random_ids(spec.prefix_len, vocab_size, contents) for _ in range(spec.num_prefixes)]
    chosen = contents.integers(spec.num_prefixes, size=spec.num_requests)
    suffixes = spec.suffix.draw(spec.num_requests, streams.lengths)
    return [prefixes[i] + random_ids(n, vocab_size, contents) for i, n in zip(chosen, suffixes, strict=True)]

"""Workloads whose requests begin alike: the same system prompts, or the same few examples."""

from itertools import accumulate
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

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


class FewShotWorkload(WorkloadSpec):
    """Random token ids; each request asks a question of its own after the first few examples of one of the tasks.

    The task is drawn uniformly, and so is the number of its examples, from `min_shots` to `max_shots`.
    """

    kind: Literal["few_shot"]
    num_requests: Count
    num_tasks: Count = 1
    max_shots: Count
    """Examples that each task has."""
    min_shots: Annotated[int, Field(ge=0)] = 1
    example: Lengths
    """Tokens of each example, question and answer."""
    question: Lengths
    """Tokens after the examples, different for each request."""
    output: Lengths
    """Output tokens of each request."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_shots > self.max_shots:
            raise ValueError(f"min_shots ({self.min_shots}) is more than max_shots ({self.max_shots}): lower it")
        return self


def shared_prefix_prompts(spec: SharedPrefixWorkload, streams: Streams, vocab_size: int) -> list[tuple[int, ...]]:
    """A prefix and a suffix for each request."""
    contents = streams.contents
    prefixes = [random_ids(spec.prefix_len, vocab_size, contents) for _ in range(spec.num_prefixes)]
    chosen = contents.integers(spec.num_prefixes, size=spec.num_requests)
    suffixes = spec.suffix.draw(spec.num_requests, streams.lengths)
    return [prefixes[i] + random_ids(n, vocab_size, contents) for i, n in zip(chosen, suffixes, strict=True)]


def few_shot_prompts(spec: FewShotWorkload, streams: Streams, vocab_size: int) -> list[tuple[int, ...]]:
    """Some examples of a task and a question for each request."""
    tasks = []
    for _ in range(spec.num_tasks):
        lengths = spec.example.draw(spec.max_shots, streams.lengths)
        examples = [random_ids(n, vocab_size, streams.contents) for n in lengths]
        tasks.append(list(accumulate(examples, initial=())))  # the first 0, 1, 2, ... examples
    chosen = streams.structure.integers(spec.num_tasks, size=spec.num_requests)
    shots = streams.structure.integers(spec.min_shots, spec.max_shots + 1, size=spec.num_requests)
    questions = spec.question.draw(spec.num_requests, streams.lengths)
    return [
        tasks[task][k] + random_ids(n, vocab_size, streams.contents)
        for task, k, n in zip(chosen, shots, questions, strict=True)
    ]

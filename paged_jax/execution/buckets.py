"""The padded batch sizes that a step is compiled for."""

from dataclasses import dataclass

from paged_jax.config import EngineConfig
from paged_jax.execution.plan import SchedulerOutput

MAX_BANNED_TOKENS = 16
"""Tokens of one request that can be kept from being sampled, as `min_tokens` does with those that end it."""


@dataclass(frozen=True)
class Bucket:
    """Shape of a padded batch."""

    num_tokens: int
    num_seqs: int
    """Sequences, and as many rows that sample; forks sample without tokens of their own."""


def make_buckets(config: EngineConfig) -> tuple[Bucket, ...]:
    """The engine's buckets, ascending; the last one holds the largest step that the scheduler may plan.

    By default the token counts are powers of four up to max_num_seqs, max_num_seqs itself (a full batch of decodes
    wastes nothing), then powers of two times it up to max_num_batched_tokens. A step of T tokens has at most
    min(T, max_num_seqs) sequences.
    """
    sizes = config.token_buckets
    if sizes is None:
        seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
        small = {4**i for i in range(16) if 4**i < seqs}
        large = {seqs * 2**i for i in range(32) if seqs * 2**i < budget}
        sizes = tuple(sorted(small | large | {budget}))
    return tuple(Bucket(tokens, min(tokens, config.max_num_seqs)) for tokens in sizes)


def pick_bucket(buckets: tuple[Bucket, ...], num_tokens: int, num_rows: int = 0) -> Bucket:
    """The smallest bucket that holds `num_tokens`, and `num_rows` rows that sample or are admitted."""
    return next(bucket for bucket in buckets if bucket.num_tokens >= num_tokens and bucket.num_seqs >= num_rows)


def num_rows(plan: SchedulerOutput) -> int:
    """Rows that the plan's batch must have: for sequences, for samples and for requests that are admitted.

    Forked requests sample, and are admitted, without being sequences.
    """
    num_seqs = len(plan.decodes) + len(plan.idle) + len(plan.chunks)
    num_samples = len(plan.decodes) + sum(part.samples for part in plan.chunks) + len(plan.forks)
    return max(num_seqs, num_samples, len(plan.admitted))

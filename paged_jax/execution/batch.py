"""Lays a plan out flat: all tokens of all requests in one row, decodes first, padded to a bucket."""

from typing import NamedTuple

import numpy as np

from paged_jax.execution.buckets import Bucket
from paged_jax.execution.plan import ScheduledRequest, SchedulerOutput
from paged_jax.sampling.seeds import seed_words
from paged_jax.sampling.state import SamplingState

FROM_SLOT = -1
"""Token id that stands for the newest token of the request's slot, which the device has already."""


class Batch(NamedTuple):
    """One step's inputs as host arrays; T tokens and S sequences of the bucket, padding included.

    Padded tokens are written to the null block, padded sequences have no tokens, and padded slots are `num_slots`.
    """

    token_ids: np.ndarray
    """int32 [T]; FROM_SLOT for the newest token of each request that reaches it."""
    token_slots: np.ndarray
    """int32 [T]: slot of each token's request."""
    positions: np.ndarray
    """int32 [T]"""
    write_blocks: tuple[np.ndarray, ...]
    """int32 [T] per cache group: block that each token's keys and values go to."""
    write_offsets: np.ndarray
    """int32 [T]: slot within that block."""
    block_tables: tuple[np.ndarray, ...]
    """int32 [S, W] per cache group."""
    kv_lens: np.ndarray
    """int32 [S]"""
    cu_q_lens: np.ndarray
    """int32 [S + 1]"""
    num_seqs: np.ndarray
    """int32 [1]"""
    logit_rows: np.ndarray
    """int32 [S]: which token's logits each sequence samples from; 0 where it samples nothing."""
    sample_slots: np.ndarray
    """int32 [S]: slot of each sequence that samples, else num_slots."""
    sample_positions: np.ndarray
    """int32 [S]: index, in its request, of the token that is sampled."""
    admitted_slots: np.ndarray
    """int32 [S]: slots that have new owners, else num_slots."""
    admitted_rows: SamplingState
    """The new owners' parameters, [S] rows of host arrays."""


class BatchBuilder:
    """Keeps a host copy of each slot's block table, so that a step only adds the new entries."""

    def __init__(self, *, num_slots: int, block_size: int, max_request_len: int, num_groups: int) -> None:
        self._num_slots = num_slots
        self._block_size = block_size
        width = -(-max_request_len // block_size)
        self._tables = [np.zeros((num_slots, width), np.int32) for _ in range(num_groups)]
        self._filled = [[0] * num_slots for _ in range(num_groups)]

    @property
    def table_width(self) -> int:
        """Entries of a block table that holds the longest request."""
        return self._tables[0].shape[1]

    def empty(self, bucket: Bucket) -> Batch:
        """A batch of nothing but padding."""
        tokens, seqs = bucket.num_tokens, bucket.num_seqs

        def zeros(count: int) -> np.ndarray:
            return np.zeros(count, np.int32)

        return Batch(
            token_ids=zeros(tokens),
            token_slots=zeros(tokens),
            positions=zeros(tokens),
            write_blocks=tuple(zeros(tokens) for _ in self._tables),
            write_offsets=zeros(tokens),
            block_tables=tuple(np.zeros((seqs, self.table_width), np.int32) for _ in self._tables),
            kv_lens=zeros(seqs),
            cu_q_lens=zeros(seqs + 1),
            num_seqs=zeros(1),
            logit_rows=zeros(seqs),
            sample_slots=np.full(seqs, self._num_slots, np.int32),
            sample_positions=zeros(seqs),
            admitted_slots=np.full(seqs, self._num_slots, np.int32),
            admitted_rows=SamplingState(
                key_data=np.zeros((seqs, 2), np.uint32),
                temperature=np.zeros(seqs, np.float32),
                top_k=zeros(seqs),
                top_p=np.ones(seqs, np.float32),
                min_p=np.zeros(seqs, np.float32),
                last_token=zeros(seqs),
            ),
        )

    def build(self, plan: SchedulerOutput, bucket: Bucket) -> tuple[Batch, list[int]]:
        """The plan's batch, and for each of `plan.scheduled` the row of its sequence."""
        batch = self.empty(bucket)
        for i, request in enumerate(plan.admitted):
            for filled in self._filled:
                filled[request.slot] = 0
            params = request.sampling_params
            batch.admitted_slots[i] = request.slot
            rows = batch.admitted_rows
            rows.key_data[i] = seed_words(request.seed)
            rows.temperature[i] = params.temperature
            rows.top_k[i] = min(params.top_k, np.iinfo(np.int32).max)
            rows.top_p[i] = params.top_p
            rows.min_p[i] = params.min_p
            rows.last_token[i] = request.token_ids[-1]
        order = sorted(range(len(plan.scheduled)), key=lambda i: plan.scheduled[i].num_tokens > 1)
        row_of = [0] * len(order)
        start = 0
        for row, i in enumerate(order):
            row_of[i] = row
            start = self._add(batch, plan.scheduled[i], row, start)
        batch.cu_q_lens[len(order) + 1 :] = start
        batch.num_seqs[0] = len(order)
        return batch, row_of

    def _add(self, batch: Batch, part: ScheduledRequest, row: int, start: int) -> int:
        """Lay out one request at sequence `row` and tokens from `start`; returns where the next one starts."""
        request = part.request
        end = start + part.num_tokens
        positions = np.arange(part.start, part.start + part.num_tokens, dtype=np.int32)
        batch.token_ids[start:end] = request.token_ids[part.start : part.start + part.num_tokens]
        batch.token_slots[start:end] = request.slot
        batch.positions[start:end] = positions
        batch.write_offsets[start:end] = positions % self._block_size
        for group, table in enumerate(request.block_tables):
            entries, filled = self._tables[group][request.slot], self._filled[group]
            entries[filled[request.slot] : len(table)] = table.block_ids[filled[request.slot] :]
            filled[request.slot] = len(table)
            batch.block_tables[group][row, : len(table)] = entries[: len(table)]
            batch.write_blocks[group][start:end] = entries[positions // self._block_size]
        batch.kv_lens[row] = part.start + part.num_tokens
        batch.cu_q_lens[row + 1] = end
        if part.samples:
            batch.token_ids[end - 1] = FROM_SLOT
            batch.logit_rows[row] = end - 1
            batch.sample_slots[row] = request.slot
            batch.sample_positions[row] = part.start + part.num_tokens
        return end

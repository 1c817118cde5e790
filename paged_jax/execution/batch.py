"""Lays a plan out flat: all tokens of all requests in one row, single ones first, padded to a bucket."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paged_jax.execution.buckets import MAX_BANNED_TOKENS, Bucket
from paged_jax.execution.plan import PlannedRequest, ScheduledRequest, SchedulerOutput
from paged_jax.sampling.seeds import seed_words
from paged_jax.sampling.state import SamplingState

FROM_SLOT = -1
"""Token id that stands for the newest token of the request's slot, which the device has already."""

NO_TOKEN = np.iinfo(np.int32).max
"""Pads lists of banned tokens: beyond every vocabulary. (JAX would take a negative one for an index from the end.)"""


class Batch(NamedTuple):
    """One step's inputs as host arrays; T tokens and S sequences of the bucket, padding included.

    Padded tokens are written to the null block, padded sequences have no tokens, and padded slots are `num_slots`.
    """

    token_ids: np.ndarray
    """int32 [T]; FROM_SLOT for a newest token that the device has sampled itself."""
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
    """int32 [R], R = S: which token's logits each row samples from. These rows are not those of sequences: the forks
    of a sequence make several, and a chunk that is not its prompt's last has none."""
    sample_slots: np.ndarray
    """int32 [R]: slot of each request that samples, else num_slots."""
    sample_index: np.ndarray
    """int32 [R]: which of its prompt's n samples it is."""
    sample_positions: np.ndarray
    """int32 [R]: index, in its request, of the token that is sampled."""
    banned_token_ids: np.ndarray
    """int32 [R, MAX_BANNED_TOKENS]: tokens that must not be sampled, then NO_TOKEN."""
    wants_logprobs: np.ndarray
    """bool []: whether any row wants log-probabilities."""
    admitted_slots: np.ndarray
    """int32 [R]: slots that have new owners, else num_slots."""
    admitted_rows: SamplingState
    """The new owners' parameters, [R] rows of host arrays."""


class BatchBuilder:
    """Keeps a host copy of each slot's block tables, so that a step only adds what has changed.

    A table grows at its end; blocks that the step writes may have been replaced by copies, and the window gives up
    leading ones. Nothing else of a table changes while its request keeps its slot.
    """

    def __init__(self, *, num_slots: int, block_size: int, max_request_len: int, num_groups: int) -> None:
        self._num_slots = num_slots
        self._block_size = block_size
        width = -(-max_request_len // block_size)
        self._tables = [np.zeros((num_slots, width), np.int32) for _ in range(num_groups)]
        self._known = [[0] * num_slots for _ in range(num_groups)]  # entries of each table that are copied

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
            sample_index=zeros(seqs),
            sample_positions=zeros(seqs),
            banned_token_ids=np.full((seqs, MAX_BANNED_TOKENS), NO_TOKEN, np.int32),
            wants_logprobs=np.zeros((), bool),
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
        """The plan's batch, and the row that samples for each of its decodes, chunks and forks, or -1."""
        batch = self.empty(bucket)
        self._admit(batch, plan.admitted)
        num_singles = self._add_singles(batch, plan.decodes, plan.idle)
        ends = self._add_chunks(batch, plan.chunks, num_singles)
        samplers = [Sampler(r, i, r.num_computed_tokens + 1) for i, r in enumerate(plan.decodes)]
        rows = list(range(len(samplers)))
        for part, end in zip(plan.chunks, ends, strict=True):
            rows.append(len(samplers) if part.samples else -1)
            if part.samples:
                samplers.append(Sampler(part.request, end - 1, part.start + part.num_tokens))
        if plan.forks:
            of_parent = {id(sampler.request): sampler for sampler in samplers}
            rows.extend(range(len(samplers), len(samplers) + len(plan.forks)))
            samplers += [of_parent[id(fork.parent)]._replace(request=fork.child) for fork in plan.forks]
        _add_samplers(batch, samplers)
        return batch, rows

    def _admit(self, batch: Batch, admitted: Sequence[PlannedRequest]) -> None:
        rows = batch.admitted_rows
        for i, request in enumerate(admitted):
            for entries, known in zip(self._tables, self._known, strict=True):
                entries[request.slot] = 0
                known[request.slot] = 0
            params = request.sampling_params
            batch.admitted_slots[i] = request.slot
            rows.key_data[i] = seed_words(request.seed)
            rows.temperature[i] = params.temperature
            rows.top_k[i] = min(params.top_k, np.iinfo(np.int32).max)
            rows.top_p[i] = params.top_p
            rows.min_p[i] = params.min_p
            rows.last_token[i] = request.token_ids[-1]

    def _add_singles(self, batch: Batch, decodes: Sequence[PlannedRequest], idle: Sequence[PlannedRequest]) -> int:
        """Lay out the requests of one token each, first in the batch; returns how many they are."""
        requests = [*decodes, *idle]
        count, num_decodes = len(requests), len(decodes)
        starts = [r.num_computed_tokens for r in decodes] + [r.num_computed_tokens - 1 for r in idle]
        for request, start in zip(requests, starts, strict=True):
            self._follow(request, start, 1)
        slots, positions = np.array([r.slot for r in requests], np.int32), np.array(starts, np.int32)
        for i, request in enumerate(requests):
            known_to_device = i < num_decodes and request.sampled_on_device
            batch.token_ids[i] = FROM_SLOT if known_to_device else request.token_ids[starts[i]]
        batch.token_slots[:count] = slots
        batch.positions[:count] = positions
        batch.write_offsets[:count] = positions % self._block_size
        for group, entries in enumerate(self._tables):
            batch.block_tables[group][:count] = entries[slots]
            # what idle requests compute again goes to the null block: their own pages stay as they are
            written = entries[slots[:num_decodes], positions[:num_decodes] // self._block_size]
            batch.write_blocks[group][:num_decodes] = written
        batch.kv_lens[:count] = positions + 1
        batch.cu_q_lens[: count + 1] = np.arange(count + 1)
        batch.cu_q_lens[count + 1 :] = count
        batch.num_seqs[0] = count
        return count

    def _add_chunks(self, batch: Batch, chunks: Sequence[ScheduledRequest], start: int) -> list[int]:
        """Lay out the chunks from token `start` on, those of one token first; returns where each one ends."""
        ends = [0] * len(chunks)
        order = sorted(range(len(chunks)), key=lambda i: chunks[i].num_tokens > 1)
        for row, i in enumerate(order, start=start):
            part = chunks[i]
            request, end = part.request, start + part.num_tokens
            positions = np.arange(part.start, part.start + part.num_tokens, dtype=np.int32)
            batch.token_ids[start:end] = request.token_ids[part.start : part.start + part.num_tokens]
            if part.samples and request.sampled_on_device:
                batch.token_ids[end - 1] = FROM_SLOT
            batch.token_slots[start:end] = request.slot
            batch.positions[start:end] = positions
            batch.write_offsets[start:end] = positions % self._block_size
            self._follow(request, part.start, part.num_tokens)
            for group, entries in enumerate(self._tables):
                batch.block_tables[group][row] = entries[request.slot]
                batch.write_blocks[group][start:end] = entries[request.slot, positions // self._block_size]
            batch.kv_lens[row] = part.start + part.num_tokens
            batch.cu_q_lens[row + 1 :] = end
            batch.num_seqs[0] = row + 1
            ends[i] = start = end
        return ends

    def _follow(self, request: PlannedRequest, start: int, num_tokens: int) -> None:
        """Bring the copies of the request's tables up to date; tokens from `start` on are about to be written."""
        slot, first = request.slot, start // self._block_size
        end = (start + num_tokens - 1) // self._block_size + 1
        for table, entries, known in zip(request.block_tables, self._tables, self._known, strict=True):
            count = min(len(table.block_ids), self.table_width)  # a reservation may be longer than any request
            changed = slice(min(first, known[slot]), count if count > known[slot] else end)
            entries[slot, changed] = table.block_ids[changed]
            known[slot] = count
            if table.num_dropped:
                entries[slot, : table.num_dropped] = 0


class Sampler(NamedTuple):
    """A row that samples: for whom, from the logits of which token of the batch, and which token of its request."""

    request: PlannedRequest
    logit_row: int
    position: int


def _add_samplers(batch: Batch, samplers: Sequence[Sampler]) -> None:
    for row, (request, logit_row, position) in enumerate(samplers):
        batch.logit_rows[row] = logit_row
        batch.sample_slots[row] = request.slot
        batch.sample_index[row] = request.sample_index
        batch.sample_positions[row] = position
        if request.sampling_params.min_tokens > request.num_output_tokens:
            batch.banned_token_ids[row, : len(request.end_token_ids)] = sorted(request.end_token_ids)
        if request.num_logprobs is not None:
            batch.wants_logprobs[...] = True

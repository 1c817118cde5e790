from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.execution.batch import FROM_SLOT, BatchBuilder
from paged_jax.execution.buckets import Bucket
from paged_jax.execution.plan import ScheduledRequest, SchedulerOutput
from paged_jax.kv_cache.block_table import BlockTable
from paged_jax.sampling.params import SamplingParams


@dataclass
class FakeRequest:
    """What the builder reads of a request."""

    token_ids: list[int]
    slot: int
    blocks: list[int]
    seed: int = 0
    sampling_params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))

    @property
    def block_tables(self) -> tuple[BlockTable, ...]:
        return (BlockTable(self.blocks),)


def part(request: FakeRequest, start: int, count: int) -> ScheduledRequest:
    return ScheduledRequest(request, start, count, start + count == len(request.token_ids))


def plan(parts, admitted=()) -> SchedulerOutput:
    return SchedulerOutput(tuple(parts), tuple(admitted), (), ())


def builder(num_slots: int = 4, block_size: int = 4, max_request_len: int = 12) -> BatchBuilder:
    return BatchBuilder(num_slots=num_slots, block_size=block_size, max_request_len=max_request_len, num_groups=1)


def lists(batch) -> dict:
    """The arrays that describe tokens and sequences, as lists."""
    names = ("token_ids", "token_slots", "positions", "write_offsets", "kv_lens", "cu_q_lens", "num_seqs")
    names += ("logit_rows", "sample_slots", "sample_positions", "admitted_slots")
    return {
        **{name: getattr(batch, name).tolist() for name in names},
        "write_blocks": batch.write_blocks[0].tolist(),
        "block_tables": batch.block_tables[0].tolist(),
    }


def test_a_mixed_step_laid_out_by_hand():
    """A whole prompt, a decode and a chunk, planned in that order: the decode comes first in the batch."""
    prompt = FakeRequest([10, 11, 12], slot=2, blocks=[5])
    decode = FakeRequest([20, 21, 22, 23, 24, 25], slot=0, blocks=[3, 1])
    chunk = FakeRequest([30, 31, 32, 33, 34, 35, 36, 37, 38], slot=1, blocks=[7, 8, 9])
    batch, rows = builder().build(
        plan([part(prompt, 0, 3), part(decode, 5, 1), part(chunk, 2, 4)], [prompt]), Bucket(10, 4)
    )
    assert rows == [1, 0, 2]
    assert lists(batch) == {
        "token_ids": [FROM_SLOT, 10, 11, FROM_SLOT, 32, 33, 34, 35, 0, 0],
        "token_slots": [0, 2, 2, 2, 1, 1, 1, 1, 0, 0],
        "positions": [5, 0, 1, 2, 2, 3, 4, 5, 0, 0],
        "write_blocks": [1, 5, 5, 5, 7, 7, 8, 8, 0, 0],
        "write_offsets": [1, 0, 1, 2, 2, 3, 0, 1, 0, 0],
        "block_tables": [[3, 1, 0], [5, 0, 0], [7, 8, 9], [0, 0, 0]],
        "kv_lens": [6, 3, 6, 0],
        "cu_q_lens": [0, 1, 4, 8, 8],
        "num_seqs": [3],
        "logit_rows": [0, 3, 0, 0],
        "sample_slots": [0, 2, 4, 4],
        "sample_positions": [6, 3, 0, 0],
        "admitted_slots": [2, 4, 4, 4],
    }


def test_a_chunk_of_one_token_that_is_not_the_last_samples_nothing():
    request = FakeRequest([10, 11, 12], slot=1, blocks=[5])
    batch, _ = builder().build(plan([part(request, 0, 1)], [request]), Bucket(1, 1))
    assert batch.token_ids.tolist() == [10]
    assert batch.sample_slots.tolist() == [4]


def test_admitted_rows_carry_the_parameters():
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    request = FakeRequest([10, 11], slot=3, blocks=[1], seed=(5 << 32) | 9, sampling_params=params)
    batch, _ = builder().build(plan([part(request, 0, 2)], [request]), Bucket(4, 4))
    rows = batch.admitted_rows
    assert batch.admitted_slots.tolist() == [3, 4, 4, 4]
    assert rows.key_data[0].tolist() == [5, 9]
    row = (rows.temperature[0], rows.top_k[0], rows.top_p[0], rows.min_p[0], rows.last_token[0])
    assert row == (0.5, 7, 0.25, 0.125, 11)


def test_an_empty_batch_writes_and_samples_nowhere():
    batch = builder().empty(Bucket(3, 2))
    assert batch.write_blocks[0].tolist() == [0, 0, 0]
    assert batch.sample_slots.tolist() == batch.admitted_slots.tolist() == [4, 4]
    assert batch.num_seqs.tolist() == [0]


@pytest.mark.parametrize(("first", "second"), [([1, 2, 3], [4]), ([1], [4, 5, 6]), ([1, 2, 3], [6, 5, 4])])
def test_a_slot_with_a_new_owner_forgets_the_old_table(first, second):
    build = builder()
    old = FakeRequest(list(range(4 * len(first))), slot=1, blocks=first)
    build.build(plan([part(old, 0, len(old.token_ids))], [old]), Bucket(16, 4))
    new = FakeRequest(list(range(4 * len(second))), slot=1, blocks=second)
    batch, _ = build.build(plan([part(new, 0, len(new.token_ids))], [new]), Bucket(16, 4))
    assert batch.block_tables[0][0].tolist() == second + [0] * (3 - len(second))
    assert batch.write_blocks[0][: len(new.token_ids)].tolist() == [b for b in second for _ in range(4)]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(1, 4)), max_size=30))
def test_tables_follow_their_owners_through_any_history(history):
    """Slots change owners and tables grow in any order; batches show exactly the blocks of today's owners."""
    build, owners, next_block = builder(num_slots=3), {}, 1
    for slot, new_owner, growth in history:
        admitted = []
        if new_owner or slot not in owners:
            owners[slot] = FakeRequest([], slot=slot, blocks=[])
            admitted = [owners[slot]]
        request = owners[slot]
        growth = min(growth, 12 - len(request.token_ids))
        if growth == 0:
            continue
        start = len(request.token_ids)
        request.token_ids += range(growth)
        while 4 * len(request.blocks) < len(request.token_ids):
            request.blocks.append(next_block)
            next_block += 1
        others = [r for s, r in owners.items() if s != slot and r.token_ids]
        parts = [part(request, start, growth), *(part(r, len(r.token_ids) - 1, 1) for r in others)]
        batch, rows = build.build(plan(parts, admitted), Bucket(16, 3))
        for planned, row in zip(parts, rows, strict=True):
            blocks = planned.request.blocks
            assert batch.block_tables[0][row].tolist() == blocks + [0] * (3 - len(blocks))
            tokens = slice(batch.cu_q_lens[row], batch.cu_q_lens[row + 1])
            positions = range(planned.start, planned.start + planned.num_tokens)
            assert batch.write_blocks[0][tokens].tolist() == [blocks[p // 4] for p in positions]
            assert batch.write_offsets[tokens].tolist() == [p % 4 for p in positions]

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned_requests import chunk, plan, request

from paged_jax.execution.batch import FROM_SLOT, NO_TOKEN, BatchBuilder
from paged_jax.execution.buckets import MAX_BANNED_TOKENS, Bucket, num_rows
from paged_jax.execution.plan import Fork, PlannedRequest
from paged_jax.sampling.params import SamplingParams


def builder(num_slots: int = 4, block_size: int = 4, max_request_len: int = 12, num_groups: int = 1) -> BatchBuilder:
    return BatchBuilder(
        num_slots=num_slots, block_size=block_size, max_request_len=max_request_len, num_groups=num_groups
    )


def lists(batch) -> dict:
    """The arrays that describe tokens and sequences, as lists."""
    names = ("token_ids", "token_slots", "positions", "write_offsets", "kv_lens", "cu_q_lens", "num_seqs")
    names += ("logit_rows", "sample_slots", "sample_index", "sample_positions", "admitted_slots")
    return {
        **{name: getattr(batch, name).tolist() for name in names},
        "write_blocks": batch.write_blocks[0].tolist(),
        "block_tables": batch.block_tables[0].tolist(),
    }


def test_a_mixed_step_laid_out_by_hand():
    """A decode, a whole prompt and a chunk that is not its prompt's last: sampling rows are not sequence rows."""
    decode = request([20, 21, 22, 23, 24, 25], 0, [3, 1], num_computed_tokens=5)
    prompt = request([10, 11, 12], 2, [5], sample_index=6)
    part = request([30, 31, 32, 33, 34, 35, 36, 37, 38], 1, [7, 8, 9])
    assert isinstance(decode, PlannedRequest)
    parts = (chunk(part, 2, 4), chunk(prompt, 0, 3))
    batch, rows = builder().build(plan(decodes=[decode], chunks=parts, admitted=[prompt, part]), Bucket(10, 4))
    assert rows == [0, -1, 1]
    assert lists(batch) == {
        "token_ids": [FROM_SLOT, 32, 33, 34, 35, 10, 11, FROM_SLOT, 0, 0],
        "token_slots": [0, 1, 1, 1, 1, 2, 2, 2, 0, 0],
        "positions": [5, 2, 3, 4, 5, 0, 1, 2, 0, 0],
        "write_blocks": [1, 7, 7, 8, 8, 5, 5, 5, 0, 0],
        "write_offsets": [1, 2, 3, 0, 1, 0, 1, 2, 0, 0],
        "block_tables": [[3, 1, 0], [7, 8, 9], [5, 0, 0], [0, 0, 0]],
        "kv_lens": [6, 6, 3, 0],
        "cu_q_lens": [0, 1, 5, 8, 8],
        "num_seqs": [3],
        "logit_rows": [0, 7, 0, 0],
        "sample_slots": [0, 2, 4, 4],
        "sample_index": [0, 6, 0, 0],
        "sample_positions": [6, 3, 0, 0],
        "admitted_slots": [2, 1, 4, 4],
    }


def test_forks_sample_from_the_logits_of_their_parents():
    """The children have slots and no blocks, and more of them than tokens are planned."""
    decode = request([7, 7, 7], 3, [2], num_computed_tokens=2)
    prompt = request([10], 1, [5])
    children = [request([10], slot, sample_index=i) for i, slot in ((1, 0), (2, 2))]
    forks = [Fork(prompt, child) for child in children]
    made = plan(decodes=[decode], chunks=[chunk(prompt, 0, 1)], forks=forks, admitted=[prompt, *children])
    batch, rows = builder().build(made, Bucket(2, 4))
    assert rows == [0, 1, 2, 3]
    assert batch.num_seqs.tolist() == [2]
    assert batch.logit_rows.tolist() == [0, 1, 1, 1]
    assert batch.sample_slots.tolist() == [3, 1, 0, 2]
    assert batch.sample_index.tolist() == [0, 0, 1, 2]
    assert batch.sample_positions.tolist() == [3, 1, 1, 1]
    assert batch.admitted_slots.tolist() == [1, 0, 2, 4]


def test_idle_rows_read_their_pages_and_write_to_the_null_block():
    decode = request([7, 7, 7, 7, 7], 1, [2, 6], num_computed_tokens=4)
    idle = request([10, 11, 12, 13, 14, 15, 16], 2, [5, 4], num_computed_tokens=6)
    prompt = request([1, 2], 0, [3])
    batch, rows = builder().build(plan(decodes=[decode], idle=[idle], chunks=[chunk(prompt, 0, 2)]), Bucket(4, 4))
    assert rows == [0, 1]
    assert batch.token_ids.tolist() == [FROM_SLOT, 15, 1, FROM_SLOT]
    assert batch.token_slots.tolist() == [1, 2, 0, 0]
    assert batch.positions.tolist() == [4, 5, 0, 1]
    assert batch.write_blocks[0].tolist() == [6, 0, 3, 3]
    assert batch.block_tables[0].tolist() == [[2, 6, 0], [5, 4, 0], [3, 0, 0], [0, 0, 0]]
    assert batch.kv_lens.tolist() == [5, 6, 2, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 4, 4]
    assert batch.sample_slots.tolist() == [1, 0, 4, 4]
    assert batch.logit_rows.tolist() == [0, 3, 0, 0]


def test_a_chunk_of_one_token_that_is_not_the_last_samples_nothing():
    prompt = request([10, 11, 12], 1, [5])
    batch, rows = builder().build(plan(chunks=[chunk(prompt, 0, 1)], admitted=[prompt]), Bucket(1, 1))
    assert batch.token_ids.tolist() == [10]
    assert batch.sample_slots.tolist() == [4]
    assert rows == [-1]


def test_tokens_that_the_host_chose_are_fed_by_the_host():
    decode = request([20, 21, 22], 0, [3], num_computed_tokens=2, sampled_on_device=False)
    prompt = request([10, 11], 1, [5], sampled_on_device=False)
    batch, _ = builder().build(plan(decodes=[decode], chunks=[chunk(prompt, 0, 2)]), Bucket(4, 4))
    assert batch.token_ids.tolist() == [22, 10, 11, 0]


def test_ending_tokens_are_banned_until_there_are_enough_others():
    params = SamplingParams(temperature=0, min_tokens=2)
    fields = {"num_prompt_tokens": 2, "sampling_params": params, "end_token_ids": frozenset({9, 0})}
    decodes = [request([1] * n, n - 2, [n], num_computed_tokens=n - 1, **fields) for n in (3, 4)]
    prompt = request([1, 1], 0, [5], **fields)
    child = request([1, 1], 3, [], **fields)
    made = plan(decodes=decodes, chunks=[chunk(prompt, 0, 2)], forks=[Fork(prompt, child)])
    batch, _ = builder().build(made, Bucket(4, 4))
    ending, none = [0, 9] + [NO_TOKEN] * (MAX_BANNED_TOKENS - 2), [NO_TOKEN] * MAX_BANNED_TOKENS
    assert batch.banned_token_ids.tolist() == [ending, none, ending, ending]


@pytest.mark.parametrize("wanted", [None, 0, 3])
def test_logprobs_are_computed_when_somebody_wants_them(wanted):
    params = SamplingParams(temperature=0, logprobs=wanted)
    requests = [request([1, 1], 0, [1], num_computed_tokens=1), request([1, 1], 1, [2], sampling_params=params)]
    assert builder().empty(Bucket(4, 4)).wants_logprobs.tolist() is False
    batch, _ = builder().build(plan(decodes=requests[:1], chunks=[chunk(requests[1], 0, 2)]), Bucket(4, 4))
    assert batch.wants_logprobs.tolist() is (wanted is not None)
    batch, _ = builder().build(plan(chunks=[chunk(requests[1], 0, 1)]), Bucket(4, 4))
    assert batch.wants_logprobs.tolist() is False, "nothing is sampled"


def test_rows_hold_sequences_samples_and_new_owners():
    parent, part, *children = (request([1, 2], slot, [1]) for slot in range(4))
    decodes, idle = [request([1], 4, [1])], [request([1, 2], slot, [1]) for slot in (5, 6)]
    chunks, forks = [chunk(parent, 0, 2), chunk(part, 0, 1)], [Fork(parent, child) for child in children]
    assert num_rows(plan(decodes=decodes, chunks=chunks, idle=idle)) == 5
    assert num_rows(plan(decodes=decodes, chunks=chunks, forks=forks)) == 4
    assert num_rows(plan(chunks=chunks, forks=forks)) == 3
    assert num_rows(plan(chunks=chunks, forks=forks, admitted=[parent, part, *children])) == 4


def test_admitted_rows_carry_the_parameters():
    params = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125)
    prompt = request([10, 11], 3, [1], seed=(5 << 32) | 9, sampling_params=params)
    batch, _ = builder().build(plan(chunks=[chunk(prompt, 0, 2)], admitted=[prompt]), Bucket(4, 4))
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


def test_a_reservation_longer_than_any_request_is_cut():
    prompt = request([10, 11], 3, [1, 2, 3, 4])
    batch, _ = builder().build(plan(chunks=[chunk(prompt, 0, 2)], admitted=[prompt]), Bucket(4, 4))
    assert batch.block_tables[0][0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(("first", "second"), [([1, 2, 3], [4]), ([1], [4, 5, 6]), ([1, 2, 3], [6, 5, 4])])
def test_a_slot_with_a_new_owner_forgets_the_old_table(first, second):
    build = builder()
    old = request(range(4 * len(first)), 1, first)
    build.build(plan(chunks=[chunk(old, 0, len(old.token_ids))], admitted=[old]), Bucket(16, 4))
    new = request(range(4 * len(second)), 1, second)
    batch, _ = build.build(plan(chunks=[chunk(new, 0, len(new.token_ids))], admitted=[new]), Bucket(16, 4))
    assert batch.block_tables[0][0].tolist() == second + [0] * (3 - len(second))
    assert batch.write_blocks[0][: len(new.token_ids)].tolist() == [b for b in second for _ in range(4)]


EVENTS = st.sampled_from(["new owner", "swap", "copy", "drop", "reserve", "nothing"])


@given(st.lists(st.tuples(st.integers(0, 2), EVENTS, st.integers(1, 4)), max_size=30))
def test_tables_follow_their_owners_through_any_history(history):
    """Batches show exactly the blocks of today's owners, in both groups, whatever became of the tables.

    Slots change owners, tables grow and are reserved ahead, blocks that are written are copied, those that fall out
    of the second group's window are dropped, and a request comes back from a swap with other blocks.
    """
    build, owners, next_block = builder(num_slots=3, max_request_len=24, num_groups=2), {}, iter(range(1, 10_000))
    for slot, event, growth in history:
        admitted = []
        if event == "new owner" or slot not in owners:
            owners[slot] = request([], slot, [], [])
            admitted = [owners[slot]]
        mine = owners[slot]
        growth = min(growth, 24 - len(mine.token_ids))
        if growth == 0:
            continue
        start = mine.num_computed_tokens = len(mine.token_ids)
        mine.token_ids += range(growth)
        for table in mine.block_tables:
            ids = table.block_ids
            if event == "swap":
                ids[:] = [next(next_block) if block else 0 for block in ids]
                admitted = [mine]
            if event == "copy" and len(ids) > start // 4:
                ids[start // 4] = next(next_block)
            while 4 * len(ids) < len(mine.token_ids) + (4 if event == "reserve" else 0):
                ids.append(next(next_block))
        if event == "drop":
            window = mine.block_tables[1]
            window.num_dropped = max(window.num_dropped, start // 4)
            window.block_ids[: window.num_dropped] = [0] * window.num_dropped
        others = [r for s, r in owners.items() if s != slot and r.token_ids]
        for other in others:
            other.num_computed_tokens = len(other.token_ids) - 1
        decodes, idle = others[:1], others[1:]
        for other in idle:
            other.num_computed_tokens += 1
        made = plan(decodes=decodes, idle=idle, chunks=[chunk(mine, start, growth)], admitted=admitted)
        batch, _ = build.build(made, Bucket(16, 3))
        for row, (r, first, count, writes) in enumerate(
            [(r, len(r.token_ids) - 1, 1, r in decodes) for r in others] + [(mine, start, growth, True)]
        ):
            positions = range(first, first + count)
            tokens = slice(batch.cu_q_lens[row], batch.cu_q_lens[row + 1])
            assert batch.positions[tokens].tolist() == list(positions)
            assert batch.write_offsets[tokens].tolist() == [p % 4 for p in positions]
            for group, table in enumerate(r.block_tables):
                ids = table.block_ids[:6]
                assert batch.block_tables[group][row].tolist() == ids + [0] * (6 - len(ids))
                written = [ids[p // 4] if writes else 0 for p in positions]
                assert batch.write_blocks[group][tokens].tolist() == written

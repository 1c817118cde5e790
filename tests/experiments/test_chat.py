"""Conversations: what each turn begins with, when it comes, and what a prefix cache finds in it."""

import itertools
from collections.abc import Sequence

import pytest
from host_executor import VOCAB_SIZE, host_engine
from prefix_reuse import reuse_one_by_one

from paged_jax.config import EngineConfig, parse
from paged_jax.engine.engine import Arrival, drive
from paged_jax.execution.simulated_executor import answer_token
from paged_jax.experiments.chat import ChatWorkload
from paged_jax.experiments.lengths import Lengths
from paged_jax.experiments.workloads import longest_request, make_workload
from paged_jax.simulation.engines import simulated_engine

CHAT = ChatWorkload(
    kind="chat",
    num_conversations=8,
    turns=Lengths(law="uniform", min=1, max=6),
    system_prompt_len=10,
    message=Lengths(law="uniform", min=1, max=9),
    output=Lengths(law="uniform", min=1, max=9),
    think_time_s=2.0,
)


def conversations(arrivals: Sequence[Arrival]) -> list[list[Arrival]]:
    """The turns of each conversation, found by whom they wait for; not for closed loops."""
    turns: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        turns[arrival.request_id] = [*turns.pop(arrival.after, []), arrival] if arrival.after else [arrival]
    return list(turns.values())


def test_a_turn_begins_with_all_that_was_said():
    arrivals = make_workload(CHAT, 0, None, 1000)
    assert [a for turns in conversations(arrivals) for a in turns] == list(arrivals)
    assert len(conversations(arrivals)) == 8
    assert len({len(turns) for turns in conversations(arrivals)}) > 2
    assert len({a.prompt_token_ids[:10] for a in arrivals}) == 1
    messages = []
    for turns in conversations(arrivals):
        said = turns[0].prompt_token_ids[:10]
        for turn in turns:
            assert turn.prompt_token_ids[: len(said)] == said
            messages.append(turn.prompt_token_ids[len(said) :])
            answer = (answer_token(turn.params.seed, 0, 1000),) * turn.params.max_tokens
            said = turn.prompt_token_ids + answer
    assert {1, 9} <= {len(message) for message in messages} <= set(range(1, 10))
    assert len(set(messages)) > 0.9 * len(messages)
    assert len({a.params.seed for a in arrivals}) == len(arrivals)


def test_only_first_turns_arrive_by_themselves():
    arrivals = make_workload(CHAT.model_copy(update={"request_rate": 0.5}), 0, None, 1000)
    for turns in conversations(arrivals):
        assert turns[0].after is None
        assert [t.time for t in turns[1:]] == [2.0] * (len(turns) - 1)
    first = [turns[0].time for turns in conversations(arrivals)]
    assert first[0] == 0
    assert first == sorted(set(first))


def test_in_a_closed_loop_a_conversation_follows_the_last_turn_of_the_clients_last_one():
    plain = conversations(make_workload(CHAT, 0, None, 1000))
    arrivals = make_workload(CHAT.model_copy(update={"num_clients": 3}), 0, None, 1000)
    by_prompt = {a.prompt_token_ids: a for a in arrivals}
    for i, turns in enumerate(plain):
        first = by_prompt[turns[0].prompt_token_ids]
        before = plain[i - 3][-1].request_id if i >= 3 else None
        assert (first.after, first.time) == (before, 2.0 if before else 0.0)


def test_a_limit_cuts_conversations_and_changes_nothing_else():
    whole = conversations(make_workload(CHAT, 0, None, 1000))
    limited = CHAT.model_copy(update={"max_conversation_len": 40})
    cut = conversations(make_workload(limited, 0, None, 1000))
    assert (longest_request(CHAT), longest_request(limited)) == (10 + 6 * 18, 40)
    assert sum(map(len, cut)) < sum(map(len, whole))
    for before, after in zip(whole, cut, strict=True):
        fits = [t for t in before if len(t.prompt_token_ids) + t.params.max_tokens <= 40]
        assert [t.prompt_token_ids for t in after] == [t.prompt_token_ids for t in fits]
        assert [t.params for t in after] == [t.params for t in fits]


@pytest.mark.parametrize(("limit", "turns"), [(20, 1), (39, 2), (40, 3), (41, 3), (70, 6), (None, 6)])
def test_a_conversation_may_be_just_as_long_as_its_limit(limit, turns):
    ten = {name: Lengths(value=5, law="constant") for name in ("message", "output")}
    spec = CHAT.model_copy(update={**ten, "turns": Lengths(value=6, law="constant"), "max_conversation_len": limit})
    assert {len(c) for c in conversations(make_workload(spec, 0, None, 100))} == {turns}


def test_users_and_priorities_are_those_of_conversations():
    arrivals = make_workload(CHAT.model_copy(update={"users": 4, "priorities": 5}), 0, None, 1000)
    for turns in conversations(arrivals):
        assert len({(t.user, t.priority) for t in turns}) == 1
    assert len({a.user for a in arrivals}) > 1
    assert len({a.priority for a in arrivals}) > 1


def test_turns_arrive_after_answers_and_thought():
    arrivals = make_workload(CHAT.model_copy(update={"request_rate": 0.5}), 0, None, VOCAB_SIZE)
    engine = host_engine(num_blocks=400, seconds_per_step=0.25)
    ended = [r for advanced, _ in drive(engine, arrivals, engine.clock) for r in advanced if r.is_finished]
    metrics = {r.request_id: r.metrics for r in ended}
    for arrival in arrivals:
        if arrival.after is not None:
            assert metrics[arrival.request_id].arrival_time == metrics[arrival.after].finished_time + 2.0
        else:
            assert metrics[arrival.request_id].arrival_time == arrival.time


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_where_answers_are_known_the_whole_conversation_is_found(block_size, prefix_cache):
    arrivals = make_workload(CHAT.model_copy(update={"num_clients": 1}), 0, None, VOCAB_SIZE)
    answers = {a.prompt_token_ids: answer_token(a.params.seed, 0, VOCAB_SIZE) for a in arrivals}

    def answer(token_ids: Sequence[int]) -> int:
        """As the simulated device: the token of the request whose prompt these begin with."""
        return next(answers[p] for n in range(len(token_ids), 0, -1) if (p := tuple(token_ids[:n])) in answers)

    engine = host_engine(
        num_blocks=3000, seconds_per_step=0.1, block_size=block_size, prefix_cache=prefix_cache, token=answer
    )
    reuse = reuse_one_by_one(engine, arrivals)
    assert reuse.measured == reuse.expected
    lengths = {a.request_id: len(a.prompt_token_ids) + a.params.max_tokens for a in arrivals}
    for turns in conversations(make_workload(CHAT, 0, None, VOCAB_SIZE)):
        for before, turn in itertools.pairwise(turns):
            # all of it but the answer's last token, in whole blocks
            stored = (lengths[before.request_id] - 1) // block_size * block_size
            assert reuse.measured[turn.request_id] == stored


def test_where_answers_differ_less_is_found():
    arrivals = make_workload(CHAT.model_copy(update={"num_clients": 1}), 0, None, VOCAB_SIZE)
    engine = host_engine(num_blocks=3000, seconds_per_step=0.1, block_size=1)
    reuse = reuse_one_by_one(engine, arrivals)
    assert reuse.measured == reuse.expected
    for turns in conversations(make_workload(CHAT, 0, None, VOCAB_SIZE)):
        for before, turn in itertools.pairwise(turns):
            shared = reuse.measured[turn.request_id] - len(before.prompt_token_ids)
            assert 0 <= shared < before.params.max_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_the_simulated_device_answers_what_the_prompts_say(n):
    config = EngineConfig(block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    engine = simulated_engine("smollm2-135m", "a100-40gb", config)
    spec = CHAT.model_copy(update={"num_clients": 1, "n": n})
    arrivals = make_workload(spec, 0, None, engine.vocab_size)
    ended = {}
    for advanced, _ in drive(engine, arrivals, engine.clock):
        ended |= {r.request_id: r for r in advanced if r.is_finished and r.sample_index == 0}
    follows = {a.after: a for a in arrivals if a.after}
    for arrival in arrivals:
        following = follows.get(arrival.request_id)
        if following is not None and len(following.prompt_token_ids) > len(arrival.prompt_token_ids):
            told = [*arrival.prompt_token_ids, *ended[arrival.request_id].output_token_ids]
            assert list(following.prompt_token_ids[: len(told)]) == told
            found = ended[following.request_id].metrics.num_cached_tokens
            assert found == (len(told) - 1) // 4 * 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_conversation_len": 27}, r"a first turn can have 28 tokens, more than max_conversation_len \(27\)"),
        ({"beam_width": 2}, "beam_width does not go with kind 'chat', whose turns go on from known answers: leave it"),
        ({"burstiness": 2.0}, "burstiness has no effect without request_rate"),
        ({"system_prompt_len": -1}, "system_prompt_len: input should be greater than or equal to 0"),
    ],
)
def test_what_cannot_be_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        parse(ChatWorkload, {**CHAT.model_dump(), **changes})


def test_a_limit_of_just_one_turn_is_taken():
    assert parse(ChatWorkload, {**CHAT.model_dump(), "max_conversation_len": 28}).longest == 28

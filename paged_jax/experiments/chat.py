"""Conversations of several turns, each of which begins with all that was said before."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paged_jax.engine.engine import Arrival
from paged_jax.execution.simulated_executor import answer_token
from paged_jax.experiments.arrival_times import Start, starts
from paged_jax.experiments.lengths import Count, Lengths
from paged_jax.experiments.token_ids import random_ids, shared_ids
from paged_jax.experiments.workload_spec import Streams, WorkloadSpec, as_arrivals, sampling_seeds


class ChatWorkload(WorkloadSpec):
    """Multi-turn chats. A turn's prompt is the conversation so far and a new message; it arrives `think_time_s` after
    the last turn has ended.

    The answers inside of prompts are those of the simulated device (of several samples, the first), so that there the
    whole conversation can be reused. A real model answers otherwise: then prompts are as long, but share only what
    comes before the first answer, and what an earlier turn's prompt had already.

    `request_rate`, `burstiness` and `num_clients` say when conversations begin: in a closed loop, each client has one
    at a time. Users and priorities are those of conversations.
    """

    kind: Literal["chat"]
    num_conversations: Count
    turns: Lengths
    """Turns of each conversation, each a request."""
    system_prompt_len: Annotated[int, Field(ge=0)] = 0
    """Tokens with which all conversations begin."""
    message: Lengths
    """Tokens of each of the user's messages."""
    output: Lengths
    """Tokens of each answer."""
    max_conversation_len: Count | None = None
    """A conversation ends before the turn with which prompt and answer would be longer; unset, it has all its turns."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        limit, first = self.max_conversation_len, self.longest_turn + self.system_prompt_len
        if limit is not None and first > limit:
            raise ValueError(
                f"a first turn can have {first} tokens, more than max_conversation_len ({limit}): lower "
                "system_prompt_len or the max of message or output, or raise max_conversation_len"
            )
        if self.beam_width is not None:
            raise ValueError(
                "beam_width does not go with kind 'chat', whose turns go on from known answers: leave it out"
            )
        return self

    @property
    def longest_turn(self) -> int:
        """Most tokens that a turn adds."""
        return self.message.longest + self.output.longest

    @property
    def longest(self) -> int:
        """Most tokens that the last turn's request can have."""
        longest = self.system_prompt_len + self.turns.longest * self.longest_turn
        return longest if self.max_conversation_len is None else min(longest, self.max_conversation_len)

    @property
    def _thinks(self) -> bool:
        return True


def chat_arrivals(spec: ChatWorkload, seed: int, streams: Streams, vocab_size: int) -> tuple[Arrival, ...]:
    """The turns of each conversation, one conversation after the other.

    All that is drawn is drawn for all turns: `max_conversation_len` cuts conversations, and changes nothing else.
    """
    num_turns = spec.turns.draw(spec.num_conversations, streams.structure)
    messages, answers = (lengths.draw(sum(num_turns), streams.lengths) for lengths in (spec.message, spec.output))
    all_seeds = sampling_seeds(sum(num_turns), streams)
    system_prompt = random_ids(spec.system_prompt_len, vocab_size, streams.contents)
    ids = shared_ids(vocab_size)
    limit = spec.longest
    prompts: list[tuple[int, ...]] = []
    outputs: list[int] = []
    seeds: list[int] = []
    begin: list[Start] = []
    owners: list[int] = []
    last_turns: list[int] = []
    turn = 0
    for conversation, start in enumerate(starts(spec, spec.num_conversations, streams.gaps)):
        said, goes_on = system_prompt, True
        when = start if start.after is None else Start(start.time, last_turns[start.after])
        for _ in range(num_turns[conversation]):
            prompt = said + random_ids(messages[turn], vocab_size, streams.contents)
            goes_on = goes_on and len(prompt) + answers[turn] <= limit
            if goes_on:
                said = prompt + (ids[answer_token(all_seeds[turn], 0, vocab_size)],) * answers[turn]
                prompts.append(prompt)
                outputs.append(answers[turn])
                seeds.append(all_seeds[turn])
                begin.append(when)
                owners.append(conversation)
                when = Start(spec.think_time_s or 0.0, len(prompts) - 1)
            turn += 1
        last_turns.append(len(prompts) - 1)
    return as_arrivals(spec, seed, streams, prompts, outputs, begin, seeds=seeds, owners=owners)

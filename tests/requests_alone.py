"""What requests answer when nobody disturbs them: the oracle of all tests on the `HostExecutor`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from host_executor import beam_logprobs, tokens_alone

from paged_jax.engine.engine import Engine
from paged_jax.engine.request import Request
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

type Params = SamplingParams | BeamSearchParams


def beams_alone(
    prompt: Sequence[int], params: BeamSearchParams, max_total_tokens: int, eos_token_ids: Iterable[int] = ()
) -> list[tuple[tuple[int, ...], str, float]]:
    """(tokens, finish reason, score) of the best beams, looking at every token of the vocabulary at every step."""
    stops = set() if params.ignore_eos else set(eos_token_ids)
    living: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: list[tuple[tuple[int, ...], str, float]] = []
    max_tokens = min(params.max_tokens, max_total_tokens - len(prompt))

    def end(tokens: tuple[int, ...], reason: str, total: float) -> None:
        ended.append((tokens, reason, total / max(1, len(tokens)) ** params.length_penalty))

    for _ in range(max_tokens):
        longer = []
        for tokens, total in living:
            for token, logprob in beam_logprobs((*prompt, *tokens)):
                if token not in stops:
                    longer.append(((*tokens, token), total + logprob))
                elif _is_candidate(token, tokens, prompt, params, stops):
                    end(tokens, "stop", total + logprob)
        living = sorted(longer, key=lambda beam: -beam[1])[: params.beam_width]
    for tokens, total in living:
        end(tokens, "length", total)
    return sorted(ended, key=lambda hypothesis: -hypothesis[2])[: params.beam_width]


def _is_candidate(
    token: int, tokens: Sequence[int], prompt: Sequence[int], params: BeamSearchParams, stops: set[int]
) -> bool:
    """Whether a token that ends a beam is likely enough to be looked at: see `BeamSearch`."""
    count = max(2 * params.beam_width, params.beam_width + len(stops))
    return token in [t for t, _ in beam_logprobs((*prompt, *tokens))[:count]]


@dataclass
class Expectation:
    """A request of an engine, all its samples, and what they must answer."""

    leader: Request
    params: Params
    outputs: list[tuple[list[int], str]]
    """Tokens and finish reason of each sample; empty for a beam search."""
    beams: list[tuple[tuple[int, ...], str, float]]
    delivered: dict[Request, int] = field(default_factory=dict)
    """Output tokens of each sample when it ended."""

    @property
    def max_steps(self) -> int:
        """Most steps that it takes alone, one token of its prompt at a time."""
        return sum(request.max_total_tokens for request in self.leader.samples)

    @property
    def is_finished(self) -> bool:
        """Whether all its samples have ended."""
        return all(request.is_finished for request in self.leader.samples)

    def check_ended(self, request: Request) -> None:
        """One of the samples has ended: once, and by itself only with what it answers alone."""
        assert request in self.leader.samples
        assert request not in self.delivered, "a request has ended twice"
        self.delivered[request] = request.num_output_tokens
        assert request.is_finished
        assert request.slot is None
        assert not request.block_tables
        assert not request.host_blocks
        if request.beam_search is None:
            assert len(request.metrics.token_times) == request.num_output_tokens
            self._check_logprobs(request)
        if request.finish_reason == "abort":
            self._check_beginning(request)
        elif self.outputs:
            assert (request.output_token_ids, request.finish_reason) == self.outputs[request.sample_index]
        elif len(self.delivered) == len(self.leader.samples):
            penalty = self.params.length_penalty
            best = self.leader.beam_search.best()
            assert [(h.token_ids, h.finish_reason) for h in best] == [beam[:2] for beam in self.beams]
            for hypothesis, (*_, score) in zip(best, self.beams, strict=True):
                assert abs(hypothesis.score(penalty) - score) < 1e-9 * max(1, abs(score))

    def _check_logprobs(self, request: Request) -> None:
        """Each output token has its own, and those of the most likely ones there."""
        wanted = request.sampling_params.logprobs
        if wanted is None:
            assert request.logprobs is None
            return
        assert len(request.logprobs) == request.num_output_tokens
        for position, entry in enumerate(request.logprobs, start=request.num_prompt_tokens):
            ranked = beam_logprobs(tuple(request.token_ids[:position]))
            token = request.token_ids[position]
            assert (token, entry.logprob) == ranked[entry.rank - 1]
            assert entry.top == ranked[:wanted]

    def check_unchanged(self) -> None:
        """Nothing has been added to those samples that have ended."""
        for request, count in self.delivered.items():
            assert request.num_output_tokens == count, "a token was delivered after the end"

    def _check_beginning(self, request: Request) -> None:
        """What an aborted request has got so far must be right, too."""
        if self.outputs:
            tokens = request.output_token_ids
            assert tokens == self.outputs[request.sample_index][0][: len(tokens)]


def add_request(
    engine: Engine, request_id: str, prompt: Sequence[int], params: Params, **fields: object
) -> Expectation:
    """Queue a request, with its true output length, and work out what it must answer."""
    prompt = tuple(prompt)
    max_total = engine.max_request_len
    if params.max_tokens is not None:
        max_total = min(max_total, len(prompt) + params.max_tokens)
    eos = engine.eos_token_ids
    if isinstance(params, BeamSearchParams):
        outputs, beams = [], beams_alone(prompt, params, max_total, eos)
        longest = max_total - len(prompt)
    else:
        assert params.n == 1 or params.seed is not None, "the answers of samples depend on the seed"
        outputs = [
            tokens_alone(prompt, params, max_total, eos, seed=params.seed or 0, sample_index=index)
            for index in range(params.n)
        ]
        beams = []
        longest = max(len(tokens) for tokens, _ in outputs)
    leader = engine.add_request(request_id, prompt, params, expected_output_len=longest, **fields)
    return Expectation(leader, params, outputs, beams)

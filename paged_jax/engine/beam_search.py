"""Beam search over paged memory: which continuations of a prompt's beams are kept at each step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paged_jax.execution.plan import TokenLogprobs
from paged_jax.sampling.params import BeamSearchParams

if TYPE_CHECKING:
    from paged_jax.engine.request import Request


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation."""

    token_ids: tuple[int, ...]
    """Generated tokens, without the one that ended it."""
    cumulative_logprob: float
    """Sum over all generated tokens, the one that ended it included."""
    finish_reason: str
    """"stop" or "length"."""

    def score(self, length_penalty: float) -> float:
        """Cumulative log-probability / generated tokens ** length_penalty; the prompt does not count."""
        return self.cumulative_logprob / max(1, len(self.token_ids)) ** length_penalty


class BeamSearch:
    """Keeps the `beam_width` most likely unfinished continuations of a prompt (Graves, 2012).

    Each step every beam offers its most likely next tokens. Those that end it become hypotheses; of all others the
    best `beam_width` are kept. After `max_tokens` steps what is left becomes hypotheses, too, and the best by score are
    the result. Nothing is missed: among `num_logprobs` candidates of a beam at least `beam_width` do not end it.
    """

    def __init__(self, params: BeamSearchParams, end_token_ids: frozenset[int], max_tokens: int) -> None:
        self.params = params
        self.num_logprobs = num_candidates(params, len(end_token_ids))
        self.beams: list[Request] = []
        """Those that live: one until the prompt is computed, then beam_width."""
        self.is_finished = False
        self._end_token_ids = end_token_ids
        self._max_tokens = max_tokens
        self._length = 0
        self._cumulative: dict[Request, float] = {}
        self._offers: dict[Request, TokenLogprobs] = {}
        self._hypotheses: list[Hypothesis] = []
        self._totals: list[float] = []

    @property
    def is_ready(self) -> bool:
        """Whether every beam has made its offer."""
        return all(beam in self._offers for beam in self.beams)

    def has_offer(self, beam: "Request") -> bool:
        """Whether a beam has made its offer, and has nothing to do until the others have."""
        return beam in self._offers

    def offer(self, beam: "Request", logprobs: TokenLogprobs | None) -> None:
        """A beam's most likely next tokens."""
        if logprobs is None:
            raise RuntimeError("the executor reported no log-probabilities for a beam")
        self._offers[beam] = logprobs

    def choose(self) -> list[tuple["Request", int]]:
        """What is kept: (beam that goes on, its next token), the best first."""
        continuations = []
        for beam in self.beams:
            so_far = self._cumulative.get(beam, 0.0)
            for token, logprob in self._offers[beam].top[: self.num_logprobs]:
                if token in self._end_token_ids:
                    tokens = tuple(beam.output_token_ids)
                    self._hypotheses.append(Hypothesis(tokens, so_far + logprob, "stop"))
                else:
                    continuations.append((so_far + logprob, beam, token))
        continuations.sort(key=lambda continuation: -continuation[0])
        kept = continuations[: self.params.beam_width]
        self._offers = {}
        self._length += 1
        if self._length == self._max_tokens:
            self.is_finished = True
            self._hypotheses += [
                Hypothesis((*beam.output_token_ids, token), total, "length") for total, beam, token in kept
            ]
        self._totals = [total for total, *_ in kept]
        return [(beam, token) for _, beam, token in kept]

    def continue_with(self, beams: list["Request"]) -> None:
        """The requests that stand for what was chosen, in the same order."""
        self.beams = beams
        self._cumulative = dict(zip(beams, self._totals, strict=True))

    def best(self) -> list[Hypothesis]:
        """The best `beam_width` finished continuations, best first."""
        penalty = self.params.length_penalty
        return sorted(self._hypotheses, key=lambda h: -h.score(penalty))[: self.params.beam_width]


def num_candidates(params: BeamSearchParams, num_end_tokens: int) -> int:
    """How many of a beam's most likely next tokens are looked at: at least beam_width of them do not end it."""
    return max(2 * params.beam_width, params.beam_width + num_end_tokens)

"""Answers plans with the time that a device would need for them, and with made-up tokens: no arrays, no device."""

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Protocol

from paged_jax.execution.buckets import Bucket, num_rows, pick_bucket
from paged_jax.execution.plan import PlannedRequest, SchedulerOutput, StepResult, TokenLogprobs
from paged_jax.kv_cache.group import CacheGroup


class Cost(Protocol):
    """How long a device takes for a plan."""

    def step(self, plan: SchedulerOutput, padded_tokens: int, padded_rows: int) -> tuple[float, ...]:
        """Seconds by part of the step whose batch is padded to so many tokens and rows; one part follows another."""
        ...


def answer_token(seed: int, sample_index: int, vocab_size: int) -> int:
    """What the simulated device answers to a request: this token, over and over."""
    return (seed + sample_index) % vocab_size


@dataclass(frozen=True)
class SimulatedStep:
    """A step whose answer and time are known."""

    answer: StepResult

    def result(self) -> StepResult:
        """Return it."""
        return self.answer


class SimulatedExecutor:
    """Stands for a device in virtual time.

    Every sample of a prompt is answered with one token of its own, see `answer_token`, so that samples part at their
    first token, and a workload can know a conversation's answers beforehand. Where log-probabilities are wanted, as by
    beams, the most likely token of each history has probability sqrt(u), u being uniform (2/3 on average), and each
    one after it half the probability of what is left: a stand-in for text, without which beams would not diverge.
    """

    def __init__(
        self,
        cost: Cost,
        *,
        num_blocks: int,
        cache_groups: tuple[CacheGroup, ...],
        vocab_size: int,
        max_num_seqs: int,
        buckets: tuple[Bucket, ...] | None,
        kv_bytes_per_token: float,
        num_swap_blocks: int = 0,
    ) -> None:
        """Blocks per cache group, `num_swap_blocks` of them in host memory. Without `buckets` nothing is padded."""
        self.num_blocks = num_blocks
        self.num_swap_blocks = num_swap_blocks
        self.cache_groups = cache_groups
        self.cost = cost
        self.kv_bytes_per_token = kv_bytes_per_token
        """Keys and values of a token in all layers, on all devices."""
        self._vocab_size = vocab_size
        self._buckets = buckets
        self._used: set[Bucket] = set()
        self._seconds: tuple[float, ...] | None = None
        self._answers: list[tuple[int, ...]] = [()] * max_num_seqs  # by slot
        self._reporting: set[int] = set()  # slots of requests that want log-probabilities

    @property
    def num_compilations(self) -> int:
        """Buckets that were needed so far: a compiled program each."""
        return len(self._used)

    @property
    def modelled_seconds(self) -> tuple[float, ...]:
        """Of all steps so far, by the cost's parts."""
        return self._seconds or ()

    def submit(self, plan: SchedulerOutput) -> SimulatedStep:
        """Answer the plan."""
        for request in plan.admitted:
            self._admit(request)
        answers = self._answers
        tokens: list[tuple[int, ...]] = [answers[r.slot] for r in plan.decodes]  # type: ignore[index]
        for request, _, _, samples in plan.chunks:
            tokens.append(answers[request.slot] if samples else ())  # type: ignore[index]
        for _, child in plan.forks:
            tokens.append(answers[child.slot])  # type: ignore[index]
        computed = padded = plan.num_tokens
        rows = num_rows(plan)
        if self._buckets is not None:
            bucket = pick_bucket(self._buckets, computed, rows)
            self._used.add(bucket)
            padded, rows = bucket.num_tokens, bucket.num_seqs
        cost = self.cost.step(plan, padded, rows)
        self._seconds = cost if self._seconds is None else tuple(map(add, self._seconds, cost))
        return SimulatedStep(StepResult(tokens, padded - computed, sum(cost), self._logprobs(plan, tokens)))

    def update_weights(self, model: Any) -> None:
        """Do nothing: there are no weights."""

    def _admit(self, request: PlannedRequest) -> None:
        slot = request.slot
        assert slot is not None
        self._answers[slot] = (answer_token(request.seed, request.sample_index, self._vocab_size),)
        if request.num_logprobs is None:
            self._reporting.discard(slot)
        else:
            self._reporting.add(slot)

    def _logprobs(
        self, plan: SchedulerOutput, tokens: Sequence[tuple[int, ...]]
    ) -> Sequence[TokenLogprobs | None] | None:
        """Of each new token, where anybody wants to know."""
        if not self._reporting:
            return None
        rows = [*plan.decodes, *(part.request for part in plan.chunks), *(fork.child for fork in plan.forks)]
        return [
            self._candidates(request) if new and request.slot in self._reporting else None
            for request, new in zip(rows, tokens, strict=True)
        ]

    def _candidates(self, request: PlannedRequest) -> TokenLogprobs:
        """The tokens that may follow, most likely first; without beams the request's own token is taken."""
        assert request.slot is not None
        own, wanted = self._answers[request.slot][0], request.num_logprobs or 0
        history = zlib.crc32(array("q", request.token_ids).tobytes(), request.seed % 2**32)
        mixed = history * 0x9E3779B1 % 2**32  # Knuth's multiplicative hash: checksums of like histories are alike
        likely = math.sqrt((mixed + 0.5) / 2**32)  # never 0 or 1
        logprobs = [math.log(likely), *(math.log1p(-likely) - k * math.log(2) for k in range(1, max(wanted, 2)))]
        ranked = sorted(range(len(logprobs)), key=lambda k: -logprobs[k])
        top = tuple(((own + k) % self._vocab_size, logprobs[k]) for k in ranked[:wanted])
        return TokenLogprobs(logprobs[0], 1 + ranked.index(0), top)

"""Runs that were recorded: random ones in which everything happens, and small ones to work out by hand."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

from host_executor import host_engine
from policy_grid import Row, cache_groups, engine_fields

from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Arrival, Engine, drive
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.experiments.trace import Trace
from paged_jax.sampling.params import BeamSearchParams, SamplingParams

MAX_MODEL_LEN = 40
STEM = tuple(range(10, 30))


class TickingClock(VirtualClock):
    """Time also passes whenever somebody looks, as it does on the wall."""

    def now(self) -> float:
        self.advance(0.01)
        return super().now()


def recorded(path: Path, row: Row, seed: int = 0, num_requests: int = 12, pool_tokens: int = 60) -> Trace:
    """A run with shared prefixes, samples, beams, aborts, interrupts, resets, priorities and users."""
    budget = 12 if row.get("enable_chunked_prefill", True) else MAX_MODEL_LEN
    num_blocks = max(1, pool_tokens // row.get("block_size", 4))
    while True:
        try:
            engine = host_engine(
                num_blocks=num_blocks,
                max_model_len=MAX_MODEL_LEN,
                eos_token_ids=(5, 6),
                seconds_per_step=0.7,
                clock=TickingClock(),
                groups=cache_groups(row),
                max_num_batched_tokens=budget,
                trace_file=str(path),
                **engine_fields(row),
            )
            break
        except ValueError as error:
            if "num_blocks" not in str(error) and "more memory" not in str(error):
                raise
            num_blocks += 1
    rng = random.Random(seed)
    left = num_requests
    while left or engine.has_unfinished_requests():
        if left and rng.random() < 0.6:
            left -= 1
            add(engine, str(num_requests - left), rng)
        engine.executor.on_submit = disturbance(engine, rng)
        with contextlib.suppress(InterruptedError):
            engine.step()
        if rng.random() < 0.05:
            engine.abort(str(rng.randint(1, num_requests)))
        if rng.random() < 0.05:
            engine.reset_prefix_cache()
    return Trace(str(path))


def add(engine: Engine, name: str, rng: random.Random) -> None:
    """One more request, of any kind."""
    prompt = [*STEM[: rng.randint(0, 18)], *rng.choices(range(3), k=rng.randint(1, 5))]
    width, length = rng.choice([1, 1, 1, 2, 3]), rng.randint(1, 12)
    params: SamplingParams | BeamSearchParams = SamplingParams(
        max_tokens=length,
        n=width,
        min_tokens=rng.choice([0, 1]),
        stop_token_ids=[7, 8, 9],
        logprobs=rng.choice([None, 2]),
    )
    if rng.random() < 0.2:
        params = BeamSearchParams(beam_width=width, max_tokens=length)
    engine.add_request(
        name,
        prompt,
        params,
        priority=rng.randrange(3),
        user=rng.choice(["", "a", "b"]),
        cache_salt=rng.choice(["", "", "salt"]),
        expected_output_len=length,
    )


def disturbance(engine: Engine, rng: random.Random) -> Callable[[SchedulerOutput], None]:
    """What happens between the launch of a step and its result: now and then an interrupt or an abort."""
    chance = rng.random()

    def disturb(plan: SchedulerOutput) -> None:
        if chance < 0.05:
            raise InterruptedError
        if chance < 0.1 and plan.scheduled:
            engine.abort(plan.scheduled[-1].request.request_id)

    return disturb


def served(path: Path, arrivals: list[Arrival], **fields: object) -> Trace:
    """A recorded run of these arrivals, a second a step."""
    engine = host_engine(trace_file=str(path), token=lambda tokens: 50, seconds_per_step=1.0, **fields)
    for _ in drive(engine, arrivals, engine.clock):
        pass
    return Trace(str(path))


def three(path: Path, **fields: object) -> Trace:
    """A long, a middling and a short request, one at a time; all are there at 1 s."""
    lengths = {"long": 6, "middling": 4, "short": 2}
    arrivals = [
        Arrival(1.0, name, (number, number), SamplingParams(max_tokens=n), expected_output_len=n)
        for number, (name, n) in enumerate(lengths.items())
    ]
    return served(path, arrivals, max_num_seqs=1, prefix_cache="none", **fields)

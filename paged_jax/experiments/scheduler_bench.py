"""What the host costs: microseconds of scheduling and bookkeeping per step, per request and per admitted prompt.

The real engine runs over an executor that answers at once, whose own time is left out. Everything else that a step
costs the host but for laying out the batch is in: planning, blocks, hashing, tokens, stop checks, statistics.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paged_jax.config import EngineConfig
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.execution.plan import SchedulerOutput, StepResult
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.sampling.params import SamplingParams

VOCAB_SIZE = 50_000
EOS_TOKEN_ID = 2
LONG_PROMPT = 32_768


@dataclass(frozen=True)
class Setting:
    """Policies, and what requests ask for."""

    name: str
    engine: dict[str, object]
    n: int = 1
    """Samples of each prompt."""
    num_priorities: int = 1


SETTINGS = (
    Setting("default policies", {}),
    Setting(
        "priorities, radix tree, swap, n=4",
        {
            "scheduling_policy": "priority",
            "victim_policy": "lowest_priority",
            "prefix_cache": "radix",
            "eviction": "lfu",
            "preemption_mode": "swap",
            "num_swap_blocks": 1024,
        },
        n=4,
        num_priorities=8,
    ),
)


@dataclass(frozen=True)
class Cost:
    """Microseconds of one kind of work, sampled several times."""

    setting: str
    work: str
    before: tuple[float, ...]
    """Up to the launch of the step: for an admission also the door."""
    after: tuple[float, ...]
    """From the step's result on."""
    per: int
    """Requests that it is shared by."""

    @property
    def total(self) -> tuple[float, ...]:
        """Before and after together, sample by sample."""
        return tuple(b + a for b, a in zip(self.before, self.after, strict=True))


@dataclass
class _Instant:
    """An executor that answers at once and notes when it was asked and when it was done."""

    num_blocks: int
    num_swap_blocks: int
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(1, 1, 1),)
    asked: float = 0.0
    answered: float = 0.0
    answer: StepResult = field(default_factory=lambda: StepResult([], 0))

    def submit(self, plan: SchedulerOutput) -> "_Instant":
        self.asked = time.perf_counter()
        token = (EOS_TOKEN_ID + 1,)
        chunks = [token if part.samples else () for part in plan.chunks]
        self.answer = StepResult([token] * len(plan.decodes) + chunks + [token] * len(plan.forks), 0)
        self.answered = time.perf_counter()
        return self

    def result(self) -> StepResult:
        return self.answer

    def update_weights(self, model: object) -> None:
        raise RuntimeError("there are no weights here")


def measure(
    running: Sequence[int],
    *,
    prompt_len: int,
    block_size: int,
    repeats: int,
    engine: dict[str, object],
    progress: Callable[[str], None],
) -> Iterator[Cost]:
    """Steady decodes of so many requests of `prompt_len` tokens, then admissions, in each of `SETTINGS`.

    `engine` has fields of `EngineConfig` that every setting gets. Raises ValueError where they do not go together.
    """
    for setting in SETTINGS:
        fields = {"block_size": block_size, **setting.engine, **engine}
        for count in running:
            progress(f"{setting.name}: {count} running")
            yield _decodes(setting, fields, count, prompt_len, block_size, repeats)
        progress(f"{setting.name}: admissions")
        yield _admissions(setting, fields, prompt_len, repeats, cached=False)
        progress(f"{setting.name}: admissions of {LONG_PROMPT} cached tokens")
        yield _admissions(setting, fields, LONG_PROMPT, repeats, cached=True)


def table(costs: Sequence[Cost]) -> str:
    """The costs for people: the smallest of the samples, which noise has touched least, and the median."""
    head = ("setting", "work", "to launch", "from result", "total", "median", "per request")
    rows = [head, ("", "", "us", "us", "us", "us", "us")]
    last = None
    for cost in costs:
        best = min(range(len(cost.total)), key=cost.total.__getitem__)
        numbers = (cost.before[best], cost.after[best], cost.total[best], statistics.median(cost.total))
        rows.append(
            (
                cost.setting if cost.setting != last else "",
                cost.work,
                *(f"{number:,.1f}" for number in numbers),
                f"{cost.total[best] / cost.per:.2f}",
            )
        )
        last = cost.setting
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
             for row in rows]  # fmt: skip
    lines.insert(2, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _decodes(
    setting: Setting, fields: dict[str, object], count: int, prompt_len: int, block_size: int, repeats: int
) -> Cost:
    steps = block_size  # each sample has one block boundary of every request
    num_prompts = -(-count // setting.n)
    longest = prompt_len + (repeats + 2) * steps + block_size
    engine = _engine(fields, num_prompts * setting.n, longest, num_prompts * (prompt_len + setting.n))
    for index, prompt in enumerate(_prompts(num_prompts, prompt_len)):
        engine.add_request(str(index), prompt, _params(setting), priority=index % setting.num_priorities)
    while len(engine.scheduler.running) < num_prompts * setting.n:
        engine.step()
    before, after = [], []
    for sample in range(repeats + 1):
        times = [_timed_step(engine) for _ in range(steps)]
        if sample:  # the first one settles copies of shared blocks and warms the interpreter up
            before.append(sum(b for b, _ in times) / steps)
            after.append(sum(a for _, a in times) / steps)
    return Cost(setting.name, f"step, {count} running", tuple(before), tuple(after), num_prompts * setting.n)


def _admissions(setting: Setting, fields: dict[str, object], prompt_len: int, repeats: int, cached: bool) -> Cost:
    engine = _engine(fields, 16, prompt_len + 8, prompt_len + 8)
    before, after = [], []
    prompts = _prompts(1 if cached else 8 * repeats + 1, prompt_len)
    for index, prompt in enumerate(prompts * (repeats + 2) if cached else prompts):
        start = time.perf_counter()
        engine.add_request(str(index), prompt, _params(setting))
        added = time.perf_counter() - start
        planned, booked = _timed_step(engine)
        if index > cached:  # the first one warms the interpreter up, and fills the cache
            before.append(added * 1e6 + planned)
            after.append(booked)
        engine.abort(str(index))
    kind = f"admission, {prompt_len:,} tokens, cached" if cached else f"admission, {prompt_len:,} tokens"
    return Cost(setting.name, kind, tuple(before), tuple(after), 1)


def _timed_step(engine: Engine) -> tuple[float, float]:
    """Microseconds up to the launch of a step, and from its result on."""
    start = time.perf_counter()
    engine.step()
    end = time.perf_counter()
    executor = engine.executor
    return (executor.asked - start) * 1e6, (end - executor.answered) * 1e6


def _engine(fields: dict[str, object], max_num_seqs: int, longest: int, budget: int) -> Engine:
    config = EngineConfig(**{"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, **fields})
    blocks = max_num_seqs * (2 + longest // config.block_size)
    return Engine(
        config,
        _Instant(blocks, config.num_swap_blocks or 0),
        clock=VirtualClock(),
        tokenizer=None,
        max_model_len=longest,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_TOKEN_ID],
    )


def _prompts(count: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(range(EOS_TOKEN_ID + 1, VOCAB_SIZE), k=length) for _ in range(count)]


def _params(setting: Setting) -> SamplingParams:
    return SamplingParams(n=setting.n, max_tokens=None, seed=0)

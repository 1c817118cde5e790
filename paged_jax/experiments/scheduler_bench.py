"""What the host costs: microseconds of scheduling and bookkeeping per step, per request and per admitted prompt.

The real engine runs over an executor that answers at once, whose own time is left out. Everything else that a step
costs the host but for laying out the batch is in: planning, blocks, hashing, tokens, stop checks, statistics.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from paged_jax.config import EngineConfig, parse
from paged_jax.engine.clock import VirtualClock
from paged_jax.engine.engine import Engine
from paged_jax.execution.plan import SchedulerOutput, StepResult
from paged_jax.experiments.no_device import check_has_effect, with_overrides
from paged_jax.kv_cache.group import CacheGroup
from paged_jax.sampling.params import SamplingParams

VOCAB_SIZE = 50_000
EOS_TOKEN_ID = 2
LONG_PROMPT = 32_768
SIZED = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks")
"""Settings that the benchmark chooses itself."""
_MOST_STEPS_TO_START = 8


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
            "preemption_mode": "swap",
            "num_swap_blocks": 1024,
        },
        n=4,
        num_priorities=8,
    ),
)


@dataclass(frozen=True)
class Sample:
    """Microseconds of one piece of work."""

    launch: float
    """Planning: from the beginning of the step to its launch."""
    booking: float
    """From the step's result on."""
    door: float = 0.0
    """Of an admission: checking the request and queueing it."""

    @property
    def scheduler(self) -> float:
        """What the step costs."""
        return self.launch + self.booking

    @property
    def total(self) -> float:
        """The door, too."""
        return self.door + self.scheduler


@dataclass(frozen=True)
class Row:
    """One kind of work under one setting, to be measured."""

    setting: Setting
    work: str
    make_engine: Callable[[], Engine]
    measure: "Callable[[Engine], list[Sample]]"
    is_admission: bool
    num_requests: int = 1
    """How many share the work."""

    def samples(self) -> list[Sample]:
        """Measure it."""
        return self.measure(self.make_engine())


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


def rows(
    running: Sequence[int], *, prompt_len: int, block_size: int, repeats: int, overrides: Mapping[str, object]
) -> list[Row]:
    """Steady decodes of so many requests of `prompt_len` tokens, then admissions, in each of `SETTINGS`.

    `overrides` are fields of `EngineConfig` that every setting gets. Raises ValueError, before anything is measured,
    where they have no effect or do not go together.
    """
    check_has_effect(overrides, "this benchmark")
    for key in overrides:
        if key == "block_size":
            raise ValueError("block_size has a flag of its own here: use --block-size")
        if key in SIZED:
            raise ValueError(f"{key} is chosen here so that all requests of a row fit: leave it out")
    planned = []
    for setting in SETTINGS:
        fields = with_overrides({"block_size": block_size, **setting.engine}, overrides)
        planned += [_decodes(setting, fields, count, prompt_len, block_size, repeats) for count in running]
        planned.append(_admissions(setting, fields, prompt_len, repeats, cached=False))
        planned.append(_admissions(setting, fields, LONG_PROMPT, repeats, cached=True))
    for row in planned:
        try:
            row.make_engine()
        except ValueError as error:
            raise ValueError(f"{error} (in the setting {row.setting.name!r})") from None
    return planned


def table(measured: Sequence[tuple[Row, Sequence[Sample]]]) -> str:
    """The costs for people: the sample with the smallest total, which noise has touched least, and the median total.

    `scheduler` is to launch and from result together; the total of an admission also has the door.
    """
    head = ("", "door", "to launch", "from result", "scheduler", "total", "median", "per request")
    lines: list[tuple[str, ...]] = [head, ("", *["us"] * 7)]
    last = None
    for row, samples in measured:
        if row.setting is not last:
            lines.append((row.setting.name,))
            last = row.setting
        best = min(samples, key=lambda sample: sample.total)
        median = statistics.median(sample.total for sample in samples)
        numbers = (best.launch, best.booking, best.scheduler, best.total, median)
        lines.append(
            (
                f"  {row.work}",
                f"{best.door:,.1f}" if row.is_admission else "-",
                *(f"{number:,.1f}" for number in numbers),
                f"{best.total / row.num_requests:.2f}",
            )
        )
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(head))]
    texts = [
        "  ".join(cell.rjust(widths[i]) if i else cell.ljust(widths[i]) for i, cell in enumerate(line))
        for line in lines
    ]
    texts.insert(2, "  ".join("-" * width for width in widths))
    return "\n".join(text.rstrip() for text in texts) + "\n"


def _decodes(
    setting: Setting, fields: dict[str, object], count: int, prompt_len: int, block_size: int, repeats: int
) -> Row:
    steps = block_size  # each sample has one block boundary of every request
    num_prompts = -(-count // setting.n)
    total = num_prompts * setting.n
    longest = prompt_len + (repeats + 2) * steps + block_size

    def measure(engine: Engine) -> list[Sample]:
        for index, prompt in enumerate(_prompts(num_prompts, prompt_len)):
            engine.add_request(str(index), prompt, _params(setting), priority=index % setting.num_priorities)
        for _ in range(_MOST_STEPS_TO_START):
            if len(engine.scheduler.running) == total:
                break
            engine.step()
        else:
            raise ValueError(
                f"{len(engine.scheduler.running)} of {total} requests run at once under these settings: leave out what "
                "holds the others back"
            )
        samples = []
        for _ in range(repeats + 1):
            times = [_timed_step(engine) for _ in range(steps)]
            samples.append(Sample(sum(t.launch for t in times) / steps, sum(t.booking for t in times) / steps))
        return samples[1:]  # the first one settles copies of shared blocks and warms the interpreter up

    make_engine = partial(_engine, fields, total, longest, num_prompts * (prompt_len + setting.n))
    return Row(setting, f"step, {count:,} running", make_engine, measure, False, total)


def _admissions(setting: Setting, fields: dict[str, object], prompt_len: int, repeats: int, cached: bool) -> Row:
    def measure(engine: Engine) -> list[Sample]:
        samples = []
        prompts = _prompts(1 if cached else 8 * repeats + 1, prompt_len)
        for index, prompt in enumerate(prompts * (repeats + 2) if cached else prompts):
            start = time.perf_counter()
            engine.add_request(str(index), prompt, _params(setting))
            door = time.perf_counter() - start
            samples.append(replace(_timed_step(engine), door=door * 1e6))
            engine.abort(str(index))
        return samples[1 + cached :]  # the first one warms the interpreter up, and fills the cache

    work = f"admission, {prompt_len:,} tokens{', cached' if cached else ''}"
    return Row(setting, work, partial(_engine, fields, 16, prompt_len + 8, prompt_len + 8), measure, True)


def _timed_step(engine: Engine) -> Sample:
    """What one step costs."""
    start = time.perf_counter()
    engine.step()
    end = time.perf_counter()
    executor = engine.executor
    return Sample((executor.asked - start) * 1e6, (end - executor.answered) * 1e6)


def _engine(fields: dict[str, object], max_num_seqs: int, longest: int, budget: int) -> Engine:
    config = parse(EngineConfig, {**fields, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget})
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

"""Padding against the number of compiled programs: the steps of recorded or simulated runs, a table, a figure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from paged_jax.config import EngineConfig, parse
from paged_jax.engine.recorder import Event
from paged_jax.execution.bucket_search import StepHistogram, StepSize, best_buckets, powers_of_two
from paged_jax.execution.buckets import make_buckets
from paged_jax.execution.plan import SchedulerOutput
from paged_jax.experiments.config import load_experiment, settings
from paged_jax.experiments.measurements import run_workload
from paged_jax.experiments.plots import COLOURS, MARKERS, PANEL_HEIGHT_IN, STYLE, WIDTH_IN, legend, save
from paged_jax.experiments.tables import Table
from paged_jax.experiments.trace import Trace
from paged_jax.experiments.workloads import make_workload
from paged_jax.simulation.engines import simulated_engine

TABLE_PROGRAMS = 12
"""Budgets that the table and the figure show."""


@dataclass(frozen=True)
class BucketStudy:
    """Steps of one or more runs, and what they ran on."""

    histogram: StepHistogram
    default: tuple[int, ...]
    """Sizes that the engine chooses by itself."""
    in_use: tuple[int, ...]
    """Sizes that the runs had."""
    step_seconds: Callable[[int], float] | None
    """Of a simulated device: the time of a step padded to so many tokens, without its attention."""


@dataclass(frozen=True)
class Candidate:
    """A set of buckets and its name in the table."""

    name: str
    buckets: tuple[int, ...]


def read_study(paths: Sequence[str]) -> BucketStudy:
    """The steps of all these files: traces, of which each holds its steps, and experiments of the simulated device
    (.yaml), whose first setting is simulated with all its seeds.

    Raises ValueError, one sentence, for a file that is neither, and for files whose engines compile different shapes.
    """
    steps: list[StepSize] = []
    configs: list[EngineConfig] = []
    step_seconds = None
    for path in paths:
        if path.endswith((".yaml", ".yml")):
            config, found, step_seconds = simulate_steps(path)
        else:
            trace = Trace(path)
            config, found = parse(EngineConfig, trace.header["config"]), list(step_sizes(trace.events()))
            if not found:
                raise ValueError(f"{path} holds no step")
        configs.append(config)
        steps += found
    shapes = [(config.max_num_seqs, config.max_num_batched_tokens) for config in configs]
    for path, shape in zip(paths, shapes, strict=True):
        if shape != shapes[0]:
            raise ValueError(
                f"{paths[0]} and {path} have other shapes, max_num_seqs and max_num_batched_tokens of {shapes[0]} and "
                f"{shape}: one set of buckets cannot serve both"
            )
    config = configs[0]
    return BucketStudy(
        StepHistogram.of(steps, config.max_num_batched_tokens),
        _sizes(config.model_copy(update={"token_buckets": None})),
        _sizes(config),
        step_seconds if len(paths) == 1 else None,
    )


def step_sizes(events: Iterable[Event]) -> Iterable[StepSize]:
    """What each recorded step asked of its bucket.

    A recording does not say which chunks sample: each is taken to, which where samples fork in the same step may be a
    row too many.
    """
    for event in events:
        if event["event"] == "schedule" and event.get("num_tokens"):
            decodes, chunks, forks, idle, admitted = (
                len(event.get(part, ())) for part in ("decodes", "chunks", "forks", "idle", "admitted")
            )
            rows = max(decodes + chunks + max(idle, forks), admitted)
            yield StepSize(event["num_tokens"], rows)


class StepSink:
    """Takes the sizes of steps from a recorder, and nothing else."""

    def __init__(self) -> None:
        self.steps: list[StepSize] = []

    def write(self, event: Event) -> None:
        """Take an event."""
        self.steps += step_sizes([event])

    def flush(self, *, idle: bool) -> None:
        """Nothing is kept elsewhere."""


def simulate_steps(path: str) -> tuple[EngineConfig, list[StepSize], Callable[[int], float]]:
    """The first setting of an experiment: its engine's settings, the steps of all seeds, and the time of one."""
    experiment = load_experiment(path)
    if experiment.executor != "simulated":
        raise ValueError(
            f"{path} is an experiment on this machine, and only simulated ones are run here: record it with "
            "`paged-jax generate --trace-file FILE`, or set executor: simulated and a hardware"
        )
    setting = settings(experiment)[0]
    config, sink = setting.engine, StepSink()
    for seed in experiment.seeds:
        engine = simulated_engine(setting.model, str(setting.hardware), config)
        engine.record(sink)
        run_workload(engine, make_workload(setting.workload, seed, None, engine.vocab_size))
    cost = engine.executor.cost

    def step_seconds(num_tokens: int) -> float:
        return sum(cost.step(SchedulerOutput(), num_tokens, min(num_tokens, config.max_num_seqs)))

    return config, sink.steps, step_seconds


def candidates(study: BucketStudy, *, by_time: bool = False, max_programs: int = TABLE_PROGRAMS) -> list[Candidate]:
    """The engine's own sets, powers of two, and the best sets of 1 to `max_programs` programs that differ."""
    found = [Candidate("default", study.default)]
    if study.in_use != study.default:
        found.append(Candidate("in use", study.in_use))
    found.append(Candidate("powers of two", powers_of_two(study.histogram.max_num_batched_tokens)))
    best = best_sets(study, max_programs, by_time=by_time)
    return found + [Candidate(f"best {len(buckets)}", buckets) for buckets in dict.fromkeys(best)]


def best_sets(study: BucketStudy, max_programs: int, *, by_time: bool = False) -> list[tuple[int, ...]]:
    """The sets of least padding for 1 to `max_programs` programs, or `by_time` of the least time on the simulated
    device; ValueError if there is none."""
    if not by_time:
        return best_buckets(study.histogram, max_programs)
    if study.step_seconds is None:
        raise ValueError(
            "the time of a padded step is known of a simulated experiment only, and of one at a time: name one .yaml "
            "file, or minimise tokens"
        )
    return best_buckets(study.histogram, max_programs, study.step_seconds)


def padding_time(study: BucketStudy, buckets: Sequence[int]) -> float:
    """Share of the simulated device's time, attention's left out, that this padding takes."""
    assert study.step_seconds is not None
    unpadded = study.histogram.total(study.histogram.needs[0].tolist(), study.step_seconds)
    return 1 - unpadded / study.histogram.total(buckets, study.step_seconds)


def study_table(study: BucketStudy, sets: Sequence[Candidate]) -> Table:
    """Padding and programs of each set."""
    histogram, timed = study.histogram, study.step_seconds is not None
    return Table(
        f"{histogram.num_steps:,} steps, {histogram.computed_tokens:,} tokens",
        ("buckets", "programs", "used", "padding", *(["its time"] if timed else []), "engine.token_buckets"),
        ("", "", "", "%", *(["%"] if timed else []), ""),
        tuple(
            (
                one.name,
                str(len(one.buckets)),
                str(histogram.num_programs(one.buckets)),
                f"{100 * histogram.padding_fraction(one.buckets):.2f}",
                *([f"{100 * padding_time(study, one.buckets):.2f}"] if timed else []),
                as_yaml(one.buckets),
            )
            for one in sets
        ),
        left=1,
    )


def as_yaml(buckets: Sequence[int]) -> str:
    """A value for `engine.token_buckets`."""
    return f"[{', '.join(map(str, buckets))}]"


def write_figure(study: BucketStudy, sets: Sequence[Candidate], path: Path) -> list[Path]:
    """Padding against the number of programs, as PDF and PNG; returns the files."""
    with matplotlib.rc_context(STYLE):
        return save(draw(study, sets), path.parent, path.stem if path.suffix in (".pdf", ".png") else path.name)


def draw(study: BucketStudy, sets: Sequence[Candidate]) -> Figure:
    """Best sets as a line, the others as points."""
    figure = Figure(figsize=(WIDTH_IN, PANEL_HEIGHT_IN), layout="constrained")
    ax = figure.subplots()
    groups: dict[str, list[Candidate]] = {}
    for one in sets:
        groups.setdefault(one.name.partition(" ")[0] if one.name.startswith("best") else one.name, []).append(one)
    order = sorted(groups, key=lambda name: name != "best")
    for i, name in enumerate(order):
        ax.plot(
            [len(one.buckets) for one in groups[name]],
            [100 * study.histogram.padding_fraction(one.buckets) for one in groups[name]],
            label="best sets" if name == "best" else name,
            color=COLOURS[i],
            marker=MARKERS[i],
            markerfacecolor=COLOURS[i] if i % 2 == 0 else "white",
            markersize=3.5 if name == "best" else 5,
            linewidth=1.1,
            linestyle="-" if name == "best" else "none",
        )
    ax.set_xlabel("compiled programs")
    ax.set_ylabel("padding (%)")
    ax.set_ylim(bottom=0)
    ax.set_xlim(left=0)
    legend(ax)
    return figure


def _sizes(config: EngineConfig) -> tuple[int, ...]:
    return tuple(bucket.num_tokens for bucket in make_buckets(config))

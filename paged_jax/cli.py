"""The command line, `paged-jax`.

JAX is imported by the commands that compute, once nothing that was typed can be wrong any more.
"""

import dataclasses
import difflib
import inspect
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, Protocol

import tyro

from paged_jax.config import EngineConfig, parse
from paged_jax.flags import as_flags, flag_name, flags_of, known_flags, values_of
from paged_jax.sampling.params import SamplingParams

if TYPE_CHECKING:
    from paged_jax.engine.request import Request
    from paged_jax.llm import LLM

PROGRAM = "paged-jax"
STATUS_ERROR, STATUS_USAGE, STATUS_INTERRUPTED, STATUS_BROKEN_PIPE = 1, 2, 130, 141

_SAMPLING_NAMES = {"seed": "sampling_seed"}  # --seed is the engine's
_SAMPLING_DEFAULTS = {f.name: f.default for f in dataclasses.fields(SamplingParams) if f.init} | {
    "temperature": 0.0,
    "max_tokens": 128,
}
_ENGINE_DEFAULTS = {name: f.default for name, f in EngineConfig.model_fields.items()}

_SamplingFlags = flags_of(SamplingParams, _SAMPLING_DEFAULTS, names=_SAMPLING_NAMES)
_EngineFlags = flags_of(EngineConfig, _ENGINE_DEFAULTS, notes={"debug": "Also show the traceback of an error."})


class UsageError(ValueError):
    """What was typed cannot be a command: exit status 2."""


class Command(Protocol):
    """A dataclass whose fields are flags and whose docstring is the help, its first line being a summary."""

    needs: ClassVar[str]
    """The flag or positional argument that may not be missing; empty when there is none."""

    def __call__(self) -> None:
        """Do it."""
        ...


@dataclass(frozen=True)
class Generate:
    """Complete one prompt and stream the text.

    Only the text goes to standard output; progress and errors go to standard error. Sampling is greedy unless
    --temperature is given. The model is a name of the catalogue (see `paged-jax models`), a Hugging Face
    directory, a .gguf file, or a hub id (org/name).

    examples:
        paged-jax generate --prompt "The capital of France is" --max-tokens 20
        paged-jax generate --chat --prompt "Name three colours." --temperature 0.7 --top-p 0.9
        paged-jax generate --prompt - --stats < prompt.txt
        paged-jax generate --prompt "Once upon a time" --block-size 32 --dtype bfloat16
    """

    needs: ClassVar[str] = "--prompt"

    prompt: str
    """What to complete; - reads it from standard input. If it begins with a dash, write --prompt=-x."""
    model: str = "smollm2-135m"
    """Name in the catalogue, directory, .gguf file or hub id."""
    chat: tyro.conf.FlagCreatePairsOff[bool] = False
    """Take the prompt for a user's message and answer it, through the model's chat template."""
    stats: tyro.conf.FlagCreatePairsOff[bool] = False
    """Afterwards, write token counts, seconds and tokens per second to standard error."""
    sampling: tyro.conf.OmitArgPrefixes[_SamplingFlags] = field(default_factory=_SamplingFlags)
    engine: tyro.conf.OmitArgPrefixes[_EngineFlags] = field(default_factory=_EngineFlags)

    def __call__(self) -> None:
        """Load the model, compile what this prompt needs, then write the text as it becomes certain."""
        params, config = self._settings()
        prompt = _read_prompt() if self.prompt == "-" else self.prompt
        try:
            self._generate(prompt, params, config)
        except ValueError as error:  # the model may refuse what the settings alone allow
            raise ValueError(as_flags(str(error), _SAMPLING_DEFAULTS | _ENGINE_DEFAULTS)) from error

    def _settings(self) -> tuple[SamplingParams, EngineConfig]:
        try:
            params = SamplingParams(**values_of(self.sampling, _SAMPLING_NAMES))
        except ValueError as error:
            raise UsageError(as_flags(str(error), _SAMPLING_DEFAULTS, _SAMPLING_NAMES)) from error
        try:
            return params, parse(EngineConfig, values_of(self.engine))
        except ValueError as error:
            raise UsageError(as_flags(str(error), _ENGINE_DEFAULTS)) from error

    def _generate(self, prompt: str, params: SamplingParams, config: EngineConfig) -> None:
        from tqdm import tqdm

        from paged_jax.checkpoints.resolve import prepare

        prepare(self.model, config.load_format)
        with tqdm(
            total=1,
            desc="loading",
            bar_format="{desc} |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]",
            leave=False,
        ) as bar:
            from paged_jax.llm import LLM

            llm = LLM(self.model, **config.model_dump())
            # not llm.stream: the request is refused here, before minutes of compiling, and counted afterwards
            request = llm.engine.add_request(PROGRAM, self._tokens(llm, prompt), params)
            _compile(llm, request.num_prompt_tokens, bar)
        try:
            for piece in _stream(llm, request):
                print(piece, end="", flush=True)
        finally:
            print()  # so that what follows, a sentence about an interrupt for one, begins a line
        if self.stats:
            print(_statistics(llm, request), file=sys.stderr)

    def _tokens(self, llm: "LLM", prompt: str) -> list[int]:
        if self.chat:
            return llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        return llm.tokenizer.encode(prompt)


@dataclass(frozen=True)
class Run:
    """Run an experiment file; write its tables and figures.

    A run that was stopped goes on where it was: trials that the output directory holds are not repeated.
    Values in square brackets need quotes in some shells.

    examples:
        paged-jax run configs/smoke.yaml
        paged-jax run configs/block_size.yaml repeats=5 sweep.engine.block_size=[8,16,32]
        paged-jax run configs/block_size.yaml engine.max_num_seqs=8 --output-dir results/eight
    """

    needs: ClassVar[str] = "FILE"

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """The experiment, a YAML file."""
    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint=""),
    ] = ()
    """Changes to the file: a dotted key and a YAML value."""
    output_dir: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Where results are kept; unset, results/ and the experiment's name."""
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False
    """Throw away what an earlier run left in the output directory, once this one can begin."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Run the missing trials and print the tables."""
        from paged_jax.experiments.config import load_experiment

        config = load_experiment(self.file, self.overrides)
        from paged_jax.experiments.runner import (
            run_experiment,
        )  # pandas: a second that an error need not wait for

        print(run_experiment(config, self.output_dir, fresh=self.fresh).text, end="")


@dataclass(frozen=True)
class Replay:
    """Run a recorded run again, without its model, and compare every decision.

    A run records itself when its engine has a trace_file. Without overrides all of it must come out the same;
    the first event that does not is shown, and the exit status is 1. With overrides the same requests are served
    under other settings, each with the tokens that it generated, on a clock on which every step takes the mean
    time of those recorded: decisions are real, times are modelled. eviction=belady works here, and only here.

    examples:
        paged-jax generate --prompt "The capital of France is" --trace-file run.jsonl
        paged-jax replay run.jsonl
        paged-jax replay run.jsonl scheduling_policy=sjf length_predictor=oracle --output sjf.jsonl
        paged-jax replay run.jsonl eviction=belady
    """

    needs: ClassVar[str] = "FILE"

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """What trace_file has recorded."""
    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint=""),
    ] = ()
    """Other settings: a field of the engine's config (see `paged-jax generate --help`) and a YAML value."""
    output: Annotated[str | None, tyro.conf.arg(metavar="FILE2", help_behavior_hint="")] = None
    """Record the run under other settings there, for `paged-jax diff`."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Replay, and say what came of it."""
        if self.output is not None and not self.overrides:
            raise UsageError("--output without overrides would copy the recording: give key=value, or leave it out")
        from paged_jax.experiments.trace import Trace

        trace = Trace(self.file)
        if self.overrides:
            from paged_jax.experiments.what_if import what_if

            print(what_if(trace, self.overrides, self.output), end="")
            return
        from paged_jax.experiments.replay import replay

        outcome = replay(trace)
        print(outcome.text, end="")
        if not outcome.reproduced:
            sys.exit(STATUS_ERROR)


@dataclass(frozen=True)
class Diff:
    """Show the first step at which two recorded runs part, and their totals.

    Two policies, say: record a run, replay it under another policy with --output, compare. Shown are the settings
    that differ, whether the same requests arrive, the step before and the step at which the decisions differ (who
    is scheduled, admitted, preempted, with how many tokens and which blocks), and totals from there on and over
    all. Times are not compared.

    example:
        paged-jax diff run.jsonl sjf.jsonl
    """

    needs: ClassVar[str] = "A and B"

    files: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="A B")]
    """Two traces, from trace_file or `paged-jax replay --output`."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Compare and print."""
        if len(self.files) != 2:
            raise UsageError(f"{PROGRAM} diff compares two traces, A and B, got {len(self.files)}")
        from paged_jax.experiments.trace import Trace
        from paged_jax.experiments.trace_diff import diff

        print(diff(*map(Trace, self.files)), end="")


@dataclass(frozen=True)
class Models:
    """List the catalogue of models.

    For each: name, shape, where its weights come from, and whether they are on this machine. A model with its
    shape only can be used with random weights, in an experiment or in Python: load_format dummy.
    """

    needs: ClassVar[str] = ""

    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Print the table."""
        from paged_jax.catalog.entries import entries

        rows = [("NAME", "SHAPE", "SOURCE", "CACHED")]
        for entry in entries():
            cached = "-" if entry.source is None else "yes" if entry.cached else "no"
            rows.append((entry.name, entry.shape_summary, entry.source_summary, cached))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@dataclass(frozen=True)
class Fetch:
    """Fetch a model of the catalogue; print the path of its weights.

    They are kept in your cache directory ($PAGED_JAX_CACHE chooses another) and work offline ever after.

    example:
        paged-jax fetch smollm2-135m
    """

    needs: ClassVar[str] = "NAME"

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """As `paged-jax models` lists it."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Fetch unless it is here already."""
        from paged_jax.catalog.fetch import fetch

        print(fetch(self.name))


@dataclass(frozen=True)
class BenchScheduler:
    """Time the scheduler: microseconds of the host per step, per request and per admitted prompt.

    The real engine runs over an executor that answers at once. Shown are the smallest of the samples and their median:
    read the smallest on a machine with other work. Engine settings may follow; they go to every row.

    examples:
        paged-jax bench-scheduler
        paged-jax bench-scheduler --running 256 --repeats 20
        paged-jax bench-scheduler scheduling_policy=my_policies:MyQueue
    """

    needs: ClassVar[str] = ""

    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint=""),
    ] = ()
    """Engine settings, such as eviction=lfu."""
    running: tuple[int, ...] = (16, 64, 256, 1024)
    """Requests that decode at once."""
    prompt_len: int = 1000
    """Tokens of each prompt."""
    block_size: int = 16
    """Tokens per KV block."""
    repeats: int = 20
    """Samples of each number."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Measure and print the table."""
        for name, value in {"running": min(self.running, default=0), "prompt_len": self.prompt_len,
                            "block_size": self.block_size, "repeats": self.repeats}.items():  # fmt: skip
            if value < 1:
                raise UsageError(f"{flag_name(name)} must be 1 or more, got {value}")
        from tqdm import tqdm

        from paged_jax.experiments.config import read_overrides
        from paged_jax.experiments.scheduler_bench import SETTINGS, measure, table

        engine = read_overrides(self.overrides)
        with tqdm(total=len(SETTINGS) * (len(self.running) + 2), leave=False) as bar:
            costs = []
            for cost in measure(
                self.running,
                prompt_len=self.prompt_len,
                block_size=self.block_size,
                repeats=self.repeats,
                engine=engine,
                progress=bar.set_description_str,
            ):
                costs.append(cost)
                bar.update()
        print(table(costs), end="")


BENCH_KERNELS = "bench-kernels"
"""Not one of COMMANDS: what follows it goes to `pallas_kernels.bench`, which also runs without this package."""
COMMANDS: dict[str, type[Command]] = {
    "generate": Generate,
    "run": Run,
    "replay": Replay,
    "diff": Diff,
    "models": Models,
    "fetch": Fetch,
    "bench-scheduler": BenchScheduler,
}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The program `paged-jax` with these arguments, by default those of the process.

    Exits with status 0; 1 after an error and 2 after a usage error, told as a sentence on standard error; 130
    after Ctrl-C or SIGTERM. With `--debug`, errors other than of usage are raised, for their tracebacks.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    sys.path.append(os.getcwd())  # where a policy given as module:Class usually is
    try:
        with _terminated_like_interrupted():
            try:
                _dispatch(arguments)
            finally:
                sys.stdout.flush()  # here, where a closed pipe is expected
    except UsageError as error:
        if debug and error.__cause__ is not None:
            raise
        _fail(str(error), STATUS_USAGE)
    except KeyboardInterrupt as error:
        _fail(str(error) or "interrupted", STATUS_INTERRUPTED, prefix=PROGRAM)
    except BrokenPipeError:
        # what is left in the buffer must not fail again when the interpreter flushes it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(STATUS_BROKEN_PIPE)
    except Exception as error:
        if debug:
            raise
        _fail(_sentence(error), STATUS_ERROR)
    sys.exit(0)


def _dispatch(arguments: list[str]) -> None:
    """Find the command, check its arguments, run it. `--debug` may also come before the command."""
    leading = [a for a in arguments[:1] if a == "--debug"]
    arguments = arguments[len(leading) :]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if arguments else sys.stderr)
        sys.exit(0 if arguments else STATUS_USAGE)
    if arguments[0] == "--version":
        from paged_jax import __version__

        print(PROGRAM, __version__)
        return
    name, *rest = arguments
    if name == BENCH_KERNELS:
        from pallas_kernels.bench.__main__ import main as bench_kernels

        sys.exit(bench_kernels(rest, f"{PROGRAM} {BENCH_KERNELS}"))
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        hint = _did_you_mean(name, [*COMMANDS, BENCH_KERNELS, "--help", "--version", "--debug"])
        raise UsageError(f"unknown {kind} {name!r}{hint or f'; commands: {", ".join([*COMMANDS, BENCH_KERNELS])}'}")
    _parse(name, leading + rest)()


def _parse(name: str, arguments: list[str]) -> Command:
    """The command that these arguments ask for; UsageError in one sentence where tyro would draw a box."""
    command = COMMANDS[name]
    prog = f"{PROGRAM} {name}"
    if not {"-h", "--help"} & set(arguments):
        _check(prog, command, arguments)
    parsed, left = tyro.cli(
        command,
        prog=prog,
        description=inspect.cleandoc(command.__doc__ or ""),
        args=arguments,
        return_unknown_args=True,
    )
    if isinstance(parsed, Run | Replay | BenchScheduler):  # overrides may also follow flags
        parsed = dataclasses.replace(parsed, overrides=(*parsed.overrides, *left))
    elif left:
        raise UsageError(f"{prog} cannot place {left[0]!r}: see `{prog} --help`")
    return parsed


def _check(prog: str, command: type[Command], arguments: Sequence[str]) -> None:
    """Refuse unknown flags, flags without their value, and a command without what it needs."""
    flags = known_flags(command)
    given: set[str] = set()
    previous = None
    for word in arguments:
        if previous is not None and not _is_flag(word):
            previous = None
            continue
        _check_has_value(previous)
        if not _is_flag(word):
            given.add("positional")
            continue
        typed, equals, _ = word.partition("=")
        flag = typed.replace("_", "-")
        if flag not in flags:
            raise UsageError(f"unknown flag {typed!r}{_did_you_mean(flag, list(flags)) or f'; see `{prog} --help`'}")
        given.add(flag)
        previous = flag if flags[flag] and not equals else None
    _check_has_value(previous)
    if command.needs and (command.needs if command.needs.startswith("-") else "positional") not in given:
        raise UsageError(f"{prog} needs {command.needs}: see `{prog} --help`")


def _check_has_value(flag: str | None) -> None:
    if flag is not None:
        raise UsageError(f"{flag} needs a value (one that begins with a dash is written {flag}=-x)")


def _is_flag(word: str) -> bool:
    """Whether tyro reads the word as a flag: a lone dash and numbers below zero are values."""
    return word == "--" or re.match("-+[A-Za-z]", word) is not None


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _help() -> str:
    """What `paged-jax --help` prints."""
    summaries = "\n".join(
        f"  {name:17}{inspect.cleandoc(command.__doc__ or '').partition('\n')[0]}" for name, command in COMMANDS.items()
    )
    return f"""usage: {PROGRAM} COMMAND ...

PagedAttention and continuous batching in JAX: run ablations of an LLM serving engine, or just generate text.

commands:
{summaries}
  {BENCH_KERNELS:17}Time the attention kernels against what else there is.

options:
  --help    Show this, or `{PROGRAM} COMMAND --help` a command's flags, defaults and examples
  --version Show the version
  --debug   Show the traceback of an error; also after the command

examples:
  {PROGRAM} run configs/smoke.yaml
  {PROGRAM} generate --prompt "The capital of France is"

Results go to standard output, progress and errors to standard error. The exit status is 0, or 1 after an
error, 2 after a mistake in the command line, 130 when interrupted."""


def _read_prompt() -> str:
    """Standard input, without the newline that ends its last line."""
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt on standard input is not {error.encoding}: {error.reason}") from error


def _compile(llm: "LLM", num_prompt_tokens: int, bar: Any) -> None:
    """Compile the programs that one request needs: for its chunks of prompt and for single tokens."""
    from paged_jax.execution.buckets import pick_bucket

    executor, budget = llm.engine.executor, llm.engine.config.max_num_batched_tokens
    sizes = {min(num_prompt_tokens, budget), num_prompt_tokens % budget or budget, 1}
    buckets = {pick_bucket(executor.buckets, min(size, num_prompt_tokens)) for size in sizes}

    def show(done: int, total: int) -> None:
        bar.n, bar.total = 1 + done, 1 + total
        bar.set_description_str("compiling")

    show(0, len(buckets))
    executor.warm_up(show, sorted(buckets, key=lambda bucket: bucket.num_tokens))


def _stream(llm: "LLM", request: "Request") -> Iterator[str]:
    """The text of a request that is queued, piece by piece."""
    shown = 0
    while not request.is_finished:
        llm.engine.step()
        text = request.text.text if request.text else ""
        yield text[shown:]
        shown = len(text)


def _statistics(llm: "LLM", request: "Request") -> str:
    """What `--stats` says of a request that has ended."""
    metrics, executor = request.metrics, llm.engine.executor
    tokens, compiled = request.num_output_tokens, executor.num_compilations
    begun = metrics.first_scheduled_time or metrics.arrival_time
    seconds = (metrics.finished_time or begun) - begun
    first = (metrics.first_token_time or begun) - begun
    return (
        f"{request.num_prompt_tokens} prompt tokens, {tokens} output tokens ({request.finish_reason}) in "
        f"{seconds:.2f} s: {tokens / max(seconds, 1e-9):.1f} tokens/s, the first after {first:.2f} s; "
        f"before that, {compiled} program{'s' * (compiled != 1)} compiled in {executor.compile_seconds:.1f} s"
    )


def _sentence(error: Exception) -> str:
    """An error in one line, with what to do where that is not part of it."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError) and text:
        return text
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:  # the latter is XLA's
        detail = f" ({text.partition('RESOURCE_EXHAUSTED: ')[2] or text})" if text else ""
        return (
            f"out of memory{detail}: make the KV cache smaller (num_blocks, kv_cache_memory or "
            "memory_utilization) or take a smaller max_num_batched_tokens"
        )
    return f"internal error, {type(error).__name__}: {text}; --debug shows where, please report it"


def _fail(sentence: str, status: int, prefix: str = f"{PROGRAM}: error") -> NoReturn:
    print(f"{prefix}: {sentence}", file=sys.stderr)
    sys.exit(status)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM, which batch systems send, end a command as Ctrl-C does, its sentence included."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main()

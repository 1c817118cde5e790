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
from typing import NoReturn

import tyro

from paged_jax.commands import PROGRAM, STATUS_ERROR, Command, UsageError, sentence_of
from paged_jax.commands.bench_scheduler import BenchScheduler
from paged_jax.commands.buckets import Buckets
from paged_jax.commands.calibrate import Calibrate
from paged_jax.commands.generate import Generate
from paged_jax.commands.models import Fetch, Models
from paged_jax.commands.plot import Plot
from paged_jax.commands.run import Run
from paged_jax.commands.traces import Diff, Replay
from paged_jax.flags import known_flags

STATUS_USAGE, STATUS_INTERRUPTED, STATUS_BROKEN_PIPE = 2, 130, 141

BENCH_KERNELS = "bench-kernels"
"""Not one of COMMANDS: what follows it goes to `pallas_kernels.bench`, which also runs without this package."""
COMMANDS: dict[str, type[Command]] = {
    "generate": Generate,
    "run": Run,
    "plot": Plot,
    "replay": Replay,
    "diff": Diff,
    "buckets": Buckets,
    "models": Models,
    "fetch": Fetch,
    "bench-scheduler": BenchScheduler,
    "calibrate": Calibrate,
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
        _fail(sentence_of(error), STATUS_ERROR)
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
    if hasattr(parsed, "overrides"):  # they may also follow flags
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

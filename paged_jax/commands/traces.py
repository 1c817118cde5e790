"""`paged-jax replay` and `paged-jax diff`."""

import sys
from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro

from paged_jax.commands import PROGRAM, STATUS_ERROR, UsageError


@dataclass(frozen=True)
class Replay:
    """Run a recorded run again, without its model, and compare every decision.

    A run records itself when its engine has a trace_file. Without overrides all of it must come out the same;
    the first event that does not is shown, and the exit status is 1. With overrides the same requests are served
    under other settings, each with the tokens that it generated, on a clock on which every step takes the median
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

"""`paged-jax run`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from paged_jax.commands import PROGRAM, STATUS_ERROR, sentence_of


@dataclass(frozen=True)
class Run:
    """Run an experiment file, or all of a directory; write tables and figures.

    A run that was stopped goes on where it was: trials that the output directory holds are not repeated.
    Of a directory every *.yaml file is checked first, and then run, in the order of their names; one that fails while
    it runs does not stop the others, and at the end all numbers that were compared with published ones are shown
    together. Values in square brackets need quotes in some shells.

    examples:
        paged-jax run configs/smoke.yaml
        paged-jax run configs/block_size.yaml repeats=5 sweep.engine.block_size=[8,16,32]
        paged-jax run configs/block_size.yaml engine.max_num_seqs=8 --output-dir results/eight
        paged-jax run configs/paper
    """

    needs: ClassVar[str] = "FILE"

    file: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FILE")]
    """The experiment, a YAML file, or a directory of such files."""
    overrides: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="[KEY=VALUE ...]", help_behavior_hint=""),
    ] = ()
    """Changes to the file, or to every file: a dotted key and a YAML value."""
    output_dir: Annotated[str | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = None
    """Where results are kept; unset, results/ and the experiment's name. Of a directory each has its name below it."""
    fresh: tyro.conf.FlagCreatePairsOff[bool] = False
    """Throw away what an earlier run left in the output directory, once this one can begin."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Run the missing trials and print the tables."""
        if Path(self.file).is_dir():
            self._run_directory()
            return
        from paged_jax.experiments.config import load_experiment

        config = load_experiment(self.file, self.overrides)
        from paged_jax.experiments.runner import (
            run_experiment,
        )  # pandas: a second that an error need not wait for

        print(run_experiment(config, self.output_dir, fresh=self.fresh).text, end="")

    def _run_directory(self) -> None:
        from paged_jax.experiments.run_directory import combined_text, load_directory, run_directory

        experiments = load_directory(self.file, self.overrides)
        comparisons, failed = [], []
        outcomes = run_directory(experiments, self.output_dir, fresh=self.fresh)
        for k, path in enumerate(experiments, start=1):
            print(f"[{k}/{len(experiments)}] {path}", file=sys.stderr)
            outcome = next(outcomes)
            print(outcome.text, end="\n" if outcome.text else "", flush=True)
            if outcome.comparison is not None:
                comparisons.append(outcome.comparison)
            if outcome.error is not None:
                if self.debug:
                    raise outcome.error
                failed.append(str(path))
                print(f"{PROGRAM}: error: {path}: {sentence_of(outcome.error)}", file=sys.stderr)
        print(combined_text(comparisons), end="")
        if failed:
            words = f"{len(failed)} of {len(experiments)} experiments failed: {', '.join(failed)}"
            print(f"{PROGRAM}: error: {words}", file=sys.stderr)
            sys.exit(STATUS_ERROR)

"""`paged-jax run`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import tyro


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

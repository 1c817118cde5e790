"""`paged-jax buckets`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from paged_jax.commands import UsageError


@dataclass(frozen=True)
class Buckets:
    """Find the padded batch sizes that waste least for a number of compiled programs.

    Takes the steps of recorded runs, or simulates the first setting of an experiment, with all its seeds. The table
    shows the engine's default, powers of two, and the best sets for 1 to 12 programs; a set is given to an engine as
    token_buckets. Steps are taken as they were: with arrivals over time, other buckets change when steps happen, and
    with it a little what they hold.

    examples:
        paged-jax buckets run.jsonl
        paged-jax buckets configs/bucket_study.yaml --figure results/buckets.pdf
        paged-jax buckets configs/bucket_study.yaml --budget 6 --minimise seconds
    """

    needs: ClassVar[str] = "FILE"

    files: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="FILE [FILE ...]")]
    """What trace_file has recorded, or experiments (*.yaml) with the simulated executor; their steps are pooled."""
    budget: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Print only the best set of N programs, as an experiment file takes it."""
    minimise: Literal["tokens", "seconds"] = "tokens"
    """Tokens of padding, or the time that they take on the device of a simulated experiment."""
    figure: Annotated[str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """Draw padding against the number of programs there, as PDF and PNG."""
    debug: tyro.conf.FlagCreatePairsOff[bool] = False
    """Show the traceback of an error."""

    def __call__(self) -> None:
        """Search and print."""
        if self.budget is not None and self.budget < 1:
            raise UsageError(f"--budget counts compiled programs, 1 or more, got {self.budget}")
        from paged_jax.experiments import bucket_study

        study = bucket_study.read_study(self.files)
        by_time = self.minimise == "seconds"
        sets = bucket_study.candidates(study, by_time=by_time)
        if self.budget is None:
            print(bucket_study.study_table(study, sets).terminal())
        else:
            best = bucket_study.best_sets(study, self.budget, by_time=by_time)[-1]
            padding = study.histogram.padding_fraction(best)
            print(f"engine:\n  token_buckets: {bucket_study.as_yaml(best)}  # {padding:.2%} padding")
        if self.figure is not None:
            for file in bucket_study.write_figure(study, sets, Path(self.figure)):
                print(file)
